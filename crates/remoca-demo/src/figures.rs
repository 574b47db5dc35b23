//! Derives the figures of a report from the observations of the acts.

use crate::{
    analysis::{Window, exact_lru, reads_in, timeline},
    conditions::Conditions,
    observed::{Act, CacheAct, Phase, TierAct},
    plan::Plan,
    reading::Outcome,
    report::{CachedRun, KillFigures, Report, Timeline},
    runs::{counted, evictions, over, run_figures},
    tier_figures::tier_run,
};

const BIN_NS: u64 = 1_000_000_000;
/// Length of the final part of the act in which the memory server dies, by which the refill is judged, in nanoseconds.
const LAST_NS: u64 = 5_000_000_000;

pub(crate) fn make(
    plan: &Plan,
    conditions: Conditions,
    baseline: &Act,
    cached: &CacheAct,
    tiers: Option<&TierAct>,
    file_system: Option<String>,
) -> Report {
    let base = run_figures(plan, baseline);
    let cached_run = cached_figures(plan, cached);
    let measured = &cached_run.run.measured.vm;
    let (t_remote_ms, t_disk_ms) = (measured.mean_cache_read_ms, base.mean_read_ms);
    let speedup = over(base.mean_read_ms, cached_run.run.mean_read_ms);
    let ideal_speedup = ideal_speedup(cached_run.lru_hit_ratio, t_remote_ms, t_disk_ms);
    let outcomes = outcomes(baseline, cached, tiers);
    let in_tiers = tiers.map_or(&[][..], |tiers| &tiers.act.kernel_faults);
    let kernel_faults = [&baseline.kernel_faults[..], &cached.act.kernel_faults, in_tiers].concat();
    let io_errors: u64 = outcomes.iter().map(|outcome| outcome.io_errors).sum();
    let mut report = Report {
        speedup,
        app_speedup: over(base.app_mean_read_ms, cached_run.run.app_mean_read_ms),
        ideal_speedup,
        p15_ratio: over(speedup, ideal_speedup),
        t_remote_ms,
        t_disk_ms,
        evictions: evictions(&cached.before, &cached.after),
        verify_errors: outcomes.iter().map(|outcome| outcome.wrong_signatures).sum(),
        guest_io_errors: io_errors + kernel_faults.len() as u64,
        server_kill: kill_figures(cached),
        timeline: timeline_of(cached),
        tiers: tiers.map(|tiers| tier_run(plan, tiers, cached, base.mean_read_ms)),
        baseline: base,
        cached: cached_run,
        conditions,
        ..Report::default()
    };
    let ends = [Some(&cached.end), tiers.map(|tiers| &tiers.end)];
    let ends: Vec<_> = ends.into_iter().flatten().collect();
    report.problems = report.find_problems(&ends, &outcomes, &kernel_faults, file_system);
    report.expectations = report.judge();
    report
}

/// Returns the speed-up of an ideal cache with hit ratio `h`, which has no cost besides the latency of its hits.
fn ideal_speedup(h: f64, t_remote_ms: f64, t_disk_ms: f64) -> f64 {
    over(1.0, (1.0 - h) + h * over(t_remote_ms, t_disk_ms))
}

fn outcomes<'a>(baseline: &'a Act, cached: &'a CacheAct, tiers: Option<&'a TierAct>) -> Vec<&'a Outcome> {
    let acts = [Some(baseline), Some(&cached.act), tiers.map(|tiers| &tiers.act)];
    let reads = |act: &'a Act| [&act.warmup, &act.measured];
    let phases = acts.into_iter().flatten().flat_map(reads).chain([&cached.kill.phase]);
    phases.map(|phase: &Phase| &phase.outcome).collect()
}

