//! The resource that is divided. This is the only place that names it: which sizes of a status count, and which command changes them.

use remoca_protocol::control::{Command, Status};

/// Memory that is divided among VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// The cache of each VM process, whoever's memory it is in.
    Cache,
}

impl Resource {
    /// Returns the name for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
        }
    }

    /// Returns the wanted and the granted size, in bytes.
    #[must_use]
    pub fn sizes(self, status: &Status) -> (u64, u64) {
        match self {
            Self::Cache => (status.cache.wanted_bytes, status.cache.granted_bytes),
        }
    }

    /// Returns why the size cannot be changed, or `None` if it can.
    #[must_use]
    pub fn fixed(self, status: &Status) -> Option<String> {
        let has_disks = status.migration.as_ref().is_none_or(|migration| migration.has_disks);
        match self {
            Self::Cache if status.server.is_none() && status.servers.is_empty() => {
                Some("it has no memory server".into())
            }
            Self::Cache if !has_disks => Some("its disks are with another process".into()),
            Self::Cache if !status.cache.enabled => Some("its cache is off".into()),
            Self::Cache => None,
        }
    }

    /// Returns the command that gives the resource this size.
    #[must_use]
    pub fn command(self, bytes: u64) -> Command {
        match self {
            Self::Cache => {
                let cache_bytes = Some(bytes);
                Command::Set { cache_bytes, local_bytes: None, enabled: None, servers: None, at_once: false }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::status;

    #[test]
    fn a_cache_that_cannot_change_says_why() {
        let good = status("a", 1 << 20, 1 << 20);
        assert_eq!(Resource::Cache.fixed(&good), None);
        let mut other = good.clone();
        other.cache.enabled = false;
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("its cache is off"));
        let other = Status { server: None, servers: Vec::new(), ..good };
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("it has no memory server"));
    }

    #[test]
    fn the_command_is_that_of_remoca_set() {
        let line = Resource::Cache.command(1 << 20).line().unwrap();
        assert_eq!(line, b"{\"op\":\"set\",\"cache_bytes\":1048576,\"enabled\":null,\"servers\":null}\n");
    }
}
