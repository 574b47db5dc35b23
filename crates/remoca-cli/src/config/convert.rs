//! `remoca config convert`: a file of arguments, as units were once configured, becomes a file of the configuration.

use crate::output::output;
use crate::settings::edit::{MODE, replace, table};
use crate::settings::file::{SERVE, Text, VERSION, VMS};
use crate::settings::schema::{self, Schema};
use crate::settings::{Unusable, env_file, host_path, vm_path};
use crate::{disk, serve};
use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use remoca_disk::start::DiskOptions;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use toml_edit::{Array, ArrayOfTables, DocumentMut, Item, Table, Value};

/// Variable of the memory server's file.
const SERVE_ARGS: &str = "REMOCA_SERVE_ARGS";
/// Name of the memory server's file, without `.env`.
const SERVE_NAME: &str = "serve";

/// Converts `file`, which stays as it is. A file that was converted before is left alone.
///
/// # Errors
/// If it has something that a file of the configuration cannot express, or the configuration has other settings already. Then
/// nothing is changed.
pub fn run(file: &Path, folder: &Path) -> Result<()> {
    let shown = file.display();
    let name = file.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".env"));
    let name = name.with_context(|| format!("{shown}: the name of such a file is NAME.env"))?;
    let text = std::fs::read_to_string(file).with_context(|| shown.to_string())?;
    let target = if name == SERVE_NAME { host_path(folder) } else { vm_path(folder, name) };
    let converted = if name == SERVE_NAME { with_server(&text, &target) } else { of_vm(&text, &target).map(Some) };
    let Some(converted) = converted.with_context(|| format!("{shown} cannot be converted, and stays as it is"))? else {
        return Ok(writeln!(output(), "{shown}: it sets nothing")?);
    };
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    // The memory server's user has to read the host's file. Whoever could not read a VM's file before still cannot.
    let mode = if name == SERVE_NAME { MODE } else { file.metadata()?.mode() & MODE };
    replace(&target, converted.as_bytes(), mode).with_context(|| format!("cannot write {}", target.display()))?;
    Ok(writeln!(output(), "{shown}: converted to {}", target.display())?)
}

/// Returns the file of the VM that `text` describes.
fn of_vm(text: &str, target: &Path) -> Result<String> {
    let words = words_of(text, disk::FORMER_VARIABLE)?.unwrap_or_default();
    let schema = disk::schema().of_vm();
    let matches = parse(&schema, &words)?;
    let mut document = DocumentMut::new();
    document.insert("version", Item::Value(VERSION.into()));
    fill(document.as_table_mut(), &schema, &matches)?;
    let mut disks = ArrayOfTables::new();
    for (mut disk, number) in disk::disks_of(&matches)?.into_iter().zip(0..) {
        disk.name.get_or_insert_with(|| DiskOptions::default_name(number));
        disks.push(table(&disk));
    }
    if disks.is_empty() {
        bail!("it has no disk");
    }
    document.insert("disk", Item::ArrayOfTables(disks));
    let converted = checked(document, target, |text| text.vm(&schema).1)?;
    match Text::read(target).map_err(|problem| Unusable(vec![problem]))? {
        Some(before) if before.text != converted => bail!("there is {} already", target.display()),
        _ => Ok(converted),
    }
}

/// Returns the host's file at `target` with the memory server that `text` describes, or `None` if it describes none.
fn with_server(text: &str, target: &Path) -> Result<Option<String>> {
    let Some(words) = words_of(text, SERVE_ARGS)? else { return Ok(None) };
    let schema = serve::schema();
    let matches = parse(&schema, &words)?;
    let before = Text::read(target).map_err(|problem| Unusable(vec![problem]))?;
    let before = before.map_or_else(|| format!("version = {VERSION}\n"), |before| before.text);
    let mut document: DocumentMut =
        before.parse().with_context(|| format!("{} is not valid TOML", target.display()))?;
    let mut table = Table::new();
    fill(&mut table, &schema, &matches)?;
    match document.get(SERVE).map(ToString::to_string) {
        Some(before) if before.trim() == table.to_string().trim() => return Ok(Some(document.to_string())),
        Some(_) => bail!("{} has a table [{SERVE}] already", target.display()),
        None => {}
    }
    document.insert(SERVE, Item::Table(table));
    let all = |text: &Text| [text.host(SERVE, &schema).1, text.host(VMS, &disk::schema()).1].concat();
    checked(document, target, all).map(Some)
}

