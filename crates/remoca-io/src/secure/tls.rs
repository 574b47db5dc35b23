//! The configuration of TLS: the keys that the two sides have and expect, and no version older than 1.3.

use super::channel::Channel;
use aws_lc_rs::hkdf;
use remoca_protocol::control::Secret;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::aws_lc_rs::{default_provider, kx_group, sign};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    ServerConnection, SignatureScheme,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// The purpose of the derived keys. The same secret gives different keys for other purposes.
const PURPOSE: &[u8] = b"remoca migration 1";
/// PKCS #8 encoding of an Ed25519 key, up to the key's 32 bytes (RFC 8410).
const PKCS8_PREFIX: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// The side of a connection. Each side has a key of its own, so that messages of one side cannot be reflected to it as
/// the other's.
#[derive(Clone, Copy)]
enum Role {
    Source,
    Target,
}

/// The side that connects.
#[derive(Clone)]
pub struct Connector(Arc<ClientConfig>);

/// The side that accepts the connection.
#[derive(Clone)]
pub struct Acceptor(Arc<ServerConfig>);

impl Connector {
    /// # Errors
    /// If the library refuses the keys, which is not expected.
    pub fn new(secret: &Secret) -> io::Result<Self> {
        Self::with(secret, secret)
    }

    /// Creates a connector with the key of the secret `own`, which expects the key of the secret `expected`.
    fn with(own: &Secret, expected: &Secret) -> io::Result<Self> {
        let build = || -> Result<ClientConfig, Error> {
            let own = Arc::new(key_of(own, Role::Source)?);
            let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Pinned::new(expected, Role::Target)?))
                .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
            config.enable_sni = false;
            config.resumption = Resumption::disabled();
            Ok(config)
        };
        Ok(Self(Arc::new(build().map_err(io::Error::other)?)))
    }

    /// Establishes a connection whose other side has the secret. Waits for the handshake until `deadline`.
    ///
    /// # Errors
    /// If the other side has a different secret or none, does not answer in time, or closes the connection. The text
    /// says which.
    pub fn connect(&self, socket: OwnedFd, deadline: Instant) -> io::Result<Channel> {
        // There are no names in this protocol: only the key is compared.
        let nobody = ServerName::try_from("remoca.invalid").map_err(io::Error::other)?;
        let connection = ClientConnection::new(Arc::clone(&self.0), nobody).map_err(io::Error::other)?;
        Channel::establish(connection.into(), socket, deadline)
    }
}

impl Acceptor {
    /// # Errors
    /// As [`Connector::new`].
    pub fn new(secret: &Secret) -> io::Result<Self> {
        let build = || -> Result<ServerConfig, Error> {
            let own = Arc::new(key_of(secret, Role::Target)?);
            let mut config = ServerConfig::builder_with_provider(Arc::new(provider()))
                .with_protocol_versions(&[&TLS13])?
                .with_client_cert_verifier(Arc::new(Pinned::new(secret, Role::Source)?))
                .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
            // No session is resumed: each connection has to prove itself, and overheard bytes cannot be used again.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            Ok(config)
        };
        Ok(Self(Arc::new(build().map_err(io::Error::other)?)))
    }

    /// Establishes a connection whose other side has the secret. Waits for its proof until `deadline`, and sends only
    /// handshake messages before.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn accept(&self, socket: OwnedFd, deadline: Instant) -> io::Result<Channel> {
        let connection = ServerConnection::new(Arc::clone(&self.0)).map_err(io::Error::other)?;
        Channel::establish(connection.into(), socket, deadline)
    }
}

fn provider() -> CryptoProvider {
    CryptoProvider { kx_groups: vec![kx_group::X25519MLKEM768], ..default_provider() }
}

