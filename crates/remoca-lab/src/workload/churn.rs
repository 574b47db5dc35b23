//! Files that are created and deleted: blocks are freed and reused for other files, which reveals stale content.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use serde::Serialize;

use super::{
    Faults,
    dataset::{self, FileEntry, MANIFEST_NAME, Manifest, Verified},
    journal::Versions,
    pattern::Random,
    signature::SECTOR_SIZE,
};
use crate::error::{Context, Result};

#[derive(Clone, Debug)]
pub struct Options {
    pub step_count: u64,
    /// Largest number of files at once, at least 1.
    pub file_count_max: u64,
    /// Largest size of a file in sectors of 512 bytes, at least 1.
    pub file_sectors_max: u64,
    pub seed: u64,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub created: u64,
    pub deleted: u64,
    pub shortened: u64,
    pub renamed: u64,
    pub verified_sectors: u64,
    pub files_left: usize,
    #[serde(flatten)]
    pub faults: Faults,
}

/// Creates, reads, shortens, renames and deletes files. If the folder was churned before, continues there.
///
/// Every file ever made has a number of its own, so a block that still holds an earlier file is recognised. The
/// manifest of the remaining files is written at the end.
pub fn churn(folder: &Path, options: &Options) -> Result<Report> {
    fs::create_dir_all(folder).context_path("creating", folder)?;
    let manifest = if folder.join(MANIFEST_NAME).exists() {
        Manifest::read(folder)?
    } else {
        Manifest { seed: options.seed, files: Vec::new() }
    };
    let next_id = manifest.files.iter().map(|entry| entry.id + 1).max().unwrap_or_default();
    // Depends on the number of the next file, so that a second round does not repeat the first.
    let random = Random::new(options.seed ^ (next_id << 32));
    let mut churn = Churn { folder, manifest, next_id, random, report: Report::default() };
    for _ in 0..options.step_count {
        if let Err((place, error)) = churn.step(options) {
            churn.report.faults.io_error(&place, &error);
        }
    }
    churn.manifest.write(folder)?;
    churn.report.files_left = churn.manifest.files.len();
    Ok(churn.report)
}

struct Churn<'a> {
    folder: &'a Path,
    manifest: Manifest,
    next_id: u64,
    random: Random,
    report: Report,
}

impl Churn<'_> {
    fn step(&mut self, options: &Options) -> Result<(), (String, io::Error)> {
        let slot = usize::try_from(self.random.below(options.file_count_max)).unwrap_or_default();
        if slot >= self.manifest.files.len() {
            return self.create(options);
        }
        let name = self.manifest.files[slot].name.clone();
        let result = match self.random.below(10) {
            0..4 => {
                self.verify(slot);
                Ok(())
            }
            4..8 => self.delete(slot),
            8 => self.shorten(slot),
            _ => self.rename(slot),
        };
        result.map_err(|error| (name, error))
    }

    fn create(&mut self, options: &Options) -> Result<(), (String, io::Error)> {
        let id = self.next_id;
        self.next_id += 1;
        let size = (1 + self.random.below(options.file_sectors_max)) * SECTOR_SIZE as u64;
        let entry = FileEntry { name: format!("c{id:05}"), id, size };
        dataset::create_file(&self.folder.join(&entry.name), &entry, self.manifest.seed)
            .map_err(|error| (entry.name.clone(), error))?;
        self.manifest.files.push(entry);
        self.report.created += 1;
        Ok(())
    }

    fn verify(&mut self, slot: usize) {
        let mut verified = Verified::default();
        let entry = &self.manifest.files[slot];
        dataset::verify_file(self.folder, entry, self.manifest.seed, &Versions::default(), false, &mut verified);
        self.report.verified_sectors += verified.sectors;
        self.report.faults.add(verified.faults);
    }

    fn delete(&mut self, slot: usize) -> io::Result<()> {
        let entry = self.manifest.files.swap_remove(slot);
        fs::remove_file(self.folder.join(entry.name))?;
        self.report.deleted += 1;
        Ok(())
    }

    fn shorten(&mut self, slot: usize) -> io::Result<()> {
        let entry = &mut self.manifest.files[slot];
        let sector_count = entry.size / SECTOR_SIZE as u64;
        let size = (1 + self.random.below(sector_count)) * SECTOR_SIZE as u64;
        File::options().write(true).open(self.folder.join(&entry.name))?.set_len(size)?;
        entry.size = size;
        self.report.shortened += 1;
        Ok(())
    }

    fn rename(&mut self, slot: usize) -> io::Result<()> {
        let entry = &mut self.manifest.files[slot];
        let name = format!("r{:05}", entry.id);
        fs::rename(self.folder.join(&entry.name), self.folder.join(&name))?;
        entry.name = name;
        self.report.renamed += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_rounds_leave_a_data_set_that_verifies() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { step_count: 100, file_count_max: 10, file_sectors_max: 20, seed: 3 };
        for _ in 0..2 {
            let report = churn(folder.path(), &options).unwrap();
            assert_eq!(report.faults, Faults::default());
            assert!(report.created > 0 && report.deleted > 0 && report.shortened > 0 && report.renamed > 0);
        }
        let manifest = Manifest::read(folder.path()).unwrap();
        let verified = dataset::verify(folder.path(), &manifest, &Versions::default(), false);
        assert_eq!(verified.faults, Faults::default());
        assert!(verified.sectors > 0);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), manifest.files.len() + 1);
    }
}
