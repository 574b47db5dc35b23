//! What is wrong with memory servers, as one VM sees them.

use super::found::Found;
use crate::figures::ServerState;
use crate::shown::Shown;
use crate::text::{count_of, milliseconds};
use crate::vm::Vm;
use remoca_io::show::{exact_size, sentence, show_size};
use remoca_protocol::control::{KnownServerStatus, NormalLatency, ServerStatus, Status, TOO_MANY_CLIENTS};

/// Usual time of a read from a memory server up to which it is as fast as it should be, in microseconds.
const FAST_US: f64 = 1_000.0;
/// Reads from which on a share of them is told of.
const ENOUGH: u64 = 100;
/// What to do about a server that has no place for another client.
pub const MORE_CLIENTS: &str = "Start `remoca serve` there with a larger --max-clients, or name another server";

pub fn lies(vm: &Vm, shown: &Shown) -> Option<Found> {
    let (count, period) = (vm.lately.wrong_pages, vm.lately.period());
    if count == 0 {
        return None;
    }
    let (pages, were) = (count_of(count, "page"), if count == 1 { "was" } else { "were" });
    let what = format!("{pages} {were} not what this VM had sent there ({period}). The guest got none of them");
    let servers = &shown.status.servers;
    // Older processes do not tell which one it was.
    let may_lie = |server: &KnownServerStatus| server.lies.map_or(server.in_use, |lies| lies > 0);
    let Some(endpoints) = named(servers.iter().filter(|server| may_lie(server))) else {
        let found = format!("one that is no longer in the list lied: {what}");
        return Some(Found::warning("server", found, "Test the memory of its host before you name it again"));
    };
    let advice = format!(
        "Bad memory, or another program at that address? Take it out: `remoca set {} --server` with the others. Test its memory",
        shown.status.name
    );
    Some(Found::warning(format!("server {endpoints}"), format!("it lies: {what}"), advice).of_server(&endpoints))
}

pub fn slow(vm: &Vm, shown: &Shown) -> Option<Found> {
    let server = asked(shown)?;
    let now = shown.status.hedging.server.as_ref();
    // Without reads no server is asked: the state is that of a moment long ago.
    let is_left_alone = ServerState::of(Some(server)) == ServerState::LeftAlone && vm.lately.reads > 0;
    let late = vm.lately.late_reads;
    let is_late = late >= ENOUGH && late > vm.lately.hits / 10;
    // One that is left alone although its pages were far quicker than the disk: it stopped.
    let disk = shown.status.hedging.disk.as_ref();
    let was_quicker = || now.zip(disk).is_some_and(|(server, disk)| server.p50_us * 2. <= disk.p50_us);
    // Without hedging there is no other reason.
    let has_stopped = is_left_alone && (shown.status.hedging.is_off || was_quicker());
    let is_fast = now.is_some_and(|now| now.p50_us <= FAST_US) && late <= vm.lately.hits / 10 && !has_stopped;
    if !(is_left_alone || is_late) || is_fast {
        return None;
    }
    let time = match (now.filter(|_| !has_stopped), disk) {
        (Some(server), Some(disk)) => {
            format!("a page takes {} and the disk {}", milliseconds(server.p50_us), milliseconds(disk.p50_us))
        }
        (Some(server), None) => format!("a page takes {}", milliseconds(server.p50_us)),
        (None, _) => "its answers do not come in time".into(),
    };
    let what_now = if is_left_alone { "the disk answers all reads" } else { "the disk answers what is late" };
    let found = format!("slow: {time}; {} came late {}; {what_now}", count_of(late, "read"), vm.lately.period());
    let endpoints = with_pages(shown, is_remote).unwrap_or_else(|| server.endpoint.clone());
    let advice = format!(
        "Look at the load of that host and at the network to it (`remoca check {}` measures the way). Name another server meanwhile",
        shown.status.name
    );
    Some(Found::warning(format!("server {endpoints}"), found, advice).of_server(&endpoints))
}

pub fn is_no_faster(vm: &Vm, shown: &Shown) -> Option<Found> {
    let server = asked(shown).filter(|server| ServerState::of(Some(server)) == ServerState::LeftAlone)?;
    if slow(vm, shown).is_some() || vm.lately.reads == 0 {
        return None;
    }
    let disk = shown.status.hedging.disk.as_ref().map(|NormalLatency { p50_us, .. }| milliseconds(*p50_us));
    let found = format!("no faster than the disk ({}), which answers all reads", disk.unwrap_or("not measured".into()));
    let advice =
        format!("There is little to gain here: `remoca set {} --off` gives the memory back", shown.status.name);
    let endpoints = with_pages(shown, is_remote).unwrap_or_else(|| server.endpoint.clone());
    Some(Found::warning(format!("server {endpoints}"), found, advice))
}

