//! Bytes that come with a descriptor over a Unix socket, and the WELCOME of a mapped session, which is the one such message
//! of the wire protocol.
//!
//! Used by the memory server, and by the thread of a VM process that connects to it. A peer may send any descriptors at any
//! time: all but the one that is wanted are closed.

use remoca_protocol::{
    DecodeError, ErrorReply, FRAME_BYTES_MAX, Frame, HEADER_BYTES, MAPPED_VERSIONS, PAGE_SIZE, Welcome, decode,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::time::Timespec;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Answer of a memory server to a client that asked for a mapped pool.
#[derive(Debug)]
pub enum MappedAnswer {
    /// The session begins. `memory` holds the pool's pages, slot 0 first. It is not looked at yet: its seals and its size
    /// are the caller's to check.
    Welcome {
        welcome: Welcome,
        memory: OwnedFd,
    },
    Refused(ErrorReply),
}

/// Reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(#[from] DecodeError),
    #[error("it answers with another frame than WELCOME")]
    OtherFrame,
    #[error("it answers with version {0}, which was not asked for")]
    Version(u16),
    #[error("its WELCOME comes without the memory of the pool")]
    NoMemory,
}

/// Sends `bytes` and a copy of a descriptor, which travels with the first of them. Returns the number of bytes sent; with
/// fewer than all, the descriptor is sent all the same. Does not wait.
///
/// # Errors
/// `WouldBlock` if the socket has no room now; another error if the connection is lost.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("a descriptor needs more room than there is"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Receives bytes into `space`, and the first descriptor that comes with them. Closes all others. Waits if the socket does.
/// Returns 0 bytes at the end of the stream.
///
/// # Errors
/// As the system call.
pub fn receive(socket: impl AsFd, space: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    // The kernel closes what finds no room here: one descriptor and the padding of a second.
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let received = recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut first = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            for descriptor in descriptors {
                // A second one is dropped, which closes it.
                first.get_or_insert(descriptor);
            }
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        tracing::debug!("descriptors that nobody asked for were closed");
    }
    Ok((received.bytes, first))
}

/// Receives a memory server's answer to a HELLO of [`MAPPED_VERSIONS`]. Reads exactly that one frame: the bytes after it
/// belong to the session. Waits for `patience` at most, whether or not the socket itself waits.
///
/// # Errors
/// [`AnswerError`]. The connection is of no further use then.
pub fn receive_mapped_answer(socket: impl AsFd, patience: Duration) -> Result<MappedAnswer, AnswerError> {
    let socket = socket.as_fd();
    let deadline = Instant::now() + patience;
    let mut bytes = [0; FRAME_BYTES_MAX];
    let (mut filled, mut memory) = (0, None);
    loop {
        match decode(&bytes[..filled])? {
            Some((Frame::Error(refusal), _)) => return Ok(MappedAnswer::Refused(refusal)),
            Some((Frame::Welcome(welcome), _)) => {
                if !(MAPPED_VERSIONS.lowest..=MAPPED_VERSIONS.highest).contains(&welcome.version) {
                    return Err(AnswerError::Version(welcome.version));
                }
                let memory = memory.ok_or(AnswerError::NoMemory)?;
                return Ok(MappedAnswer::Welcome { welcome, memory });
            }
            Some(_) => return Err(AnswerError::OtherFrame),
            None => {}
        }
        wait(socket, deadline)?;
        let wanted = wanted_bytes(&bytes[..filled]);
        let (count, descriptor) = match receive(socket, &mut bytes[filled..wanted]) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            received => received?,
        };
        if count == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        filled += count;
        memory = memory.or(descriptor);
    }
}

/// Returns the length of the frame that begins with these bytes, or of its header while that is not there.
fn wanted_bytes(begin: &[u8]) -> usize {
    match begin {
        [_, _, low, high, ..] if begin.len() >= HEADER_BYTES => {
            HEADER_BYTES + usize::from(u16::from_le_bytes([*low, *high])).min(PAGE_SIZE)
        }
        _ => HEADER_BYTES,
    }
}

