//! `remoca trace import`.

use super::reading::{TraceFile, read_all};
use crate::size::show_size;
use anyhow::{Context, Result, bail};
use remoca_io::signals::HeldBack;
use remoca_trace::{Format, Summary, Writer};
use std::fs::Permissions;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, PersistError};

/// Reads a trace of any format, and writes it to `output` in ours. The file is there when all of it is written. `replaces`: whether it
/// takes the place of another one.
pub fn run(file: &TraceFile, output: &Path, replaces: bool) -> Result<()> {
    let mut opened = file.open()?;
    let unfinished = removed_at_a_signal(output, replaces)?;
    let cannot = || format!("cannot write {}", output.display());
    let mut writer = Writer::new(BufWriter::new(unfinished)).with_context(cannot)?;
    let mut summary = Summary::default();
    let is_ours = opened.source.format() == Format::Remoca;
    let cut = read_all(&mut opened, |batch| {
        summary.note(batch, is_ours);
        writer.write(batch).with_context(cannot)
    })?;
    let unfinished = writer.finish().with_context(cannot)?.into_inner().map_err(|error| error.into_error());
    let bytes = complete(unfinished.with_context(cannot)?, output, replaces)?;
    let requests = summary.requests();
    let each = if requests == 0 { 0.0 } else { bytes as f64 / requests as f64 };
    let mut out = crate::output::output();
    let was = opened.bytes.map_or(String::new(), |bytes| format!(" instead of {}", show_size(bytes)));
    writeln!(
        out,
        "{}: {requests} requests of a trace of the format {}, in {}{was} ({each:.1} bytes each)",
        output.display(),
        opened.source.format(),
        show_size(bytes)
    )?;
    if let Some(cut) = cut {
        writeln!(out, "The rest is missing: {cut}")?;
    }
    Ok(())
}

/// Returns where a file at `output` belongs: a symbolic link stays, and the file that it names is written.
///
/// # Errors
/// If there is something else than a file, or a symbolic link to nothing.
fn place(output: &Path) -> Result<PathBuf> {
    match std::fs::canonicalize(output) {
        Ok(place) if place.is_file() => Ok(place),
        Err(_) if std::fs::symlink_metadata(output).is_err() => Ok(output.to_owned()),
        _ => bail!("{} is no file, and is not replaced by one: name another", output.display()),
    }
}

/// Returns a file beside `output`, or beside what it is a symbolic link to, which is removed if it does not take its place.
///
/// # Errors
/// If there is a file at `output` and it does not replace one, there is something else than a file, or no file can be made beside it.
pub fn unfinished(output: &Path, replaces: bool) -> Result<NamedTempFile> {
    let place = place(output)?;
    let folder = match place.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    if !replaces && std::fs::symlink_metadata(output).is_ok() {
        bail!("there is a file {} already: name another, or say --force to replace it", output.display());
    }
    // As for any new file, less what the user's mask takes away.
    let permissions = Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .permissions(permissions)
        .tempfile_in(&folder)
        .with_context(|| format!("cannot write into the folder {}", folder.display()))
}

/// Returns a file as [`unfinished`] does, which is also removed if a signal ends the process. Call it before any thread starts.
///
/// # Errors
/// As [`unfinished`], or if the system has no threads left.
pub fn removed_at_a_signal(output: &Path, replaces: bool) -> Result<NamedTempFile> {
    let cannot = "cannot wait for signals";
    let signals = HeldBack::take().context(cannot)?;
    let file = unfinished(output, replaces)?;
    let path = file.path().to_owned();
    signals.clean_up_with(move || drop(std::fs::remove_file(path))).context(cannot)?;
    Ok(file)
}

/// Lets a complete file take the place of `output`. Returns its size in bytes.
///
/// # Errors
/// If the system refuses, or a file has appeared at `output` meanwhile and it does not replace one. It then stays under a name of its
/// own.
pub fn complete(file: NamedTempFile, output: &Path, replaces: bool) -> Result<u64> {
    let cannot = || format!("cannot write {}", output.display());
    let bytes = file.as_file().metadata().with_context(cannot)?.len();
    let placed = match std::fs::canonicalize(output) {
        Ok(place) if replaces => file.persist(place),
        _ if replaces => file.persist(output),
        _ => file.persist_noclobber(output),
    };
    let Err(PersistError { error, file }) = placed else { return Ok(bytes) };
    let (_, kept) = file.keep().map_err(|error| error.error).with_context(cannot)?;
    let why = match error.kind() {
        ErrorKind::AlreadyExists => format!("a file {} has appeared meanwhile, and is not replaced", output.display()),
        _ => format!("it cannot be called {}: {error}", output.display()),
    };
    bail!("{why}: what was written is in {}", kept.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbolic_link_stays_and_what_it_names_is_replaced_if_it_is_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (link, far) = (path("link"), path("far"));
        std::fs::create_dir(&far).unwrap();
        std::os::unix::fs::symlink(far.join("file"), &link).unwrap();
        for replaces in [false, true] {
            let error = unfinished(&link, replaces).unwrap_err().to_string();
            assert!(error.ends_with("is no file, and is not replaced by one: name another"), "{error}");
        }
        std::fs::write(far.join("file"), "old").unwrap();
        assert!(unfinished(&link, false).unwrap_err().to_string().contains("--force"));
        let mut file = unfinished(&link, true).unwrap();
        assert_eq!(file.path().parent().unwrap(), far.canonicalize().unwrap());
        file.write_all(b"new").unwrap();
        complete(file, &link, true).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read(far.join("file")).unwrap(), b"new");
    }

    #[test]
    fn a_file_that_has_appeared_meanwhile_stays_and_so_does_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out");
        let mut file = unfinished(&output, false).unwrap();
        file.write_all(b"hours of work").unwrap();
        std::fs::write(&output, "another").unwrap();
        let error = complete(file, &output, false).unwrap_err().to_string();
        let (_, kept) = error.rsplit_once(' ').unwrap();
        assert_eq!(std::fs::read(kept).unwrap(), b"hours of work", "{error}");
        assert_eq!(std::fs::read(&output).unwrap(), b"another");
        // Whatever else the file system has against it.
        for replaces in [false, true] {
            let output = folder.path().join("n".repeat(256));
            let mut file = unfinished(&folder.path().join("other"), false).unwrap();
            file.write_all(b"hours of work").unwrap();
            let error = complete(file, &output, replaces).unwrap_err().to_string();
            let (_, kept) = error.rsplit_once(' ').unwrap();
            assert_eq!(std::fs::read(kept).unwrap(), b"hours of work", "{error}");
        }
    }
}
