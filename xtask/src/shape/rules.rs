//! Rules of `cargo xtask lint`: arrows between crates and modules, long functions, and circles of files.
//!
//! Each table says what is allowed today. An entry that is no longer needed is also refused, so tables only shrink.

use super::arrows;
use super::measure::{FUNCTION_LINES_MAX, Measures};
use super::named;
use super::source::Crate;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Crates of the project that each crate is built with. A crate may name only crates that are listed above it here.
const CRATES: [(&str, &[&str]); 20] = [
    ("remoca-core", &[]),
    ("remoca-protocol", &["remoca-core"]),
    ("remoca-trace", &["remoca-core", "remoca-protocol"]),
    ("remoca-page", &[]),
    ("remoca-io", &["remoca-protocol"]),
    ("remoca-qmp", &[]),
    ("remoca-agent", &[]),
    ("remoca-lab", &["remoca-qmp"]),
    ("remoca-server", &["remoca-core", "remoca-io", "remoca-protocol"]),
    ("remoca-store", &["remoca-io", "remoca-protocol"]),
    ("remoca-frontend", &["remoca-core", "remoca-io", "remoca-protocol"]),
    ("remoca-disk", &["remoca-core", "remoca-frontend", "remoca-io", "remoca-protocol", "remoca-store"]),
    ("remoca-host", &["remoca-core", "remoca-io", "remoca-protocol", "remoca-qmp"]),
    ("remoca-sim", &["remoca-core", "remoca-disk", "remoca-frontend", "remoca-io", "remoca-protocol", "remoca-store"]),
    ("remoca-demo", &["remoca-io", "remoca-lab", "remoca-page", "remoca-protocol"]),
    ("remoca-view", &["remoca-io", "remoca-protocol"]),
    (
        "remoca-cli",
        &[
            "remoca-core",
            "remoca-disk",
            "remoca-host",
            "remoca-io",
            "remoca-page",
            "remoca-protocol",
            "remoca-server",
            "remoca-store",
            "remoca-trace",
            "remoca-view",
        ],
    ),
    (
        "remoca-bench",
        &[
            "remoca-core",
            "remoca-frontend",
            "remoca-io",
            "remoca-lab",
            "remoca-protocol",
            "remoca-server",
            "remoca-trace",
        ],
    ),
    (
        "remoca-fuzz",
        &[
            "remoca-core",
            "remoca-disk",
            "remoca-frontend",
            "remoca-io",
            "remoca-protocol",
            "remoca-server",
            "remoca-store",
            "remoca-trace",
        ],
    ),
    (
        "remoca-guest-tests",
        &["remoca-demo", "remoca-frontend", "remoca-host", "remoca-io", "remoca-lab", "remoca-protocol"],
    ),
];

/// Modules of a crate that must not know one another: lower layers know nothing of upper ones.
const STRANGERS: [(&str, &str, &str); 14] = [
    ("remoca-core", "fingerprint", "index"),
    ("remoca-core", "index", "engine"),
    ("remoca-core", "migration", "engine"),
    ("remoca-core", "engine", "migration"),
    ("remoca-core", "units", "index"),
    ("remoca-frontend", "vhost", "nbd"),
    ("remoca-frontend", "nbd", "vhost"),
    ("remoca-frontend", "nbd", "device"),
    ("remoca-frontend", "request", "vhost"),
    ("remoca-frontend", "request", "nbd"),
    ("remoca-disk", "link", "driver"),
    ("remoca-disk", "driver", "start"),
    ("remoca-disk", "migration", "driver"),
    ("remoca-disk", "state", "driver"),
];

/// Returns the broken rules, each with advice.
///
/// # Errors
/// The name of the file that cannot be read or parsed.
pub fn broken(tree: &Path, crates: &[Crate], measures: &Measures) -> Result<Vec<String>, String> {
    let mut broken = crate_arrows(tree)?;
    for owner in crates {
        let arrows = arrows::arrows(owner);
        for (_, from, to) in STRANGERS.iter().filter(|(name, ..)| *name == owner.name) {
            let is_in = |module: &[String], top: &str| module.first().is_some_and(|first| first == top);
            for (file, targets) in arrows.iter().filter(|(file, _)| is_in(file, from)) {
                if let Some(target) = targets.iter().find(|target| is_in(target, to)) {
                    broken.push(format!(
                        "{}: `{}` uses `{}`: `{from}` must not know `{to}`; move what both need below them",
                        owner.name,
                        file.join("::"),
                        target.join("::")
                    ));
                }
            }
        }
        broken.extend(arrows::circles(&arrows).into_iter().map(|circle| {
            format!("{}: {circle:?} are a circle of files: move what two of them need below both", owner.name)
        }));
    }
    broken.extend(long_functions(measures));
    broken.extend(forgotten_tests(tree)?);
    let path = tree.join("ARCHITECTURE.md");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    broken.extend(named::unknown_functions(&text, crates));
    broken.extend(named::broken_chains(&text, crates));
    Ok(broken)
}

