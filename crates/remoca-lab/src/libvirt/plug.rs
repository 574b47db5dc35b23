//! A socket that QEMUs connect to, one after the other, as one stream.
//!
//! A domain that is saved and started again, or that moves, gets a QEMU of its own each time. It connects when it
//! starts; its bytes are carried when its predecessor has ended.

use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use crate::error::{Context, Result};

/// The QEMU that is connected.
#[derive(Default)]
struct Connected {
    stream: Mutex<Option<UnixStream>>,
    changed: Condvar,
}

/// Listens on the socket `path`, and returns the stream of the QEMUs that connect to it. The threads that carry it run
/// as long as this process.
pub(super) fn open(path: &Path) -> Result<UnixStream> {
    let listener = UnixListener::bind(path).context_path("binding", path)?;
    let (near, far) = UnixStream::pair().context("creating a socket pair")?;
    let copy = far.try_clone().context("copying a socket")?;
    let connected = Arc::new(Connected::default());
    let current = Arc::clone(&connected);
    thread::spawn(move || carry_out(&listener, far, &connected));
    thread::spawn(move || carry_in(copy, &current));
    Ok(near)
}

/// Carries what QEMUs write.
fn carry_out(listener: &UnixListener, mut far: UnixStream, connected: &Connected) {
    for mut qemu in listener.incoming().flatten() {
        *connected.stream.lock().unwrap_or_else(PoisonError::into_inner) = qemu.try_clone().ok();
        connected.changed.notify_all();
        // Ends with the QEMU, and the next one follows.
        let _: io::Result<u64> = io::copy(&mut qemu, &mut far);
        *connected.stream.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Carries what is written to the stream. Waits while no QEMU is connected.
fn carry_in(mut far: UnixStream, connected: &Connected) {
    let mut bytes = [0; 65536];
    while let Ok(count @ 1..) = far.read(&mut bytes) {
        let mut stream = connected.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let mut qemu = loop {
            match stream.as_ref().map(UnixStream::try_clone) {
                Some(Ok(qemu)) => break qemu,
                _ => stream = connected.changed.wait(stream).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(stream);
        // A QEMU that has just ended loses what was on its way, as its guest does.
        let _ = qemu.write_all(&bytes[..count]);
    }
}
