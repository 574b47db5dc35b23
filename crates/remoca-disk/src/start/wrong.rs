//! The mark of errors that only the operator can mend.

/// Options that contradict each other: no later start with the same ones can succeed.
#[derive(Debug, thiserror::Error)]
#[error("these options cannot be used")]
pub struct WrongOptions;
