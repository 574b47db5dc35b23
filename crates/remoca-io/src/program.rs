//! Other programs of this host that are asked for a few lines, within a time and with bounded output.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Maximum size of what a program prints.
const PRINTED_BYTES_MAX: usize = 1 << 20;
/// Number of characters of a program's complaint that an error shows.
const SHOWN_CHARS_MAX: usize = 300;
const PIECE_BYTES: usize = 16 << 10;

/// Why a program said nothing.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("{program} is not installed")]
    Missing { program: String },
    #[error("{program} did not end within {} seconds, and was killed", patience.as_secs())]
    Late { program: String, patience: Duration },
    #[error("{program} printed more than {PRINTED_BYTES_MAX} bytes, and was killed")]
    Endless { program: String },
    #[error("{program} failed ({status}): {complaint}")]
    Failed { program: String, status: ExitStatus, complaint: String },
    #[error("{program}: {source}")]
    Io { program: String, source: io::Error },
}

/// Runs a program to its end, and returns what it prints.
///
/// # Errors
/// If it fails, does not end in time, or prints too much. In the last two cases it is killed with all of its process group.
pub fn printed(command: &mut Command, patience: Duration) -> Result<String, ProgramError> {
    let program = || command.get_program().to_string_lossy().into_owned();
    let (program, deadline) = (program(), Instant::now() + patience);
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ProgramError::Missing { program: program.clone() },
        _ => ProgramError::Io { program: program.clone(), source },
    };
    let mut running = Running::start(command).map_err(failed)?;
    loop {
        let is_over = running.wait(deadline).map_err(failed)?;
        for pipe in &mut running.pipes {
            pipe.read().map_err(failed)?;
            if pipe.bytes.len() > PRINTED_BYTES_MAX {
                return Err(ProgramError::Endless { program });
            }
        }
        match is_over {
            None => return Err(ProgramError::Late { program, patience }),
            Some(false) => {}
            Some(true) => break,
        }
    }
    let status = running.child.wait().map_err(failed)?;
    running.has_ended = true;
    let [stdout, stderr] = &running.pipes;
    match status.success() {
        true => Ok(String::from_utf8_lossy(&stdout.bytes).into_owned()),
        false => Err(ProgramError::Failed { program, status, complaint: stderr.first_words() }),
    }
}

/// A program that runs. Killed when dropped.
struct Running {
    child: Child,
    pidfd: OwnedFd,
    /// Standard output, and standard error.
    pipes: [Pipe; 2],
    has_ended: bool,
}

impl Running {
    fn start(command: &mut Command) -> io::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let prepared = Self::prepare(&mut child);
        if prepared.is_err() {
            kill_group(&child);
            // It has just been killed.
            let _ = child.wait();
        }
        let (pidfd, pipes) = prepared?;
        Ok(Self { child, pidfd, pipes, has_ended: false })
    }

    fn prepare(child: &mut Child) -> io::Result<(OwnedFd, [Pipe; 2])> {
        let pid = pid(child).ok_or(io::ErrorKind::NotFound)?;
        let none = || io::Error::from(io::ErrorKind::BrokenPipe);
        let stdout = Pipe::new(child.stdout.take().ok_or_else(none)?.into())?;
        let stderr = Pipe::new(child.stderr.take().ok_or_else(none)?.into())?;
        Ok((pidfd_open(pid, PidfdFlags::empty())?, [stdout, stderr]))
    }

    /// Waits until there is something to read, or the program has ended. Returns whether it has, or `None` at the deadline.
    fn wait(&self, deadline: Instant) -> io::Result<Option<bool>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let open = self.pipes.iter().filter_map(|pipe| pipe.end.as_ref());
        let mut polled = vec![PollFd::new(&self.pidfd, PollFlags::IN)];
        polled.extend(open.map(|end| PollFd::new(end, PollFlags::IN)));
        match poll(&mut polled, Some(&time)) {
            Ok(0) => Ok(None),
            Ok(_) => Ok(Some(!polled[0].revents().is_empty())),
            Err(rustix::io::Errno::INTR) => Ok(Some(false)),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended {
            kill_group(&self.child);
            // It has just been killed.
            let _ = self.child.wait();
        }
    }
}

fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(child.id().cast_signed())
}

fn kill_group(child: &Child) {
    if let Some(pid) = pid(child) {
        // Fails if all of it has ended.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// What a program prints.
struct Pipe {
    /// `None` at its end.
    end: Option<std::fs::File>,
    bytes: Vec<u8>,
}

impl Pipe {
    fn new(end: OwnedFd) -> io::Result<Self> {
        let flags = fcntl_getfl(end.as_fd())?;
        fcntl_setfl(end.as_fd(), flags | OFlags::NONBLOCK)?;
        Ok(Self { end: Some(end.into()), bytes: Vec::new() })
    }

    /// Reads what is there, up to a little more than the limit.
    fn read(&mut self) -> io::Result<()> {
        let mut piece = [0; PIECE_BYTES];
        while let Some(end) = self.end.as_mut().filter(|_| self.bytes.len() <= PRINTED_BYTES_MAX) {
            match end.read(&mut piece) {
                Ok(0) => self.end = None,
                Ok(count) => self.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn first_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
        words.collect::<Vec<_>>().join(" ").chars().take(SHOWN_CHARS_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str, patience: Duration) -> Result<String, ProgramError> {
        printed(Command::new("sh").args(["-c", script]), patience)
    }

    #[test]
    fn a_program_says_what_it_prints_or_why_it_failed() {
        assert_eq!(shell("echo a; echo b; echo c >&2", LONG).unwrap(), "a\nb\n");
        let much = shell("head -c 1000000 /dev/zero | tr '\\0' x", LONG).unwrap();
        assert_eq!(much.len(), 1_000_000);
        let error = shell("echo 'error: no  domain' >&2; echo >&2; printf '\\033[2Jx' >&2; exit 3", LONG).unwrap_err();
        assert_eq!(error.to_string(), "sh failed (exit status: 3): error: no domain [2Jx");
        let error = printed(&mut Command::new("/there/is/no/such/program"), LONG).unwrap_err();
        assert_eq!(error.to_string(), "/there/is/no/such/program is not installed");
    }

    #[test]
    fn one_that_hangs_or_never_ends_to_print_is_killed() {
        let error = shell("sleep 1000 & sleep 1000", Duration::from_millis(100)).unwrap_err();
        assert!(matches!(error, ProgramError::Late { .. }), "{error}");
        for script in ["yes", "yes >&2"] {
            assert!(matches!(shell(script, LONG), Err(ProgramError::Endless { .. })), "{script}");
        }
    }

    #[test]
    fn one_that_leaves_a_child_with_its_output_is_not_waited_for() {
        let text = shell("sleep 60 & echo $!", LONG).unwrap();
        let child = Pid::from_raw(text.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(child, Signal::KILL).unwrap();
    }
}
