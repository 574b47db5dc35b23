//! What is different between two versions of the files of a VM.

use super::fields::{FIELDS, Field};
use super::file::{DiskEntry, Entry, Place, Settings};
use super::schema::{self, Schema};
use remoca_disk::start::DiskOptions;
use std::collections::{BTreeMap, BTreeSet};

/// Returns a line for each setting that differs. Of several files the first ones prevail. `schema` has their keys.
pub fn changes(before: &[Settings], after: &[Settings], schema: &Schema) -> Vec<String> {
    let (old, new) = (entries(before), entries(after));
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut lines = Vec::new();
    for key in keys {
        let is_list = schema.flag(key).is_some_and(schema::is_list);
        let values = [old.get(*key), new.get(*key)].map(|entry| entry.map(|entry| value(&entry.words, is_list)));
        let place = new.get(*key).map_or_else(String::new, |entry| format!(" ({})", entry.place));
        match values {
            [Some(old), Some(new)] if old != new => lines.push(format!("{key}: {old} -> {new}{place}")),
            [None, Some(new)] => lines.push(format!("{key}: {new}{place}")),
            [Some(old), None] => lines.push(format!("{key}: {old} is no longer set")),
            _ => {}
        }
    }
    let (old, new) = (disks(before), disks(after));
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    for name in names {
        let place = |place: &Place| format!(" ({place})");
        match (old.get(*name), new.get(*name)) {
            (Some(_), None) => lines.push(format!("disk {name}: no longer there")),
            (None, Some(disk)) => lines.push(format!("disk {name}: new{}", place(&disk.place))),
            (Some(old), Some(disk)) => {
                let changes = changes_of_disk(&old.options, &disk.options);
                lines.extend(changes.iter().map(|change| format!("disk {name}: {change}{}", place(&disk.place))));
            }
            (None, None) => {}
        }
    }
    lines
}

/// Returns each setting of a disk that differs, and when a guest sees it if that is not at once.
fn changes_of_disk(old: &DiskOptions, new: &DiskOptions) -> Vec<String> {
    let change = |field: &Field| {
        let [old, new] = [old, new].map(|disk| {
            let value = (field.get)(disk)?;
            Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
        });
        let later = match field.name {
            "read-only" | "sector" | "queues" => "; a guest sees it when it connects again",
            _ => "",
        };
        let key = field.name;
        match (old, new) {
            (Some(old), Some(new)) if old != new => Some(format!("{key}: {old} -> {new}{later}")),
            (None, Some(new)) => Some(format!("{key}: {new}{later}")),
            (Some(old), None) => Some(format!("{key}: {old} is no longer set{later}")),
            _ => None,
        }
    };
    FIELDS.iter().filter_map(change).collect()
}

fn entries(files: &[Settings]) -> BTreeMap<&str, &Entry> {
    files.iter().rev().flat_map(|file| &file.entries).map(|(key, entry)| (key.as_str(), entry)).collect()
}

fn disks(files: &[Settings]) -> BTreeMap<&str, &DiskEntry> {
    let disks = files.iter().rev().flat_map(|file| file.disks.iter().flatten());
    disks.map(|disk| (disk.options.name.as_deref().unwrap_or_default(), disk)).collect()
}

/// Returns words of the command line as a reader takes them. Without any, a list is empty, and a switch is off.
fn value(words: &[String], is_list: bool) -> String {
    let values = words.iter().map(|word| word.split_once('=').map_or("true", |(_, value)| value));
    let values: Vec<_> = values.collect();
    match values.is_empty() {
        true if is_list => "none".into(),
        true => "false".into(),
        false => values.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk;
    use crate::settings::file::Text;

    #[test]
    fn each_difference_is_a_line() {
        let read = |text: &str| {
            let text = Text { path: "F".into(), text: format!("version = 1\n{text}") };
            [text.vm(&disk::schema().of_vm()).0]
        };
        let disk = |name: &str, more: &str| format!("[[disk]]\nname = '{name}'\nimage = '/x'\nformat = 'raw'\n{more}");
        let before = format!(
            "cache = '1G'\nbuffers = '64M'\nno-hedge = true\n{}{}{}",
            disk("a", ""),
            disk("b", ""),
            disk("c", "")
        );
        let after = format!(
            "cache = '2G'\nserver = ['tcp:a:1', 'tcp:b:1']\nno-hedge = false\n{}{}{}",
            disk("a", ""),
            disk("b", "swap = true\nqueues = 2\n"),
            disk("d", "")
        );
        let expected = [
            "buffers: 64M is no longer set",
            "cache: 1G -> 2G (F:2)",
            "no-hedge: true -> false (F:4)",
            "server: tcp:a:1, tcp:b:1 (F:3)",
            "disk b: swap: true (F:9)",
            "disk b: queues: 2; a guest sees it when it connects again (F:9)",
            "disk c: no longer there",
            "disk d: new (F:15)",
        ];
        let changes = |before: &str, after: &str| changes(&read(before), &read(after), &disk::schema());
        assert_eq!(changes(&before, &after), expected);
        assert_eq!(changes(&before, &before), [""; 0]);
        assert_eq!(changes("", "server = []\nno-hedge = false\n"), ["no-hedge: false (F:3)", "server: none (F:2)"]);
        assert_eq!(changes("server = 'tcp:a:1'\n", "server = []\n"), ["server: tcp:a:1 -> none (F:2)"]);
    }
}
