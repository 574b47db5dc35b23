//! The correctness experiment of papers/hypervisor-exclusive-cache.txt, section 6.2, with a real guest. Files with a
//! signature in every 512 bytes are read and rewritten by four access patterns, with several shares of writes, while
//! the VM process and the memory server are killed and restarted at random moments. A signature that is not the newest
//! is a failure.
//!
//! Then each of the two checks is left out, and the same reads must fail: the check at admission because of what the
//! guest evicts anyway (pages of its root disk, and pages that a cold index does not know); the check at fetch with a
//! memory server that lies, because an honest one gives it nothing to notice.
//!
//! Called by the test `correctness` with a short cell of each kind, and by the program `correctness` with all of them.

use crate::liar::lie_between;
use crate::{
    Host, Image, LIMIT, Result, assert_kernel_is_content, kernel_complaints, remoca, remoca_ablation, start_agent,
};
use remoca_lab::workload::dataset;
use remoca_lab::workload::journal::{After, Versions};
use remoca_lab::workload::pattern::Random;
use remoca_lab::{DiskSource, Guest, Lab, store};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

pub const PATTERNS: [&str; 4] = ["seq", "rand", "zipf", "class"];
pub const WRITE_PERCENTS: [u64; 3] = [0, 10, 50];

const FILE_BYTES: u64 = 4 << 20;
const RECORD_BYTES: u64 = 64 << 10;
const SIGNATURES_PER_RECORD: u64 = RECORD_BYTES / 512;
const SEED: u64 = 62;

/// Source of the evicted pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evictions {
    Agent,
    /// The content of guest memory before reads overwrote it, without an agent.
    Frames,
}

/// A guest and its files, for any number of cells.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub guest_mib: u32,
    pub file_count: u64,
    pub evictions: Evictions,
    /// Mean time between two kills.
    pub kill_interval: Duration,
}

#[derive(Clone, Copy, Debug)]
pub struct Cell {
    pub cache_mib: u64,
    pub pattern: &'static str,
    pub write_percent: u64,
    pub seconds: u64,
}

/// Findings of a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub records_read: u64,
    pub records_written: u64,
    pub wrong_signatures: u64,
    pub io_errors: u64,
    pub disk_kills: u64,
    pub server_kills: u64,
    /// Number of times that a new VM process found the cache warm.
    pub warm_restarts: u64,
    /// Blocks that reads requested from the VM process, and how many of them were in the cache.
    pub read_blocks: u64,
    pub hit_blocks: u64,
    /// Descriptions of the faults.
    pub examples: Vec<String>,
}

impl Found {
    pub fn failures(&self) -> u64 {
        self.wrong_signatures + self.io_errors
    }

    pub fn signatures_verified(&self) -> u64 {
        self.records_read * SIGNATURES_PER_RECORD
    }

    pub fn hit_ratio(&self) -> f64 {
        crate::file_systems::share(self.hit_blocks, self.read_blocks)
    }

    pub fn add(&mut self, other: Found) {
        self.records_read += other.records_read;
        self.records_written += other.records_written;
        self.wrong_signatures += other.wrong_signatures;
        self.io_errors += other.io_errors;
        self.disk_kills += other.disk_kills;
        self.server_kills += other.server_kills;
        self.warm_restarts += other.warm_restarts;
        self.read_blocks += other.read_blocks;
        self.hit_blocks += other.hit_blocks;
        self.examples.extend(other.examples);
    }

    /// Adds the last result line that `remoca-workload --json` prints.
    fn note(&mut self, said: &str) -> Result<()> {
        let result = said.lines().rev().find(|line| line.contains("\"event\":\"result\""));
        let result: Value = serde_json::from_str(result.ok_or_else(|| format!("no result: {said}"))?)?;
        let count = |path: &str| {
            result.pointer(path).and_then(Value::as_u64).ok_or_else(|| format!("no {path} in the result: {result}"))
        };
        self.records_read += count("/measured/reads/count")?;
        self.records_written += count("/measured/writes/count")?;
        self.wrong_signatures += count("/wrong_signatures")?;
        self.io_errors += count("/io_errors")?;
        let examples = result.pointer("/examples").and_then(Value::as_array).into_iter().flatten();
        self.examples.extend(examples.filter_map(Value::as_str).map(str::to_owned));
        Ok(())
    }

