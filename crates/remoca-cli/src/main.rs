//! The `remoca` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    remoca_cli::main()
}
