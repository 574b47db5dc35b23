//! The words of an index, which outlive their process. The process can die between any two stores.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// Number of stores that is never reached.
const NEVER: u64 = u64::MAX;

/// The moment of a process's death, and the words that it leaves.
#[derive(Debug)]
pub(super) struct Fuse {
    stores_left: Cell<u64>,
    remains: RefCell<Option<Vec<u32>>>,
}

impl Fuse {
    fn new() -> Rc<Self> {
        Rc::new(Self { stores_left: Cell::new(NEVER), remains: RefCell::new(None) })
    }

    /// Makes the process die after `stores` more stores.
    pub(super) fn light(&self, stores: u32) {
        self.stores_left.set(u64::from(stores));
    }

    /// Cancels the death.
    pub(super) fn put_out(&self) {
        self.stores_left.set(NEVER);
    }

    /// Returns whether the process is dead.
    pub(super) fn has_burnt(&self) -> bool {
        self.remains.borrow().is_some()
    }

    /// Returns the words that the process left, or `None` if it is not dead. The engine must be dropped before.
    pub(super) fn take_remains(&self) -> Option<Vec<u32>> {
        self.remains.take()
    }
}

/// The words of one index.
#[derive(Debug)]
pub(super) struct Region {
    words: Vec<u32>,
    fuse: Rc<Fuse>,
}

impl Region {
    pub(super) fn new(words: Vec<u32>) -> (Self, Rc<Fuse>) {
        let fuse = Fuse::new();
        (Self { words, fuse: Rc::clone(&fuse) }, fuse)
    }

    fn leave(&mut self, words: impl FnOnce(&mut Vec<u32>) -> Vec<u32>) {
        let mut remains = self.fuse.remains.borrow_mut();
        if remains.is_none() {
            *remains = Some(words(&mut self.words));
        }
    }
}

impl Deref for Region {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.words
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u32] {
        match self.fuse.stores_left.get() {
            NEVER => {}
            0 => self.leave(|words| words.clone()),
            left => self.fuse.stores_left.set(left - 1),
        }
        &mut self.words
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.leave(std::mem::take);
    }
}
