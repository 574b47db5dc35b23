//! `remoca generate`: manual pages and completions of shells, made from the options themselves.

use crate::config::manual;
use crate::status::explain;
use anyhow::{Context, Result};
use clap::Args;
use clap_complete::{Generator, Shell};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// Write the manual pages, and the completions for bash, zsh and fish, into a folder.
///
/// The package has them installed already. Pages: `man -l FOLDER/remoca-disk.1`. Completions: source FOLDER/remoca.bash, put
/// FOLDER/_remoca where $fpath leads, FOLDER/remoca.fish into ~/.config/fish/completions.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// The folder, which is made if it does not exist
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Runs the subcommand for the program that `command` describes.
///
/// # Errors
/// If a file cannot be written.
pub fn run(args: &GenerateArgs, command: clap::Command) -> Result<()> {
    // `remoca help SUBCOMMAND` needs no page of its own.
    let mut command = command.disable_help_subcommand(true);
    let folder = &args.folder;
    let context = || format!("cannot write to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(context)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        // Its own function for files panics where the disk is full.
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, &name, &mut script);
        std::fs::write(folder.join(shell.file_name(&name)), script).with_context(context)?;
    }
    clap_mangen::generate_to(command, folder).with_context(context)?;
    for (subcommand, more) in [("status", explain::manual()), ("config", manual::manual())] {
        let page = folder.join(format!("{name}-{subcommand}.1"));
        let mut page = File::options().append(true).open(page).with_context(context)?;
        page.write_all(more.as_bytes()).with_context(context)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn each_subcommand_has_a_page_and_each_shell_its_completions() {
        let folder = tempfile::tempdir().unwrap();
        let args = GenerateArgs { folder: folder.path().join("new") };
        run(&args, crate::Arguments::command()).unwrap();
        let read = |name: &str| std::fs::read_to_string(args.folder.join(name)).unwrap_or_else(|_| panic!("no {name}"));
        for subcommand in [
            "serve", "disk", "host", "status", "top", "web", "curve", "trace", "sim", "set", "forget", "upgrade",
            "migrate", "support", "config", "check", "xml", "generate",
        ] {
            assert!(read("remoca.1").contains(&format!("remoca\\-{subcommand}(1)")), "{subcommand}");
            assert!(read(&format!("remoca-{subcommand}.1")).contains(".SH OPTIONS"), "{subcommand}");
            for completions in ["remoca.bash", "_remoca", "remoca.fish"] {
                assert!(read(completions).contains(subcommand), "{subcommand} in {completions}");
            }
        }
        let page = read("remoca-config.1");
        for words in [
            "cache = SIZE",
            "server = [ADDRESS, ...]",
            "no\\-hedge = true|false",
            "format",
            "listen = [ADDRESS, ...]",
            "total = SIZE",
            "bound = PERCENT",
        ] {
            assert!(page.contains(&format!("\\fB{words}\\fR")), "{words}: {page}");
        }
        assert!(read("remoca-status.1").contains(".SH COUNTERS\n.TP\n\\fBreads\\fR\nGuest reads"));
        assert!(!args.folder.join("remoca-help.1").exists());
        let checked = std::process::Command::new("bash").arg("-n").arg(args.folder.join("remoca.bash")).status();
        assert!(checked.unwrap().success());
    }
}
