//! Tables: entries of a fixed number of words, and the hash tables that find them.
//!
//! ```text
//! hash table: lines of 16 words; word: tag | number of an entry + 1, or 0
//! ```
//! An entry is found in one of two lines. It is inserted into the first one that has a free word. If neither has, another
//! entry of the two moves to its own other line (bucketized cuckoo hashing, one bucket for each cache line). A table has room
//! for an eighth more entries than it can get, so an entry without room is next to impossible; its owner then does without it.
//! While an entry moves, it is in both lines. The tag is a part of the hash, as wide as the number leaves room for.

use super::layout::{LINE_WORDS, Layout, NONE, Words, begin_load};
use crate::fingerprint::Fingerprint;
use wide::{CmpEq, i16x8, i16x16, i32x8};

/// Position of the fingerprint in an entry.
pub(super) const CONTENT: usize = 2;

/// Number of entries whose lines are prefetched together, a few more than the loads that a processor can have in
/// flight.
pub(super) const BATCH: u32 = 32;

/// Table of entries of `SIZE` words each, from word `at` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table<const SIZE: usize> {
    at: usize,
}

impl<const SIZE: usize> Table<SIZE> {
    pub(super) fn new(at: usize) -> Self {
        Self { at }
    }

    /// Returns the position of the first word of an entry.
    pub(super) fn at(self, entry: u32) -> usize {
        self.at + entry as usize * SIZE
    }

    /// Returns the word `field` of an entry.
    pub(super) fn get<M: Words>(self, words: &M, entry: u32, field: usize) -> u32 {
        words[self.at(entry) + field]
    }

    /// Sets the word `field` of an entry.
    pub(super) fn set<M: Words>(self, words: &mut M, entry: u32, field: usize, value: u32) {
        let at = self.at(entry) + field;
        words[at] = value;
    }

    /// Returns the fingerprint of an entry.
    pub(super) fn content<M: Words>(self, words: &M, entry: u32) -> Fingerprint {
        let content = words[self.at(entry) + CONTENT..].first_chunk();
        Fingerprint(*content.expect("the entries end before the region"))
    }

    /// Stores the fingerprint of an entry.
    pub(super) fn set_content<M: Words>(self, words: &mut M, entry: u32, content: Fingerprint) {
        for (i, word) in content.0.into_iter().enumerate() {
            self.set(words, entry, CONTENT + i, word);
        }
    }
}

/// Lines in which an entry may be, and the tag of its word there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// Positions in the region.
    lines: [usize; 2],
    tag: u32,
}

/// Word that an entry has left, which stays free until another entry is inserted into the table.
pub(super) struct Vacant {
    at: usize,
    tag: u32,
}

#[cfg(test)]
impl Site {
    pub(super) fn lines(self) -> [usize; 2] {
        self.lines
    }
}

/// Hash table of the numbers of the entries of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lines {
    at: usize,
    count: u32,
    /// Bits of a word that hold the number of an entry, plus one. The other bits hold the tag.
    number: u32,
}

impl Lines {
    /// Returns the hash table for a table of `entries` entries, which begins at word `at`.
    pub(super) fn new(at: usize, entries: u32) -> Self {
        debug_assert!(at.is_multiple_of(LINE_WORDS), "a line is a cache line");
        Self { at, count: Layout::lines(entries), number: u32::MAX >> entries.leading_zeros() }
    }

    /// Returns the site of entries with this hash.
    #[inline]
    pub(super) fn site(&self, hash: [u32; 2]) -> Site {
        // The upper bits of each half choose a line. The lower ones of the first half become the upper ones of the tag.
        let [first, second] = hash.map(|half| half as usize);
        let count = self.count as usize;
        let first = (first * count) >> 32;
        // One of the lines after the first, around the end: never the same one, unless there is no other.
        let second = first + 1 + ((second * (count - 1)) >> 32);
        let second = if second < count { second } else { second - count };
        let line = |line: usize| self.at + line * LINE_WORDS;
        Site { lines: [line(first), line(second)], tag: hash[0].swap_bytes() & !self.number }
    }

    /// Returns the site of entries with this fingerprint.
    #[inline]
    pub(super) fn site_of_content(&self, content: Fingerprint) -> Site {
        // Fingerprints need no mixing, but those of another process may be forged.
        let [first, second, _] = content.0;
        self.site([first.wrapping_mul(0x9e37_79b1), second.wrapping_mul(0x85eb_ca6b)])
    }

    /// Returns the number of the entry in a word, or [`NONE`] if the word is free.
    #[inline]
    fn entry(&self, word: u32) -> u32 {
        (word & self.number).wrapping_sub(1)
    }

