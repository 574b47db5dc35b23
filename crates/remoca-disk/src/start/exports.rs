//! `--nbd`: where NBD clients connect, and what they are offered.

use super::wrong::WrongOptions;
use anyhow::{Context, Result, anyhow, bail};
use remoca_frontend::device::Frontend;
use remoca_frontend::nbd::{EXPORT_NAME_LEN_MAX, Export, ExportGeometry, Listener, NbdExport, NbdServer, Target};
use remoca_io::address::Endpoint;
use remoca_io::descriptor_store;
use remoca_protocol::guests::NbdClient;
use remoca_protocol::port::{PORT_BYTES, PORT_SERIAL};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::str::FromStr;

/// An address at which NBD clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Endpoint(Endpoint),
    /// Sockets that systemd passed.
    Systemd,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "systemd" => Ok(Self::Systemd),
            _ if text.starts_with("unix:") || text.starts_with("tcp:") => {
                Endpoint::of_process(text).map(Self::Endpoint)
            }
            _ => Err(format!("`{text}`: NBD clients come from unix:PATH, tcp:HOST:PORT or systemd")),
        }
    }
}

impl Address {
    /// Returns the path of the socket, or `None` if the address is not a path.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Endpoint(Endpoint::Unix(path)) => Some(path),
            Self::Endpoint(Endpoint::Tcp(_) | Endpoint::Local(_)) | Self::Systemd => None,
        }
    }
}

/// Checks that no descriptor that was passed to this process is asked for twice.
///
/// # Errors
/// If a descriptor would have two owners.
pub fn check_activation(addresses: &[Address], fd: Option<RawFd>) -> Result<()> {
    let count = addresses.iter().filter(|address| matches!(address, Address::Systemd)).count();
    if count > 1 || (count == 1 && fd.is_some()) {
        bail!("--nbd systemd takes all sockets that systemd passed: say it once, and leave out --fd");
    }
    Ok(())
}

/// The exports that are offered, collected while the disks are opened.
#[derive(Default)]
pub struct Exports {
    exports: Vec<Export>,
    /// Clients of a former program of this process.
    kept: Vec<(Target, NbdClient<OwnedFd>)>,
}

impl Exports {
    /// Adds an export, with the clients that it had in a former program. Returns the frontend of its device.
    ///
    /// # Errors
    /// If the export cannot have this name, or the system has no descriptors left.
    pub fn add(
        &mut self,
        name: &str,
        target: Target,
        geometry: ExportGeometry,
        kept: Vec<NbdClient<OwnedFd>>,
    ) -> Result<Frontend> {
        self.add_made_by(NbdExport::new, name, target, geometry, kept)
    }

    fn add_made_by(
        &mut self,
        make: impl FnOnce(ExportGeometry) -> io::Result<NbdExport>,
        name: &str,
        target: Target,
        geometry: ExportGeometry,
        kept: Vec<NbdClient<OwnedFd>>,
    ) -> Result<Frontend> {
        if name.is_empty() || name.len() > EXPORT_NAME_LEN_MAX {
            let error = anyhow!("`{name}` cannot be the name of an export: it has 1 to {EXPORT_NAME_LEN_MAX} bytes");
            return Err(error.context(WrongOptions));
        }
        let frontend = Frontend::Nbd(make(geometry).context("no descriptors")?);
        self.exports.push(Export { name: name.to_owned(), target, geometry });
        self.kept.extend(kept.into_iter().map(|client| (target, client)));
        Ok(frontend)
    }

    /// Adds the eviction port, and returns its frontend.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn add_port(&mut self, kept: Vec<NbdClient<OwnedFd>>) -> Result<Frontend> {
        self.add(PORT_SERIAL, Target::Port, ExportGeometry::of_port(PORT_BYTES), kept)
    }

    /// Listens for clients at the `inherited` listeners, or at all addresses if there are none. Members of `group` may
    /// connect to Unix sockets. Returns `None` if there are no addresses.
    ///
    /// # Errors
    /// If listening at an address fails.
    pub fn serve(
        self,
        addresses: &[Address],
        group: Option<u32>,
        inherited: Vec<Listener>,
    ) -> Result<Option<NbdServer>> {
        if addresses.is_empty() {
            return Ok(None);
        }
        let mut listeners = inherited;
        let missing = if listeners.is_empty() { addresses } else { &[] };
        for address in missing {
            match address {
                Address::Endpoint(endpoint) => listeners.push(Listener::bind(endpoint, group)?),
                Address::Systemd => listeners.extend(passed_by_systemd()?),
            }
        }
        let mut server = NbdServer::new(self.exports, listeners).context("cannot watch the NBD sockets")?;
        for (target, client) in self.kept {
            if let Err(error) = server.adopt(target, client) {
                tracing::warn!("an NBD client of the former program is disconnected: {error}");
            }
        }
        Ok(Some(server))
    }
}

fn passed_by_systemd() -> Result<Vec<Listener>> {
    let descriptors = descriptor_store::listening();
    if descriptors.is_empty() {
        let text =
            "--nbd systemd: no socket was passed. Start this by a .socket unit, or say unix:PATH or tcp:HOST:PORT";
        return Err(anyhow!(text).context(WrongOptions));
    }
    descriptors
        .into_iter()
        .map(|number| {
            // SAFETY: whoever started us passed it for this use alone; `check_activation` saw to it that this runs once, and
            // that --fd does not name it.
            let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
            Listener::from_descriptor(descriptor).with_context(|| format!("--nbd systemd: descriptor {number}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next disk has the number of the one that is left out, and its clients must not get another's.
    #[test]
    fn an_export_for_which_there_is_no_descriptor_is_not_offered() {
        let mut exports = Exports::default();
        let geometry = ExportGeometry::of_disk(1 << 20);
        // Not by a limit: that is one of the whole process, and a program that is started for it has copies of what
        // other tests have locked, for a moment.
        let none_left = |_: ExportGeometry| Err(io::Error::from_raw_os_error(libc::EMFILE));
        assert!(exports.add_made_by(none_left, "first", Target::Disk(0), geometry, Vec::new()).is_err());
        exports.add("second", Target::Disk(0), geometry, Vec::new()).unwrap();
        let names: Vec<_> = exports.exports.iter().map(|export| export.name.as_str()).collect();
        assert_eq!(names, ["second"]);
    }
}
