//! `remoca web`: a page and metrics of all VMs of this host.

use crate::number::whole_in;
use crate::top::{host_socket, sockets_of};
use anyhow::{Result, anyhow};
use clap::Args;
use remoca_disk::start::WrongOptions;
use remoca_view::address::Address;
use remoca_view::web::{self, Options};
use sd_notify::NotifyState;
use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

/// Serve a page and Prometheus metrics of all VMs of this host: what is wrong, what the cache does, and what more memory would do.
///
/// It only reads. Paths: / is the page, /metrics is for Prometheus, /api/snapshot and /api/status are for programs, /healthz says
/// that it runs. Whoever can connect reads the names, images and loads of all VMs.
#[derive(Args, Debug)]
pub struct WebArgs {
    /// Only these VMs: names, or paths of control sockets [default: all that run here]
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Where it listens: ADDRESS:PORT of loopback, or unix:/PATH. May be repeated [default: 127.0.0.1:9170]
    #[arg(short, long, value_name = "ADDRESS")]
    listen: Vec<Address>,

    /// Name under which the page is asked for, besides localhost and the addresses that it listens at: that of a proxy. May be
    /// repeated
    #[arg(long, value_name = "NAME", value_parser = parse_host)]
    host: Vec<String>,

    /// Allow an address that other hosts reach. Everyone there can read the page: there is no password and no encryption
    #[arg(long)]
    open: bool,

    /// Group (name or number) that may connect to Unix sockets [default: only the owner may]
    #[arg(long, value_name = "GROUP", value_parser = crate::group::parse_group)]
    socket_group: Option<u32>,

    /// Time between two snapshots
    #[arg(short, long, value_name = "SECONDS", default_value_t = 5,
          value_parser = whole_in("number of seconds", 1_u32..=3600))]
    interval: u32,
}

/// Runs the subcommand, until it is told to end.
///
/// # Errors
/// If it cannot listen at an address, or should not.
pub fn run(args: WebArgs) -> Result<()> {
    let WebArgs { names, listen, host, open, socket_group, interval } = args;
    if let Some(address) = listen.iter().find(|address| !address.is_local() && !open) {
        let why = "can be reached from other hosts, and everyone there would read the names, images and loads of all VMs: listen at \
                   127.0.0.1 or a Unix socket and use a tunnel or a proxy that knows who may read, or say --open";
        return Err(anyhow!("{address} {why}").context(WrongOptions));
    }
    let options = Options {
        listen: if listen.is_empty() { vec![Address::default()] } else { listen },
        hosts: host,
        group: socket_group,
        interval: Duration::from_secs(interval.into()),
        sockets: sockets_of(names)?,
        host_socket: host_socket(),
    };
    web::run(options, |addresses| {
        // The parent may not read our output, and there may be no service manager.
        let _said = writeln!(std::io::stdout(), "listening on {}", addresses.join(" "));
        let _told = sd_notify::notify(&[NotifyState::Ready]);
    })
}

/// Returns the name or the address of a host. Requests may name any port, so none belongs to it.
fn parse_host(text: &str) -> Result<String, String> {
    let is_address = text.parse::<IpAddr>().is_ok();
    match text.is_empty() || text.contains([':', '/', '[']) && !is_address {
        true => Err(format!("`{text}` is no name of a host: write it without a port, such as page.example")),
        false => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_no_port() {
        for name in ["page.example", "10.0.0.7", "fd00::7", "page"] {
            assert_eq!(parse_host(name).as_deref(), Ok(name));
        }
        for name in ["", "page.example:9170", "10.0.0.7:80", "[fd00::7]", "[fd00::7]:80", "http://page.example"] {
            assert!(parse_host(name).unwrap_err().contains("write it without a port"), "{name}");
        }
    }
}
