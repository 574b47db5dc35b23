//! Disks for guests, made and looked at on the host.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{Context, Error, Result},
    service::run,
};

/// A small ext4 image that holds the files under the given names.
pub fn image_of_files(image: &Path, files: &[(String, PathBuf)]) -> Result<()> {
    let folder = image.with_extension("files");
    fs::create_dir_all(&folder).context_path("creating", &folder)?;
    let mut size_mib = 4;
    for (name, source) in files {
        if name.contains('/') || name.is_empty() {
            return Err(Error::Invalid(format!("'{name}' is no name for a payload file")));
        }
        let size = fs::copy(source, folder.join(name)).context_path("copying", source)?;
        size_mib += size.div_ceil(1 << 20);
    }
    run(Command::new("mke2fs")
        .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-F", "-d"])
        .arg(&folder)
        .arg(image)
        .arg(format!("{size_mib}M")))?;
    fs::remove_dir_all(&folder).context_path("removing", &folder)
}
