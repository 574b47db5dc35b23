//! The resource that is divided. This is the only place that names it: which sizes of a status count, which command changes them, and
//! which points of a curve they are.
//!
//! All tiers of a VM are one queue, with the local tier in front (decision 0045). So the local tier of N bytes answers what a cache of N
//! bytes would, and N bytes at memory servers behind a local tier of L answer what is between L and L + N.

use crate::curve::LATENCY_US_MAX;
use remoca_io::show::show_size;
use remoca_protocol::control::{CURVE_REACH_BYTES, Command, CurveGrid, CurveStatus, Status};
use serde::{Deserialize, Serialize};

/// Share of the reads that may miss where a curve ends before what a VM has: what is beyond is worth no more than that.
const BEYOND_MAX: f64 = 0.01;

/// Memory that is divided among VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// The cache of each VM process at its memory servers, without the local tier.
    #[default]
    Cache,
    /// The local tier of each VM process: memory of this host.
    Local,
}

impl Resource {
    /// Returns the name for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Local => "local tier",
        }
    }

    /// Returns the wanted and the granted size, in bytes. What servers may have granted counts as granted.
    #[must_use]
    pub fn sizes(self, status: &Status) -> (u64, u64) {
        let cache = &status.cache;
        match self {
            Self::Cache => (cache.wanted_bytes, cache.granted_bytes.max(cache.granted_at_most_bytes)),
            Self::Local => (cache.local_wanted_bytes, cache.local_granted_bytes.max(cache.local_granted_at_most_bytes)),
        }
    }

    /// Returns why the size cannot be changed, or `None` if it can.
    #[must_use]
    pub fn fixed(self, status: &Status) -> Option<String> {
        let cache = &status.cache;
        let is_local = |endpoint: &str| cache.local_wanted_bytes > 0 && cache.local_server.as_deref() == Some(endpoint);
        let why = match self {
            // Meanwhile it has no memory server either.
            _ if !status.has_disks() => "its disks are with another process",
            _ if status.server.is_none() && status.servers.is_empty() => "it has no memory server",
            _ if !cache.enabled => "its cache is off",
            Self::Cache if !status.servers.is_empty() && status.servers.iter().all(|s| is_local(&s.endpoint)) => {
                "it has no memory server but that of its local tier"
            }
            Self::Local if cache.local_server.is_none() && cache.local_wanted_bytes == 0 => {
                let name = &status.name;
                return Some(format!(
                    "its process names no server for a local tier: `remoca upgrade {name}` brings an older one to this version"
                ));
            }
            Self::Cache | Self::Local => return None,
        };
        Some(why.into())
    }

    /// Returns the socket of the server that would be asked for the first memory of a VM that has none; `None` if it has some, or
    /// what is divided is elsewhere.
    #[must_use]
    pub fn first_server(self, status: &Status) -> Option<&str> {
        let is_first = self == Self::Local && self.sizes(status) == (0, 0);
        status.cache.local_server.as_deref().filter(|_| is_first)?.strip_prefix("local:")
    }

    /// Returns the sizes at which the curve of a VM is asked for, if `grid` has those that it could get.
    #[must_use]
    pub fn grid(self, status: &Status, grid: CurveGrid) -> CurveGrid {
        match self {
            Self::Cache => CurveGrid { first_bytes: status.cache.local_granted_bytes, ..grid },
            Self::Local => grid,
        }
    }

    /// Checks that a curve says what what is divided would answer.
    ///
    /// # Errors
    /// Why it does not.
    pub fn says_enough(self, status: &Status, curve: &CurveStatus) -> Result<(), String> {
        let cache = &status.cache;
        let has_local = self == Self::Local || cache.local_wanted_bytes > 0;
        let front = if self == Self::Cache { cache.local_granted_bytes } else { 0 };
        let (wanted, granted) = self.sizes(status);
        let reach = curve.reach_bytes.unwrap_or(CURVE_REACH_BYTES);
        let beyond = curve.points.last().map_or(1., |point| point.miss_ratio);
        if front.saturating_add(wanted.max(granted)) > reach && beyond > BEYOND_MAX {
            let reach = show_size(reach);
            return Err(format!(
                "its curve ends at {reach} so far, and it has more: by that curve the rest would be worth nothing"
            ));
        }
        match has_local && curve.learns_from == "reads" {
            true => Err("nothing reports evictions, and without that its tiers are not one queue".into()),
            false => Ok(()),
        }
    }

    /// Returns the time that a read is shorter by if what is divided answers it, as far as the pools tell. Behind a local tier there are
    /// memory servers or the disk; the faster of them counts.
    #[must_use]
    pub fn saved_us(self, status: &Status) -> Option<f64> {
        if self == Self::Cache {
            return None;
        }
        let of_pools = |is_local: bool| {
            let pools = status.pools.iter().filter(|pool| pool.is_local_tier == is_local);
            pools.filter_map(|pool| pool.latency_us).filter(|us| (0. ..=LATENCY_US_MAX).contains(us)).reduce(f64::min)
        };
        Some(of_pools(false)? - of_pools(true)?)
    }

    /// Returns the blocks that what is divided has answered, and those read that it has not.
    #[must_use]
    pub fn answered(self, status: &Status) -> (u64, u64) {
        let counter = |name: &str| status.counters.get(name).copied().unwrap_or_default();
        let hits = counter("hit_blocks");
        let others = counter("missed_blocks").saturating_add(counter("covered_blocks"));
        match self {
            Self::Cache => (hits, others),
            Self::Local => {
                let pools = status.pools.iter().filter(|pool| pool.is_local_tier);
                let local = pools.fold(0_u64, |sum, pool| sum.saturating_add(pool.hits));
                (local, others.saturating_add(hits.saturating_sub(local)))
            }
        }
    }

    /// Returns the command that gives the resource this size.
    #[must_use]
    pub fn command(self, bytes: u64) -> Command {
        let of = |resource: Self| (self == resource).then_some(bytes);
        Command::Set {
            cache_bytes: of(Self::Cache),
            local_bytes: of(Self::Local),
            enabled: None,
            servers: None,
            at_once: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GRID, curve_status, status};
    use serde_json::json;

    const MIB: u64 = 1 << 20;

    /// Returns the status of a process with a local tier.
    fn tiered(local: u64) -> Status {
        let mut status = status("a", 8 * MIB, 8 * MIB);
        (status.cache.local_wanted_bytes, status.cache.local_granted_bytes) = (local, local);
        status.cache.local_server = Some("local:/run/m.sock".into());
        let pool = |server: &str, is_local: bool, hits: u64, us: f64| {
            json!({"server": server, "state": "connected", "is_mapped": is_local, "is_local_tier": is_local, "generation": "1",
                "granted_bytes": local, "hits": hits, "latency_us": us, "pages_sent": 0, "pages_requested": 0,
                "pages_received": 0, "pages_taken_back": 0})
        };
        let pools = json!([pool("unix:/s", false, 30, 100.), pool("local:/run/m.sock", true, 70, 2.)]);
        status.pools = serde_json::from_value(pools).unwrap();
        status.counters = [("hit_blocks".to_owned(), 100), ("missed_blocks".to_owned(), 9)].into();
        status
    }

    #[test]
    fn what_a_server_may_have_granted_counts() {
        let mut status = tiered(2 * MIB);
        assert_eq!(Resource::Local.sizes(&status), (2 * MIB, 2 * MIB));
        status.cache.local_granted_at_most_bytes = 3 * MIB;
        status.cache.granted_at_most_bytes = 9 * MIB;
        assert_eq!(Resource::Local.sizes(&status), (2 * MIB, 3 * MIB));
        assert_eq!(Resource::Cache.sizes(&status), (8 * MIB, 9 * MIB));
    }

    #[test]
    fn a_cache_that_cannot_change_says_why() {
        let good = status("a", 1 << 20, 1 << 20);
        assert_eq!(Resource::Cache.fixed(&good), None);
        let mut other = good.clone();
        other.cache.enabled = false;
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("its cache is off"));
        let mut other = good.clone();
        let elsewhere = json!({"has_disks": false, "incoming": null, "peer": null, "news": null});
        other.migration = serde_json::from_value(elsewhere).unwrap();
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("its disks are with another process"));
        // It leaves its servers when it hands its disks over.
        (other.server, other.servers) = (None, Vec::new());
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("its disks are with another process"));
        let other = Status { server: None, servers: Vec::new(), ..good };
        assert_eq!(Resource::Cache.fixed(&other).as_deref(), Some("it has no memory server"));
        let only = json!([{"endpoint": "local:/run/m.sock", "in_use": true, "possible_bytes": null, "answered_s_ago": null,
            "error": null}]);
        let only = Status { servers: serde_json::from_value(only).unwrap(), ..tiered(MIB) };
        assert!(Resource::Cache.fixed(&only).unwrap().ends_with("but that of its local tier"));
        assert_eq!(Resource::Local.fixed(&only), None);
    }

    #[test]
    fn a_process_without_a_local_tier_names_the_server_of_its_first() {
        let none = tiered(0);
        assert_eq!((Resource::Local.fixed(&none), Resource::Local.first_server(&none)), (None, Some("/run/m.sock")));
        assert_eq!(Resource::Cache.first_server(&none), None);
        assert_eq!(Resource::Local.first_server(&tiered(MIB)), None);
        let older = status("a", MIB, MIB);
        assert!(Resource::Local.fixed(&older).unwrap().contains("`remoca upgrade a` brings"));
        assert_eq!(Resource::Cache.fixed(&older), None);
    }

    #[test]
    fn a_read_that_is_saved_is_one_of_the_fastest_other_pool_with_a_time_that_can_be() {
        let mut status = tiered(MIB);
        let mut other = status.pools[0].clone();
        other.latency_us = Some(40.);
        status.pools.push(other);
        assert_eq!(Resource::Local.saved_us(&status), Some(38.));
        for us in [-1., f64::NAN, 1.1e9] {
            status.pools[2].latency_us = Some(us);
            assert_eq!(Resource::Local.saved_us(&status), Some(98.), "{us}");
        }
        status.pools[1].latency_us = None;
        assert_eq!(Resource::Local.saved_us(&status), None);
    }

    #[test]
    fn the_command_is_that_of_remoca_set() {
        let line = Resource::Cache.command(1 << 20).line().unwrap();
        assert_eq!(line, b"{\"op\":\"set\",\"cache_bytes\":1048576,\"enabled\":null,\"servers\":null}\n");
        let line = String::from_utf8(Resource::Local.command(1 << 20).line().unwrap()).unwrap();
        assert!(line.contains("\"cache_bytes\":null,\"local_bytes\":1048576,"), "{line}");
    }

    #[test]
    fn each_tier_has_its_sizes_hits_and_points_of_the_curve() {
        let status = tiered(6 * MIB);
        let (remote, local) = (Resource::Cache, Resource::Local);
        assert_eq!((remote.sizes(&status), local.sizes(&status)), ((8 * MIB, 8 * MIB), (6 * MIB, 6 * MIB)));
        assert_eq!((remote.answered(&status), local.answered(&status)), ((100, 9), (70, 39)));
        assert_eq!((remote.grid(&status, GRID).first_bytes, local.grid(&status, GRID)), (6 * MIB, GRID));
        assert_eq!((remote.saved_us(&status), local.saved_us(&status)), (None, Some(98.)));
        let mut curve = curve_status(|_| 0.5);
        assert!(remote.says_enough(&status, &curve).is_ok() && local.says_enough(&status, &curve).is_ok());
        let mut large = tiered(6 * MIB);
        // It is on its way.
        large.cache.wanted_bytes = CURVE_REACH_BYTES;
        assert!(
            remote.says_enough(&large, &curve).unwrap_err().contains("ends at 64G")
                && local.says_enough(&large, &curve).is_ok()
        );
        curve.reach_bytes = Some(CURVE_REACH_BYTES + 6 * MIB);
        assert!(remote.says_enough(&large, &curve).is_ok());
        curve.reach_bytes = Some(CURVE_REACH_BYTES + 5 * MIB);
        assert!(remote.says_enough(&large, &curve).is_err());
        // Whatever is beyond its end, little can be.
        assert!(remote.says_enough(&large, &curve_status(|_| 0.01)).is_ok());
        curve.reach_bytes = None;
        large.cache.local_granted_bytes = CURVE_REACH_BYTES + MIB;
        assert!(local.says_enough(&large, &curve).is_err());
        curve.learns_from = "reads".into();
        for (resource, has_local, is_enough) in [(remote, 0, true), (remote, MIB, false), (local, MIB, false)] {
            assert_eq!(resource.says_enough(&tiered(has_local), &curve).is_ok(), is_enough);
        }
    }
}
