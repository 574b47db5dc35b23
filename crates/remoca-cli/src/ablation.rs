//! The `remoca` program as tests want it: with the feature `ablation`, which the other never has.

use std::process::ExitCode;

fn main() -> ExitCode {
    remoca_cli::main()
}
