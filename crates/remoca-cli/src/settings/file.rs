//! One file of the configuration, read with all of its problems.

use super::fields::{self, FIELDS};
use super::schema::{self, Schema};
use remoca_disk::start::DiskOptions;
use remoca_protocol::shown::clean;
use remoca_view::text;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Version of the files that this program reads.
pub const VERSION: i64 = 1;
/// Maximum size of a file. Two of them fit in the copy that a process keeps.
const BYTES_MAX: u64 = 1 << 20;
/// Table of the host's file with the defaults of all VMs.
pub const VMS: &str = "vms";
/// Table of the host's file with the memory server's settings.
pub const SERVE: &str = "serve";
/// Table of the host's file with the settings of `remoca host`.
pub const HOST: &str = "host";
/// Table of both files with the limits that `remoca host` keeps.
pub const MEMORY: &str = "memory";
const DISK: &str = "disk";
/// Everything that the host's file may have outside of tables.
const OF_HOST: [&str; 5] = [VERSION_KEY, VMS, SERVE, HOST, MEMORY];

/// A file and its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    pub path: PathBuf,
    pub text: String,
}

/// A place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub path: PathBuf,
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", text::one_line(&self.path.display().to_string(), usize::MAX), self.line)
    }
}

/// What is wrong at a place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub place: Place,
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&clean(&format!("{}: {}", self.place, self.text)))
    }
}

/// A disk of a VM's file.
#[derive(Clone, Debug)]
pub struct DiskEntry {
    pub place: Place,
    pub options: DiskOptions,
}

/// The value of a key, as words of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub place: Place,
    pub words: Vec<String>,
}

/// The settings of one table.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Keys with their values.
    pub entries: BTreeMap<String, Entry>,
    /// Disks, or `None` if the table says nothing of disks.
    pub disks: Option<Vec<DiskEntry>>,
}

impl Text {
    /// Reads a file. Returns `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is not text.
    pub fn read(path: &Path) -> Result<Option<Self>, Problem> {
        let read = || {
            let file = std::fs::metadata(path)?;
            // A pipe would have to be waited for.
            if !file.is_file() || file.len() > BYTES_MAX {
                return Err(std::io::Error::other(format!("a file of at most {BYTES_MAX} bytes is wanted")));
            }
            std::fs::read_to_string(path)
        };
        match read() {
            Ok(text) => Ok(Some(Self { path: path.into(), text })),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                let place = Place { path: path.into(), line: 1 };
                Err(Problem { place, text: format!("it cannot be read: {error}") })
            }
        }
    }

    /// Reads the settings of a VM's file.
    pub fn vm(&self, schema: &Schema) -> (Settings, Vec<Problem>) {
        let mut reader = Reader::new(self);
        let document = reader.document();
        let settings = reader.settings(document.get_ref(), schema, true);
        (settings, reader.finish())
    }

    /// Reads the table `name` of the host's file. All that is outside of tables is also checked.
    pub fn host(&self, name: &str, schema: &Schema) -> (Settings, Vec<Problem>) {
        let mut reader = Reader::new(self);
        let document = reader.document();
        for (key, _) in document.get_ref().iter() {
            let text: &str = key.get_ref();
            if !OF_HOST.contains(&text) {
                let advice = match schema.key(text) {
                    Ok(_) => format!("`{text}` belongs into a table, such as [{VMS}]"),
                    Err(_) => schema::unknown(text, OF_HOST.into_iter()),
                };
                reader.report(key.span().start, advice);
            }
        }
        let settings = reader.table(document.get_ref(), name, schema);
        (settings, reader.finish())
    }

    /// Reads the table `name` of a VM's file. Nothing else of it is checked.
    pub fn vm_table(&self, name: &str, schema: &Schema) -> (Settings, Vec<Problem>) {
        let mut reader = Reader::new(self);
        let document = reader.document();
        let settings = reader.table(document.get_ref(), name, schema);
        (settings, reader.finish())
    }
}

const VERSION_KEY: &str = "version";

struct Reader<'t> {
    text: &'t Text,
    problems: Vec<Problem>,
    /// Lines that are no TOML: what they mean is not looked at.
    broken: Vec<usize>,
}