    /// Returns an entry at `site` for which `is_same` holds, or `None` if there is no such entry.
    #[inline(always)]
    pub(super) fn find<M: Words>(&self, words: &M, site: Site, is_same: impl Fn(u32) -> bool) -> Option<u32> {
        self.find_word(words, site, is_same).map(|(entry, _)| entry)
    }

    /// Returns an entry at `site` for which `is_same` holds, and the position of its word, or `None` if there is no such entry.
    #[inline(always)]
    pub(super) fn find_word<M: Words>(
        &self,
        words: &M,
        site: Site,
        is_same: impl Fn(u32) -> bool,
    ) -> Option<(u32, usize)> {
        let [first, second] = site.lines;
        self.find_in(words, first, site.tag, &is_same).or_else(|| self.find_in(words, second, site.tag, &is_same))
    }

    #[inline(always)]
    fn find_in<M: Words>(
        &self,
        words: &M,
        at: usize,
        tag: u32,
        is_same: &impl Fn(u32) -> bool,
    ) -> Option<(u32, usize)> {
        let line = line_at(words, at);
        let mut tagged = equal_words(line, !self.number, tag);
        while tagged != 0 {
            let position = tagged.trailing_zeros() as usize % LINE_WORDS;
            let entry = self.entry(line[position]);
            if entry != NONE && is_same(entry) {
                return Some((entry, at + position));
            }
            tagged &= tagged - 1;
        }
        None
    }

    /// Returns the first two entries with the tag of `site`, and [`NONE`] for each that is missing. Neither need be the one
    /// looked for.
    #[inline]
    pub(super) fn candidates<M: Words>(&self, words: &M, site: Site) -> [u32; 2] {
        let [first, second] = site.lines.map(|at| equal_words(line_at(words, at), !self.number, site.tag));
        let found = first | second << LINE_WORDS;
        // All of them, and all but the first.
        [found, found & found.wrapping_sub(1)].map(|found| {
            let at = found.trailing_zeros() as usize % (2 * LINE_WORDS);
            let word = words[site.lines[at / LINE_WORDS] + at % LINE_WORDS];
            if found == 0 { NONE } else { self.entry(word) }
        })
    }

    /// Begins to load both lines of `site`.
    pub(super) fn touch<M: Words>(&self, words: &M, site: Site) {
        site.lines.iter().for_each(|line| begin_load(words, *line));
    }

    /// Inserts an entry, which must not be in the table. `site_of` returns the sites of others. Returns `false` if there is no
    /// room.
    pub(super) fn insert<M: Words>(
        &self,
        words: &mut M,
        site: Site,
        entry: u32,
        site_of: impl Fn(&M, u32) -> Site,
    ) -> bool {
        let free = site.lines.iter().find_map(|line| free_word(words, *line));
        let Some(at) = free.or_else(|| self.make_room(words, site, site_of)) else { return false };
        words[at] = site.tag | (entry + 1);
        true
    }

    /// Returns whether [`Self::insert`] has room for an entry.
    pub(super) fn has_room<M: Words>(&self, words: &M, site: Site, site_of: impl Fn(&M, u32) -> Site) -> bool {
        site.lines.iter().any(|line| free_word(words, *line).is_some()) || self.find_way(words, site, site_of).is_some()
    }

    /// Moves an entry from one of two full lines to its other line. Returns the position of its former word, or `None` if the
    /// other lines of all entries are full.
    fn make_room<M: Words>(&self, words: &mut M, site: Site, site_of: impl Fn(&M, u32) -> Site) -> Option<usize> {
        let (at, to) = self.find_way(words, site, site_of)?;
        words[to] = words[at];
        Some(at)
    }

    /// Returns the position of a word in one of two full lines, and a free word in the other line of its entry. Returns `None`
    /// if the other lines of all entries are full.
    fn find_way<M: Words>(&self, words: &M, site: Site, site_of: impl Fn(&M, u32) -> Site) -> Option<(usize, usize)> {
        let words_of = site.lines.into_iter().flat_map(|line| (line..line + LINE_WORDS).map(move |at| (line, at)));
        words_of.into_iter().find_map(|(line, at)| {
            let others = site_of(words, self.entry(words[at])).lines;
            let other = if others[0] == line { others[1] } else { others[0] };
            Some((at, free_word(words, other)?))
        })
    }

    /// Removes an entry.
    pub(super) fn remove<M: Words>(&self, words: &mut M, site: Site, entry: u32) {
        self.replace(words, site, entry, NONE);
    }

    /// Replaces an entry by another one with the same hash, or by none if that is [`NONE`].
    pub(super) fn replace<M: Words>(&self, words: &mut M, site: Site, entry: u32, other: u32) {
        if let Some(at) = self.position(words, site, entry) {
            words[at] = if other == NONE { 0 } else { site.tag | (other + 1) };
        }
    }

