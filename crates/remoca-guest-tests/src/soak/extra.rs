//! The disk of a soak that comes, goes and grows while the guest runs: its two images, which take turns under one name,
//! the data on them, and the guest's work there.
//!
//! So a block of the image that was there before, if it were found, would have the wrong signature.

use super::events::Event;
use crate::hotplug::{attach_for_good, described, detach, wait_for_size};
use crate::{Host, LIMIT, Result};
use remoca_lab::store;
use remoca_lab::workload::journal::Versions;
use remoca_lab::{Guest, Qmp};
use serde_json::Value;
use std::fs::File;
use std::path::PathBuf;

const MIB: u64 = 1 << 20;
/// Name of the disk, and its serial number.
pub const NAME: &str = "extra";
/// Port of the guest's machine for it, and QEMU's argument that makes it.
const SLOT: &str = "extra-slot";
pub const SLOT_DEVICE: &str = "pcie-root-port,id=extra-slot,chassis=7";
const FIRST_BYTES: u64 = 48 * MIB;
const GROWTH_BYTES: u64 = 32 * MIB;
/// Size of the data that is written after a growth. The file system had less room before.
const SET_BYTES: u64 = 28 * MIB;
/// Size from which an image is replaced by a new one, so that its checks do not become ever longer.
const OLD_BYTES: u64 = 128 * MIB;

const JOB: &str = "until [ -e /tmp/extra.stop ]; do n=$((n+1)); rm -rf /extra/churn; mkdir /extra/churn; \
    remoca-workload churn --dir /extra/churn --files 8 --file-size 256K --steps 40 --seed $n && \
    remoca-workload verify --dir /extra/set-0 || break; sleep 1; done > /tmp/extra.out 2>&1; \
    [ -e /tmp/extra.stop ]; echo $? > /tmp/extra.status";
const END_JOB: &str = "touch /tmp/extra.stop; for i in $(seq 2000); do [ -s /tmp/extra.status ] && break; sleep 0.1; done; \
    [ \"$(cat /tmp/extra.status)\" = 0 ] || { tail /tmp/extra.out; exit 1; }";

/// An image of the disk, and its number of data sets.
struct ExtraImage {
    path: PathBuf,
    bytes: u64,
    sets: u64,
}

pub struct Extra {
    qmp: Qmp,
    images: [ExtraImage; 2],
    /// The image that comes next, or is there.
    current: usize,
    pub is_there: bool,
    /// Whether its image has grown since it came.
    is_grown: bool,
    /// Bytes that were read and found right.
    pub verified_bytes: u64,
}

impl Extra {
    pub fn new(qmp: Qmp, host: &Host) -> Extra {
        let images = ["extra-0.img", "extra-1.img"];
        let images = images.map(|name| ExtraImage { path: host.folder().join(name), bytes: 0, sets: 0 });
        Extra { qmp, images, current: 0, is_there: false, is_grown: false, verified_bytes: 0 }
    }

    /// Returns whether the event is possible now.
    pub fn suits(&self, event: Event) -> bool {
        match event {
            Event::AddDisk => !self.is_there,
            Event::GrowDisk => self.is_there,
            // So a round of events has room for all three.
            Event::RemoveDisk => self.is_there && self.is_grown,
            _ => true,
        }
    }

    /// Makes the other image ready, and returns what `remoca disk add` says of it.
    pub fn prepare(&mut self, host: &Host) -> Result<String> {
        self.current = 1 - self.current;
        let image = &mut self.images[self.current];
        if image.bytes == 0 || image.bytes >= OLD_BYTES {
            let _ = std::fs::remove_file(&image.path);
            store::sparse_image(&image.path, FIRST_BYTES)?;
            (image.bytes, image.sets) = (FIRST_BYTES, 0);
        }
        Ok(described(host, NAME, &image.path))
    }

