//! A client of a mapped pool.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;

use remoca_io::passed::{MappedAnswer, receive_mapped_answer};
use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, Hello, MAPPED_VERSIONS, PageCount, ReceiveBuffer, RequestId, Token, Welcome,
};

use super::{PATIENCE, encode, page, unix};

pub struct Mapped {
    pub socket: UnixStream,
    pub welcome: Welcome,
    pub memory: File,
    buffer: ReceiveBuffer,
}

impl Mapped {
    #[track_caller]
    pub fn connect(path: &Path, token: Token, epoch: u64) -> Self {
        Self::try_connect(path, token, epoch).expect("refused")
    }

    #[track_caller]
    pub fn try_connect(path: &Path, token: Token, epoch: u64) -> Result<Self, ErrorReply> {
        let socket = unix(path);
        (&socket).write_all(&encode(&[hello(token, epoch)])).unwrap();
        match receive_mapped_answer(&socket, PATIENCE).unwrap() {
            MappedAnswer::Welcome { welcome, memory } => {
                let memory = memory.into();
                Ok(Self { socket, welcome, memory, buffer: ReceiveBuffer::new(1 << 16) })
            }
            MappedAnswer::Refused(refusal) => Err(refusal),
        }
    }

    pub fn send(&self, frames: &[Frame<'_>]) {
        (&self.socket).write_all(&encode(frames)).unwrap();
    }

    /// Receives the next frame, or `None` if the connection ends first.
    pub fn receive<T>(&mut self, look: impl FnOnce(Frame<'_>) -> T) -> Option<T> {
        while self.buffer.peek().unwrap().is_none() {
            match self.socket.read(self.buffer.space()) {
                Ok(count @ 1..) => self.buffer.filled(count),
                Ok(0) => return None,
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
                    return None;
                }
            }
        }
        Some(look(self.buffer.take().unwrap().unwrap()))
    }

    #[track_caller]
    pub fn resize(&mut self, npages: u32) -> u32 {
        self.try_resize(npages).unwrap()
    }

    /// Asks for a size until all of it is granted: a growth that takes long is granted in parts.
    #[track_caller]
    pub fn try_resize(&mut self, npages: u32) -> Result<u32, (ErrorCode, u32)> {
        let mut before = None;
        loop {
            self.send(&[set_size(npages)]);
            let answer = self.receive(|frame| match frame {
                Frame::Sized { request: RequestId(5), npages: granted, available } => Ok((granted.0, available.0)),
                Frame::Error(ErrorReply { code, detail, .. }) => Err((code, detail)),
                other => panic!("instead of SIZED: {other:?}"),
            });
            let (granted, available) = answer.expect("the server closed the connection")?;
            if granted == npages {
                return Ok(available);
            }
            assert!(granted < npages && before < Some(granted), "{granted} of {npages} pages, and {before:?} before");
            before = Some(granted);
        }
    }

    #[track_caller]
    pub fn expect(&mut self, expected: Frame<'_>) {
        self.receive(|frame| assert_eq!(frame, expected)).expect("the server closed the connection");
    }

    #[track_caller]
    pub fn expect_error(&mut self, code: ErrorCode) {
        self.expect(Frame::Error(ErrorReply { request: RequestId(0), code, detail: 0 }));
        assert!(self.receive(|_| ()).is_none(), "nothing comes after it");
    }

    pub fn store(&self, slot: u32, number: u32) {
        self.memory.write_all_at(&page(number), u64::from(slot) * 4096).unwrap();
    }

    /// Returns whether the slot holds page `number`. If not, it must read as zeroes.
    #[track_caller]
    pub fn holds(&self, slot: u32, number: u32) -> bool {
        let mut found = [1; 4096];
        self.memory.read_exact_at(&mut found, u64::from(slot) * 4096).unwrap();
        assert!(found == page(number) || found == [0; 4096], "another page");
        found == page(number)
    }

    pub fn allocated(&self) -> u64 {
        self.memory.metadata().unwrap().blocks() / 8
    }

    /// Returns whether as many pages have memory as were granted, or what the host rounds that up to.
    pub fn has_memory_for(&self, granted: u32) -> bool {
        (granted..=granted.next_multiple_of(512)).contains(&u32::try_from(self.allocated()).unwrap())
    }

    pub fn copy(&self) -> OwnedFd {
        self.memory.as_fd().try_clone_to_owned().unwrap()
    }
}

pub fn hello(token: Token, epoch: u64) -> Frame<'static> {
    Frame::Hello(Hello { versions: MAPPED_VERSIONS, token, epoch })
}

pub fn set_size(npages: u32) -> Frame<'static> {
    Frame::SetSize { request: RequestId(5), npages: PageCount(npages) }
}
