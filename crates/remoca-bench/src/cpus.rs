//! Which processors of the machine run what.

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Processors for the client, for what is measured, and for what that uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus {
    pub client: usize,
    pub server: usize,
    /// That of the server, unless there is a third processor.
    pub behind: usize,
}

impl Cpus {
    /// Chooses among the processors allowed for this thread: the first for the client and the last for the server.
    pub fn choose() -> Result<Self> {
        let allowed = sched_getaffinity(None)?;
        Self::among((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
    }

    fn among(allowed: Vec<usize>) -> Result<Self> {
        let (client, server) = (*allowed.first().context("no processor")?, *allowed.last().context("no processor")?);
        let behind = if allowed.len() > 2 { allowed[allowed.len() - 2] } else { server };
        Ok(Self { client, server, behind })
    }
}

/// Moves this thread, and what it starts from now on, to one processor.
pub fn pin_this_thread(cpu: usize) -> Result<()> {
    Ok(sched_setaffinity(None, &one(cpu))?)
}

/// Returns a set that contains only `cpu`.
pub fn one(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_share_a_processor_only_if_they_must() {
        let cpus = |client, server, behind| Cpus { client, server, behind };
        assert_eq!(Cpus::among(vec![3]).unwrap(), cpus(3, 3, 3));
        assert_eq!(Cpus::among(vec![0, 1]).unwrap(), cpus(0, 1, 1));
        assert_eq!(Cpus::among(vec![0, 2, 5, 7]).unwrap(), cpus(0, 7, 5));
        assert!(Cpus::among(vec![]).is_err());
    }
}
