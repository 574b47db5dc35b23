//! What outlives this process. The images are judged at the start, and from then on the state file says when a write
//! may be in flight.

use super::disk::Disk;
use super::host::Host;
use super::image_state::{ImageState, Sight};
use super::tiers::TierSizes;
use crate::link::ServerLink;
use crate::state::{Clock, Former, Header, OptionHashes, Settings, StateFile, judge};
use remoca_core::engine::{DiskEngine, EngineConfig, GuestOp};
use remoca_core::units::DiskIndex;
use remoca_io::words::IndexMemory;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the driver knows of the state file and of the images.
pub(super) struct Warmth {
    state: Option<StateFile>,
    /// The state file that there was, if there is none.
    lost: Option<Lost>,
    /// Why nothing of a previous process was found; `None` if something was.
    cold_reason: Option<String>,
    images: Vec<ImageState>,
    /// Hashes of the options that this process was started with.
    options: OptionHashes,
}

/// A state file that is lost, so that a successor would be cold.
struct Lost {
    path: PathBuf,
    why: String,
}

type Engine = DiskEngine<IndexMemory>;

impl Warmth {
    /// Returns the state of `disks` images of which nothing is known yet. `cold_reason`: why nothing of a previous
    /// process was found.
    pub(super) fn new(
        state: Option<StateFile>,
        cold_reason: Option<String>,
        options: OptionHashes,
        disks: usize,
    ) -> Self {
        let images = (0..disks).map(|_| ImageState::default()).collect();
        Self { state, lost: None, cold_reason, images, options }
    }

    /// Returns whether there is a state file, in which a successor will find what this process knows.
    pub(super) fn is_kept(&self) -> bool {
        self.state.is_some()
    }

    /// Returns the path of the state file, or `None` if there is none.
    pub(super) fn path(&self) -> Option<&Path> {
        self.state.as_ref().map(StateFile::path)
    }

    /// Returns the path at which there is to be a state file: where it is, or was before it was lost.
    pub(super) fn place(&self) -> Option<&Path> {
        self.path().or(self.lost.as_ref().map(|lost| lost.path.as_path()))
    }

    /// Returns why there is no state file any more. Returns `None` if there is one, or there never was one.
    pub(super) fn loss(&self) -> Option<&str> {
        self.lost.as_ref().map(|lost| lost.why.as_str())
    }

    /// Returns the state file to hand to a successor, or `None` if there is none.
    pub(super) fn file(&self) -> Option<&File> {
        self.state.as_ref().map(StateFile::file)
    }

    /// Returns whether a write to any image is in flight.
    pub(super) fn is_written_to(&self) -> bool {
        self.images.iter().any(ImageState::is_written_to)
    }

    /// Returns whether the last write of some image is over, but its change time is not recorded yet. Returns false if
    /// there is no state file.
    pub(super) fn is_settling(&self) -> bool {
        self.state.is_some() && self.images.iter().any(ImageState::is_settling)
    }

    /// Removes the state file: this process has no successor.
    pub(super) fn abandon(&mut self) {
        self.lost = None;
        if let Some(state) = self.state.take() {
            state.remove();
        }
    }

    /// Returns the hashes of the options that `remoca set` can overrule.
    pub(super) fn options(&self) -> OptionHashes {
        self.options
    }

    /// Returns why nothing is known from before, or `None` if something is.
    pub(super) fn cold_reason(&self) -> Option<&String> {
        self.cold_reason.as_ref()
    }

    /// Sets the reason why nothing is known of disks that came from another process, or clears it if the index came
    /// with them (`is_warm`).
    pub(super) fn note_arrival(&mut self, is_warm: bool) {
        self.cold_reason = (!is_warm).then(|| "the disks came without a cache".into());
    }

    /// Returns why nothing is known of a disk from before. Returns `None` if something is, or if nothing is known of
    /// any disk.
    pub(super) fn disk_reason(&self, disk: usize) -> Option<String> {
        self.images[disk].cold_reason.clone()
    }

    /// Adds `op` to the modifications of `disk` in flight, if it is one. Called when `op` is submitted to the store.
    pub(super) fn begin(&mut self, disk: usize, op: &GuestOp) {
        if is_modification(op) {
            self.images[disk].begin_write();
        }
    }

    /// Removes `op` from the modifications of `disk` in flight, if it is one. Called when the store has completed `op`.
    pub(super) fn end(&mut self, disk: usize, op: &GuestOp) {
        if is_modification(op) {
            self.images[disk].end_write();
        }
    }

