//! Tells in which functions a VM process spends the instructions of a read outside the kernel.

use crate::steps::{Places, Steps};
use crate::targets::within_a_window;
use crate::vm::{VmOptions, remoca};
use crate::work::{IMAGE_BYTES, Kind, Setting, Work};
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::process::Command;

/// Number of times that the reads are counted, and that they are made before, at full speed: as in the rows A2.3.
const COUNTED: usize = 4;
const BEFORE: usize = 1_000;

#[derive(Args)]
pub struct InstructionsArgs {
    /// What is read
    #[arg(value_enum)]
    kind: Kind,

    /// Reads that are begun together
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=32))]
    depth: u16,

    /// Functions to show
    #[arg(long, value_name = "N", default_value_t = 40)]
    functions: usize,
}

pub fn run(args: &InstructionsArgs) -> Result<()> {
    let program = remoca()?;
    let setting = Setting::new()?;
    let arguments = ["--no-hedge".to_owned()];
    let options =
        VmOptions { program: Some(&program), arguments: &arguments, image_bytes: IMAGE_BYTES, ..VmOptions::default() };
    let mut vm = setting.start("vm", args.kind, options)?;
    let mut work = Work::new(args.kind, usize::from(args.depth), vm.blocks());
    work.run(&mut vm, BEFORE)?;
    let steps = Steps::of(&vm.process, setting.processor)?;
    // The first turns after it was stopped have more to do.
    work.run(&mut vm, 1)?;
    let (reads, places) = within_a_window(&mut vm, |vm| {
        steps.at_rest()?;
        steps.take_places();
        let reads = work.run(vm, COUNTED)? as f64;
        steps.at_rest()?;
        Ok((reads, steps.take_places()))
    })?;
    ensure!(!places.is_empty(), "no addresses can be read on this machine");
    let modules = modules(vm.process.pid())?;
    steps.end(|| vm.status().map(drop))?;
    vm.end()?;
    let total: u64 = places.values().sum();
    println!(
        "{:.0} instructions outside the kernel for each read, {} begun together",
        total as f64 / reads,
        args.depth
    );
    let (compiled, written) = functions(&places, &modules)?;
    for (title, counts) in [("by compiled function", compiled), ("by function as written", written)] {
        println!("\n{title}");
        let mut counts: Vec<(String, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|(name, count)| (std::cmp::Reverse(*count), name.clone()));
        for (name, count) in counts.into_iter().take(args.functions) {
            println!("{:8.1}  {:5.2} %  {name}", count as f64 / reads, count as f64 * 100.0 / total as f64);
        }
    }
    Ok(())
}

/// A part of a file that a program has mapped.
struct Module {
    path: String,
    addresses: Range<u64>,
    /// Address of the file's first part.
    base: u64,
}

/// Returns the parts of files that are mapped by a process.
fn modules(pid: u32) -> Result<Vec<Module>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut modules: Vec<Module> = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(path)) = (words.next(), words.nth(4)) else { continue };
        let (start, end) = range.split_once('-').context("a mapping without an end")?;
        let [start, end] = [start, end].map(|word| u64::from_str_radix(word, 16));
        let addresses = start?..end?;
        let first = modules.iter().find(|module| module.path == path);
        let base = first.map_or(addresses.start, |module| module.base);
        modules.push(Module { path: path.to_owned(), addresses, base });
    }
    Ok(modules)
}

/// Returns the numbers of instructions by the functions that the compiler made, and by those that were written: what was made part of another
/// one counts for itself in the latter.
fn functions(places: &Places, modules: &[Module]) -> Result<(HashMap<String, u64>, HashMap<String, u64>)> {
    let (mut compiled, mut written) = (HashMap::new(), HashMap::new());
    let mut rest = places.clone();
    for module in modules {
        let mut here: Vec<(u64, u64)> = Vec::new();
        rest.retain(|address, count| {
            let is_here = module.addresses.contains(address);
            if is_here {
                here.push((*address - module.base, *count));
            }
            !is_here
        });
        if here.is_empty() {
            continue;
        }
        for ((_, count), names) in here.iter().zip(names(&module.path, &here)?) {
            let [first, last] =
                [names.first(), names.last()].map(|name| name.cloned().unwrap_or_else(|| module.path.clone()));
            *written.entry(first).or_default() += count;
            *compiled.entry(last).or_default() += count;
        }
    }
    ensure!(rest.is_empty(), "{} addresses are in no mapped file", rest.len());
    Ok((compiled, written))
}

/// Returns the functions that each address is in, from the innermost to the one that the compiler made. Empty if the file does not say.
fn names(path: &str, addresses: &[(u64, u64)]) -> Result<Vec<Vec<String>>> {
    let mut text = String::new();
    for (address, _) in addresses {
        writeln!(text, "{address:#x}")?;
    }
    let list = tempfile::NamedTempFile::new()?;
    std::fs::write(list.path(), text)?;
    let output = Command::new("addr2line")
        .args(["--exe", path, "--functions", "--inlines", "--demangle", "--addresses"])
        .arg(format!("@{}", list.path().display()))
        .output()
        .context("cannot run addr2line, which is a part of binutils")?;
    // It fails for what is no file, such as the code that the kernel maps: that is named as a whole.
    let mut names = parse(&String::from_utf8_lossy(&output.stdout));
    names.resize(addresses.len(), Vec::new());
    Ok(names)
}

/// Returns the functions of each address in the output of addr2line.
fn parse(output: &str) -> Vec<Vec<String>> {
    let mut names: Vec<Vec<String>> = Vec::new();
    // An address, and for each function its name and its line.
    let mut is_name = true;
    for line in output.lines() {
        if line.starts_with("0x") {
            names.push(Vec::new());
            is_name = true;
        } else {
            if let Some(last) = names.last_mut().filter(|_| is_name && line != "??") {
                last.push(line.to_owned());
            }
            is_name = !is_name;
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_functions_of_an_address_are_named_from_the_innermost_on() {
        let output = "0x10\ncopy\na.rs:1\nread<u8>\n??:0\n0x24\n??\n??:0\n0x30\nmain\nb.rs:7 (discriminator 2)\n";
        assert_eq!(parse(output), [vec!["copy", "read<u8>"], vec![], vec!["main"]]);
    }

    #[test]
    fn code_is_found_in_the_file_that_is_mapped_there() {
        let modules = modules(std::process::id()).unwrap();
        let address = parse as fn(&str) -> Vec<Vec<String>> as usize as u64;
        let module = modules.iter().find(|module| module.addresses.contains(&address)).unwrap();
        assert_eq!(Path::new(&module.path), std::env::current_exe().unwrap());
        assert!(module.base < address);
        assert!(functions(&Places::from([(1, 1)]), &modules).is_err(), "nothing is mapped there");
    }
}
