//! The socket at which a process waits for one that hands its disks over. Whoever connects has five seconds to prove
//! that it has the key. Until then it costs a thread and a few kilobytes, and nothing that it sends reaches the driver.

use super::peer::{Peer, SILENCE_MAX};
use remoca_io::address::Endpoint;
use remoca_io::secure::Acceptor;
use remoca_io::wake::{Wake, raise};
use remoca_protocol::control::Secret;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of connections that have not proved that they have the key. A further one displaces one of them.
const STRANGERS_MAX: usize = 32;
/// Maximum number of connections with the key that wait for the driver.
const PEERS_MAX: usize = 4;

/// The listening side, owned by the driver.
pub struct Incoming {
    pub endpoint: Endpoint,
    peers: Receiver<Peer>,
}

impl Incoming {
    /// Listens at `endpoint` for a process that has the secret.
    ///
    /// # Errors
    /// If listening at the address fails, or the system has no threads left.
    pub fn listen(endpoint: Endpoint, secret: &Secret, wake: &Wake) -> io::Result<Self> {
        let listener = endpoint.listen()?;
        let (found, peers) = sync_channel(PEERS_MAX);
        let door = Door { acceptor: Acceptor::new(secret)?, found, wake: Arc::clone(wake), guests: Mutex::default() };
        let door = Arc::new(door);
        std::thread::Builder::new().name("incoming".into()).spawn(move || {
            loop {
                // Out of descriptors or threads: the next connection may succeed.
                if listener.accept().and_then(|socket| let_in(&door, socket)).is_err() {
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        })?;
        Ok(Self { endpoint, peers })
    }

    /// Returns a listening side, and the sender that supplies its peers.
    #[cfg(feature = "testing")]
    pub(super) fn unattended(endpoint: Endpoint) -> (Self, SyncSender<Peer>) {
        let (found, peers) = sync_channel(PEERS_MAX);
        (Self { endpoint, peers }, found)
    }

    /// Returns the next connection whose other side has proved that it has the key, or `None` if there is none.
    pub fn take_peer(&mut self) -> Option<Peer> {
        self.peers.try_recv().ok()
    }
}

/// What the threads of the connections share.
struct Door {
    acceptor: Acceptor,
    found: SyncSender<Peer>,
    wake: Wake,
    guests: Mutex<Guests>,
}

#[derive(Default)]
struct Guests {
    strangers: Vec<Stranger>,
    next: u64,
    refused: u64,
}

/// A connection that has not proved yet that it has the key.
struct Stranger {
    number: u64,
    origin: Origin,
    socket: OwnedFd,
}

/// What the connections of one host have in common: its IPv4 address, or the network half of its IPv6 address. `None`
/// for a Unix socket.
type Origin = Option<[u8; 8]>;

fn origin(socket: OwnedFd) -> (OwnedFd, Origin) {
    let stream = TcpStream::from(socket);
    let origin = stream.peer_addr().ok().map(|address| {
        let address = match address.ip().to_canonical() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        let (network, host) = address.split_at(8);
        let half = if network == [0; 8] { host } else { network };
        half.try_into().unwrap_or_default()
    });
    (stream.into(), origin)
}

/// Returns the position of the connection that makes room, or `None` if there are none: the oldest of the origin that
/// has the most. A host thus cannot displace the connections of a host that has fewer.
fn least_welcome(origins: &[Origin]) -> Option<usize> {
    let share = |at: usize| origins.iter().filter(|origin| **origin == origins[at]).count();
    (0..origins.len()).rev().max_by_key(|at| share(*at))
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a refused connection. Logs the count each time it is a power of two.
    fn count_refused(&self, guests: &mut Guests, error: &io::Error) {
        guests.refused += 1;
        if guests.refused.is_power_of_two() {
            let refused = guests.refused;
            tracing::warn!("--incoming: {refused} connections had no key, or another one; the last: {error}");
        }
    }
}

fn let_in(door: &Arc<Door>, socket: OwnedFd) -> io::Result<()> {
    let (socket, origin) = origin(socket);
    let copy = socket.try_clone()?;
    let number = {
        let mut guests = door.lock();
        guests.next += 1;
        let number = guests.next;
        guests.strangers.push(Stranger { number, origin, socket: copy });
        if guests.strangers.len() > STRANGERS_MAX {
            let origins: Vec<_> = guests.strangers.iter().map(|stranger| stranger.origin).collect();
            if let Some(at) = least_welcome(&origins) {
                // Its thread sees the end of its connection, and ends.
                let _ = rustix::net::shutdown(&guests.strangers.remove(at).socket, rustix::net::Shutdown::Both);
            }
        }
        number
    };
    let shared = Arc::clone(door);
    let spawned = std::thread::Builder::new().name("incoming".into()).spawn(move || {
        let accepted = shared.acceptor.accept(socket, Instant::now() + SILENCE_MAX);
        {
            let mut guests = shared.lock();
            guests.strangers.retain(|stranger| stranger.number != number);
            if let Err(error) = &accepted {
                shared.count_refused(&mut guests, error);
            }
        }
        // If more of them wait than the driver handles, the last has to connect again.
        if let Ok(Ok(peer)) = accepted.map(|channel| Peer::over(channel, &shared.wake))
            && shared.found.try_send(peer).is_ok()
        {
            raise(&shared.wake);
        }
    });
    if spawned.is_err() {
        door.lock().strangers.retain(|stranger| stranger.number != number);
    }
    spawned.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::key;
    use remoca_io::secure::Connector;
    use remoca_io::wake::WakeUp;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_host_with_the_most_connections_makes_room() {
        let [a, b, c] = [1, 2, 3].map(|number| Some([number; 8]));
        assert_eq!(least_welcome(&[]), None);
        assert_eq!(least_welcome(&[b, a, a, c, a]), Some(1), "its oldest");
        assert_eq!(least_welcome(&[b, c]), Some(0));
        assert_eq!(least_welcome(&[None, a, a]), Some(1));
    }

    #[test]
    fn strangers_who_say_nothing_keep_nobody_out_and_have_no_place_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in");
        let (secret, wake) = (key::generate().unwrap(), WakeUp::new().unwrap());
        let mut incoming = Incoming::listen(Endpoint::Unix(path.clone()), &secret, wake.wake()).unwrap();
        let connect = || UnixStream::connect(&path).unwrap();
        let mut strangers: Vec<_> = (0..3 * STRANGERS_MAX).map(|_| connect()).collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        let channel = Connector::new(&secret).unwrap().connect(connect().into(), deadline).unwrap();
        while incoming.take_peer().is_none() {
            assert!(Instant::now() < deadline, "the one with the key is not heard of");
            std::thread::sleep(Duration::from_millis(5));
        }
        for stranger in &mut strangers {
            stranger.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut said = Vec::new();
            assert!(stranger.read_to_end(&mut said).is_ok() && said.len() < 64, "closed, with no more than an alert");
        }
        assert!(incoming.take_peer().is_none());
        drop(channel);
    }
}