impl<'t> Reader<'t> {
    fn new(text: &'t Text) -> Self {
        Self { text, problems: Vec::new(), broken: Vec::new() }
    }

    fn place(&self, at: usize) -> Place {
        let before = self.text.text.get(..at).unwrap_or(&self.text.text);
        Place { path: self.text.path.clone(), line: 1 + before.matches('\n').count() }
    }

    fn report(&mut self, at: usize, text: impl Into<String>) {
        let place = self.place(at);
        if !self.broken.contains(&place.line) {
            self.problems.push(Problem { place, text: text.into() });
        }
    }

    /// Parses the text and checks its version.
    fn document(&mut self) -> Spanned<DeTable<'t>> {
        let (document, errors) = DeTable::parse_recoverable(&self.text.text);
        for error in &errors {
            self.report(error.span().map_or(0, |span| span.start), error.message());
        }
        self.broken = self.problems.iter().map(|problem| problem.place.line).collect();
        let version = document.get_ref().get(VERSION_KEY);
        match version
            .map(|version| (version.span().start, version.get_ref().as_integer().map(|n| n.as_str().to_owned())))
        {
            Some((_, Some(number))) if number == VERSION.to_string() => {}
            Some((at, Some(number))) => {
                self.report(at, format!("version {number} is of another remoca: this one reads version {VERSION}"));
            }
            Some((at, None)) => self.report(at, format!("version must be a number: version = {VERSION}")),
            None if errors.is_empty() => {
                self.report(
                    0,
                    format!("the version of the configuration is missing: say version = {VERSION} in the first line"),
                );
            }
            None => {}
        }
        document
    }

    /// Returns all problems, in the order of their lines.
    fn finish(mut self) -> Vec<Problem> {
        self.problems.sort_by_key(|problem| problem.place.line);
        self.problems
    }

    /// Reads the table `name` of a document, which need not be there.
    fn table(&mut self, document: &DeTable<'_>, name: &str, schema: &Schema) -> Settings {
        let Some(table) = document.get(name) else { return Settings::default() };
        if let DeValue::Table(table) = table.get_ref() {
            return self.settings(table, schema, false);
        }
        self.report(table.span().start, format!("`{name}` must be a table: [{name}]"));
        Settings::default()
    }

    fn settings(&mut self, table: &DeTable<'_>, schema: &Schema, is_root: bool) -> Settings {
        let mut settings = Settings::default();
        for (key, value) in table {
            let (at, name): (usize, &str) = (key.span().start, key.get_ref());
            // The limits are no concern of the VM process.
            if is_root && (name == VERSION_KEY || name == MEMORY) {
                continue;
            }
            let arg = match schema.key(name) {
                Ok(arg) => arg,
                Err(error) => {
                    self.report(at, error);
                    continue;
                }
            };
            if name == DISK {
                settings.disks = Some(self.disks(value));
                continue;
            }
            let words = words(arg, name, value.get_ref()).and_then(|words| schema.check(&words).map(|()| words));
            match words {
                Ok(words) => {
                    settings.entries.insert(name.to_owned(), Entry { place: self.place(at), words });
                }
                Err(error) => self.report(at, format!("{name}: {error}")),
            }
        }
        let all: Vec<_> = settings.entries.values().flat_map(|entry| entry.words.clone()).collect();
        if self.problems.is_empty()
            && let Err(error) = schema.check(&all)
        {
            self.report(0, error);
        }
        settings
    }

    fn disks(&mut self, value: &Spanned<DeValue<'_>>) -> Vec<DiskEntry> {
        let DeValue::Array(array) = value.get_ref() else {
            self.report(value.span().start, "disks are tables: [[disk]]");
            return Vec::new();
        };
        let mut disks: Vec<DiskEntry> = Vec::new();
        for value in array.iter() {
            let DeValue::Table(table) = value.get_ref() else {
                self.report(value.span().start, "disks are tables: [[disk]]");
                continue;
            };
            let entry = self.disk(value.span().start, table);
            let same = |other: &&DiskEntry| entry.options.name.is_some() && other.options.name == entry.options.name;
            if let (Some(other), Some(name)) = (disks.iter().find(same), &entry.options.name) {
                let line = other.place.line;
                self.report(value.span().start, format!("the disk in line {line} also has the name `{name}`"));
            }
            disks.push(entry);
        }
        disks
    }

    fn disk(&mut self, at: usize, table: &DeTable<'_>) -> DiskEntry {
        let mut options = DiskOptions::new(String::new());
        for (key, value) in table {
            let (at, name): (usize, &str) = (key.span().start, key.get_ref());
            let Some(field) = FIELDS.iter().find(|field| field.name == name) else {
                self.report(at, schema::unknown(name, FIELDS.iter().map(|field| field.name)));
                continue;
            };
            let set = scalar(value.get_ref()).and_then(|value| (field.set)(&mut options, &value));
            if let Err(error) = set {
                self.report(at, format!("{name}: {error}"));
            }
        }
        for (key, why) in fields::REQUIRED {
            if !table.contains_key(key) {
                self.report(at, format!("this disk has no `{key}`: {why}"));
            }
        }
        DiskEntry { place: self.place(at), options }
    }
}

