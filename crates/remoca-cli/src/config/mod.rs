//! `remoca config`: checks, shows and converts the configuration.

pub mod check;
mod convert;
pub mod manual;
pub mod show;

use crate::settings::Folder;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Check, show or convert the configuration.
///
/// /etc/remoca/remoca.toml has a table [vms] with what all VMs of this host share, a table [serve] for the memory server, and a table
/// [host] for the daemon that divides memory. /etc/remoca/vms/NAME.toml has the settings and disks of one VM. The keys are the flags of
/// `remoca disk`, `remoca serve` and `remoca host` without their dashes. Both files may have a table [memory]: the limits that
/// `remoca host` keeps.
#[derive(Args, Debug)]
pub struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand, Debug)]
enum ConfigCommand {
    /// Report every mistake in the files of these VMs and of the host
    Check {
        /// Names of VMs [default: all]
        #[arg(value_name = "NAME")]
        names: Vec<String>,

        #[command(flatten)]
        folder: Folder,
    },
    /// Show the settings of a VM, in the form of a file: of its process if it runs, else those that it would start with
    Show {
        /// Name of the VM
        #[arg(value_name = "NAME")]
        name: String,

        /// End each line with where the value comes from: a flag, `remoca set`, a line of a file, or the default
        #[arg(long)]
        origin: bool,

        #[command(flatten)]
        folder: Folder,
    },
    /// Turn a file of arguments (NAME.env, as before version 0.2) into a file of the configuration
    ///
    /// serve.env becomes the table [serve] of remoca.toml, each other file vms/NAME.toml. The old file stays. If it has anything that
    /// a file of the configuration cannot express, that is named and nothing is changed.
    Convert {
        /// The file, such as /etc/remoca/web1.env
        #[arg(value_name = "FILE")]
        file: PathBuf,

        #[command(flatten)]
        folder: Folder,
    },
}

/// Runs the subcommand.
///
/// # Errors
/// If there are mistakes in the configuration, or a file cannot be read or written.
pub fn run(args: &ConfigArgs) -> Result<()> {
    match &args.command {
        ConfigCommand::Check { names, folder } => check::run(names, &folder.config),
        ConfigCommand::Show { name, origin, folder } => show::run(name, &folder.config, *origin),
        ConfigCommand::Convert { file, folder } => convert::run(file, &folder.config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::file::{HOST, MEMORY, SERVE, VMS};

    #[test]
    fn the_help_names_every_table() {
        let command = ConfigArgs::augment_args(clap::Command::new("config"));
        let about = command.get_long_about().unwrap().to_string();
        for table in [VMS, SERVE, HOST, MEMORY] {
            assert!(about.contains(&format!("[{table}]")), "{table}: {about}");
        }
    }
}