fn crate_arrows(tree: &Path) -> Result<Vec<String>, String> {
    let mut broken = Vec::new();
    let mut above = BTreeSet::new();
    for (name, allowed) in CRATES {
        let path = tree.join("crates").join(name).join("Cargo.toml");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let manifest: toml::Table = toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let used: BTreeSet<&str> = ["dependencies", "build-dependencies"]
            .into_iter()
            .filter_map(|kind| manifest.get(kind)?.as_table())
            .flat_map(|table| table.keys().map(String::as_str))
            .filter(|key| key.starts_with("remoca-"))
            .collect();
        let allowed: BTreeSet<&str> = allowed.iter().copied().collect();
        if used != allowed {
            broken.push(format!("{name} is built with {used:?}, and the rule says {allowed:?}: {}", path.display()));
        }
        broken.extend(
            allowed
                .difference(&above)
                .map(|other| format!("{name} must not be built with {other}, which stands below")),
        );
        above.insert(name);
    }
    let folders = std::fs::read_dir(tree.join("crates")).map_err(|error| format!("crates: {error}"))?;
    let unknown = folders.flatten().map(|folder| folder.file_name().to_string_lossy().into_owned());
    broken.extend(
        unknown
            .filter(|name| !above.contains(name.as_str()))
            .map(|name| format!("{name} has no place among the crates: give it one in {}", file!())),
    );
    Ok(broken)
}

/// Returns the files of test programs of several files that their `main.rs` does not name: no test in them runs, and no tool says so.
fn forgotten_tests(tree: &Path) -> Result<Vec<String>, String> {
    let files = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path()).collect()
    };
    let mut forgotten = Vec::new();
    for tests in files(&tree.join("crates")).iter().map(|folder| folder.join("tests")) {
        for folder in files(&tests).into_iter().filter(|path| path.is_dir()).chain([tests]) {
            let main = folder.join("main.rs");
            if !main.exists() {
                continue;
            }
            let text = std::fs::read_to_string(&main).map_err(|error| format!("{}: {error}", main.display()))?;
            let is_named = |path: &Path| {
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                name == "main" || text.contains(&format!("mod {name};"))
            };
            let sources = files(&folder).into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
            forgotten.extend(
                sources
                    .filter(|path| !is_named(path))
                    .map(|path| format!("{}: its tests never run: name it in {}", path.display(), main.display())),
            );
        }
    }
    Ok(forgotten)
}

fn long_functions(measures: &Measures) -> Vec<String> {
    let long = measures.functions.iter().filter(|function| function.lines > FUNCTION_LINES_MAX);
    let told = long.map(|function| {
        let (path, name) = (function.path.display(), &function.name);
        format!("{path}: `{name}` has more than {FUNCTION_LINES_MAX} lines: take a step out of it that has a name")
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::measure::{Function, measure};
    use crate::shape::source::{File, crates};

    #[test]
    fn the_tree_keeps_the_rules() {
        let tree = crate::run::project();
        let crates = crates(&tree).unwrap();
        assert_eq!(broken(&tree, &crates, &measure(&crates)).unwrap(), [""; 0]);
    }

    #[test]
    fn a_test_that_never_runs_is_told() {
        let tree = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = tree.path().join("crates/one/tests").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for path in ["main.rs", "process/main.rs"] {
            write(path, "mod named;\n");
        }
        for path in ["named.rs", "forgotten.rs", "process/named.rs", "process/gone.rs", "support/mod.rs"] {
            write(path, "");
        }
        let mut told = forgotten_tests(tree.path()).unwrap();
        told.sort();
        assert!(
            told.len() == 2 && told[0].contains("tests/forgotten.rs") && told[1].contains("process/gone.rs"),
            "{told:?}"
        );
    }

    #[test]
    fn modules_that_know_too_much_are_told_and_so_is_a_new_circle() {
        let file = |module: &str, text: &str| File {
            path: "a.rs".into(),
            module: module.split("::").filter(|name| !name.is_empty()).map(Into::into).collect(),
            lines: Vec::new(),
            before_tests: 0,
            items: syn::parse_file(text).expect("Rust").items,
        };
        let files = vec![
            file("", "mod nbd; mod vhost;"),
            file("nbd", "use crate::vhost::Thing;"),
            file("vhost", "use crate::nbd::Other;"),
        ];
        let owner = Crate { name: "remoca-frontend".into(), files };
        let measures = Measures {
            functions: vec![Function { name: "f".into(), path: "b.rs".into(), lines: 71, doc: None, text: None }],
            ..Measures::default()
        };
        let told = broken(&crate::run::project(), &[owner], &measures).unwrap().join("\n");
        for text in ["`vhost` must not know `nbd`", "are a circle of files", "`f` has more"] {
            assert!(told.contains(text), "{text}: {told}");
        }
    }
}
