//! Names of the formats.

use std::fmt;
use std::str::FromStr;

/// Format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Our own: `remoca trace record`, `remoca disk --trace`.
    Remoca,
    /// Binary output of blktrace, merged by `blkparse -d`.
    Blktrace,
    /// Text output of blkparse.
    Blkparse,
    /// VMware's vscsiStats, binary.
    Vscsi,
    /// CSV of Microsoft Research Cambridge.
    Msr,
    /// Binary oracleGeneral of libCacheSim: each object counts as one block.
    OracleGeneral,
}

const FORMATS: [(Format, &str); 6] = [
    (Format::Remoca, "remoca"),
    (Format::Blktrace, "blktrace"),
    (Format::Blkparse, "blkparse"),
    (Format::Vscsi, "vscsi"),
    (Format::Msr, "msr"),
    (Format::OracleGeneral, "oracle-general"),
];

impl Format {
    /// Names of all formats.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FORMATS.into_iter().map(|(_, name)| name)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(FORMATS.iter().find(|(format, _)| format == self).map_or("?", |(_, name)| name))
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = FORMATS.iter().find(|(_, name)| *name == text).map(|(format, _)| *format);
        found.ok_or_else(|| {
            format!("`{text}` is no format of traces: auto, {}", Self::names().collect::<Vec<_>>().join(", "))
        })
    }
}
