//! `remoca support`: what is in the archive, and what never is.

use super::support::machine::{Machine, Setup};
use super::support::program::{REMOCA, Serve, command, expect_refusal, run_command};
use flate2::read::GzDecoder;
use remoca_protocol::control::Status;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of the header of a state file, in bytes. The fingerprint key and the tokens of pools are somewhere in it.
const HEADER_BYTES: usize = 4096;

/// Returns the files of an archive by their names without its folder.
fn unpack(path: &Path) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(GzDecoder::new(File::open(path).unwrap()));
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    });
    entries.collect()
}

#[test]
fn an_archive_has_what_helps_and_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let secret = "0123456789abcdef".repeat(4);
    std::fs::write(path("key"), &secret).unwrap();
    std::fs::set_permissions(path("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::create_dir_all(path("config/vms")).unwrap();
    std::fs::write(path("config/remoca.toml"), format!("# {secret}\n[vms]\ncache = \"77M\"\n")).unwrap();
    std::fs::write(path("config/vms/test.toml"), "image = \"nbd://me:swordfish@host/x\"\n").unwrap();
    let (config, key) = (path("config"), path("key").display().to_string());
    let support = |machine: &Machine, output: &Path| -> Command {
        let mut command = command(REMOCA);
        command.arg("support").arg(machine.control()).arg("--output").arg(output).env("REMOCA_CONFIG", &config);
        command
    };
    let server = Serve::start(folder.path(), "16M");
    let arguments = vec!["--incoming-key".into(), key];
    let setup = Setup { server: Some(server.address.clone()), arguments, seed: 71, ..Setup::default() };
    let mut machine = Machine::start(setup);
    machine.run_until_hits(50);

    let output: PathBuf = path("a.tar.gz");
    let said = run_command(&mut support(&machine, &output));
    assert!(said.status.success(), "{said:?}");
    let said = String::from_utf8(said.stdout).unwrap();
    assert_eq!(std::fs::metadata(&output).unwrap().permissions().mode() & 0o777, 0o600);
    let files = unpack(&output);
    for name in files.keys() {
        assert!(said.contains(&format!("  {name} ")), "{name} is not in the list: {said}");
        assert!(files["contents.txt"].contains(name.as_str()) || name == "contents.txt", "{name}");
    }
    let pid = machine.program.pid();
    for (name, words) in [
        ("version.txt", &["remoca 0.", "Linux version", &format!("process {pid}")][..]),
        ("status.txt", &["test (process ", "disk0: ", "hit_blocks"]),
        ("config.txt", &["cache = \"77M\"", "nbd://[redacted]@host/x", "# [redacted]\n"]),
        ("log.txt", &["journalctl"]),
        ("host.txt", &["MemAvailable"]),
        ("process.txt", &["Max locked memory", "== threads", "== open files", "VmRSS", "test.state: mode 100600"]),
        ("domain.xml", &["dumpxml test"]),
    ] {
        for word in words {
            assert!(files[name].contains(word), "`{word}` is missing in {name}: {}", files[name]);
        }
    }
    assert_eq!(serde_json::from_str::<Status>(&files["status.json"]).unwrap().pid, pid);

    let state = std::fs::read(machine.control().with_file_name("test.state")).unwrap();
    let is_random = |bytes: &&[u8]| bytes.iter().collect::<HashSet<_>>().len() >= 12 && !bytes.is_ascii();
    let keys: Vec<_> = state[..HEADER_BYTES].chunks(16).filter(is_random).collect();
    assert!(keys.len() >= 2, "the fingerprint key and a token");
    let written = machine.disks[0].model.bytes.chunks(64).find(|bytes| is_random(bytes)).unwrap();
    for (name, text) in &files {
        assert!(!text.contains(&secret) && !text.contains("swordfish"), "{name}");
        for bytes in keys.iter().chain([&written]) {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(!text.contains(&hex), "{name}");
            assert!(!text.as_bytes().windows(bytes.len()).any(|window| window == *bytes), "{name}");
        }
    }

    let before = std::fs::read(&output).unwrap();
    expect_refusal(&run_command(&mut support(&machine, &output)), 1, &["exists: remove it, or name another file"]);
    assert!(std::fs::read(&output).unwrap() == before);
    // The archive of a process that has died is worth the most.
    machine.program.kill();
    let said = run_command(&mut support(&machine, &path("b.tar.gz")));
    assert!(
        said.status.success() && String::from_utf8_lossy(&said.stdout).contains("The process did not answer"),
        "{said:?}"
    );
    assert!(unpack(&path("b.tar.gz"))["status.txt"].contains("no VM process answers"));
}
