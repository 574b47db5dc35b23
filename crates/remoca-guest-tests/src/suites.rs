//! Third-party file-system test suites in a guest, on a plain disk and on a cached one. The same tests must have the
//! same results.
//!
//! pjdfstest (the required behaviour of each system call), fsx (one file, random operations, every byte compared) and
//! the file-system stressors of stress-ng (with its verification). Meanwhile, data of the same disk is read and
//! checked. It is more than fits into the guest's memory, so pages that the tests use are evicted and read again. Used
//! by the program `suites`.

use crate::file_systems::FileSystem;
use crate::{Host, Image, LIMIT, Result, kernel_complaints, remoca, start_agent};
use remoca_lab::{Disk, DiskSource, Guest, GuestConfig, Lab, Recipe, program, store};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = 3 << 30;
const GUEST_MIB: u32 = 256;
/// Amount of data read during the tests, in MiB.
const DATA_MIB: u64 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    Plain,
    Cached,
    /// Cached disk whose VM process is killed and restarted during each test.
    Killed,
}

impl DiskKind {
    pub fn name(self) -> &'static str {
        match self {
            DiskKind::Plain => "plain",
            DiskKind::Cached => "cached",
            DiskKind::Killed => "cached, killed",
        }
    }
}

/// A command of the guest that has one result, or prints many.
#[derive(Clone, Debug)]
pub struct Test {
    pub name: String,
    command: String,
    prints_results: bool,
}

/// Results of one file system on one disk.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// "passed", "failed" or "skipped", by the name of the test.
    pub results: BTreeMap<String, &'static str>,
    pub seconds: u64,
    pub kills: u64,
    pub read_blocks: u64,
    pub hit_blocks: u64,
}

impl Outcome {
    pub fn count(&self, suite: &str, result: &str) -> usize {
        self.results.iter().filter(|(name, found)| name.starts_with(suite) && **found == result).count()
    }

    /// Returns the tests whose results differ in the other outcome, as `TEST: HERE, THERE there`.
    pub fn differences(&self, other: &Outcome) -> Vec<String> {
        let names = self.results.keys().chain(other.results.keys().filter(|name| !self.results.contains_key(*name)));
        let found = |outcome: &Outcome, name: &str| outcome.results.get(name).copied().unwrap_or("missing");
        names
            .map(|name| (name, found(self, name), found(other, name)))
            .filter(|(_, here, there)| here != there)
            .map(|(name, here, there)| format!("{name}: {here}, {there} there"))
            .collect()
    }
}

pub const SUITES: [&str; 4] = ["pjdfstest", "fsx", "stress-ng", "after"];

/// Settings of fsx: its operations besides reading and writing, and their sizes.
const FSX_SETTINGS: [(&str, u32, &str); 5] = [
    ("reads, writes, maps, truncates", 8000, ""),
    (
        "every operation",
        4000,
        "flen = 2097152\n[opsize]\nmax = 131072\n[weights]\nclose_open = 2\ninvalidate = 2\ntruncate = 5\nfsync = 2\n\
         fdatasync = 2\nposix_fallocate = 5\npunch_hole = 5\nsendfile = 5\nposix_fadvise = 5\ncopy_file_range = 5\n",
    ),
    ("sectors", 4000, "flen = 1048576\n[opsize]\nalign = 512\n[weights]\nmapwrite = 0\nfsync = 2\npunch_hole = 5\n"),
    (
        "blocks",
        4000,
        "flen = 4194304\n[opsize]\nalign = 4096\n[weights]\nfsync = 2\npunch_hole = 5\nposix_fadvise = 5\n",
    ),
    ("a large file", 1500, "flen = 67108864\n[opsize]\nmax = 1048576\n[weights]\nfdatasync = 1\nposix_fadvise = 5\n"),
];
const FSX_SEEDS: [u32; 3] = [1, 2, 3];

/// Stressors of stress-ng that work on files, with further options. Of its class `filesystem`, those are left out that
/// need no disk (dup, eventfd, fault, inotify, procfs and the like) or kernel features that the guest lacks (binderfs,
/// verity), and `dirmany`, which fills the disk and ends by a timeout.
const STRESSORS: [(&str, &str); 36] = [
    ("access", ""),
    ("aio", ""),
    ("chattr", ""),
    ("chdir", ""),
    ("chmod", ""),
    ("chown", ""),
    ("copy-file", "--copy-file-bytes 128M"),
    ("dentry", ""),
    ("dir", ""),
    ("dirdeep", "--dirdeep-inodes 2000"),
    ("fallocate", "--fallocate-bytes 64M"),
    ("fcntl", ""),
    ("fiemap", "--fiemap-bytes 32M"),
    ("filename", ""),
    ("flock", ""),
    ("fpunch", ""),
    ("fstat", ""),
    ("getdent", ""),
    ("hdd", "--hdd-bytes 64M"),
    ("inode-flags", ""),
    ("io", ""),
    ("iomix", "--iomix-bytes 64M"),
    ("lease", ""),
    ("link", ""),
    ("locka", ""),
    ("lockf", ""),
    ("lockofd", ""),
    ("mknod", ""),
    ("open", ""),
    ("readahead", "--readahead-bytes 32M"),
    ("rename", ""),
    ("revio", "--revio-bytes 32M"),
    ("seek", "--seek-size 32M"),
    ("symlink", ""),
    ("sync-file", "--sync-file-bytes 32M"),
    ("utime", ""),
];
const STRESS_SECONDS: u32 = 3;

