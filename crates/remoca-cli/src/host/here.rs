//! This host: its VM processes, their files, and the daemon that runs.

use super::table;
use crate::form::Form;
use crate::memory::KnownFiles;
use crate::runtime::{self, KnownSockets};
use anyhow::Result;
use remoca_host::daemon::Surroundings;
use remoca_host::guest::Address;
use remoca_host::limits::Limits;
use remoca_host::record::Paths;
use remoca_host::socket;
use remoca_protocol::host::HostReport;
use std::io::{self, Write};
use std::path::PathBuf;

/// Asks the daemon that runs.
pub(super) fn asked(paths: &Paths) -> Result<HostReport> {
    socket::read(&paths.socket).map_err(|error| {
        let hint = "is it running? `systemctl start remoca-host` starts it; `remoca host --once` looks without one";
        runtime::explain_unreachable(&paths.socket, error, "no daemon of this host answers", hint)
    })
}

/// This host.
pub(super) struct Host {
    pub(super) directory: PathBuf,
    pub(super) folder: PathBuf,
    /// `None`: nothing is printed.
    pub(super) output: Option<Form>,
    pub(super) is_first: bool,
    /// Those that were there before count as silent, and not as gone, while the directory cannot be read.
    pub(super) known: KnownSockets,
    pub(super) files: KnownFiles,
}

impl Surroundings for Host {
    fn vms(&self) -> Vec<(String, PathBuf)> {
        let name = |path: PathBuf| Some((path.file_stem()?.to_str()?.to_owned(), path));
        let vms: Vec<(String, PathBuf)> = self.known.read(&self.directory).into_iter().filter_map(name).collect();
        self.files.keep(&self.folder, vms.iter().map(|(vm, _)| vm.as_str()));
        vms
    }

    fn limits(&self, vm: &str) -> Result<Limits, String> {
        self.files.limits_of(vm, &self.folder)
    }

    fn monitor(&self, vm: &str) -> Result<Option<Address>, String> {
        self.files.monitor_of(vm, &self.folder)
    }

    fn show(&mut self, report: &HostReport) -> io::Result<()> {
        let text = match self.output {
            None => return Ok(()),
            Some(Form::Json) => report.line().map(|line| String::from_utf8_lossy(&line).into_owned())?,
            Some(Form::Table) if self.is_first => table::text(report),
            Some(Form::Table) => format!("\n{}", table::text(report)),
        };
        self.is_first = false;
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}
