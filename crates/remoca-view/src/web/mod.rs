//! `remoca web`: a page and metrics, on loopback or a Unix socket. It only reads.
//!
//! Requests are answered from the newest snapshot, so they cause no work of VM processes, nor of the thread that asks these. A connection
//! has limits of size and time, and there are at most [`CONNECTIONS_MAX`]: one more ends the oldest, so slow clients hold up nobody.

pub mod api;
mod guard;
mod page;
mod routes;

use crate::address::Address;
use crate::watch::{Sockets, Watch, runtime};
use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use guard::Hosts;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use remoca_io::socket::{SocketPath, SocketSource};
use routes::Site;
use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Most connections at a time.
pub const CONNECTIONS_MAX: usize = 64;
/// Largest head of a request, in bytes, and most headers in it.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// Longest time in which the head of a request arrives.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);
/// Longest time of a connection, whatever happens on it.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(60);

/// What the page is started with.
pub struct Options {
    pub listen: Vec<Address>,
    /// Names of this host, besides those of loopback, under which the page may be asked for.
    pub hosts: Vec<String>,
    /// Group that may connect to Unix sockets; only the owner may without one.
    pub group: Option<u32>,
    pub interval: Duration,
    pub sockets: Sockets,
    /// Socket of the daemon that divides memory, which need not run.
    pub host_socket: Option<PathBuf>,
}

/// Runs until the process is told to end. Calls `ready` with its addresses when it listens.
///
/// # Errors
/// If it cannot listen at an address, or takes no more snapshots.
pub fn run(options: Options, ready: impl FnOnce(&[String])) -> Result<()> {
    runtime()?.block_on(serve(options, ready))
}

enum Listener {
    Tcp(TcpListener),
    /// The socket is removed at the end.
    Unix(UnixListener, Option<SocketPath>),
}

async fn serve(options: Options, ready: impl FnOnce(&[String])) -> Result<()> {
    let Options { listen, hosts, group, interval, sockets, host_socket } = options;
    let (mut ended, mut interrupted) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut listeners = Vec::new();
    for address in &listen {
        listeners.push(bind(address, group).await?);
    }
    let (mut ips, mut addresses) = (Vec::new(), Vec::new());
    for (listener, address) in listeners.iter().zip(&listen) {
        match listener {
            Listener::Tcp(listener) => {
                let address = listener.local_addr()?;
                ips.push(address.ip());
                addresses.push(format!("http://{address}/"));
            }
            Listener::Unix(..) => addresses.push(address.to_string()),
        }
    }
    let (publish, mut snapshots) = watch::channel(None);
    let watch = Watch::new(sockets, interval).with_host(host_socket).start(publish)?;
    let site = Site::new(snapshots.clone(), Hosts::new(&ips, &hosts));
    let (router, connections) = (routes::router(&site), Arc::new(Connections::default()));
    let mut guards = Vec::new();
    for listener in listeners {
        let (router, connections) = (router.clone(), Arc::clone(&connections));
        match listener {
            Listener::Tcp(listener) => {
                let accept = async move || Ok(listener.accept().await?.0);
                tokio::spawn(accept_all(accept, router, connections));
            }
            Listener::Unix(listener, guard) => {
                guards.push(guard);
                let accept = async move || Ok(listener.accept().await?.0);
                tokio::spawn(accept_all(accept, router, connections));
            }
        }
    }
    ready(&addresses);
    let result = tokio::select! {
        _ = ended.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
        // Nobody should take what stands there for new.
        _ = snapshots.wait_for(|_| false) => Err(why_ended(watch)),
    };
    // Sockets are removed.
    drop(guards);
    result
}

/// Returns why `watch`, which has no more snapshots, has ended.
fn why_ended(watch: JoinHandle<io::Result<()>>) -> anyhow::Error {
    let ended = watch.join().unwrap_or_else(|_| Err(io::Error::other("the thread that takes them panicked")));
    anyhow!("no more snapshots: {}", ended.err().map_or_else(String::new, |error| error.to_string()))
}

async fn bind(address: &Address, group: Option<u32>) -> Result<Listener> {
    match address {
        Address::Tcp(socket) => {
            let listener = TcpListener::bind(socket).await;
            let hint = "is another `remoca web` running, or is it no address of this host?";
            Ok(Listener::Tcp(listener.with_context(|| format!("cannot listen on {address}: {hint}"))?))
        }
        Address::Unix(path) => {
            let SocketSource::Listener { listener, path: guard } = SocketSource::bind(path, group)? else {
                bail!("{address} is no listening socket");
            };
            listener.set_nonblocking(true)?;
            Ok(Listener::Unix(UnixListener::from_std(listener)?, guard))
        }
    }
}

/// Connections that are open, the oldest first.
#[derive(Default)]
struct Connections(Mutex<VecDeque<AbortHandle>>);

impl Connections {
    /// Adds a connection. The oldest one ends if there are too many.
    fn add(&self, connection: AbortHandle) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|connection| !connection.is_finished());
        if open.len() >= CONNECTIONS_MAX
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        open.push_back(connection);
    }
}

async fn accept_all<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    mut accept: impl AsyncFnMut() -> io::Result<S>,
    router: Router,
    connections: Arc<Connections>,
) {
    loop {
        match accept().await {
            Ok(stream) => connections.add(tokio::spawn(talk(stream, router.clone())).abort_handle()),
            // For lack of descriptors, for instance. Another attempt later may succeed.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Answers the requests on one connection.
async fn talk<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(stream: S, router: Router) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_PATIENCE);
    http.max_buf_size(HEAD_BYTES_MAX).max_headers(HEADERS_MAX);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(CONNECTION_PATIENCE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!("a connection ended: {error}"),
        Err(_) => tracing::debug!("a connection took too long"),
    }
}