    pub fn json(&self) -> Value {
        json!({
            "reads_verified": self.records_read,
            "signatures_verified": self.signatures_verified(),
            "writes": self.records_written,
            "disk_kills": self.disk_kills,
            "server_kills": self.server_kills,
            "warm_restarts": self.warm_restarts,
            "failures": self.failures(),
            "wrong_signatures": self.wrong_signatures,
            "io_errors": self.io_errors,
            "read_blocks": self.read_blocks,
            "hit_ratio": self.hit_ratio(),
            "examples": self.examples,
        })
    }
}

/// A check of the engine that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ablation {
    /// Nothing is left out: the baseline for the others.
    None,
    Admission,
    Fetch,
}

impl Ablation {
    pub fn name(self) -> &'static str {
        match self {
            Ablation::None => "none",
            Ablation::Admission => "admission-check",
            Ablation::Fetch => "fetch-check",
        }
    }
}

/// A running guest and everything next to it.
pub struct Bench {
    host: Host,
    guest: Guest,
    images: [Image; 1],
    setup: Setup,
    random: Random,
    cache: String,
    more: Vec<&'static str>,
    kills: u64,
    next_kill: Instant,
    /// Counters of the VM process that are already accounted for.
    seen: (u64, u64),
}

impl Bench {
    /// Makes the files, and boots the guest with all checks in place.
    pub fn start(setup: &Setup) -> Result<Self> {
        let lab = Lab::open()?;
        // Room for the pools of killed processes, which are kept for a while.
        let mut host = Host::new(remoca()?, "4G")?;
        let (image, files) = (host.folder().join("data.img"), host.folder().join("files"));
        dataset::create(&files.join("set"), setup.file_count, FILE_BYTES, SEED)?;
        // From 512 MiB on, blocks of the file system are as large as pages.
        store::ext4_of_folder(&image, (576 << 20).max(setup.file_count * FILE_BYTES * 5 / 4), &files)?;
        std::fs::remove_dir_all(&files)?;
        lie_between(&host.folder().join("liar.sock"), host.folder().join("memory.sock"))?;
        if setup.evictions == Evictions::Frames {
            host.without_port();
        }
        host.start_server()?;
        let images = [Image { name: "data", path: image, options: "" }];
        let cache = "64M".to_owned();
        host.start_process(&images, &cache, &[])?;
        let mut config = host.guest(&lab, "correctness")?;
        config.memory_mib = setup.guest_mib;
        if setup.evictions == Evictions::Frames {
            config.kernel_args.push("init_on_alloc=0".into());
        }
        for disk in &mut config.disks {
            if let DiskSource::VhostUser { reconnect, .. } = &mut disk.source {
                *reconnect = true;
            }
        }
        let mut guest = config.boot(&lab)?;
        guest.run("mount -o noatime $(disk-by-serial data) /mnt && touch /tmp/journal", LIMIT)?;
        if setup.evictions == Evictions::Agent {
            start_agent(&mut guest)?;
        }
        Ok(Self {
            host,
            guest,
            images,
            setup: *setup,
            random: Random::new(SEED),
            cache,
            more: Vec::new(),
            kills: 0,
            next_kill: Instant::now() + setup.kill_interval,
            seen: (0, 0),
        })
    }

    /// Reads and rewrites records for the time of the cell, and meanwhile kills processes around the guest.
    pub fn run(&mut self, cell: &Cell) -> Result<Found> {
        self.cache = format!("{}M", cell.cache_mib);
        self.host.set(Some(cell.cache_mib << 20), Some(true))?;
        let mut found = Found::default();
        let job = self.guest.start(&format!(
            "remoca-workload write-mix --dir /mnt/set --journal /tmp/journal --record {RECORD_BYTES} --sync-every 20 \
             --pattern {} --ratio {} --seconds {} --seed {} --json",
            cell.pattern,
            cell.write_percent,
            cell.seconds,
            self.random.draw() >> 1,
        ))?;
        let end = Instant::now() + Duration::from_secs(cell.seconds);
        while self.next_kill < end {
            sleep(self.next_kill.saturating_duration_since(Instant::now()));
            self.kill(&mut found)?;
            let percent = u32::try_from(50 + self.random.below(100))?;
            self.next_kill = Instant::now() + self.setup.kill_interval * percent / 100;
        }
        let output = self.guest.wait(&job, LIMIT)?;
        self.account(&mut found)?;
        found.note(&output.text())?;
        Ok(found)
    }

