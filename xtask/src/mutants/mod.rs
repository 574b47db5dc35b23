//! `cargo xtask mutants`: would the tests notice if the code did something else?
//!
//! All mutants of a run are in one build of a copy of the tree ([`schemata`]); an environment variable selects the
//! mutant of a process and of the processes that it starts. Each test is run once without a mutant to learn which ones
//! it reaches. Then each mutant is run against only those tests, quick ones first, until one fails.

mod changed;
mod edits;
mod items;
mod list;
mod options;
mod schemata;
mod seeds;
mod trial;

use crate::run::{cargo, output, project};
use changed::Changed;
use items::Function;
use list::Listed;
use options::{Options, USAGE};
use schemata::{Mutant, Workshop, are_same, package_of, packages};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use trial::{Bench, Test};

/// Crates that have mutants, and whose tests are run for them.
const CRATES: [&str; 12] = [
    "remoca-core",
    "remoca-protocol",
    "remoca-io",
    "remoca-store",
    "remoca-frontend",
    "remoca-server",
    "remoca-disk",
    "remoca-qmp",
    "remoca-host",
    "remoca-sim",
    "remoca-fuzz",
    "remoca-cli",
];
/// Crates that are used only for their tests.
const TESTERS: [&str; 2] = ["remoca-sim", "remoca-fuzz"];

/// Outcome of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    Seen { by: String },
    Survived { tests: usize, left_out: usize },
}

/// Tries the mutants that the arguments select.
///
/// # Errors
/// If a mutant survives that is not known to be harmless, or the list does not match the tree.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let Some(options) = Options::parse(arguments)? else {
        println!("{USAGE}");
        return Ok(());
    };
    let tree = options.tree.clone().unwrap_or_else(project);
    let functions = functions(&tree)?;
    let listed = list::read(&project().join("xtask/mutants"))?;
    let mut mutants = choose(&options, &tree, &functions, &listed)?;
    if options.sim.is_some() {
        mutants.retain(|mutant| seeds::is_of_simulator(mutant, &listed));
    }
    println!("== {} mutants", mutants.len());
    if options.names || mutants.is_empty() {
        for mutant in &mutants {
            println!("{}  {}", mutant.name, describe(mutant, &functions, &listed));
        }
        return Ok(());
    }
    let started = Instant::now();
    let name = options.tree.as_deref().and_then(Path::file_name).unwrap_or("own".as_ref());
    let place = project().join("target/mutants").join(name);
    let workshop = Workshop { tree, copy: place.join("src"), target: place.join("build") };
    let mutated: BTreeSet<_> = mutants.iter().map(|mutant| package_of(&functions[mutant.function])).collect();
    let wanted: Vec<_> = if options.sim.is_some() {
        ["build".into()].into_iter().chain(packages([seeds::SIMULATOR.into()])).collect()
    } else if options.unit {
        ["test", "--no-run", "--lib"].map(str::to_owned).into_iter().chain(packages(mutated)).collect()
    } else {
        let testers = packages(testers(&workshop.tree, mutated)?);
        ["test", "--no-run"].map(str::to_owned).into_iter().chain(testers).collect()
    };
    let messages = workshop.build(&functions, &mut mutants, &wanted)?;
    println!("== built in {} s", started.elapsed().as_secs());
    let folder = PathBuf::from(format!("/var/tmp/mutants-{}", std::process::id()));
    let bench = Bench { folder: folder.clone(), workers: options.workers };
    if let Some(count) = options.sim {
        let found = seeds::find(&bench, &mutants, &messages, count);
        let _ = std::fs::remove_dir_all(folder);
        return found;
    }
    let tried = try_all(&bench, &options, &functions, &listed, &mutants, &messages);
    let _ = std::fs::remove_dir_all(folder);
    let fates = tried?;
    println!("== {} s in all", started.elapsed().as_secs());
    judge(&functions, &listed, &mutants, &fates)
}

fn functions(tree: &Path) -> Result<Vec<Function>, String> {
    let mut functions = Vec::new();
    for name in CRATES.iter().filter(|name| !TESTERS.contains(name)) {
        let folder = Path::new("crates").join(name);
        // Another tree may be older than the crate.
        if tree.join(&folder).exists() {
            functions.extend(items::functions(tree, &folder)?);
        }
    }
    Ok(functions)
}

