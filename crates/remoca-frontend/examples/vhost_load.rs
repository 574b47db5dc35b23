//! Random reads against a vhost-user-blk socket, without a VM: `vhost_load SOCKET [SECONDS] [DEPTH] [BYTES]`.
//!
//! It polls for completions, so the measurement includes kicks but no interrupts.

use std::path::Path;
use std::time::{Duration, Instant};

use remoca_frontend::testing::{Command, Options, TestGuest, Ticket};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: vhost_load SOCKET [SECONDS] [DEPTH] [BYTES]")?;
    let seconds: u64 = arguments.next().as_deref().unwrap_or("3").parse()?;
    let depth: usize = arguments.next().as_deref().unwrap_or("32").parse()?;
    let length: u64 = arguments.next().as_deref().unwrap_or("4096").parse()?;

    let mut guest = TestGuest::new(Options { queue_size: 256, data_bytes: length, ..Options::default() });
    guest.connect(Path::new(&socket))?;
    guest.queues[0].suppress_interrupts(true);
    let capacity = guest.read_config(0, 8)?.try_into().map(u64::from_le_bytes).map_err(|_| "no capacity")? * 512;
    let requests = capacity / length;

    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut flying: Vec<Ticket> = Vec::with_capacity(depth);
    let (mut completed, mut failed) = (0u64, 0u64);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(seconds) {
        let mut submitted = false;
        while flying.len() < depth {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let sector = (random >> 33) % requests * (length / 512);
            flying.push(guest.submit(0, Command::Read { sector, length }));
            submitted = true;
        }
        if submitted {
            guest.queues[0].kick();
        }
        flying.retain(|ticket| match guest.result(*ticket) {
            None => true,
            Some(status) => {
                completed += 1;
                failed += u64::from(status != 0);
                false
            }
        });
    }
    let rate = completed * 1_000_000_000 / u64::try_from(started.elapsed().as_nanos())?;
    println!("{completed} reads of {length} bytes at depth {depth}: {rate} IOPS, {failed} failed");
    Ok(())
}
