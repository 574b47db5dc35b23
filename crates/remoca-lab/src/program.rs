//! Programs that run in any guest: statically linked, because the guest's C library may be older than the host's.

use std::{
    collections::HashMap,
    env,
    path::PathBuf,
    process::Command,
    sync::{Mutex, PoisonError},
};

use crate::{
    error::Result,
    lab::{Lab, progress, project_folder},
    service,
};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds a program of this workspace for guests, and returns its path. Fast if nothing has changed.
///
/// The program is linked against the static glibc of the build machine (`+crt-static`), in a target folder of its own.
/// So the build neither waits for nor invalidates the normal build.
pub fn build(lab: &Lab, package: &str, program: &str) -> Result<PathBuf> {
    static BUILT: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let built = built.get_or_insert_default();
    if let Some(path) = built.get(program) {
        return Ok(path.clone());
    }
    let target_folder = lab.cache().join("programs");
    let path = target_folder.join(TARGET).join("release").join(program);
    if !path.exists() {
        progress(format_args!("building {program} for guests"));
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    service::run(
        statically_linked(Command::new(cargo))
            .current_dir(project_folder())
            .args(["build", "--quiet", "--release", "--target", TARGET])
            .args(["--package", package, "--bin", program, "--target-dir"])
            .arg(target_folder),
    )?;
    built.insert(program.to_owned(), path.clone());
    Ok(path)
}

/// Builds a program from the crate registry for guests, with its authors' lock file, and returns its path. Built only once.
pub fn install(lab: &Lab, package: &str, version: &str) -> Result<PathBuf> {
    let folder = lab.cache().join("registry").join(format!("{package}-{version}"));
    let path = folder.join("bin").join(package);
    if path.exists() {
        return Ok(path);
    }
    progress(format_args!("building {package} {version} for guests (once, a minute or two)"));
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    service::run(
        statically_linked(Command::new(cargo))
            // Outside of the project, whose settings must not apply.
            .current_dir(lab.cache())
            .args(["install", "--quiet", "--locked", "--target", TARGET, "--version", version, "--root"])
            .arg(&folder)
            .arg("--target-dir")
            .arg(folder.join("target"))
            .arg(package),
    )?;
    Ok(path)
}

fn statically_linked(mut cargo: Command) -> Command {
    cargo.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    cargo
}
