//! A file system with one file, whose server stops answering on command: FUSE, spoken directly to the kernel.

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tempfile::TempDir;

const ROOT: u64 = 1;
const FILE: u64 = 2;
const HEADER: usize = 40;
const MESSAGE_MAX: usize = 1 << 20;

/// Request kinds that the server distinguishes.
pub const GETATTR: u32 = 3;
pub const READ: u32 = 15;
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
pub const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;

/// Returns whether this user may mount the file system; the test is left out otherwise.
#[track_caller]
pub fn may_mount() -> bool {
    remoca_io::left_out::is_root("needs root for a FUSE file system")
}

/// The mounted file system. When dropped it is unmounted, and processes that wait for it get an error.
pub struct HangingFs {
    folder: TempDir,
    server: Arc<Mutex<Server>>,
    thread: Option<JoinHandle<()>>,
}

struct Server {
    /// `None` if the connection is cut.
    kernel: Option<File>,
    content: Vec<u8>,
    hangs: bool,
    /// Requests that wait for an answer.
    held: Vec<Vec<u8>>,
    /// The kinds of all requests.
    asked: Vec<u32>,
}

impl HangingFs {
    /// Mounts a file system whose file has `bytes` zeroes. Writes beyond its end let it grow.
    pub fn mount(bytes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kernel = File::options().read(true).write(true).open("/dev/fuse").expect("the host has FUSE");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", kernel.as_raw_fd());
        let options = CString::new(options).unwrap();
        mount("remoca-test", folder.path(), "fuse", MountFlags::NOSUID, options.as_c_str()).unwrap();
        let mut requests = kernel.try_clone().unwrap();
        let content = vec![0; bytes];
        let server = Server { kernel: Some(kernel), content, hangs: false, held: Vec::new(), asked: Vec::new() };
        let server = Arc::new(Mutex::new(server));
        let shared = Arc::clone(&server);
        let thread = std::thread::spawn(move || {
            let mut message = vec![0; MESSAGE_MAX];
            // It ends when the file system is unmounted.
            while let Ok(length) = requests.read(&mut message) {
                shared.lock().unwrap().take(&message[..length]);
            }
        });
        Self { folder, server, thread: Some(thread) }
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Stops answering requests.
    pub fn hang(&self) {
        self.server.lock().unwrap().hangs = true;
    }

    /// Answers all requests again, including those that came meanwhile.
    pub fn go_on(&self) {
        self.server.lock().unwrap().go_on();
    }

    /// Returns the number of requests of a kind that wait for an answer.
    pub fn held(&self, kind: u32) -> usize {
        self.server.lock().unwrap().held.iter().filter(|request| word(request, 4) == kind).count()
    }

    /// Returns the number of requests of a kind so far.
    pub fn asked(&self, kind: u32) -> usize {
        self.server.lock().unwrap().asked.iter().filter(|asked| **asked == kind).count()
    }
}

impl Drop for HangingFs {
    fn drop(&mut self) {
        self.go_on();
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH | UnmountFlags::FORCE);
        if let Ok(mut server) = self.server.lock() {
            server.kernel = None;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Server {
    fn take(&mut self, request: &[u8]) {
        let kind = word(request, 4);
        self.asked.push(kind);
        match kind {
            FORGET | BATCH_FORGET | INTERRUPT => {}
            _ if self.hangs => self.held.push(request.to_vec()),
            _ => self.answer(request),
        }
    }

    fn go_on(&mut self) {
        self.hangs = false;
        for request in std::mem::take(&mut self.held) {
            self.answer(&request);
        }
    }

    fn answer(&mut self, request: &[u8]) {
        let body = &request[HEADER..];
        let answer = match word(request, 4) {
            INIT => Ok(initial()),
            LOOKUP if body == b"image\0" => Ok([entry(), self.attributes(FILE)].concat()),
            LOOKUP => Err(libc::ENOENT),
            // The attributes are valid for no time, so each look at the file asks for them.
            GETATTR | SETATTR => Ok([vec![0; 16], self.attributes(long(request, 16))].concat()),
            // Only direct I/O.
            OPEN => Ok([&[0; 8][..], &1_u32.to_le_bytes(), &[0; 4]].concat()),
            READ => {
                let start = (long(body, 8) as usize).min(self.content.len());
                let end = (start + word(body, 16) as usize).min(self.content.len());
                Ok(self.content[start..end].to_vec())
            }
            WRITE => {
                let (start, length) = (long(body, 8) as usize, word(body, 16) as usize);
                let end = (start + length).max(self.content.len());
                self.content.resize(end, 0);
                self.content[start..start + length].copy_from_slice(&body[40..40 + length]);
                Ok([&(length as u32).to_le_bytes()[..], &[0; 4]].concat())
            }
            // Zeroes the range, whether or not a hole was requested. The file does not grow by it.
            FALLOCATE => {
                let start = (long(body, 8) as usize).min(self.content.len());
                let end = (start + long(body, 16) as usize).min(self.content.len());
                self.content[start..end].fill(0);
                Ok(Vec::new())
            }
            STATFS => Ok(vec![0; 80]),
            RELEASE | FSYNC | FLUSH => Ok(Vec::new()),
            _ => Err(libc::ENOSYS),
        };
        let (error, answer) = answer.map_or_else(|error| (-error, Vec::new()), |answer| (0, answer));
        let length = (16 + answer.len()) as u32;
        let header = [&length.to_le_bytes()[..], &error.to_le_bytes(), &request[8..16]].concat();
        if let Some(kernel) = &mut self.kernel {
            // The process that asked may have ended.
            let _ = kernel.write(&[header, answer].concat());
        }
    }

    fn attributes(&self, node: u64) -> Vec<u8> {
        let is_root = node == ROOT;
        let size = if is_root { 0 } else { self.content.len() as u64 };
        let long = [node, size, size.div_ceil(512), 0, 0, 0];
        let mode: u32 = if is_root { 0o040_755 } else { 0o100_600 };
        let short = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
        let long = long.iter().flat_map(|word| word.to_le_bytes());
        long.chain(short.iter().flat_map(|word: &u32| word.to_le_bytes())).collect()
    }
}

/// Returns the answer to INIT: version 7.31, parallel reads, writes above 4 KiB.
fn initial() -> Vec<u8> {
    let mut words = [0_u32; 16];
    words[..4].copy_from_slice(&[7, 31, 0, 1 | 1 << 5]);
    words[4] = 64 | 48 << 16;
    words[5] = 128 << 10;
    words[6] = 1;
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the directory entry of the file, valid for no time.
fn entry() -> Vec<u8> {
    [FILE, 0, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}
