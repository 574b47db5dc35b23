//! Sets up the environment of the acts: programs, the image with the file set, the slow disk, the memory server, the guest.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use remoca_lab::{
    Accelerator, Disk, Guest, GuestConfig, Image, Job, Lab, Recipe, Service, program,
    store::{self, Nbdkit, NbdkitConfig},
    workload::dataset,
};
use rustix::{
    fs::{FlockOperation, flock},
    process::{Resource, getrlimit},
};
use tempfile::TempDir;

use crate::{plan::Plan, progress::Progress, reading::FOLDER, report::REPORT_NAMES};

const START_LIMIT: Duration = Duration::from_secs(240);
pub const JOB_LIMIT: Duration = Duration::from_secs(240);
/// How long to wait for the agent's counters, which it sends once a second.
pub const AGENT_TICK: Duration = Duration::from_millis(1500);
/// Memory that the programs need besides the cache and the guest's memory.
const SPARE_BYTES: u64 = 400 << 20;
const CAP_IPC_LOCK: u32 = 14;
/// Lines of the guest's kernel log that report a failed disk or file system, or a hang. Soft lockups are left out: an
/// emulated processor that the host does not run looks like one.
const KERNEL_FAULTS: &str = "I/O error|blk_update_request|EXT4-fs (error|warning)|critical|blocked for more than|BUG: (Bad|unable|kernel|KASAN)";

pub struct Stage {
    pub lab: Lab,
    pub accelerator: Accelerator,
    /// Path of `remoca`.
    pub program: PathBuf,
    workload: PathBuf,
    agent: PathBuf,
    /// Image of the guest's disk.
    pub disk: PathBuf,
    /// Folder for logs and traces.
    pub logs: PathBuf,
    sockets: TempDir,
    pub lock_memory: bool,
    _work: WorkFolder,
    /// Lock on the folder of the report.
    _lock: File,
}

/// Folder that holds the disk. Removed at the end, or at the next start after a kill.
struct WorkFolder(PathBuf);