    /// Returns the position of the word of an entry, which must be at `site`.
    pub(super) fn position<M: Words>(&self, words: &M, site: Site, entry: u32) -> Option<usize> {
        let word = site.tag | (entry + 1);
        let found = site.lines.iter().find_map(|line| first_word(words, *line, word));
        debug_assert!(found.is_some(), "the entry {entry} is not in its table");
        found
    }

    /// Removes the entry whose word is at `at`, and returns what it leaves to another one with the same hash.
    pub(super) fn vacate<M: Words>(&self, words: &mut M, at: usize) -> Vacant {
        let tag = words[at] & !self.number;
        words[at] = 0;
        Vacant { at, tag }
    }

    /// Inserts an entry into the word that one with the same hash has left. None may have been inserted since.
    pub(super) fn occupy<M: Words>(&self, words: &mut M, vacant: Vacant, entry: u32) {
        debug_assert_eq!(words[vacant.at], 0, "another entry was inserted since");
        words[vacant.at] = vacant.tag | (entry + 1);
    }

    /// Asserts that each word is in a line of its entry, and that no entry has two. Returns the number of entries. `site_of` returns
    /// their sites.
    #[cfg(test)]
    pub(super) fn check<M: Words>(&self, words: &M, site_of: impl Fn(u32) -> Site) -> usize {
        let mut entries = std::collections::HashSet::new();
        for at in (self.at..self.at + self.count as usize * LINE_WORDS).filter(|at| words[*at] != 0) {
            let (word, line) = (words[at], at - at % LINE_WORDS);
            let (entry, tag) = (self.entry(word), word & !self.number);
            let site = site_of(entry);
            assert!(site.lines.contains(&line) && site.tag == tag, "the entry {entry} is in a line of another one");
            assert!(entries.insert(entry), "the entry {entry} has two words");
        }
        entries.len()
    }

    /// Removes all entries.
    pub(super) fn clear<M: Words>(&self, words: &mut M) {
        words[self.at..self.at + self.count as usize * LINE_WORDS].fill(0);
    }
}

/// Returns the line at `at`.
#[inline]
fn line_at<M: Words>(words: &M, at: usize) -> &[u32; LINE_WORDS] {
    words[at..].first_chunk().expect("the region ends with a whole line")
}

/// Returns one bit for each word of a line that equals `value` in the bits of `mask`.
#[inline]
fn equal_words(line: &[u32; LINE_WORDS], mask: u32, value: u32) -> u32 {
    let (mask, value) = (i32x8::splat(mask.cast_signed()), i32x8::splat(value.cast_signed()));
    let equal = bytemuck::cast::<_, [i32x8; 2]>(*line).map(|eight| (eight & mask).cmp_eq(value));
    bytemuck::cast::<_, i16x16>(equal.map(i16x8::from_i32x8_saturate)).move_mask().cast_unsigned()
}

/// Returns the position of the first word of the line at `at` that is `value`, or `None` if there is none.
#[inline]
fn first_word<M: Words>(words: &M, at: usize, value: u32) -> Option<usize> {
    let equal = equal_words(line_at(words, at), u32::MAX, value);
    (equal != 0).then(|| at + equal.trailing_zeros() as usize)
}

