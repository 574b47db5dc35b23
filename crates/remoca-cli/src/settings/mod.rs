//! The configuration: what files in `/etc/remoca` say, below the flags of the command line.
//!
//! There is one list of settings: the flags themselves. A key of a file is a flag without its dashes, and its value is checked by
//! the flag's own parser (`schema`). `file` reads a file and reports every problem with its line, `layers` merges files and
//! flags, `edit` changes a VM's file, `kept` is what a process keeps of its files, and `changes` what a reload changed. The settings of a disk are a list of their own (`fields`). Decision 0032.

pub mod changes;
pub mod edit;
pub mod env_file;
pub mod fields;
pub mod file;
pub mod kept;
pub mod layers;
pub mod schema;

use clap::Args;
use file::{Problem, Settings, Text, VMS};
use schema::Schema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// The option that names the folder of the configuration.
#[derive(Args, Clone, Debug)]
pub struct Folder {
    /// Folder of the configuration: remoca.toml for the host, vms/NAME.toml for each VM
    #[arg(long, value_name = "FOLDER", env = "REMOCA_CONFIG", hide_env = true, default_value = "/etc/remoca")]
    pub config: PathBuf,
}

/// The files that configure one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    pub vm: Option<Text>,
    pub host: Option<Text>,
}

/// Files that cannot be used, with all of their problems.
#[derive(Clone, Debug)]
pub struct Unusable(pub Vec<Problem>);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The first one in the first line, which is all that an upgrade reports.
        let problems: Vec<_> = self.0.iter().map(Problem::to_string).collect();
        write!(f, "the configuration cannot be used: {}", problems.join("\n  "))
    }
}

impl std::error::Error for Unusable {}

/// Returns the path of the host's file in a folder of the configuration.
pub fn host_path(folder: &Path) -> PathBuf {
    folder.join("remoca.toml")
}

/// Returns the path of a VM's file in a folder of the configuration.
pub fn vm_path(folder: &Path, vm: &str) -> PathBuf {
    folder.join("vms").join(format!("{vm}.toml"))
}

impl Files {
    /// Reads the files of the VM `vm`, or only the host's file if there is no name.
    ///
    /// # Errors
    /// If one of them is there and cannot be read.
    pub fn read(folder: &Path, vm: Option<&str>) -> Result<Self, Unusable> {
        let read = |path: &Path| Text::read(path).map_err(|problem| Unusable(vec![problem]));
        let vm = vm.map(|vm| read(&vm_path(folder, vm))).transpose()?.flatten();
        Ok(Self { vm, host: read(&host_path(folder))? })
    }

    /// Returns the settings of a VM process, the VM's before the host's. `schema` makes the keys.
    ///
    /// # Errors
    /// If there is any problem in the files, as far as they are about VMs.
    pub fn settings_of_vm(&self, schema: fn() -> Schema) -> Result<[Settings; 2], Unusable> {
        let (vm, mut problems) = self.vm.as_ref().map(|text| text.vm(&schema().of_vm())).unwrap_or_default();
        let (host, of_host) = self.host.as_ref().map(|text| text.host(VMS, &schema())).unwrap_or_default();
        problems.extend(of_host);
        if problems.is_empty() { Ok([vm, host]) } else { Err(Unusable(problems)) }
    }
}
