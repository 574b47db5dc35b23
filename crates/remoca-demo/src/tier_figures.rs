//! Derives the figures of the act with a local tier.

use remoca_protocol::control::{PoolStatus, Status};

use crate::{
    analysis::{BLOCK_BYTES, exact_lru, ratio},
    observed::{CacheAct, TierAct},
    plan::Plan,
    report::{TierFigures, TierRun},
    runs::{counted, evictions, over, run_figures},
};

/// Returns the figures of the act. `cached` is the one whose cache is all at the memory server; `baseline_ms` is the mean read
/// without a cache.
pub fn tier_run(plan: &Plan, tiers: &TierAct, cached: &CacheAct, baseline_ms: f64) -> TierRun {
    let run = run_figures(plan, &tiers.act);
    let blocks = run.measured.vm.blocks;
    let pages = plan.cache_bytes / BLOCK_BYTES + tiers.page_cache_pages;
    let counters = counted(&tiers.warm, &tiers.after);
    let alone = tier_of(&cached.warm, &cached.after, false, run_figures(plan, &cached.act).measured.vm.blocks);
    let remote = tier_of(&tiers.warm, &tiers.after, false, blocks);
    TierRun {
        local_bytes: plan.local_bytes,
        remote_bytes: plan.cache_bytes - plan.local_bytes,
        speedup: over(baseline_ms, run.mean_read_ms),
        hit_ratio: run.measured.vm.hit_ratio,
        block_hit_ratio: run.measured.vm.block_hit_ratio,
        lru_hit_ratio: exact_lru(&tiers.act.trace, tiers.act.measured.window, pages).hit_ratio,
        local: tier_of(&tiers.warm, &tiers.after, true, blocks),
        demotions: counters.get("demotions").copied().unwrap_or_default(),
        network_pages: remote.pages_sent + remote.pages_received,
        network_pages_without: alone.pages_sent + alone.pages_received,
        remote,
        remote_alone: alone,
        evictions: evictions(&tiers.before, &tiers.after),
        disconnections: tiers.end.counters.get("disconnections").copied().unwrap_or_default(),
        run,
    }
}

/// Returns what the pools of a tier did between two looks at the status, in which the guest read `blocks`.
fn tier_of(from: &Status, to: &Status, is_local: bool, blocks: u64) -> TierFigures {
    let pools = || to.pools.iter().filter(|pool| pool.is_local_tier == is_local);
    let grown = |count: fn(&PoolStatus) -> u64| {
        pools().map(|pool| count(pool).saturating_sub(before(from, pool).map_or(0, count))).sum::<u64>()
    };
    let hits = grown(|pool| pool.hits);
    TierFigures {
        hits,
        hit_ratio: ratio(hits, blocks),
        median_us: pools().find_map(|pool| pool.latency_us),
        used_bytes: pools().map(|pool| pool.used_bytes).sum(),
        pages_sent: grown(|pool| pool.pages_sent),
        pages_received: grown(|pool| pool.pages_received),
    }
}

/// Returns the earlier status of a pool, or `None` if it was not there.
fn before<'a>(status: &'a Status, pool: &PoolStatus) -> Option<&'a PoolStatus> {
    status.pools.iter().find(|other| other.server == pool.server && other.generation == pool.generation)
}
