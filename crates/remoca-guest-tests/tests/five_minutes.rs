//! The five minutes of the README, as somebody who has never seen remoca: on a machine with libvirt and without remoca,
//! with the built packages, through a real libvirtd. The transcript goes to `out/five-minutes.md`;
//! `docs/five-minutes.md` is a copy of it.

use remoca_guest_tests::installed::packages;
use remoca_guest_tests::{LIMIT, Result};
use remoca_lab::{DomainXml, Guest, GuestConfig, Image, Lab, Libvirt, Recipe, program};
use remoca_store::testing::hold_port;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Makes the machine's programs its own, so that packages can be installed.
const BARE: &str = "\
set -e
for folder in usr var/lib/dpkg var/lib/apt var/cache/apt; do
    over=/run/remoca/machine/$folder
    mkdir -p $over/upper $over/work
    mount -t overlay overlay -o lowerdir=/$folder,upperdir=$over/upper,workdir=$over/work /$folder
done
mkdir -p /run/remoca/machine/apt /var/log/apt /var/lib/libvirt/images
mount --bind /run/remoca/machine/apt /var/log/apt
touch /run/remoca/machine/dpkg.log /var/log/dpkg.log
mount --bind /run/remoca/machine/dpkg.log /var/log/dpkg.log
! command -v remoca";

/// What is typed, what is answered, and how long it takes.
struct Transcript {
    text: String,
    commands: usize,
    took: Duration,
}

impl Transcript {
    fn heading(&mut self, text: &str) {
        let _ = writeln!(self.text, "\n## {text}");
    }

    /// Notes a command, and returns its answer.
    fn note(&mut self, prompt: &str, command: &str, run: impl FnOnce() -> Result<String>) -> Result<String> {
        let started = Instant::now();
        let answer = run()?;
        let took = started.elapsed();
        self.took += took;
        self.commands += 1;
        let _ = writeln!(self.text, "```\n{prompt} {command}\n{}```\n{:.1} s", ended(&answer), took.as_secs_f64());
        Ok(answer)
    }

    fn on_host(&mut self, libvirt: &Libvirt, command: &str) -> Result<String> {
        self.note("host#", command, || Ok(libvirt.shell(command)?))
    }

    fn in_guest(&mut self, guest: &mut Guest, command: &str) -> Result<String> {
        self.note("guest#", command, || Ok(guest.run(command, LIMIT)?))
    }
}

