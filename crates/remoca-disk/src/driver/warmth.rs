//! What outlives this process: the images are judged at the start, and from then on the state file says when a write may
//! be under way.

use super::{Disk, Driver};
use crate::state::{Clock, Former, Header, LOOK_NS, SETTLE_NS, Settings, StateFile, judge, settled_ns};
use crate::store::{ImageStamp, Store};
use remoca_core::engine::GuestOp;
use remoca_core::units::DiskIndex;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Duration;

/// The page cache is emptied of an image so often, at most.
const DROP_NS: u64 = 1_000_000_000;

/// What the driver knows of the state file and of the images.
pub(super) struct Warmth {
    state: Option<StateFile>,
    /// Why nothing was found of a former process.
    pub(super) cold_reason: Option<String>,
    images: Vec<ImageState>,
}

#[derive(Default)]
struct ImageState {
    /// Modifications that the store has not completed.
    in_flight: u32,
    /// When there was one last, in real time; 0: that is settled.
    written_ns: u64,
    /// When its change time was looked at last, with writes under way.
    looked_ns: u64,
    /// When the page cache was emptied of it last.
    dropped_ns: u64,
    cold_reason: Option<String>,
}

impl Warmth {
    pub(super) fn new(state: Option<StateFile>, cold_reason: Option<String>, disks: usize) -> Self {
        let images = (0..disks).map(|_| ImageState::default()).collect();
        Self { state, cold_reason, images }
    }

    /// Whether a successor will find what this process knows.
    pub(super) fn is_kept(&self) -> bool {
        self.state.is_some()
    }

    /// Where the state file is.
    pub(super) fn path(&self) -> Option<&Path> {
        self.state.as_ref().map(StateFile::path)
    }

    /// The state file, to be handed to a successor.
    pub(super) fn file(&self) -> Option<&File> {
        self.state.as_ref().map(StateFile::file)
    }

    /// Whether writes are under way.
    pub(super) fn is_written_to(&self) -> bool {
        self.images.iter().any(|image| image.in_flight > 0)
    }

    /// Nobody will come back.
    pub(super) fn abandon(&mut self) {
        if let Some(state) = self.state.take() {
            state.remove();
        }
    }

    pub(super) fn disk_reason(&self, disk: DiskIndex) -> Option<String> {
        self.images[usize::from(disk.0)].cold_reason.clone()
    }

    /// An operation goes to the store.
    pub(super) fn begin(&mut self, disk: usize, op: &GuestOp) {
        self.images[disk].in_flight += u32::from(is_modification(op));
    }

    /// An operation came back from the store.
    pub(super) fn end(&mut self, disk: usize, op: &GuestOp) {
        let in_flight = &mut self.images[disk].in_flight;
        *in_flight = in_flight.saturating_sub(u32::from(is_modification(op)));
    }
}

impl ImageState {
    /// Opening may have changed its times. Not before it is settled is anything sure.
    fn record(&mut self, header: &Header, disk: DiskIndex, found: &ImageStamp, clock: Clock) {
        self.written_ns = clock.real_ns;
        header.set_disk(disk, found, clock);
    }

    /// So that what is in the page cache after a kill was brought there by others, after that.
    fn empty_page_cache(&mut self, store: &dyn Store, now_ns: u64) {
        if now_ns.abs_diff(self.dropped_ns) > DROP_NS {
            self.dropped_ns = now_ns;
            store.empty_page_cache();
        }
    }
}

fn is_modification(op: &GuestOp) -> bool {
    match op {
        GuestOp::Write { .. } | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => true,
        GuestOp::Read(_) | GuestOp::Flush => false,
    }
}

