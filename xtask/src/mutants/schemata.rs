//! A copy of the tree with all mutants in one build, selected at run time: a function with mutants has one body for each.

use super::edits::{Edit, statement_at};
use super::items::{self, Function};
use super::list::same;
use crate::run::cargo;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

const RUNTIME: &str = include_str!("runtime.rs");
const RUNTIME_FILE: &str = "mutants_rt.rs";
/// Folders that no build needs, and that may be large.
const LEFT_OUT: [&str; 4] = ["target", "out", ".git", ".cache"];
/// Maximum number of rounds. Each round drops the mutants that the compiler refused, and it refuses in a few stages.
const ROUNDS_MAX: usize = 12;

/// A mutant of one function.
pub struct Mutant {
    pub name: String,
    /// Index of its function.
    pub function: usize,
    pub edit: Edit,
    /// Index in the project's list; `None` for a generated mutant.
    pub listed: Option<usize>,
    /// The compiler's error for it; `None` if it compiles.
    pub refused: Option<String>,
}

/// Folders of the tree, its copy, and the copy's build.
pub struct Workshop {
    pub tree: PathBuf,
    pub copy: PathBuf,
    pub target: PathBuf,
}

/// A range of the mutated text, and the mutants that are blamed for an error there.
type Region = (Range<usize>, Vec<usize>);

/// Returns the file with all mutants of its functions, which are given with their numbers, and the ranges of their texts.
fn render(text: &str, functions: &[(&Function, Vec<(usize, &Edit)>)]) -> (String, Vec<Region>) {
    let (mut out, mut regions, mut done) = (String::new(), Vec::new(), 0);
    for (function, mutants) in functions {
        out.push_str(&text[done..function.body.start]);
        let start = out.len();
        out.push_str("{ ");
        for (number, edit) in mutants {
            out.push_str(&format!("if crate::mutants_rt::on({number}) "));
            let begin = out.len();
            let body = edit.apply(function);
            // The whole body may have been replaced.
            out.push_str(&if body.starts_with('{') { body } else { format!("{{ {body} }}") });
            regions.push((begin..out.len(), vec![*number]));
            out.push_str("\nelse ");
        }
        let mut own = function.text().to_owned();
        let mut notes: Vec<_> =
            mutants.iter().map(|(number, edit)| (statement_at(function, edit.range.start), number)).collect();
        notes.sort_unstable();
        for (at, number) in notes.into_iter().rev() {
            own.insert_str(at - function.body.start, &format!("crate::mutants_rt::reached({number}); "));
        }
        out.push_str(&own);
        out.push_str(" }");
        // An error outside of every mutant's text is blamed on all of them together.
        regions.push((start..out.len(), mutants.iter().map(|(number, _)| *number).collect()));
        done = function.body.end;
    }
    out.push_str(&text[done..]);
    (out, regions)
}

impl Workshop {
    /// Builds the tests (`tests` are cargo's arguments) with all mutants that compile. The other mutants get the
    /// compiler's error. Returns cargo's messages.
    ///
    /// # Errors
    /// If the tree does not build for another reason.
    pub fn build(
        &self,
        functions: &[Function],
        mutants: &mut [Mutant],
        tests: &[String],
    ) -> Result<Vec<Value>, String> {
        let mutated: BTreeSet<_> = mutants.iter().map(|mutant| package_of(&functions[mutant.function])).collect();
        let check: Vec<_> = ["check".into(), "--keep-going".into()].into_iter().chain(packages(mutated)).collect();
        for round in 1..=ROUNDS_MAX {
            let regions = self.write(functions, mutants)?;
            let checked = self.cargo(&check)?;
            let (says, refused) = match refusals(&checked, &regions, mutants)? {
                0 => {
                    let built = self.cargo(tests)?;
                    let refused = refusals(&built, &regions, mutants)?;
                    (built, refused)
                }
                refused => (checked, refused),
            };
            if refused == 0 {
                return Ok(says);
            }
            eprintln!("   build {round}: {refused} mutants do not compile");
        }
        Err("the mutants do not compile, however many are dropped".into())
    }

    fn cargo(&self, options: &[String]) -> Result<Vec<Value>, String> {
        let mut build = cargo(options);
        build.args(["--quiet", "--message-format=json"]).current_dir(&self.copy);
        build.env("CARGO_TARGET_DIR", &self.target);
        let output = build.output().map_err(|error| format!("cargo cannot be started: {error}"))?;
        let lines = String::from_utf8_lossy(&output.stdout);
        let messages: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        match output.status.success() || messages.iter().any(|message| message["message"]["level"] == "error") {
            true => Ok(messages),
            false => Err(format!("cargo {}:\n{}", options[0], String::from_utf8_lossy(&output.stderr))),
        }
    }

