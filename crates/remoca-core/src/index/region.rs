//! The region of an index: creating one, and resuming from what the previous process left.
//!
//! A region that the previous process closed ([`CacheIndex::close`]) is used as it is if the checksum of its header
//! matches. Otherwise that process may have been killed between any two stores. In that case only the entries of the
//! tables are trusted, and hash tables, queue, free lists and counts are rebuilt. So they are if the disks get other numbers
//! in a migration. The index may then hold nonsense, but it is consistent. Pages from the server are still compared with
//! their fingerprints. The mapping from blocks to fingerprints is only as trustworthy as the origin of the words.

use super::layout::{HEADER_WORDS, LAYOUT_VERSION, MAGIC, header, settle};
use super::{CacheIndex, DiskWords, Entries, Layout, Nodes, SendLog, Slots, Words};
use crate::fingerprint::Fingerprint;
use crate::rules::Rules;
use crate::units::DiskIndex;

/// Origin of the words that an index is resumed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin<'a> {
    /// A process of this user, in a file that only this user may write to.
    Own,
    /// The process that the VM came from, which has the key of its migration. For each disk that both have: its number
    /// there, and here. What the words hold about other disks is dropped.
    Peer(&'a [(DiskIndex, DiskIndex)]),
}

/// Error of a resume. It returns the words to the caller.
#[derive(Debug)]
pub struct Unusable<M> {
    pub words: M,
    pub reason: &'static str,
}

impl<M: Words> CacheIndex<M> {
    /// Returns an empty index in `words`, which must hold at least [`Layout::words`]. `seed` is the seed of the hash
    /// tables; `zero` is the fingerprint of a page of zeroes, which never takes a slot. No slot is usable until
    /// [`Self::aim`] and [`Self::resize`] are called.
    ///
    /// # Panics
    /// If `words` is too short.
    pub fn new(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        let mut this = Self::over(words, layout, seed, zero);
        this.words[header::MAGIC] = 0;
        settle();
        this.words[1..layout.nodes_at()].fill(0);
        this.slots.clear_new(&mut this.words);
        this.entries.clear_lines(&mut this.words);
        this.nodes.clear(&mut this.words);
        this.words[header::BLOCKS_VALID] = 1;
        this.words[header::VERSION] = LAYOUT_VERSION;
        this.words[header::SLOTS] = layout.slot_limit().0;
        this.words[header::CHUNK_BITS] = layout.chunk_bits();
        this.words[header::ENTRIES] = layout.entry_limit().0;
        this.words[header::DISKS] = u32::from(layout.disks());
        this.words[header::ZERO..header::ZERO + 3].copy_from_slice(&zero.0);
        settle();
        this.words[header::MAGIC] = MAGIC;
        this
    }

    /// Returns an index over `words`, which stay unchanged.
    fn over(words: M, layout: Layout, seed: u64, zero: Fingerprint) -> Self {
        assert!(words.len() >= layout.words(), "the region is smaller than its layout");
        let entries = Entries::new(&layout, seed);
        Self {
            words,
            layout,
            entries,
            nodes: Nodes::new(&layout, entries, zero),
            slots: Slots::new(&layout, entries, zero),
            log: SendLog::new(&layout),
            disks: DiskWords::new(&layout),
            uncut: 0,
            taken_as_it_was: false,
            rules: Rules::default(),
            target: None,
        }
    }

    /// Marks the index as complete, so that a successor need not rebuild it (which takes seconds for 64 GiB of cache).
    /// Does nothing while a slot is pinned, or while lost pages are left. The index must not change until it is reopened.
    pub fn close(&mut self) {
        if self.slots.are_pinned() || self.slots.are_losing() {
            return;
        }
        self.slots.close(&mut self.words);
        self.nodes.close(&mut self.words);
        settle();
        self.words[header::CLOSED] = checksum(&self.words);
    }

    /// Reopens the index for changes.
    pub fn reopen(&mut self) {
        self.words[header::CLOSED] = 0;
        settle();
    }

