//! The Debian packages, installed in a guest with systemd: the agent's with one command, before there is a port; the
//! host's as well. They are upgraded, removed and purged while in use.

use remoca_guest_tests::installed::{
    FrontEnd, assert_active, kill_quiet, packages, process_of, property, runs_programs_of_here, wait_until_kept,
    wait_until_nothing_is_kept,
};
use remoca_guest_tests::{Host, Image, LIMIT, Result, attach, remoca};
use remoca_lab::{Guest, Lab, Recipe, store};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Expects manual pages and completions in both packages.
fn expect_manuals(packages: &[PathBuf; 2]) -> Result<()> {
    let files = [
        ["man/man1/remoca.1.gz", "man1/remoca-disk.1.gz", "completions/remoca", "_remoca", "remoca.fish"],
        [
            "man/man1/remoca-agent.1.gz",
            "man1/remoca-agent-check.1.gz",
            "completions/remoca-agent",
            "_remoca-agent",
            "remoca-agent.fish",
        ],
    ];
    for (package, files) in packages.iter().zip(files) {
        let listed = Command::new("dpkg-deb").arg("--contents").arg(package).output()?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for file in files {
            assert!(listed.contains(&format!("/{file}\n")), "{file} is not in {listed}");
        }
    }
    Ok(())
}

fn install_the_agent(guest: &mut Guest) -> Result<()> {
    let installed = guest.run("apt-get install --yes /payload/remoca-agent.deb 2>&1", LIMIT)?;
    assert_active(guest, "remoca-agent")?;
    guest.run("systemctl is-enabled remoca-agent", LIMIT).map_err(|error| format!("{error}\n{installed}"))?;
    let status = "systemctl show --property StatusText --value remoca-agent";
    assert_eq!(guest.run(status, LIMIT)?.trim(), "waiting for an eviction port");
    Ok(())
}

/// Installs and removes a package where systemd does not run, as in a container: nothing is started, and nothing fails.
fn come_and_go_without_systemd(guest: &mut Guest, package: &str) -> Result<()> {
    let script = format!("mount -t tmpfs none /run/systemd && dpkg -i /payload/{package}.deb && dpkg -P {package}");
    guest.run(&format!("unshare --mount sh -c '{script}' 2>&1"), LIMIT)?;
    Ok(())
}

fn upgrade_and_remove_the_agent(guest: &mut Guest) -> Result<()> {
    let former = process_of(guest, "remoca-agent")?;
    guest.run("dpkg -i /payload/remoca-agent.deb", LIMIT)?;
    assert_active(guest, "remoca-agent")?;
    assert_ne!(process_of(guest, "remoca-agent")?, former, "an upgrade restarts the agent");

    guest.run("systemctl disable --now remoca-agent && dpkg -i /payload/remoca-agent.deb", LIMIT)?;
    assert_eq!(process_of(guest, "remoca-agent")?, 0, "what was disabled stays so");
    guest.run("systemctl enable --now remoca-agent", LIMIT)?;
    assert_ne!(process_of(guest, "remoca-agent")?, 0);

    guest.run("dpkg -r remoca-agent", LIMIT)?;
    guest.run("! pidof remoca-agent", LIMIT)?;
    guest.run("dpkg -P remoca-agent && test -z \"$(find /etc /var/lib/systemd -name '*remoca-agent*')\"", LIMIT)?;
    Ok(())
}

/// Writes to both exports of the disk's unit and reads the data back, bypassing all caches.
fn use_the_exports(guest: &mut Guest, round: u32) -> Result<()> {
    for export in ["data", "block"] {
        let script = format!(
            "nbd-client -unix /run/remoca/web1.nbd /dev/nbd0 -N {export} && \
             yes '{export} {round}' | dd of=/dev/nbd0 bs=1M count=8 iflag=fullblock oflag=direct conv=fsync 2>&1 && \
             yes '{export} {round}' | head -c 8M > /tmp/written && \
             dd if=/dev/nbd0 bs=1M count=8 iflag=direct 2> /dev/null | cmp - /tmp/written; result=$?; \
             nbd-client -d /dev/nbd0; exit $result"
        );
        guest.run(&script, LIMIT)?;
    }
    Ok(())
}

