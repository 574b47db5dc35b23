//! The `remoca` program for tests: always built with the feature `ablation`, which the shipped one never has.

use std::process::ExitCode;

fn main() -> ExitCode {
    remoca_cli::main()
}
