//! The demonstration: a guest reads more than its memory holds from a slow disk, first without the cache, then with it;
//! then the memory server is killed under it and started again.
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

/// Runs the demonstration, and writes `report.json` and `report.html` to the folder of the arguments.
///
/// # Errors
/// If the demonstration could not be carried out. Faults in the guest are in [`Report::problems`].
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