const PJDFSTEST_SETTINGS: &str = "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n\
    [settings]\nnaptime = 0.02\nallow_remount = false\n\
    [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";

/// Returns all tests whose name contains `wanted`.
pub fn tests(wanted: &str) -> Vec<Test> {
    let mut tests = vec![Test {
        name: "pjdfstest".into(),
        command: "mkdir -m 755 /mnt/pjd && pjdfstest -c /tmp/pjdfstest.toml -p /mnt/pjd".into(),
        prints_results: true,
    }];
    for (number, (settings, operations, _)) in FSX_SETTINGS.iter().enumerate() {
        for seed in FSX_SEEDS {
            tests.push(Test {
                name: format!("fsx: {settings}, seed {seed}"),
                command: format!("fsx -q -P /tmp -f /tmp/fsx{number}.toml -S {seed} -N {operations} /mnt/fsx"),
                prints_results: false,
            });
        }
    }
    for (stressor, more) in STRESSORS {
        tests.push(Test {
            name: format!("stress-ng: {stressor}"),
            command: format!(
                "mkdir -p /mnt/stress && stress-ng --temp-path /mnt/stress --verify --{stressor} 2 {more} \
                 --timeout {STRESS_SECONDS}s"
            ),
            prints_results: false,
        });
    }
    tests.retain(|test| test.name.contains(wanted));
    tests
}

/// Runs the tests on a new file system, one after the other, and checks the file system afterwards.
pub fn run(kind: DiskKind, file_system: &FileSystem, tests: &[Test]) -> Result<Outcome> {
    let started = Instant::now();
    let mut stage = Stage::start(kind, file_system)?;
    let mut outcome = Outcome::default();
    for test in tests {
        let output = stage.run(test, &mut outcome)?;
        if test.prints_results {
            outcome.results.extend(printed_results(&test.name, &output.text()));
        } else {
            // Exit codes of stress-ng for "not supported here" and "no resources".
            let result = match output.status {
                0 => "passed",
                3 | 4 if test.name.starts_with("stress-ng") => "skipped",
                _ => "failed",
            };
            outcome.results.insert(test.name.clone(), result);
        }
    }
    stage.end(file_system, &mut outcome)?;
    outcome.seconds = started.elapsed().as_secs();
    Ok(outcome)
}

/// Parses lines such as `unlink::enoent_named_file      ok`.
fn printed_results(suite: &str, text: &str) -> Vec<(String, &'static str)> {
    let result = |line: &str| {
        let (name, found) = line.rsplit_once(' ')?;
        let found = match found {
            "ok" => "passed",
            "skipped" => "skipped",
            "FAILED" => "failed",
            _ => return None,
        };
        name.contains("::").then(|| (format!("{suite}: {}", name.trim()), found))
    };
    text.lines().filter_map(result).collect()
}

struct Stage {
    kind: DiskKind,
    guest: Guest,
    host: Option<Host>,
    images: [Image; 1],
    _folder: tempfile::TempDir,
}

impl Stage {
    fn start(kind: DiskKind, file_system: &FileSystem) -> Result<Self> {
        let lab = Lab::open()?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("data.img");
        store::sparse_image(&path, DISK_BYTES)?;
        let images = [Image { name: "data", path, options: "" }];
        let name = format!("suites-{}-{}", file_system.name, kind.name().replace(", ", "-"));
        let (host, mut config) = match kind {
            DiskKind::Plain => (None, plain_guest(&lab, &name, &images[0].path)?),
            DiskKind::Cached | DiskKind::Killed => {
                let mut host = Host::new(remoca()?, "4G")?;
                host.start_server()?;
                host.start_process(&images, CACHE, &[])?;
                let mut config = host.guest(&lab, &name)?;
                for disk in &mut config.disks {
                    if let DiskSource::VhostUser { reconnect, .. } = &mut disk.source {
                        *reconnect = true;
                    }
                }
                (Some(host), config)
            }
        };
        config.memory_mib = GUEST_MIB;
        config.recipe = Recipe::bookworm().with(&["stress-ng"]);
        for (program, version) in [("fsx", "0.3.2"), ("pjdfstest", "0.2.2")] {
            config = config.payload(program, &program::install(&lab, program, version)?);
        }
        let mut guest = config.boot(&lab)?;
        guest.run(&format!("{} $(disk-by-serial data)", file_system.make), LIMIT)?;
        guest.run(&format!("mount -o {} $(disk-by-serial data) /mnt", file_system.mount_options), LIMIT)?;
        guest.put("/tmp/pjdfstest.toml", PJDFSTEST_SETTINGS.as_bytes())?;
        for (number, (_, _, settings)) in FSX_SETTINGS.iter().enumerate() {
            guest.put(&format!("/tmp/fsx{number}.toml"), settings.as_bytes())?;
        }
        if host.is_some() {
            start_agent(&mut guest)?;
        }
        guest
            .run(&format!("remoca-workload create --dir /mnt/set --files {} --file-size 16M", DATA_MIB / 16), LIMIT)?;
        let read = "nice remoca-workload read-records --dir /mnt/set --pattern rand --stop-file /tmp/stop";
        guest.run(&format!("( {read} > /tmp/read.log 2>&1; echo $? > /tmp/read.status ) > /dev/null 2>&1 &"), LIMIT)?;
        Ok(Self { kind, guest, host, images, _folder: folder })
    }

