//! What the operator says about one VM: the table `[memory]` of its file.

/// Limits of one VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub minimum_bytes: u64,
    /// `None` for all of the total.
    pub maximum_bytes: Option<u64>,
    /// Share of the memory by weight alone, against the weights of the others.
    pub weight: f64,
    /// Greatest loss against the size by weight, as a share of the miss ratio there; infinite without a bound.
    pub bound: f64,
    /// Memory that its guest has at least; `None` for half of what it had at boot.
    pub guest_minimum_bytes: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { minimum_bytes: 0, maximum_bytes: None, weight: 1., bound: 0.25, guest_minimum_bytes: None }
    }
}
