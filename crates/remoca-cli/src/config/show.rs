//! `remoca config show`: every setting of one VM, and where it comes from.

use crate::output::{output, say};
use crate::runtime;
use crate::settings::edit::table;
use crate::settings::kept::Kept;
use crate::settings::layers::{Merged, Origin};
use crate::settings::schema::Schema;
use crate::settings::{Files, Unusable, schema, vm_path};
use crate::size::parse_size;
use crate::{disk, memory, size};
use anyhow::{Result, bail};
use clap::Arg;
use remoca_protocol::control::{Command, Status};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use toml_edit::{Array, Value};

/// Shows the settings that the VM `name` has, or would have if it were started now, as a file of the configuration. The name may
/// be the path of a control socket. With `origin` each line ends with where the value comes from.
///
/// # Errors
/// If a file has a mistake, or a process is there and does not answer.
pub fn run(name: &str, folder: &Path, origin: bool) -> Result<()> {
    let socket = runtime::socket_named(name).ok();
    let asked = socket.as_ref().filter(|socket| socket.exists()).map(|socket| runtime::ask(socket, Command::Status));
    let running = match asked {
        // It is there, and the files need not say what it has.
        Some(Err(error)) if !runtime::is_absent(&error) => return Err(error),
        asked => asked.and_then(Result::ok),
    };
    let name = running.as_ref().map_or(name, |status| &status.name);
    if name.contains('/') {
        bail!("no VM process answers at {name}: is `remoca disk` running with this control socket?");
    }
    let words = running.as_ref().map(|status| words_of(status, name, folder)).unwrap_or_default();
    let files = Files::read(folder, Some(name));
    if running.is_none() && files.as_ref().is_ok_and(|files| files.vm.is_none()) {
        let file = vm_path(folder, name);
        let text = "no process of this name answers: these are the settings that every VM would get";
        say(format_args!("warning: there is no {}, and {text}", file.display()));
    }
    let kept = running.as_ref().and(socket).and_then(|socket| Kept::read(&Kept::beside(&socket)));
    let effective = kept.as_ref().map_or_else(|| files.clone(), |kept| Ok(kept.files.clone()))?;
    let [vm, host] = effective.settings_of_vm(disk::schema)?;
    let merged = Merged::new(&disk::schema(), &words, &[&vm, &host])?;
    let text = shown(&merged, &disk::schema().of_vm(), running.as_ref(), origin)?;
    let mut out = output();
    write!(out, "{text}")?;
    if let Ok(files) = &files {
        write!(out, "{}", memory_table(files, origin)?)?;
    }
    if let Some(kept) = kept {
        let now = files.and_then(|files| files.settings_of_vm(disk::schema).map(|_| files));
        let changes = match now {
            Ok(files) => Kept { files, ..Kept::default() }.since(&kept, disk::schema, &words),
            Err(unusable) => unusable.to_string().lines().map(str::to_owned).collect(),
        };
        changes.iter().try_for_each(|change| writeln!(out, "# not in effect yet: {change}"))?;
    }
    Ok(())
}

/// Returns the arguments of a running process, behind the name of its subcommand.
pub fn words_of(status: &Status, name: &str, folder: &Path) -> Vec<OsString> {
    let list = |file: &str| {
        let text = std::fs::read(format!("/proc/{}/{file}", status.pid)).unwrap_or_default();
        let words = text.strip_suffix(&[0]).unwrap_or(&text).split(|byte| *byte == 0);
        words.map(|word| OsString::from_vec(word.to_vec())).collect::<Vec<_>>()
    };
    let is_former = |word: &OsString| {
        let value = word.as_bytes().strip_prefix(disk::FORMER_VARIABLE.as_bytes())?.strip_prefix(b"=")?;
        Some(OsString::from_vec(value.to_vec()))
    };
    let former = list("environ").iter().find_map(is_former);
    disk::without_former(list("cmdline").get(2..).unwrap_or_default(), name, folder, former.as_deref())
}

