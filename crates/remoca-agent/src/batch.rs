//! The pages that wait to be written: one request's worth, in memory that never moves and never grows.
//!
//! A batch goes out when it is full, or when its oldest page has waited long enough. Pure: the time is an argument.

use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use crate::page::{BATCH_PAGE_COUNT_MAX, PAGE_BYTES, Page};

/// How long a page waits for others: long enough for a request's worth at any rate that matters, short beside the time
/// after which a guest reads a page again.
pub const BATCH_AGE_MAX: Duration = Duration::from_millis(10);

pub struct Batch {
    pages: Box<[Page]>,
    page_count: usize,
    page_count_max: usize,
    /// When the first page came in; `None` while empty.
    began: Option<Instant>,
}

impl Batch {
    pub fn new() -> Batch {
        let pages = vec![Page::ZERO; BATCH_PAGE_COUNT_MAX as usize].into_boxed_slice();
        Batch { page_count_max: pages.len(), pages, page_count: 0, began: None }
    }

    /// What is in already stays in, even if it is more.
    pub fn limit(&mut self, page_count_max: usize) {
        self.page_count_max = page_count_max.clamp(1, self.pages.len());
    }

    /// The number of pages that still go in.
    pub fn room(&self) -> usize {
        self.page_count_max.saturating_sub(self.page_count)
    }

    /// Takes a page in; what is not a page, or finds no room, is refused.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8], now: Instant) -> bool {
        if bytes.len() != PAGE_BYTES || self.room() == 0 {
            return false;
        }
        self.pages[self.page_count].0.copy_from_slice(bytes);
        self.page_count += 1;
        self.began.get_or_insert(now);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.page_count == 0
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.room() == 0 || self.due_at().is_some_and(|due_at| due_at <= now)
    }

    pub fn due_at(&self) -> Option<Instant> {
        self.began.map(|began| began + BATCH_AGE_MAX)
    }

    pub fn page_count(&self) -> usize {
        self.page_count
    }

    pub fn bytes(&self) -> &[u8] {
        self.pages[..self.page_count].as_bytes()
    }

    pub fn clear(&mut self) {
        self.page_count = 0;
        self.began = None;
    }
}

impl Default for Batch {
    fn default() -> Self {
        Batch::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_out_in_order_and_aligned() {
        let now = Instant::now();
        let mut batch = Batch::new();
        assert!(batch.push(&[1; PAGE_BYTES], now));
        assert!(batch.push(&[2; PAGE_BYTES], now));
        assert_eq!(batch.bytes().as_ptr().align_offset(PAGE_BYTES), 0);
        assert_eq!(batch.bytes().len(), 2 * PAGE_BYTES);
        assert!(batch.bytes()[..PAGE_BYTES].iter().all(|byte| *byte == 1));
        assert!(batch.bytes()[PAGE_BYTES..].iter().all(|byte| *byte == 2));
    }

    #[test]
    fn full_is_due_at_once_and_takes_no_more() {
        let now = Instant::now();
        let mut batch = Batch::new();
        batch.limit(2);
        assert!(batch.push(&[0; PAGE_BYTES], now));
        assert!(!batch.is_due(now));
        assert!(batch.push(&[0; PAGE_BYTES], now));
        assert!(batch.is_due(now));
        assert!(!batch.push(&[0; PAGE_BYTES], now));
        batch.clear();
        assert!(!batch.is_due(now) && batch.is_empty() && batch.room() == 2);
    }

    #[test]
    fn age_counts_from_the_first_page() {
        let now = Instant::now();
        let mut batch = Batch::new();
        assert_eq!(batch.due_at(), None);
        assert!(batch.push(&[0; PAGE_BYTES], now));
        assert!(batch.push(&[0; PAGE_BYTES], now + BATCH_AGE_MAX / 2));
        assert!(!batch.is_due(now + BATCH_AGE_MAX / 2));
        assert!(batch.is_due(now + BATCH_AGE_MAX));
    }

    #[test]
    fn limits_are_bounded_and_may_shrink_below_what_is_in() {
        let now = Instant::now();
        let mut batch = Batch::new();
        batch.limit(usize::MAX);
        assert_eq!(batch.room(), BATCH_PAGE_COUNT_MAX as usize);
        assert!(batch.push(&[0; PAGE_BYTES], now));
        assert!(batch.push(&[0; PAGE_BYTES], now));
        batch.limit(0);
        assert_eq!(batch.room(), 0);
        assert_eq!(batch.page_count(), 2);
        assert!(batch.is_due(now));
    }

    #[test]
    fn what_is_not_a_page_is_refused() {
        let mut batch = Batch::new();
        assert!(!batch.push(&[0; PAGE_BYTES - 1], Instant::now()));
        assert!(!batch.push(&[], Instant::now()));
        assert!(batch.is_empty());
    }
}
