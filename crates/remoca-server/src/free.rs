//! Free chunks of an arena, and which of them still hold memory of the host.
//!
//! Pure; the arena calls it under a lock that is never held during a system call. A chunk that was used waits here
//! until a separate thread gives its memory back to the host, one chunk at a time. A pool that needs a chunk sooner
//! gets it as it is.
//! 1. Each chunk is owned by a pool, or free. A free one is clean, used, or being given back; at most one is being given back
//!    (property-tested).
//! 2. A free chunk counts as free, whether or not it holds memory.

/// The free chunks.
#[derive(Debug)]
pub(crate) struct FreeChunks {
    /// Chunks without memory, or with memory that stays locked.
    clean: Vec<u32>,
    /// Chunks whose memory is still to be given back.
    used: Vec<u32>,
    /// Chunk whose memory is being given back now.
    leaving: Option<u32>,
}

/// The outcome of [`FreeChunks::take`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Indices of the chunks, and whether each holds memory of the host.
    Chunks(Vec<(u32, bool)>),
    /// There will be enough when the chunk whose memory is being given back is free again.
    SoonEnough,
    TooFew,
}

impl FreeChunks {
    /// Returns `count` free chunks, all of them clean.
    pub(crate) fn all(count: u32) -> Self {
        // Chunks are taken from the end: the lowest first.
        Self { clean: (0..count).rev().collect(), used: Vec::new(), leaving: None }
    }

    pub(crate) fn count(&self) -> usize {
        self.clean.len() + self.used.len() + usize::from(self.leaving.is_some())
    }

    /// Returns the number of free chunks that still hold memory of the host.
    pub(crate) fn used_count(&self) -> usize {
        self.used.len() + usize::from(self.leaving.is_some())
    }

    /// Takes chunks, clean ones first.
    pub(crate) fn take(&mut self, count: usize) -> Taken {
        if count > self.count() {
            return Taken::TooFew;
        }
        if count > self.clean.len() + self.used.len() {
            return Taken::SoonEnough;
        }
        let from_clean = count.min(self.clean.len());
        let clean = self.clean.drain(self.clean.len() - from_clean..).rev().map(|chunk| (chunk, false));
        let used = self.used.drain(self.used.len() - (count - from_clean)..).map(|chunk| (chunk, true));
        Taken::Chunks(clean.chain(used).collect())
    }

    /// Takes back a chunk. `holds_memory` says whether its memory is to be given back to the host.
    pub(crate) fn put(&mut self, chunk: u32, holds_memory: bool) {
        if holds_memory { self.used.push(chunk) } else { self.clean.push(chunk) }
    }

    /// Returns the next chunk whose memory is to be given back, or `None` if there is none. [`Self::given_back`] must
    /// follow before the next call.
    pub(crate) fn begin_giving_back(&mut self) -> Option<u32> {
        assert!(self.leaving.is_none(), "one at a time");
        self.leaving = self.used.pop();
        self.leaving
    }

    /// Moves the chunk whose memory has been given back to the clean ones.
    pub(crate) fn given_back(&mut self) {
        self.clean.extend(self.leaving.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Take(usize),
        Put(bool),
        GiveBack,
        GivenBack,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..12_usize).prop_map(Step::Take),
            any::<bool>().prop_map(Step::Put),
            Just(Step::GiveBack),
            Just(Step::GivenBack),
        ]
    }

    proptest! {
        #[test]
        fn every_chunk_is_somewhere_once(steps in prop::collection::vec(step(), 1..200)) {
            let mut free = FreeChunks::all(10);
            let mut owned = Vec::new();
            for step in steps {
                match step {
                    Step::Take(count) => match free.take(count) {
                        Taken::Chunks(taken) => {
                            prop_assert_eq!(taken.len(), count);
                            owned.extend(taken);
                        }
                        Taken::SoonEnough => {
                            prop_assert!(free.leaving.is_some() && count == free.count());
                            free.given_back();
                            let Taken::Chunks(taken) = free.take(count) else { panic!("one is all that is waited for") };
                            owned.extend(taken);
                        }
                        Taken::TooFew => prop_assert!(count > 10 - owned.len()),
                    },
                    Step::Put(touched) => {
                        if let Some((chunk, holds_memory)) = owned.pop() {
                            free.put(chunk, holds_memory || touched);
                        }
                    }
                    Step::GiveBack => {
                        if free.leaving.is_none() {
                            let used = free.used_count();
                            prop_assert_eq!(free.begin_giving_back().is_some(), used > 0);
                        }
                    }
                    Step::GivenBack => free.given_back(),
                }
                let owned_chunks = owned.iter().map(|(chunk, _)| chunk);
                let mut all: Vec<u32> =
                    free.clean.iter().chain(&free.used).chain(&free.leaving).chain(owned_chunks).copied().collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..10).collect::<Vec<_>>());
            }
        }
    }
}
