//! A failed flush stays failed.
//!
//! After a failed fsync the kernel considers the lost pages clean, so that the next fsync succeeds although the data are
//! gone. Each store passes its results through one latch; the first failed flush or durable write decides all later ones.
//! Running out of space is no reason to latch for a write (nothing was acknowledged and lost), but it is for a flush.

use super::{StoreError, StoreOp};

#[derive(Debug, Default)]
pub(super) struct FlushLatch {
    failed: Option<StoreError>,
}

impl FlushLatch {
    /// As a former program left it.
    pub(super) fn inherited(errno: Option<i32>) -> Self {
        Self { failed: errno.map(|errno| StoreError { errno }) }
    }

    pub(super) fn errno(&self) -> Option<i32> {
        self.failed.map(|error| error.errno)
    }

    /// The result to report for `operation`, which ended with `result`.
    pub(super) fn filter(&mut self, operation: &StoreOp, result: Result<(), StoreError>) -> Result<(), StoreError> {
        if !operation.is_durable() {
            return result;
        }
        if let Err(error) = result {
            if matches!(operation, StoreOp::Flush) || !is_clean_refusal(error) {
                self.failed.get_or_insert(error);
            }
            return Err(error);
        }
        self.failed.map_or(Ok(()), Err)
    }
}

/// Errors of a write that leave everything acknowledged before as it was.
fn is_clean_refusal(error: StoreError) -> bool {
    matches!(error.errno, libc::ENOSPC | libc::EDQUOT | libc::EINVAL | libc::EROFS | libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: StoreOp = StoreOp::Write { offset: 0, len: 512, durable: false };
    const DURABLE: StoreOp = StoreOp::Write { offset: 0, len: 512, durable: true };

    #[test]
    fn a_failed_flush_fails_every_later_flush_and_durable_write_but_no_plain_write() {
        let mut latch = FlushLatch::default();
        assert_eq!(latch.filter(&StoreOp::Flush, Ok(())), Ok(()));
        assert_eq!(latch.filter(&StoreOp::Flush, Err(StoreError::IO)), Err(StoreError::IO));
        assert_eq!(latch.filter(&StoreOp::Flush, Ok(())), Err(StoreError::IO));
        assert_eq!(latch.filter(&DURABLE, Ok(())), Err(StoreError::IO));
        assert_eq!(latch.filter(&WRITE, Ok(())), Ok(()));
    }

    #[test]
    fn a_durable_write_that_found_no_space_spoils_nothing() {
        let mut latch = FlushLatch::default();
        let full = StoreError { errno: libc::ENOSPC };
        assert_eq!(latch.filter(&DURABLE, Err(full)), Err(full));
        assert_eq!(latch.filter(&StoreOp::Flush, Ok(())), Ok(()));
        assert_eq!(latch.filter(&DURABLE, Err(StoreError::IO)), Err(StoreError::IO));
        assert_eq!(latch.filter(&StoreOp::Flush, Ok(())), Err(StoreError::IO));
    }
}