    /// Records the size of an image after it was measured, so that a successor finds the same image. `had`: the size before it
    /// became smaller.
    pub(super) fn note_size(&mut self, disk: usize, of: &Disk, had: Option<u64>, host: &Host) {
        let Some(state) = &self.state else { return };
        let header = state.header();
        // Before the size: a successor that finds the former size knows by it that the image was larger.
        if header.had_bytes(of.number) != had {
            header.set_had_bytes(of.number, had);
        }
        if header.disk(of.number).identity != of.stamp().identity {
            record(&mut self.images[disk], &header, of, had, host.clock().of_files());
        }
    }

    /// Ends a look, and records in the state file when the image was last changed.
    pub(super) fn end_look(&mut self, disk: usize, of: &Disk, changed_ns: Option<u64>) {
        let Some(state) = &self.state else { return };
        match self.images[disk].end_look(changed_ns) {
            Some(Sight::Settled(seen_ns)) => state.header().set_settled(of.number, seen_ns),
            Some(Sight::Seen(seen_ns)) => state.header().set_seen(of.number, seen_ns),
            None => {}
        }
    }

    /// Restores the flush failures that the previous process recorded, for each disk that has the same image. The same
    /// guest may still be running, so its flushes must keep failing.
    pub(super) fn inherit_failed_flushes(
        &mut self,
        former: &Former,
        disks: &mut [Disk],
        engine: &mut Engine,
        vm: &str,
    ) {
        for (disk, known) in disks.iter_mut().zip(&mut self.images) {
            let image = disk.stamp().identity;
            let failed = former.failed_flushes.iter().find(|failed| failed.image == image[..3]);
            // An upgrade hands a failure over with the store.
            let errno = failed.map(|failed| failed.errno).or(disk.store.failed_flush());
            engine.set_failed_flush(disk.number, errno);
            known.failed_flush = errno;
            if let Some(state) = &self.state {
                state.header().set_flush_failed(disk.number, errno);
            }
            if let Some(errno) = errno {
                disk.store.set_failed_flush(Some(errno));
                tracing::error!(
                    "{}: a flush or durable write of this image has failed before ({}): writes may be lost, and all flushes \
                     fail. Stop the guest, mend the image, and say `remoca set {} --clear-failed-flush {}`.",
                    disk.image,
                    std::io::Error::from_raw_os_error(errno),
                    vm,
                    disk.name
                );
            }
        }
    }

    /// Records the settings made by `remoca set`, for a successor.
    pub(super) fn keep_settings(&self, sizes: TierSizes, enabled: bool, link: Option<&ServerLink>) {
        let (Some(state), Some(link)) = (&self.state, link) else { return };
        let endpoints = link.endpoints();
        let local = endpoints.local.map(|_| sizes.local);
        let (options, cache, servers) = (self.options, sizes.cache, endpoints.listed.len());
        state.header().set_settings(&Settings { options, cache, local, enabled, servers });
    }

    /// Records a failed flush that is not recorded yet, whatever revealed it, so that this process and its successors
    /// know of it before the guest does.
    pub(super) fn note_failure(&mut self, disk: usize, of: &Disk, engine: &mut Engine) {
        let recorded = self.images[disk].failed_flush;
        let Some(errno) = failed_flush(of, engine).filter(|_| recorded.is_none()) else { return };
        let name = &of.name;
        tracing::error!(
            "{name}: acknowledged writes may be lost ({}). Every flush fails from now on. When the image is sound: remoca set VM \
             --clear-failed-flush {name}",
            std::io::Error::from_raw_os_error(errno)
        );
        self.keep_failed_flush(disk, of.number, Some(errno), engine);
    }

    fn keep_failed_flush(&mut self, disk: usize, number: DiskIndex, errno: Option<i32>, engine: &mut Engine) {
        engine.set_failed_flush(number, errno);
        self.images[disk].failed_flush = errno;
        if let Some(state) = &self.state {
            state.header().set_flush_failed(number, errno);
        }
    }

    /// Clears the failed flush of the disk `name`, because the operator says that its image is sound.
    pub(super) fn clear_failed_flush(
        &mut self,
        name: &str,
        disks: &mut [Disk],
        engine: &mut Engine,
    ) -> Result<(), String> {
        let Some(at) = disks.iter().position(|disk| disk.name == name) else {
            let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
            return Err(format!("it has no disk {name}, but {}", names.join(", ")));
        };
        let disk = &mut disks[at];
        disk.store.set_failed_flush(None);
        tracing::warn!("{name}: the operator says that its image is sound: flushes succeed again");
        self.keep_failed_flush(at, disk.number, None, engine);
        if let Some(state) = &self.state {
            state.clear_failed_flushes(engine, disk.identity().image);
        }
        Ok(())
    }

