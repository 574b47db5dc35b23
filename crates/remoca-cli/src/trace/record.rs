//! `remoca trace record`: receives the trace of a running VM over its control socket, and writes it into a file.
//!
//! The VM process sends, and never waits: what its client is too slow for is lost, and counted. The file has whole frames only,
//! so it is sound however the recording ends. It takes its place also when there was no room for more of it.

use super::import::{complete, unfinished};
use crate::output::say;
use crate::runtime;
use crate::size::{parse_size, show_size};
use crate::time::parse_duration;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use remoca_io::control::{self, call_for_stream};
use remoca_io::signals::{Signals, ignores_hangup};
use remoca_protocol::control::{Command, Reply, Status};
use remoca_protocol::trace::{FRAME_BYTES_MAX, FRAME_HEADER_BYTES, FrameHeader, HEAD_BYTES, check_head};
use remoca_view::figures::is_same_program;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{BufReader, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long one wait for bytes takes at most.
const WAIT: Duration = Duration::from_millis(200);
/// How long the rest of the trace may take to arrive once its end was asked for.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// What is said of a recording that has neither the time nor the size that was asked for, although nobody stopped it.
const EARLY: &str = "the recording has ended early";

#[derive(Args, Debug)]
pub struct RecordArgs {
    /// Name of the VM process, or the path of its control socket
    #[arg(value_name = "NAME")]
    name: String,

    /// File to write; it appears when the recording is complete
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Replace FILE if it is there
    #[arg(long)]
    force: bool,

    /// Time after which the recording ends
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    time: Duration,

    /// Size at which it ends, about ten bytes a request
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    size: u64,
}

/// Parses a size in which at least one frame has room.
fn size(text: &str) -> Result<u64, String> {
    let least = (HEAD_BYTES + FRAME_HEADER_BYTES + FRAME_BYTES_MAX) as u64;
    let size = parse_size(text)?;
    if size < least {
        return Err(format!("`{text}` is too small for a trace: at least {least}"));
    }
    Ok(size)
}

/// Records the trace of a VM into a file, for at most the time and of at most the size that the arguments say.
///
/// # Errors
/// If nothing was recorded, the file cannot be written, or the recording ended although nobody stopped it. What there is of it is kept.
pub fn run(args: &RecordArgs) -> Result<()> {
    let &RecordArgs { ref name, ref output, force, time, size } = args;
    let signals = Signals::take().context("cannot wait for signals")?;
    let socket = runtime::socket_named(name)?;
    let mut file = unfinished(output, force)?;
    let (before, mut trace) = start(&socket, name)?;
    let begun = Instant::now();
    say(format_args!("recording {name}, until Ctrl-C, for at most {} s or {}", time.as_secs(), show_size(size)));
    let mut frames = Frames::new(size);
    let mut ending: Option<Instant> = None;
    let (mut failed, mut is_early) = (None, false);
    let why = loop {
        match trace.read(frames.room()) {
            Ok(0) if ending.is_some() => break None,
            Ok(0) => {
                is_early = !is_there_still(&socket, &before);
                break Some("The VM process has ended the trace: it was stopped, upgraded, or ended.");
            }
            Ok(count) => {
                if let Err(error) = frames.take(count, file.as_file_mut()) {
                    failed = Some(error);
                    let _ = control::call(&socket, Command::TraceStop);
                    break None;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => {
                is_early = true;
                break Some("The connection to the VM process was lost.");
            }
        }
        if frames.is_full {
            let _ = control::call(&socket, Command::TraceStop);
            break Some("The size is reached.");
        }
        let is_over = begun.elapsed() >= time || is_asked_to_stop(&signals);
        match ending {
            None if is_over => {
                ending = Some(Instant::now());
                // It may have ended by itself; then the connection ends, too.
                let _ = control::call(&socket, Command::TraceStop);
            }
            Some(since) if since.elapsed() > END_PATIENCE => {
                is_early = true;
                break Some("The VM process did not send the rest.");
            }
            None | Some(_) => {}
        }
    };
    if !frames.has_head {
        return Err(failed.unwrap_or_else(|| anyhow!("the VM process sent no trace")));
    }
    // Without the frame of which only a part could be written.
    file.as_file().set_len(frames.written).with_context(|| format!("cannot write {}", output.display()))?;
    let bytes = complete(file, output, force)?;
    let Frames { records, lost, .. } = frames;
    let mut out = crate::output::output();
    let seconds = begun.elapsed().as_secs_f64();
    writeln!(out, "{}: {records} requests and evictions in {seconds:.1} s, {}", output.display(), show_size(bytes))?;
    if lost > 0 {
        writeln!(out, "{lost} were lost, because this command was too slow to take them")?;
    }
    why.iter().try_for_each(|why| writeln!(out, "{why}"))?;
    match failed {
        Some(error) => Err(error.context(EARLY)),
        None if is_early => bail!(EARLY),
        None => Ok(()),
    }
}

/// Returns whether the program that had the status `before` goes on: then somebody has stopped the recording.
fn is_there_still(socket: &Path, before: &Status) -> bool {
    runtime::ask(socket, Command::Status).is_ok_and(|now| is_same_program(before, &now))
}

/// Ends the recording that somebody else receives.
pub fn stop(name: &str) -> Result<()> {
    runtime::ask(&runtime::socket_named(name)?, Command::TraceStop).map(|_| ())
}

/// Begins the recording of the VM process behind `socket`, which the operator calls `name`.
fn start(socket: &Path, name: &str) -> Result<(Status, BufReader<UnixStream>)> {
    let (reply, stream) =
        call_for_stream(socket, Command::TraceStart).map_err(|error| runtime::no_vm_process(socket, error))?;
    let status = match reply {
        Reply::Status(status) => *status,
        Reply::Curve(_) => bail!("the process answers with something else than a trace"),
        Reply::Error { error } if error.starts_with("this is no command") => {
            bail!(
                "the process is of an older version, which sends no traces: `remoca upgrade {name}` brings it to this one"
            )
        }
        Reply::Error { error } => bail!("{error}"),
    };
    stream.get_ref().set_read_timeout(Some(WAIT)).context("cannot wait for the trace")?;
    Ok((status, stream))
}

/// Returns whether a signal has arrived that ends the recording. SIGHUP does, of a terminal that is closed, but not with `nohup`.
fn is_asked_to_stop(signals: &Signals) -> bool {
    let no_time = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    let has_arrived =
        |signal: &OwnedFd| poll(&mut [PollFd::new(signal, PollFlags::IN)], Some(&no_time)).is_ok_and(|count| count > 0);
    has_arrived(&signals.stop) || has_arrived(&signals.hangup) && !ignores_hangup()
}

/// The trace as it arrives. Whole frames go into the file.
struct Frames {
    buffer: Vec<u8>,
    filled: usize,
    has_head: bool,
    records: u64,
    lost: u64,
    /// Bytes in the file, and how many it may have.
    written: u64,
    size: u64,
    is_full: bool,
}

impl Frames {
    fn new(size: u64) -> Self {
        let buffer = vec![0; 256 << 10];
        Self { buffer, filled: 0, has_head: false, records: 0, lost: 0, written: 0, size, is_full: false }
    }

    /// Returns where the next bytes belong.
    fn room(&mut self) -> &mut [u8] {
        &mut self.buffer[self.filled..]
    }

    /// Writes what is whole after `count` more bytes.
    fn take(&mut self, count: usize, file: &mut impl Write) -> Result<()> {
        self.filled += count;
        let mut at = 0;
        while let Some(length) = self.next(&self.buffer[at..self.filled])? {
            if self.size - self.written < length as u64 {
                self.is_full = true;
                break;
            }
            file.write_all(&self.buffer[at..at + length]).context("cannot write the trace")?;
            self.written += length as u64;
            if self.has_head {
                let header = self.buffer[at..].first_chunk().map(FrameHeader::parse);
                if let Some(Ok(header)) = header {
                    self.records += u64::from(header.records);
                    self.lost += u64::from(header.lost);
                }
            }
            self.has_head = true;
            at += length;
        }
        self.buffer.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }

    /// Returns the length of the frame that the bytes begin with, or `None` if it is not whole.
    fn next(&self, bytes: &[u8]) -> Result<Option<usize>> {
        let length = if self.has_head {
            let Some(header) = bytes.first_chunk::<FRAME_HEADER_BYTES>() else { return Ok(None) };
            FRAME_HEADER_BYTES + FrameHeader::parse(header)?.length
        } else {
            let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
            check_head(head)?;
            HEAD_BYTES
        };
        Ok((bytes.len() >= length).then_some(length))
    }
}