/// Checks which actions are denied to the VM process, and that its disks still work: with io_uring and without, and
/// after an upgrade to a program that makes a refused system call.
fn confined_disk(guest: &mut Guest) -> Result<()> {
    const UNIT: &str = "remoca-disk@web1";
    let process = process_of(guest, UNIT)?;
    let rights = guest.run(&format!("grep -E '^(CapBnd|CapEff|NoNewPrivs|Seccomp):' /proc/{process}/status"), LIMIT)?;
    let rights: Vec<_> = rights.split_whitespace().collect();
    assert_eq!(
        rights,
        ["CapEff:", "000000000000000f", "CapBnd:", "000000000000000f", "NoNewPrivs:", "1", "Seccomp:", "2"]
    );
    // In the file systems as the process sees them, but as root with all rights.
    let inside = format!("nsenter --target {process} --mount");
    for path in ["/usr/bin/x", "/etc/x", "/boot/x", "/var/lib/dpkg/x", "/proc/sys/kernel/core_pattern"] {
        guest
            .run(&format!("! {inside} sh -c 'echo > {path}' 2> /dev/null"), LIMIT)
            .map_err(|_| format!("{path} is writable"))?;
    }
    // An inaccessible path is a node of the same kind that no process may open.
    let mode =
        guest.run(&format!("test -S /run/systemd/private && {inside} stat --format=%a /run/systemd/private"), LIMIT)?;
    assert_eq!(mode.trim(), "0");
    guest.run(&format!("ls -l /proc/{process}/fd | grep -q io_uring"), LIMIT)?;
    use_the_exports(guest, 1)?;

    // 101 is ptrace. Without the filter, no capability is needed for it.
    let refused =
        "perl -e 'exit(syscall(101, 0, 0, 0, 0) == -1 && $! == 1 ? 0 : 1)' && echo refused >> /run/remoca/newer";
    let program = format!("#!/bin/sh\n{refused}\nexec /usr/bin/remoca \"$@\"\n");
    guest.run(&format!("cat > /usr/local/bin/newer << 'END'\n{program}END\nchmod 755 /usr/local/bin/newer"), LIMIT)?;
    guest.run("/usr/local/bin/newer --help > /dev/null && ! test -e /run/remoca/newer", LIMIT)?;
    let upgraded = guest.run("remoca upgrade web1 --program /usr/local/bin/newer", LIMIT)?;
    assert!(upgraded.contains(&format!("process {process} runs version")), "{upgraded}");
    // The program was asked, and it took over.
    assert_eq!(guest.run("cat /run/remoca/newer", LIMIT)?.trim_end(), "refused\nrefused");
    assert_eq!(process_of(guest, UNIT)?, process);
    use_the_exports(guest, 2)?;

    let drop_in = format!("/run/systemd/system/{UNIT}.service.d");
    let calls = "io_uring_setup io_uring_enter io_uring_register";
    let without =
        format!("mkdir -p {drop_in} && printf '[Service]\\nSystemCallFilter=~{calls}\\n' > {drop_in}/calls.conf");
    guest.run(&format!("{without} && systemctl daemon-reload && systemctl kill --signal=KILL {UNIT}"), LIMIT)?;
    guest.run("for i in $(seq 1000); do remoca status web1 && exit 0; sleep 0.1; done; exit 1", LIMIT)?;
    let process = process_of(guest, UNIT)?;
    guest.run(&format!("! ls -l /proc/{process}/fd | grep -q io_uring"), LIMIT)?;
    use_the_exports(guest, 3)?;
    guest.run(&format!("rm {drop_in}/calls.conf && systemctl daemon-reload && systemctl restart {UNIT}"), LIMIT)?;
    Ok(())
}