fn key_of(secret: &Secret, role: Role) -> Result<CertifiedKey, Error> {
    let info: [&[u8]; 1] = match role {
        Role::Source => [b"source"],
        Role::Target => [b"target"],
    };
    let mut key = PKCS8_PREFIX.to_vec();
    key.resize(PKCS8_PREFIX.len() + 32, 0);
    let pseudo_random = hkdf::Salt::new(hkdf::HKDF_SHA256, PURPOSE).extract(secret.bytes());
    let expanded = pseudo_random.expand(&info, hkdf::HKDF_SHA256);
    expanded
        .and_then(|okm| okm.fill(&mut key[PKCS8_PREFIX.len()..]))
        .map_err(|_| Error::General("no key can be made from the secret".into()))?;
    let key = sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key))?;
    let public = key.public_key().ok_or_else(|| Error::General("a key without its public half".into()))?;
    Ok(CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key))
}

/// The only key that the other side may show.
#[derive(Debug)]
struct Pinned {
    key: CertificateDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pinned {
    fn new(secret: &Secret, role: Role) -> Result<Self, Error> {
        let key = key_of(secret, role)?.end_entity_cert()?.clone().into_owned();
        Ok(Self { key, algorithms: default_provider().signature_verification_algorithms })
    }

    fn check(&self, shown: &CertificateDer<'_>, more: &[CertificateDer<'_>]) -> Result<(), Error> {
        match *shown == self.key && more.is_empty() {
            true => Ok(()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }
}

/// How both verifiers check the other side's signature: TLS 1.3 only, and made with a raw key.
macro_rules! judge_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _key: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.3 only".into()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let key = SubjectPublicKeyInfoDer::from(key.as_ref());
            verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(shown, more).map(|()| ServerCertVerified::assertion())
    }