/// Returns the words of the variable `name`, or `None` if it is not set.
fn words_of(text: &str, name: &str) -> Result<Option<Vec<String>>> {
    let mut words = None;
    for (variable, value) in env_file::variables(text).map_err(anyhow::Error::msg)? {
        if variable != name {
            bail!(
                "the variable {variable} has no place in the configuration: set it in a drop-in of the unit (Environment=), and remove it here"
            );
        }
        words = Some(env_file::words(&value));
    }
    Ok(words)
}

/// Parses the arguments. Those that are missing are no error here.
fn parse(schema: &Schema, words: &[String]) -> Result<ArgMatches> {
    let matches = schema.parse(words).map_err(|error| anyhow::Error::msg(schema::text_of(&error)))?;
    for arg in schema.flags().filter(|arg| is_typed(&matches, arg)) {
        let name = arg.get_long().unwrap_or_default();
        if !disk::DISK_FLAGS.contains(&name) {
            schema.key(name).map_err(anyhow::Error::msg)?;
        }
    }
    Ok(matches)
}

fn is_typed(matches: &ArgMatches, arg: &Arg) -> bool {
    matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
}

/// Inserts every key that was typed, except disks, into a table.
fn fill(table: &mut Table, schema: &Schema, matches: &ArgMatches) -> Result<()> {
    for arg in schema.keys().filter(|arg| is_typed(matches, arg)) {
        let Some(key) = arg.get_long().filter(|key| *key != "disk") else { continue };
        let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
        let values: Option<Vec<&str>> = raw.map(|value| value.to_str()).collect();
        let values = values.with_context(|| format!("the value of --{key} is not valid UTF-8"))?;
        let value = match values[..] {
            _ if schema::is_switch(arg) => Value::from(values != ["false"]),
            [value] if !schema::is_list(arg) => value.parse::<i64>().map_or_else(|_| value.into(), Value::from),
            _ => Value::Array(Array::from_iter(values)),
        };
        table.insert(key, Item::Value(value));
    }
    Ok(())
}

