//! The conditions under which the figures were measured.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use remoca_lab::Accelerator;
use rustix::system::uname;
use serde::{Deserialize, Serialize};

use crate::plan::Plan;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Conditions {
    pub started_at: String,
    pub remoca_version: String,
    pub commit: String,
    pub cpu: String,
    pub cpu_count: usize,
    pub memory_mib: u64,
    pub system: String,
    pub kernel: String,
    pub qemu: String,
    /// "KVM", or "TCG" for software emulation.
    pub accelerator: String,
    pub nbdkit: String,
    pub guest_system: String,
    pub guest_kernel: String,
    pub guest_memory_mib: u32,
    pub guest_cpu_count: u32,
    pub disk: String,
    pub disk_delay_ms: u64,
    pub file_system: String,
    pub set_bytes: u64,
    pub file_count: u64,
    pub record_bytes: u64,
    pub record_count: u64,
    pub pattern: String,
    pub seed: u64,
    pub warmup_reads: u64,
    pub measured_reads: u64,
    pub cache_bytes: u64,
    pub memory_server: String,
    pub memory_locked: bool,
    /// Load average of the last minute, before and after.
    pub load_before: f64,
    pub load_after: f64,
    pub prepare_seconds: f64,
    pub run_seconds: f64,
    pub quick: bool,
}

impl Conditions {
    pub fn of_this_machine(plan: &Plan, accelerator: Accelerator, memory_locked: bool) -> Conditions {
        let uname = uname();
        Conditions {
            started_at: said(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"])),
            remoca_version: env!("CARGO_PKG_VERSION").into(),
            commit: said(
                Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")),
            ),
            cpu: field(Path::new("/proc/cpuinfo"), "model name"),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: first_number(&field(Path::new("/proc/meminfo"), "MemTotal")) >> 10,
            system: system(),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            qemu: said(Command::new("qemu-system-x86_64").arg("--version")),
            accelerator: match accelerator {
                Accelerator::Kvm => "KVM".into(),
                Accelerator::Tcg => "TCG (software emulation)".into(),
            },
            nbdkit: said(Command::new("nbdkit").arg("--version")),
            guest_system: "Debian 12".into(),
            guest_memory_mib: plan.guest_memory_mib,
            guest_cpu_count: 2,
            disk: plan.disk_command(),
            disk_delay_ms: u64::try_from(plan.disk_delay.as_millis()).unwrap_or(u64::MAX),
            file_system: "ext4, noatime".into(),
            set_bytes: plan.set_bytes(),
            file_count: plan.file_count,
            record_bytes: plan.record_bytes,
            record_count: plan.record_count(),
            pattern: format!("zipf, alpha = {:.1}; buffered reads, one after another", plan.alpha),
            seed: plan.seed,
            warmup_reads: plan.warmup_reads,
            measured_reads: plan.measured_reads,
            cache_bytes: plan.cache_bytes,
            memory_server: "remoca serve on this machine, over TCP".into(),
            memory_locked,
            load_before: load(),
            quick: plan.quick,
            ..Conditions::default()
        }
    }

    pub fn note_end(&mut self) {
        self.load_after = load();
    }
}

fn system() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.unwrap_or("unknown").trim_matches('"').to_owned()
}

fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns the value of a line `KEY : VALUE`, or "unknown".
fn field(path: &Path, key: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
    value.unwrap_or("unknown").trim().to_owned()
}

fn first_number(text: &str) -> u64 {
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_default()
}

/// Returns the first line of a program's output, or "unknown" if the program cannot be run.
fn said(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("unknown").trim().to_owned()
}
