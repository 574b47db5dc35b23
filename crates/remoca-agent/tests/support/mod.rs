//! Shared parts of the agent's tests in a guest: the guest, its data disk, and a port that tests can inspect.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "these are tests")]

pub mod blocks;
pub mod port;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use remoca_lab::{Disk, DiskSource, Guest, GuestConfig, Lab, program};
use tempfile::NamedTempFile;

pub const DATA_MIB: usize = 400;
/// For one step in a guest. As long as in all other tests with guests: a busy machine emulates slowly.
pub const LIMIT: Duration = Duration::from_secs(240);

/// Returns an ext4 disk with one file of [`DATA_MIB`] whose pages all differ. It is kept in the laboratory's cache.
pub fn data_disk(lab: &Lab) -> PathBuf {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let image = lab.cache().join(format!("distinct-blocks-{DATA_MIB}.img"));
    if !image.exists() {
        // Made under another name and renamed, so that an existing image is complete.
        let folder = tempfile::tempdir_in(lab.cache()).unwrap();
        let (files, unfinished) = (folder.path().join("files"), folder.path().join("data.img"));
        std::fs::create_dir(&files).unwrap();
        blocks::write_distinct(&files.join("big"), DATA_MIB);
        let mut command = Command::new("mke2fs");
        // Smaller ones have blocks of 1 KiB by default.
        command.args(["-q", "-t", "ext4", "-b", "4096", "-m", "0", "-d"]).args([&files, &unfinished]);
        let made = command.arg(format!("{}M", DATA_MIB + 64)).output().unwrap();
        assert!(made.status.success(), "mke2fs: {}", String::from_utf8_lossy(&made.stderr));
        std::fs::rename(unfinished, &image).unwrap();
    }
    image
}

/// Returns an empty disk somewhat larger than the data file.
pub fn empty_disk() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len((DATA_MIB as u64 + 200) << 20).unwrap();
    file
}

pub fn snapshot(serial: &str, path: &Path) -> Disk {
    let source = DiskSource::File { path: path.to_owned(), read_only: false, snapshot: true };
    Disk { serial: serial.to_owned(), source }
}

/// Returns a guest of 256 MiB with the agent in it.
pub fn guest(lab: &Lab, name: &str) -> GuestConfig {
    let agent = program::build(lab, "remoca-agent", "remoca-agent").unwrap();
    GuestConfig::new(name, 256).payload("remoca-agent", &agent)
}

/// Reads the whole file. Pages that do not fit into memory are evicted.
pub fn read_data(guest: &mut Guest) {
    guest.run("cat /mnt/big > /dev/null", LIMIT).unwrap();
}

/// Starts the agent in the background. Its messages go to /run/agent.log, its exit code to /run/agent.code.
pub fn start_agent(guest: &mut Guest, command: &str) {
    let command = format!(
        "rm -f /run/agent.*; ({command} > /run/agent.log 2>&1; echo $? > /run/agent.code) > /dev/null 2>&1 &
         until grep -q 'sending evicted pages' /run/agent.log; do
             [ ! -e /run/agent.code ] || {{ cat /run/agent.log; exit 1; }}
             sleep 0.05
         done"
    );
    guest.run(&command, LIMIT).unwrap();
}

/// Asks the agent to end. Returns its exit code and output.
pub fn stop_agent(guest: &mut Guest) -> (String, String) {
    guest.run("kill -TERM $(pidof remoca-agent)", LIMIT).unwrap();
    let code = guest.run("until [ -s /run/agent.code ]; do sleep 0.05; done; cat /run/agent.code", LIMIT).unwrap();
    (code, guest.run("cat /run/agent.log", LIMIT).unwrap())
}

/// Reads a counter of /proc/vmstat.
pub fn vmstat(guest: &mut Guest, name: &str) -> u64 {
    guest.run(&format!("sed -n 's/^{name} //p' /proc/vmstat"), LIMIT).unwrap().parse().unwrap()
}