/// Returns the words of the command line that say the same as `key = value`.
fn words(arg: &clap::Arg, key: &str, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let word = |value: &DeValue<'_>| scalar(value).map(|value| format!("--{key}={value}"));
    match value {
        DeValue::Boolean(on) if schema::is_switch(arg) => Ok(on.then(|| format!("--{key}")).into_iter().collect()),
        _ if schema::is_switch(arg) => Err("must be true or false".into()),
        DeValue::Array(values) if schema::is_list(arg) => values.iter().map(|value| word(value.get_ref())).collect(),
        DeValue::Boolean(_) => Err("must be a string or a number".into()),
        value => Ok(vec![word(value)?]),
    }
}

/// Returns a single value as the command line has it.
fn scalar(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        DeValue::Boolean(on) => Ok(on.to_string()),
        DeValue::Array(_) => Err("must be one value, not a list".into()),
        DeValue::Integer(_) | DeValue::Datetime(_) | DeValue::Table(_) => {
            Err("must be a string, a decimal number, true or false".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{disk, serve};

    fn text(text: &str) -> Text {
        Text { path: "F".into(), text: text.into() }
    }

    #[test]
    fn what_is_no_file_of_a_configuration_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let [file, pipe] = ["file", "pipe"].map(|name| folder.path().join(name));
        assert_eq!(Text::read(&file), Ok(None));
        std::fs::write(&file, "#".repeat(1 << 20)).unwrap();
        assert_eq!(Text::read(&file).unwrap().unwrap().text.len(), 1 << 20);
        std::fs::write(&file, "#".repeat((1 << 20) + 1)).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        for path in [&file, &pipe] {
            assert!(Text::read(path).unwrap_err().text.contains("at most 1048576 bytes"));
        }
    }

    #[test]
    fn keys_become_words_of_the_command_line() {
        let (settings, problems) = text(
            "version = 1\nserver = [\"tcp:a:1\", 'unix:/b']\ncache = \"2G\"\nno-hedge = true\nno-frames = false\nnbd-settle = 7\n\n\
             [[disk]]\nname = 'root'\nimage = '/a,b'\nformat = 'raw'\nqueues = 4\nswap = true\n[[disk]]\nname = 'x'\nimage = 'y'\n\
             format = 'raw'\n",
        )
        .vm(&disk::schema().of_vm());
        assert_eq!(problems, []);
        let words = |key: &str| settings.entries[key].words.join(" ");
        assert_eq!(words("server"), "--server=tcp:a:1 --server=unix:/b");
        assert_eq!([words("cache"), words("nbd-settle")], ["--cache=2G", "--nbd-settle=7"]);
        assert_eq!([words("no-hedge"), words("no-frames")], ["--no-hedge", ""]);
        assert_eq!(settings.entries["cache"].place.line, 3);
        let disks = settings.disks.unwrap();
        assert_eq!((disks.len(), disks[0].options.image.as_str(), disks[0].options.queues), (2, "/a,b", 4));
        assert!(disks[0].options.swap && !disks[1].options.swap);
        assert_eq!(disks[1].place.line, 14);
    }

    #[test]
    fn every_mistake_is_reported_with_its_line() {
        let cases: &[(&str, &[&str])] = &[
            ("cache = '1G'\n", &["F:1: the version of the configuration is missing"]),
            ("version = 2", &["F:1: version 2 is of another remoca"]),
            ("version = 'x'", &["F:1: version must be a number"]),
            (
                "version = 1\ncahce = '1G'\nserver = 'h:1'\nguest-memory = '1X'\n",
                &[
                    "F:2: unknown key `cahce`: did you mean `cache`?",
                    "F:3: server: `h:1` is not an address",
                    "F:4: guest-memory: `1X`",
                ],
            ),
            ("version = 1\nqwertyuiop = 1\n", &["F:2: unknown key `qwertyuiop`: known are buffers, cache,"]),
            ("version = 1\ncontrol = '/x'\n", &["F:2: `control` can only be said on the command line"]),
            (
                "version = 1\nimage = '/x'\n",
                &["F:2: `image` can only be said on the command line; in a file, disks are tables"],
            ),
            ("version = 1\nno-hedge = 1\n", &["F:2: no-hedge: must be true or false"]),
            ("version = 1\ncache = true\n", &["F:2: cache: must be a string or a number"]),
            ("version = 1\ncache = ['1G', '2G']\n", &["F:2: cache: must be one value"]),
            (
                "version = 1\nport = '/p'\nnbd = 'systemd'\nnbd-port = true\n",
                &["F:1: 'nbd-port' cannot be used with 'port"],
            ),
            (
                "version = 1\nsocket-group = 'no-such-group'\n",
                &["F:2: socket-group: there is no group `no-such-group`"],
            ),
            (
                "version = 1\nnbd-settle = 9999\n",
                &["F:2: nbd-settle: `9999` is not a whole number of seconds from 0 to 3600"],
            ),
            ("version = 1\ncache = \nbuffers = \n", &["F:2: ", "F:3: "]),
            ("version = 1\ncache = '1G'\ncache = '2G'\n", &["F:3: duplicate key"]),
            ("version = 1\ndisk = 'x'\n", &["F:2: disks are tables: [[disk]]"]),
            (
                "version = 1\n[[disk]]\nimag = '/a'\nsector = 7\n",
                &[
                    "F:2: this disk has no `name`",
                    "F:2: this disk has no `image`",
                    "F:2: this disk has no `format`: say format = \"raw\"",
                    "F:3: unknown key `imag`: did you mean `image`?",
                    "F:4: sector: must be 512 or 4096",
                ],
            ),
            (
                "version = 1\n[[disk]]\nname='a'\nimage='/a'\nformat='vmdk'\n[[disk]]\nname='a'\nimage='/b'\nformat='raw'\n",
                &["F:5: format: must be raw", "F:6: the disk in line 2 also has the name `a`"],
            ),
        ];
        for (file, expected) in cases {
            let (_, problems) = text(file).vm(&disk::schema().of_vm());
            let problems: Vec<_> = problems.iter().map(Problem::to_string).collect();
            assert_eq!(problems.len(), expected.len(), "{file}: {problems:#?}");
            for (problem, expected) in problems.iter().zip(*expected) {
                assert!(problem.starts_with(expected), "{file}: {problem}, not {expected}");
            }
        }
    }

    #[test]
    fn the_host_has_tables() {
        let good = text("version = 1\n[vms]\ncache = '3G'\n[serve]\nlisten = 'tcp:h:1'\nmemory = '8G'\n");
        let (settings, problems) = good.host(VMS, &disk::schema());
        assert_eq!((settings.entries["cache"].words.join(" "), problems), ("--cache=3G".into(), Vec::new()));
        let (settings, problems) = good.host(SERVE, &serve::schema());
        assert_eq!((settings.entries.len(), problems), (2, Vec::new()));
        let bad = text("version = 1\ncache = '1G'\nserv = 1\n[vms]\nport = '/p'\n[serve]\nlisten = 'h'\n");
        let (_, problems) = bad.host(VMS, &disk::schema());
        let problems: Vec<_> = problems.iter().map(Problem::to_string).collect();
        let expected = [
            "F:2: `cache` belongs into a table, such as [vms]",
            "F:3: unknown key `serv`: did you mean `serve`?",
            "F:5: `port` belongs into the file of a VM: each VM has its own",
        ];
        assert_eq!(problems, expected, "mistakes of [serve] are no concern of VMs");
    }
}