/// Names a VM without a memory server. One whose disks are elsewhere has left its servers, and finds them again with the disks.
pub fn none(_: &Vm, shown: &Shown) -> Option<Found> {
    (shown.status.server.is_none() && shown.status.has_disks()).then(|| {
        let advice = "Name one with --server, or with `server` in the configuration";
        Found::warning("server", "there is no memory server, so nothing is cached", advice)
    })
}

/// Names each server that cannot be reached while none can, or while the others have less than what is wanted.
pub fn unreachable(shown: &Shown) -> Vec<Found> {
    let Status { cache, server, .. } = &shown.status;
    match server.as_ref().filter(|_| cache.enabled) {
        Some(server) if !server.connected => {
            let reads = if cache.local_granted_bytes > 0 { "Reads beyond the local tier" } else { "Reads" };
            let meanwhile = format!("{reads} go to the disk");
            let reason = server.error.as_deref().unwrap_or("no answer yet");
            let mut found = vec![not_connected(shown, &server.endpoint, reason, &meanwhile)];
            let others = missing(shown).filter(|(endpoint, _)| *endpoint != server.endpoint);
            found.extend(others.map(|(endpoint, reason)| not_connected(shown, endpoint, reason, &meanwhile)));
            found
        }
        Some(_) if cache.granted_bytes < cache.wanted_bytes => {
            let (granted, wanted) = (show_size(cache.granted_bytes), show_size(cache.wanted_bytes));
            let rest = format!("The others have granted {granted} of the {wanted} wanted");
            missing(shown).map(|(endpoint, reason)| not_connected(shown, endpoint, reason, &rest)).collect()
        }
        Some(_) | None => Vec::new(),
    }
}

/// Names each server that cannot be reached while the others suffice. They may not if another one is lost.
pub fn spare(shown: &Shown) -> Vec<Found> {
    let cache = &shown.status.cache;
    if asked(shown).is_none() || cache.granted_bytes < cache.wanted_bytes {
        return Vec::new();
    }
    let rest = format!("The others have granted all of the {} wanted", show_size(cache.wanted_bytes));
    missing(shown).map(|(endpoint, reason)| not_connected(shown, endpoint, reason, &rest)).collect()
}

/// Returns each server of the list that has no pool because it cannot be used, and why it cannot.
fn missing(shown: &Shown) -> impl Iterator<Item = (&str, &str)> {
    let servers = shown.status.servers.iter().filter(|server| is_missing(server));
    servers.filter_map(|server| Some((server.endpoint.as_str(), server.error.as_deref()?)))
}

/// Returns whether a server of the list has no pool, because it cannot be used.
fn is_missing(server: &KnownServerStatus) -> bool {
    is_remote(server) && !server.in_use && server.error.is_some()
}

fn not_connected(shown: &Shown, endpoint: &str, reason: &str, meanwhile: &str) -> Found {
    let advice = match has_too_many_clients(reason) {
        true => MORE_CLIENTS.to_owned(),
        false => format!(
            "Does `remoca serve` run there (`systemctl status remoca-serve`), and is the way open? `remoca check {}` tries it",
            shown.status.name
        ),
    };
    let found = format!("not connected: {} {meanwhile}", sentence(reason));
    Found::warning(format!("server {endpoint}"), found, advice).of_server(endpoint)
}

/// Returns whether a server is not used because it has no place for another client.
#[must_use]
pub fn has_too_many_clients(reason: &str) -> bool {
    // A process that runs an older program has the code of the answer alone.
    reason.ends_with(TOO_MANY_CLIENTS) || reason.ends_with(": Busy")
}

/// Names a server of this host that is away: its pool is in use meanwhile. Also that of a local tier which is not there yet.
pub fn away(_: &Vm, shown: &Shown) -> Option<Found> {
    let Status { cache, servers, pools, server, .. } = &shown.status;
    if !cache.enabled {
        return None;
    }
    let away = |endpoint: &str, found: String| {
        let advice = match has_too_many_clients(&found) {
            true => MORE_CLIENTS,
            false => "Does `remoca serve` run on this host? See `systemctl status remoca-serve`",
        };
        Some(Found::warning(format!("server {endpoint}"), found, advice).of_server(endpoint))
    };
    if let Some(pool) = pools.iter().find(|pool| pool.state == "away") {
        let error = servers.iter().find(|server| server.endpoint == pool.server).and_then(|it| it.error.as_ref());
        let reason = error.map_or(String::new(), |error| format!(": {error}"));
        return away(&pool.server, format!("away: its pool is in use as before, but cannot grow{reason}"));
    }
    let is_missing = |server: &&KnownServerStatus| server.is_local_tier && !server.in_use;
    let local = servers.iter().find(is_missing).filter(|_| cache.local_wanted_bytes > 0)?;
    // Without other servers it is what `unreachable` names.
    let is_named = server.as_ref().is_some_and(|server| server.endpoint == local.endpoint);
    let reason = local.error.as_deref().unwrap_or("no answer yet");
    if is_named { None } else { away(&local.endpoint, format!("there is no local tier: {reason}")) }
}

