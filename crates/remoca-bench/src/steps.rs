//! Counts the instructions that the main thread of a program executes. The thread stops after each of them.
//!
//! That needs neither performance counters, which virtual machines rarely have, nor an emulator, which would have to know all system calls
//! of the program: valgrind 3.19 ends VM processes that wait by `epoll_pwait2`. It is exact, but 10,000 times as slow as the
//! program. A system call is one instruction: what the kernel does is not counted.

use crate::cpus::pin_this_thread;
use crate::vm::Program;
use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

/// Time between two looks at a thread.
const LOOK: Duration = Duration::from_millis(20);
/// Longest wait for a thread to come to rest.
const PATIENCE: Duration = Duration::from_secs(60);
/// Variable that keeps the C library from copying pages by one repeated instruction, which would stop once for each byte.
pub const ENVIRONMENT: (&str, &str) = ("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1073741824");

/// Number of instructions by their addresses.
pub type Places = HashMap<u64, u64>;

/// Counter of one program's instructions. A program that is being counted dies with this one.
pub struct Steps {
    pid: Pid,
    count: Arc<AtomicU64>,
    places: Arc<Mutex<Places>>,
    is_to_end: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Steps {
    /// Counts from now on. What counts runs on the processor of the program, because one of them always waits for the other.
    pub fn of(program: &Program, processor: usize) -> Result<Self> {
        let pid = Pid::from_raw(program.pid().try_into()?);
        let (count, is_to_end) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let places = Arc::<Mutex<Places>>::default();
        let shared = (Arc::clone(&count), Arc::clone(&places), Arc::clone(&is_to_end));
        let (sender, receiver) = channel();
        let thread = std::thread::spawn(move || {
            pin_this_thread(processor)?;
            seize(pid)?;
            sender.send(())?;
            follow(pid, &shared.0, &shared.1, &shared.2)
        });
        match receiver.recv() {
            Ok(()) => Ok(Self { pid, count, places, is_to_end, thread }),
            Err(_) => Err(ended(thread).err().unwrap_or_else(|| anyhow!("nothing is counted"))),
        }
    }

    /// Stops counting. `wake` must have the program execute something.
    pub fn end(self, wake: impl FnOnce() -> Result<()>) -> Result<()> {
        self.is_to_end.store(true, Ordering::Relaxed);
        wake()?;
        ended(self.thread)
    }

    /// Returns where the instructions since the last call were. Empty where no addresses are read.
    pub fn take_places(&self) -> Places {
        std::mem::take(&mut self.places.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of instructions so far, as soon as the thread waits for something. One that was just given work may not have begun.
    pub fn at_rest(&self) -> Result<u64> {
        let began = Instant::now();
        let mut last = None;
        loop {
            ensure!(!self.thread.is_finished(), "the program has ended, or its instructions are no longer counted");
            let now = self.count.load(Ordering::Relaxed);
            // Twice, because it may have gone on between the two looks at it.
            if !self.waits()? {
                last = None;
            } else if last.replace(now) == Some(now) {
                return Ok(now);
            }
            ensure!(began.elapsed() < PATIENCE, "the program does not come to rest");
            sleep(LOOK);
        }
    }

    /// Returns whether the thread waits in a system call. One that is being counted is stopped or runs otherwise.
    fn waits(&self) -> Result<bool> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid))?;
        // The name before the state may have anything in it.
        Ok(stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
    }
}

/// Returns what became of the thread that counts.
fn ended(thread: JoinHandle<Result<()>>) -> Result<()> {
    thread.join().map_err(|_| anyhow!("the thread that counts panicked"))?
}

fn seize(pid: Pid) -> Result<()> {
    ptrace::seize(pid, ptrace::Options::PTRACE_O_EXITKILL)
        .context("cannot trace the program: not allowed here, or it is traced already")?;
    Ok(ptrace::interrupt(pid)?)
}

/// Counts the instructions of a thread until it is told to end.
fn follow(pid: Pid, count: &AtomicU64, places: &Mutex<Places>, is_to_end: &AtomicBool) -> Result<()> {
    let mut last = None;
    loop {
        let signal = match waitpid(pid, Some(WaitPidFlag::__WALL))? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {
                let at = place(pid)?;
                // A repeated instruction stops once each time.
                if at.is_none() || at != last {
                    count.fetch_add(1, Ordering::Relaxed);
                    if let Some(at) = at {
                        let mut places = places.lock().unwrap_or_else(PoisonError::into_inner);
                        *places.entry(at.cast_unsigned()).or_default() += 1;
                    }
                }
                last = at;
                None
            }
            WaitStatus::Stopped(_, signal) => Some(signal),
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => bail!("the program has ended"),
            WaitStatus::PtraceEvent(..)
            | WaitStatus::PtraceSyscall(..)
            | WaitStatus::Continued(..)
            | WaitStatus::StillAlive => None,
        };
        if is_to_end.load(Ordering::Relaxed) {
            return Ok(ptrace::detach(pid, signal)?);
        }
        ptrace::step(pid, signal)?;
    }
}

/// Returns where a stopped thread is, if that can tell how often one instruction was repeated.
#[cfg(target_arch = "x86_64")]
fn place(pid: Pid) -> Result<Option<i64>, Errno> {
    /// Place of the instruction pointer in what the kernel calls `struct user`.
    const INSTRUCTION_POINTER: usize = 16 * 8;
    ptrace::read_user(pid, std::ptr::without_provenance_mut(INSTRUCTION_POINTER)).map(Some)
}

/// Returns nothing: no instruction of this machine repeats itself.
#[cfg(not(target_arch = "x86_64"))]
fn place(_: Pid) -> Result<Option<i64>, Errno> {
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn the_same_work_takes_the_same_number_of_instructions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("read");
        // A shell that waits at a named pipe, counts to the number it reads, and waits again.
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let script = "while read n; do i=0; while [ $i -lt $n ]; do i=$((i + 1)); done; done < \"$0\"";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&path).stderr(Stdio::null());
        let program = Program::start(&mut command, &path).unwrap();
        let mut pipe = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let processor = crate::cpus::Cpus::choose().unwrap().server;
        let Ok(steps) = Steps::of(&program, processor) else {
            eprintln!("not tested: tracing is not allowed here");
            return;
        };
        let mut count = |n: u32| {
            use std::io::Write;
            let before = steps.at_rest().unwrap();
            writeln!(pipe, "{n}").unwrap();
            let mut counts = std::iter::repeat_with(|| steps.at_rest().unwrap() - before);
            counts.find(|count| *count > 0).unwrap()
        };
        count(3);
        let [once, again, more] = [3, 3, 6].map(&mut count);
        assert!(once > 100 && once.abs_diff(again) * 20 < once && more > once, "{once} {again} {more}");
        let close = || {
            drop(pipe);
            Ok(())
        };
        steps.end(close).unwrap();
    }
}