/// Returns those of [`CRATES`] whose tests can reach a mutant in one of the `mutated` crates: these crates, and the
/// crates that depend on them.
fn testers(tree: &Path, mutated: BTreeSet<String>) -> Result<Vec<String>, String> {
    let mut metadata = cargo(["metadata", "--no-deps", "--format-version", "1"]);
    metadata.current_dir(tree);
    let metadata: Value = serde_json::from_str(&output(metadata)?).map_err(|error| error.to_string())?;
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut meeting = mutated;
    loop {
        let before = meeting.len();
        for package in packages {
            let parts = package["dependencies"].as_array().into_iter().flatten();
            if parts.filter_map(|part| part["name"].as_str()).any(|name| meeting.contains(name)) {
                meeting.extend(package["name"].as_str().map(str::to_owned));
            }
        }
        if meeting.len() == before {
            return Ok(CRATES.into_iter().filter(|name| meeting.contains(*name)).map(str::to_owned).collect());
        }
    }
}

fn describe(mutant: &Mutant, functions: &[Function], listed: &[Listed]) -> String {
    match mutant.listed {
        Some(index) => listed[index].change.clone(),
        None => mutant.edit.describe(&functions[mutant.function]),
    }
}

/// Returns the mutants that the options select.
fn choose(options: &Options, tree: &Path, functions: &[Function], listed: &[Listed]) -> Result<Vec<Mutant>, String> {
    let index_of = |function: &Function| functions.iter().position(|other| std::ptr::eq(other, function)).unwrap_or(0);
    let is_wanted = |name: &str| {
        let item = name.split('#').next().unwrap_or_default();
        options.wants(item) && options.only.as_ref().is_none_or(|only| name.contains(only))
    };
    let changed = options.changed.as_ref().map(|commit| Changed::since(commit, tree)).transpose()?;
    let (mut known, mut stale) = (Vec::new(), Vec::new());
    for (index, one) in listed.iter().enumerate() {
        match one.find(functions) {
            Ok((function, edit)) => {
                let (function, name) = (index_of(function), one.full_name());
                known.push(Mutant { name, function, edit, listed: Some(index), refused: None });
            }
            Err(why) if options.tree.is_some() => println!("   not in this tree: {why}"),
            Err(why) => stale.push(why),
        }
    }
    if !stale.is_empty() {
        return Err(format!("the code has changed; mend these in xtask/mutants:\n{}", stale.join("\n")));
    }
    let generated = generated(options, functions, changed.as_ref(), &is_wanted);
    let touched = |mutant: &Mutant| {
        let function = &functions[mutant.function];
        changed.as_ref().is_none_or(|it| it.touches(&function.source.path, &function.source.text, &function.body))
    };
    let is_same = |one: &Mutant, other: &Mutant| {
        one.function == other.function && are_same(&functions[one.function], &one.edit, &other.edit)
    };
    let mut chosen: Vec<Mutant> = Vec::new();
    for mutant in generated {
        // A generated mutant that is in the list keeps the list's name and entry.
        match known.iter().position(|known| is_same(known, &mutant)) {
            Some(at) => chosen.push(known.swap_remove(at)),
            None if chosen.iter().all(|other| !is_same(other, &mutant)) => chosen.push(mutant),
            None => {}
        }
    }
    let of_list = known.into_iter().filter(|mutant| !options.generated && is_wanted(&mutant.name) && touched(mutant));
    chosen.extend(of_list);
    Ok(chosen)
}

/// Returns a sample of each module, or of the changed lines. It depends only on names: another tree has the same
/// sample, as far as it has these mutants.
fn generated(
    options: &Options,
    functions: &[Function],
    changed: Option<&Changed>,
    is_wanted: &dyn Fn(&str) -> bool,
) -> Vec<Mutant> {
    let mut groups: BTreeMap<String, Vec<(u64, Mutant)>> = BTreeMap::new();
    if options.sample == 0 && changed.is_none() && !options.generated {
        return Vec::new();
    }
    for (function, of) in functions.iter().enumerate() {
        for (name, edit) in edits::generate(of) {
            let touched = changed.is_none_or(|it| it.touches(&of.source.path, &of.source.text, &edit.range));
            if is_wanted(&name) && touched {
                let group = if changed.is_some() { String::new() } else { module(&of.item) };
                let mutant = Mutant { name, function, edit, listed: None, refused: None };
                groups.entry(group).or_default().push((rank(options.seed, &mutant.name), mutant));
            }
        }
    }
    let most = match (changed, options.sample) {
        (Some(_), _) => options.most,
        (None, 0) => usize::MAX,
        (None, sample) => sample,
    };
    let sample = |mut group: Vec<(u64, Mutant)>| {
        group.sort_by_key(|(rank, _)| *rank);
        group.into_iter().take(most).map(|(_, mutant)| mutant)
    };
    groups.into_values().flat_map(sample).collect()
}

/// Returns the crate and the module of an item.
fn module(item: &str) -> String {
    item.split("::").take(2).collect::<Vec<_>>().join("::")
}

