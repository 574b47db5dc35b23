//! The channel over which a device tells its front end that its configuration has changed.
//!
//! The front end passes the channel in a message. The vhost crate takes that message, but cannot say on the channel what
//! has to be said here, and does not return the descriptor. So this module receives the message itself. Nothing is ever
//! read from the channel, and nobody waits for it: an answer is never asked for.

use super::command::failure;
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketType, recv, recvmsg, send,
    sockopt,
};
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::Error as VhostError;

/// Number of the message that passes the channel, and of the one that is said on it.
const SET_BACKEND_REQ_FD: u32 = 21;
const CONFIG_CHANGE_MSG: u32 = 2;
/// Flags of a message: the version of the protocol, "this is a reply", and "a reply is needed".
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER_BYTES: usize = 12;

/// Receives the next message of the front end if it is one that passes the channel. Returns `None`, and leaves the message
/// where it is, if it is another one or has not arrived whole.
///
/// # Errors
/// If the message is not valid.
pub(super) fn receive(front_end: &UnixStream, acknowledges: bool) -> Result<Option<OwnedFd>, VhostError> {
    let mut header = [0; HEADER_BYTES];
    match recv(front_end, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((HEADER_BYTES, _)) if field(&header, 0) == SET_BACKEND_REQ_FD => {}
        // Whatever is wrong with the connection shows when the message is received.
        Ok(_) | Err(_) => return Ok(None),
    }
    let mut room = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut room);
    let buffers = &mut [IoSliceMut::new(&mut header)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(front_end, buffers, &mut ancillary, flags).map_err(broken)?;
    let mut channel = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            channel = descriptors.next();
        }
    }
    let channel = channel.filter(is_stream).filter(|_| received.bytes == HEADER_BYTES && field(&header, 8) == 0);
    let channel = channel.ok_or_else(|| failure("a message that passes no socket for changes of the configuration"))?;
    if acknowledges && field(&header, 4) & NEED_REPLY != 0 {
        let mut reply = message(SET_BACKEND_REQ_FD, VERSION | REPLY, 8).to_vec();
        reply.extend(0_u64.to_ne_bytes());
        let mut front_end = front_end;
        front_end.write_all(&reply).map_err(failure)?;
    }
    Ok(Some(channel))
}

/// Tells the front end to read the configuration again. Returns whether it will do so: it has the message, or one that
/// it has not read yet.
pub(super) fn tell(channel: &OwnedFd) -> bool {
    match send(channel, &message(CONFIG_CHANGE_MSG, VERSION, 0), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        // The channel is full of messages that say the same.
        Ok(_) | Err(Errno::AGAIN) => true,
        Err(_) => false,
    }
}

fn message(request: u32, flags: u32, bytes: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    for (place, value) in header.chunks_exact_mut(4).zip([request, flags, bytes]) {
        place.copy_from_slice(&value.to_ne_bytes());
    }
    header
}

fn field(header: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

fn is_stream(descriptor: &OwnedFd) -> bool {
    sockopt::socket_type(descriptor.as_fd()) == Ok(SocketType::STREAM)
        && sockopt::socket_domain(descriptor.as_fd()) == Ok(AddressFamily::UNIX)
}

fn broken(error: Errno) -> VhostError {
    failure(io::Error::from(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
    use std::io::{IoSlice, Read};

    fn pass(front_end: &UnixStream, header: &[u8], descriptor: Option<&OwnedFd>) {
        let mut room = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        let descriptors = descriptor.map(|fd| [fd.as_fd()]);
        if let Some(descriptors) = &descriptors {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        sendmsg(front_end, &[IoSlice::new(header)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn the_message_is_received_acknowledged_and_used() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        assert!(receive(&ours, true).unwrap().is_none(), "there is none");
        let (mut end, other_end) = UnixStream::pair().unwrap();
        let other_end = OwnedFd::from(other_end);
        pass(&theirs, &message(SET_BACKEND_REQ_FD, VERSION | NEED_REPLY, 0), Some(&other_end));
        let channel = receive(&ours, true).unwrap().expect("a channel");
        let mut reply = [0; 20];
        (&theirs).read_exact(&mut reply).unwrap();
        assert_eq!(reply[..12], message(SET_BACKEND_REQ_FD, VERSION | REPLY, 8));
        assert_eq!(reply[12..], [0; 8]);
        // Nobody reads, and nobody waits.
        assert!((0..100_000).all(|_| tell(&channel)));
        let mut told = [0; 12];
        end.read_exact(&mut told).unwrap();
        assert_eq!(told, message(CONFIG_CHANGE_MSG, VERSION, 0), "no reply is asked for");
        drop((end, other_end));
        assert!(!tell(&channel));
    }

    #[test]
    fn other_messages_stay_where_they_are() {
        let (theirs, ours) = UnixStream::pair().unwrap();
        let features = message(1, VERSION, 0);
        (&theirs).write_all(&features[..5]).unwrap();
        assert!(receive(&ours, true).unwrap().is_none());
        (&theirs).write_all(&features[5..]).unwrap();
        assert!(receive(&ours, true).unwrap().is_none());
        let mut received = [0; 12];
        (&ours).read_exact(&mut received).unwrap();
        assert_eq!(received, features);
    }

    #[test]
    fn what_passes_no_socket_is_refused() {
        let no_socket = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (datagrams, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
        for descriptor in [None, Some(no_socket), Some(datagrams.into())] {
            let (theirs, ours) = UnixStream::pair().unwrap();
            pass(&theirs, &message(SET_BACKEND_REQ_FD, VERSION, 0), descriptor.as_ref());
            assert!(receive(&ours, true).is_err());
        }
    }
}
