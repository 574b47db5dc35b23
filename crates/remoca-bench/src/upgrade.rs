//! Measures what a guest notices when the program of its VM process is upgraded under load: the longest read during each
//! upgrade, and the connections that it lost, over vhost-user and over NBD.

use crate::vm::content;
use crate::vm::{Folder, IMAGE_BYTES, Program, Vm, VmOptions, memory_server, remoca, save_figures};
use crate::wanted;
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use remoca_io::control;
use remoca_lab::figures::Figure;
use remoca_protocol::control::{Command as Ask, Reply};
use remoca_protocol::nbd::{Command, REPLY_MAGIC, Request};
use serde::Serialize;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
/// Number of reads between two looks at whether the upgrade is done.
const READS: usize = 64;
/// Longest that a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Args)]
pub struct UpgradeBenchArgs {
    /// Upgrades over each protocol
    #[arg(long, default_value_t = 100)]
    times: usize,
    /// Reads at a time over vhost-user; over NBD it is one
    #[arg(long, default_value_t = 8)]
    depth: usize,
}

#[derive(Serialize)]
struct Row {
    over: &'static str,
    upgrades: usize,
    reads: usize,
    connections_lost: usize,
    /// Longest read without an upgrade, during as many reads.
    quiet_longest_ms: f64,
    /// Median, over the upgrades, of the longest read during each.
    median_longest_ms: f64,
    longest_ms: f64,
    /// Median time of the command, which the check of the new program takes most of.
    command_ms: f64,
}

pub fn run(args: &UpgradeBenchArgs) -> Result<()> {
    let folder = Folder::new()?;
    let server = memory_server(&folder.0, &[])?;
    let arguments = ["--state".to_owned(), folder.0.join("vm.state").display().to_string()];
    let options =
        VmOptions { server: Some(&server.endpoint), inflight: true, arguments: &arguments, ..Default::default() };
    let mut vm = Vm::start(&folder.0, "vm", &options)?;
    let control = folder.0.join("vm.ctl");
    let vhost = measure("vhost-user", args.times, &control, || {
        let latencies = vm.measure(args.depth, READS, |_| {})?;
        Ok((latencies, usize::from(!vm.is_connected())))
    })?;
    let (process, mut client, control) = nbd(&folder.0)?;
    let mut number = 0;
    let nbd = measure("NBD", args.times, &control, || {
        let mut latencies = Vec::with_capacity(READS);
        for _ in 0..READS {
            number += 1;
            let began = Instant::now();
            client.read(number, number * 7919 % (IMAGE_BYTES / u64::from(BLOCK)))?;
            latencies.push(u64::try_from(began.elapsed().as_nanos())?);
        }
        Ok((latencies, 0))
    })?;
    drop(process);
    println!("4 KiB reads of a raw file in memory, {} at a time over vhost-user, one at a time over NBD", args.depth);
    println!(
        "{:<12} {:>8} {:>9} {:>17} {:>18} {:>19} {:>12} {:>11}",
        "over",
        "upgrades",
        "reads",
        "connections lost",
        "quiet longest ms",
        "median longest ms",
        "longest ms",
        "command ms"
    );
    for row in [&vhost, &nbd] {
        println!(
            "{:<12} {:>8} {:>9} {:>17} {:>18.2} {:>19.2} {:>12.2} {:>11.1}",
            row.over,
            row.upgrades,
            row.reads,
            row.connections_lost,
            row.quiet_longest_ms,
            row.median_longest_ms,
            row.longest_ms,
            row.command_ms
        );
    }
    let rows = [vhost, nbd];
    let figures = figures(&rows);
    print!("\n{}", wanted::table_of(&figures));
    save_figures("upgrade", &figures, &rows)
}

/// Returns the figures of P20, the worse of both protocols.
fn figures(rows: &[Row]) -> [Figure; 2] {
    let worst = rows.iter().map(|row| row.longest_ms).fold(0.0, f64::max);
    let quiet = rows.iter().map(|row| row.quiet_longest_ms).fold(0.0, f64::max);
    let upgrades = rows.iter().map(|row| row.upgrades).sum();
    let lost: usize = rows.iter().map(|row| row.connections_lost).sum();
    let single = |id, value| Figure { rounds: upgrades, ..Figure::single(id, value) };
    [single("P20-longest", worst).beside("quiet_longest_ms", quiet), single("P20-lost", lost as f64)]
}