    /// Gives the guest the disk that was added, checks what is on it, and starts work there.
    pub fn plug(&mut self, guest: &mut Guest, host: &Host) -> Result<()> {
        attach_for_good(&mut self.qmp, host, guest, NAME, NAME, SLOT)?;
        (self.is_there, self.is_grown) = (true, false);
        wait_for_size(guest, NAME, self.images[self.current].bytes)?;
        let is_new = self.images[self.current].sets == 0;
        if is_new {
            // Blocks and inodes as on a large disk.
            guest.run(&format!("mkfs.ext4 -q -b 4096 -i 65536 $(disk-by-serial {NAME})"), LIMIT)?;
        }
        guest.run(&format!("mkdir -p /extra; mount $(disk-by-serial {NAME}) /extra"), LIMIT)?;
        if is_new {
            self.create_set(guest)?;
        }
        self.verify(guest)?;
        guest.run(&format!("rm -f /tmp/extra.stop /tmp/extra.status; ( {JOB} ) > /dev/null 2>&1 &"), LIMIT)?;
        Ok(())
    }

    /// Ends the work, checks the data, and takes the disk from the guest.
    pub fn unplug(&mut self, guest: &mut Guest, host: &Host) -> Result<()> {
        self.end_work(guest)?;
        detach(&mut self.qmp, host, guest, NAME, NAME)?;
        host.wait_until("the disk is detached", |status| {
            status.disks.iter().any(|disk| disk.name == NAME && !disk.attached)
        })?;
        self.is_there = false;
        Ok(())
    }

    /// Makes the image larger, waits until the guest sees it, checks the data, and fills the new part. `tell` has the VM process
    /// told, which otherwise notices by itself.
    pub fn grow(&mut self, guest: &mut Guest, tell: impl FnOnce() -> Result<()>) -> Result<()> {
        let image = &mut self.images[self.current];
        image.bytes += GROWTH_BYTES;
        File::options().write(true).open(&image.path)?.set_len(image.bytes)?;
        tell()?;
        wait_for_size(guest, NAME, image.bytes)?;
        let free = format!("[ $(($(stat -f -c '%f * %S' /extra))) -lt {SET_BYTES} ]");
        guest.run(&format!("{free} && resize2fs $(disk-by-serial {NAME}) && ! {free}"), LIMIT)?;
        self.create_set(guest)?;
        self.is_grown = true;
        self.verify(guest)
    }

    /// Ends the guest's work on the disk, checks the data, and unmounts it.
    pub fn end_work(&mut self, guest: &mut Guest) -> Result<()> {
        guest.run(END_JOB, LIMIT)?;
        self.verify(guest)?;
        guest.run("umount /extra", LIMIT)?;
        Ok(())
    }

    /// Checks the images, and the data on them, from outside.
    pub fn check(&mut self) -> Result<()> {
        for image in self.images.iter().filter(|image| image.bytes > 0) {
            store::check_ext4(&image.path)?;
            for set in 0..image.sets {
                let verified = store::verify_ext4(&image.path, &format!("/set-{set}"), &Versions::default())?;
                if verified.sectors * 512 != SET_BYTES || !verified.faults.is_empty() {
                    return Err(format!("{}: set {set}: {verified:?}", image.path.display()).into());
                }
                self.verified_bytes += SET_BYTES;
            }
        }
        Ok(())
    }

    fn create_set(&mut self, guest: &mut Guest) -> Result<()> {
        let image = &mut self.images[self.current];
        let (set, size) = (image.sets, SET_BYTES / 2);
        // No two data sets have a signature in common: that has the seed.
        let seed = 100 + 1000 * self.current as u64 + set;
        let create =
            format!("remoca-workload create --dir /extra/set-{set} --files 2 --file-size {size} --seed {seed}");
        guest.run(&format!("{create} && sync"), LIMIT)?;
        image.sets += 1;
        Ok(())
    }

    /// Has the guest read every byte of the data sets, past its page cache.
    fn verify(&mut self, guest: &mut Guest) -> Result<()> {
        for set in 0..self.images[self.current].sets {
            let said = guest.run(&format!("remoca-workload verify --dir /extra/set-{set} --direct --json"), LIMIT)?;
            let sectors = serde_json::from_str::<Value>(&said)?["sectors"].as_u64().unwrap_or_default();
            if sectors * 512 != SET_BYTES {
                return Err(format!("set {set} of the added disk has {sectors} sectors").into());
            }
            self.verified_bytes += SET_BYTES;
        }
        Ok(())
    }
}
