//! The cache as the options say, or as `remoca set` left it: what was set holds until its own option changes (decision 0032).

use super::inherited::Inherited;
use super::options::Options;
use crate::driver::{TierSizes, cache_pages, local_pages};
use crate::endpoints::Endpoints;
use crate::state::{FormerSettings, OptionHashes, settings_at, stable_hash};
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;

/// The lower one of the two hashes in a word.
const LOWER: u64 = 0xffff_ffff;

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

/// The options that are others than a former process had.
#[derive(Default)]
struct Changed {
    servers: bool,
    cache: bool,
    local: bool,
}

/// Returns which options have changed. A former program that says nothing had the same ones.
fn changed_since(former: Option<OptionHashes>, options: &Options) -> Changed {
    let Some(former) = former.filter(|former| former.all != hash_of_all(options)) else { return Changed::default() };
    let all = former.all ^ hash_of(options).all;
    // Of programs that say nothing about each size, all sizes count as changed if any has.
    let sizes = if all & !LOWER == 0 { 0 } else { former.sizes ^ hash_of_sizes(options, former.all) };
    Changed { servers: all & LOWER != 0, cache: sizes & !LOWER != 0, local: sizes & LOWER != 0 }
}

/// Returns what `remoca set` left, except what the options have changed since.
fn as_set(set: FormerSettings, options: &Options, as_said: CacheSettings) -> CacheSettings {
    let changed = changed_since(set.options, options);
    // No option turns it on or off. Without any size it is off, though nobody may have said so.
    let has_size = set.cache.0 > 0 || set.local.is_some_and(|size| size.0 > 0);
    let as_said = CacheSettings { enabled: set.enabled || !has_size, ..as_said };
    let mut settings = as_said.clone();
    if !changed.servers && !set.listed.is_empty() {
        settings.endpoints.listed = set.listed;
    }
    // A process without listed servers had no size for them.
    if !changed.cache && set.cache.0 > 0 {
        settings.sizes.cache = set.cache;
    }
    if let Some(local) = set.local.filter(|_| !changed.local) {
        settings.sizes.local = local;
        settings.endpoints.local = Some(options.local_server.clone());
    }
    if settings.endpoints.listed.is_empty() {
        settings.sizes.cache = PageCount(0);
    }
    match settings.endpoints.check().and_then(|()| settings.sizes.checked()) {
        Ok(_) => settings,
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

/// Returns hashes of the options that `remoca set` can overrule. Programs before this one had the same `all`.
pub(super) fn hash_of(options: &Options) -> OptionHashes {
    let servers: Vec<_> = options.servers.iter().map(Endpoint::to_string).collect();
    let servers = stable_hash(&servers.iter().map(String::as_str).collect::<Vec<_>>());
    let mut sizes = vec![options.cache.to_string()];
    if options.local > 0 {
        sizes.extend([options.local.to_string(), options.local_server.to_string()]);
    }
    let sizes: Vec<_> = sizes.iter().map(String::as_str).collect();
    let all = stable_hash(&sizes) << 32 | servers & LOWER;
    OptionHashes { all, sizes: hash_of_sizes(options, all) }
}

/// Returns a hash of each size with that of `all` options, so that it is of no use beside another one: programs before this one
/// leave it in the state file with theirs.
fn hash_of_sizes(options: &Options, all: u64) -> u64 {
    let [cache, local] = [options.cache, options.local].map(|size| stable_hash(&[&size.to_string(), &all.to_string()]));
    cache << 32 | local & LOWER
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

    fn listed(servers: &[&str]) -> Vec<Endpoint> {
        servers.iter().map(|server| server.parse().unwrap()).collect()
    }

    const fn sizes(cache: u32, local: u32) -> TierSizes {
        TierSizes { cache: PageCount(cache), local: PageCount(local) }
    }

    /// A program before this one, with one hash for all of its options or one for all sizes, hands over what was set in it.
    #[test]
    fn what_was_set_under_a_former_program_holds_until_an_option_changes() {
        const SAID: [&str; 2] = ["tcp:a:1", "unix:/b"];
        let before = options(&SAID, 4096);
        let of_former = |all| Some(OptionHashes { all, sizes: 0 });
        let hashes = [of_former(hash_of_all(&before)), of_former(hash_of(&before).all), None];
        let set = |options| FormerSettings {
            options,
            listed: listed(&["tcp:c:1"]),
            cache: PageCount(9),
            local: None,
            enabled: false,
        };
        let now = |options: &Options, former| as_set(set(former), options, said(options));
        let set_servers = Endpoints::from(listed(&["tcp:c:1"]));
        let as_set_before = CacheSettings { endpoints: set_servers.clone(), sizes: sizes(9, 0), enabled: false };
        for former in hashes {
            assert_eq!(now(&before, former), as_set_before, "{former:?}");
        }
        // One hash does not tell which option has changed, so all are as they are said now.
        let larger = options(&SAID, 8192);
        let off = |options: &Options| CacheSettings { enabled: false, ..said(options) };
        assert_eq!(now(&larger, hashes[0]), off(&larger));
        assert_eq!(now(&larger, hashes[1]), CacheSettings { endpoints: set_servers, ..off(&larger) });
        let fewer = options(&SAID[..1], 4096);
        assert_eq!(now(&fewer, hashes[0]), off(&fewer));
        assert_eq!(now(&fewer, hashes[1]), CacheSettings { endpoints: endpoints(&fewer), ..as_set_before });
        // One hash of all sizes does not tell which has changed.
        let local = Options { local: 1 << 20, ..options(&SAID, 4096) };
        assert_eq!(now(&local, hashes[1]).sizes, said(&local).sizes);
        assert_eq!(now(&local, hashes[1]).endpoints.local, Some(local.local_server.clone()));
        // Nor does one that this program left beside options that a former one has replaced.
        let left = Some(OptionHashes { sizes: hash_of(&before).sizes, ..hash_of(&larger) });
        assert_eq!(now(&before, left).sizes, said(&before).sizes);
        assert_eq!(now(&larger, left).sizes, sizes(9, 0));
    }

    /// Returns what counts with these options, after others of which all was set otherwise, and the cache was turned off.
    fn after_set(before: &Options, now: &Options) -> CacheSettings {
        let set = FormerSettings {
            options: Some(hash_of(before)),
            listed: listed(&["tcp:c:1"]),
            cache: PageCount(9),
            local: Some(PageCount(5)),
            enabled: false,
        };
        as_set(set, now, said(now))
    }

    #[test]
    fn an_option_that_changes_displaces_what_was_set_in_its_place_alone() {
        let before = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
        let is_set = || CacheSettings {
            endpoints: Endpoints { listed: listed(&["tcp:c:1"]), local: Some(before.local_server.clone()) },
            sizes: sizes(9, 5),
            enabled: false,
        };
        let after = |change: &dyn Fn(&mut Options)| {
            let mut now = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
            change(&mut now);
            after_set(&before, &now)
        };
        let said_servers = || Endpoints { listed: listed(&["tcp:b:1"]), ..is_set().endpoints };
        assert_eq!(after(&|_| {}), is_set());
        assert_eq!(after(&|now| now.cache = 8192), CacheSettings { sizes: sizes(1, 5), ..is_set() });
        assert_eq!(after(&|now| now.local = 2 << 20), CacheSettings { sizes: sizes(9, 3), ..is_set() });
        let none = Endpoints { local: None, ..is_set().endpoints };
        assert_eq!(after(&|now| now.local = 0), CacheSettings { sizes: sizes(9, 0), endpoints: none, ..is_set() });
        let moved = Endpoints { local: Some("local:/m".parse().unwrap()), ..is_set().endpoints };
        let moves = |now: &mut Options| now.local_server = "local:/m".parse().unwrap();
        assert_eq!(after(&moves), CacheSettings { endpoints: moved, ..is_set() });
        let goes_elsewhere = |now: &mut Options| now.servers = listed(&["tcp:b:1"]);
        assert_eq!(after(&goes_elsewhere), CacheSettings { endpoints: said_servers(), ..is_set() });
        // Several at once.
        let both = |now: &mut Options| (now.servers, now.cache) = (listed(&["tcp:b:1"]), 8192);
        let expected = CacheSettings { endpoints: said_servers(), sizes: sizes(1, 5), ..is_set() };
        assert_eq!(after(&both), expected);
        let sizes_change = |now: &mut Options| (now.cache, now.local) = (8192, 2 << 20);
        assert_eq!(after(&sizes_change), CacheSettings { sizes: sizes(1, 3), ..is_set() });
    }

    #[test]
    fn the_size_of_the_local_tier_holds_as_it_was_set_until_its_option_changes() {
        let before = options(&["tcp:a:1"], 4096);
        let server: Endpoint = "local:/l".parse().unwrap();
        let set = |options: &Options, local| FormerSettings {
            options: Some(hash_of(options)),
            listed: options.servers.clone(),
            cache: PageCount(9),
            local: Some(PageCount(local)),
            enabled: true,
        };
        // It was set at run time, without an option.
        let now = as_set(set(&before, 5), &before, said(&before));
        assert_eq!((now.sizes.local, now.endpoints.local.as_ref()), (PageCount(5), Some(&server)));
        let larger = options(&["tcp:a:1"], 8192);
        assert_eq!(as_set(set(&before, 5), &larger, said(&larger)).sizes, sizes(1, 5));
        let with = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
        assert_eq!(as_set(set(&with, 0), &with, said(&with)).sizes.local, PageCount(0));
        let other = Options { local: 2 << 20, ..options(&["tcp:a:1"], 4096) };
        assert_eq!(as_set(set(&with, 0), &other, said(&other)).sizes, sizes(9, 3));
        // With no other server, too.
        let alone = Options { local: 1 << 20, ..options(&[], 4096) };
        let now = as_set(set(&alone, 5), &alone, said(&alone));
        assert_eq!((now.sizes.local, now.endpoints), (PageCount(5), endpoints(&alone)));
    }

    /// A cache without a size is off, but nobody turned it off.
    #[test]
    fn a_size_of_0_holds_until_its_option_changes_and_turns_nothing_off() {
        let alone = Options { local: 1 << 20, ..options(&[], 4096) };
        let set = || FormerSettings {
            options: Some(hash_of(&alone)),
            listed: Vec::new(),
            cache: PageCount(0),
            local: Some(PageCount(0)),
            enabled: false,
        };
        assert_eq!(as_set(set(), &alone, said(&alone)), CacheSettings { sizes: sizes(0, 0), ..said(&alone) });
        let larger = Options { local: 2 << 20, ..options(&[], 4096) };
        assert_eq!(as_set(set(), &larger, said(&larger)), CacheSettings { sizes: sizes(0, 3), ..said(&larger) });
    }

    /// A process whose options and settings do not go together starts all the same: as its options say.
    #[test]
    fn options_count_where_what_was_set_does_not_go_with_them() {
        let former = |options: &Options, servers: &[&str], local: Option<u32>| FormerSettings {
            options: Some(hash_of(options)),
            listed: listed(servers),
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
        // A size that was set, and one that is new.
        let large = FormerSettings { cache: PageCount(1 << 30), ..former(&remote, &["tcp:a:1"], None) };
        assert_eq!(as_set(large, &now, said(&now)), said(&now));
        // `set --local`, and then a local address in the list of the options.
        let now = options(&["local:/m"], 4096);
        assert_eq!(as_set(former(&remote, &["tcp:a:1"], Some(5)), &now, said(&now)), said(&now));
        let off = FormerSettings { enabled: false, ..former(&remote, &["tcp:a:1"], Some(5)) };
        assert_eq!(as_set(off, &now, said(&now)), CacheSettings { enabled: false, ..said(&now) });
    }

    #[test]
    fn the_cache_of_listed_servers_has_a_size_exactly_if_there_are_some() {
        let alone = Options { local: 1 << 20, ..options(&[], 4096) };
        let both = Options { local: 1 << 20, ..options(&["tcp:a:1"], 4096) };
        let former = |options: &Options, cache| FormerSettings {
            options: Some(hash_of(options)),
            listed: options.servers.clone(),
            cache: PageCount(cache),
            local: Some(PageCount(5)),
            enabled: true,
        };
        // Servers that are new in the options have the size that the options say.
        assert_eq!(as_set(former(&alone, 0), &both, said(&both)).sizes, sizes(1, 5));
        assert_eq!(as_set(former(&both, 9), &both, said(&both)).sizes, sizes(9, 5));
        assert_eq!(as_set(former(&both, 9), &alone, said(&alone)).sizes, sizes(0, 5));
    }

    #[test]
    fn servers_that_do_not_go_together_are_refused() {
        let with = |servers: &[&str], local_server: &str| {
            let local_server = local_server.parse().unwrap();
            checked_cache(&Options { local: 1 << 20, local_server, ..options(servers, 8192) })
        };
        assert_eq!(with(&["tcp:a:1"], "local:/l"), Ok(sizes(2, 256)));
        assert_eq!(with(&[], "local:/l"), Ok(sizes(0, 256)));
        assert!(with(&["local:/m"], "local:/l").unwrap_err().contains("beside a local tier"));
        assert!(with(&["tcp:a:1"], "unix:/l").unwrap_err().contains("local:PATH, and not unix:/l"));
        assert!(
            checked_cache(&Options { local: 4097, ..options(&[], 4096) }).unwrap_err().contains("multiple of 4096")
        );
    }
}
