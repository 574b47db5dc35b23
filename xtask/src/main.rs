//! `cargo xtask <command>`: commands for developers of remoca. Each command has one module and one line of [`COMMANDS`].

mod dist;
mod fuzz;
mod mutants;
mod properties;
mod run;
mod screenshots;
mod shape;
mod sim;
mod test;

use std::ffi::OsString;
use std::process::ExitCode;

struct Command {
    name: &'static str,
    about: &'static str,
    run: fn(Vec<OsString>) -> Result<(), String>,
}

const COMMANDS: &[Command] = &[
    Command { name: "dist", about: "Debian packages in out/dist (--help tells more)", run: dist::run },
    Command { name: "fuzz", about: "fuzz what strangers send (--help tells more)", run: fuzz::run },
    Command { name: "lint", about: "format, structure and lints", run: test::lint },
    Command {
        name: "mutants",
        about: "changes of the code that tests must see (--help tells more)",
        run: mutants::run,
    },
    Command { name: "properties", about: "property tests with cases never tried before", run: properties::run },
    Command { name: "screenshots", about: "pictures of page and terminal in docs/images", run: screenshots::run },
    Command { name: "shape", about: "measure the structure of the sources (--help tells more)", run: shape::run },
    Command { name: "sim", about: "simulate seeds, or explain one (--help tells more)", run: sim::run },
    Command { name: "test", about: "everything that must hold, with real guests", run: test::run },
    Command { name: "test-long", about: "tests that take too long for `test`, or those named", run: test::run_long },
];

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let name = arguments.next().unwrap_or_default();
    let Some(command) = COMMANDS.iter().find(|command| name == command.name) else {
        eprintln!("usage: cargo xtask <command> [options]\n");
        for Command { name, about, .. } in COMMANDS {
            eprintln!("  {name:11} {about}");
        }
        return ExitCode::from(2);
    };
    match (command.run)(arguments.collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
