//! A failed flush stays failed.
//!
//! After a failed fsync the kernel considers the lost pages clean, so that the next fsync succeeds although the data
//! are gone. Each store passes its results through one latch; the first failed flush or durable write decides all later
//! ones. A write that was refused for lack of space does not latch, because no acknowledged data are lost. A failed
//! sync after a write does latch, whatever its error, because the error may concern writes that were acknowledged
//! before.

use super::StoreError;

#[derive(Debug, Default)]
pub(super) struct FlushLatch {
    failed: Option<StoreError>,
}

/// The part of an operation to which its error belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailedAt {
    /// The operation's own bytes.
    Body,
    /// The sync that makes it and all earlier writes durable.
    Sync,
}

impl FlushLatch {
    /// Creates a latch that has seen this error, or none if `errno` is `None`.
    pub(super) fn with(errno: Option<i32>) -> Self {
        Self { failed: errno.map(|errno| StoreError { errno }) }
    }

    pub(super) fn errno(&self) -> Option<i32> {
        self.failed.map(|error| error.errno)
    }

    /// Latches `error`, unless an earlier error is latched. Called directly for errors that belong to no operation,
    /// such as a lost NBD connection.
    pub(super) fn fail(&mut self, error: StoreError) {
        self.failed.get_or_insert(error);
    }

    /// Returns the result to report for an operation that ended with `result`; an error belongs to the part `at`.
    /// `is_durable` means that the operation was to be durable when it ended, for whatever reason.
    pub(super) fn filter(
        &mut self,
        is_durable: bool,
        at: FailedAt,
        result: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        if let Err(error) = result {
            if at == FailedAt::Sync || is_durable && !is_clean_refusal(error) {
                self.fail(error);
            }
            return Err(error);
        }
        self.failed.filter(|_| is_durable).map_or(Ok(()), Err)
    }
}

/// Returns whether a write that fails with this error has left everything acknowledged before unchanged.
pub(super) fn is_clean_refusal(error: StoreError) -> bool {
    matches!(error.errno, libc::ENOSPC | libc::EDQUOT | libc::EINVAL | libc::EROFS | libc::ENOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: bool = false;
    const DURABLE: bool = true;
    const FULL: StoreError = StoreError { errno: libc::ENOSPC };

    /// Returns the latch's results for a flush, a durable write and a plain write that succeeded.
    fn outcomes(latch: &mut FlushLatch) -> [Result<(), StoreError>; 3] {
        let mut outcome = |is_durable, at| latch.filter(is_durable, at, Ok(()));
        [outcome(DURABLE, FailedAt::Sync), outcome(DURABLE, FailedAt::Body), outcome(WRITE, FailedAt::Body)]
    }

    #[test]
    fn a_failed_flush_fails_every_later_flush_and_durable_write_but_no_plain_write() {
        let mut latch = FlushLatch::default();
        assert_eq!(outcomes(&mut latch), [Ok(()); 3]);
        assert_eq!(latch.filter(DURABLE, FailedAt::Sync, Err(StoreError::IO)), Err(StoreError::IO));
        assert_eq!(latch.filter(DURABLE, FailedAt::Sync, Err(FULL)), Err(FULL));
        assert_eq!(outcomes(&mut latch), [Err(StoreError::IO), Err(StoreError::IO), Ok(())], "the first one decides");
    }

    #[test]
    fn a_durable_write_that_found_no_space_spoils_nothing() {
        let mut latch = FlushLatch::default();
        assert_eq!(latch.filter(DURABLE, FailedAt::Body, Err(FULL)), Err(FULL));
        assert_eq!(outcomes(&mut latch), [Ok(()); 3]);
        assert_eq!(latch.filter(DURABLE, FailedAt::Body, Err(StoreError::IO)), Err(StoreError::IO));
        assert_eq!(latch.errno(), Some(libc::EIO));
    }

    #[test]
    fn a_sync_that_found_no_space_latches_like_any_other() {
        for is_durable in [DURABLE, WRITE] {
            let mut latch = FlushLatch::default();
            assert_eq!(latch.filter(is_durable, FailedAt::Sync, Err(FULL)), Err(FULL));
            assert_eq!(outcomes(&mut latch), [Err(FULL), Err(FULL), Ok(())], "{is_durable}");
        }
    }
}
