//! The `remoca` program for tests. It is always built with the feature `ablation`, which the shipped program never
//! has.

use std::process::ExitCode;

fn main() -> ExitCode {
    remoca_cli::main()
}
