use std::process::ExitCode;

fn main() -> ExitCode {
    remoca_agent::cli::main()
}
