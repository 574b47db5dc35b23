//! Guests that are hosts: Debian with systemd and our packages, and in them a front end that verifies what it reads
//! (`src/bin/front-end.rs`).

use crate::{LIMIT, Result};
use remoca_lab::{Guest, GuestConfig, Job, Lab, Recipe};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Builds the packages `remoca` and `remoca-agent` of this tree, in a new folder.
pub fn packages(folder: &Path) -> Result<[PathBuf; 2]> {
    packages_of(Path::new(env!("CARGO_MANIFEST_DIR")), folder)
}

fn packages_of(tree: &Path, folder: &Path) -> Result<[PathBuf; 2]> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(tree).args(["xtask", "dist", "--profile", "dev", "--out"]).arg(folder);
    let made = command.output()?;
    if !made.status.success() {
        return Err(format!("cargo xtask dist: {}", String::from_utf8_lossy(&made.stderr)).into());
    }
    let find = |prefix: &str| {
        let mut paths = std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
        let found = paths.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
        found.ok_or_else(|| std::io::Error::other(format!("there is no package {prefix}")))
    };
    Ok([find("remoca_")?, find("remoca-agent_")?])
}

/// Returns the host's package of a former commit. It is built once, and kept. Returns `None` if this repository does not have the
/// commit.
pub fn former_package(commit: &str) -> Result<Option<PathBuf>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = root.join(".cache/packages");
    let kept = folder.join(format!("remoca-{commit}.deb"));
    if kept.exists() {
        return Ok(Some(kept));
    }
    let mut find = Command::new("git");
    find.current_dir(&root).args(["cat-file", "-e", &format!("{commit}^{{commit}}")]);
    if !find.output()?.status.success() {
        println!("SKIPPED: this repository has no commit {commit}, so its package cannot be built (a shallow clone?)");
        return Ok(None);
    }
    std::fs::create_dir_all(&folder)?;
    let tree = tempfile::tempdir_in(&folder)?;
    let unpack = format!("git archive {commit} | tar -x -C {}", tree.path().display());
    if !Command::new("sh").current_dir(&root).args(["-c", &unpack]).status()?.success() {
        return Err(format!("commit {commit} cannot be unpacked").into());
    }
    let [package, _] = packages_of(tree.path(), &tree.path().join("out"))?;
    std::fs::rename(package, &kept)?;
    Ok(Some(kept))
}

/// Returns whether programs that were built here run in the guest: its C library is not older than that of this machine.
pub fn runs_programs_of_here(guest: &mut Guest) -> Result<bool> {
    const ASK: &str = "getconf GNU_LIBC_VERSION";
    let here = Command::new("sh").args(["-c", ASK]).output()?;
    let texts = [String::from_utf8_lossy(&here.stdout).into_owned(), guest.run(ASK, LIMIT)?];
    let [here, there] = texts.map(|text| {
        let numbers = text.split([' ', '.', '\n']).filter_map(|part| part.parse().ok());
        numbers.collect::<Vec<u32>>()
    });
    Ok(here <= there)
}

/// Boots a guest with systemd and these files in `/payload`. Returns `None` if programs that were built here do not run in it.
pub fn boot(name: &str, recipe: Recipe, files: &[(&str, &Path)]) -> Result<Option<Guest>> {
    let mut config = GuestConfig::new(name, 512);
    for (name, path) in files {
        config = config.payload(name, path);
    }
    config.recipe = recipe;
    config.boot_limit = LIMIT;
    let mut guest = config.boot(&Lab::open()?)?;
    guest.run("systemctl is-system-running --wait || { systemctl --failed; exit 1; }", LIMIT)?;
    if runs_programs_of_here(&mut guest)? {
        return Ok(Some(guest));
    }
    println!("SKIPPED: the guest is older than this machine");
    guest.shut_down()?;
    Ok(None)
}

/// Writes the host's configuration, with a memory server and a cache of `cache` for each VM, and starts the server.
pub fn configure_host(guest: &mut Guest, cache: &str) -> Result<()> {
    // With hedging, the disk would rightly be preferred: it is in the page cache of the laboratory's host.
    let text = format!(
        "version = 1\n[vms]\nserver = ['unix:/run/remoca-serve/s']\ncache = '{cache}'\nno-hedge = true\n\
         [serve]\nlisten = ['unix:/run/remoca-serve/s']\nmemory = '32M'\n"
    );
    guest.put("/etc/remoca/remoca.toml", text.as_bytes())?;
    guest.run("systemctl start remoca-serve", LIMIT)?;
    Ok(())
}

/// Writes the configuration of a VM with a disk of 16 MiB and a port.
pub fn configure_vm(guest: &mut Guest, vm: &str) -> Result<()> {
    let text = format!(
        "version = 1\nport = '/run/remoca/{vm}-port.sock'\n[[disk]]\nname = 'root'\nformat = 'raw'\n\
         image = '/srv/{vm}.img'\nsocket = '/run/remoca/{vm}.sock'\n"
    );
    guest.put(&format!("/etc/remoca/vms/{vm}.toml"), text.as_bytes())?;
    guest.run(&format!("truncate -s 16M /srv/{vm}.img && sync"), LIMIT)?;
    Ok(())
}

/// Returns the process ID of a unit, or 0 if it has no process.
pub fn process_of(guest: &mut Guest, unit: &str) -> Result<u32> {
    Ok(property(guest, unit, "MainPID")?.parse()?)
}

/// Returns a property of a unit.
pub fn property(guest: &mut Guest, unit: &str, name: &str) -> Result<String> {
    Ok(guest.run(&format!("systemctl show --property {name} --value {unit}"), LIMIT)?.trim().to_owned())
}

