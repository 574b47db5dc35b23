//! The cache as the options say, or as `remoca set` left it: each setting holds until its own option changes (decision 0032).

use super::inherited::Inherited;
use super::options::Options;
use crate::driver::cache_pages;
use crate::link::check_list;
use crate::state::{FormerSettings, settings_at, stable_hash};
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;

/// Part of [`hash_of`] that is about the servers.
const SERVERS_HASH: u64 = 0xffff_ffff;

/// Checks the options of the cache before anything is opened, and returns its size.
pub(super) fn checked_cache(options: &Options) -> Result<PageCount, String> {
    if options.servers.is_empty() {
        return Ok(PageCount(0));
    }
    check_list(&options.servers)?;
    cache_pages(options.cache)
}

/// Returns the servers, the size of the cache, and whether it is on: as the options say, or as `remoca set` left them.
pub(super) fn cache_settings(
    options: &Options,
    size: PageCount,
    are_away: bool,
    inherited: Option<&Inherited>,
) -> (Vec<Endpoint>, PageCount, bool) {
    if options.servers.is_empty() {
        return (Vec::new(), PageCount(0), false);
    }
    let set = match inherited.and_then(Inherited::cache_settings) {
        None if !are_away => options.state.as_deref().and_then(settings_at),
        set => set,
    };
    let as_said = (options.servers.clone(), size, true);
    match set {
        Some(set) => as_set(set, options, as_said),
        None => as_said,
    }
}

/// Returns what `remoca set` left, except what the options have changed since.
fn as_set(
    set: FormerSettings,
    options: &Options,
    as_said: (Vec<Endpoint>, PageCount, bool),
) -> (Vec<Endpoint>, PageCount, bool) {
    // Each is as it was set until its own option changes. A former program that says nothing had the same options.
    let is_as_before = |former: u64| former == hash_of_all(options);
    let changed = set.options.filter(|former| !is_as_before(*former)).map_or(0, |former| former ^ hash_of(options));
    let servers = if changed & SERVERS_HASH == 0 { set.servers } else { as_said.0 };
    let (size, enabled) = if changed & !SERVERS_HASH == 0 { (set.cache, set.enabled) } else { (as_said.1, as_said.2) };
    (servers, size, enabled)
}

/// Returns the hash that former programs had in place of [`hash_of`].
fn hash_of_all(options: &Options) -> u64 {
    let servers = options.servers.iter().map(Endpoint::to_string);
    let texts: Vec<_> = [options.cache.to_string()].into_iter().chain(servers).collect();
    stable_hash(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns a hash of the options that `remoca set` can overrule: that of the servers below that of the cache's size.
pub(super) fn hash_of(options: &Options) -> u64 {
    let servers: Vec<_> = options.servers.iter().map(Endpoint::to_string).collect();
    let servers = stable_hash(&servers.iter().map(String::as_str).collect::<Vec<_>>());
    stable_hash(&[&options.cache.to_string()]) << 32 | servers & SERVERS_HASH
}

#[cfg(test)]
mod tests {
    use super::super::options::PortOptions;
    use super::*;
    use remoca_core::rules::Rules;
    use std::time::Duration;

    fn options(servers: &[&str], cache: u64) -> Options {
        Options {
            name: "vm".into(),
            is_named: true,
            control: "/c".into(),
            state: None,
            disks: Vec::new(),
            fd: None,
            port: PortOptions::None,
            nbd: Vec::new(),
            nbd_settle: Duration::ZERO,
            socket_group: None,
            guest_memory: 0,
            guest_memory_max: 0,
            servers: servers.iter().map(|server| server.parse().unwrap()).collect(),
            cache,
            incoming: None,
            buffers: 0,
            trace: None,
            uses_io_uring: false,
            hedges: true,
            looks_at_frames: true,
            notice: None,
            rules: Rules::default(),
        }
    }

    /// A program before this one, with one hash for all of its options, hands over what was set in it.
    #[test]
    fn what_was_set_under_a_former_program_holds_until_an_option_changes() {
        const SAID: [&str; 2] = ["tcp:a:1", "unix:/b"];
        let before = options(&SAID, 4096);
        let servers: Vec<Endpoint> = vec!["tcp:c:1".parse().unwrap()];
        let hashes = [Some(hash_of_all(&before)), Some(hash_of(&before)), None];
        let set = |options| FormerSettings { options, servers: servers.clone(), cache: PageCount(9), enabled: false };
        let now = |options: &Options, former| {
            let as_said = (options.servers.clone(), PageCount(1), true);
            as_set(set(former), options, as_said)
        };
        for former in hashes {
            assert_eq!(now(&before, former), (servers.clone(), PageCount(9), false), "{former:?}");
        }
        // One hash does not tell which option has changed, so all are as they are said now.
        let larger = options(&SAID, 8192);
        assert_eq!(now(&larger, hashes[0]), (larger.servers.clone(), PageCount(1), true));
        assert_eq!(now(&larger, hashes[1]), (servers.clone(), PageCount(1), true));
        let fewer = options(&SAID[..1], 4096);
        assert_eq!(now(&fewer, hashes[0]), (fewer.servers.clone(), PageCount(1), true));
        assert_eq!(now(&fewer, hashes[1]), (fewer.servers.clone(), PageCount(9), false));
    }
}
