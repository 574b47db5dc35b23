//! `remoca-lab`: builds guest images and runs jobs in guests, by hand.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use remoca_lab::{Disk, DiskSource, GuestConfig, Image, Lab, Recipe, program};

/// Programs that run in guests, with their packages.
const GUEST_PROGRAMS: [(&str, &str); 3] =
    [("remoca-lab", "remoca-lab-guest"), ("remoca-lab", "remoca-workload"), ("remoca-agent", "remoca-agent")];

#[derive(Parser)]
#[command(version, about = "Builds guest images and runs jobs in guests")]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Build the guest image, if it is not in the cache
    Image {
        #[arg(long, value_enum, default_value = "debian12")]
        system: System,
        /// Build it again, with the packages of today
        #[arg(long)]
        rebuild: bool,
    },
    /// Build the programs that run in guests, if anything has changed
    Programs,
    /// Boot a guest, run a shell command in it and exit with its status
    Run(RunArguments),
}

#[derive(clap::Args)]
struct RunArguments {
    #[arg(long, value_enum, default_value = "debian12")]
    system: System,
    /// Guest memory in MiB
    #[arg(long, default_value_t = 256)]
    memory: u32,
    /// A disk: file=PATH[,serial=NAME][,readonly][,snapshot], or vhost-user=SOCKET[,reconnect]
    #[arg(long = "disk", value_parser = parse_disk)]
    disks: Vec<Disk>,
    /// A file to find in the guest's /payload
    #[arg(long = "payload")]
    payload: Vec<PathBuf>,
    /// An argument for the guest's kernel
    #[arg(long = "kernel-arg")]
    kernel_args: Vec<String>,
    /// Seconds the command may take
    #[arg(long, default_value_t = 300)]
    limit: u64,
    /// The shell command
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// System of a guest.
#[derive(Clone, Copy, clap::ValueEnum)]
enum System {
    /// Debian 12, Linux 6.1
    Debian12,
    /// The same with systemd as its init
    Debian12Systemd,
    /// Debian 13, Linux 6.12
    Debian13,
}

impl System {
    fn recipe(self) -> Recipe {
        match self {
            System::Debian12 => Recipe::bookworm(),
            System::Debian12Systemd => Recipe::bookworm_with_systemd(),
            System::Debian13 => Recipe::trixie(),
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let lab = Lab::open()?;
    match Arguments::parse().command {
        Action::Image { system, rebuild } => {
            let recipe = system.recipe();
            let image = if rebuild { Image::rebuild(&lab, &recipe)? } else { Image::ensure(&lab, &recipe)? };
            println!("{}", image.root().display());
            Ok(ExitCode::SUCCESS)
        }
        Action::Programs => {
            for (package, name) in GUEST_PROGRAMS {
                println!("{}", program::build(&lab, package, name)?.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Action::Run(arguments) => run(&lab, arguments),
    }
}

fn run(lab: &Lab, arguments: RunArguments) -> anyhow::Result<ExitCode> {
    let mut config = GuestConfig::new("run", arguments.memory);
    config.recipe = arguments.system.recipe();
    config.disks = arguments.disks;
    config.kernel_args = arguments.kernel_args;
    for path in arguments.payload {
        let name = path.file_name().and_then(|name| name.to_str()).context("a payload file needs a name")?;
        config = config.payload(name, &path);
    }
    let mut guest = config.boot(lab)?;
    eprintln!("lab: ready after {:.1} s, logs in {}", guest.age().as_secs_f64(), guest.folder().display());
    let limit = Duration::from_secs(arguments.limit);
    let command = arguments.command.join(" ");
    let mut job = guest.start(&command)?;
    while let Some(line) = guest.next_line(&mut job, limit)? {
        println!("{line}");
    }
    let output = guest.wait(&job, limit)?;
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    guest.shut_down()?;
    Ok(u8::try_from(output.status).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn parse_disk(text: &str) -> anyhow::Result<Disk> {
    let mut parts = text.split(',');
    let mut disk = match parts.next().and_then(|first| first.split_once('=')) {
        Some(("file", path)) => Disk::file("data", path.as_ref()),
        Some(("vhost-user", socket)) => Disk::vhost_user("data", socket.as_ref()),
        _ => bail!("a disk starts with file=PATH or vhost-user=SOCKET"),
    };
    for part in parts {
        match (part.split_once('='), &mut disk.source) {
            (Some(("serial", name)), _) => disk.serial = name.to_owned(),
            (None, DiskSource::File { read_only, .. }) if part == "readonly" => *read_only = true,
            (None, DiskSource::File { snapshot, .. }) if part == "snapshot" => *snapshot = true,
            (None, DiskSource::VhostUser { reconnect, .. }) if part == "reconnect" => *reconnect = true,
            _ => bail!("'{part}' is no option of this disk"),
        }
    }
    Ok(disk)
}
