//! Lists of blocks in two arrays: each block is in one of N lists, or in none.

use super::ids::Id;

/// Number of no list.
const NONE: u8 = u8::MAX;

#[derive(Clone, Copy)]
struct Links {
    before: u32,
    after: u32,
}

/// N lists. The first N links are the ends of the lists: the block after one is the front of its list, that before it the back.
pub(super) struct Lists<const N: usize> {
    links: Vec<Links>,
    list_of: Vec<u8>,
    lengths: [u64; N],
}

impl<const N: usize> Lists<N> {
    /// Returns empty lists.
    pub(super) fn new() -> Self {
        const { assert!(N < NONE as usize) };
        let links = (0..).take(N).map(|end| Links { before: end, after: end }).collect();
        Self { links, list_of: Vec::new(), lengths: [0; N] }
    }

    /// Makes room for blocks with numbers below `count`.
    pub(super) fn reach(&mut self, count: usize) {
        if self.list_of.len() < count {
            self.links.resize(N + count, Links { before: 0, after: 0 });
            self.list_of.resize(count, NONE);
        }
    }

    /// Returns the bytes that the lists take.
    pub(super) fn bytes(&self) -> usize {
        self.links.capacity() * size_of::<Links>() + self.list_of.capacity()
    }

    /// Returns the number of blocks in a list.
    #[inline]
    pub(super) fn len(&self, list: usize) -> u64 {
        self.lengths[list]
    }

    /// Returns the list that a block is in.
    #[inline]
    pub(super) fn list_of(&self, id: Id) -> Option<usize> {
        let list = self.list_of[id as usize];
        (list != NONE).then_some(usize::from(list))
    }

    #[inline]
    fn unlink(&mut self, at: u32) {
        let Links { before, after } = self.links[at as usize];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
    }

    /// Links `at` between two neighbours.
    #[inline]
    fn link(&mut self, at: u32, before: u32, after: u32) {
        self.links[at as usize] = Links { before, after };
        self.links[before as usize].after = at;
        self.links[after as usize].before = at;
    }

    /// Takes a block out of its list. Returns which that was.
    #[inline]
    pub(super) fn remove(&mut self, id: Id) -> Option<usize> {
        let list = self.list_of(id)?;
        self.unlink(place(id, N));
        self.list_of[id as usize] = NONE;
        self.lengths[list] -= 1;
        Some(list)
    }

    /// Puts a block that is in no list at the front of one.
    #[inline]
    pub(super) fn push_front(&mut self, list: usize, id: Id) {
        let end = end_of(list);
        self.link(place(id, N), end, self.links[list].after);
        self.note(list, id);
    }

    /// Puts a block that is in no list at the back of one.
    #[inline]
    pub(super) fn push_back(&mut self, list: usize, id: Id) {
        let end = end_of(list);
        self.link(place(id, N), self.links[list].before, end);
        self.note(list, id);
    }

    #[inline]
    fn note(&mut self, list: usize, id: Id) {
        self.list_of[id as usize] = end_of(list).to_le_bytes()[0];
        self.lengths[list] += 1;
    }

    /// Moves a block to the front of the list that it is in.
    #[inline]
    pub(super) fn move_to_front(&mut self, list: usize, id: Id) {
        let (at, end) = (place(id, N), end_of(list));
        let first = self.links[list].after;
        if first != at {
            self.unlink(at);
            self.link(at, end, first);
        }
    }

    /// Takes the block at the back of a list.
    #[inline]
    pub(super) fn pop_back(&mut self, list: usize) -> Option<Id> {
        let at = self.links[list].before as usize;
        let id = id_at(at.checked_sub(N)?);
        self.remove(id);
        Some(id)
    }
}

/// Returns the place of a block's links behind the ends of N lists. Numbers of blocks stay far below 2^32.
#[inline]
fn place(id: Id, ends: usize) -> u32 {
    id + end_of(ends)
}

#[inline]
fn end_of(list: usize) -> u32 {
    id_at(list)
}

#[inline]
fn id_at(index: usize) -> u32 {
    let [a, b, c, d, ..] = (index as u64).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
