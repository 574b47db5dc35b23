//! An eviction port that tests can inspect: speaks the port's contract to the guest through QEMU's NBD client.
//!
//! It replaces the VM process. So tests see the agent's actions page by page, and the port can do what a good one does
//! not: give any advice, fail, restart with another cookie.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use tempfile::TempDir;

use super::blocks::{BLOCK_BYTES, BlockSet};

pub const PORT_BYTES: u64 = 64 << 20;

/// The port's knowledge and settings. Tests change it while the guest runs.
#[derive(Default)]
pub struct State {
    pub known: BlockSet,
    pub boot_cookie: u64,
    pub advice: u32,
    /// Advice to send only the pages of one class of this many.
    pub classes: u32,
    pub batch_page_count_max: u32,
    /// Whether every request is answered with an I/O error.
    pub failing: bool,
    pub received: u64,
    pub matched: u64,
    pub request_count: u64,
    /// Largest request, in pages.
    pub request_page_count_max: u64,
    pub failed_request_count: u64,
    pub statistics_count: u64,
    pub statistics: Statistics,
    /// First words of the pages received since the agent said that it sends one class.
    pub class: HashSet<u64>,
    /// Violations of the contract by the agent.
    pub faults: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    pub captured: u64,
    pub lost: u64,
    pub sampled_out: u64,
    pub written: u64,
    pub start_cookie: u64,
    pub classes: u32,
}

impl Statistics {
    /// Returns the number of pages that were not left out, whether there was room for them or not.
    pub fn chosen(&self) -> u64 {
        self.captured + self.lost
    }
}

#[derive(Clone)]
pub struct TestPort {
    state: Arc<Mutex<State>>,
    /// Folder that holds the socket; a short path, as sockets want.
    folder: Arc<TempDir>,
}

impl TestPort {
    pub fn start(known: BlockSet) -> TestPort {
        let state = State { known, boot_cookie: 1, batch_page_count_max: 256, ..State::default() };
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let port = TestPort { state: Arc::new(Mutex::new(state)), folder };
        let listener = UnixListener::bind(port.socket()).unwrap();
        let served = port.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let served = served.clone();
                // A broken connection means that QEMU has ended.
                thread::spawn(move || served.serve(stream).ok());
            }
        });
        port
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("port.sock")
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns QEMU's arguments for the disk.
    pub fn qemu_args(&self) -> Vec<String> {
        let server = format!("driver=nbd,node-name=port,server.type=unix,server.path={}", self.socket().display());
        let device = "virtio-blk-pci,drive=port,serial=remoca-port,logical_block_size=4096,physical_block_size=4096";
        ["-blockdev", &server, "-device", device].map(str::to_owned).to_vec()
    }

    fn serve(&self, mut stream: UnixStream) -> io::Result<()> {
        if !negotiate(&mut stream)? {
            return Ok(());
        }
        let mut data = Vec::new();
        loop {
            let mut header = [0; 28];
            stream.read_exact(&mut header)?;
            let kind = u16::from_be_bytes([header[6], header[7]]);
            let offset = u64_at(&header, 16);
            data.resize(u32_at(&header, 24) as usize, 0);
            let error = match kind {
                0 => self.state().read(offset, &mut data),
                1 => {
                    stream.read_exact(&mut data)?;
                    self.state().write(offset, &data)
                }
                2 => return Ok(()),
                3 => 0,
                _ => 22,
            };
            let mut reply = [0; 16];
            reply[..4].copy_from_slice(&0x6744_6698u32.to_be_bytes());
            reply[4..8].copy_from_slice(&u32::to_be_bytes(error));
            reply[8..].copy_from_slice(&header[8..16]);
            stream.write_all(&reply)?;
            if kind == 0 && error == 0 {
                stream.write_all(&data)?;
            }
        }
    }
}

const EIO: u32 = 5;

impl State {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> u32 {
        if self.failing {
            self.failed_request_count += 1;
            return EIO;
        }
        data.fill(0);
        if offset == 0 {
            let page = self.identification();
            let length = data.len().min(page.len());
            data[..length].copy_from_slice(&page[..length]);
        }
        0
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        if self.failing {
            self.failed_request_count += 1;
            return EIO;
        }
        if !offset.is_multiple_of(BLOCK_BYTES as u64) || !data.len().is_multiple_of(BLOCK_BYTES) {
            self.faults.push(format!("{} bytes at {offset}", data.len()));
        } else if offset == 0 {
            self.take_statistics(data);
        } else {
            self.take_pages(data);
        }
        0
    }

