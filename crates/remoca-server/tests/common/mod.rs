//! A server in this process and a plain blocking client over a real socket.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "tests fail by panics")]

pub mod held;
pub mod mapped;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use remoca_protocol::{
    ErrorCode, ErrorReply, Frame, Hello, PAGE_SIZE, PageCount, ReceiveBuffer, RequestId, SlotIndex, Token, VERSIONS,
    Welcome,
};
use remoca_server::{Config, Limits, ListenAddress, PageLocking, Server, Status};

/// Longer than anything here takes. It only ends a test that goes wrong.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// A slot beyond the size of every pool.
pub const BEYOND: u32 = 1 << 31;

/// Returns a configuration with 8 MiB on a TCP port, and generous values for everything else.
pub fn config() -> Config {
    Config {
        listen: vec!["tcp:127.0.0.1:0".parse().unwrap()],
        memory_bytes: 8 << 20,
        quota_bytes: None,
        grace: Duration::from_secs(3600),
        locking: PageLocking::Unlocked,
        threads: 2,
        control: None,
        limits: Limits::default(),
    }
}

pub fn start(config: Config) -> Server {
    Server::start(config).unwrap()
}

/// Returns a page whose content is unique to `number`.
pub fn page(number: u32) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    for (index, word) in (0u32..).zip(page.chunks_exact_mut(4)) {
        word.copy_from_slice(&(number.wrapping_mul(0x9e37_79b1) ^ index.wrapping_mul(0x85eb_ca6b)).to_le_bytes());
    }
    page
}

pub fn token(number: u8) -> Token {
    Token([number; 16])
}

pub trait Socket: Read + Write + Send {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()>;
    /// Shuts down one direction, or both.
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Self::set_nonblocking(self, nonblocking)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Self::shutdown(self, how)
    }
}

impl Socket for UnixStream {
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Self::set_nonblocking(self, nonblocking)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Self::shutdown(self, how)
    }
}

pub struct Client {
    pub socket: Box<dyn Socket>,
    buffer: ReceiveBuffer,
}

impl Client {
    /// Connects to the first address of a server. Sends nothing yet.
    pub fn connect(server: &Server) -> Self {
        Self::connect_to(&server.local_addresses()[0])
    }

