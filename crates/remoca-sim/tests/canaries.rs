//! Leaves out every safety rule of the engine once, and expects the simulator to notice: a checker that never fails
//! proves nothing. With `--nocapture`, the tests print which seed noticed which omission.

use remoca_core::rules::Rule;
use remoca_sim::{HostRule, Options, Plan, Promise, Shrunk, run, shrink, trace};

/// Number of seeds within which each rule's absence must be noticed.
const SEEDS: u64 = 200;

fn caught(options: &Options) -> remoca_sim::Failure {
    caught_within(SEEDS, options).1
}

fn caught_within(seeds: u64, options: &Options) -> (Plan, remoca_sim::Failure) {
    for seed in 0..seeds {
        let plan = Plan::draw(seed);
        if let Err(failure) = run(&plan, options) {
            println!("{:?} {:?} left out: {failure}", options.omit, options.omit_host);
            return (plan, *failure);
        }
    }
    panic!("{:?} {:?} was left out, and {seeds} seeds noticed nothing", options.omit, options.omit_host)
}

/// Checks that some checker notices the rule's absence, and that the bytes that the guest reads show it too.
fn is_noticed(rule: Rule) {
    caught(&Options { omit: Some(rule), ..Options::default() });
    let failure = caught(&Options { omit: Some(rule), guest_visible_only: true, ..Options::default() });
    assert_eq!(failure.violation.promise, Promise::NoStaleRead);
}

#[test]
fn a_read_that_completes_after_a_write() {
    is_noticed(Rule::ReadOverlappedByWrite);
}

#[test]
fn overlapping_writes() {
    is_noticed(Rule::OverlappingWrites);
}

#[test]
fn a_partial_write() {
    is_noticed(Rule::PartialWrite);
}

#[test]
fn a_discard_taken_as_zero() {
    is_noticed(Rule::DiscardUnknown);
}

#[test]
fn an_invalidation_forgotten() {
    is_noticed(Rule::Invalidation);
}

#[test]
fn no_check_at_admission() {
    is_noticed(Rule::AdmissionCheck);
}

/// Tests the same where only the content of overwritten frames is judged.
#[test]
fn no_check_at_admission_of_frames() {
    let options = Options { agentless: true, guest_visible_only: true, ..Options::default() };
    let (plan, failure) = caught_within(SEEDS, &Options { omit: Some(Rule::AdmissionCheck), ..options.clone() });
    assert_eq!(failure.violation.promise, Promise::NoStaleRead);
    run(&plan, &options).expect("and nothing without the omission");
}

#[test]
fn no_check_at_fetch() {
    is_noticed(Rule::FetchCheck);
}

/// Checks that a page is wrong although the servers are honest; the check at fetch hides this from the guest. It needs
/// a pool at one server while another server has a pool of the same generation: one seed in some hundred.
#[test]
fn a_pool_taken_for_that_of_another_server() {
    let (_, failure) = caught_within(10 * SEEDS, &Options { omit: Some(Rule::PoolOfOneServer), ..Options::default() });
    assert_eq!(failure.violation.promise, Promise::CachedIsThere);
}

/// Checks that watching the slots catches this fault, which the check at fetch hides from the guest.
#[test]
fn a_slot_reused_under_an_outstanding_request() {
    let failure = caught(&Options { omit: Some(Rule::PinnedSlot), ..Options::default() });
    assert_eq!(failure.violation.promise, Promise::SlotNotReused);
}

/// Checks that a page is noticed as missing or wrong although the servers are honest.
#[test]
fn pages_that_were_lost_with_a_connection_taken_for_cached() {
    let (_, failure) = caught_within(SEEDS, &Options { omit: Some(Rule::LostSends), ..Options::default() });
    assert_eq!(failure.violation.promise, Promise::CachedIsThere);
}

#[test]
fn a_failed_flush_that_is_forgotten() {
    let options = Options { omit: Some(Rule::StickyFlush), guest_visible_only: true, ..Options::default() };
    let failure = caught(&options);
    assert!(matches!(failure.violation.promise, Promise::DiskErrorsOnly | Promise::FlushIsDurable));
}