impl Driver {
    /// A flush that failed for a former process has failed for this one, if the image is the same: its guest may be, too.
    pub(super) fn inherit_failed_flushes(&mut self, former: &Former) {
        for (disk, index) in self.disks.iter_mut().zip(0..) {
            let index = DiskIndex(index);
            let image = found(disk).identity;
            let failed = former.failed_flushes.iter().find(|failed| failed.image == image[..3]);
            // An upgrade hands it over with the store.
            let errno = failed.map(|failed| failed.errno).or(disk.store.failed_flush());
            self.engine.set_failed_flush(index, errno);
            if let Some(state) = &self.warmth.state {
                state.header().set_flush_failed(index, errno);
            }
            if let Some(errno) = errno {
                disk.store.set_failed_flush(Some(errno));
                tracing::error!(
                    "{}: a flush or durable write of this image has failed before ({}): writes may be lost, and all flushes \
                     fail. When the image is sound again: stop guest and process, remove the state file, start both.",
                    disk.image,
                    std::io::Error::from_raw_os_error(errno)
                );
            }
        }
    }

    /// A successor with the same options goes on with what `remoca set` has set.
    pub(super) fn keep_settings(&self) {
        let (Some(state), Some(link)) = (&self.warmth.state, &self.link) else { return };
        state.header().set_settings(&Settings {
            options: self.options,
            cache: self.cache,
            enabled: self.engine.status().enabled,
            servers: link.servers().len(),
        });
    }

    /// An operation failed. If it was one that makes data durable, this process and those after it remember, before the
    /// guest hears of it.
    pub(super) fn note_failure(&mut self, disk: usize) {
        let index = DiskIndex(u16::try_from(disk).unwrap_or(u16::MAX));
        let errno = self.disks[disk].store.failed_flush().or(self.engine.index().flush_failed(index));
        if errno.is_some() {
            self.engine.set_failed_flush(index, errno);
            if let Some(state) = &self.warmth.state {
                state.header().set_flush_failed(index, errno);
            }
        }
    }

    /// Forgets what a former process knew of images that may have changed since, and keeps a record of all of them.
    pub(super) fn judge_images(&mut self) {
        let Some(state) = &self.warmth.state else { return };
        let (header, clock) = (state.header(), self.clock.of_files());
        let mut warm = false;
        for ((disk, image), index) in self.disks.iter().zip(&mut self.warmth.images).zip(0..) {
            let index = DiskIndex(index);
            let found = found(disk);
            let kept = header.disk(index);
            let verdict = match disk.kept_open && kept.identity == found.identity {
                true => Ok(()),
                false => judge(&kept, &found, clock, || disk.store.may_be_in_page_cache()),
            };
            match verdict {
                Ok(()) => warm = true,
                Err(doubt) => {
                    self.engine.handle_content_uncertain(index);
                    image.cold_reason = Some(doubt.to_string());
                }
            }
            image.record(&header, index, &found, clock);
        }
        if self.warmth.cold_reason.is_none() && !warm {
            self.warmth.cold_reason = self.warmth.images.iter().find_map(|image| image.cold_reason.clone());
        }
        self.tell_warmth();
    }

    /// The engine is a new one, whose index is in the words of `state`: that becomes the state file.
    pub(super) fn keep_in(&mut self, state: StateFile) {
        let (header, clock) = (state.header(), self.clock.of_files());
        for ((disk, image), index) in self.disks.iter().zip(&mut self.warmth.images).zip(0..) {
            let index = DiskIndex(index);
            image.record(&header, index, &found(disk), clock);
            header.set_flush_failed(index, self.engine.index().flush_failed(index));
        }
        if let Some(link) = &mut self.link {
            link.keep_in(header);
        }
        self.warmth.state = Some(state);
        self.keep_settings();
        let put = self.warmth.state.as_mut().map(|state| state.put_in_place(self.migration.config()));
        if let Some(Err(error)) = put {
            tracing::warn!("there is no state file: {error}. A restart will find the cache cold.");
            self.warmth.state = None;
        }
    }

    fn tell_warmth(&mut self) {
        if let Some(reason) = &self.warmth.cold_reason {
            tracing::info!("the cache starts cold: {reason}");
            // Said once, for all of them.
            self.warmth.images.iter_mut().for_each(|image| image.cold_reason = None);
            return;
        }
        let status = self.engine.status();
        tracing::info!(
            "the cache starts warm: {} blocks known, {} pages cached, {}",
            status.known_blocks.0,
            status.slots.used,
            if self.engine.index().was_closed() { "all in order" } else { "each looked at" }
        );
        for (disk, image) in self.disks.iter().zip(&self.warmth.images) {
            if let Some(reason) = &image.cold_reason {
                tracing::info!("{} starts cold: {reason}", disk.name);
            }
        }
    }

