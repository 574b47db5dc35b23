//! Functions that ARCHITECTURE.md names: they exist, and chains of calls are as described there.

use super::source::{Crate, File};
use std::collections::BTreeSet;
use syn::spanned::Spanned;

/// Beginning of a paragraph of chains, and the maximum number of functions in it. In a chain, written `A::f` → `B::g`, each
/// function calls the next. A semicolon marks a place where the engine's queue of actions, or an event, is between two.
const CHAINS: [(&str, usize); 2] = [("A hit, out:", 8), ("A hit, back:", 17)];

/// Returns a complaint for each named `Type::function` that does not exist in a file with an `impl` of the type, or
/// with the trait of that name.
pub fn unknown_functions(text: &str, crates: &[Crate]) -> Vec<String> {
    let files: Vec<_> = crates.iter().flat_map(|owner| &owner.files).collect();
    let has_type = |file: &&&File, name: &str| {
        let is_impl = |line: &String| {
            line.starts_with("impl") && line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name)
        };
        file.lines.iter().any(is_impl) || has(&file.lines, &format!("trait {name}"))
    };
    let unknown = functions(text).filter(|(owner, name)| {
        !files.iter().any(|file| has_type(&file, owner) && has(&file.lines, &format!("fn {name}")))
    });
    unknown.map(|(owner, name)| format!("ARCHITECTURE.md: there is no `{owner}::{name}`: say what it is now")).collect()
}

/// Returns a complaint for each function of a chain that does not call the next one, and for each chain that is missing or
/// too long.
pub fn broken_chains(text: &str, crates: &[Crate]) -> Vec<String> {
    let mut broken = Vec::new();
    for (title, calls_max) in CHAINS {
        let Some(paragraph) = text.split("\n\n").find(|paragraph| paragraph.starts_with(title)) else {
            broken.push(format!("ARCHITECTURE.md: no paragraph begins with `{title}`"));
            continue;
        };
        let calls = functions(paragraph).collect::<BTreeSet<_>>().len();
        if calls > calls_max {
            broken.push(format!("ARCHITECTURE.md: `{title}` has {calls} calls, and {calls_max} is the most"));
        }
        for chain in paragraph.split(';') {
            let chain: Vec<_> = functions(chain).collect();
            for ((owner, name), (_, next)) in chain.iter().zip(chain.iter().skip(1)) {
                let calls_next = |body: &[String]| has(body, &format!(".{next}")) || has(body, &format!("::{next}"));
                if !crates
                    .iter()
                    .flat_map(|owner| &owner.files)
                    .any(|file| body(file, owner, name).is_some_and(calls_next))
                {
                    broken.push(format!("ARCHITECTURE.md: `{owner}::{name}` does not call `{next}`"));
                }
            }
        }
    }
    broken
}

/// Returns the functions of types that a text quotes.
fn functions(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2).filter_map(|name| name.split_once("::"));
    quoted.filter(|(owner, name)| {
        owner.starts_with(|first: char| first.is_uppercase()) && name.chars().all(|c| c.is_lowercase() || c == '_')
    })
}

/// Returns whether a line contains `text` that is not followed by further letters of a longer name.
fn has(lines: &[String], text: &str) -> bool {
    let is_whole = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_');
    lines.iter().any(|line| line.match_indices(text).any(|(at, _)| is_whole(&line[at + text.len()..])))
}

/// Returns the lines of a function of a type, or `None` if the file does not have it.
fn body<'a>(file: &'a File, owner: &str, name: &str) -> Option<&'a [String]> {
    file.items.iter().find_map(|item| {
        let syn::Item::Impl(block) = item else { return None };
        let syn::Type::Path(path) = &*block.self_ty else { return None };
        if path.path.segments.last().is_none_or(|last| last.ident != owner) {
            return None;
        }
        block.items.iter().find_map(|item| match item {
            syn::ImplItem::Fn(function) if function.sig.ident == name => {
                let span = function.block.span();
                file.lines.get(span.start().line - 1..span.end().line)
            }
            _ => None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Vec<Crate> {
        crate::shape::source::crates(&crate::run::project()).expect("the tree is Rust")
    }

    #[test]
    fn a_function_that_a_document_names_must_be_there() {
        let text = "`DiskEngine::handle_page` and `DataPath::kick`, `Vm::no_such_function`, `Nothing::kick`, `Action::Ask`, `a::b`";
        let told = unknown_functions(text, &tree()).join("\n");
        assert!(told.contains("no `Vm::no_such_function`") && told.contains("no `Nothing::kick`"), "{told}");
        assert_eq!(told.lines().count(), 2, "{told}");
    }

    #[test]
    fn a_chain_has_every_call_and_is_short() {
        let there = "A hit, out: `Vm::begin_part` → `DiskEngine::handle_request`; `Vm::execute` → `Servers::fetch`";
        let left_out = "A hit, back: `Vm::begin_part` → `DiskEngine::begin_read`";
        assert_eq!(
            broken_chains(&format!("{there}\n\n{left_out}"), &tree()),
            ["ARCHITECTURE.md: `Vm::begin_part` does not call `begin_read`"]
        );
        let long =
            format!("A hit, out: {}", (0..9).map(|at| format!("`Vm::{}`; ", "f".repeat(at + 1))).collect::<String>());
        let told = broken_chains(&long, &tree()).join("\n");
        assert!(told.contains("has 9 calls") && told.contains("no paragraph begins with `A hit, back:`"), "{told}");
    }
}