    /// Brings the copy up to date. Files that are already right are not touched and keep their times.
    fn write(&self, functions: &[Function], mutants: &[Mutant]) -> Result<BTreeMap<String, Vec<Region>>, String> {
        let mut wanted = BTreeMap::new();
        read_tree(&self.tree, Path::new(""), &mut wanted)
            .map_err(|error| format!("{}: {error}", self.tree.display()))?;
        let mut regions = BTreeMap::new();
        let mut by_file: BTreeMap<&Path, Vec<(&Function, Vec<_>)>> = BTreeMap::new();
        for (index, function) in functions.iter().enumerate() {
            let own = mutants.iter().enumerate().filter(|(_, one)| one.function == index && one.refused.is_none());
            let own: Vec<_> = own.map(|(number, mutant)| (number, &mutant.edit)).collect();
            if !own.is_empty() {
                by_file.entry(&function.source.path).or_default().push((function, own));
            }
        }
        for (path, mut of_file) in by_file {
            of_file.sort_by_key(|(function, _)| function.body.start);
            let (text, places) = render(&of_file[0].0.source.text, &of_file);
            let folder: PathBuf = path.components().take(2).collect();
            wanted.insert(folder.join("src").join(RUNTIME_FILE), RUNTIME.into());
            wanted.insert(path.into(), text.into_bytes());
            regions.insert(path.display().to_string(), places);
        }
        let mutated: BTreeSet<_> = wanted.keys().filter(|path| path.ends_with(RUNTIME_FILE)).cloned().collect();
        for runtime in mutated {
            let folder: PathBuf = runtime.components().take(2).collect();
            let root = wanted.get_mut(&items::root(&self.tree, &folder)).ok_or("a crate without a root")?;
            root.extend_from_slice(format!("\n#[path = \"{RUNTIME_FILE}\"]\nmod mutants_rt;\n").as_bytes());
        }
        // Mutants leave variables unused, which must not cause their refusal.
        if let Some(manifest) = wanted.get_mut(Path::new("Cargo.toml")) {
            *manifest = String::from_utf8_lossy(manifest).replace("= \"deny\"", "= \"allow\"").into_bytes();
        }
        update(&self.copy, &wanted).map_err(|error| format!("{}: {error}", self.copy.display()))?;
        Ok(regions)
    }
}

/// Returns cargo's arguments for these packages.
pub fn packages(names: impl IntoIterator<Item = String>) -> impl Iterator<Item = String> {
    names.into_iter().flat_map(|name| ["--package".into(), name])
}

/// Returns the package of a function.
pub fn package_of(function: &Function) -> String {
    function.item.split("::").next().unwrap_or_default().replace('_', "-")
}

/// Records which mutants the compiler refuses, and returns their number.
fn refusals(
    messages: &[Value],
    regions: &BTreeMap<String, Vec<Region>>,
    mutants: &mut [Mutant],
) -> Result<usize, String> {
    let (mut refused, mut other) = (0, None);
    for message in messages.iter().map(|message| &message["message"]).filter(|message| message["level"] == "error") {
        let text = message["rendered"].as_str().unwrap_or_default();
        let spans = message["spans"].as_array().into_iter().flatten();
        let mut found = Vec::new();
        for span in spans.filter(|span| span["is_primary"] == true) {
            let places = span["file_name"].as_str().and_then(|file| regions.get(file)).into_iter().flatten();
            let at = span["byte_start"].as_u64().and_then(|at| usize::try_from(at).ok()).unwrap_or(usize::MAX);
            let around = places.filter(|(range, _)| range.contains(&at));
            found.extend(around.min_by_key(|(range, _)| range.len()).map(|(_, numbers)| numbers.clone()));
        }
        for number in found.iter().flatten() {
            if mutants[*number].refused.is_none() {
                refused += 1;
                mutants[*number].refused = Some(text.to_owned());
            }
        }
        if found.is_empty() && !text.starts_with("error: aborting") && !text.starts_with("error: could not compile") {
            other.get_or_insert_with(|| text.to_owned());
        }
    }
    match other {
        Some(text) if refused == 0 => Err(format!("the tree does not build:\n{text}")),
        _ => Ok(refused),
    }
}

fn read_tree(tree: &Path, within: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    for entry in fs::read_dir(tree.join(within))? {
        let entry = entry?;
        let path = within.join(entry.file_name());
        let at_top = within.as_os_str().is_empty();
        if at_top && LEFT_OUT.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        match entry.file_type()? {
            kind if kind.is_dir() => read_tree(tree, &path, files)?,
            kind if kind.is_file() => drop(files.insert(path, fs::read(entry.path())?)),
            _ => {}
        }
    }
    Ok(())
}

fn update(copy: &Path, wanted: &BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    let mut present = BTreeMap::new();
    if copy.is_dir() {
        read_tree(copy, Path::new(""), &mut present)?;
    }
    for path in present.keys().filter(|path| !wanted.contains_key(*path)) {
        fs::remove_file(copy.join(path))?;
    }
    for (path, content) in wanted.iter().filter(|(path, content)| present.get(*path) != Some(*content)) {
        let path = copy.join(path);
        fs::create_dir_all(path.parent().unwrap_or(copy))?;
        fs::write(path, content)?;
    }
    Ok(())
}

/// Returns whether two mutants of a function are the same change.
pub fn are_same(function: &Function, one: &Edit, other: &Edit) -> bool {
    same(&one.apply(function), &other.apply(function))
}