fn cached_figures(plan: &Plan, cached: &CacheAct) -> CachedRun {
    let run = run_figures(plan, &cached.act);
    let window = cached.act.measured.window;
    let cache_pages = plan.cache_bytes / crate::analysis::BLOCK_BYTES;
    let lru = exact_lru(&cached.act.trace, window, cache_pages + cached.page_cache_pages);
    CachedRun {
        hit_ratio: run.measured.vm.hit_ratio,
        block_hit_ratio: run.measured.vm.block_hit_ratio,
        lru_hit_ratio: lru.hit_ratio,
        lru_block_hit_ratio: lru.block_hit_ratio,
        lru_pages: lru.pages,
        lru_of_cache_alone: exact_lru(&cached.act.trace, window, cache_pages),
        guest_page_cache_pages: cached.page_cache_pages,
        counters: counted(&cached.before, &cached.after),
        run,
    }
}

fn kill_figures(cached: &CacheAct) -> KillFigures {
    let CacheAct { act, kill, samples, .. } = cached;
    let Window { from_ns, to_ns } = kill.phase.window;
    let between = |from_ns, to_ns| Window { from_ns, to_ns };
    let (before, away) = (between(from_ns, kill.killed_ns), between(kill.killed_ns, kill.restarted_ns));
    let (after, last) = (between(kill.restarted_ns, to_ns), between(to_ns.saturating_sub(LAST_NS), to_ns));
    let since_kill = reads_in(&act.trace, between(kill.killed_ns, to_ns));
    let used_before = |time_ns: u64| {
        let earlier = samples.iter().rev().find(|sample| sample.at_s * 1e9 <= time_ns as f64);
        earlier.map_or(0, |sample| sample.used_bytes)
    };
    let outcome = &kill.phase.outcome;
    KillFigures {
        reads_after: since_kill.reads,
        app_reads_after: outcome.measured.reads.count.saturating_sub(kill.app_reads_before),
        io_errors: outcome.io_errors,
        verify_errors: outcome.wrong_signatures,
        seconds_before: before.seconds(),
        seconds_away: away.seconds(),
        seconds_after: after.seconds(),
        hit_ratio_before: reads_in(&act.trace, before).hit_ratio,
        hit_ratio_away: reads_in(&act.trace, away).hit_ratio,
        hit_ratio_end: reads_in(&act.trace, last).hit_ratio,
        longest_read_ms: since_kill.max_ms,
        cache_used_bytes_before: used_before(kill.killed_ns),
        cache_used_bytes_end: used_before(to_ns),
        evictions: evictions(&cached.after, &cached.end),
    }
}