/// Returns an error with the unit's journal unless the unit is active.
pub fn assert_active(guest: &mut Guest, unit: &str) -> Result<()> {
    guest.run(&format!("systemctl is-active {unit} || {{ journalctl --no-pager -u {unit}; exit 1; }}"), LIMIT)?;
    Ok(())
}

/// Returns the status of a VM process, or `None` if it does not answer.
pub fn status(guest: &mut Guest, vm: &str) -> Result<Option<Value>> {
    let output = guest.try_run(&format!("remoca status --output json {vm}"), LIMIT)?;
    if !output.success() {
        return Ok(None);
    }
    Ok(serde_json::from_slice::<Value>(&output.stdout)?.get_mut(0).map(Value::take))
}

/// Waits until `done` returns true for the status of a VM process, and returns it.
pub fn wait_for_status(guest: &mut Guest, vm: &str, what: &str, done: impl Fn(&Value) -> bool) -> Result<Value> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = status(guest, vm)?;
        if let Some(status) = &status
            && done(status)
        {
            return Ok(status.clone());
        }
        if Instant::now() > deadline {
            let log = guest.run(&format!("journalctl --no-pager --lines 60 --unit remoca-disk@{vm}"), LIMIT)?;
            return Err(format!("{what}: not in time; status: {status:?}; journal: {log}").into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until the guest of the first disk and of the port would stay connected after a crash.
pub fn wait_until_kept(guest: &mut Guest, vm: &str) -> Result<Value> {
    let is_kept =
        |status: &Value| status["disks"][0]["outlives_crash"] == true && status["port"]["outlives_crash"] == true;
    wait_for_status(guest, vm, "the connections are kept", is_kept)
}

/// Waits until systemd keeps no descriptor for a VM: nothing of a front end that has gone.
pub fn wait_until_nothing_is_kept(guest: &mut Guest, vm: &str) -> Result<()> {
    let kept = format!("$(systemctl show --property NFileDescriptorStore --value remoca-disk@{vm})");
    guest.run(&format!("until [ {kept} = 0 ]; do sleep 0.1; done"), LIMIT)?;
    Ok(())
}

/// Kills the process of a VM, and waits until the next one serves its front end. With writes in flight it may start cold: on a
/// slow machine the kernel stamps them too late (decision 0020).
pub fn kill(guest: &mut Guest, vm: &str) -> Result<Value> {
    let former = process_of(guest, &format!("remoca-disk@{vm}"))?;
    guest.run(&format!("kill -9 {former}"), LIMIT)?;
    let serves = |status: &Value| {
        status["pid"] != former && status["disks"][0]["traffic"]["reads"].as_u64().is_some_and(|reads| reads > 20)
    };
    wait_for_status(guest, vm, "the next process serves the front end", serves)
}

/// Does the same while the front end only reads. The next process must start warm.
pub fn kill_quiet(guest: &mut Guest, vm: &str) -> Result<Value> {
    let quiet = format!("/run/front-end-{vm}-ends.quiet");
    guest.run(&format!("touch {quiet}"), LIMIT)?;
    let writes = |guest: &mut Guest| -> Result<Value> {
        let status = wait_for_status(guest, vm, "the process answers", |_| true)?;
        Ok(status["disks"][0]["traffic"]["writes"].clone())
    };
    let mut seen = Value::Null;
    loop {
        // Within it the process finds that nothing is written any longer, which takes some milliseconds.
        guest.run("sleep 0.5", LIMIT)?;
        let now = writes(guest)?;
        if now == seen {
            break;
        }
        seen = now;
    }
    let status = kill(guest, vm)?;
    guest.run(&format!("rm {quiet}"), LIMIT)?;
    match status["started"] == "warm" {
        true => Ok(status),
        false => Err(format!("it started cold: {}", status["cold_reason"]).into()),
    }
}

/// A front end that runs in the guest.
pub struct FrontEnd {
    job: Job,
    until: String,
}

impl FrontEnd {
    /// Attaches a front end to `/run/remoca/VM.sock` and `/run/remoca/VM-port.sock`, and waits until it has written the disk.
    /// `options` are those of the program.
    pub fn start(guest: &mut Guest, vm: &str, options: &str) -> Result<Self> {
        let until = format!("/run/front-end-{vm}-ends");
        let sockets = format!("/run/remoca/{vm}.sock /run/remoca/{vm}-port.sock");
        let mut job = guest.start(&format!("rm -f {until}; front-end {sockets} {until} {options} 2>&1"))?;
        guest.wait_for_line(&mut job, "connected", LIMIT)?;
        Ok(Self { job, until })
    }

    /// Returns how often a front end with the option `reconnect` has connected again, to the disk and to the port.
    pub fn reconnects(&self, guest: &mut Guest) -> Result<u32> {
        let file = format!("{}.reconnects", self.until);
        Ok(guest.run(&format!("rm -f {file}; until [ -s {file} ]; do sleep 0.1; done; cat {file}"), LIMIT)?.parse()?)
    }

    /// Ends it after it has read the whole disk. Returns its last line, or an error with its output if anything was wrong.
    pub fn finish(self, guest: &mut Guest) -> Result<String> {
        guest.run(&format!("touch {}", self.until), LIMIT)?;
        let output = guest.wait(&self.job, LIMIT)?;
        let text = output.text();
        let last = text.lines().last().unwrap_or_default();
        if output.success() { Ok(last.to_owned()) } else { Err(format!("the front end failed: {last}").into()) }
    }

    /// Waits for its failure, and returns its last line.
    pub fn wait_for_failure(self, guest: &mut Guest) -> Result<String> {
        let output = guest.wait(&self.job, LIMIT)?;
        let text = output.text();
        let last = text.lines().last().unwrap_or_default();
        if output.success() { Err(format!("the front end did not fail: {last}").into()) } else { Ok(last.to_owned()) }
    }
}