/// Tests a case that needs the death of a process between two specific stores.
#[test]
fn an_entry_that_is_valid_before_it_is_complete() {
    let (_, failure) = caught_within(10 * SEEDS, &Options { omit: Some(Rule::StoreOrder), ..Options::default() });
    assert!(matches!(failure.violation.promise, Promise::KnownIsTrue | Promise::NoFalseAlarm));
}

/// Tests a case in which a disk comes while the index still knows blocks of the one whose number it gets.
#[test]
fn a_number_that_is_used_again_at_once() {
    is_noticed(Rule::FreeNumber);
}

/// Tests a case in which an image shrinks, and grows again.
#[test]
fn what_was_cut_off_taken_for_what_has_grown() {
    is_noticed(Rule::ForgetCut);
}

/// Checks that the absence of a rule around the engine shows in the bytes that the guest reads or has written.
fn host_rule_is_noticed(rule: HostRule) {
    let options = Options { omit_host: Some(rule), guest_visible_only: true, ..Options::default() };
    let (_, failure) = caught_within(10 * SEEDS, &options);
    assert!(matches!(failure.violation.promise, Promise::NoStaleRead | Promise::WriteThrough), "{failure}");
}

/// Tests a case in which an old process's write takes effect after its successor's replay.
#[test]
fn a_successor_that_does_not_wait_for_the_lock() {
    host_rule_is_noticed(HostRule::ImageLock);
}

#[test]
fn words_trusted_across_a_change_of_the_image() {
    host_rule_is_noticed(HostRule::ImageUnchanged);
}

#[test]
fn words_trusted_across_a_failure_of_the_host() {
    host_rule_is_noticed(HostRule::SameBoot);
}

#[test]
fn words_trusted_across_a_crash_of_a_remote_store() {
    host_rule_is_noticed(HostRule::LocalStore);
}

#[test]
fn words_trusted_after_another_process_had_the_disks() {
    host_rule_is_noticed(HostRule::MovedIsCold);
}

/// Tests a case that the check at fetch hides from the guest. The servers are honest, so another check must notice it.
#[test]
fn an_old_connection_that_is_still_heard() {
    let (_, failure) = caught_within(20 * SEEDS, &Options { omit_host: Some(HostRule::Fence), ..Options::default() });
    assert!(matches!(failure.violation.promise, Promise::CachedIsThere | Promise::ProtocolKept));
}

/// Tests a case that the check at fetch hides from the guest.
#[test]
fn a_page_overwritten_before_it_has_moved() {
    let options = Options { omit_host: Some(HostRule::DemoteFirst), ..Options::default() };
    let (_, failure) = caught_within(20 * SEEDS, &options);
    assert_eq!(failure.violation.promise, Promise::CachedIsThere, "{failure}");
}

#[test]
fn no_rule_is_left_out_here() {
    assert_eq!((Rule::ALL.len(), HostRule::ALL.len()), (14, 7), "a new rule needs its canary above");
}

#[test]
fn a_failing_plan_is_cut_down_to_what_matters() {
    let options = Options { omit: Some(Rule::PartialWrite), guest_visible_only: true, ..Options::default() };
    let (plan, failure) = caught_within(SEEDS, &options);
    let Shrunk { options: shorter, failure: again, steps } = shrink(&plan, &failure, &options, 2_000);
    assert!(steps <= 20, "{steps} steps are left");
    assert_eq!(again.violation.promise, failure.violation.promise);
    assert_eq!(run(&plan, &shorter).map_err(|f| *f), Err(again.clone()));
    let (lines, result) = trace(&plan, &shorter);
    assert_eq!(result.map_err(|f| *f), Err(again.clone()));
    let key = again.violation.at.expect("a stale read is at a block");
    assert!(lines.iter().any(|line| line.blocks.is_some() && line.concerns(again.violation.vm, Some(key))));
}
