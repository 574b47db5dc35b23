//! The cache as the options say, or as `remoca set` left it: each setting holds until its own option changes (decision 0032).

use super::inherited::Inherited;
use super::options::Options;
use crate::driver::{TierSizes, cache_pages, local_pages};
use crate::endpoints::Endpoints;
use crate::state::{FormerSettings, settings_at, stable_hash};
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;

/// Part of [`hash_of`] that is about the servers.
const SERVERS_HASH: u64 = 0xffff_ffff;

/// The servers, and the cache on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheSettings {
    pub(super) endpoints: Endpoints,
    pub(super) sizes: TierSizes,
    pub(super) enabled: bool,
}

impl CacheSettings {
    /// Returns the sizes that are wanted now.
    pub(super) fn wanted(&self) -> TierSizes {
        if self.enabled { self.sizes } else { TierSizes::default() }
    }
}

/// Checks the options of the cache before anything is opened, and returns the sizes.
pub(super) fn checked_cache(options: &Options) -> Result<TierSizes, String> {
    let endpoints = endpoints(options);
    if endpoints.are_none() {
        return Ok(TierSizes::default());
    }
    endpoints.check()?;
    if !matches!(options.local_server, Endpoint::Local(_)) {
        return Err(format!("the server of the local tier is local:PATH, and not {}", options.local_server));
    }
    let cache = if options.servers.is_empty() { PageCount(0) } else { cache_pages(options.cache)? };
    TierSizes { cache, local: local_pages(options.local)? }.checked()
}

fn endpoints(options: &Options) -> Endpoints {
    let local = (options.local > 0).then(|| options.local_server.clone());
    Endpoints { listed: options.servers.clone(), local }
}

/// Returns the servers, the sizes of the cache, and whether it is on: as the options say, or as `remoca set` left them.
pub(super) fn cache_settings(
    options: &Options,
    sizes: TierSizes,
    are_away: bool,
    inherited: Option<&Inherited>,
) -> CacheSettings {
    let as_said = CacheSettings { endpoints: endpoints(options), sizes, enabled: true };
    if as_said.endpoints.are_none() {
        return CacheSettings::default();
    }
    let set = match inherited.and_then(Inherited::cache_settings) {
        None if !are_away => options.state.as_deref().and_then(settings_at),
        set => set,
    };
    match set {
        Some(set) => as_set(set, options, as_said),
        None => as_said,
    }
}

/// Returns what `remoca set` left, except what the options have changed since.
fn as_set(set: FormerSettings, options: &Options, as_said: CacheSettings) -> CacheSettings {
    // Each is as it was set until its own option changes. A former program that says nothing had the same options.
    let is_as_before = |former: u64| former == hash_of_all(options);
    let changed = set.options.filter(|former| !is_as_before(*former)).map_or(0, |former| former ^ hash_of(options));
    let mut settings = as_said.clone();
    if changed & SERVERS_HASH == 0 && !set.endpoints.listed.is_empty() {
        settings.endpoints.listed = set.endpoints.listed;
    }
    if changed & !SERVERS_HASH == 0 {
        // A process without listed servers had no size for them.
        let cache = if set.cache.0 > 0 { set.cache } else { settings.sizes.cache };
        settings.sizes = TierSizes { cache, local: set.local.unwrap_or(settings.sizes.local) };
        settings.enabled = set.enabled;
        settings.endpoints.local = settings.endpoints.local.or(set.endpoints.local);
    }
    if settings.endpoints.listed.is_empty() {
        settings.sizes.cache = PageCount(0);
    }
    match settings.endpoints.check() {
        Ok(()) => settings,
        Err(error) => {
            tracing::warn!("what was set before does not go with the options now, which count: {error}");
            as_said
        }
    }
}