    /// Returns the first words of the region as [`Self::close`] makes them, and leaves the index open. All words after them are
    /// the same in both.
    pub fn closed_head(&mut self) -> Vec<u32> {
        self.close();
        let head = self.words[..HEADER_WORDS].to_vec();
        self.reopen();
        head
    }

    /// Returns the index that the previous process left in `words`. None of that process's requests may be outstanding.
    /// `zero` shows whether that process used the same key.
    ///
    /// # Errors
    /// If the words hold no index of this version and key with `disks` disk numbers, or more if they are
    /// [`Origin::Own`].
    pub fn resume(words: M, origin: Origin<'_>, disks: u16, seed: u64, zero: Fingerprint) -> Result<Self, Unusable<M>> {
        let unusable = |words, reason| Err(Unusable { words, reason });
        let Some(layout) = Layout::read(&words) else {
            return unusable(words, "it is not an index of this version, or is damaged");
        };
        if layout.disks() < disks || layout.disks() > disks && origin != Origin::Own {
            return unusable(words, "it was made for another number of disks");
        }
        if words[header::ZERO..header::ZERO + 3] != zero.0 {
            return unusable(words, "its fingerprints were made with another key");
        }
        let mut this = Self::over(words, layout, seed, zero);
        let closed = this.words[header::CLOSED] == checksum(&this.words);
        this.reopen();
        this.taken_as_it_was = closed
            && match origin {
                Origin::Own => true,
                Origin::Peer(pairs) => this.disks.keep_numbers(&this.words, pairs),
            };
        if this.taken_as_it_was {
            this.slots.take_as_closed(&mut this.words);
            this.nodes.take_as_closed(&this.words);
        } else {
            this.rebuild(origin);
        }
        this.look_for_voids();
        Ok(this)
    }

    /// Rebuilds everything from the entries. Drops void blocks and, if the words are a peer's, gives the disks the numbers
    /// that they have here. If the previous process was killed while it forgot all blocks, none is kept.
    fn rebuild(&mut self, origin: Origin<'_>) {
        let old = self.words[..self.layout.log_at()].to_vec();
        let Self { words, entries, slots, nodes, disks, layout, .. } = self;
        let mut here = vec![None; usize::from(layout.disks())];
        match origin {
            Origin::Own => here.iter_mut().zip(disks.numbers()).for_each(|(here, disk)| *here = Some(disk)),
            Origin::Peer(pairs) => {
                for (there, to) in pairs {
                    here.get_mut(usize::from(there.0)).into_iter().for_each(|here| *here = Some(*to));
                }
            }
        }
        let is_valid = old[header::BLOCKS_VALID] == 1;
        let disk_of = |block| (is_valid && !disks.is_void(&old, block)).then(|| here[usize::from(block.disk.0)])?;
        entries.clear_lines(words);
        slots.rebuild(words, disk_of);
        nodes.rebuild(words, disk_of);
        settle();
        words[header::BLOCKS_VALID] = 1;
        if let Origin::Peer(pairs) = origin {
            disks.renumber(words, &old, pairs);
        }
        // Only now, so that a kill before this leaves the voids as they were.
        disks.end_voids(words);
    }
}

/// Start value of the checksum. Older programs, whose free slots were singly linked, used another value. A region that
/// they closed is therefore rebuilt like that of a killed process.
const CHECKSUM_BASIS: u32 = 0x811c_9dc6;

/// Returns a checksum of all header words except [`header::CLOSED`] (FNV-1a of whole words, rotated). It is never 0.
fn checksum(words: &[u32]) -> u32 {
    let others = words[..header::CLOSED].iter().chain(&words[header::CLOSED + 1..HEADER_WORDS]);
    let sum = others.fold(CHECKSUM_BASIS, |sum, word| (sum ^ word).wrapping_mul(0x0100_0193).rotate_left(15));
    sum.max(1)
}
