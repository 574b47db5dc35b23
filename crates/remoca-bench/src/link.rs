//! Networks of a near host and others, each with a link of its own to the near one: network namespaces, pairs of veth devices, and
//! tbf.

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A full link of 1 Gbit, as measured in pages per second: the target counts from it.
pub const PAGES_PER_S: u32 = 29_000;
/// Rate of a link, in Mbit/s.
pub const MBIT: u32 = 1000;

/// The hosts. They are removed with their owner.
pub struct Link {
    near: String,
    far: Vec<String>,
}

impl Link {
    /// Makes a near host, `count` far ones, and a link of `mbit` Mbit/s to each. Needs root.
    pub fn new(count: u8, mbit: u32) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = |side: &str| format!("remoca-bench-{}-{number}-{side}", std::process::id());
        let link = Self { near: name("near"), far: (0..count).map(|host| name(&format!("far{host}"))).collect() };
        add_host(&link.near)?;
        for (far, host) in link.far.iter().zip(0..) {
            link.connect(far, host, mbit)?;
        }
        Ok(link)
    }

    fn connect(&self, far: &str, host: u8, mbit: u32) -> Result<()> {
        add_host(far)?;
        let device = &format!("link{host}");
        let veth = ["link", "add", device, "type", "veth", "peer", "name", device, "netns", far];
        run("ip", &[&["-n", &self.near][..], &veth].concat())?;
        for (name, address) in [(&*self.near, address(host, 1)), (far, Self::address(host))] {
            run("ip", &["-n", name, "addr", "add", &format!("{address}/24"), "dev", device])?;
            set_rate(name, device, mbit)?;
            run("ip", &["-n", name, "link", "set", device, "up"])?;
        }
        Ok(())
    }

    /// Makes the link to a far host one of `mbit` Mbit/s.
    pub fn set_rate(&self, host: u8, mbit: u32) -> Result<()> {
        let ends = [&self.near, &self.far[usize::from(host)]];
        ends.into_iter().try_for_each(|name| set_rate(name, &format!("link{host}"), mbit))
    }

    /// Returns the address of a far host, of which the first is 0.
    pub fn address(host: u8) -> Ipv4Addr {
        address(host, 2)
    }

    /// Moves this thread, and what it starts from now on, to the near host. It cannot come back.
    pub fn enter_near(&self) -> Result<()> {
        let name_space = File::open(format!("/run/netns/{}", self.near)).context("the near host")?;
        move_into_link_name_space(name_space.as_fd(), Some(LinkNameSpaceType::Network))
            .context("entering the near host")
    }

    /// Returns what is put before a command to run it on a far host.
    pub fn far(&self, host: u8) -> Vec<String> {
        ["ip", "netns", "exec", &self.far[usize::from(host)]].map(str::to_owned).to_vec()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in self.far.iter().chain([&self.near]) {
            // Fails for a host that was not made.
            let _ = run("ip", &["netns", "del", name]);
        }
    }
}

fn set_rate(name: &str, device: &str, mbit: u32) -> Result<()> {
    let rate = &format!("{mbit}mbit");
    let tbf = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"];
    run("tc", &[&["-n", name, "qdisc", "replace", "dev", device][..], &tbf].concat())
}

/// Returns the address of one end of the link to a far host.
fn address(host: u8, end: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 98, 7 + host, end)
}

fn add_host(name: &str) -> Result<()> {
    run("ip", &["netns", "add", name])?;
    run("ip", &["-n", name, "link", "set", "lo", "up"])
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output().with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