    /// Discards what a previous process knew of images that may have changed since, and starts a record of every image.
    pub(super) fn judge_images(&mut self, disks: &[Disk], engine: &mut Engine, host: &Host) {
        let Some(state) = &self.state else { return };
        let (header, clock) = (state.header(), host.clock().of_files());
        let mut warm = false;
        for (disk, image) in disks.iter().zip(&mut self.images) {
            let found = disk.stamp();
            let kept = header.disk(disk.number);
            // The engine has seen to a size that is another one.
            let verdict = match disk.kept_open && kept.identity[..3] == found.identity[..3] {
                true => Ok(()),
                false => judge(&kept, &found, clock, || disk.store.may_be_in_page_cache()),
            };
            match verdict {
                Ok(()) => warm = true,
                Err(doubt) => {
                    engine.handle_content_uncertain(disk.number);
                    image.cold_reason = Some(doubt.to_string());
                }
            }
            record(image, &header, disk, disk.shrunk_from(), clock);
        }
        if self.cold_reason.is_none() && !warm {
            self.cold_reason = self.images.iter().find_map(|image| image.cold_reason.clone());
        }
        self.tell(disks, engine);
    }

    /// Makes `state` the state file. Its words hold the index of `engine`.
    pub(super) fn keep_in(
        &mut self,
        state: StateFile,
        disks: &[Disk],
        engine: &Engine,
        link: Option<&mut ServerLink>,
        host: &Host,
    ) {
        let (header, clock) = (state.header(), host.clock().of_files());
        for (disk, image) in disks.iter().zip(&mut self.images) {
            record(image, &header, disk, disk.shrunk_from(), clock);
            header.set_flush_failed(disk.number, engine.index().flush_failed(disk.number));
        }
        if let Some(link) = link {
            link.keep_in(header);
        }
        (self.state, self.lost) = (Some(state), None);
    }

    /// Records the failed flushes that a `former` process left of images that are none of the disks.
    pub(super) fn keep_removed_failures(&self, former: &Former, disks: &[Disk], engine: &mut Engine) {
        let Some(state) = &self.state else { return };
        let here: Vec<_> = disks.iter().map(|disk| (disk.number, disk.identity().image)).collect();
        state.keep_failed_flushes(engine, &former.failed_flushes, &here);
    }

    /// Clears the failed flushes of images that are none of the disks, because the operator says that they are sound, or gone.
    pub(super) fn clear_removed_failures(&self, disks: &[Disk], engine: &mut Engine) {
        let here: Vec<_> = disks.iter().map(|disk| disk.number).collect();
        match &self.state {
            Some(state) => state.clear_removed_failures(engine, &here),
            None => {
                let removed: Vec<_> = engine.index().disks().filter(|disk| !here.contains(disk)).collect();
                removed.into_iter().for_each(|disk| engine.set_failed_flush(disk, None));
            }
        }
        tracing::warn!("the operator says that all images which are no disks any more are sound, or gone");
    }

    /// Puts the new state file in place, now that it holds all that a successor needs. If that fails, there is no state
    /// file.
    pub(super) fn put_in_place(&mut self, config: &EngineConfig) {
        let put = self.state.as_mut().map(|state| state.put_in_place(config));
        if let Some(Err(error)) = put {
            self.lose(format!("there is no state file: {error}. A restart will find the cache cold"));
        }
    }

    /// Goes on without the state file, and keeps in mind where it was.
    fn lose(&mut self, why: String) {
        tracing::warn!("{why}");
        if let Some(path) = self.place().map(Path::to_owned) {
            (self.state, self.lost) = (None, Some(Lost { path, why }));
        }
    }

    fn tell(&mut self, disks: &[Disk], engine: &Engine) {
        if let Some(reason) = &self.cold_reason {
            tracing::info!("the cache starts cold: {reason}");
            // Said once, for all of them.
            self.images.iter_mut().for_each(|image| image.cold_reason = None);
            return;
        }
        tracing::info!("the cache starts warm: {}", contents(engine));
        for (disk, image) in disks.iter().zip(&self.images) {
            if let Some(reason) = &image.cold_reason {
                tracing::info!("{} starts cold: {reason}", disk.name);
            }
        }
    }

