//! A memory server that lies: a proxy between the VM process and the real server that changes one page in forty on its
//! way back. Used by the tests `lies` and `correctness`.

use crate::Result;
use remoca_protocol::{Frame, PAGE_SIZE, ReceiveBuffer};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

/// Listens on one socket and forwards to another, in both directions, until this process ends. Some pages of the
/// server get a flipped bit, are replaced by an earlier page, or are zeroed.
pub fn lie_between(listen: &Path, server: PathBuf) -> Result<()> {
    let listener = UnixListener::bind(listen)?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&server) else { continue };
            let (Ok(mut from_client), Ok(mut to_server)) = (client.try_clone(), server.try_clone()) else { continue };
            thread::spawn(move || {
                let _ = std::io::copy(&mut from_client, &mut to_server);
                let _ = to_server.shutdown(Shutdown::Both);
            });
            thread::spawn(move || pass_back(server, client));
        }
    });
    Ok(())
}

fn pass_back(mut server: UnixStream, mut client: UnixStream) {
    let mut buffer = ReceiveBuffer::new(1 << 18);
    let (mut count, mut earlier) = (0_u64, [0x5a; PAGE_SIZE]);
    loop {
        let mut out = Vec::new();
        while let Ok(Some(frame)) = buffer.take() {
            let Frame::SendPage { request, slot, page } = frame else {
                frame.encode(&mut out);
                continue;
            };
            count += 1;
            let mut lie = *page;
            match count % 120 {
                0 => lie[usize::try_from(count).unwrap_or(0) % PAGE_SIZE] ^= 1,
                40 => lie = earlier,
                80 => lie = [0; PAGE_SIZE],
                _ => {}
            }
            earlier = *page;
            Frame::SendPage { request, slot, page: &lie }.encode(&mut out);
        }
        let passed_on = client.write_all(&out);
        match passed_on.and_then(|()| server.read(buffer.space())) {
            Ok(count) if count > 0 => buffer.filled(count),
            // One end is closed. Close the other one too.
            _ => {
                let _ = client.shutdown(Shutdown::Both);
                let _ = server.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}
