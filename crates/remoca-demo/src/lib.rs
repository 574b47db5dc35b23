//! The demonstration: a guest reads more than its memory holds from a slow disk, first without the cache, then with it;
//! then the memory server is killed under it and started again.
//!
//! [`Arguments`] become a [`plan::Plan`]; [`acts`] runs it on a [`stage`] of real processes and a real guest;
//! [`analysis`] makes figures of the trace of the VM process, [`figures`] all others, [`report`] the JSON, [`page`] the HTML, [`table`] the text.
//! Everything that starts and watches processes comes from the guest laboratory (`remoca-lab`).
//!
//! What is measured where, and what h, t_remote and t_disk are: docs/decisions/0011-demo-measures.md. The access pattern is
//! that of papers/remoca.txt IV.B.

mod acts;
pub mod analysis;
mod arguments;
mod chart;
mod conditions;
mod figures;
pub mod lru;
mod observed;
mod page;
mod plan;
mod progress;
mod reading;
pub mod report;
mod sampler;
mod stage;
mod table;
mod vm;

use anyhow::Result;
pub use arguments::Arguments;
use report::Report;

/// Runs the demonstration and leaves `report.json` and `report.html` in the folder that was asked for.
///
/// # Errors
/// If it could not be carried out. What went wrong in the guest is no error here but in [`Report::problems`].
pub fn run(arguments: &Arguments) -> Result<Report> {
    let out = arguments.out();
    let report = if arguments.render { page::read(&out)? } else { acts::perform(&arguments.plan()?, &out)? };
    page::write(&report, &out)?;
    println!("{}", table::render(&report));
    println!("  Written: {0}/report.json, {0}/report.html", out.display());
    for problem in &report.problems {
        eprintln!("remoca-demo: {problem}");
    }
    Ok(report)
}
