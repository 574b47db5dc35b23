//! The plain batched TCP server that the memory server is compared with. One thread reads the available bytes, and
//! answers with one vectored write of bare pages, or of pages with a header each if that is requested. It has no sessions, limits or checks of its input: it does the
//! minimum of work.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use anyhow::{Context, Result};
use remoca_protocol::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::dialect::{RAW_GET, RAW_GET_WITH_HEADER, RAW_HEADER, RAW_SET, raw_header};

const BUFFER_BYTES: usize = 128 << 10;
/// Number of the listener among the events.
const LISTENER: u64 = u64::MAX;

/// Serves `pages` pages until it is killed.
pub(crate) fn serve(listener: &TcpListener, pages: u32) -> Result<()> {
    let memory = huge_memory(pages as usize * PAGE_SIZE).context("cannot map the pages")?;
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&events, listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
    let mut connections: HashMap<u64, Connection> = HashMap::new();
    let mut ready = Vec::with_capacity(16);
    loop {
        ready.clear();
        match epoll::wait(&events, rustix::buffer::spare_capacity(&mut ready), None::<&Timespec>) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &ready {
            let number = event.data.u64();
            if number == LISTENER {
                let connection = Connection::accept(listener)?;
                let number = u64::try_from(connection.stream.as_raw_fd())?;
                let data = epoll::EventData::new_u64(number);
                epoll::add(&events, &connection.stream, data, epoll::EventFlags::IN)?;
                connections.insert(number, connection);
            } else if let Some(connection) = connections.get_mut(&number)
                && connection.turn(memory).is_err()
            {
                connections.remove(&number);
            }
        }
    }
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    filled: usize,
}

impl Connection {
    fn accept(listener: &TcpListener) -> io::Result<Self> {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffer: vec![0; BUFFER_BYTES], filled: 0 })
    }

    /// Reads once, and answers all requests in it with one write.
    fn turn(&mut self, memory: &mut [[u8; PAGE_SIZE]]) -> io::Result<()> {
        let count = self.stream.read(&mut self.buffer[self.filled..])?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.filled += count;
        let mut asked: Vec<(usize, Option<[u8; RAW_HEADER]>)> = Vec::with_capacity(64);
        let mut rest = &self.buffer[..self.filled];
        while let Some((head, tail)) = rest.split_first_chunk::<8>() {
            let [a, b, c, d, slot @ ..] = *head;
            let number = u32::from_le_bytes(slot);
            let slot = number as usize;
            match u32::from_le_bytes([a, b, c, d]) {
                operation @ (RAW_GET | RAW_GET_WITH_HEADER) => {
                    asked.push((slot, (operation == RAW_GET_WITH_HEADER).then(|| raw_header(number))));
                    rest = tail;
                }
                RAW_SET => {
                    let Some((page, after)) = tail.split_first_chunk::<PAGE_SIZE>() else { break };
                    memory[slot] = *page;
                    rest = after;
                }
                _ => return Err(ErrorKind::InvalidData.into()),
            }
        }
        let left = rest.len();
        let used = self.filled - left;
        self.buffer.copy_within(used..self.filled, 0);
        self.filled = left;
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(2 * asked.len());
        for (slot, header) in &asked {
            slices.extend(header.as_ref().map(|header| IoSlice::new(header)));
            slices.push(IoSlice::new(&memory[*slot]));
        }
        write_all(&self.stream, &mut slices)
    }
}

fn write_all(mut stream: &TcpStream, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        let batch = slices.len().min(1024);
        match stream.write_vectored(&slices[..batch]) {
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(stream, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns zeroed memory that is never freed, in transparent huge pages where possible, like the memory server's.
fn huge_memory(length: usize) -> Result<&'static mut [[u8; PAGE_SIZE]]> {
    const HUGE: usize = 2 << 20;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), length + HUGE, prot, MapFlags::PRIVATE) }?;
    let base = NonNull::new(base).context("mapped at 0")?;
    // SAFETY: the mapping is a huge page longer than `length`, so the aligned range lies in it; it is zeroed, aligned to
    // pages, referred to by nothing else, and never unmapped.
    unsafe {
        let aligned = base.byte_add(base.align_offset(HUGE));
        // Without huge pages it is only slower.
        let _advised = madvise(aligned.as_ptr(), length, Advice::LinuxHugepage);
        let _populated = madvise(aligned.as_ptr(), length, Advice::LinuxPopulateWrite);
        Ok(std::slice::from_raw_parts_mut(aligned.cast().as_ptr(), length / PAGE_SIZE))
    }
}