    /// Kills the VM process, less often the memory server together with the cached pages, or both.
    fn kill(&mut self, found: &mut Found) -> Result<()> {
        let (disk, server) = (self.kills % 6 != 2, self.kills % 3 == 2);
        self.kills += 1;
        self.account(found)?;
        if disk {
            self.host.kill_process()?;
            found.disk_kills += 1;
        }
        if server {
            self.host.kill_server()?;
            found.server_kills += 1;
        }
        sleep(Duration::from_millis(self.random.below(300)));
        if server {
            self.host.start_server()?;
        }
        if disk {
            self.start_process()?;
            found.warm_restarts += u64::from(self.host.status()?.started == "warm");
        }
        Ok(())
    }

    fn start_process(&mut self) -> Result<()> {
        self.seen = (0, 0);
        self.host.start_process(&self.images, &self.cache, &self.more)
    }

    /// Adds the VM process's counts since the last call.
    fn account(&mut self, found: &mut Found) -> Result<()> {
        let status = self.host.status()?;
        let count = |name: &str| status.counters.get(name).copied().unwrap_or_default();
        let (read, hit) = (count("read_blocks"), count("hit_blocks") + count("zero_blocks"));
        found.read_blocks += read.saturating_sub(self.seen.0);
        found.hit_blocks += hit.saturating_sub(self.seen.1);
        self.seen = (read, hit);
        Ok(())
    }

    /// Verifies every byte after the cells, through the cache and with the guest's own page cache emptied.
    pub fn verify(&mut self) -> Result<()> {
        self.guest.run("umount /mnt && mount -o noatime $(disk-by-serial data) /mnt", LIMIT)?;
        self.guest.run("remoca-workload verify --dir /mnt/set --journal /tmp/journal", LIMIT)?;
        assert_kernel_is_content(&mut self.guest)
    }

    /// Reads unchanging files with a check left out, until an error appears or `rounds` are over. No cell may follow.
    pub fn ablate(&mut self, ablation: Ablation, lies: bool, rounds: u32) -> Result<Found> {
        let program = if ablation == Ablation::None { remoca()? } else { remoca_ablation()? };
        self.host.kill_process()?;
        self.host.use_program(program);
        self.host.connect_to(&self.host.folder().join(if lies { "liar.sock" } else { "memory.sock" }));
        // A hedge won by the disk would show that the index is wrong, and the whole index would be dropped.
        self.more =
            if ablation == Ablation::None { vec![] } else { vec!["--omit-rule", ablation.name(), "--no-hedge"] };
        self.start_process()?;
        // The guest's pages from the last ablation may be wrong.
        self.guest.run("umount /mnt; mount -o ro,noatime $(disk-by-serial data) /mnt; dmesg -C", LIMIT)?;
        let mut found = Found::default();
        for round in 0..=rounds {
            let read = format!(
                "remoca-workload write-mix --ratio 0 --dir /mnt/set --journal /tmp/journal --record {RECORD_BYTES} \
                 --pattern rand --count 1500 --seed {} --json",
                self.random.draw() >> 1
            );
            let output = self.guest.try_run(&read, LIMIT)?;
            if let Err(error) = found.note(&output.text()) {
                // The program could not even open its files, because the file system read wrong data.
                let complaints = kernel_complaints(&mut self.guest)?;
                if complaints.is_empty() {
                    return Err(error);
                }
                found.io_errors += 1;
                found.examples.push(complaints);
            }
            self.account(&mut found)?;
            if found.failures() > 0 {
                break;
            }
            if round == 0 {
                // As an operator does: the index is then cold, and does not know what the guest holds.
                self.host.set(None, Some(false))?;
                self.host.set(None, Some(true))?;
            }
        }
        Ok(found)
    }

    /// Kills the guest, and checks the file system and every byte directly on the image.
    pub fn end(mut self) -> Result<()> {
        let journal = self.guest.fetch("/tmp/journal")?;
        self.guest.kill()?;
        self.host.stop_process()?;
        let image: &PathBuf = &self.images[0].path;
        store::check_ext4(image)?;
        let path = self.host.folder().join("journal");
        std::fs::write(&path, journal)?;
        let verified = store::verify_ext4(image, "/set", &Versions::read(&path, After::Order)?)?;
        if verified.faults.is_empty() { Ok(()) } else { Err(format!("on the disk: {:?}", verified.faults).into()) }
    }
}