fn ended(text: &str) -> String {
    if text.is_empty() || text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") }
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn somebody_new_has_a_cache_under_a_guest_in_five_minutes() -> Result<()> {
    let lab = Lab::open()?;
    let folder = tempfile::tempdir()?;
    let [host_package, agent] = packages(&folder.path().join("packages"))?;
    let package = concat!("remoca_", env!("CARGO_PKG_VERSION"), "_amd64.deb");
    std::fs::copy(&host_package, folder.path().join(package))?;
    let libvirt = Libvirt::start(folder.path(), &[])?;
    libvirt.shell(BARE)?;
    // Not the README's 7070, which something else on this machine may have.
    let (_held, port) = hold_port();
    let mut transcript = Transcript { text: String::new(), commands: 0, took: Duration::ZERO };
    let said = &mut transcript;

    // The laboratory's image, which is made once, is not the user's business.
    Image::ensure(&lab, &Recipe::bookworm_with_systemd())?;
    said.heading("1. A memory server, here on the same host");
    said.on_host(&libvirt, &format!("cd /run/remoca && apt-get install --yes ./{package} 2>&1 | tail -4"))?;
    let serve = format!("remoca serve --listen tcp:0.0.0.0:{port} --memory 256M");
    in_background(said, &libvirt, &serve, "listening on")?;

    said.heading("2. The VM process");
    said.on_host(&libvirt, "truncate -s 1G /var/lib/libvirt/images/web1.img")?;
    let disk = format!(
        "remoca disk --name web1 --server tcp:localhost:{port} --cache 192M --socket-group libvirt-qemu \
         --disk image=/var/lib/libvirt/images/web1.img,socket=/run/remoca/web1.sock,name=root \
         --port /run/remoca/web1-port.sock"
    );
    in_background(said, &libvirt, &disk, "serves the disks of web1")?;

    said.heading("3. The guest");
    let xml = said.on_host(&libvirt, "remoca xml web1")?;
    let (memory_backing, devices) = xml.split_at(xml.find("<disk").ok_or("no disk in the XML")?);
    let mut config = GuestConfig::new("web1", 384);
    config.recipe = Recipe::bookworm_with_systemd();
    config = config.payload("remoca-agent.deb", &agent);
    config = config.payload("remoca-workload", &program::build(&lab, "remoca-lab", "remoca-workload")?);
    config.boot_limit = LIMIT;
    let domain = DomainXml { memory_backing: memory_backing.into(), devices: devices.into(), ..DomainXml::default() };
    let mut guest = None;
    said.note("host#", "virsh edit web1    # the lines above; then: virsh start web1", || {
        guest = Some(config.boot_under(&lab, &libvirt, &domain)?);
        Ok(String::new())
    })?;
    let mut guest = guest.ok_or("no guest")?;
    guest.run("systemctl is-system-running --wait || { systemctl --failed; exit 1; }", LIMIT)?;

    said.heading("4. The agent");
    said.in_guest(&mut guest, "apt-get install --yes /payload/remoca-agent.deb 2>&1 | tail -3")?;
    said.in_guest(&mut guest, "systemctl show --property StatusText --value remoca-agent")?;

    said.heading("Is all well?");
    let checked = said.on_host(&libvirt, "remoca check web1")?;
    assert!(!checked.contains("failed "), "{checked}");
    for words in ["ok       guest: has attached all disks", "ok       reconnect root", "ok       agent: heard"] {
        assert!(checked.contains(words), "{words}: {checked}");
    }

    said.heading("See it work");
    let fill = "mkfs.ext4 -q $(disk-by-serial root) && mount $(disk-by-serial root) /mnt && \
                remoca-workload create --dir /mnt/set --files 4 --file-size 80M --seed 3 && sync";
    guest.run(fill, LIMIT)?;
    for _ in 0..3 {
        guest.run("cat /mnt/set/* > /dev/null", LIMIT)?;
    }
    said.on_host(&libvirt, "remoca status")?;
    said.text += "\nThis image is in the page cache of its host: a disk as fast as the memory server, which is then left alone. To \
                  see the cache at work all the same, the process is started again, under the running guest, with `--no-hedge`.\n";
    let kill = "pid=$(remoca status -o json web1 | grep -o '\"pid\":[0-9]*' | cut -d : -f 2); kill $pid; \
                while [ -e /proc/$pid/exe ]; do sleep 0.1; done";
    said.on_host(&libvirt, kill)?;
    in_background(said, &libvirt, &format!("{disk} --no-hedge"), "serves the disks of web1")?;
    for _ in 0..2 {
        guest.run("cat /mnt/set/* > /dev/null", LIMIT)?;
    }
    said.on_host(&libvirt, "remoca status")?;
    let all = said.on_host(&libvirt, "remoca status -v web1 | head -18")?;
    assert!(all.contains("started     warm"), "{all}");
    let hits = all.lines().find_map(|line| line.trim().strip_prefix("blocks")?.split_whitespace().next()?.parse().ok());
    assert!(hits > Some(0u64), "{all}");

    said.heading("Take it out");
    said.on_host(&libvirt, "remoca set web1 --off")?;
    guest.run("echo 3 > /proc/sys/vm/drop_caches; remoca-workload verify --dir /mnt/set && umount /mnt", LIMIT)?;
    guest.shut_down()?;

    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out");
    std::fs::create_dir_all(&out)?;
    let Transcript { text, commands, took } = transcript;
    let text = text.replace(&port.to_string(), "7070");
    let summary = format!("{commands} commands; the machine took {:.0} s of the time.\n", took.as_secs_f64());
    std::fs::write(out.join("five-minutes.md"), summary + &text)?;
    Ok(())
}

/// Runs a program as in a terminal of its own, until it has said `word`, and notes what it says.
fn in_background(said: &mut Transcript, libvirt: &Libvirt, command: &str, word: &str) -> Result<()> {
    let name = command.split(' ').nth(1).unwrap_or_default();
    let log = format!("/run/remoca/{name}.log");
    let run = format!(
        "setsid {command} > {log} 2>&1 < /dev/null & \
         for i in $(seq 600); do grep -q '{word}' {log} && break; sleep 0.1; done; cat {log}; grep -q '{word}' {log}"
    );
    said.note("host#", &format!("{command} &"), || Ok(libvirt.shell(&run)?))?;
    Ok(())
}
