//! The list that the project keeps: mutants that tests must notice, and harmless mutants.

use super::edits::Edit;
use super::items::Function;
use serde::Deserialize;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// A mutant of the list.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    /// Short name, unique within its item.
    pub name: String,
    pub item: String,
    /// Description of the fault, for readers.
    pub change: String,
    /// Text that occurs once in the function, regardless of white space.
    pub from: String,
    pub to: String,
    /// Parts of the names of tests that notice it. These tests are tried first.
    #[serde(default)]
    pub seen_by: Vec<String>,
    /// Reason why no test need notice it; `None` if one must.
    pub harmless: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutant: Vec<Listed>,
}

/// Reads the lists in a folder.
///
/// # Errors
/// The name of the file and its fault.
pub fn read(folder: &Path) -> Result<Vec<Listed>, String> {
    let files = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<_> = files.filter_map(|file| Some(file.ok()?.path())).collect();
    paths.sort();
    let mut listed: Vec<Listed> = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let list: List = toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        listed.extend(list.mutant);
    }
    for (at, one) in listed.iter().enumerate() {
        if listed[..at].iter().any(|other| other.full_name() == one.full_name()) {
            return Err(format!("{} is listed twice", one.full_name()));
        }
        if one.harmless.is_some() != one.seen_by.is_empty() {
            return Err(format!("{}: either tests see it, or it is harmless", one.full_name()));
        }
    }
    Ok(listed)
}

impl Listed {
    pub fn full_name(&self) -> String {
        format!("{}#{}", self.item, self.name)
    }

    /// Returns the function that the mutant changes, and the change.
    ///
    /// # Errors
    /// Why the entry does not match the tree. The list must then be repaired.
    pub fn find<'f>(&self, functions: &'f [Function]) -> Result<(&'f Function, Edit), String> {
        let stale = |why: String| format!("{}: {why}", self.full_name());
        let mut named = functions.iter().filter(|function| function.item == self.item);
        let function = named.next().ok_or_else(|| stale("there is no such function".into()))?;
        if named.next().is_some() {
            return Err(stale("several functions have this name".into()));
        }
        let places = find_wrapped(function.text(), &self.from);
        let [place] = &places[..] else {
            return Err(stale(format!("its text stands {} times in the function, not once", places.len())));
        };
        let start = function.body.start;
        let edit = Edit { range: start + place.start..start + place.end, text: self.to.trim().into(), kind: "listed" };
        if same(&edit.apply(function), function.text()) {
            return Err(stale("nothing changes".into()));
        }
        Ok((function, edit))
    }
}

/// Returns whether two texts differ only in white space.
pub fn same(one: &str, other: &str) -> bool {
    let visible = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
    visible(one) == visible(other)
}

/// Returns the ranges where `wanted` occurs in `text`, ignoring white space. Occurrences may not overlap.
fn find_wrapped(text: &str, wanted: &str) -> Vec<Range<usize>> {
    let visible: Vec<_> = text.char_indices().filter(|(_, c)| !c.is_whitespace()).collect();
    let wanted: Vec<_> = wanted.chars().filter(|c| !c.is_whitespace()).collect();
    if wanted.is_empty() {
        return Vec::new();
    }
    let begins = |at: &usize| visible[*at..].iter().map(|(_, c)| c).zip(&wanted).all(|(one, other)| one == other);
    let mut found: Vec<Range<usize>> = Vec::new();
    for at in (0..(visible.len() + 1).saturating_sub(wanted.len())).filter(begins) {
        let (last, c) = visible[at + wanted.len() - 1];
        let place = visible[at].0..last + c.len_utf8();
        if found.last().is_none_or(|before| before.end <= place.start) {
            found.push(place);
        }
    }
    found
}
