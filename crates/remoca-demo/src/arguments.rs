//! The command line.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, ensure};
use clap::Parser;

use crate::plan::{Plan, ServerKill};

/// Shows what remoca does: a guest with 256 MiB reads more than that from a slow disk, without the cache, with it, and with a part
/// of it as a local tier.
///
/// Exit code 0: nothing went wrong; 1: the guest saw an error or a wrong byte; 2: the demonstration could not be carried out.
#[derive(Clone, Debug, Parser)]
#[command(name = "remoca-demo", version)]
pub struct Arguments {
    /// A shorter run, about three minutes, with a smaller guest and file set; its figures say little
    #[arg(long)]
    pub quick: bool,

    /// Folder for the report and the logs [default: out/demo of the project]
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,

    /// Run nothing: only write report.html again from the report.json of an earlier run
    #[arg(long)]
    pub render: bool,

    /// Size of the file set in MiB [default: 768; quick: 256]
    #[arg(long, value_name = "MIB")]
    pub set: Option<u64>,

    /// Size of a record in KiB
    #[arg(long, value_name = "KIB", default_value_t = 96)]
    pub record: u64,

    /// Reads before the measured ones, in each run
    #[arg(long, value_name = "N")]
    pub warmup: Option<u64>,

    /// Measured reads, in each run
    #[arg(long, value_name = "N")]
    pub reads: Option<u64>,

    /// Seed of the choice of records
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Size of the cache in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub cache: u64,

    /// Part of the cache that is a local tier in the last act, in MiB; 0 leaves that act out [default: 128; quick: 32]
    #[arg(long, value_name = "MIB")]
    pub local: Option<u64>,

    /// Time that the disk takes for a read request, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 7)]
    pub delay: u64,

    /// Do not lock the memory server's memory, even where that is allowed
    #[arg(long)]
    pub no_lock: bool,
}

impl Arguments {
    pub(crate) fn out(&self) -> PathBuf {
        let project = || Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
        self.out.clone().unwrap_or_else(|| project().join("out/demo"))
    }

    pub(crate) fn plan(&self) -> Result<Plan> {
        let kill = |before, away, after| ServerKill {
            before: Duration::from_secs(before),
            away: Duration::from_secs(away),
            after: Duration::from_secs(after),
        };
        let (guest_memory_mib, set, warmup, reads, local, server_kill) = match self.quick {
            false => (256, 768, 50_000, 20_000, 128, kill(10, 12, 48)),
            true => (160, 256, 5_000, 2_000, 32, kill(4, 6, 15)),
        };
        let plan = Plan {
            quick: self.quick,
            file_count: FILE_COUNT,
            // Every file holds a whole number of records.
            file_bytes: round_up((self.set.unwrap_or(set) << 20).div_ceil(FILE_COUNT), self.record << 10),
            record_bytes: self.record << 10,
            alpha: 1.0,
            seed: self.seed,
            warmup_reads: self.warmup.unwrap_or(warmup),
            measured_reads: self.reads.unwrap_or(reads),
            guest_memory_mib,
            cache_bytes: self.cache << 20,
            local_bytes: self.local.unwrap_or(local) << 20,
            disk_delay: Duration::from_millis(self.delay),
            server_kill,
            lock_memory: !self.no_lock,
        };
        ensure!(
            (1..=4096).contains(&self.record),
            "--record {} is out of range: a record has 1 to 4096 KiB",
            self.record
        );
        ensure!(
            (64..=65536).contains(&(plan.set_bytes() >> 20)),
            "--set is out of range: a file set has 64 to 65536 MiB"
        );
        ensure!(
            self.cache >= 2 && self.cache.is_multiple_of(2),
            "--cache {} is not possible: give an even number of MiB",
            self.cache
        );
        ensure!(
            plan.local_bytes.is_multiple_of(2 << 20) && plan.local_bytes < plan.cache_bytes,
            "a local tier of {} MiB is not possible: give --local an even number of MiB below the {} of the cache, or 0 for none",
            plan.local_bytes >> 20,
            self.cache
        );
        ensure!(plan.measured_reads > 0, "--reads 0 leaves nothing to measure: give a larger number");
        ensure!(
            (1..=1000).contains(&self.delay),
            "--delay {} is out of range: a disk read takes 1 to 1000 ms",
            self.delay
        );
        Ok(plan)
    }
}

const FILE_COUNT: u64 = 8;

fn round_up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit.max(1)) * unit
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn plans() {
        let parse = |line: &str| Arguments::try_parse_from(line.split(' ')).unwrap().plan();
        let full = parse("remoca-demo").unwrap();
        assert_eq!((full.set_bytes(), full.record_bytes, full.cache_bytes), (768 << 20, 96 << 10, 1 << 30));
        assert!(parse("remoca-demo --quick").unwrap().set_bytes() < full.set_bytes());
        assert_eq!(full.local_bytes, 128 << 20);
        assert_eq!(parse("remoca-demo --cache 64 --local 0").unwrap().local_bytes, 0);
        let odd = parse("remoca-demo --set 1000 --record 100").unwrap();
        assert!(odd.set_bytes() >= 1000 << 20 && odd.file_bytes.is_multiple_of(100 << 10));
        for wrong in
            ["--set 1", "--record 0", "--cache 3", "--cache 64", "--local 3", "--local 1024", "--reads 0", "--delay 0"]
        {
            assert!(parse(&format!("remoca-demo {wrong}")).is_err(), "{wrong}");
        }
    }
}
