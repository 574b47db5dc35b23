//! `remoca-demo`: what `make demo` runs.

use std::process::ExitCode;

use clap::Parser;
use remoca_demo::{Arguments, run};

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(report) if report.problems.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("remoca-demo: {error:#}");
            ExitCode::from(2)
        }
    }
}
