//! What the screens cost: CPU time of this process for a scrape of 200 VMs that another process plays, series of a VM, sizes.
//!
//! `cargo run --release -p remoca-view --example scrape [VMS]`

use remoca_view::address::Address;
use remoca_view::client;
use remoca_view::metrics::METRICS;
use remoca_view::testing::Fleet;
use remoca_view::top::{App, screen};
use remoca_view::watch::{Watch, runtime};
use remoca_view::web::{self, Options};
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const ROUNDS: u32 = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let count = arguments.next().map_or(Ok(200), |count| count.parse())?;
    if let Some(folder) = arguments.next() {
        return play(count, PathBuf::from(folder));
    }
    let folder = tempfile::tempdir()?;
    let mut player = Command::new(std::env::current_exe()?);
    player.args([count.to_string(), folder.path().display().to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut player = player.spawn()?;
    let mut sockets = Vec::new();
    if let Some(output) = player.stdout.take() {
        BufReader::new(output).read_line(&mut String::new())?;
    }
    for entry in std::fs::read_dir(folder.path())? {
        sockets.push(entry?.path());
    }
    let all = sockets.clone();
    let mut watch = Watch::new(Box::new(move || all.clone()), Duration::from_secs(5));
    let runtime = runtime()?;
    let (first, newest) = (runtime.block_on(watch.take()), runtime.block_on(watch.take()));
    println!("{count} VMs, {} answer; {} problems", first.statuses().count(), newest.problems.len());
    let before = cpu_ms();
    (0..ROUNDS).for_each(|_| drop(runtime.block_on(watch.take())));
    println!("a snapshot, with its share of the curves: {:.1} ms of CPU time", (cpu_ms() - before) / f64::from(ROUNDS));
    let mut app = App::default();
    app.take(Ok(Arc::new(newest)));
    let before = cpu_ms();
    (0..ROUNDS).for_each(|_| drop(screen(&app, 160, 50, false)));
    println!("a frame of `remoca top`: {:.1} ms", (cpu_ms() - before) / f64::from(ROUNDS));

    let options = Options {
        listen: vec!["127.0.0.1:0".parse()?],
        hosts: Vec::new(),
        group: None,
        interval: Duration::from_secs(1),
        sockets: Box::new(move || sockets.clone()),
        host_socket: None,
    };
    let (ready, is_ready) = channel();
    std::thread::spawn(move || web::run(options, |addresses| drop(ready.send(addresses[0].clone()))));
    let address: Address = is_ready.recv()?.parse()?;
    client::get(&address, "/metrics")?;
    let (began, before, mut scrapes) = (Instant::now(), cpu_ms(), 0);
    while began.elapsed() < Duration::from_secs(10) {
        client::get(&address, "/metrics")?;
        scrapes += 1;
        std::thread::sleep(Duration::from_millis(990));
    }
    let each = (cpu_ms() - before) / f64::from(scrapes);
    println!("a scrape each second, snapshot, text and client included: {each:.1} ms of CPU time");
    for path in ["/", "/metrics", "/api/overview", "/api/vm/web007", "/api/snapshot"] {
        println!("{path}: {} bytes", client::get(&address, path)?.len());
    }
    println!("series of a VM, at most: {}", METRICS.len() + 2);
    player.kill()?;
    Ok(())
}

/// Plays the VMs until the other process is gone.
fn play(count: u32, folder: PathBuf) -> Result<(), Box<dyn std::error::Error>> {
    let _fleet = Fleet::start(&folder, count);
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Returns the CPU time of this process so far.
fn cpu_ms() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