    /// Writes are about to be handed to the kernel, or are there.
    pub(super) fn stamp_writes(&mut self) {
        if !self.engine.index().words().outlives_process() {
            // The engine is another one than that of the file, which is not told what is written from now on.
            return self.warmth.abandon();
        }
        let Some(state) = &self.warmth.state else { return };
        let mut clock = None;
        for ((image, disk), index) in self.warmth.images.iter_mut().zip(&self.disks).zip(0..) {
            if image.in_flight > 0 {
                let clock = *clock.get_or_insert_with(|| self.clock.of_files());
                image.written_ns = clock.real_ns;
                state.note_writes(DiskIndex(index), clock);
                if clock.real_ns.abs_diff(image.looked_ns) > LOOK_NS {
                    image.looked_ns = clock.real_ns;
                    let changed_ns = disk.store.stamp().and_then(|stamp| stamp.changed_ns);
                    state.header().set_seen(DiskIndex(index), changed_ns.unwrap_or(0));
                    image.empty_page_cache(&*disk.store, clock.real_ns);
                }
            }
        }
    }

    /// Looks at images when the last write is long enough ago.
    pub(super) fn settle_images(&mut self) {
        let Some(state) = &self.warmth.state else { return };
        if self.warmth.images.iter().all(|image| image.in_flight > 0 || image.written_ns == 0) {
            return;
        }
        let now_ns = self.clock.of_files().real_ns;
        for ((image, disk), index) in self.warmth.images.iter_mut().zip(&self.disks).zip(0..) {
            let is_due = now_ns.abs_diff(image.written_ns) > SETTLE_NS;
            if image.in_flight == 0 && image.written_ns != 0 && is_due {
                let changed_ns = disk.store.stamp().and_then(|stamp| stamp.changed_ns);
                let Ok(settled_ns) = settled_ns(changed_ns, self.clock.of_file_stamps()) else { continue };
                image.written_ns = 0;
                state.header().set_settled(DiskIndex(index), settled_ns.unwrap_or(0));
                image.empty_page_cache(&*disk.store, now_ns);
            }
        }
    }

    /// When [`Self::settle_images`] has something to do.
    pub(super) fn settle_timeout(&self) -> Option<Duration> {
        let waits = |image: &ImageState| image.in_flight == 0 && image.written_ns != 0;
        let any = self.warmth.state.is_some() && self.warmth.images.iter().any(waits);
        any.then_some(Duration::from_nanos(SETTLE_NS + 1_000_000))
    }

    /// The process ends in good order: what has no write under way is settled, which takes a moment.
    pub(super) fn settle_at_end(&mut self) {
        if let Some(pause) = self.settle_timeout() {
            self.clock.pause(pause);
            self.settle_images();
        }
    }

    /// The index is in other words now: those of `new`, or of a process that leaves nothing.
    pub(super) fn follow_index(&mut self, new: Option<StateFile>) {
        let (Some(new), Some(state)) = (new, &mut self.warmth.state) else {
            // From now on it is not told what is written.
            return self.warmth.abandon();
        };
        if let Err(error) = state.replace_with(new) {
            tracing::warn!("the state file cannot be replaced: {error}. A restart will find the cache cold.");
        }
        if let Some(link) = &mut self.link {
            link.keep_in(state.header());
        }
    }
}

/// The image as it was found.
fn found(disk: &Disk) -> ImageStamp {
    disk.store.stamp_at_opening().unwrap_or_else(|| named(&disk.image))
}

/// What tells an image without a file from others: its name.
fn named(image: &str) -> ImageStamp {
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    ImageStamp { identity: [3, hasher.finish(), 0, 0], changed_ns: None }
}