    /// Marks images with modifications in flight as written now, in the state file. Looks at them if that is due.
    pub(super) fn stamp_writes(&mut self, disks: &mut [Disk], engine: &Engine, host: &Host) {
        let Some(state) = &self.state else { return };
        // Otherwise the file would not reflect what is written from now on.
        assert!(engine.index().words().outlives_process(), "the state file is kept, and the index is not in it");
        let mut clock = None;
        for (image, disk) in self.images.iter_mut().zip(disks) {
            if image.is_written_to() {
                let clock = *clock.get_or_insert_with(|| host.clock().of_files());
                image.note_writes(clock.real_ns);
                state.note_writes(disk.number, clock);
                look(image, disk, &state.header(), clock.real_ns, host.clock());
            }
        }
    }

    /// Looks at each image whose last write is long enough ago.
    pub(super) fn settle_images(&mut self, disks: &mut [Disk], host: &Host) {
        let Some(state) = &self.state else { return };
        if self.images.iter().all(|image| image.wait_ns().is_none()) {
            return;
        }
        let now_ns = host.clock().of_files().real_ns;
        for (image, disk) in self.images.iter_mut().zip(disks) {
            if image.wait_ns().is_some() {
                look(image, disk, &state.header(), now_ns, host.clock());
                disk.store.kick(host.instant());
            }
        }
    }

    /// Returns the time until [`Self::settle_images`] has something to do, or `None` if nothing is expected.
    pub(super) fn settle_timeout(&self) -> Option<Duration> {
        let waits = self.images.iter().filter_map(ImageState::wait_ns);
        self.state.as_ref().and(waits.min()).map(Duration::from_nanos)
    }

    /// Follows the index to its new memory: the words of `new`, or private memory, of which nothing outlives this process. An error
    /// is why there is no file for it.
    pub(super) fn follow_index(&mut self, new: Result<Option<StateFile>, String>, link: Option<&mut ServerLink>) {
        let replaced = match new {
            Ok(new) => {
                let (Some(new), Some(state)) = (new, &mut self.state) else { return self.abandon() };
                // If it fails, it has removed the former file.
                let replaced = state.replace_with(new).map(|()| state.header());
                replaced.map_err(|error| {
                    format!("the state file cannot be replaced: {error}. A restart will find the cache cold")
                })
            }
            Err(why) => {
                // The old file would not reflect what is written from now on.
                self.state.iter().for_each(StateFile::remove);
                Err(why)
            }
        };
        match (replaced, link) {
            (Ok(header), Some(link)) => link.keep_in(header),
            (Ok(_), None) => {}
            (Err(why), link) => {
                link.into_iter().for_each(ServerLink::keep_nowhere);
                self.lose(why);
            }
        }
    }
}

/// Starts a record of the image as it was found, as if a write were in flight: nothing is certain before the image is
/// settled. `had`: the size before the image became smaller.
fn record(image: &mut ImageState, header: &Header, disk: &Disk, had: Option<u64>, clock: Clock) {
    image.begin_record(clock.real_ns);
    header.set_disk_name(disk.number, disk.identity().name);
    header.set_had_bytes(disk.number, had);
    header.set_disk(disk.number, &disk.stamp(), clock);
}

fn is_modification(op: &GuestOp) -> bool {
    match op {
        GuestOp::Write { .. } | GuestOp::Discard(_) | GuestOp::WriteZeroes { .. } => true,
        GuestOp::Read(_) | GuestOp::Flush => false,
    }
}

/// Starts a look at an image if one is due, or settles an image that shows no changes. The answer arrives as an event
/// of the store. Voids what a look without an answer has left in doubt, and drops the image from the page cache.
fn look(image: &mut ImageState, disk: &mut Disk, header: &Header, now_ns: u64, clock: &dyn crate::clock::Clock) {
    if image.begin_doubt(now_ns) {
        header.set_seen(disk.number, 0);
    }
    if !image.look_is_due(now_ns) {
        return;
    }
    let (coarse_ns, settles) = (clock.of_file_stamps(), image.is_settling());
    if disk.store.look() {
        image.begin_look(now_ns, coarse_ns);
    } else if settles {
        image.settle_blind();
        header.set_settled(disk.number, 0);
    }
    if image.begin_drop(now_ns) {
        disk.store.empty_page_cache();
    }
}

/// Returns the error number with which all flushes of a disk fail, or `None` if no flush has failed.
pub(super) fn failed_flush(disk: &Disk, engine: &Engine) -> Option<i32> {
    disk.store.failed_flush().or(engine.index().flush_failed(disk.number))
}

/// Returns what a cache begins with, in words.
pub(super) fn contents(engine: &Engine) -> String {
    let status = engine.status();
    let how = if engine.index().was_closed() { "all in order" } else { "each looked at" };
    format!("{} blocks known, {} pages cached, {how}", status.known_blocks.0, status.slots.used)
}
