use crate::report::Report;
use anyhow::{Context, Result};
use std::path::Path;
pub fn write(report: &Report, out: &Path) -> Result<()> {
    std::fs::write(out.join("report.json"), serde_json::to_string_pretty(report)?).context("writing")
}