/// Returns the hash that former programs had in place of [`hash_of`].
fn hash_of_all(options: &Options) -> u64 {
    let servers = options.servers.iter().map(Endpoint::to_string);
    let texts: Vec<_> = [options.cache.to_string()].into_iter().chain(servers).collect();
    stable_hash(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns a hash of the options that `remoca set` can overrule: that of the servers below that of the sizes. Programs without
/// a local tier had the same one.
pub(super) fn hash_of(options: &Options) -> u64 {
    let servers: Vec<_> = options.servers.iter().map(Endpoint::to_string).collect();
    let servers = stable_hash(&servers.iter().map(String::as_str).collect::<Vec<_>>());
    let mut sizes = vec![options.cache.to_string()];
    if options.local > 0 {
        sizes.extend([options.local.to_string(), options.local_server.to_string()]);
    }
    let sizes: Vec<_> = sizes.iter().map(String::as_str).collect();
    stable_hash(&sizes) << 32 | servers & SERVERS_HASH
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::options::PortOptions;
    use super::*;
    use remoca_core::rules::Rules;
    use std::time::Duration;

    pub fn options(servers: &[&str], cache: u64) -> Options {
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
            local: 0,
            local_server: "local:/l".parse().unwrap(),
            incoming: None,
            buffers: 0,
            trace: None,
            has_predecessor: false,
            uses_io_uring: false,
            poll_time_max: Duration::ZERO,
            hedges: true,
            looks_at_frames: true,
            notice: None,
            keeps_curves: true,
            rules: Rules::default(),
        }
    }

    fn said(options: &Options) -> CacheSettings {
        let sizes = TierSizes { cache: PageCount(1), local: PageCount(if options.local > 0 { 3 } else { 0 }) };
        CacheSettings { endpoints: endpoints(options), sizes, enabled: true }
    }

    /// A program before this one, with one hash for all of its options, hands over what was set in it.
    #[test]
    fn what_was_set_under_a_former_program_holds_until_an_option_changes() {
        const SAID: [&str; 2] = ["tcp:a:1", "unix:/b"];
        let before = options(&SAID, 4096);
        let set_servers = Endpoints::from(vec!["tcp:c:1".parse().unwrap()]);
        let hashes = [Some(hash_of_all(&before)), Some(hash_of(&before)), None];
        let set = |options| FormerSettings {
            options,
            endpoints: set_servers.clone(),
            cache: PageCount(9),
            local: None,
            enabled: false,
        };
        let now = |options: &Options, former| as_set(set(former), options, said(options));
        let as_set_before = CacheSettings {
            endpoints: set_servers.clone(),
            sizes: TierSizes { cache: PageCount(9), local: PageCount(0) },
            enabled: false,
        };
        for former in hashes {
            assert_eq!(now(&before, former), as_set_before, "{former:?}");
        }
        // One hash does not tell which option has changed, so all are as they are said now.
        let larger = options(&SAID, 8192);
        assert_eq!(now(&larger, hashes[0]), said(&larger));
        assert_eq!(now(&larger, hashes[1]), CacheSettings { endpoints: set_servers.clone(), ..said(&larger) });
        let fewer = options(&SAID[..1], 4096);
        assert_eq!(now(&fewer, hashes[0]), said(&fewer));
        assert_eq!(now(&fewer, hashes[1]), CacheSettings { endpoints: endpoints(&fewer), ..as_set_before.clone() });
        // A local tier is new: it counts with the size of the cache.
        let local = Options { local: 1 << 20, ..options(&SAID, 4096) };
        assert_eq!(now(&local, hashes[1]).sizes, said(&local).sizes);
        assert_eq!(now(&local, hashes[1]).endpoints.local, Some(local.local_server.clone()));
    }

    #[test]
    fn the_size_of_the_local_tier_holds_as_it_was_set_until_its_option_changes() {
        let before = options(&["tcp:a:1"], 4096);
        let server: Endpoint = "local:/l".parse().unwrap();
        let set = |options: &Options, local| FormerSettings {
            options: Some(hash_of(options)),
            endpoints: Endpoints { local: Some(server.clone()), ..endpoints(options) },
            cache: PageCount(9),
            local: Some(PageCount(local)),
            enabled: true,
        };
        // It was set at run time, without an option.
        let now = as_set(set(&before, 5), &before, said(&before));
        assert_eq!((now.sizes.local, now.endpoints.local.as_ref()), (PageCount(5), Some(&server)));
        let with = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
        assert_eq!(as_set(set(&with, 0), &with, said(&with)).sizes.local, PageCount(0));
        let other = Options { local: 2 << 20, ..options(&["tcp:a:1"], 4096) };
        assert_eq!(as_set(set(&with, 0), &other, said(&other)).sizes, said(&other).sizes);
        // With no other server, too.
        let alone = Options { local: 1 << 20, ..options(&[], 4096) };
        let now = as_set(set(&alone, 5), &alone, said(&alone));
        assert_eq!((now.sizes.local, now.endpoints), (PageCount(5), endpoints(&alone)));
    }

    /// A process whose options and settings do not go together starts all the same: as its options say.
    #[test]
    fn options_count_where_what_was_set_does_not_go_with_them() {
        let former = |options: &Options, servers: &[&str], local: Option<u32>| FormerSettings {
            options: Some(hash_of(options)),
            endpoints: Endpoints {
                listed: servers.iter().map(|server| server.parse().unwrap()).collect(),
                local: local.map(|_| "local:/l".parse().unwrap()),
            },
            cache: PageCount(9),
            local: local.map(PageCount),
            enabled: true,
        };
        let with = |local, options| Options { local, ..options };
        let remote = options(&["tcp:a:1"], 4096);
        // `set --server local:/m`, and then a local tier in the options.
        let now = with(1 << 20, options(&["tcp:a:1"], 4096));
        assert_eq!(as_set(former(&remote, &["local:/m"], None), &now, said(&now)), said(&now));
        let many: Vec<String> = (0..16).map(|port| format!("tcp:c:{}", port + 1)).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert_eq!(as_set(former(&remote, &many, None), &now, said(&now)), said(&now));
        // `set --local`, and then a local address in the list of the options.
        let now = options(&["local:/m"], 4096);
        assert_eq!(as_set(former(&remote, &["tcp:a:1"], Some(5)), &now, said(&now)), said(&now));
    }

    #[test]
    fn the_cache_of_listed_servers_has_a_size_exactly_if_there_are_some() {
        let alone = Options { local: 1 << 20, ..options(&[], 4096) };
        let both = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
        let former = |options: &Options, cache| FormerSettings {
            options: Some(hash_of(options)),
            endpoints: endpoints(options),
            cache: PageCount(cache),
            local: Some(PageCount(5)),
            enabled: true,
        };
        // Servers that are new in the options have the size that the options say.
        let sizes = |cache| TierSizes { cache: PageCount(cache), local: PageCount(5) };
        assert_eq!(as_set(former(&alone, 0), &both, said(&both)).sizes, sizes(1));
        assert_eq!(as_set(former(&both, 9), &both, said(&both)).sizes, sizes(9));
        assert_eq!(as_set(former(&both, 9), &alone, said(&alone)).sizes, sizes(0));
    }

    #[test]
    fn servers_that_do_not_go_together_are_refused() {
        let with = |servers: &[&str], local_server: &str| {
            let local_server = local_server.parse().unwrap();
            checked_cache(&Options { local: 1 << 20, local_server, ..options(servers, 8192) })
        };
        let sizes = |cache| Ok(TierSizes { cache: PageCount(cache), local: PageCount(256) });
        assert_eq!(with(&["tcp:a:1"], "local:/l"), sizes(2));
        assert_eq!(with(&[], "local:/l"), sizes(0));
        assert!(with(&["local:/m"], "local:/l").unwrap_err().contains("beside a local tier"));
        assert!(with(&["tcp:a:1"], "unix:/l").unwrap_err().contains("local:PATH, and not unix:/l"));
        assert!(
            checked_cache(&Options { local: 4097, ..options(&[], 4096) }).unwrap_err().contains("multiple of 4096")
        );
    }
}