fn free_word<M: Words>(words: &M, line: usize) -> Option<usize> {
    first_word(words, line, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::layout::{LINE_ENTRIES, Layout};
    use proptest::prelude::*;
    use std::collections::HashSet;

    /// Hash of an entry, from few values, so that lines become full.
    fn hash(entry: u32) -> [u32; 2] {
        [entry.wrapping_mul(0x9e37_79b1), entry.wrapping_mul(0x85eb_ca6b) % 5 * 0x3000_0000]
    }

    proptest! {
        /// What is in the table is what was inserted and not removed, however full it is.
        #[test]
        fn entries_stay_until_they_are_removed(
            steps in proptest::collection::vec((any::<bool>(), 0..200_u32), 0..600), entries in 16..200_u32
        ) {
            let (table, mut words) = (Lines::new(16, entries), vec![0; 16 + Layout::lines(entries) as usize * LINE_WORDS]);
            let site = |entry: u32| table.site(hash(entry));
            let mut there = HashSet::new();
            for (is_insertion, entry) in steps {
                let entry = entry % entries;
                if there.contains(&entry) != is_insertion {
                    if !is_insertion {
                        table.remove(&mut words, site(entry), entry);
                        there.remove(&entry);
                    } else if table.insert(&mut words, site(entry), entry, |_, other| site(other)) {
                        there.insert(entry);
                    } else {
                        let lines = site(entry).lines;
                        prop_assert!(lines.iter().all(|line| free_word(&words, *line).is_none()), "there was room");
                    }
                }
                for entry in 0..entries {
                    let found = table.find(&words, site(entry), |other| other == entry);
                    prop_assert_eq!(found.is_some(), there.contains(&entry));
                }
                prop_assert_eq!(words.iter().filter(|word| **word != 0).count(), there.len(), "each stands once");
            }
        }
    }

    #[test]
    fn an_entry_takes_the_word_that_another_one_has_left() {
        let (table, mut words) = (Lines::new(0, 100), vec![0; Layout::lines(100) as usize * LINE_WORDS]);
        let site = table.site([0x1234_56f0, 0x789a_bcde]);
        // Both lines are full, so that there is no other word.
        for entry in 0..32 {
            assert!(table.insert(&mut words, site, entry, |_, _| site));
        }
        for entry in 0..32 {
            let at = table.position(&words, site, entry).unwrap();
            let vacant = table.vacate(&mut words, at);
            assert_eq!(table.find(&words, site, |other| other == entry), None);
            let next = 50 + entry;
            table.occupy(&mut words, vacant, next);
            assert_eq!(table.find_word(&words, site, |other| other == next), Some((next, at)));
            assert_eq!(table.check(&words, |_| site), 32);
        }
    }

    #[test]
    fn two_entries_with_the_tag_are_candidates() {
        let (table, mut words) = (Lines::new(0, 100), vec![0; Layout::lines(100) as usize * LINE_WORDS]);
        let site = table.site([u32::MAX; 2]);
        assert_eq!(table.candidates(&words, site), [NONE; 2]);
        // Another tag than that of the site.
        words[site.lines[0]..site.lines[0] + LINE_WORDS].fill(1);
        assert_eq!(table.candidates(&words, site), [NONE; 2]);
        assert!(table.insert(&mut words, site, 3, |_, _| site));
        assert_eq!(table.candidates(&words, site), [3, NONE]);
        assert!(table.insert(&mut words, site, 5, |_, _| site));
        assert_eq!(table.candidates(&words, site), [3, 5]);
        words[site.lines[0] + LINE_WORDS - 1] = site.tag | 8;
        assert_eq!(table.candidates(&words, site), [7, 3], "the first line comes first");
    }

    /// A full index has as many entries as its tables are made for, and each finds room.
    #[test]
    fn a_table_takes_all_entries_that_it_is_made_for() {
        for entries in [1, 14, 15, 28, 1000, 100_000] {
            let (table, mut words) = (Lines::new(0, entries), vec![0; Layout::lines(entries) as usize * LINE_WORDS]);
            let site = |entry: u32| {
                let mixed = (u64::from(entry) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_be_bytes();
                let half = |i: usize| u32::from_be_bytes([mixed[i], mixed[i + 1], mixed[i + 2], mixed[i + 3]]);
                table.site([half(0), half(3)])
            };
            // Each entry is replaced by another one of its number, as in use.
            for entry in (0..entries).chain(0..entries) {
                if table.find(&words, site(entry), |other| other == entry).is_some() {
                    table.remove(&mut words, site(entry), entry);
                }
                assert!(table.insert(&mut words, site(entry), entry, |_, other| site(other)), "{entry} of {entries}");
            }
        }
    }

    /// In the smallest tables too, where two numbers drawn at random are often the same.
    #[test]
    fn an_entry_has_two_lines_if_there_are_two() {
        for lines in 2..20 {
            let table = Lines::new(0, lines * LINE_ENTRIES);
            let halves = [0, 1, u32::MAX / 3, u32::MAX / 2, u32::MAX / 2 + 1, u32::MAX - 1, u32::MAX];
            for hash in halves.into_iter().flat_map(|first| halves.map(|second| [first, second])) {
                let [first, second] = table.site(hash).lines.map(|at| at / LINE_WORDS);
                assert!(
                    first != second && first.max(second) < lines as usize,
                    "{hash:x?}: {first}, {second} of {lines}"
                );
            }
        }
    }

    /// A word has room for the highest number, whatever the tag.
    #[test]
    fn the_largest_table_has_no_tags() {
        for entries in [1, 15, 16, (1 << 31) - 1, 1 << 31] {
            let table = Lines { at: 0, count: 1, number: Lines::new(0, entries).number };
            let (mut words, site) = (vec![0; LINE_WORDS], table.site([u32::MAX; 2]));
            assert!(table.insert(&mut words, site, entries - 1, |_, _| site));
            assert_eq!(table.find(&words, site, |entry| entry == entries - 1), Some(entries - 1));
        }
    }
}
