//! A guest that moves from one QEMU to another: what both must be able to open, and the port that carries its jobs.
//!
//! The laboratory's end of the port stays the same. After the guest has moved, a thread for each direction carries
//! bytes between the first QEMU's end and the current QEMU.

use std::{
    fmt::Debug,
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use remoca_qmp::Qmp;

use crate::{
    error::{Context, Result},
    guest::{DiskSource, GuestConfig, Qemu},
    image::Image,
    service,
};

/// A QEMU that waits for a guest. Killed when dropped.
pub struct Incoming {
    /// `None` once the guest continues in it.
    pub(crate) waiting: Option<(Qemu, Qmp)>,
    pub(crate) config: GuestConfig,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some((qemu, _)) = &mut self.waiting {
            // It may have ended already.
            let _ = qemu.child.kill();
            let _ = qemu.child.wait();
        }
    }
}

/// Makes a layer of its own over the image's root file system, in `folder`.
pub(crate) fn own_root(image: &Image, folder: &Path) -> Result<DiskSource> {
    let path = folder.join("root.qcow2");
    let mut command = service::tool("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image.root()).arg(&path);
    service::run(&mut command)?;
    Ok(DiskSource::Layer { path })
}

/// Route of the port's bytes to their QEMU.
pub(crate) enum Relay {
    /// The first QEMU has the port itself; this is a copy of its end.
    Waiting(UnixStream),
    Running {
        far: UnixStream,
        now: Arc<Mutex<Now>>,
    },
}

/// The current QEMU.
pub(crate) struct Now {
    number: u32,
    port: UnixStream,
}

impl Debug for Relay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Relay")
    }
}

impl Relay {
    /// Switches to the given port, which belongs to the new QEMU.
    pub(crate) fn switch(self, port: UnixStream) -> Result<Relay> {
        let copy = |stream: &UnixStream| stream.try_clone().context("copying a socket");
        let (far, now, number) = match self {
            Relay::Waiting(far) => {
                // The first QEMU shared this end with us, in non-blocking mode.
                far.set_nonblocking(false).context("taking the port over")?;
                let now = Arc::new(Mutex::new(Now { number: 1, port: copy(&port)? }));
                let (mut source, target) = (copy(&far)?, Arc::clone(&now));
                thread::spawn(move || {
                    let mut bytes = [0; 65536];
                    while let Ok(count @ 1..) = source.read(&mut bytes) {
                        let mut now = target.lock().unwrap_or_else(PoisonError::into_inner);
                        // The other direction notices a QEMU that is gone.
                        let _ = now.port.write_all(&bytes[..count]);
                    }
                });
                (far, now, 1)
            }
            Relay::Running { far, now } => {
                let mut current = now.lock().unwrap_or_else(PoisonError::into_inner);
                current.number += 1;
                current.port = copy(&port)?;
                let number = current.number;
                drop(current);
                (far, now, number)
            }
        };
        let (mut source, mut target, watched) = (port, copy(&far)?, Arc::clone(&now));
        thread::spawn(move || {
            // Ends with its QEMU. If no other has replaced it, the port is closed.
            let _ = std::io::copy(&mut source, &mut target);
            if watched.lock().unwrap_or_else(PoisonError::into_inner).number == number {
                let _ = target.shutdown(Shutdown::Both);
            }
        });
        Ok(Relay::Running { far, now })
    }
}