/// Runs units as a former package had them, with files of arguments, and installs the package over it. Running processes stay;
/// after a kill they run by what their files were converted to, or by the files if that cannot be. A front end that never
/// connects again goes through all of it.
fn former_units_are_converted(guest: &mut Guest) -> Result<()> {
    const UNITS: [&str; 3] = ["remoca-serve", "remoca-disk@web1", "remoca-disk@odd"];
    let former = |command: &str, file: &str, variable: &str| {
        format!(
            "s|^AssertPathExists=.*|AssertPathExists=/etc/remoca/{file}.env|;\
             s|^ExecStart=.*|EnvironmentFile=/etc/remoca/{file}.env\\nExecStart=/usr/bin/remoca {command} ${variable}|"
        )
    };
    let folder = "/usr/lib/systemd/system";
    let (disk, serve) =
        (former("disk --name %i", "%i", "REMOCA_DISK_ARGS"), former("serve", "serve", "REMOCA_SERVE_ARGS"));
    guest.run(
        &format!(
            "cd {folder} && sed -i '{disk}' remoca-disk@.service && sed -i '{serve}' remoca-serve.service && \
             rmdir /etc/remoca/vms && systemctl daemon-reload"
        ),
        LIMIT,
    )?;
    // An image of another user, a block device, and a group that root is not in.
    let web1 = "REMOCA_DISK_ARGS=--server unix:/run/remoca-serve/s --cache 8M --socket-group mail \
                --disk image=/tmp/web1.img,socket=/run/remoca/web1.sock --port /run/remoca/web1-port.sock \
                --nbd unix:/run/remoca/web1.nbd \
                --disk image=/srv/data.img,name=data --disk image=/dev/loop0,name=block";
    let odd = "REMOCA_LOG=info\nREMOCA_DISK_ARGS=--image /srv/odd.img --socket /run/remoca/odd.sock";
    let images = "truncate -s 16M /tmp/web1.img && truncate -s 64M /srv/data.img /srv/block.img /srv/odd.img && chown nobody /srv/data.img && \
                  chmod 600 /srv/data.img && modprobe loop && modprobe nbd && losetup /dev/loop0 /srv/block.img";
    let serve = "REMOCA_SERVE_ARGS=--listen unix:/run/remoca-serve/s --memory 16M";
    let files = format!(
        "cd /etc/remoca && echo '{web1}' > web1.env && printf '{odd}\\n' > odd.env && echo '{serve}' > serve.env"
    );
    guest.run(&format!("{images} && {files} && systemctl start {}", UNITS.join(" ")), LIMIT)?;
    for unit in UNITS {
        assert_active(guest, unit)?;
    }
    let former = UNITS.map(|unit| process_of(guest, unit)).into_iter().collect::<Result<Vec<_>>>()?;
    let front_end = FrontEnd::start(guest, "web1", "")?;

    let said = guest.run("dpkg -i /payload/remoca.deb 2>&1", LIMIT)?;
    for words in ["web1.env: converted", "serve.env: converted", "REMOCA_LOG has no place", "remoca-disk@odd goes on"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let now = UNITS.map(|unit| process_of(guest, unit)).into_iter().collect::<Result<Vec<_>>>()?;
    assert_eq!(now, former, "an installation restarts nothing");
    guest.run(
        "remoca config check && cd /etc/remoca && test -e odd.env && ! test -e web1.env && ! test -e serve.env",
        LIMIT,
    )?;
    // The same process, by its file from now on.
    let reload = "systemctl reload remoca-disk@web1 || { journalctl -n 30 -u remoca-disk@web1; exit 1; }";
    let upgraded = guest.run(&format!("{reload}; remoca config show web1 --origin"), LIMIT)?;
    assert!(upgraded.contains("cache = \"8M\"    # /etc/remoca/vms/web1.toml:"), "{upgraded}");
    assert_eq!(process_of(guest, UNITS[1])?, former[1]);
    wait_until_kept(guest, "web1")?;
    let kept = property(guest, UNITS[1], "NFileDescriptorStore")?;

    let units = UNITS.join(" ");
    guest.run(&format!("systemctl kill --signal=KILL {units}"), LIMIT)?;
    let answers = "remoca status web1 > /dev/null && remoca status odd > /dev/null";
    guest.run(&format!("for i in $(seq 1000); do {answers} && exit 0; sleep 0.1; done; exit 1"), LIMIT)?;
    let line = |process: u32| format!("tr '\\0' ' ' < /proc/{process}/cmdline");
    let web1 = process_of(guest, UNITS[1])?;
    assert_eq!(guest.run(&line(web1), LIMIT)?.trim(), "/usr/bin/remoca disk --name web1");
    let odd = process_of(guest, UNITS[2])?;
    assert!(guest.run(&line(odd), LIMIT)?.contains("--image /srv/odd.img"));
    kill_quiet(guest, "web1")?;
    wait_until_kept(guest, "web1")?;
    kill_quiet(guest, "web1")?;
    wait_until_kept(guest, "web1")?;
    assert_eq!(property(guest, UNITS[1], "NFileDescriptorStore")?, kept);
    println!("{}", front_end.finish(guest)?);
    wait_until_nothing_is_kept(guest, "web1")?;
    guest.run("systemctl stop remoca-disk@odd && rm -r /etc/systemd/system/remoca-disk@odd.service.d", LIMIT)?;
    // What the operator wrote instead of the file of arguments is not set aside by the next package.
    guest.run(
        "printf 'version = 1\\n' > /etc/remoca/vms/odd.toml && dpkg -i /payload/remoca.deb | grep 'odd.env is not used' && \
         test ! -e /etc/systemd/system/remoca-disk@odd.service.d && rm /etc/remoca/vms/odd.toml",
        LIMIT,
    )?;

    // A disk whose image is gone is not tried five times a second: its unit has failed at once, and says why.
    let missing = "version = 1\n[[disk]]\nname = \"root\"\nimage = \"/srv/none.img\"\nformat = \"raw\"\nsocket = \"/run/remoca/n.sock\"";
    guest.run(
        &format!("printf '{missing}\\n' > /etc/remoca/vms/none.toml; ! systemctl start remoca-disk@none 2> /dev/null"),
        LIMIT,
    )?;
    let state = guest.run("systemctl show --property ActiveState,NRestarts,ExecMainStatus remoca-disk@none", LIMIT)?;
    for words in ["ActiveState=failed", "NRestarts=0", "ExecMainStatus=66"] {
        assert!(state.contains(words), "{words}: {state}");
    }
    guest.run("journalctl --unit remoca-disk@none | grep -q 'not tried again'", LIMIT)?;
    guest.run(
        "systemctl reset-failed && rm /etc/remoca/vms/none.toml /etc/remoca/odd.env && systemctl daemon-reload",
        LIMIT,
    )?;
    Ok(())
}

fn host_package(guest: &mut Guest) -> Result<()> {
    guest.run("apt-get install --yes /payload/remoca.deb 2>&1 && remoca --help", LIMIT)?;
    let units = "/usr/lib/systemd/system/remoca-serve.service /usr/lib/systemd/system/remoca-disk@web1.service";
    let verified = guest.run(&format!("systemd-analyze verify --man=no {units} 2>&1"), LIMIT)?;
    assert_eq!(verified, "");
    assert_eq!(process_of(guest, "remoca-serve")?, 0, "nobody has said yet how much memory to give");

    former_units_are_converted(guest)?;
    confined_disk(guest)?;

    let former = [process_of(guest, "remoca-serve")?, process_of(guest, "remoca-disk@web1")?];
    let said = guest.run("dpkg -i /payload/remoca.deb", LIMIT)?;
    assert!(said.contains("still run the former version: remoca-disk@web1.service remoca-serve.service"), "{said}");
    assert_eq!([process_of(guest, "remoca-serve")?, process_of(guest, "remoca-disk@web1")?], former);

    let refused = guest.try_run("dpkg -r remoca 2>&1", LIMIT)?;
    assert!(!refused.success() && refused.text().contains("still in use: remoca-disk@web1.service"), "{refused:?}");
    assert_eq!(process_of(guest, "remoca-disk@web1")?, former[1]);
    // The process is killed, and its unit waits for the restart: still in use.
    let drop_in = "/run/systemd/system/remoca-disk@web1.service.d";
    let slow = format!("mkdir -p {drop_in} && printf '[Service]\\nRestartSec=1h\\n' > {drop_in}/slow.conf");
    guest.run(&format!("{slow} && systemctl daemon-reload && systemctl kill --signal=KILL remoca-disk@web1"), LIMIT)?;
    let waits = "until systemctl is-active remoca-disk@web1 | grep -q activating; do sleep 0.1; done";
    guest.run(waits, LIMIT)?;
    let refused = guest.try_run("dpkg -r remoca 2>&1", LIMIT)?;
    assert!(!refused.success() && refused.text().contains("still in use: remoca-disk@web1.service"), "{refused:?}");
    guest.run("systemctl stop remoca-disk@web1 && dpkg -P remoca && ! pidof remoca", LIMIT)?;
    Ok(())
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_package_brings_a_working_agent_with_one_command() -> Result<()> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "256M")?;
    let packed = packages(&host.folder().join("packages"))?;
    expect_manuals(&packed)?;
    for (one, other) in packed.iter().zip(packages(&host.folder().join("again"))?) {
        assert!(std::fs::read(one)? == std::fs::read(other)?, "{} is not reproducible", one.display());
    }
    let image = host.folder().join("data.img");
    store::sparse_image(&image, 512 << 20)?;
    store::format_ext4(&image)?;
    host.start_server()?;
    // The image is in the page cache. With hedging, the disk would rightly be preferred.
    host.start_process(&[Image { name: "data", path: image, options: "" }], "128M", &["--no-hedge"])?;

    let mut config = host.guest(&lab, "package")?;
    config.disks.retain(|disk| disk.serial == "data");
    config.payload.retain(|(name, _)| name != "remoca-agent");
    config = config.payload("remoca.deb", &packed[0]).payload("remoca-agent.deb", &packed[1]);
    config = config.payload("front-end", Path::new(env!("CARGO_BIN_EXE_front-end")));
    config.qemu_args.extend(["-device".to_owned(), "pcie-root-port,id=slot0,chassis=7".to_owned()]);
    config.recipe = Recipe::bookworm_with_systemd();
    let mut guest = config.boot(&lab)?;
    guest.run("systemctl is-system-running --wait || { systemctl --failed; exit 1; }", LIMIT)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    guest.run("remoca-workload create --dir /mnt/set --files 2 --file-size 128M --seed 3 && sync", LIMIT)?;

    come_and_go_without_systemd(&mut guest, "remoca-agent")?;
    install_the_agent(&mut guest)?;
    attach(&mut guest.qmp()?, &host, &mut guest, "port", "remoca-port", "slot0")?;
    host.wait_until("evictions match and the cache hits", |status| {
        let _ = guest.run("cat /mnt/set/* > /dev/null", LIMIT);
        status.counters["evictions_admitted"] > 1000 && status.counters["hit_blocks"] > 1000
    })?;
    upgrade_and_remove_the_agent(&mut guest)?;

    if runs_programs_of_here(&mut guest)? {
        come_and_go_without_systemd(&mut guest, "remoca")?;
        host_package(&mut guest)?;
    } else {
        println!("the guest is older than this machine: the host's package was not tested");
    }
    guest.run("systemctl is-system-running || { systemctl --failed; exit 1; }", LIMIT)?;
    Ok(guest.shut_down()?)
}
