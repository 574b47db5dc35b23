//! Words that their owner lends to another thread, which reads them as they were then. Before the owner changes them, it copies
//! what was not read yet.

use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Words as they were when they were lent. All clones read the same ones: what one has taken, no other gets.
#[derive(Clone)]
pub struct LentWords(Arc<Mutex<Rest>>);

/// The owner's side of a loan.
pub(super) struct Loan(Weak<Mutex<Rest>>);

/// The words of a loan that were not taken yet.
struct Rest {
    words: Place,
    /// Number of words before them.
    taken: usize,
}

enum Place {
    /// Memory of the owner, who ends the loan before changing or unmapping it.
    Owner(NonNull<[u32]>),
    Copy(Vec<u32>),
}

// SAFETY: memory is the same for all threads, and that of the owner does not change as long as it is here.
unsafe impl Send for Place {}

impl Rest {
    fn words(&self) -> &[u32] {
        let words: &[u32] = match &self.words {
            // SAFETY: the owner leaves these words as they are until the loan has ended. To end it, the owner needs the lock, which
            // whoever has a reference to `self` holds.
            Place::Owner(words) => unsafe { words.as_ref() },
            Place::Copy(words) => words,
        };
        &words[self.taken..]
    }
}

impl LentWords {
    /// Lends `words`. Returns the loan, which the owner has to end.
    ///
    /// # Safety
    /// The words stay mapped, and none is changed, before [`Loan::end`] has returned.
    pub(super) unsafe fn new(words: NonNull<[u32]>) -> (Self, Loan) {
        let rest = Arc::new(Mutex::new(Rest { words: Place::Owner(words), taken: 0 }));
        let loan = Loan(Arc::downgrade(&rest));
        (Self(rest), loan)
    }

    /// Passes the next words to `read`, at most `words_max` of them, and returns its result. Returns `None` if none are left. An
    /// owner that ends the loan waits for `read`.
    pub fn take<R>(&self, words_max: usize, read: impl FnOnce(&[u32]) -> R) -> Option<R> {
        let mut rest = lock(&self.0);
        let words = rest.words();
        let piece = &words[..words.len().min(words_max)];
        if piece.is_empty() {
            return None;
        }
        let (count, result) = (piece.len(), read(piece));
        rest.taken += count;
        Some(result)
    }

    /// Makes all words that are left count as taken, so that none of them is copied. A copy that was made already ends with the last
    /// clone: to free it takes a while.
    pub fn forget(&self) {
        let mut rest = lock(&self.0);
        rest.taken += rest.words().len();
    }
}

impl Loan {
    /// Copies what was not taken, if anybody may still take it. Then the owner's memory is not read any more.
    pub(super) fn end(self) {
        let Some(rest) = self.0.upgrade() else {
            // The last clone has ended, and with it all reading: what its thread read was read before what follows here.
            fence(Ordering::Acquire);
            return;
        };
        let mut rest = lock(&rest);
        let words = Place::Copy(rest.words().to_vec());
        *rest = Rest { words, taken: 0 };
    }
}

/// Locks the rest of a loan. Poison is ignored: a reader that panics has taken nothing.
fn lock(rest: &Mutex<Rest>) -> MutexGuard<'_, Rest> {
    rest.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use crate::words::IndexMemory;

    /// Returns memory for ten words, which are 0, 1, ...
    fn memory() -> IndexMemory {
        let mut memory = IndexMemory::new(10).unwrap();
        memory.iter_mut().zip(0..).for_each(|(word, number)| *word = number);
        memory
    }

    #[test]
    fn lent_words_are_read_where_they_are_until_they_change() {
        let mut memory = memory();
        let lent = memory.lend(2);
        assert_eq!(lent.take(3, |words| (words.as_ptr(), words.to_vec())), Some((memory[2..].as_ptr(), vec![2, 3, 4])));
        // Two that were taken, and one that was not.
        (memory[2], memory[4], memory[9]) = (22, 24, 29);
        let copied = lent.take(1, |words| (words.as_ptr() != memory[5..].as_ptr(), words.to_vec()));
        assert_eq!(copied, Some((true, vec![5])));
        memory.fill(7);
        assert_eq!(lent.clone().take(usize::MAX, <[u32]>::to_vec), Some(vec![6, 7, 8, 9]));
        assert_eq!(lent.take(1, <[u32]>::to_vec), None);
    }

    #[test]
    fn lent_words_outlive_their_memory_and_another_loan() {
        let memory = memory();
        let (first, second) = (memory.lend(7), memory.lend(8));
        drop(memory);
        assert_eq!(first.take(10, <[u32]>::to_vec), Some(vec![7, 8, 9]));
        assert_eq!(second.take(10, <[u32]>::to_vec), Some(vec![8, 9]));
    }

    #[test]
    fn words_that_nobody_takes_any_more_are_forgotten() {
        let mut memory = memory();
        let lent = memory.lend(0);
        drop(memory.lend(0));
        let other = memory.lend(0);
        other.forget();
        memory.fill(7);
        assert_eq!(other.take(1, <[u32]>::to_vec), None);
        assert_eq!(lent.take(1, <[u32]>::to_vec), Some(vec![0]));
    }

    /// The reader is between two words when the owner comes. Whatever it has read then, it gets the rest as it was.
    #[test]
    fn an_owner_that_changes_its_words_meanwhile_changes_nothing_for_the_reader() {
        for before in 0..=10 {
            let mut memory = memory();
            let lent = memory.lend(0);
            let (go_on, may_go_on) = std::sync::mpsc::sync_channel(0);
            let reader = std::thread::spawn(move || {
                let mut read: Vec<u32> = (0..before).filter_map(|_| lent.take(1, |words| words[0])).collect();
                may_go_on.recv().unwrap();
                read.extend(std::iter::from_fn(|| lent.take(1, |words| words[0])));
                read
            });
            memory.fill(7);
            go_on.send(()).unwrap();
            memory.fill(8);
            assert_eq!(reader.join().unwrap(), (0..10).collect::<Vec<_>>(), "{before} before");
        }
    }
}
