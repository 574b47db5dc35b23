//! An index that is received over the connection: what was announced, and the part of it that has arrived.

use crate::state::StateFile;
use remoca_io::words::IndexMemory;
use remoca_protocol::peer::StateHeader;

/// Memory for an index. It is in a state file if the index is to outlive this process.
pub struct IndexRoom {
    pub words: IndexMemory,
    pub state: Option<StateFile>,
}

impl IndexRoom {
    /// Returns private memory with a copy of the first `filled` words, in place of a state file that has no room.
    /// Returns `None` if there is no memory.
    fn without_state(&self, filled: u64) -> Option<Self> {
        let filled = usize::try_from(filled).ok()?;
        let mut words = IndexMemory::new(self.words.len())
            .inspect_err(|error| tracing::warn!("no memory for the index that comes: {error}"))
            .ok()?;
        words[..filled].copy_from_slice(&self.words[..filled]);
        Some(Self { words, state: None })
    }
}

/// An index that is being received.
pub struct Receipt {
    pub header: StateHeader,
    /// Memory for the words. `None` if no index comes, if it is larger than allowed, or if there is no memory: its
    /// words are then dropped.
    pub room: Option<IndexRoom>,
    filled: u64,
}

impl Receipt {
    /// Starts to receive an index. Its words are stored in the memory that `room_for` returns, if there are at most
    /// `words_max`.
    #[must_use]
    pub fn begin(header: StateHeader, words_max: u64, room_for: impl FnOnce(usize) -> Option<IndexRoom>) -> Self {
        let words = usize::try_from(header.words).ok().filter(|_| (1..=words_max).contains(&header.words));
        Self { room: words.and_then(room_for), header, filled: 0 }
    }

    /// Stores the next words of the index, or drops them if there is no memory for it.
    ///
    /// # Errors
    /// If more words arrive than were announced, or the length of `bytes` is not a multiple of four.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        let (words, rest) = bytes.as_chunks::<4>();
        let (start, end) = (self.filled, self.filled.saturating_add(words.len() as u64));
        if end > self.header.words || !rest.is_empty() {
            return Err("it sends more of an index than it announced");
        }
        self.filled = end;
        let Some(room) = &mut self.room else { return Ok(()) };
        // Memory is taken as words come, whatever was announced.
        if let Some(Err(error)) = room.state.as_ref().map(|state| state.reserve(start..end)) {
            tracing::warn!("{error}");
            self.room = room.without_state(start);
        }
        let Some(room) = &mut self.room else { return Ok(()) };
        let room = usize::try_from(start).ok().and_then(|start| room.words.get_mut(start..)).unwrap_or_default();
        for (word, bytes) in room.iter_mut().zip(words) {
            *word = u32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    /// Returns whether all words that were announced have arrived.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.filled == self.header.words
    }
}
