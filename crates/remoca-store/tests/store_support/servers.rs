//! Real NBD servers, and one that lies.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remoca_store::{NbdAddress, NbdUri};

/// A server process on a Unix socket; killed when dropped.
pub struct Server {
    child: Child,
    pub socket: PathBuf,
}

impl Server {
    /// `nbdkit -f -U SOCKET arguments`.
    pub fn nbdkit(socket: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--exit-with-parent", "-U"]).arg(socket).args(arguments);
        Self::start(command, socket)
    }

    /// `qemu-nbd -f raw -k SOCKET arguments`.
    pub fn qemu_nbd(socket: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("qemu-nbd");
        command.args(["-f", "raw", "-t", "-k"]).arg(socket).args(arguments);
        Self::start(command, socket)
    }

    fn start(mut command: Command, socket: &Path) -> Self {
        // What a killed predecessor left.
        let _ = std::fs::remove_file(socket);
        let child = command.spawn().expect("nbdkit and qemu-nbd are installed");
        let give_up_at = Instant::now() + super::HANG_AFTER;
        while greet(socket).is_err() {
            assert!(Instant::now() < give_up_at, "the server does not listen on {}", socket.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { child, socket: socket.to_owned() }
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn uri(&self) -> NbdUri {
        unix_uri(&self.socket)
    }

    /// Stops it in a clean way; whether it ended well.
    pub fn terminate(mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.child.wait().unwrap().success()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects and leaves again in good order.
fn greet(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.read_exact(&mut [0; 18])?;
    // Client flags and NBD_OPT_ABORT.
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x02\0\0\0\0")
}

pub fn unix_uri(socket: &Path) -> NbdUri {
    NbdUri { server: NbdAddress::Unix(socket.to_owned()), export: String::new() }
}

/// Bytes of the disk that [`scripted`] offers.
const SCRIPTED_SIZE: u64 = 1 << 20;

/// A server for one connection after the other: an honest handshake, then `serve` does what it likes. Ends when `serve`
/// says so.
pub fn scripted(socket: &Path, mut serve: impl FnMut(&mut UnixStream) -> bool + Send + 'static) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            shake_hands(&mut stream);
            if !serve(&mut stream) {
                return;
            }
        }
    })
}

fn shake_hands(stream: &mut UnixStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
    // Client flags, option header, and the data of NBD_OPT_GO with an empty name.
    let mut option = [0; 4 + 16 + 8];
    stream.read_exact(&mut option).unwrap();
    let reply = |code: u32, data: &[u8]| {
        let len = u32::try_from(data.len()).unwrap();
        [&0x3_e889_0455_65a9_u64.to_be_bytes()[..], &7_u32.to_be_bytes(), &code.to_be_bytes(), &len.to_be_bytes(), data]
            .concat()
    };
    // Flags: flush, FUA.
    let export = [&[0, 0][..], &SCRIPTED_SIZE.to_be_bytes(), &[0, 0x0D]].concat();
    stream.write_all(&[reply(3, &export), reply(1, &[])].concat()).unwrap();
}

/// The next request: command, cookie, offset, payload of a write. `None` at the end of the connection.
pub fn next_request(stream: &mut UnixStream) -> Option<(u16, u64, u64, Vec<u8>)> {
    let mut header = [0; 28];
    stream.read_exact(&mut header).ok()?;
    let command = u16::from_be_bytes(header[6..8].try_into().unwrap());
    let cookie = u64::from_be_bytes(header[8..16].try_into().unwrap());
    let offset = u64::from_be_bytes(header[16..24].try_into().unwrap());
    let len = u32::from_be_bytes(header[24..28].try_into().unwrap());
    let mut payload = vec![0; if command == 1 { usize::try_from(len).unwrap() } else { 0 }];
    stream.read_exact(&mut payload).ok()?;
    Some((command, cookie, offset, payload))
}

pub fn reply(error: u32, cookie: u64, payload: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), payload].concat()
}