/// Returns the text of a document that was found to be right.
fn checked(
    document: DocumentMut,
    path: &Path,
    check: impl FnOnce(&Text) -> Vec<crate::settings::file::Problem>,
) -> Result<String> {
    let text = Text { path: path.into(), text: document.to_string() };
    let problems = check(&text);
    if problems.is_empty() { Ok(text.text) } else { Err(Unusable(problems).into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(name: &str, text: &str) -> (tempfile::TempDir, Result<()>) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        let result = run(&file, folder.path());
        (folder, result)
    }

    #[test]
    fn what_a_file_said_is_in_the_configuration() {
        let cases = [
            (
                "# The shop.\nREMOCA_DISK_ARGS=--server tcp:a:1 --server unix:/b --cache 2G --no-hedge --nbd-settle=5 \\\n  --disk \
                 image=/x/web.img,socket=/run/a.sock,name=root,queues=2 --disk \"image=/y z,swap\" --port /run/p --nbd systemd\n",
                "version = 1\nport = \"/run/p\"\nnbd = [\"systemd\"]\nserver = [\"tcp:a:1\", \"unix:/b\"]\ncache = \"2G\"\nnbd-settle = 5\n\
                 no-hedge = true\n\n[[disk]]\nname = \"root\"\nimage = \"/x/web.img\"\nsocket = \"/run/a.sock\"\nqueues = 2\n\
                 format = \"raw\"\n\n[[disk]]\nname = \"disk1\"\nimage = \"/y z\"\nswap = true\nformat = \"raw\"\n",
            ),
            (
                "REMOCA_DISK_ARGS='--blk-file /dev/vg/x --socket-path /s --read-only --guest-memory-max 1T'\n",
                "version = 1\nguest-memory-max = \"1T\"\n\n[[disk]]\nname = \"disk0\"\nimage = \"/dev/vg/x\"\nsocket = \"/s\"\n\
                 read-only = true\nformat = \"raw\"\n",
            ),
        ];
        for (before, after) in cases {
            let (folder, result) = convert("web1.env", before);
            result.unwrap();
            assert_eq!(std::fs::read_to_string(vm_path(folder.path(), "web1")).unwrap(), after);
            assert_eq!(std::fs::read_to_string(folder.path().join("web1.env")).unwrap(), before);
            run(&folder.path().join("web1.env"), folder.path()).unwrap();
        }
    }

    #[test]
    fn what_cannot_be_expressed_is_named_and_nothing_changes() {
        let cases = [
            ("REMOCA_DISK_ARGS=--image /a --socket /s\nREMOCA_LOG=debug\n", "the variable REMOCA_LOG has no place"),
            ("REMOCA_DISK_ARGS=--image /a --fd 3\n", "`fd` can only be said on the command line"),
            (
                "REMOCA_DISK_ARGS=--image /a --socket /s --control /c\n",
                "`control` can only be said on the command line",
            ),
            ("REMOCA_DISK_ARGS=--image /a --socket /s --cahce 1G\n", "unexpected argument"),
            ("REMOCA_DISK_ARGS=--image /a --socket /s --cache 1X\n", "`1X` is not a size"),
            ("REMOCA_DISK_ARGS=--cache 1G\n", "it has no disk"),
            ("REMOCA_DISK_ARGS=--disk 'image=/a\n--cache 1G\n", "line 2: `--cache 1G` is no assignment"),
            ("", "it has no disk"),
        ];
        for (text, words) in cases {
            let (folder, result) = convert("web1.env", text);
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(words) && error.contains("stays as it is"), "{text}: {error}");
            assert_eq!(std::fs::read_to_string(folder.path().join("web1.env")).unwrap(), text);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{text}");
        }
        let (folder, _) = convert("web1.env", "REMOCA_DISK_ARGS=--image /a --socket /s\n");
        std::fs::write(folder.path().join("web1.env"), "REMOCA_DISK_ARGS=--image /b --socket /s\n").unwrap();
        let error = format!("{:#}", run(&folder.path().join("web1.env"), folder.path()).unwrap_err());
        assert!(error.contains("web1.toml already"), "{error}");
    }

    #[test]
    fn a_file_is_no_more_readable_than_before_unless_the_memory_server_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let cases = [
            ("web1.env", "REMOCA_DISK_ARGS=--image /a --socket /s\n", vm_path(folder.path(), "web1"), 0o600),
            ("serve.env", "REMOCA_SERVE_ARGS=--listen tcp:a:1 --memory 8G\n", host_path(folder.path()), 0o644),
        ];
        for (name, text, target, mode) in cases {
            let file = folder.path().join(name);
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
            run(&file, folder.path()).unwrap();
            assert_eq!(target.metadata().unwrap().mode() & 0o777, mode, "{name}");
        }
    }

    #[test]
    fn the_memory_server_gets_a_table_of_the_hosts_file() {
        let (folder, result) = convert("serve.env", "# --listen is missing\n#REMOCA_SERVE_ARGS=--memory 8G\n");
        result.unwrap();
        assert!(!host_path(folder.path()).exists() && folder.path().join("serve.env").exists());
        std::fs::write(host_path(folder.path()), "version = 1 # one\n\n[vms]\ncache = \"2G\"\n").unwrap();
        let file = folder.path().join("serve.env");
        std::fs::write(&file, "REMOCA_SERVE_ARGS=--listen tcp:10.0.0.5:7070 --memory 8G --max-clients 5\n").unwrap();
        run(&file, folder.path()).unwrap();
        let expected = "version = 1 # one\n\n[vms]\ncache = \"2G\"\n\n[serve]\nlisten = [\"tcp:10.0.0.5:7070\"]\nmemory = \"8G\"\n\
                        max-clients = 5\n";
        assert_eq!(std::fs::read_to_string(host_path(folder.path())).unwrap(), expected);
        run(&file, folder.path()).unwrap();
        assert_eq!(std::fs::read_to_string(host_path(folder.path())).unwrap(), expected);
        std::fs::write(&file, "REMOCA_SERVE_ARGS=--listen tcp:10.0.0.5:7070 --memory 9G\n").unwrap();
        let error = format!("{:#}", run(&file, folder.path()).unwrap_err());
        assert!(error.contains("has a table [serve] already"), "{error}");
    }
}
