//! Flags, the VM's file and the host's file as one: the first of them that has a setting decides it.

use super::file::{DiskEntry, Place, Settings};
use super::schema::{self, Schema};
use anyhow::{Error, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use remoca_disk::start::WrongOptions;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    File(Place),
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::File(place) => place.fmt(f),
            Self::Default => f.write_str("default"),
        }
    }
}

/// All settings of a process.
pub struct Merged {
    /// Every setting except the disks of a file.
    pub matches: ArgMatches,
    /// Disks of the VM's file, or `None` if the command line says which disks there are, or nothing does.
    pub disks: Option<Vec<DiskEntry>>,
    /// Files that decide settings; what is not here is a flag or a default.
    files: BTreeMap<String, Place>,
}

/// Returns the settings of files without those that `words` of the command line displace.
///
/// # Errors
/// As clap reports them.
pub fn undisplaced(
    schema: &Schema,
    words: &[OsString],
    files: impl IntoIterator<Item = Settings>,
) -> Result<Vec<Settings>, clap::Error> {
    let typed = typed(schema, &schema.parse(words.iter().cloned())?);
    let is_free = |key: &str| schema.flag(key).is_some_and(|arg| is_free(schema, &typed, arg));
    let settings = files.into_iter().map(|mut settings| {
        settings.entries.retain(|key, _| is_free(key));
        settings.disks = settings.disks.filter(|_| is_free("disk"));
        settings
    });
    Ok(settings.collect())
}

/// Returns the flags of a command line.
fn typed<'s>(schema: &'s Schema, matches: &ArgMatches) -> Vec<&'s Arg> {
    let is_typed = |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    schema.flags().filter(is_typed).collect()
}

/// Returns whether neither the flag itself nor one that excludes it is among `taken`.
fn is_free(schema: &Schema, taken: &[&Arg], arg: &Arg) -> bool {
    !taken.iter().any(|other| other.get_id() == arg.get_id() || schema.are_rivals(arg, other))
}

impl Merged {
    /// Merges `words` of the command line with the settings of files, of which the first ones prevail.
    ///
    /// # Errors
    /// Of the command line, as clap reports them; of files that do not go together, in the words of a file.
    pub fn new(schema: &Schema, words: &[OsString], files: &[&Settings]) -> Result<Self> {
        let mut taken = typed(schema, &schema.parse(words.iter().cloned())?);
        let disks = schema.flag("disk").filter(|disk| is_free(schema, &taken, disk));
        let disks = disks.and_then(|_| files.iter().find_map(|settings| settings.disks.clone()));
        let (mut all, mut places) = (Vec::new(), BTreeMap::new());
        for settings in files {
            let args = settings.entries.iter().filter_map(|(key, entry)| Some((schema.flag(key)?, key, entry)));
            let free: Vec<_> = args.filter(|(arg, ..)| is_free(schema, &taken, arg)).collect();
            for (arg, key, entry) in free {
                all.extend(entry.words.iter().map(OsString::from));
                places.insert(key.clone(), entry.place.clone());
                taken.push(arg);
            }
        }
        all.extend(words.iter().cloned());
        let matches = schema.parse(all).map_err(|error| contradiction(schema, &error, files))?;
        Ok(Self { matches, disks, files: places })
    }

    /// Returns where the value of a key comes from.
    pub fn origin(&self, key: &str, id: &str) -> Origin {
        match (self.files.get(key), self.matches.value_source(id)) {
            (Some(place), _) => Origin::File(place.clone()),
            (None, Some(ValueSource::CommandLine)) => Origin::Flag,
            (None, _) => Origin::Default,
        }
    }
}

/// Returns the error of files that do not go together.
fn contradiction(schema: &Schema, error: &clap::Error, files: &[&Settings]) -> Error {
    let mut entries = files.iter().flat_map(|settings| &settings.entries);
    let needing = entries.find(|(_, entry)| schema.parse(&entry.words).is_err_and(|error| schema::is_lacking(&error)));
    let text = schema::text_of(error);
    let text = match needing.filter(|_| schema::is_lacking(error)) {
        Some((key, _)) => format!("{text}: `{key}` needs it"),
        None => text,
    };
    Error::msg(text).context(WrongOptions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk;
    use crate::settings::file::{Text, VMS};

    fn merged(words: &str, vm: &str, host: &str) -> Merged {
        let text = |path: &str, text: &str| Text { path: path.into(), text: format!("version = 1\n{text}") };
        let (vm, problems) = text("V", vm).vm(&disk::schema().of_vm());
        assert_eq!(problems, []);
        let (host, problems) = text("H", &format!("[vms]\n{host}")).host(VMS, &disk::schema());
        assert_eq!(problems, []);
        let words: Vec<_> = words.split_whitespace().map(OsString::from).collect();
        Merged::new(&disk::schema(), &words, &[&vm, &host]).unwrap()
    }

    fn value(merged: &Merged, key: &str) -> String {
        let id = key.replace('-', "_");
        let values = merged.matches.get_raw(&id).into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        format!("{} by {}", values.join(" "), merged.origin(key, &id))
    }

    #[test]
    fn a_flag_is_before_the_vms_file_and_that_before_the_hosts() {
        let merged = merged(
            "--server tcp:f:1 --name x",
            "server = ['tcp:v:1', 'tcp:v:2']\ncache = '2G'\nno-hedge = false\n",
            "server = 'tcp:h:1'\ncache = '3G'\nguest-memory = '4G'\nno-hedge = true\n",
        );
        assert_eq!(value(&merged, "server"), "tcp:f:1 by flag");
        assert_eq!(value(&merged, "cache"), "2G by V:3");
        assert_eq!(value(&merged, "guest-memory"), "4G by H:5");
        assert_eq!(value(&merged, "no-hedge"), "false by V:4");
        assert_eq!(value(&merged, "buffers"), "64M by default");
    }

    #[test]
    fn what_another_setting_needs_is_missed_in_the_words_of_a_file() {
        let text = Text { path: "V".into(), text: "version = 1\ncache = '1G'\nnbd-port = true\n".into() };
        let (settings, problems) = text.vm(&disk::schema().of_vm());
        assert_eq!(problems, []);
        let error = Merged::new(&disk::schema(), &[], &[&settings]).err().unwrap();
        assert_eq!(format!("{error:#}"), "these options cannot be used: `nbd` is missing: `nbd-port` needs it");
        assert!(Merged::new(&disk::schema(), &[OsString::from("--nbd=systemd")], &[&settings]).is_ok());
    }

    #[test]
    fn a_flag_turns_off_what_a_file_turns_on() {
        let of = |words| value(&merged(words, "no-hedge = true\n", "no-frames = true\n"), "no-hedge");
        assert_eq!(of(""), "true by V:2");
        assert_eq!(
            [of("--no-hedge=false"), of("--no-hedge=true"), of("--no-hedge")],
            ["false by flag", "true by flag", "true by flag"]
        );
        assert_eq!(value(&merged("--no-frames=false", "", "no-frames = true\n"), "no-frames"), "false by flag");
    }

    #[test]
    fn what_excludes_a_flag_gives_way_to_it() {
        let file = "port = '/p'\n[[disk]]\nname = 'a'\nimage = '/a'\nformat = 'raw'\n";
        assert_eq!(merged("", file, "").disks.unwrap().len(), 1);
        assert_eq!(value(&merged("", file, ""), "port"), "/p by V:2");
        let typed = merged("--nbd systemd --nbd-port --image /b", file, "");
        assert!(typed.disks.is_none() && typed.matches.get_raw("port").is_none());
        assert!(merged("--disk image=/b", file, "").disks.is_none());
    }
}