pub fn full(_: &Vm, shown: &Shown) -> Option<Found> {
    let cache = &shown.status.cache;
    let server = asked(shown)?;
    // What is missing is not the fault of those that are full.
    if cache.granted_bytes >= cache.wanted_bytes || shown.status.servers.iter().any(is_missing) {
        return local_full(shown);
    }
    let offer = |known: &KnownServerStatus| {
        known.possible_bytes.map_or_else(
            || format!("{} does not say what it has", known.endpoint),
            |bytes| format!("{} has at most {} for it", known.endpoint, show_size(bytes)),
        )
    };
    let listed = shown.status.servers.iter().filter(|server| is_remote(server));
    let offers: Vec<_> = listed.map(offer).collect();
    let (granted, wanted) = (show_size(cache.granted_bytes), show_size(cache.wanted_bytes));
    let found = format!("full: {granted} of the {wanted} wanted are granted; {}", offers.join(", "));
    // A cache of no size is none that can be set.
    let less = match cache.granted_bytes {
        0 => String::new(),
        bytes => format!(", or want less: `remoca set {} --cache {}`", shown.status.name, exact_size(bytes)),
    };
    let advice = format!("Name another server, or give `remoca serve` more --memory there{less}");
    let endpoints = in_use(shown, is_remote).unwrap_or_else(|| server.endpoint.clone());
    Some(Found::warning(format!("server {endpoints}"), found, advice).of_server(&endpoints))
}

/// Names a local tier that is smaller than wanted. To the process a limit looks like a full server: it hears only how much more it
/// could get.
fn local_full(shown: &Shown) -> Option<Found> {
    let cache = &shown.status.cache;
    let local = shown.status.servers.iter().find(|server| server.is_local_tier && server.in_use)?;
    let (granted, wanted) = (show_size(cache.local_granted_bytes), show_size(cache.local_wanted_bytes));
    let found = format!("full, or limited: {granted} of the {wanted} wanted for the local tier are granted");
    let advice = format!(
        "`remoca status --server` shows its room, and the limit of each pool: `remoca take-back POOL SIZE` raises a limit. Without \
         room, give `remoca serve` more --memory on this host, or want less: `remoca set {} --local {}`",
        shown.status.name,
        exact_size(cache.local_granted_bytes)
    );
    let is_short = cache.local_granted_bytes < cache.local_wanted_bytes;
    is_short.then(|| Found::warning(format!("server {}", local.endpoint), found, advice).of_server(&local.endpoint))
}

pub fn lost_pages(vm: &Vm, shown: &Shown) -> Option<Found> {
    let server = asked(shown)?;
    let (missing, hits) = (vm.lately.missing_pages, vm.lately.hits);
    let found = format!("it did not have {missing} pages that this VM had sent there {}", vm.lately.period());
    let advice = "Was it restarted, or its pool taken back? If not, it loses memory: see its log";
    let endpoints = with_pages(shown, |_| true).unwrap_or_else(|| server.endpoint.clone());
    (missing >= ENOUGH && missing > hits / 100).then(|| Found::warning(format!("server {endpoints}"), found, advice))
}

/// Returns the server that the VM is connected to, if its cache is on.
fn asked(shown: &Shown) -> Option<&ServerStatus> {
    let is_on = shown.status.cache.enabled;
    shown.status.server.as_ref().filter(|server| is_on && server.connected)
}

fn is_remote(server: &KnownServerStatus) -> bool {
    !server.is_local_tier
}

/// Returns the addresses of those servers that have a pool, or `None` if none of them has.
fn in_use(shown: &Shown, is_one: fn(&KnownServerStatus) -> bool) -> Option<String> {
    named(shown.status.servers.iter().filter(|server| server.in_use && is_one(server)))
}

/// Returns the addresses of those servers that have a pool of some size, or `None` if none of them has.
fn with_pages(shown: &Shown, is_one: fn(&KnownServerStatus) -> bool) -> Option<String> {
    let Status { servers, pools, .. } = &shown.status;
    let has_pages = |server: &&KnownServerStatus| {
        is_one(server) && pools.iter().any(|pool| pool.server == server.endpoint && pool.granted_bytes > 0)
    };
    named(servers.iter().filter(has_pages))
}

/// Returns the addresses of the servers as one of which it is not known which, or `None` if there are none.
fn named<'a>(servers: impl Iterator<Item = &'a KnownServerStatus>) -> Option<String> {
    let all: Vec<_> = servers.map(|server| server.endpoint.as_str()).collect();
    (!all.is_empty()).then(|| all.join(" or "))
}
