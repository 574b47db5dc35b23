//! Arrows between the files of one crate, by the paths that they name.
//!
//! A path to a name that another file only re-exports (`use` of a child's item) is an arrow to the file that defines it.

use super::source::{Crate, File};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

type Module = Vec<String>;

/// Arrows from file to file, by module.
pub type Arrows = BTreeMap<Module, BTreeSet<Module>>;

/// Returns the arrows within a crate.
pub fn arrows(owner: &Crate) -> Arrows {
    let modules: BTreeSet<&Module> = owner.files.iter().map(|file| &file.module).collect();
    let passed_on: BTreeMap<&Module, BTreeMap<String, Module>> =
        owner.files.iter().map(|file| (&file.module, names_passed_on(file, &modules))).collect();
    let mut arrows = Arrows::new();
    for file in &owner.files {
        let mut walk =
            Walk { here: file.module.clone(), modules: &modules, passed_on: &passed_on, to: BTreeSet::new() };
        file.items.iter().filter(|item| !matches!(item, syn::Item::Use(_))).for_each(|item| walk.visit_item(item));
        for item in &file.items {
            if let syn::Item::Use(item) = item
                && matches!(item.vis, syn::Visibility::Inherited)
            {
                paths_of(&item.tree, &mut Vec::new(), &mut |path, _| walk.note(path));
            }
        }
        walk.to.remove(&file.module);
        arrows.insert(file.module.clone(), walk.to);
    }
    arrows
}

/// Returns the groups of files in which each file reaches all others of its group.
pub fn circles(arrows: &Arrows) -> Vec<Vec<String>> {
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        arrows.keys().map(|from| (from, reachable(arrows, from))).collect();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for from in arrows.keys() {
        let group: Vec<&Module> =
            arrows.keys().filter(|to| reach[from].contains(to) && reach[*to].contains(from)).collect();
        if group.len() > 1 && seen.insert(group.clone()) {
            found.push(group.iter().map(|module| module.join("::")).collect());
        }
    }
    found
}

fn reachable<'a>(arrows: &'a Arrows, from: &Module) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&Module> = arrows[from].iter().collect();
    while let Some(module) = open.pop() {
        if found.insert(module) {
            open.extend(arrows.get(module).into_iter().flatten());
        }
    }
    found
}

/// Returns the names that a file re-exports from its children or neighbours, with the module of each.
fn names_passed_on(file: &File, modules: &BTreeSet<&Module>) -> BTreeMap<String, Module> {
    let mut names = BTreeMap::new();
    for item in &file.items {
        if let syn::Item::Use(item) = item {
            paths_of(&item.tree, &mut Vec::new(), &mut |path, name| {
                if let Some((module, _)) = resolve(&file.module, path, modules) {
                    names.insert(name.to_owned(), module);
                }
            });
        }
    }
    names
}

/// Calls `found` with each path of a `use`, and the name that it gets.
fn paths_of(tree: &syn::UseTree, before: &mut Vec<String>, found: &mut dyn FnMut(&[String], &str)) {
    let mut with = |name: String, called: &str| {
        let path = [&before[..], &[name]].concat();
        found(&path, called);
    };
    match tree {
        syn::UseTree::Path(path) => {
            before.push(path.ident.to_string());
            paths_of(&path.tree, before, found);
            before.pop();
        }
        syn::UseTree::Name(name) => with(name.ident.to_string(), &name.ident.to_string()),
        syn::UseTree::Rename(rename) => with(rename.ident.to_string(), &rename.rename.to_string()),
        syn::UseTree::Glob(_) => with("*".into(), "*"),
        syn::UseTree::Group(group) => group.items.iter().for_each(|tree| paths_of(tree, before, found)),
    }
}

/// Returns the module that a path leads to, and the rest of the path. Returns `None` if the path leaves the crate.
fn resolve(here: &Module, path: &[String], modules: &BTreeSet<&Module>) -> Option<(Module, Vec<String>)> {
    let (mut at, mut rest) = match path.first()?.as_str() {
        "crate" => (Vec::new(), &path[1..]),
        "self" => (here.clone(), &path[1..]),
        "super" => (here[..here.len().checked_sub(1)?].to_vec(), &path[1..]),
        first if modules.contains(&[&here[..], &[first.to_owned()]].concat()) => (here.clone(), path),
        _ => return None,
    };
    while let [first, after @ ..] = rest {
        if first == "super" {
            at.pop()?;
        } else if modules.contains(&[&at[..], std::slice::from_ref(first)].concat()) {
            at.push(first.clone());
        } else {
            break;
        }
        rest = after;
    }
    Some((at, rest.to_vec()))
}

struct Walk<'a> {
    here: Module,
    modules: &'a BTreeSet<&'a Module>,
    passed_on: &'a BTreeMap<&'a Module, BTreeMap<String, Module>>,
    to: BTreeSet<Module>,
}

impl Walk<'_> {
    fn note(&mut self, path: &[String]) {
        let Some((module, rest)) = resolve(&self.here, path, self.modules) else { return };
        let behind = rest.first().and_then(|name| self.passed_on.get(&module)?.get(name));
        self.to.insert(behind.cloned().unwrap_or(module));
    }
}

impl<'ast> Visit<'ast> for Walk<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.note(&names);
        }
        visit::visit_path(self, path);
    }

    /// Skips a visibility: it names the users of an item, not what the item uses.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_some() && !super::source::is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(module: &str, text: &str) -> File {
        let items = syn::parse_file(text).expect("Rust").items;
        let module = module.split("::").filter(|name| !name.is_empty()).map(Into::into).collect();
        File { path: "a.rs".into(), module, lines: Vec::new(), before_tests: 0, items }
    }

    fn owner(files: Vec<File>) -> Crate {
        Crate { name: "a".into(), files }
    }

    #[test]
    fn a_name_that_is_passed_on_leads_to_its_file() {
        let tree = owner(vec![
            file("", "mod b; mod c;"),
            file("b", "mod inner; pub use inner::Thing;"),
            file("b::inner", "pub struct Thing;"),
            file("c", "use super::b::Thing; fn f() { crate::b::other() }"),
        ]);
        let all = arrows(&tree);
        let to: Vec<String> = all[&vec!["c".to_owned()]].iter().map(|module| module.join("::")).collect();
        assert_eq!(to, ["b", "b::inner"]);
        assert!(circles(&all).is_empty());
    }

    #[test]
    fn a_visibility_is_no_arrow() {
        let tree = owner(vec![file("", "mod b; use b::f;"), file("b", "pub(in crate::b) fn f() {}")]);
        assert!(arrows(&tree)[&vec!["b".to_owned()]].is_empty());
        let tree = owner(vec![file("b", "mod c; use c::f;"), file("b::c", "pub(in crate::b) fn f() {}")]);
        assert!(circles(&arrows(&tree)).is_empty());
    }

    #[test]
    fn files_that_use_each_other_are_a_circle() {
        let tree = owner(vec![
            file("", "mod b; mod c; mod d;"),
            file("b", "use crate::c::X;"),
            file("c", "use super::d::{Y, Z as W};"),
            file("d", "fn f() { super::b::g() }"),
        ]);
        assert_eq!(circles(&arrows(&tree)), [["b", "c", "d"]]);
    }
}