fn shown(merged: &Merged, schema: &Schema, running: Option<&Status>, origin: bool) -> Result<String> {
    let note = |origin_of: String| if origin { format!("    # {origin_of}") } else { String::new() };
    let mut text = "version = 1\n".to_owned();
    for arg in schema.keys().filter(|arg| arg.get_long() != Some("disk")) {
        let key = arg.get_long().unwrap_or_default();
        let (value, from) = match running.and_then(|status| set(key, status, merged)) {
            Some(value) => (Some(value), "`remoca set`".to_owned()),
            None => (value(arg, merged), merged.origin(key, arg.get_id().as_str()).to_string()),
        };
        let is_off = key == "cache" && running.is_some_and(|status| status.server.is_some() && !status.cache.enabled);
        let value = match value {
            _ if is_off => "# the cache is off".into(),
            Some(value) => format!("{key} = {value}"),
            None => format!("# {key} is not set"),
        };
        text += &format!("{value}{}\n", note(from));
    }
    let places = merged.disks.iter().flatten().map(|disk| (&disk.options, Origin::File(disk.place.clone())));
    let typed = disk::disks_of(&merged.matches)?;
    let typed = typed.iter().map(|disk| (disk, Origin::Flag));
    for (disk, from) in places.chain(typed) {
        text += &format!("\n[[disk]]{}\n{}", note(from.to_string()), table(disk));
    }
    Ok(text)
}

/// Returns the limits of a VM, which `remoca host` keeps, as a table. They are in effect as they are in the files.
fn memory_table(files: &Files, origin: bool) -> Result<String> {
    let ([vm, host], problems) = memory::tables(files);
    if !problems.is_empty() {
        return Err(Unusable(problems).into());
    }
    let schema = memory::schema().of_vm();
    let merged = Merged::new(&schema, &[], &[&vm, &host])?;
    let mut text = "\n[memory]\n".to_owned();
    for arg in schema.keys() {
        let key = arg.get_long().unwrap_or_default();
        let value = match value(arg, &merged) {
            Some(value) => format!("{key} = {value}"),
            None => format!("# {key} is not set"),
        };
        let from = merged.origin(key, arg.get_id().as_str());
        text += &if origin { format!("{value}    # {from}\n") } else { format!("{value}\n") };
    }
    Ok(text)
}

/// Returns the value of a key as a file has it, or `None` if it has none.
fn value(arg: &Arg, merged: &Merged) -> Option<Value> {
    let raw = merged.matches.get_raw(arg.get_id().as_str())?;
    let values: Vec<_> = raw.map(|value| value.to_string_lossy()).collect();
    match &values[..] {
        [value] if schema::is_switch(arg) => Some((value == "true").into()),
        [value] if !schema::is_list(arg) => {
            Some(value.parse::<i64>().map_or_else(|_| value.as_ref().into(), Value::from))
        }
        values => Some(Value::Array(Array::from_iter(values.iter().map(AsRef::as_ref)))),
    }
}

/// Returns the value of a key that `remoca set` changed, or `None` if the process has it as configured.
fn set(key: &str, status: &Status, merged: &Merged) -> Option<Value> {
    let configured = || merged.matches.get_raw(key).into_iter().flatten().map(|value| value.to_string_lossy());
    match key {
        "cache" if status.servers.iter().any(|server| !server.is_local_tier) => {
            let bytes = status.cache.wanted_bytes;
            let is_configured = configured().any(|value| parse_size(&value) == Ok(bytes));
            (!is_configured).then(|| size::exact_size(bytes).into())
        }
        "local" if status.server.is_some() => {
            let bytes = status.cache.local_wanted_bytes;
            let is_configured = configured().any(|value| parse_size(&value) == Ok(bytes));
            (status.cache.enabled && !is_configured).then(|| size::exact_size(bytes).into())
        }
        "server" => {
            let listed = status.servers.iter().filter(|server| !server.is_local_tier);
            let now: Vec<_> = listed.map(|server| server.endpoint.as_str()).collect();
            let is_configured = configured().eq(now.iter().copied());
            (!is_configured && !now.is_empty()).then(|| Value::Array(Array::from_iter(now)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_protocol::control::Reply;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_a_process_has_that_does_not_tell_it_is_not_taken_from_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("web1.ctl");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            stream.write_all(&Reply::Error { error: "it has too many clients".into() }.line().unwrap()).unwrap();
        });
        let error = run(socket.to_str().unwrap(), folder.path(), false).unwrap_err();
        assert_eq!(error.to_string(), "it has too many clients");
        server.join().unwrap();
        // Its socket alone is no process.
        let error = run(socket.to_str().unwrap(), folder.path(), false).unwrap_err();
        assert!(socket.exists() && error.to_string().starts_with("no VM process answers at "), "{error}");
    }
}