/// Upgrades the process at `control`, while `read` reads and returns latencies and the number of connections lost.
fn measure(
    over: &'static str,
    times: usize,
    control: &Path,
    mut read: impl FnMut() -> Result<(Vec<u64>, usize)>,
) -> Result<Row> {
    let (mut longest, mut commands, mut reads, mut connections_lost) = (Vec::new(), Vec::new(), 0, 0);
    for _ in 0..times {
        let path = control.to_owned();
        let upgrade = std::thread::spawn(move || {
            let began = Instant::now();
            control::call(&path, Ask::Upgrade { program: None }).map(|reply| (reply, began.elapsed()))
        });
        let (mut during, mut ended) = (0, false);
        while !std::mem::replace(&mut ended, upgrade.is_finished()) {
            let (latencies, lost) = read()?;
            reads += latencies.len();
            connections_lost += lost;
            during = latencies.into_iter().chain([during]).max().unwrap_or(during);
        }
        match upgrade.join().ok().context("the thread of the upgrade panicked")?? {
            (Reply::Status(_), took) => commands.push(took.as_secs_f64() * 1e3),
            (Reply::Curve(_), _) => bail!("{over}: it is no status"),
            (Reply::Error { error }, _) => bail!("{over}: {error}"),
        }
        longest.push(milliseconds(during));
    }
    let mut quiet = 0;
    for _ in 0..reads / READS {
        quiet = read()?.0.into_iter().chain([quiet]).max().unwrap_or(quiet);
    }
    Ok(Row {
        over,
        upgrades: times,
        reads,
        connections_lost,
        quiet_longest_ms: milliseconds(quiet),
        median_longest_ms: crate::cost::median(longest.iter().copied()),
        longest_ms: longest.iter().copied().fold(0.0, f64::max),
        command_ms: crate::cost::median(commands.iter().copied()),
    })
}

fn milliseconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64() * 1e3
}

/// Starts a VM process with an NBD export, and connects to it.
fn nbd(folder: &Path) -> Result<(Program, Client, PathBuf)> {
    let (socket, control, image) = (folder.join("nbd"), folder.join("nbd.ctl"), folder.join("nbd.img"));
    std::fs::write(&image, content::of(0..IMAGE_BYTES))?;
    let mut command = std::process::Command::new(remoca()?);
    command.args(["disk", "--disk"]).arg(format!("image={},name=root", image.display()));
    command.arg("--nbd").arg(format!("unix:{}", socket.display())).arg("--control").arg(&control);
    let program = Program::start(&mut command, &control)?;
    Ok((program, Client::connect(&socket)?, control))
}

/// Client that never connects again.
struct Client(UnixStream);

impl Client {
    fn connect(socket: &Path) -> Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; 18])?;
        // Flags, and the option EXPORT_NAME.
        stream.write_all(&[&3_u32.to_be_bytes()[..], b"IHAVEOPT\0\0\0\x01\0\0\0\x04root"].concat())?;
        stream.read_exact(&mut [0; 10])?;
        Ok(Self(stream))
    }

    fn read(&mut self, cookie: u64, block: u64) -> Result<()> {
        let request =
            Request { command: Command::Read, flags: 0, cookie, offset: block * u64::from(BLOCK), len: BLOCK };
        self.0.write_all(&request.encode())?;
        let mut reply = [0; 16 + BLOCK as usize];
        self.0.read_exact(&mut reply).context("the NBD connection is lost")?;
        let expected = [&REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &cookie.to_be_bytes()].concat();
        ensure!(reply[..16] == expected, "a read failed");
        let at = block * u64::from(BLOCK);
        ensure!(reply[16..] == content::of(at..at + u64::from(BLOCK)), "a read of block {block} returned wrong bytes");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_protocol_counts() {
        let row = |over, longest_ms, connections_lost| Row {
            over,
            upgrades: 100,
            reads: 6400,
            connections_lost,
            quiet_longest_ms: longest_ms / 10.0,
            median_longest_ms: longest_ms,
            longest_ms,
            command_ms: 1.0,
        };
        let [longest, lost] = figures(&[row("vhost-user", 16.0, 1), row("NBD", 20.0, 2)]);
        assert_eq!((longest.value, longest.rounds, longest.beside["quiet_longest_ms"]), (20.0, 200, 2.0));
        assert_eq!(lost.value, 3.0);
    }
}