/// Waits until the socket is readable.
fn wait(socket: BorrowedFd<'_>, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::{ErrorCode, PageCount, PoolGeneration, RequestId, SendCount, ServerId};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(30);

    fn welcome(version: u16) -> Vec<u8> {
        let mut bytes = Vec::new();
        Frame::Welcome(Welcome {
            version,
            server_id: ServerId([1; 16]),
            pool_generation: PoolGeneration(2),
            npages: PageCount(3),
            available: PageCount(4),
            quota: PageCount(5),
            sends_received: SendCount(0),
        })
        .encode(&mut bytes);
        bytes
    }

    /// Returns the two ends of a pipe. Reading ends when every copy of the other end is closed.
    fn pipe() -> (std::fs::File, OwnedFd) {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        (reader.into(), writer)
    }

    #[track_caller]
    fn expect_no_copies(mut reader: std::fs::File, what: &str) {
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "{what}");
    }

    #[test]
    fn a_welcome_comes_with_its_memory_and_nothing_after_it_is_read() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, writer) = pipe();
        let mut bytes = welcome(MAPPED_VERSIONS.lowest);
        bytes.extend(b"session");
        assert_eq!(send(&theirs, &bytes, writer.as_fd()).unwrap(), bytes.len());
        drop(writer);
        let MappedAnswer::Welcome { welcome, memory } = receive_mapped_answer(&ours, LONG).unwrap() else {
            panic!("refused");
        };
        assert_eq!((welcome.npages, welcome.quota), (PageCount(3), PageCount(5)));
        assert!(rustix::io::fcntl_getfd(&memory).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        rustix::io::write(&memory, b"x").unwrap();
        assert_eq!(reader.read(&mut [0; 4]).unwrap(), 1, "it is the one that was sent");
        let mut rest = [0; 16];
        assert_eq!((&ours).read(&mut rest).unwrap(), 7);
        assert_eq!(&rest[..7], b"session");
    }

    #[test]
    fn a_welcome_in_pieces_over_a_socket_that_does_not_wait_is_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (_reader, writer) = pipe();
        let sender = std::thread::spawn(move || {
            let bytes = welcome(MAPPED_VERSIONS.lowest);
            send(&theirs, &bytes[..1], writer.as_fd()).unwrap();
            bytes[1..].iter().for_each(|byte| (&theirs).write_all(&[*byte]).unwrap());
            theirs
        });
        assert!(matches!(receive_mapped_answer(&ours, LONG).unwrap(), MappedAnswer::Welcome { .. }));
        drop(sender.join().unwrap());
    }

    #[test]
    fn descriptors_beyond_the_first_are_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pipes: Vec<_> = (0..4).map(|_| pipe()).collect();
        // Three in one message, of which one finds room, and a fourth in the next.
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let three = [0, 1, 2].map(|at| pipes[at].1.as_fd());
        assert!(control.push(SendAncillaryMessage::ScmRights(&three)));
        let bytes = welcome(MAPPED_VERSIONS.lowest);
        sendmsg(&theirs, &[IoSlice::new(&bytes[..20])], &mut control, SendFlags::empty()).unwrap();
        send(&theirs, &bytes[20..], pipes[3].1.as_fd()).unwrap();
        let mut readers: Vec<_> = pipes.into_iter().map(|(reader, _)| reader).collect();
        let MappedAnswer::Welcome { memory, .. } = receive_mapped_answer(&ours, LONG).unwrap() else {
            panic!("refused");
        };
        for reader in readers.drain(1..) {
            expect_no_copies(reader, "a descriptor that was not wanted is still open");
        }
        drop(memory);
        expect_no_copies(readers.remove(0), "the one that was wanted");
    }

    #[test]
    fn what_is_no_welcome_of_a_mapped_session_is_an_error_and_keeps_no_descriptor() {
        let answer = |bytes: &[u8], with_memory: bool| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (reader, writer) = pipe();
            match with_memory {
                true => drop(send(&theirs, bytes, writer.as_fd()).unwrap()),
                false => (&theirs).write_all(bytes).unwrap(),
            }
            drop((writer, theirs));
            let answer = receive_mapped_answer(&ours, LONG);
            let told = match &answer {
                Ok(MappedAnswer::Welcome { .. }) => "welcome".to_owned(),
                Ok(MappedAnswer::Refused(refusal)) => format!("{:?}", refusal.code),
                Err(error) => error.to_string(),
            };
            drop((ours, answer));
            expect_no_copies(reader, "a refused descriptor is still open");
            told
        };
        let mut refusal = Vec::new();
        Frame::Error(ErrorReply { request: RequestId(0), code: ErrorCode::Busy, detail: 0 }).encode(&mut refusal);
        assert_eq!(answer(&refusal, true), "Busy");
        assert!(answer(&welcome(1), true).contains("version 1"));
        assert!(answer(&welcome(MAPPED_VERSIONS.lowest), false).contains("without the memory"));
        let mut bye = Vec::new();
        Frame::Bye.encode(&mut bye);
        assert!(answer(&bye, true).contains("another frame"));
        assert!(answer(b"HTTP/1.1 400 Bad Request", true).contains("kind 72"));
        assert!(answer(&welcome(MAPPED_VERSIONS.lowest)[..40], true).contains("end of file"));
        assert!(answer(b"", false).contains("end of file"));
    }

    #[test]
    fn a_silent_server_is_not_waited_for_without_limit() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(&welcome(MAPPED_VERSIONS.lowest)[..30]).unwrap();
        let error = receive_mapped_answer(&ours, SHORT).unwrap_err();
        assert!(matches!(error, AnswerError::Io(ref error) if error.kind() == io::ErrorKind::TimedOut), "{error}");
    }
}
