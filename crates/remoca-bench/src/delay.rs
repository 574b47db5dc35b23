//! A proxy that makes a memory server late: it passes all bytes unchanged, those of the server so much later.
//!
//! Bytes that are late do not hold up others, so the way keeps its throughput, up to the limit of its queues. For the rows in
//! which one of several servers is late; with a delay of 0 the same proxy is measured beside it, so that its own cost does not
//! count.

use anyhow::{Context, Result};
use clap::Args;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Largest piece, in bytes.
const PIECE_BYTES: usize = 1 << 16;
/// Maximum number of pieces on their way in one direction: 16 MiB, which a link of 1 Gbit fills in 130 ms.
const PIECES_MAX: usize = 256;

#[derive(Args)]
pub struct DelayArgs {
    /// Address that clients connect to
    listen: SocketAddr,
    /// Address of the server
    server: SocketAddr,
    /// How much later the server's bytes arrive, in microseconds
    #[arg(long, value_name = "US", default_value_t = 20_000)]
    delay_us: u64,
}

/// Runs the proxy until it is killed.
pub fn run(args: &DelayArgs) -> Result<()> {
    let proxy = DelayProxy::start(args.listen, args.server, Duration::from_micros(args.delay_us))?;
    println!("{} is {} at {} us", proxy.address, args.server, args.delay_us);
    loop {
        std::thread::park();
    }
}

/// A running proxy. Its threads run as long as this process.
pub struct DelayProxy {
    /// Address that clients connect to.
    pub address: SocketAddr,
    delay_us: Arc<AtomicU64>,
}

impl DelayProxy {
    /// Starts a proxy for `server` at `listen`.
    pub fn start(listen: SocketAddr, server: SocketAddr, delay: Duration) -> Result<Self> {
        let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen at {listen}"))?;
        let proxy = Self { address: listener.local_addr()?, delay_us: Arc::default() };
        proxy.set_delay(delay);
        let delay_us = Arc::clone(&proxy.delay_us);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Without a server, the client's connection ends at once.
                let _ = carry(&client, server, &delay_us);
            }
        });
        Ok(proxy)
    }

    /// Changes the delay of the bytes that come from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.delay_us.store(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Starts the threads of one connection, which end with it.
fn carry(client: &TcpStream, server: SocketAddr, delay_us: &Arc<AtomicU64>) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    for (from, to, delay_us) in [(client, &server, &Arc::default()), (&server, client, delay_us)] {
        let (from, to, also_from) = (from.try_clone()?, to.try_clone()?, from.try_clone()?);
        let (sender, receiver) = sync_channel(PIECES_MAX);
        let delay_us = Arc::clone(delay_us);
        std::thread::spawn(move || take(from, &sender, &delay_us));
        std::thread::spawn(move || give(&also_from, to, &receiver));
    }
    Ok(())
}

/// A piece, and when it is due.
type Piece = (Instant, Vec<u8>);

/// Reads pieces until there are no more, and notes when each is due.
fn take(mut from: TcpStream, sender: &SyncSender<Piece>, delay_us: &AtomicU64) {
    let mut bytes = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let due = Instant::now() + Duration::from_micros(delay_us.load(Ordering::Relaxed));
        if sender.send((due, bytes[..count].to_vec())).is_err() {
            return;
        }
    }
}

/// Writes each piece when it is due, in their order, and then passes the end on.
fn give(from: &TcpStream, mut to: TcpStream, pieces: &Receiver<Piece>) {
    for (due, bytes) in pieces {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            // The reader must not wait for bytes that nobody wants.
            let _ = from.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a server that sends back what it gets, until the client has no more.
    fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let mut target = client.try_clone().unwrap();
                std::thread::spawn(move || {
                    let _ = io::copy(&mut &client, &mut target);
                    let _ = target.shutdown(Shutdown::Write);
                });
            }
        });
        address
    }

    fn bytes(seed: u64, count: usize) -> Vec<u8> {
        let mut random = crate::guest::Random(seed);
        (0..count).map(|_| random.next().to_le_bytes()[0]).collect()
    }

    /// Sends bytes through the proxy, changes its delay meanwhile, and returns what comes back.
    fn round_trip(proxy: &DelayProxy, sent: &[u8], delays_us: &[u64]) -> Vec<u8> {
        let stream = TcpStream::connect(proxy.address).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let received = std::thread::spawn(move || {
            let mut received = Vec::new();
            reader.read_to_end(&mut received).unwrap();
            received
        });
        for (piece, delay_us) in sent.chunks(sent.len().div_ceil(delays_us.len())).zip(delays_us) {
            proxy.set_delay(Duration::from_micros(*delay_us));
            (&stream).write_all(piece).unwrap();
        }
        stream.shutdown(Shutdown::Write).unwrap();
        received.join().unwrap()
    }

    #[test]
    fn bytes_pass_unchanged_and_in_order_whatever_the_delay() {
        let proxy = DelayProxy::start("127.0.0.1:0".parse().unwrap(), echo(), Duration::ZERO).unwrap();
        let sent = bytes(1, 3 << 20);
        assert!(round_trip(&proxy, &sent, &[0]) == sent);
        // A shorter delay lets no later byte overtake an earlier one.
        assert!(round_trip(&proxy, &sent, &[20_000, 0, 3_000, 0, 10_000, 1]) == sent);
    }

    #[test]
    fn connections_do_not_mix_and_end_with_their_server() {
        let proxy = DelayProxy::start("127.0.0.1:0".parse().unwrap(), echo(), Duration::from_millis(1)).unwrap();
        let threads: Vec<_> = (2..6)
            .map(|seed| {
                let stream = TcpStream::connect(proxy.address).unwrap();
                std::thread::spawn(move || {
                    let sent = bytes(seed, 100_000);
                    (&stream).write_all(&sent).unwrap();
                    stream.shutdown(Shutdown::Write).unwrap();
                    let mut received = Vec::new();
                    (&stream).read_to_end(&mut received).unwrap();
                    assert!(received == sent);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());

        // At an address at which no other test takes the port.
        let nobody = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
        let proxy = DelayProxy::start("127.0.0.1:0".parse().unwrap(), nobody, Duration::ZERO).unwrap();
        let mut stream = TcpStream::connect(proxy.address).unwrap();
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
}