    fn run(&mut self, test: &Test, outcome: &mut Outcome) -> Result<remoca_lab::Output> {
        let job = self.guest.start(&format!("cd /mnt && {}", test.command))?;
        if let (DiskKind::Killed, Some(host)) = (self.kind, &mut self.host) {
            sleep(Duration::from_secs(1));
            host.kill_process()?;
            host.start_process(&self.images, CACHE, &[])?;
            outcome.kills += 1;
        }
        Ok(self.guest.wait(&job, TEST_LIMIT)?)
    }

    /// Checks the end state, as results of the suite "after".
    fn end(mut self, file_system: &FileSystem, outcome: &mut Outcome) -> Result<()> {
        let mut note = |what: &str, is_right: bool, said: &str| {
            if !is_right {
                println!("{what}, on a {} disk with {}: {said}", self.kind.name(), file_system.name);
            }
            outcome.results.insert(format!("after: {what}"), if is_right { "passed" } else { "failed" });
        };
        let stop = "touch /tmp/stop; for i in $(seq 2000); do [ -s /tmp/read.status ] && break; sleep 0.1; done; \
                    cat /tmp/read.log; [ \"$(cat /tmp/read.status)\" = 0 ]";
        let read = self.guest.try_run(stop, LIMIT)?;
        note("data read all the while", read.success(), &read.text());
        self.guest.run("cd /; umount /mnt", LIMIT)?;
        let check = self.guest.try_run(&format!("{} $(disk-by-serial data)", file_system.check), LIMIT)?;
        note("the file system's own check", check.success(), &check.text());
        let complaints = kernel_complaints(&mut self.guest)?;
        note("nothing in the kernel's log", complaints.is_empty(), &complaints);
        self.guest.shut_down()?;
        if let Some(mut host) = self.host {
            let status = host.status()?;
            let count = |name: &str| status.counters.get(name).copied().unwrap_or_default();
            let wrong = count("disk_errors") + count("foreign_writes") + count("fetch_wrong");
            note("no error in the VM process", wrong == 0, &format!("{status:?}"));
            outcome.read_blocks = count("read_blocks");
            outcome.hit_blocks = count("hit_blocks") + count("zero_blocks");
            host.stop_process()?;
        } else {
            note("no error in the VM process", true, "");
        }
        Ok(())
    }
}

const CACHE: &str = "512M";
const TEST_LIMIT: Duration = Duration::from_secs(600);

fn plain_guest(lab: &Lab, name: &str, image: &std::path::Path) -> Result<GuestConfig> {
    let workload: PathBuf = program::build(lab, "remoca-lab", "remoca-workload")?;
    let mut config =
        GuestConfig::new(name, GUEST_MIB).disk(Disk::file("data", image)).payload("remoca-workload", &workload);
    config.boot_limit = LIMIT;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_from_what_pjdfstest_prints() {
        let text = "unlink::open_file_not_freed        ok\nerofs::named      skipped\n\treason\nopen::a      FAILED\n\n\
                    Summary: 0 failed, 15 skipped\n";
        let expected = [("unlink::open_file_not_freed", "passed"), ("erofs::named", "skipped"), ("open::a", "failed")];
        assert_eq!(printed_results("p", text), expected.map(|(name, result)| (format!("p: {name}"), result)));
    }

    #[test]
    fn differences_are_told_both_ways() {
        let outcome = |results: &[(&str, &'static str)]| Outcome {
            results: results.iter().map(|(name, result)| ((*name).to_owned(), *result)).collect(),
            ..Outcome::default()
        };
        let here = outcome(&[("a", "passed"), ("b", "passed"), ("c", "skipped")]);
        let there = outcome(&[("a", "passed"), ("b", "failed"), ("d", "passed")]);
        let expected = ["b: passed, failed there", "c: skipped, missing there", "d: missing, passed there"];
        assert_eq!(here.differences(&there), expected);
        assert_eq!((here.count("", "passed"), here.differences(&here).len()), (2, 0));
    }
}
