//! What the front end of a device knows of the disk's size, and how it is told of changes.

use super::back_channel;
use std::os::fd::OwnedFd;

/// The front end that listens.
pub(super) struct Audience {
    /// Where it is told of changes; `None` if it did not pass a channel.
    channel: Option<OwnedFd>,
    /// The size that it knows, in bytes.
    told_bytes: u64,
    /// Whether it is told again when its first queue starts. QEMU ignores what it is told before that, and does not read
    /// the size when it connects again.
    tells_again: bool,
}

impl Audience {
    /// Returns a front end that reads the size, which is `bytes` now.
    pub fn new(bytes: u64) -> Self {
        Self { channel: None, told_bytes: bytes, tells_again: false }
    }

    /// Returns the size in bytes that it knows, or 0 if that is not certain.
    pub fn known_bytes(&self) -> u64 {
        if self.tells_again { 0 } else { self.told_bytes }
    }

    /// Returns whether it was told that the size is `bytes`, or will be when its driver starts.
    pub fn sees(&self, bytes: u64) -> bool {
        self.told_bytes == bytes || self.tells_again && self.channel.is_some()
    }

    /// Sets where it is told of changes of the size, which is `bytes` now. If a former program has told it a size, that is
    /// `told_bytes`. `has_started`: its driver uses the device.
    pub fn listens_at(&mut self, channel: Option<OwnedFd>, told_bytes: Option<u64>, (bytes, has_started): (u64, bool)) {
        let tells_again = told_bytes.map_or(channel.is_some() && !has_started, |told| told != bytes);
        *self = Self { channel, told_bytes: told_bytes.unwrap_or(self.told_bytes), tells_again };
    }

    /// Tells it that the size is `bytes` from now on. `has_started`: its driver uses the device.
    pub fn tell(&mut self, bytes: u64, has_started: bool) {
        self.tells_again = !has_started;
        if self.channel.as_ref().is_some_and(back_channel::tell) {
            self.told_bytes = bytes;
        }
    }

    /// Tells it the size, `bytes`, if it may have missed a change of it. Called when a queue has started.
    pub fn tell_again(&mut self, bytes: u64) {
        if self.tells_again {
            self.tell(bytes, true);
        }
    }
}
