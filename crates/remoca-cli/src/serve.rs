//! `remoca serve`: gives memory of this host to the VM processes of others.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use remoca_server::{Config, Limits, ListenAddress, PageLocking, Server, parse_duration, parse_size};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

/// Serve memory of this host to VM processes (`remoca disk`).
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Where to listen: tcp:HOST:PORT or unix:PATH; may be repeated
    #[arg(long, required = true, value_name = "ADDRESS")]
    listen: Vec<ListenAddress>,

    /// Memory to serve, a multiple of 2 MiB; taken and locked at the start
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    memory: u64,

    /// Most memory for one client [default: all]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    quota: Option<u64>,

    /// How long the pages of a client that vanished are kept for it
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    grace: Duration,

    /// Let the host swap pages out, and take memory only when it is used
    #[arg(long)]
    no_lock: bool,

    /// Threads that serve clients [default: one for each processor]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Most clients at a time
    #[arg(long, value_name = "N", default_value_t = Limits::default().sessions)]
    max_clients: usize,

    /// A Unix socket that answers each connection with the status as JSON
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

impl ServeArgs {
    fn config(self) -> Config {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        Config {
            listen: self.listen,
            memory_bytes: self.memory,
            quota_bytes: self.quota,
            grace: self.grace,
            locking: if self.no_lock { PageLocking::Unlocked } else { PageLocking::Locked },
            threads: self.threads.unwrap_or_else(processors),
            control: self.control,
            limits: Limits { sessions: self.max_clients, ..Limits::default() },
        }
    }
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// If the server cannot start; the message says what to do.
pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().build().context("cannot wait for signals")?;
    let (mut terminate, mut interrupt) = {
        let _context = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let server = Server::start(args.config())?;
    let addresses: Vec<String> = server.local_addresses().iter().map(ListenAddress::to_string).collect();
    // Whoever started us may not read what we say; that is no reason to stop.
    let _said = writeln!(std::io::stdout(), "listening on {}", addresses.join(" "));
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        tracing::warn!(%error, "the service manager could not be told that the server is ready");
    }
    let name = runtime.block_on(async {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    });
    tracing::info!("{name}: stopping");
    let _told = sd_notify::notify(&[NotifyState::Stopping]);
    server.shutdown();
    Ok(())
}