/// Returns a rank: a mixed FNV-1a hash of the seed and the name, so that similar names do not have close ranks.
fn rank(seed: u64, name: &str) -> u64 {
    let bytes = seed.to_le_bytes().into_iter().chain(name.bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^ (mixed >> 32)
}

fn try_all(
    bench: &Bench,
    options: &Options,
    functions: &[Function],
    listed: &[Listed],
    mutants: &[Mutant],
    messages: &[Value],
) -> Result<Vec<Option<Fate>>, String> {
    let started = Instant::now();
    let mut tests = bench.record(bench.list(messages)?, mutants.len())?;
    tests.sort_by_key(|test| test.time);
    println!("== {} tests, {} s", tests.len(), started.elapsed().as_secs());
    let fates = Mutex::new(vec![None; mutants.len()]);
    let lines: Vec<_> = mutants.iter().map(|mutant| describe(mutant, functions, listed)).collect();
    let work: Vec<_> =
        mutants.iter().map(|mutant| (mutant.refused.is_some(), mutant.name.as_str(), mutant.listed)).collect();
    bench.share(work.len(), |number, folder| {
        let (refused, name, of_list) = work[number];
        if refused {
            return Ok(());
        }
        let first = of_list.map_or(&[][..], |index| &listed[index].seen_by);
        let fate = try_one(number, &tests, first, options.budget, folder)?;
        match &fate {
            Fate::Seen { by } => println!("seen      {name}\n          {}\n          by {by}", lines[number]),
            Fate::Survived { tests: 0, left_out: 0 } => println!("UNREACHED {name}\n          {}", lines[number]),
            Fate::Survived { tests, left_out } => {
                println!("SURVIVED  {name}\n          {}\n          {tests} tests, {left_out} left out", lines[number]);
            }
        }
        fates.lock().map_err(|error| error.to_string())?[number] = Some(fate);
        Ok(())
    })?;
    fates.into_inner().map_err(|error| error.to_string())
}

/// Runs tests, which are ordered by their time, against a mutant. Starts with the tests named in the list.
fn try_one(number: usize, tests: &[Test], first: &[String], budget: Duration, folder: &Path) -> Result<Fate, String> {
    let is_first = |test: &&Test| first.iter().any(|part| test.name.contains(&**part));
    let reaching: Vec<_> = tests.iter().filter(|test| test.reaches.contains(&number)).collect();
    let (named, others): (Vec<_>, Vec<_>) = reaching.into_iter().partition(is_first);
    let (mut spent, mut tried, mut left_out) = (Duration::ZERO, 0, 0);
    for (test, is_named) in
        named.into_iter().map(|test| (test, true)).chain(others.into_iter().map(|test| (test, false)))
    {
        if !is_named && spent + test.time > budget {
            left_out += 1;
            continue;
        }
        spent += if is_named { Duration::ZERO } else { test.time };
        tried += 1;
        if test.notices(number, folder)? {
            return Ok(Fate::Seen { by: test.name.clone() });
        }
    }
    Ok(Fate::Survived { tests: tried, left_out })
}

/// Prints the score of each module.
fn judge(functions: &[Function], listed: &[Listed], mutants: &[Mutant], fates: &[Option<Fate>]) -> Result<(), String> {
    let mut scores: BTreeMap<String, (usize, usize, usize)> = BTreeMap::new();
    let (mut survivors, mut refused) = (Vec::new(), Vec::new());
    for (mutant, fate) in mutants.iter().zip(fates) {
        let score = scores.entry(module(&functions[mutant.function].item)).or_default();
        let harmless = mutant.listed.and_then(|index| listed[index].harmless.as_deref());
        match (fate, harmless) {
            (Some(Fate::Seen { .. }), Some(_)) => {
                score.0 += 1;
                println!("{} is seen, though the list calls it harmless", mutant.name);
            }
            (Some(Fate::Seen { .. }), None) => score.0 += 1,
            (Some(Fate::Survived { .. }), Some(_)) => score.2 += 1,
            (Some(Fate::Survived { .. }), None) => {
                score.1 += 1;
                survivors.push(format!("{}\n  {}", mutant.name, describe(mutant, functions, listed)));
            }
            (None, _) if mutant.listed.is_some() => {
                let why = mutant.refused.as_deref().unwrap_or_default();
                refused.push(format!("{} does not compile:\n{why}", mutant.name));
            }
            (None, _) => {}
        }
    }
    println!("== seen, of those that are not harmless; harmless");
    for (module, (seen, survived, harmless)) in &scores {
        println!("{module:28} {seen:4} of {:4}; {harmless}", seen + survived);
    }
    if !refused.is_empty() {
        return Err(refused.join("\n"));
    }
    match survivors.len() {
        0 => Ok(()),
        count => Err(format!(
            "{count} survive; a test has to see them, or the list has to say why they are harmless:\n{}",
            survivors.join("\n")
        )),
    }
}

#[cfg(test)]
mod tests;