    pub fn connect_to(address: &ListenAddress) -> Self {
        let socket: Box<dyn Socket> = match address {
            ListenAddress::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                stream.set_nodelay(true).unwrap();
                Box::new(stream)
            }
            ListenAddress::Unix(path) => Box::new(unix(path)),
        };
        Self { socket, buffer: ReceiveBuffer::new(1 << 20) }
    }

    /// Connects from another address of this host.
    pub fn connect_from(server: &Server, address: [u8; 4]) -> Self {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let ListenAddress::Tcp { host, port } = &server.local_addresses()[0] else { panic!("a TCP address") };
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrV4::new(address.into(), 0)).unwrap();
        connect(&socket, &SocketAddrV4::new(host.parse().unwrap(), *port)).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket: Box::new(stream), buffer: ReceiveBuffer::new(1 << 20) }
    }

    /// Begins a session, and returns it with the server's WELCOME.
    pub fn greeted(server: &Server, token: Token, epoch: u64) -> (Self, Welcome) {
        let mut client = Self::connect(server);
        let welcome = client.hello(token, epoch);
        (client, welcome)
    }

    /// Begins a session, and gives its pool this size.
    pub fn with_pages(server: &Server, token: Token, npages: u32) -> Self {
        let (mut client, _) = Self::greeted(server, token, 1);
        client.resize(npages);
        client
    }

    pub fn hello(&mut self, token: Token, epoch: u64) -> Welcome {
        self.try_hello(token, epoch).unwrap().expect("the server closed the connection")
    }

    /// Begins a session. Returns `None` or an error if the server closed the connection instead of answering.
    pub fn try_hello(&mut self, token: Token, epoch: u64) -> io::Result<Option<Welcome>> {
        self.socket.write_all(&encode(&[Frame::Hello(Hello { versions: VERSIONS, token, epoch })]))?;
        self.try_receive(|frame| match frame {
            Frame::Welcome(welcome) => welcome,
            other => panic!("instead of WELCOME: {other:?}"),
        })
    }

    /// Sends all frames in one write.
    pub fn send(&mut self, frames: &[Frame<'_>]) {
        self.send_bytes(&encode(frames));
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Receives the next frame.
    pub fn receive<T>(&mut self, look: impl FnOnce(Frame<'_>) -> T) -> T {
        self.try_receive(look).unwrap().expect("the server closed the connection")
    }

    /// Receives the next frame, or `None` if the connection ends first.
    fn try_receive<T>(&mut self, look: impl FnOnce(Frame<'_>) -> T) -> io::Result<Option<T>> {
        loop {
            if self.buffer.peek().unwrap().is_some() {
                return Ok(Some(look(self.buffer.take().unwrap().unwrap())));
            }
            let count = self.socket.read(self.buffer.space())?;
            if count == 0 {
                return Ok(None);
            }
            self.buffer.filled(count);
        }
    }

    #[track_caller]
    pub fn expect(&mut self, expected: Frame<'_>) {
        self.receive(|frame| assert_eq!(frame, expected));
    }

    #[track_caller]
    pub fn expect_error(&mut self, code: ErrorCode) {
        self.receive(|frame| match frame {
            Frame::Error(error) => assert_eq!((error.request, error.code), (RequestId(0), code)),
            other => panic!("instead of {code:?}: {other:?}"),
        });
    }

    /// Expects that the connection is closed, in order or by a reset, without further input.
    #[track_caller]
    pub fn expect_closed(&mut self) {
        assert!(self.buffer.is_empty(), "something came before the end");
        match self.socket.read(&mut [0; 64]) {
            Ok(count) => assert_eq!(count, 0, "something came instead of the end"),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}"),
        }
    }

    /// Changes the size, and returns how many more pages are available.
    #[track_caller]
    pub fn resize(&mut self, npages: u32) -> u32 {
        self.try_resize(npages).unwrap()
    }

    /// Changes the size. Returns how many more pages are available, or the error code with its detail.
    pub fn try_resize(&mut self, npages: u32) -> Result<u32, (ErrorCode, u32)> {
        self.send(&[Frame::SetSize { request: RequestId(77), npages: PageCount(npages) }]);
        self.receive(|frame| match frame {
            Frame::Sized { request: RequestId(77), npages: PageCount(n), available } if n == npages => Ok(available.0),
            Frame::Error(ErrorReply { request: RequestId(77), code, detail }) => Err((code, detail)),
            other => panic!("instead of SIZED: {other:?}"),
        })
    }

    /// Stores [`page`] `number` in a slot.
    pub fn store(&mut self, slot: u32, number: u32) {
        self.send(&[Frame::SendPage { request: RequestId(0), slot: SlotIndex(slot), page: &page(number) }]);
    }

    /// Expects that the slot holds [`page`] `number`.
    #[track_caller]
    pub fn expect_held(&mut self, slot: u32, number: u32) {
        self.send(&[request(!slot, slot)]);
        self.expect_page(!slot, slot, number);
    }

    #[track_caller]
    pub fn expect_page(&mut self, request: u32, slot: u32, number: u32) {
        let page = page(number);
        self.receive(|frame| {
            let expected = Frame::SendPage { request: RequestId(request), slot: SlotIndex(slot), page: &page };
            assert!(frame == expected, "not page {number} of slot {slot}, but {}", short(frame));
        });
    }

    #[track_caller]
    pub fn expect_empty(&mut self, slot: u32) {
        self.send(&[request(!slot, slot)]);
        self.expect_not_found(!slot);
    }

    #[track_caller]
    pub fn expect_not_found(&mut self, request: u32) {
        self.receive(|frame| {
            let error = ErrorReply { request: RequestId(request), code: ErrorCode::NotFound, detail: 0 };
            assert!(frame == Frame::Error(error), "instead of not found: {}", short(frame));
        });
    }

    /// Returns when the server has handled everything that was sent: it answers in order. Counted as a page that was
    /// not found.
    pub fn barrier(&mut self) {
        self.expect_empty(BEYOND);
    }
}

fn short(frame: Frame<'_>) -> String {
    let mut text = format!("{frame:?}");
    text.truncate(100);
    text
}

fn unix(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub fn encode(frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

pub fn request(request: u32, slot: u32) -> Frame<'static> {
    Frame::Request { request: RequestId(request), slot: SlotIndex(slot) }
}

pub fn send_page(slot: u32, page: &[u8; PAGE_SIZE]) -> Frame<'_> {
    Frame::SendPage { request: RequestId(0), slot: SlotIndex(slot), page }
}

pub fn moved(from: u32, to: u32) -> Frame<'static> {
    Frame::Move { from: SlotIndex(from), to: SlotIndex(to) }
}

/// Waits until the server's status is as wanted. Fails the test after a minute.
#[track_caller]
pub fn wait_for(server: &Server, what: &str, wanted: impl Fn(&Status) -> bool) {
    let polls = 6000;
    for _ in 0..polls {
        if wanted(&server.status()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never came: {what}; {:#?}", server.status());
}
