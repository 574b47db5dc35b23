//! The laboratory's folders in the project, and progress lines.

use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use crate::error::{Context, Result};

/// The laboratory's folders: the cache (images, programs) and the logs of guests and services.
#[derive(Clone, Debug)]
pub struct Lab {
    cache: PathBuf,
    logs: PathBuf,
}

impl Lab {
    /// Opens the laboratory of the source tree this was built from: `.cache/lab` and `out/lab` in it.
    pub fn open() -> Result<Lab> {
        let project = project_folder();
        Lab::at(&project.join(".cache/lab"), &project.join("out/lab"))
    }

    pub fn at(cache: &Path, logs: &Path) -> Result<Lab> {
        for folder in [cache, logs] {
            fs::create_dir_all(folder).context_path("creating", folder)?;
        }
        Ok(Lab { cache: cache.to_owned(), logs: logs.to_owned() })
    }

    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Returns an empty folder `out/lab/NAME` for the logs of one guest or service, or `NAME.1` and so on while
    /// another process uses it. The folder is in use as long as the returned file is open.
    pub fn log_folder(&self, name: &str) -> Result<(PathBuf, File)> {
        let mut attempt = 0;
        loop {
            let folder = if attempt == 0 { self.logs.join(name) } else { self.logs.join(format!("{name}.{attempt}")) };
            fs::create_dir_all(&folder).context_path("creating", &folder)?;
            let lock_path = folder.join(".lock");
            let lock = File::create(&lock_path).context_path("creating", &lock_path)?;
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                empty(&folder, &lock_path)?;
                return Ok((folder, lock));
            }
            attempt += 1;
        }
    }
}

pub(crate) fn project_folder() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_owned()
}

fn empty(folder: &Path, keep: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).context_path("reading", folder)? {
        let path = entry.context_path("reading", folder)?.path();
        if path == keep {
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.context_path("removing", &path)?;
    }
    Ok(())
}

/// Prints a progress line to the user. It goes directly to standard error, because the test harness would hold it back.
pub(crate) fn progress(line: impl Display) {
    // Fails if standard error is closed, which does not matter.
    let _ = writeln!(io::stderr(), "lab: {line}");
}
