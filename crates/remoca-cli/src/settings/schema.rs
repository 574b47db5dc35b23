//! The keys that a table of a file may have: the flags of a subcommand.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use std::error::Error;

/// Keys of one table.
pub struct Schema {
    command: Command,
    /// Flags that are no settings.
    without: &'static [&'static str],
    /// Flags that say something of one VM alone, so that they cannot stand in the host's file.
    per_vm: &'static [&'static str],
    /// Whether the table is one VM's.
    is_of_vm: bool,
}

impl Schema {
    /// Returns the keys for the flags of `command`, except those named `without`.
    pub fn new(command: Command, without: &'static [&'static str], per_vm: &'static [&'static str]) -> Self {
        let mut command = command.no_binary_name(true).disable_help_flag(true);
        command.build();
        Self { command, without, per_vm, is_of_vm: false }
    }

    /// Returns the same keys, with those that say something of one VM alone.
    #[must_use]
    pub fn of_vm(self) -> Self {
        Self { is_of_vm: true, ..self }
    }

    /// Returns the flags that are keys here.
    pub fn keys(&self) -> impl Iterator<Item = &Arg> {
        self.flags().filter(|arg| self.is_key(arg))
    }

    fn is_key(&self, arg: &Arg) -> bool {
        let is_of_others = |name| !self.is_of_vm && self.per_vm.contains(&name);
        arg.get_long().is_some_and(|name| !self.without.contains(&name) && !is_of_others(name))
    }

    /// Returns all flags, with those that are no keys.
    pub fn flags(&self) -> impl Iterator<Item = &Arg> {
        self.command.get_arguments()
    }

    /// Returns the flag `name`.
    pub fn flag(&self, name: &str) -> Option<&Arg> {
        self.flags().find(|arg| arg.get_long() == Some(name))
    }

    /// Returns the flag whose key is `name`.
    ///
    /// # Errors
    /// If there is none; the text suggests what may have been meant.
    pub fn key(&self, name: &str) -> Result<&Arg, String> {
        if let Some(arg) = self.keys().find(|arg| arg.get_long() == Some(name)) {
            return Ok(arg);
        }
        if self.per_vm.contains(&name) {
            return Err(format!("`{name}` belongs into the file of a VM: each VM has its own"));
        }
        if let Some(arg) = self.flag(name) {
            return Err(format!("`{name}` can only be said on the command line{}", self.instead(arg)));
        }
        Err(unknown(name, self.keys().filter_map(Arg::get_long)))
    }

    fn instead(&self, arg: &Arg) -> &'static str {
        match arg.get_long() {
            Some("image" | "socket" | "read-only" | "format") if self.is_of_vm => {
                "; in a file, disks are tables: [[disk]]"
            }
            _ => "",
        }
    }

    /// Parses `words` as the subcommand does.
    ///
    /// # Errors
    /// As clap reports them.
    pub fn parse<W: Into<std::ffi::OsString> + Clone>(
        &self,
        words: impl IntoIterator<Item = W>,
    ) -> Result<clap::ArgMatches, clap::Error> {
        self.command.clone().try_get_matches_from(words)
    }

    /// Checks words that stand for a part of the flags, of which others may be required.
    ///
    /// # Errors
    /// If they are wrong; the text is that of the flag's own parser.
    pub fn check(&self, words: &[String]) -> Result<(), String> {
        match self.parse(words) {
            Err(error) if !is_lacking(&error) => Err(text_of(&error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Returns whether two flags exclude each other.
    pub fn are_rivals(&self, one: &Arg, other: &Arg) -> bool {
        let conflicts =
            |a: &Arg, b: &Arg| self.command.get_arg_conflicts_with(a).iter().any(|arg| arg.get_id() == b.get_id());
        conflicts(one, other) || conflicts(other, one)
    }
}

/// Returns whether a flag may be repeated.
pub fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Returns whether a flag is on or off: it has no value, or true or false.
pub fn is_switch(arg: &Arg) -> bool {
    let values = arg.get_possible_values();
    matches!(arg.get_action(), ArgAction::SetTrue)
        || values.iter().map(clap::builder::PossibleValue::get_name).eq(["true", "false"])
}

/// Returns the message for a name that is none of `known`.
pub fn unknown<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    let mut near: Vec<_> = known.map(|known| (strsim::jaro(name, known), known)).collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    match near.first() {
        Some((nearness, nearest)) if *nearness > 0.7 => format!("unknown key `{name}`: did you mean `{nearest}`?"),
        _ => {
            let mut names: Vec<_> = near.into_iter().map(|(_, known)| known).collect();
            names.sort_unstable();
            format!("unknown key `{name}`: known are {}", names.join(", "))
        }
    }
}

/// Returns whether a flag is missing that another one needs.
pub fn is_lacking(error: &clap::Error) -> bool {
    error.kind() == ErrorKind::MissingRequiredArgument
}

/// Returns what is wrong, without clap's frame of usage and advice.
pub fn text_of(error: &clap::Error) -> String {
    if let Some(source) = error.source() {
        return source.to_string();
    }
    let text = error.to_string();
    if is_lacking(error) {
        // Each in a line of its own, with its value.
        let flags = text.lines().filter_map(|line| line.trim().strip_prefix("--")?.split(' ').next());
        let keys: Vec<_> = flags.map(|flag| format!("`{flag}`")).collect();
        return format!("{} is missing", keys.join(", "));
    }
    let line = text.lines().next().unwrap_or_default();
    let line = line.strip_prefix("error: ").unwrap_or(line).replace("the argument ", "").replace("--", "");
    // The second line of an error about a value that is none of a few.
    match text.lines().map(str::trim).find(|line| line.starts_with("[possible values: ")) {
        Some(values) => format!("{line} {values}"),
        None => line,
    }
}
