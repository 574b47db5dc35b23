//! Tests of the real driver, with its frontends, link and state file, in virtual time. Other seeds: `cargo xtask sim
//! --driver --seeds N`.

use remoca_sim::{DriverOptions, Flaw, Promise, run_driver};
use std::collections::BTreeMap;

const SEEDS: u64 = 1_000;
/// Number of seeds within which each flaw must be noticed. Most are within ten; a dead process whose requests are repeated
/// too early is within about 700.
const FLAW_SEEDS: u64 = 2_000;

/// Counters that must reach the given number: an event that never happens is never tested.
const HAPPENS: [(&str, u64); 42] = [
    ("completed", 80_000),
    ("failed", 2_000),
    ("store_reads", 40_000),
    ("store_writes", 20_000),
    ("in_pieces", 3_000),
    ("durable_writes", 4_000),
    ("cache_switches", 1_000),
    ("departures", 200),
    ("kills", 200),
    ("power_failures", 80),
    ("upgrades", 1_000),
    ("upgrades_refused", 20),
    ("warm_starts", 500),
    ("sessions", 2_000),
    ("cuts", 200),
    ("store_crashes", 100),
    ("flushes_after_loss", 20),
    ("rewritten", 800),
    ("long_requests", 20),
    ("on_other_queues", 20_000),
    ("evictions", 20_000),
    ("evictions_admitted", 5_000),
    ("evictions_duplicate", 5_000),
    ("identifications", 300),
    ("server_lists", 80),
    ("settlings", 30),
    ("moves", 30),
    ("moves_back", 30),
    ("lines_cut", 5),
    ("moved_warm", 10),
    ("disks_removed", 60),
    ("disks_added", 10),
    ("images_replaced", 10),
    ("resizes", 30),
    ("hit_blocks", 20_000),
    ("hedges", 3_000),
    ("fetch_missing", 20),
    ("fetch_wrong", 100),
    ("local_hit_blocks", 3_000),
    ("local_changes", 300),
    ("taken_back", 8),
    ("demotions", 500),
];

/// Minimum percentage of the blocks read that the memory servers must answer: of all, and of those read in runs
/// without faults whose working set fits the cache.
const HITS: u64 = 13;
const COSY_HITS: u64 = 45;

type Totals = BTreeMap<&'static str, u64>;

/// Returns the sums of all counters over these seeds.
fn totals(seeds: u64, options: &DriverOptions) -> Totals {
    let mut totals = Totals::new();
    for seed in 0..seeds {
        let tally = run_driver(seed, options)
            .unwrap_or_else(|failure| panic!("{failure}\nexplain it: cargo xtask sim --driver --seed {seed}"));
        for (name, count) in tally.named() {
            *totals.entry(name).or_default() += count;
        }
    }
    totals
}

/// Checks that memory servers answered enough of the reads.
fn is_useful(totals: &Totals) -> Result<(), String> {
    for (hits, reads, least) in
        [("hit_blocks", "read_blocks", HITS), ("cosy_hit_blocks", "cosy_read_blocks", COSY_HITS)]
    {
        if totals[hits] * 100 < totals[reads] * least {
            return Err(format!("{hits} are {} of {}, and {least} % are expected", totals[hits], totals[reads]));
        }
    }
    Ok(())
}

#[test]
fn seeds_keep_every_promise() {
    let totals = totals(SEEDS, &DriverOptions::default());
    for (name, least) in HAPPENS {
        let count = totals[name];
        assert!(count >= least, "{name} happened {count} times in {SEEDS} seeds, and is expected {least} times");
    }
    assert_eq!(is_useful(&totals), Ok(()));
}

#[test]
fn a_seed_gives_the_same_run_again() {
    for seed in 0..40 {
        let run = || run_driver(seed, &DriverOptions::default());
        assert_eq!(run(), run());
    }
}

