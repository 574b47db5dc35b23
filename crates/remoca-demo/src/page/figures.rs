//! The tables of the page: figures of both runs, and the conditions of the measurement.

use maud::{Markup, html};

use crate::{
    conditions::Conditions,
    report::{PhaseFigures, Report},
};
use remoca_page::numbers::{bytes, ms, thousands};

/// One figure of a phase.
type Pick<T> = fn(&PhaseFigures) -> T;

const LATENCIES: [(&str, Pick<f64>); 9] = [
    ("mean read at the disk", |phase| phase.vm.mean_read_ms),
    ("\u{2003}median", |phase| phase.vm.p50_ms),
    ("\u{2003}99 of 100 within", |phase| phase.vm.p99_ms),
    ("\u{2003}longest", |phase| phase.vm.max_ms),
    ("\u{2003}mean of those from the memory server", |phase| phase.vm.mean_cache_read_ms),
    ("\u{2003}mean of those from the disk", |phase| phase.vm.mean_disk_read_ms),
    ("mean record read in the guest", |phase| phase.app.mean_ms),
    ("\u{2003}median", |phase| phase.app.p50_ms),
    ("\u{2003}99 of 100 within", |phase| phase.app.p99_ms),
];

const COUNTS: [(&str, Pick<u64>); 4] = [
    ("record reads in the guest", |phase| phase.app.reads),
    ("reads at the disk", |phase| phase.vm.reads),
    ("\u{2003}from the memory server", |phase| phase.vm.reads_from_cache),
    ("\u{2003}from the disk", |phase| phase.vm.reads_from_disk),
];

/// Returns the section that compares both runs, phase by phase.
pub fn figures(report: &Report) -> Markup {
    let (base, cached) = (&report.baseline, &report.cached.run);
    html! {
        section.card {
            h2 { "Figures" }
            div.scroll {
                table {
                    thead { tr { th {} th { "without the cache" } th { "with the cache" } th { "ratio" } } }
                    tbody {
                        (phase("Warm-up", &base.warmup, &cached.warmup))
                        (phase("Measured", &base.measured, &cached.measured))
                    }
                }
            }
        }
    }
}

fn phase(name: &str, base: &PhaseFigures, cached: &PhaseFigures) -> Markup {
    html! {
        tr { th colspan="4" { (name) } }
        @for (what, pick) in LATENCIES {
            @let (base, cached) = (pick(base), pick(cached));
            tr { td { (what) } td { (ms(base)) } td { (ms(cached)) } td { (times(base, cached)) } }
        }
        @for (what, pick) in COUNTS {
            tr { td { (what) } td { (thousands(pick(base))) } td { (thousands(pick(cached))) } td {} }
        }
        tr {
            td { "seconds" }
            td { (format!("{:.1}", base.seconds)) }
            td { (format!("{:.1}", cached.seconds)) }
            td { (format!("{:.2} ×", base.seconds / cached.seconds.max(0.001))) }
        }
    }
}

fn times(base: f64, cached: f64) -> String {
    if base > 0.0 && cached > 0.0 { format!("{:.2} ×", base / cached) } else { "–".into() }
}

/// Returns the section about the conditions: what was run, and on which machine.
pub fn facts(conditions: &Conditions) -> Markup {
    let c = conditions;
    let locked = if c.memory_locked { "locked" } else { "not locked" };
    let disk = html! { code { (c.disk) } ", one request at a time: every read takes " (c.disk_delay_ms) " ms" };
    let reads = html! {
        (thousands(c.record_count)) " records of " (c.record_bytes >> 10) " KiB; " (c.pattern) "; seed " (c.seed) "; "
        (thousands(c.warmup_reads)) " to warm up, " (thousands(c.measured_reads)) " measured"
    };
    let guest = html! {
        (c.guest_system) ", Linux " (c.guest_kernel) ", " (c.guest_memory_mib) " MiB, " (c.guest_cpu_count)
        " processors, under " (c.accelerator)
    };
    let machine = html! {
        (c.cpu) ", " (c.cpu_count) " processors, " (bytes(c.memory_mib << 20)) ", " (c.system) ", " (c.kernel)
    };
    let facts = [
        ("Disk", disk),
        ("File set", html! { (bytes(c.set_bytes)) " in " (c.file_count) " files on " (c.file_system) }),
        ("Reads", reads),
        ("Cache", html! { (bytes(c.cache_bytes)) " of " (c.memory_server) ", memory " (locked) }),
        ("Guest", guest),
        ("Machine", machine),
        ("Programs", html! { (c.qemu) "; " (c.nbdkit) "; remoca " (c.remoca_version) " (" (c.commit) ")" }),
        ("Load average", html! { (format!("{:.2} before, {:.2} after", c.load_before, c.load_after)) }),
        ("Time taken", html! { (format!("{:.0} s, and {:.0} s to prepare", c.run_seconds, c.prepare_seconds)) }),
    ];
    html! {
        section.card {
            h2 { "Conditions" }
            div.scroll {
                table.facts { tbody { @for (name, value) in &facts { tr { td { (name) } td { (value) } } } } }
            }
        }
    }
}
