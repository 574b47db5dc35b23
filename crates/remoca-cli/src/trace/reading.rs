//! Reads trace files.

use anyhow::{Context, Error, Result};
use clap::Args;
use remoca_trace::{Batch, Format, Source, TraceError, open};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The options that say which trace to read.
#[derive(Args, Debug)]
pub struct TraceFile {
    /// Trace to read, or - for the standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Format of the trace: auto, remoca, blktrace, blkparse, vscsi, msr, oracle-general
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = format)]
    format: Choice,

    /// Use a trace that ends within a record, up to there
    #[arg(long)]
    accept_cut: bool,
}

/// What the operator says of a trace's format.
#[derive(Clone, Copy, Debug)]
struct Choice(Option<Format>);

fn format(text: &str) -> Result<Choice, String> {
    if text == "auto" { Ok(Choice(None)) } else { text.parse().map(|format| Choice(Some(format))) }
}

/// An open trace.
pub struct Opened {
    pub source: Source,
    /// Bytes of the file; `None` if it is no file.
    pub bytes: Option<u64>,
    name: String,
    accept_cut: bool,
}

impl TraceFile {
    /// Opens the trace.
    ///
    /// # Errors
    /// If it cannot be read, or its format is not recognized.
    pub fn open(&self) -> Result<Opened> {
        let name = self.file.display().to_string();
        let (reader, bytes): (Box<dyn Read>, _) = if self.file == Path::new("-") {
            (Box::new(io::stdin()), None)
        } else {
            let file = File::open(&self.file).with_context(|| format!("cannot open the trace {name}"))?;
            let bytes = file.metadata().ok().filter(|data| data.is_file()).map(|data| data.len());
            (Box::new(file), bytes)
        };
        let source = open(reader, self.format.0).map_err(|error| explain(error, &name))?;
        Ok(Opened { source, bytes, name, accept_cut: self.accept_cut })
    }
}

fn explain(error: TraceError, name: &str) -> Error {
    let hint = if error.is_cut_short() { "; --accept-cut uses what is there" } else { "" };
    let text = format!("{name}: {error}{hint}");
    match error.kind {
        remoca_trace::ErrorKind::Io(error) => Error::new(error).context(text),
        remoca_trace::ErrorKind::CutShort | remoca_trace::ErrorKind::Wrong(_) => Error::msg(text),
    }
}

/// Passes all batches of a trace to `take`. Returns a note if the end of the trace was cut off, and that is accepted.
///
/// # Errors
/// If the trace is wrong or cut short, or `take` fails.
pub fn read_all(opened: &mut Opened, mut take: impl FnMut(&Batch) -> Result<()>) -> Result<Option<String>> {
    let mut batch = Batch::default();
    loop {
        let read = opened.source.read(&mut batch);
        match read {
            Ok(false) => return Ok(None),
            Ok(true) => take(&batch)?,
            Err(error) if error.is_cut_short() && opened.accept_cut => {
                take(&batch)?;
                return Ok(Some(error.to_string()));
            }
            Err(error) => return Err(explain(error, &opened.name)),
        }
    }
}