/// Tests a guest that was gone, so that its disks went, and came back while the other process flushed them and died.
#[test]
fn a_process_that_dies_with_the_disks_during_a_flush() {
    let options = DriverOptions { steps: Some(107), ..DriverOptions::default() };
    run_driver(1_795_469_584_000_999, &options).unwrap_or_else(|failure| panic!("{failure}"));
}

/// Checks that a fault around the driver, as the driver itself could have it, is noticed by a guest's results, by the
/// disk's requests, or by something that never ends. A check that never fails proves nothing.
fn is_noticed(flaw: Flaw, by: &[Promise]) {
    let options = DriverOptions { flaw: Some(flaw), ..DriverOptions::default() };
    let failure = (0..FLAW_SEEDS).find_map(|seed| run_driver(seed, &options).err());
    let failure = failure.unwrap_or_else(|| panic!("{flaw:?} was there, and {FLAW_SEEDS} seeds noticed nothing"));
    println!("{flaw:?}: {failure}");
    assert!(by.contains(&failure.violation.promise), "{failure}");
}

#[test]
fn writes_that_are_not_durable() {
    is_noticed(Flaw::NotDurable, &[Promise::FlushIsDurable]);
}

#[test]
fn an_error_that_is_not_told() {
    is_noticed(Flaw::ErrorHidden, &[Promise::DiskErrorsOnly, Promise::WriteThrough, Promise::NoStaleRead]);
}

#[test]
fn a_store_that_comes_back_without_a_word() {
    is_noticed(Flaw::CrashHidden, &[Promise::NoStaleRead]);
}

#[test]
fn a_failed_read_that_is_believed() {
    is_noticed(Flaw::FailedReadBelieved, &[Promise::NoStaleRead]);
}

#[test]
fn other_data_than_the_guest_gave() {
    is_noticed(Flaw::OtherDataWritten, &[Promise::DiskOnlyAsAsked]);
}

/// Tests a case that the check at fetch hides from the guest. The servers are honest, so another check must notice it.
#[test]
fn a_page_that_is_sent_as_another_one() {
    is_noticed(Flaw::WrongPageSent, &[Promise::CachedIsThere]);
}

/// Tests a case in which every request has an answer, but an upgrade is no longer possible.
#[test]
fn a_disk_read_that_never_ends() {
    is_noticed(Flaw::LoserKept, &[Promise::NothingLeft]);
}

/// Tests a case in which a guest that has its answer may write to the discarded range, and lose the data.
#[test]
fn a_discard_that_is_answered_before_it_is_done() {
    is_noticed(Flaw::DiscardAnsweredEarly, &[Promise::ExactlyOnce, Promise::WriteThrough]);
}

/// Tests a case in which a dead process's writes take effect after its successor has repeated them.
#[test]
fn requests_that_are_done_again_while_the_former_ones_may_be_on_their_way() {
    is_noticed(Flaw::NotSettled, &[Promise::WriteThrough, Promise::NoStaleRead]);
}

/// Tests a case that no guest notices: the cache is useless.
#[test]
fn a_server_that_forgets_every_page() {
    let options = DriverOptions { flaw: Some(Flaw::PagesForgotten), ..DriverOptions::default() };
    assert!(is_useful(&totals(100, &options)).is_err());
}

#[test]
fn another_image_that_is_taken_for_the_one_that_was_there() {
    is_noticed(Flaw::ImageMistaken, &[Promise::NoStaleRead]);
}

#[test]
fn an_image_that_is_cut_between_two_looks() {
    is_noticed(Flaw::CutUnnoticed, &[Promise::NoStaleRead]);
}

#[test]
fn memory_that_is_used_after_it_was_taken_back() {
    is_noticed(Flaw::TakeBackIgnored, &[Promise::ProtocolKept]);
}

#[test]
fn no_flaw_is_left_out_here() {
    assert_eq!(Flaw::ALL.len(), 13, "a new flaw needs its canary above");
}
