//! A RAM disk for QEMU: `vhost_ram SOCKET [MEBIBYTES] [QUEUES]`. It measures the cost of the frontend without a store.

use std::path::Path;

use remoca_frontend::testing::RamDisk;
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::socket::SocketSource;
use rustix::event::{PollFd, PollFlags, poll};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: vhost_ram SOCKET [MEBIBYTES] [QUEUES]")?;
    let mebibytes: usize = arguments.next().as_deref().unwrap_or("256").parse()?;
    let length = mebibytes << 20;
    let mut config = DeviceConfig::disk("ram", "vhost-ram", u64::try_from(length)?);
    config.logical_block_bytes = 512;
    config.queue_count_max = arguments.next().as_deref().unwrap_or("4").parse()?;
    let mut disk = RamDisk::new(length);
    let mut device = VhostDevice::new(config, SocketSource::bind(Path::new(&socket), None)?)?;
    loop {
        if device.listen() != Some(true) {
            poll(&mut [PollFd::from_borrowed_fd(device.event_fd(), PollFlags::IN)], None)?;
        }
        device.handle_events()?;
        while let Some(request) = device.pop() {
            let status = disk.execute(&request);
            device.complete(request, status);
        }
        device.notify();
    }
}
