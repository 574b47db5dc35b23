//! libvirt's XML as docs/guests.md has it, so that what is documented is what is tested.

use crate::Result;
use remoca_lab::DomainXml;
use std::path::Path;

/// Returns the first XML block of the section with this heading.
pub fn domain_xml(heading: &str) -> Result<DomainXml> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guests.md");
    let text = std::fs::read_to_string(path)?;
    let block = block(&text, heading).ok_or_else(|| format!("docs/guests.md has no XML under '{heading}'"))?;
    let (memory_backing, devices) = block.split_once("...\n").unwrap_or(("", block));
    Ok(DomainXml { memory_backing: memory_backing.into(), devices: devices.into(), ..DomainXml::default() })
}

fn block<'a>(text: &'a str, heading: &str) -> Option<&'a str> {
    let (_, section) = text.split_once(&format!("\n## {heading}\n"))?;
    let section = section.split("\n## ").next()?;
    let (_, block) = section.split_once("```xml\n")?;
    Some(block.split_once("```")?.0)
}

/// Returns the `<disk>` elements of a domain's devices.
pub fn disks(devices: &str) -> Vec<String> {
    devices.split_inclusive("</disk>").map(|disk| disk.trim().to_owned()).filter(|disk| !disk.is_empty()).collect()
}
