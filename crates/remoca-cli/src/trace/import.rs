//! `remoca trace import`.

use super::reading::{TraceFile, read_all};
use crate::size::show_size;
use anyhow::{Context, Result, bail};
use remoca_trace::{Format, Summary, Writer};
use std::fs::Permissions;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Reads a trace of any format, and writes it to `output` in ours. The file is there when all of it is written.
pub fn run(file: &TraceFile, output: &Path) -> Result<()> {
    let mut opened = file.open()?;
    let unfinished = unfinished(output)?;
    let cannot = || format!("cannot write {}", output.display());
    let mut writer = Writer::new(BufWriter::new(unfinished)).with_context(cannot)?;
    let mut summary = Summary::default();
    let knows_cache = opened.source.format() == Format::Remoca;
    let cut = read_all(&mut opened, |batch| {
        summary.note(batch, knows_cache);
        writer.write(batch).with_context(cannot)
    })?;
    let unfinished = writer.finish().with_context(cannot)?.into_inner().map_err(|error| error.into_error());
    let bytes = complete(unfinished.with_context(cannot)?, output)?;
    let requests = summary.requests();
    let each = if requests == 0 { 0.0 } else { bytes as f64 / requests as f64 };
    let mut out = std::io::stdout();
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

/// Returns a file beside `output`, which is removed if it does not take its place.
///
/// # Errors
/// If there is something else than a file at `output`, or no file can be made beside it.
pub fn unfinished(output: &Path) -> Result<NamedTempFile> {
    let folder = match output.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    if std::fs::metadata(output).is_ok_and(|file| !file.is_file()) {
        bail!("{} is no file, and is not replaced by one: name another", output.display());
    }
    // As for any new file, less what the user's mask takes away.
    let permissions = Permissions::from_mode(0o666);
    tempfile::Builder::new()
        .permissions(permissions)
        .tempfile_in(&folder)
        .with_context(|| format!("cannot write into the folder {}", folder.display()))
}

/// Lets a complete file take the place of `output`. Returns its size in bytes.
///
/// # Errors
/// If the system refuses.
pub fn complete(file: NamedTempFile, output: &Path) -> Result<u64> {
    let cannot = || format!("cannot write {}", output.display());
    let bytes = file.as_file().metadata().with_context(cannot)?.len();
    file.persist(output).map_err(|error| error.error).with_context(cannot)?;
    Ok(bytes)
}
