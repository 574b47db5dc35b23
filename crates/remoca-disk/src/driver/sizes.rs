//! Sizes of images that change while guests use them. The stores measure them without keeping the I/O thread; an answer is
//! an event. The engine learns a new size before the guest does.

use super::disk::Disk;
use super::guests::Guests;
use super::host::Host;
use super::warmth::Warmth;
use remoca_core::engine::DiskEngine;
use remoca_core::index::DISK_BYTES_MAX;
use remoca_io::control::ControlRequest;
use remoca_io::narrow;
use remoca_io::words::IndexMemory;
use remoca_store::StoreError;
use std::time::{Duration, Instant};

/// Time between two looks at the sizes.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Time that a client waits for an image that does not answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// The sizes of all disks, and the clients that wait until they have been measured.
pub(super) struct Sizes {
    disks: Vec<Size>,
    /// When the images are measured again; `None` if none of them can be.
    look_at: Option<Instant>,
    clients: Vec<Client>,
}

/// The size of one disk.
struct Size {
    /// As the engine and the guest know it.
    bytes: u64,
    /// The size before the image became smaller, until it is that large again.
    shrunk_from: Option<u64>,
    /// Numbers of measurements that were begun, and that have ended.
    begun: u64,
    ended: u64,
    /// Why the last measurement failed.
    error: Option<StoreError>,
}

/// A client that waits until each disk has been measured.
struct Client {
    request: ControlRequest,
    /// For each disk the number of the first measurement that was begun after the request.
    wanted: Vec<u64>,
    give_up_at: Instant,
}

impl Sizes {
    /// Returns the sizes of `disks` as they were opened.
    pub(super) fn new(disks: &[Disk], now: Instant) -> Self {
        let size = |disk: &Disk| Size {
            bytes: disk.store.geometry().size.min(DISK_BYTES_MAX),
            shrunk_from: disk.shrunk_from(),
            begun: 0,
            ended: 0,
            error: None,
        };
        Self { disks: disks.iter().map(size).collect(), look_at: Some(now), clients: Vec::new() }
    }

    /// Returns the size that a disk had before it became smaller, or `None` if it is as large as ever.
    pub(super) fn shrunk_from(&self, disk: usize) -> Option<u64> {
        self.disks[disk].shrunk_from
    }

    /// Returns when [`Self::run_timers`] or [`Self::take_clients`] has something to do, or `None` if nothing is expected.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.clients.iter().map(|client| client.give_up_at).chain(self.look_at).min()
    }

    /// Starts to measure each image that is not being measured. Returns whether any can be.
    fn look(&mut self, disks: &mut [Disk]) -> bool {
        let mut any = false;
        for (size, disk) in self.disks.iter_mut().zip(disks) {
            if disk.store.measure() {
                any = true;
                size.begun = size.ended + 1;
            }
        }
        any
    }

    /// Returns a disk for which the client still waits.
    fn missing(&self, client: &Client) -> Option<usize> {
        self.disks.iter().zip(&client.wanted).position(|(size, wanted)| size.ended < *wanted)
    }

    /// Measures all images for a client, which waits until [`Self::take_clients`] returns it.
    pub(super) fn measure_for(&mut self, request: ControlRequest, disks: &mut [Disk], now: Instant) {
        let is_measured = |(size, disk): (&Size, &mut Disk)| match disk.store.measure() {
            true => size.begun + 1,
            false => 0,
        };
        let wanted = self.disks.iter().zip(&mut *disks).map(is_measured).collect();
        self.clients.push(Client { request, wanted, give_up_at: now + ANSWER_TIME_MAX });
        self.look(disks);
    }

    /// Measures the images if that is due and the process `is_idle`: it does not stop, and nobody else is about to have
    /// the disks.
    pub(super) fn run_timers(&mut self, is_idle: bool, disks: &mut [Disk], now: Instant) {
        if self.look_at.is_some_and(|at| at <= now) {
            let can_look = !is_idle || self.look(disks);
            self.look_at = can_look.then(|| now + LOOK_EVERY);
        }
    }

    /// Returns the clients whose wait is over, each with the reason why its request failed, if it did.
    pub(super) fn take_clients(&mut self, disks: &[Disk], now: Instant) -> Vec<(ControlRequest, Result<(), String>)> {
        let mut done = Vec::new();
        for client in std::mem::take(&mut self.clients) {
            match self.missing(&client) {
                None => done.push((client.request, self.failure(&client.wanted, disks).map_or(Ok(()), Err))),
                Some(disk) if client.give_up_at <= now => {
                    let (image, seconds) = (&disks[disk].image, ANSWER_TIME_MAX.as_secs());
                    done.push((client.request, Err(format!("{image} has not told its size for {seconds} seconds"))));
                }
                Some(_) => self.clients.push(client),
            }
        }
        done
    }

    /// Returns why one of the `wanted` sizes is not known, or `None` if all are.
    fn failure(&self, wanted: &[u64], disks: &[Disk]) -> Option<String> {
        let measured = self.disks.iter().zip(disks).zip(wanted).filter(|(_, wanted)| **wanted > 0);
        measured
            .filter_map(|((size, disk), _)| size.error.map(|error| (&disk.image, error)))
            .map(|(image, error)| format!("the size of {image} is not known: {error}"))
            .next()
    }

    /// Follows the size of an image after it was measured.
    pub(super) fn follow(
        &mut self,
        disk: usize,
        result: Result<(), StoreError>,
        guests: &mut Guests,
        (warmth, engine): (&mut Warmth, &mut DiskEngine<IndexMemory>),
        host: &Host,
    ) {
        let size = &mut self.disks[disk];
        size.ended = size.begun;
        size.error = result.err();
        let of = guests.disk_mut(disk);
        let (old, new) = (size.bytes, of.store.geometry().size.min(DISK_BYTES_MAX));
        let had = size.shrunk_from.map_or(old, |before| before.max(old));
        let had = (new < had).then_some(had);
        warmth.note_size(disk, of, had, host);
        if old != new {
            narrow::passes("size-recorded");
            size.bytes = new;
            engine.resize_disk(of.number, new);
            narrow::passes("size-followed");
            of.frontend.resize(new);
            size.shrunk_from = had;
            of.had_bytes = had;
            tell(of, old, new);
            guests.resize_export(disk, new);
        }
        if self.clients.iter().any(|client| client.wanted[disk] > self.disks[disk].ended) {
            self.look(guests.disks_mut());
        }
    }
}

/// Logs the new size of a disk.
fn tell(disk: &Disk, old: u64, new: u64) {
    let Disk { name, image, frontend, .. } = disk;
    if new < old {
        tracing::error!(
            "{name}: {image} has become smaller, from {old} to {new} bytes. Reads and writes beyond its end fail. Make it as large \
             as before, or detach the disk"
        );
        return;
    }
    let seen = if frontend.sees_size() { "its guest sees it" } else { "its guest sees it when it connects again" };
    tracing::info!("{name}: {image} has grown from {old} to {new} bytes; {seen}");
}
