//! A service manager for tests: it keeps descriptors as systemd 252 does, and passes them to the next process.

#![allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]

use crate::descriptor_store::ROOM;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, recvmsg, sendmsg_addr,
};
use rustix::pipe::{PipeFlags, pipe_with};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Copies of passed descriptors get numbers from here on, out of the way of those that a process finds.
const ABOVE: i32 = 600;
const END: &str = "END=1";

/// A running manager. Dropping it ends it, and closes what it keeps.
pub struct FakeManager {
    socket: PathBuf,
    kept: Arc<Mutex<Vec<(String, OwnedFd)>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeManager {
    /// Starts a manager.
    #[must_use]
    pub fn start() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let socket = std::env::temp_dir().join(format!("remoca-manager-{}-{number}", std::process::id()));
        let _ = std::fs::remove_file(&socket);
        let theirs = UnixDatagram::bind(&socket).unwrap();
        let kept = Arc::<Mutex<Vec<(String, OwnedFd)>>>::default();
        let shared = Arc::clone(&kept);
        let thread = std::thread::spawn(move || while handle_message(&theirs, &shared) {});
        Self { socket, kept, thread: Some(thread) }
    }

    /// Returns the path of its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the names of what it keeps, in the order of their arrival. All that was sent before this call counts.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.settle();
        self.kept.lock().unwrap().iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether it keeps a descriptor of the file, however that was opened.
    ///
    /// # Panics
    /// If there is no such file.
    #[must_use]
    pub fn keeps(&self, file: &Path) -> bool {
        self.settle();
        let identity = |status: rustix::fs::Stat| (status.st_dev, status.st_ino);
        let file = identity(rustix::fs::stat(file).unwrap());
        self.kept.lock().unwrap().iter().any(|(_, fd)| identity(rustix::fs::fstat(fd).unwrap()) == file)
    }

    /// Returns a command that runs `program` as a service of this manager, which gets all that is kept. Its first
    /// arguments are in place; more can be added.
    #[must_use]
    pub fn service(&self, program: &Path) -> Command {
        // As systemd does, which reads what a process has sent before it looks at its death.
        self.settle();
        let kept = self.kept.lock().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", r#"LISTEN_PID=$$ exec "$0" "$@""#]).arg(program);
        command.env("NOTIFY_SOCKET", &self.socket).env(ROOM, "8192");
        command.env("LISTEN_FDS", kept.len().to_string());
        let names: Vec<_> = kept.iter().map(|(name, _)| name.as_str()).collect();
        command.env("LISTEN_FDNAMES", names.join(":"));
        let copies: Vec<_> = kept.iter().map(|(_, fd)| fcntl_dupfd_cloexec(fd, ABOVE).unwrap()).collect();
        // SAFETY: dup2 is a system call, allowed between fork and exec; it touches no memory.
        unsafe {
            command.pre_exec(move || {
                for (copy, number) in copies.iter().zip(3..) {
                    if libc::dup2(copy.as_raw_fd(), number) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command
    }

    /// Waits until it has handled all that was sent so far: messages arrive in the order in which they were sent.
    fn settle(&self) {
        let (handled, handles) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (client, address) = (UnixDatagram::unbound().unwrap(), SocketAddrUnix::new(&self.socket).unwrap());
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let fds = [handles.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg_addr(&client, &address, &[IoSlice::new(b"BARRIER=1")], &mut control, SendFlags::empty()).unwrap();
        drop(handles);
        // The end of the file: the manager has closed its copy.
        assert_eq!(rustix::io::read(&handled, &mut [0]).unwrap(), 0);
    }

    /// Handles no message until what this returns is dropped.
    ///
    /// # Panics
    /// If its thread has panicked.
    pub fn hang(&self) -> impl Sized + '_ {
        self.settle();
        self.kept.lock().unwrap()
    }

    /// Closes everything that it keeps, as for a unit that is stopped.
    pub fn forget(&self) {
        self.settle();
        self.kept.lock().unwrap().clear();
    }
}

impl Drop for FakeManager {
    fn drop(&mut self) {
        let _ = UnixDatagram::unbound().unwrap().send_to(END.as_bytes(), &self.socket);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Handles one message. Returns false after the last one.
fn handle_message(socket: &UnixDatagram, kept: &Mutex<Vec<(String, OwnedFd)>>) -> bool {
    let mut text = [0; 4096];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let text = std::str::from_utf8(&text[..received.bytes]).unwrap();
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let mut kept = kept.lock().unwrap();
    match (value("FDSTORE"), value("FDSTOREREMOVE"), value("FDNAME")) {
        (Some("1"), None, Some(name)) => {
            assert_eq!(value("FDPOLL"), Some("0"), "{text}");
            for fd in fds {
                if !kept.iter().any(|(_, other)| is_same(other, &fd)) {
                    kept.push((name.to_owned(), fd));
                }
            }
        }
        (None, Some("1"), Some(name)) => kept.retain(|(other, _)| other != name),
        // Only closes the descriptor that came with a barrier.
        _ => {}
    }
    text != END
}

fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    let pid = std::process::id();
    // SAFETY: compares two descriptors of this process, and touches no memory.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, 0, one.as_raw_fd(), other.as_raw_fd()) == 0 }
}