fn timeline_of(cached: &CacheAct) -> Timeline {
    let CacheAct { act, kill, samples, .. } = cached;
    let window = Window { from_ns: act.warmup.window.from_ns, to_ns: kill.phase.window.to_ns };
    let seconds = |time_ns: u64| time_ns.saturating_sub(window.from_ns) as f64 / 1e9;
    let start_s = window.from_ns as f64 / 1e9;
    Timeline {
        measured_from_s: seconds(act.measured.window.from_ns),
        measured_to_s: seconds(act.measured.window.to_ns),
        killed_s: seconds(kill.killed_ns),
        restarted_s: seconds(kill.restarted_ns),
        end_s: window.seconds(),
        bins: timeline(&act.trace, window, BIN_NS),
        cache_used: samples.iter().map(|sample| (sample.at_s - start_s, sample.used_bytes)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::collections::BTreeMap;

    use remoca_protocol::{
        control::{
            CacheStatus, HedgingStatus, Latencies, LatencySummary, MemoryStatus, PoolStatus, PortStatus, Status,
        },
        port::AgentStats,
        trace::{TraceRecord, TracedOp, TracedSource},
    };

    use super::*;
    use crate::{
        arguments::Arguments,
        observed::Kill,
        reading::{Latency, Phase as AppPhase},
        report::{Evictions, Sources},
        sampler::Sample,
    };
    use clap::Parser;

    const SECOND: u64 = 1_000_000_000;
    const RECORD_BLOCKS: u64 = 24;

    fn outcome(count: u64, mean_us: f64) -> Outcome {
        let reads = Latency { count, mean_us, p50_us: 0.0, p90_us: 0.0, p99_us: 0.0, max_us: 0.0 };
        Outcome { measured: AppPhase { seconds: 10.0, reads }, io_errors: 0, wrong_signatures: 0, examples: Vec::new() }
    }

    fn phase(from_s: u64, to_s: u64, mean_us: f64) -> Phase {
        Phase { outcome: outcome(20, mean_us), window: Window { from_ns: from_s * SECOND, to_ns: to_s * SECOND } }
    }

    fn read(at_s: f64, record: u64, latency_ms: u64, source: TracedSource) -> TraceRecord {
        TraceRecord {
            issued_ns: u64::try_from(Duration::from_secs_f64(at_s).as_nanos()).unwrap(),
            latency_ns: latency_ms * 1_000_000,
            source,
            ..TraceRecord::of_bytes(TracedOp::Read, record * RECORD_BLOCKS * 4096, RECORD_BLOCKS * 4096)
        }
    }
    fn status(counters: &[(&str, u64)], lost: u64) -> Status {
        let empty =
            LatencySummary { count: 0, sum_ns: 0, mean_us: 0., p50_us: 0., p99_us: 0., p999_us: 0., max_us: 0. };
        let agent =
            AgentStats { captured: 0, lost, sampled_out: 0, written: 0, cookie: 0, memory_wait: None, classes: 0 };
        Status {
            name: String::new(),
            pid: 1,
            version: String::new(),
            is_replaced: false,
            upgrades: 0,
            notice: None,
            trace_lost: None,
            uptime_s: 0.0,
            started: String::new(),
            cold_reason: None,
            state_lost: None,
            server: None,
            servers: Vec::new(),
            pools: Vec::new(),
            cache: CacheStatus {
                enabled: true,
                wanted_bytes: 0,
                granted_bytes: 0,
                granted_at_most_bytes: 0,
                used_bytes: 0,
                local_wanted_bytes: 0,
                local_granted_bytes: 0,
                local_granted_at_most_bytes: 0,
                local_server: None,
                admission: String::new(),
                insertion: String::new(),
                lru_hit_ratio: None,
                bimodal_hit_ratio: None,
                hit_ratio: None,
            },
            disks: Vec::new(),
            port: Some(PortStatus {
                socket: String::new(),
                attached: true,
                outlives_crash: false,
                agent: Some(agent),
                agent_heard_s_ago: None,
                advice: 0,
                class_advice: 0,
                nbd_clients: None,
                offers_more: false,
            }),
            counters: counters.iter().map(|&(name, value)| (name.to_owned(), value)).collect::<BTreeMap<_, _>>(),
            latency: Latencies {
                read: empty.clone(),
                read_from_cache: empty.clone(),
                read_from_disk: empty.clone(),
                write: empty,
            },
            hedging: HedgingStatus { is_off: false, late_after_us: 0., disk: None, server: None },
            migration: None,
            memory: MemoryStatus {
                index_bytes: 0,
                buffer_bytes: 0,
                known_blocks: 0,
                guest_bytes: 0,
                guest_bytes_indexed: 0,
                guest_resident_bytes: None,
            },
        }
    }

    /// Returns two runs. Without the cache: two measured reads of 8 ms. With it: records 0 to 3 warm it; of four
    /// measured reads one is new.
    fn acts() -> (Act, CacheAct) {
        use TracedSource::{Cache, Disk};
        let baseline = Act {
            warmup: phase(1, 2, 8000.0),
            measured: phase(2, 4, 8000.0),
            kernel_faults: Vec::new(),
            trace: vec![read(1.5, 0, 50, Disk), read(2.5, 1, 8, Disk), read(3.5, 2, 8, Disk)],
        };
        let mut trace: Vec<_> = (0..4).map(|record| read(1.0 + record as f64 / 10.0, record, 8, Disk)).collect();
        trace.extend([read(2.1, 0, 1, Cache), read(2.2, 1, 1, Cache), read(2.3, 2, 1, Cache), read(2.4, 9, 8, Disk)]);
        trace.extend([read(5.0, 3, 1, Cache), read(11.0, 4, 8, Disk), read(19.0, 4, 1, Cache)]);
        let kill = Kill {
            phase: phase(4, 20, 1000.0),
            killed_ns: 10 * SECOND,
            restarted_ns: 12 * SECOND,
            app_reads_before: 7,
        };
        let fates = |reported, [admitted, duplicate, zero, unmatched, dropped, passed_over]: [u64; 6], lost| {
            let counters = [
                ("evictions_reported", reported),
                ("evictions_admitted", admitted),
                ("evictions_duplicate", duplicate),
                ("evictions_zero", zero),
                ("evictions_unmatched", unmatched),
                ("evictions_dropped", dropped),
                ("evictions_passed_over", passed_over),
            ];
            status(&counters, lost)
        };
        let cached = CacheAct {
            act: Act { warmup: phase(1, 2, 8000.0), measured: phase(2, 4, 2000.0), kernel_faults: Vec::new(), trace },
            before: fates(10, [10, 0, 0, 0, 0, 0], 1),
            warm: with_pools(fates(60, [60, 0, 0, 0, 0, 0], 1), &[pool(false, 0, [60, 0])]),
            after: with_pools(fates(110, [98, 5, 3, 1, 1, 2], 3), &[pool(false, 72, [98, 72])]),
            end: fates(120, [103, 5, 3, 1, 6, 2], 3),
            page_cache_pages: 1000,
            kill,
            samples: vec![
                Sample { at_s: 9.5, used_bytes: 500 },
                Sample { at_s: 12.5, used_bytes: 0 },
                Sample { at_s: 19.9, used_bytes: 300 },
            ],
        };
        (baseline, cached)
    }

    fn report(baseline: &Act, cached: &CacheAct, file_system: Option<String>) -> Report {
        let plan = Arguments::parse_from(["remoca-demo"]).plan().unwrap();
        make(&plan, Conditions::default(), baseline, cached, None, file_system)
    }

    fn pool(is_local_tier: bool, hits: u64, [pages_sent, pages_received]: [u64; 2]) -> PoolStatus {
        PoolStatus {
            server: if is_local_tier { "local:/tier" } else { "tcp:far" }.into(),
            state: "connected".into(),
            is_mapped: is_local_tier,
            is_local_tier,
            generation: "1".into(),
            granted_bytes: 0,
            used_bytes: 4096,
            hits,
            latency_us: Some(if is_local_tier { 2.0 } else { 150.0 }),
            pages_sent,
            pages_requested: pages_received,
            pages_received,
            pages_taken_back: 0,
        }
    }

    fn with_pools(status: Status, pools: &[PoolStatus]) -> Status {
        Status { pools: pools.to_vec(), ..status }
    }

    /// Returns a run in two tiers: of four measured reads, one is new, two are from the local tier, and one from the other.
    fn in_tiers(cached: &CacheAct) -> TierAct {
        let with = |status: &Status, local, remote| with_pools(status.clone(), &[local, remote]);
        let act = Act {
            warmup: phase(1, 2, 8000.0),
            measured: phase(2, 4, 1000.0),
            kernel_faults: Vec::new(),
            trace: cached.act.trace.clone(),
        };
        let mut after = with(&cached.after, pool(true, 52, [90, 52]), pool(false, 27, [30, 27]));
        after.counters.insert("demotions".into(), 30);
        TierAct {
            act,
            before: cached.before.clone(),
            warm: with(&cached.warm, pool(true, 4, [60, 4]), pool(false, 3, [20, 3])),
            end: after.clone(),
            after,
            page_cache_pages: 1000,
        }
    }

    #[test]
    fn tiers_are_those_of_the_measured_reads() {
        let (baseline, cached) = acts();
        let plan = Arguments::parse_from(["remoca-demo"]).plan().unwrap();
        let report_of = |tiers: &TierAct| make(&plan, Conditions::default(), &baseline, &cached, Some(tiers), None);
        let mut observed = in_tiers(&cached);
        let report = report_of(&observed);
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        assert!(report.expectations.iter().all(|expected| expected.met || expected.what.starts_with("Speed-up of")));
        let tiers = report.tiers.unwrap();
        assert_eq!((tiers.local.hits, tiers.remote.hits, tiers.remote_alone.hits), (48, 24, 72));
        assert!(near(tiers.local.hit_ratio, 0.5) && near(tiers.remote.hit_ratio, 0.25));
        assert!(near(tiers.hit_ratio, 0.75) && near(tiers.lru_hit_ratio, 0.75) && near(tiers.speedup, 8.0 / 2.75));
        assert_eq!((tiers.local.median_us, tiers.demotions), (Some(2.0), 30));
        assert_eq!((tiers.network_pages, tiers.network_pages_without), (10 + 24, 38 + 72));
        assert_eq!((tiers.local_bytes + tiers.remote_bytes, tiers.remote_bytes), (1 << 30, 896 << 20));

        // A pool that is another one since has only its own counters.
        observed.after.pools[1].generation = "2".into();
        assert_eq!(report_of(&observed).tiers.unwrap().remote.hits, 27);
        // More fetched than without a local tier, fewer hits, and each kind of error.
        let is_unmet = |report: &Report, what: &str| {
            report.judge().iter().any(|expected| !expected.met && expected.what.starts_with(what))
        };
        observed.after.pools[1].pages_received = 1000;
        let mut report = report_of(&observed);
        assert!(is_unmet(&report, "Pages fetched") && !is_unmet(&report, "Hit ratio"));
        report.tiers.as_mut().unwrap().hit_ratio -= 0.011;
        assert!(is_unmet(&report, "Hit ratio"));
        let spoil: [fn(&mut TierAct); 6] = [
            |tiers| tiers.act.warmup.outcome.io_errors = 1,
            |tiers| tiers.act.measured.outcome.wrong_signatures = 1,
            |tiers| tiers.act.kernel_faults.push("I/O error".into()),
            |tiers| *tiers.after.counters.get_mut("evictions_reported").unwrap() += 1,
            |tiers| *tiers.end.counters.entry("fetch_wrong".into()).or_default() += 1,
            |tiers| *tiers.end.counters.entry("disconnections".into()).or_default() += 1,
        ];
        for (number, spoil) in spoil.iter().enumerate() {
            let mut observed = in_tiers(&cached);
            spoil(&mut observed);
            assert!(!report_of(&observed).problems.is_empty(), "{number}");
        }
    }

    fn near(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() < 1e-9
    }

    #[test]
    fn figures_follow_from_what_was_observed() {
        let (baseline, cached) = acts();
        let report = report(&baseline, &cached, None);
        assert!(near(report.baseline.mean_read_ms, 8.0), "the warm-up does not count");
        assert!(near(report.cached.run.mean_read_ms, 2.75) && near(report.speedup, 8.0 / 2.75));
        assert!(near(report.app_speedup, 4.0));
        assert!(near(report.cached.hit_ratio, 0.75) && near(report.cached.lru_hit_ratio, 0.75));
        assert!(near(report.t_remote_ms, 1.0) && near(report.t_disk_ms, 8.0));
        assert!(near(report.ideal_speedup, 1.0 / (0.25 + 0.75 / 8.0)));
        // Exactly an LRU's hits, and no other cost: the best possible result.
        assert!(near(report.p15_ratio, 1.0));
        let sources = report.cached.run.measured.sources;
        assert_eq!(sources, Sources { guest_page_cache: 20 * 24 - 96, remote_memory: 72, disk: 24 });
        assert_eq!(report.cached.lru_pages, (1 << 18) + 1000);
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }

    #[test]
    fn evictions_are_those_of_their_time_and_add_up() {
        let (baseline, cached) = acts();
        let report = report(&baseline, &cached, None);
        let Evictions { reported, admitted, duplicate, zero, unmatched, dropped, passed_over, lost, known_ratio } =
            report.evictions;
        assert_eq!((reported, admitted, duplicate, zero, unmatched, dropped, lost), (100, 88, 5, 3, 1, 1, 2));
        assert_eq!(passed_over, 2);
        assert!(report.evictions.adds_up() && near(known_ratio, 0.99));
        assert_eq!((report.server_kill.evictions.reported, report.server_kill.evictions.dropped), (10, 5));
    }

    #[test]
    fn kill_is_told_by_its_times() {
        let (baseline, cached) = acts();
        let kill = report(&baseline, &cached, None).server_kill;
        assert_eq!((kill.reads_after, kill.app_reads_after), (2, 13));
        assert_eq!((kill.hit_ratio_before, kill.hit_ratio_away, kill.hit_ratio_end), (1.0, 0.0, 1.0));
        assert_eq!((kill.cache_used_bytes_before, kill.cache_used_bytes_end), (500, 300));
        assert_eq!((kill.seconds_before, kill.seconds_away, kill.seconds_after), (6.0, 2.0, 8.0));
    }

    #[test]
    fn every_kind_of_error_is_a_problem() {
        let spoil: [fn(&mut Act, &mut CacheAct); 6] = [
            |baseline, _| baseline.warmup.outcome.io_errors = 1,
            |_, cached| cached.act.measured.outcome.wrong_signatures = 1,
            |_, cached| cached.kill.phase.outcome.io_errors = 1,
            |_, cached| cached.act.kernel_faults.push("I/O error".into()),
            |_, cached| {
                cached.after.counters.insert("evictions_reported".into(), 111);
            },
            |_, cached| {
                cached.end.counters.insert("fetch_wrong".into(), 1);
            },
        ];
        for (number, spoil) in spoil.iter().enumerate() {
            let (mut baseline, mut cached) = acts();
            spoil(&mut baseline, &mut cached);
            assert!(!report(&baseline, &cached, None).problems.is_empty(), "{number}");
        }
        let (baseline, cached) = acts();
        assert!(!report(&baseline, &cached, Some("bad".into())).problems.is_empty());
    }

    #[test]
    fn expectations_are_judged() {
        let (baseline, mut cached) = acts();
        let met = |report: &Report| report.expectations.iter().map(|expected| expected.met).collect::<Vec<_>>();
        // 2.9 times is too little.
        assert_eq!(met(&report(&baseline, &cached, None)), [true, true, true, true, false, true]);
        cached.kill.phase.outcome.io_errors = 1;
        cached.after.counters.insert("evictions_unmatched".into(), 3);
        cached.act.trace.pop();
        assert_eq!(met(&report(&baseline, &cached, None)), [false, false, false, false, false, true]);
    }

    #[test]
    fn json_has_the_promised_fields() {
        let (baseline, cached) = acts();
        let json = serde_json::to_value(report(&baseline, &cached, None)).unwrap();
        for path in [
            "/baseline/mean_read_ms",
            "/baseline/app_mean_read_ms",
            "/cached/mean_read_ms",
            "/cached/app_mean_read_ms",
            "/cached/hit_ratio",
            "/cached/lru_hit_ratio",
            "/speedup",
            "/p15_ratio",
            "/t_remote_ms",
            "/t_disk_ms",
            "/evictions/reported",
            "/evictions/admitted",
            "/evictions/duplicate",
            "/evictions/zero",
            "/evictions/unmatched",
            "/evictions/dropped",
            "/evictions/lost",
            "/verify_errors",
            "/guest_io_errors",
            "/server_kill/reads_after",
            "/server_kill/io_errors",
            "/conditions/disk_delay_ms",
        ] {
            assert!(json.pointer(path).is_some_and(serde_json::Value::is_number), "{path}");
        }
        assert!(json.pointer("/conditions/accelerator").is_some_and(serde_json::Value::is_string));
    }
}
