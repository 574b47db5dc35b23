//! An input read as a sequence of small numbers.

/// The rest of an input, followed by an endless run of zeroes.
pub struct Source<'a>(pub &'a [u8]);

impl Source<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes([(); 4].map(|()| self.byte()))
    }

    /// Reads a number, often a small one.
    pub fn count(&mut self) -> u32 {
        match self.byte() {
            255 => self.word(),
            small => u32::from(small >> 4),
        }
    }

    /// Reads a number below `end`.
    pub fn below(&mut self, end: u8) -> u8 {
        self.byte() % end
    }
}
