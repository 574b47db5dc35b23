//! The product's source files, without code that is only for tests.

use std::fs;
use std::path::{Path, PathBuf};
use syn::spanned::Spanned;

/// Crates that only test, measure or fuzz the others.
const NOT_SHIPPED: [&str; 5] = ["remoca-bench", "remoca-fuzz", "remoca-guest-tests", "remoca-lab", "remoca-sim"];

/// One crate that is shipped.
pub struct Crate {
    pub name: String,
    pub files: Vec<File>,
}

/// One source file.
pub struct File {
    /// Path within the tree.
    pub path: PathBuf,
    /// Modules from the root of the crate to this file.
    pub module: Vec<String>,
    /// All lines of the file.
    pub lines: Vec<String>,
    /// Number of lines before its tests.
    pub before_tests: usize,
    /// Items that are built outside of tests.
    pub items: Vec<syn::Item>,
}

/// Reads all crates that are shipped.
///
/// # Errors
/// The name of the file that cannot be read or parsed.
pub fn crates(tree: &Path) -> Result<Vec<Crate>, String> {
    let mut found = Vec::new();
    for folder in entries(&tree.join("crates"))? {
        let name = name_of(&folder);
        if NOT_SHIPPED.contains(&name.as_str()) {
            continue;
        }
        let mut files = Vec::new();
        read(tree, &folder.join("src"), &[], &mut files)?;
        found.push(Crate { name, files });
    }
    Ok(found)
}

fn read(tree: &Path, folder: &Path, module: &[String], files: &mut Vec<File>) -> Result<(), String> {
    for path in entries(folder)? {
        let name = name_of(&path);
        if path.is_dir() {
            if name != "testing" && name != "tests" {
                read(tree, &path, &[module, std::slice::from_ref(&name)].concat(), files)?;
            }
        } else if let Some(stem) = name.strip_suffix(".rs").filter(|stem| *stem != "tests" && !stem.ends_with("fuzz")) {
            let is_root = ["mod", "lib", "main"].contains(&stem);
            let module = if is_root { module.to_vec() } else { [module, &[stem.to_owned()]].concat() };
            files.push(file(tree, &path, module)?);
        }
    }
    Ok(())
}

fn file(tree: &Path, path: &Path, module: Vec<String>) -> Result<File, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = fs::read_to_string(path).map_err(|error| failed(&error))?;
    let items = syn::parse_file(&text).map_err(|error| failed(&error))?.items;
    let tests = items
        .iter()
        .filter(|item| matches!(item, syn::Item::Mod(inner) if inner.content.is_some() && is_for_tests(&inner.attrs)));
    let end = tests.map(|item| item.span().start().line - 1).min();
    let lines: Vec<String> = text.lines().map(Into::into).collect();
    Ok(File {
        path: path.strip_prefix(tree).unwrap_or(path).into(),
        module,
        before_tests: end.unwrap_or(lines.len()),
        lines,
        items: items.into_iter().filter(|item| !is_for_tests(attributes(item))).collect(),
    })
}

/// Returns whether an item is built only for tests.
pub fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let said = list.tokens.to_string().replace(' ', "");
        list.path.is_ident("cfg") && (said.contains("feature=\"testing\"") || said == "test" || said.contains("(test"))
    })
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        found.push(entry.map_err(failed)?.path());
    }
    found.sort();
    Ok(found)
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
