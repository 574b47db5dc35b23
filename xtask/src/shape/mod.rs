//! `cargo xtask shape`: the measures by which the structure of the sources is judged, and the rules that `cargo xtask
//! lint` enforces.

mod arrows;
mod docs;
mod measure;
mod named;
mod rules;
mod source;

use crate::run::project;
use docs::Doc;
use measure::{FUNCTION_LINES_MAX, Function, Measures, quantile};
use source::Crate;
use std::ffi::OsString;
use std::path::PathBuf;

const USAGE: &str = "\
usage: cargo xtask shape [--all] [--docs N [--seed S]] [--tree FOLDER]

Measures the sources that are shipped, without their tests: sizes of files and functions, unsafe blocks with reasons,
first lines of documentation, public functions, types that are spread over files, circles of files.

  --all          every case, not only the number of them
  --docs N       N function docs drawn by chance, to be judged by a reader
  --seed S       which ones these are [default: 1]
  --tree FOLDER  another tree of the project
";
/// Maximum number of files with `impl` blocks of a type. A type with more is not encapsulated.
const IMPL_FILES_MAX: usize = 3;
/// Maximum number of lines of a file, before its tests.
const FILE_LINES_MAX: usize = 400;

#[derive(Default)]
struct Options {
    all: bool,
    docs: usize,
    seed: u64,
    tree: PathBuf,
}

/// Measures the sources, and prints the measures.
///
/// # Errors
/// If an option is unknown, or a file cannot be read.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let options = parse(arguments)?;
    let crates = source::crates(&options.tree)?;
    let measures = measure::measure(&crates);
    if options.docs > 0 {
        draw(&measures, &options);
        return Ok(());
    }
    show_sizes(&measures, options.all);
    show_docs(&measures);
    show_crates(&crates, &measures);
    show_walls(&crates, &measures, options.all);
    Ok(())
}

/// Checks that the tree follows the rules of its structure.
///
/// # Errors
/// The broken rules, each with advice.
pub fn check() -> Result<(), String> {
    let tree = project();
    let crates = source::crates(&tree)?;
    let broken = rules::broken(&tree, &crates, &measure::measure(&crates))?;
    if broken.is_empty() { Ok(()) } else { Err(broken.join("\n")) }
}

fn parse(arguments: Vec<OsString>) -> Result<Options, String> {
    let mut options = Options { seed: 1, tree: project(), ..Options::default() };
    let mut arguments = arguments.into_iter().map(|argument| argument.to_string_lossy().into_owned());
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value\n\n{USAGE}"));
        match argument.as_str() {
            "--all" => options.all = true,
            "--docs" => options.docs = value()?.parse().map_err(|error| format!("--docs: {error}"))?,
            "--seed" => options.seed = value()?.parse().map_err(|error| format!("--seed: {error}"))?,
            "--tree" => options.tree = value()?.into(),
            _ => return Err(USAGE.into()),
        }
    }
    Ok(options)
}

fn show_sizes(measures: &Measures, all: bool) {
    let files: Vec<usize> = measures.file_lines.iter().map(|(_, lines)| *lines).collect();
    let functions: Vec<usize> = measures.functions.iter().map(|function| function.lines).collect();
    let [p90, max] = [90, 100].map(|percent| quantile(files.clone(), percent));
    println!("lines of a file before its tests        p90 {p90}, max {max}");
    let long: Vec<String> = measures
        .file_lines
        .iter()
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(path, lines)| format!("{} ({lines})", path.display()))
        .collect();
    list(&format!("files above {FILE_LINES_MAX} lines"), &long, true);
    let [p90, p99, max] = [90, 99, 100].map(|percent| quantile(functions.clone(), percent));
    println!("lines of a function                     p90 {p90}, p99 {p99}, max {max}; {} functions", functions.len());
    let long: Vec<String> =
        measures.functions.iter().filter(|function| function.lines > FUNCTION_LINES_MAX).map(name).collect();
    list(&format!("functions above {FUNCTION_LINES_MAX} lines"), &long, true);
    let without: Vec<String> =
        measures.unsafe_without_reason.iter().map(|(path, line)| format!("{}:{line}", path.display())).collect();
    println!("unsafe blocks                           {}", measures.unsafe_blocks);
    list("unsafe blocks without a reason", &without, all);
    println!("comments inside code                    {} % of lines", tenths(measures.comment_lines, measures.lines));
}

fn show_docs(measures: &Measures) {
    let documented = measures.functions.iter().filter(|function| function.doc.is_some()).count();
    println!("functions with documentation            {documented}");
    for (doc, label) in [
        (Doc::Says, "say what the function does or returns"),
        (Doc::Names, "name its result"),
        (Doc::States, "only state a fact"),
    ] {
        let count = measures.functions.iter().filter(|function| function.doc == Some(doc)).count();
        println!("  {label:<38}{} %", tenths(count, documented));
    }
}

fn show_crates(crates: &[Crate], measures: &Measures) {
    println!("{:<24}{:>8}{:>18}{:>14}", "crate", "lines", "public functions", "open fields");
    for Crate { name, .. } in crates {
        let of = |counts: &std::collections::BTreeMap<String, usize>| counts.get(name).copied().unwrap_or(0);
        println!(
            "{name:<24}{:>8}{:>18}{:>14}",
            of(&measures.crate_lines),
            of(&measures.public_functions),
            of(&measures.open_fields)
        );
    }
}

fn show_walls(crates: &[Crate], measures: &Measures, all: bool) {
    let spread: Vec<String> = measures
        .impls
        .iter()
        .filter(|(_, files)| files.len() > IMPL_FILES_MAX)
        .map(|(name, files)| format!("{name} ({})", files.len()))
        .collect();
    list(&format!("types with impl blocks in more than {IMPL_FILES_MAX} files"), &spread, true);
    for owner in crates {
        let circles: Vec<String> =
            arrows::circles(&arrows::arrows(owner)).iter().map(|circle| circle.join(", ")).collect();
        if !circles.is_empty() {
            list(&format!("circles of files in {}", owner.name), &circles, all);
        }
    }
}

/// Prints some documented functions, drawn from a seed.
fn draw(measures: &Measures, options: &Options) {
    let mut documented: Vec<&Function> = measures.functions.iter().filter(|function| function.doc.is_some()).collect();
    let mut random = options.seed;
    for _ in 0..options.docs.min(documented.len()) {
        // SplitMix64.
        random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let index = usize::try_from((mixed ^ (mixed >> 31)) % documented.len() as u64).unwrap_or(0);
        let function = documented.swap_remove(index);
        println!("{}\n    {}", name(function), function.text.as_deref().unwrap_or_default());
    }
}

fn name(function: &Function) -> String {
    format!("{}: {} ({})", function.path.display(), function.name, function.lines)
}

fn list(label: &str, cases: &[String], all: bool) {
    println!("{label:<40}{}", cases.len());
    if all {
        cases.iter().for_each(|case| println!("    {case}"));
    }
}

fn tenths(part: usize, of: usize) -> String {
    let tenths = part * 1000 / of.max(1);
    format!("{}.{}", tenths / 10, tenths % 10)
}
