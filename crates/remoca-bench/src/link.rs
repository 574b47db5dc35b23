//! A network of two hosts and one link of 1 Gbit between them: two network namespaces, a pair of veth devices, and tbf.

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Address of the far host.
pub const FAR: Ipv4Addr = Ipv4Addr::new(10, 98, 7, 2);
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 98, 7, 1);
const DEVICE: &str = "link0";
/// A full link, as measured in pages per second: the target counts from it.
pub const PAGES_PER_S: f64 = 29_000.0;

/// The two hosts. They are removed with their owner.
pub struct Link {
    near: String,
    far: String,
}

impl Link {
    /// Makes both hosts and the link. Needs root.
    pub fn new() -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side: &str| format!("remoca-bench-{}-{number}-{side}", std::process::id());
        let link = Self { near: name("near"), far: name("far") };
        for name in [&link.near, &link.far] {
            run("ip", &["netns", "add", name])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
        }
        let veth = ["link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", &link.far];
        run("ip", &[&["-n", &link.near][..], &veth].concat())?;
        for (name, address) in [(&link.near, NEAR), (&link.far, FAR)] {
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
            let tbf = ["root", "tbf", "rate", "1gbit", "burst", "128kb", "latency", "50ms"];
            run("tc", &[&["-n", name, "qdisc", "add", "dev", DEVICE][..], &tbf].concat())?;
            run("ip", &["-n", name, "link", "set", DEVICE, "up"])?;
        }
        Ok(link)
    }

    /// Moves this thread, and what it starts from now on, to the near host. It cannot come back.
    pub fn enter_near(&self) -> Result<()> {
        let name_space = File::open(format!("/run/netns/{}", self.near)).context("the near host")?;
        move_into_link_name_space(name_space.as_fd(), Some(LinkNameSpaceType::Network))
            .context("entering the near host")
    }

    /// Returns what is put before a command to run it on the far host.
    pub fn far(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.far].map(str::to_owned).to_vec()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in [&self.near, &self.far] {
            // Fails for a host that was not made.
            let _ = run("ip", &["netns", "del", name]);
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