impl WorkFolder {
    fn create(path: PathBuf) -> Result<WorkFolder> {
        remove_folder(&path)?;
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(WorkFolder(path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // A folder that cannot be removed now is removed at the next start.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Stage {
    /// Checks that the machine has enough memory and space, builds images and programs, and makes the file set.
    pub fn prepare(plan: &Plan, out: &Path, progress: &Progress) -> Result<Stage> {
        let lock = lock_folder(out)?;
        let logs = out.join("logs");
        remove_folder(&logs)?;
        // Reports of an earlier run must not be mistaken for this run's if it fails.
        for name in REPORT_NAMES {
            let _ = fs::remove_file(out.join(name));
        }
        fs::create_dir_all(&logs).with_context(|| format!("cannot create {}", logs.display()))?;
        let program = remoca_program()?;
        check_memory(plan)?;
        let lock_memory = plan.lock_memory && may_lock(plan.cache_bytes);
        if plan.lock_memory && !lock_memory {
            progress.say(
                "the memory server runs with unlocked memory, because this user may not lock as much as the cache; \
                 to lock it, run as root or raise the limit that `ulimit -l` shows",
            );
        }
        progress.begin("preparing the guest's image and programs (a few minutes the first time)", 0);
        let lab = Lab::open()?;
        let image = Image::ensure(&lab, &Recipe::bookworm())?;
        let accelerator = Accelerator::of_this_machine(&lab, &image)?;
        // The guest's own server is also built here, so that no boot has to wait for it.
        program::build(&lab, "remoca-lab", "remoca-lab-guest")?;
        let workload = program::build(&lab, "remoca-lab", "remoca-workload")?;
        let agent = program::build(&lab, "remoca-agent", "remoca-agent")?;
        let sockets = TempDir::with_prefix("remoca-demo-").context("cannot create a folder for sockets")?;
        let work = WorkFolder::create(out.join("work"))?;
        let disk = work.0.join("disk.img");
        let stage = Stage {
            lab,
            accelerator,
            program,
            workload,
            agent,
            disk,
            logs,
            sockets,
            lock_memory,
            _work: work,
            _lock: lock,
        };
        stage.make_disk(plan, progress)?;
        Ok(stage)
    }

    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    fn make_disk(&self, plan: &Plan, progress: &Progress) -> Result<()> {
        let (files, mib) = (plan.file_count, plan.set_bytes() >> 20);
        progress.begin(&format!("making the file set: {files} files, {mib} MiB, a signature in every 512 bytes"), 0);
        let folder = self.disk.with_extension("files");
        let free = free_bytes(self.disk.parent().unwrap_or(Path::new(".")))?;
        let needed = plan.set_bytes() + plan.image_bytes();
        ensure!(
            free > needed,
            "not enough disk space: {} MiB are needed, {} are free; choose another folder with --out",
            needed >> 20,
            free >> 20
        );
        let name = Path::new(FOLDER).file_name().context("the folder of the file set has no name")?;
        dataset::create(&folder.join(name), plan.file_count, plan.file_bytes, plan.seed)?;
        store::ext4_of_folder(&self.disk, plan.image_bytes(), &folder)?;
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
    }

    /// Starts nbdkit for the disk, with a delay for every read request.
    pub fn slow_disk(&self, plan: &Plan) -> Result<Nbdkit> {
        Ok(NbdkitConfig::slow_file(&self.disk, plan.disk_delay).start(&self.logs)?)
    }

    /// Starts `remoca serve` at the address, with exactly the memory of the cache, or of one of its tiers.
    pub fn memory_server(&self, bytes: u64, address: &str, name: &str) -> Result<Service> {
        let mut command = Command::new(&self.program);
        command.arg("serve").args(["--listen", address, "--memory", &bytes.to_string()]);
        if !self.lock_memory {
            command.arg("--no-lock");
        }
        let mut service = Service::start("remoca serve", command, &self.logs.join(format!("{name}.log")))?;
        service.wait_for_log("listening on", START_LIMIT)?;
        Ok(service)
    }

    /// Returns the address of a memory server that chose its own port.
    pub fn address_of(&self, server: &Service) -> Result<String> {
        let said = server.log_tail();
        let address = said.lines().find_map(|line| line.strip_prefix("listening on "));
        Ok(address.context("the memory server did not say where it listens")?.trim().to_owned())
    }

    /// Boots the guest with the disk mounted and its page cache empty.
    pub fn guest(&self, plan: &Plan, name: &str, disk: &Path, port: Option<&Path>) -> Result<Guest> {
        let mut config = GuestConfig::new(&format!("demo-{name}"), plan.guest_memory_mib)
            .disk(Disk::vhost_user("data", disk))
            .payload("remoca-workload", &self.workload)
            .payload("remoca-agent", &self.agent);
        if let Some(port) = port {
            config = config.disk(Disk::vhost_user("port", port));
        }
        let mut guest = config.boot(&self.lab)?;
        // Lazy initialisation would add background writes that are not part of the demonstration.
        guest.run("mount -o noatime,noinit_itable $(disk-by-serial data) /mnt", JOB_LIMIT)?;
        guest.run("sync; echo 3 > /proc/sys/vm/drop_caches", JOB_LIMIT)?;
        Ok(guest)
    }
}

/// Starts the agent, and waits until it works.
pub fn start_agent(guest: &mut Guest) -> Result<Job> {
    let mut job = guest.start("exec remoca-agent 2>&1")?;
    guest.wait_for_line(&mut job, "sending evicted pages", START_LIMIT)?;
    Ok(job)
}

/// Ends the agent, which sends the rest of its pages and its last statistics.
pub fn stop_agent(guest: &mut Guest, job: &Job) -> Result<()> {
    guest.run("kill -TERM $(pidof remoca-agent)", JOB_LIMIT)?;
    let ended = guest.wait(job, JOB_LIMIT)?;
    ensure!(ended.success(), "the agent ended with status {}: {}", ended.status, ended.text());
    Ok(())
}

/// Returns the number of pages in the guest's page cache.
pub fn page_cache_pages(guest: &mut Guest) -> Result<u64> {
    let said = guest
        .run("sed -n 's/^Cached: *\\([0-9]*\\) kB/\\1/p; s/^Shmem: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo", JOB_LIMIT)?;
    let values: Vec<u64> = said.lines().filter_map(|line| line.parse().ok()).collect();
    let [cached_kib, shmem_kib] = values[..] else { bail!("the guest's /proc/meminfo says `{said}`") };
    Ok(cached_kib.saturating_sub(shmem_kib) / 4)
}

/// Returns the lines of the guest's kernel log that report failures.
pub fn kernel_faults(guest: &mut Guest) -> Result<Vec<String>> {
    let said = guest.run(&format!("dmesg | grep -E '{KERNEL_FAULTS}' || true"), JOB_LIMIT)?;
    Ok(said.lines().map(str::to_owned).collect())
}

/// Locks a folder, so that it is used by one demonstration at a time.
fn lock_folder(folder: &Path) -> Result<File> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let lock = File::open(folder).with_context(|| format!("cannot open {}", folder.display()))?;
    let taken = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err();
    ensure!(!taken, "another demonstration is running in {}: choose another folder with --out", folder.display());
    Ok(lock)
}

fn remove_folder(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

/// Returns the path of `remoca`, next to this program.
fn remoca_program() -> Result<PathBuf> {
    let own = env::current_exe().context("cannot find the path of this program")?;
    let path = own.with_file_name("remoca");
    ensure!(
        path.exists(),
        "{} does not exist: build it (cargo build --release -p remoca-cli), or use `make demo`",
        path.display()
    );
    Ok(path)
}

fn check_memory(plan: &Plan) -> Result<()> {
    let needed = plan.cache_bytes + (u64::from(plan.guest_memory_mib) << 20) + SPARE_BYTES;
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let available = kib.context("/proc/meminfo has no MemAvailable")? << 10;
    ensure!(
        available >= needed,
        "not enough memory: {} MiB are needed (cache, guest, programs), {} are available; choose a smaller --cache",
        needed >> 20,
        available >> 20
    );
    Ok(())
}

/// Returns whether this user may lock `bytes` of memory and the server's tables.
fn may_lock(bytes: u64) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    let limit = getrlimit(Resource::Memlock).current;
    capabilities >> CAP_IPC_LOCK & 1 == 1 || limit.is_none_or(|limit| limit >= bytes + bytes / 64)
}

fn free_bytes(folder: &Path) -> Result<u64> {
    let stat =
        rustix::fs::statvfs(folder).with_context(|| format!("cannot read the free space of {}", folder.display()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}
