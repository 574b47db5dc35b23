//! The section of the page about the local tier.

use maud::{Markup, html};
use remoca_page::numbers::{bytes, ms, percent, thousands};

use crate::report::{Report, TierFigures, TierRun};

/// Returns the section that compares the cache in two tiers with the one that is all at the memory server.
pub fn section(report: &Report, tiers: &TierRun) -> Markup {
    let (alone, run) = (&report.cached, &tiers.run);
    let us = |tier: &TierFigures| tier.median_us.map_or_else(|| "\u{2013}".to_owned(), |us| ms(us / 1e3));
    let none = String::new;
    let rows = [
        ("mean read at the disk", ms(alone.run.mean_read_ms), ms(run.mean_read_ms)),
        ("\u{2003}of those from the cache", ms(report.t_remote_ms), ms(run.measured.vm.mean_cache_read_ms)),
        ("mean record read in the guest", ms(alone.run.app_mean_read_ms), ms(run.app_mean_read_ms)),
        ("reads that hit", percent(alone.hit_ratio), percent(tiers.hit_ratio)),
        ("blocks from the local tier", none(), percent(tiers.local.hit_ratio)),
        ("\u{2003}median time of its answers", none(), us(&tiers.local)),
        ("blocks from the memory server", percent(tiers.remote_alone.hit_ratio), percent(tiers.remote.hit_ratio)),
        ("\u{2003}median time of its answers", us(&tiers.remote_alone), us(&tiers.remote)),
        ("pages on the network", thousands(tiers.network_pages_without), thousands(tiers.network_pages)),
        ("\u{2003}sent", thousands(tiers.remote_alone.pages_sent), thousands(tiers.remote.pages_sent)),
        ("\u{2003}fetched", thousands(tiers.remote_alone.pages_received), thousands(tiers.remote.pages_received)),
    ];
    html! {
        section.card {
            h2 { "With a local tier" }
            p.note {
                "The same reads once more, with a cache of the same size: " (bytes(tiers.local_bytes)) " of the VM’s own \
                 host, which the VM process reads and writes by itself, in front of " (bytes(tiers.remote_bytes)) " at the \
                 memory server. Evicted pages enter the local tier; only those that fall out of it unread travel. Measured \
                 part only."
            }
            div.scroll {
                table {
                    thead { tr { th {} th { "all at the memory server" } th { (bytes(tiers.local_bytes)) " of it local" } } }
                    tbody {
                        @for (what, alone, found) in &rows { tr { td { (what) } td { (alone) } td { (found) } } }
                    }
                }
            }
        }
    }
}
