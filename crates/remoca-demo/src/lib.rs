//! The demonstration: a guest reads more than its memory holds from a slow disk, first without the cache, then with it;
//! then the memory server is killed under it and started again; then it reads once more, with a part of the cache in memory of the
//! VM's host.
//!
//! [`Arguments`] become a [`plan::Plan`], which [`acts`] runs on a [`stage`] of real processes and a real guest.
//! [`analysis`] derives figures from the VM process's trace, [`figures`] all others. [`report`] is the JSON, [`page`]
//! the HTML, [`table`] the text. The guest laboratory (`remoca-lab`) starts and watches the processes.
//!
//! Decision 0011 defines what is measured where, and h, t_remote and t_disk. The access pattern is that of papers/remoca.txt
//! IV.B.

mod acts;
pub mod analysis;
mod arguments;
mod conditions;
mod figures;
pub mod lru;
mod observed;
mod page;
mod phases;
mod plan;
mod progress;
mod reading;
pub mod report;
mod runs;
mod sampler;
mod stage;
mod table;
mod tier_figures;
mod tiers;
mod vm;

use anyhow::Result;
pub use arguments::Arguments;
use remoca_lab::figures::{self as figures_of_targets, Figure};
use report::Report;

/// Runs the demonstration, and writes `report.json` and `report.html` to the folder of the arguments.
///
/// # Errors
/// If the demonstration could not be carried out. Faults in the guest are in [`Report::problems`].
pub fn run(arguments: &Arguments) -> Result<Report> {
    let out = arguments.out();
    let report = if arguments.render { page::read(&out)? } else { acts::perform(&arguments.plan()?, &out)? };
    page::write(&report, &out)?;
    println!("{}", table::render(&report));
    if let Some(figure) = target_figure(arguments, &report) {
        figures_of_targets::save("demo", &[figure], &())?;
    }
    println!("  Written: {0}/report.json, {0}/report.html", out.display());
    for problem in &report.problems {
        eprintln!("remoca-demo: {problem}");
    }
    Ok(report)
}

/// Returns the figure of P15 for `make bench-targets`, or `None` if this run has none: it was a quick one, only showed an
/// earlier one, or had faults.
fn target_figure(arguments: &Arguments, report: &Report) -> Option<Figure> {
    let is_whole = !arguments.render && !report.conditions.quick && report.problems.is_empty();
    is_whole.then(|| {
        let figure = Figure::single("P15", report.p15_ratio);
        figure.beside("speedup", report.speedup).beside("ideal_speedup", report.ideal_speedup)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn only_a_whole_run_without_faults_has_a_figure() {
        let usual = Arguments::parse_from(["remoca-demo"]);
        let report = Report { p15_ratio: 0.97, ..Report::default() };
        assert_eq!(target_figure(&usual, &report).map(|figure| figure.value), Some(0.97));
        assert_eq!(target_figure(&Arguments::parse_from(["remoca-demo", "--render"]), &report), None);
        let mut quick = report.clone();
        quick.conditions.quick = true;
        assert_eq!(target_figure(&usual, &quick), None);
        assert_eq!(target_figure(&usual, &Report { problems: vec!["wrong bytes".into()], ..report }), None);
    }
}