    judge_signatures!();
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(shown, more).map(|()| ClientCertVerified::assertion())
    }

    judge_signatures!();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn secret(number: u8) -> Secret {
        format!("{:064x}", u32::from(number) + 1).parse().unwrap()
    }

    fn deadline() -> Instant {
        Instant::now() + PATIENCE
    }

    /// Connects both sides, and returns what each makes of the other.
    fn meet(source: &Secret, target: &Secret) -> (io::Result<Channel>, io::Result<Channel>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let acceptor = Acceptor::new(target).unwrap();
        let accepting = thread::spawn(move || acceptor.accept(theirs.into(), deadline()));
        let connected = Connector::new(source).unwrap().connect(ours.into(), deadline());
        (connected, accepting.join().unwrap())
    }

    #[test]
    fn who_has_the_secret_is_heard_both_ways() {
        let (connected, accepted) = meet(&secret(1), &secret(1));
        let (mut from_target, mut to_target) = connected.unwrap().split().unwrap();
        let (mut from_source, mut to_source) = accepted.unwrap().split().unwrap();
        let long: Vec<u8> = (0..3_000_000_u32).map(|at| at.to_le_bytes()[at as usize % 3]).collect();
        let sent = long.clone();
        let sending = thread::spawn(move || {
            to_target.write_all(&sent).unwrap();
            to_target.finish().unwrap();
        });
        let answering = thread::spawn(move || to_source.write_all(b"meanwhile").unwrap());
        let mut got = Vec::new();
        from_source.read_to_end(&mut got).unwrap();
        assert!(got == long, "{} of {} bytes", got.len(), long.len());
        let mut answer = [0; 9];
        from_target.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"meanwhile");
        sending.join().unwrap();
        answering.join().unwrap();
    }

    #[test]
    fn who_has_another_secret_is_nobody() {
        let (connected, accepted) = meet(&secret(1), &secret(2));
        assert!(connected.map(drop).unwrap_err().to_string().contains("another key"));
        assert!(accepted.is_err());
    }

    #[test]
    fn who_takes_any_key_of_the_target_is_refused_by_it() {
        // Any client sees the target's public key, and may ignore that it does not know it.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let acceptor = Acceptor::new(&secret(1)).unwrap();
        let accepting = thread::spawn(move || acceptor.accept(theirs.into(), deadline()));
        let connected = Connector::with(&secret(2), &secret(1)).unwrap().connect(ours.into(), deadline());
        assert!(accepting.join().unwrap().is_err());
        let mut said = Vec::new();
        if let Ok(channel) = connected {
            assert!(channel.split().unwrap().0.read_to_end(&mut said).is_err() && said.is_empty());
        }
    }

    #[test]
    fn neither_side_can_play_the_other() {
        let secret = secret(3);
        let keys = [Role::Source, Role::Target].map(|role| key_of(&secret, role).unwrap().cert[0].clone());
        assert_ne!(keys[0], keys[1]);
        // Each hears its own words come back.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mirror = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = (&theirs).read(&mut bytes) {
                let _ = (&theirs).write_all(&bytes[..count]);
            }
        });
        assert!(Connector::new(&secret).unwrap().connect(ours.into(), deadline()).is_err());
        mirror.join().unwrap();
    }

    /// Connects both sides through this test, and returns what the source said. One byte of it may be changed on the way.
    fn overhear(secret: &Secret, changed: Option<usize>) -> (Vec<u8>, io::Result<Channel>) {
        let [(ours, source_end), (theirs, target_end)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let (acceptor, connector) = (Acceptor::new(secret).unwrap(), Connector::new(secret).unwrap());
        let accepting = thread::spawn(move || acceptor.accept(theirs.into(), deadline()));
        let connecting = thread::spawn(move || connector.connect(ours.into(), deadline()));
        let (tell, heard) = mpsc::channel();
        let (mut from_source, mut to_target) = (source_end.try_clone().unwrap(), target_end.try_clone().unwrap());
        let there = thread::spawn(move || {
            let (mut bytes, mut at) = ([0; 4096], 0);
            while let Ok(count @ 1..) = from_source.read(&mut bytes) {
                let _ = tell.send(bytes[..count].to_vec());
                if let Some(byte) = changed.and_then(|changed| bytes[..count].get_mut(changed.checked_sub(at)?)) {
                    *byte ^= 1;
                }
                at += count;
                let _ = to_target.write_all(&bytes[..count]);
            }
            let _ = to_target.shutdown(std::net::Shutdown::Write);
        });
        let back = thread::spawn(move || {
            let _ = io::copy(&mut &target_end, &mut &source_end);
            let _ = source_end.shutdown(std::net::Shutdown::Both);
        });
        let connected = connecting.join().unwrap();
        let accepted = if changed.is_none() {
            let accepted = accepting.join().unwrap();
            drop(connected);
            accepted
        } else {
            // It ends, and all that it said is on its way.
            drop(connected);
            accepting.join().unwrap()
        };
        // Whether or not the target was satisfied: its end is closed now, so both relays end.
        if let Ok(channel) = &accepted {
            let _ = channel.shut_down();
        }
        there.join().unwrap();
        back.join().unwrap();
        (heard.iter().flatten().collect(), accepted)
    }

    #[test]
    fn what_was_heard_on_the_way_is_of_no_use_and_nothing_can_be_changed() {
        let secret = secret(4);
        let (heard, accepted) = overhear(&secret, None);
        assert!(accepted.is_ok());
        // The same bytes once more.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let acceptor = Acceptor::new(&secret).unwrap();
        let accepting = thread::spawn(move || acceptor.accept(theirs.into(), deadline()));
        (&ours).write_all(&heard).unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = (&ours).read_to_end(&mut Vec::new());
        assert!(accepting.join().unwrap().is_err(), "a replay proves nothing");
        for changed in (0..heard.len()).step_by(97) {
            // The last byte of the first record's version is ignored by design.
            let (_, accepted) = overhear(&secret, Some(changed));
            assert!(accepted.is_err() || changed <= 2, "byte {changed} of {} was changed", heard.len());
        }
    }
}