    fn identification(&self) -> [u8; BLOCK_BYTES] {
        let mut page = [0; BLOCK_BYTES];
        page[..8].copy_from_slice(b"REMOCAEP");
        page[8..12].copy_from_slice(&1u32.to_le_bytes());
        page[12..16].copy_from_slice(&self.batch_page_count_max.to_le_bytes());
        page[16..24].copy_from_slice(&self.received.to_le_bytes());
        page[24..32].copy_from_slice(&self.matched.to_le_bytes());
        page[32..40].copy_from_slice(&(self.received - self.matched).to_le_bytes());
        page[48..56].copy_from_slice(&self.boot_cookie.to_le_bytes());
        page[56..60].copy_from_slice(&self.advice.to_le_bytes());
        page[60..64].copy_from_slice(&self.classes.to_le_bytes());
        page
    }

    fn take_statistics(&mut self, page: &[u8]) {
        if page.len() != BLOCK_BYTES || page[..12] != *b"REMOCAST\x01\0\0\0" || page[64..].iter().any(|byte| *byte != 0)
        {
            self.faults.push("block 0 was written with something else than statistics".to_owned());
            return;
        }
        let wait = u32::from_le_bytes(page[56..60].try_into().unwrap());
        // Debian's kernels tell how long tasks wait for memory.
        if !(1..=10_001).contains(&wait) {
            self.faults.push(format!("{wait} is no share of time, plus one"));
        }
        let number = |offset: usize| u64::from_le_bytes(page[offset..offset + 8].try_into().unwrap());
        self.statistics_count += 1;
        self.statistics = Statistics {
            captured: number(16),
            lost: number(24),
            sampled_out: number(32),
            written: number(40),
            start_cookie: number(48),
            classes: u32::from_le_bytes(page[60..64].try_into().unwrap()),
        };
    }

    fn take_pages(&mut self, data: &[u8]) {
        let page_count = (data.len() / BLOCK_BYTES) as u64;
        self.request_count += 1;
        self.request_page_count_max = self.request_page_count_max.max(page_count);
        self.received += page_count;
        if self.statistics.classes > 0 {
            let first_word = |page: &[u8]| u64::from_le_bytes(page[..8].try_into().unwrap());
            self.class.extend(data.chunks_exact(BLOCK_BYTES).map(first_word));
        }
        if self.known.is_empty() {
            return;
        }
        self.matched += data.chunks_exact(BLOCK_BYTES).filter(|page| self.known.contains(page)).count() as u64;
    }
}

/// Performs NBD's fixed newstyle negotiation, as far as QEMU's client needs it. Returns whether the client wants to
/// continue.
fn negotiate(stream: &mut UnixStream) -> io::Result<bool> {
    const GO: u32 = 7;
    const INFO: u32 = 3;
    const ACK: u32 = 1;
    const UNSUPPORTED: u32 = 0x8000_0001;
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let option = u32_at(&header, 8);
        io::copy(&mut stream.take(u64::from(u32_at(&header, 12))), &mut io::sink())?;
        if option != GO {
            answer_option(stream, option, UNSUPPORTED, &[])?;
            continue;
        }
        // The export: its size, and the flags for "has flags" and "supports flush".
        let export = [&[0, 0], &PORT_BYTES.to_be_bytes()[..], &[0, 5]].concat();
        answer_option(stream, option, INFO, &export)?;
        // Block sizes: minimum, preferred, maximum.
        let sizes = [4096u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
        answer_option(stream, option, INFO, &[&[0, 3], &sizes[..]].concat())?;
        answer_option(stream, option, ACK, &[])?;
        return Ok(true);
    }
}

fn answer_option(stream: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    let header = [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()].concat();
    stream.write_all(&[&header, &length.to_be_bytes()[..], data].concat())
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from(u32_at(bytes, offset)) << 32 | u64::from(u32_at(bytes, offset + 4))
}
