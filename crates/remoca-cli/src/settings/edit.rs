//! Changes to a VM's file: a disk comes or goes. Comments and order stay as they are.

use super::fields::FIELDS;
use super::vm_path;
use anyhow::{Context, Result, bail};
use remoca_disk::start::DiskOptions;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;
use std::time::{Duration, Instant};
use toml_edit::{ArrayOfTables, DocumentMut, Item, Table};

/// Mode of a new file: everybody may read it.
pub const MODE: u32 = 0o644;
/// Time that a command waits for others. Each holds the lock during one upgrade at most.
const LOCK_TIME_MAX: Duration = Duration::from_secs(60);

/// Adds a `[[disk]]` to the file of the VM `vm` in the configuration folder (`/etc/remoca`).
///
/// When this returns, the new file is on the disk in place of the old one, with the same owner and mode; a crash leaves either of
/// them. The VM process cannot do this, since its unit keeps it from writing to `/etc`. A command that changes the disks of a
/// running process asks the process first, then writes the file, and answers the operator last.
///
/// # Errors
/// If there is no such file, it is not valid TOML, it has a disk of this name already, or it cannot be written. The file is then
/// unchanged.
pub fn add_disk(folder: &Path, vm: &str, disk: &DiskOptions) -> Result<()> {
    let name = disk.name.as_deref().context("a disk in a file needs a name")?;
    change(&vm_path(folder, vm), |document| {
        let disks = disks(document)?;
        if position(disks, name).is_some() {
            bail!("there is a disk `{name}` already");
        }
        disks.push(table(disk));
        Ok(())
    })
}

/// Removes the `[[disk]]` with the name `name` from the file of the VM `vm`, in the same way as [`add_disk`] adds one. Comments
/// directly above the table go with it.
///
/// # Errors
/// As for [`add_disk`], and if there is no such disk.
pub fn remove_disk(folder: &Path, vm: &str, name: &str) -> Result<()> {
    change(&vm_path(folder, vm), |document| {
        let disks = disks(document)?;
        let at = position(disks, name).with_context(|| format!("there is no disk `{name}`"))?;
        disks.remove(at);
        if disks.is_empty() {
            document.remove("disk");
        }
        Ok(())
    })
}

/// Returns the `[[disk]]` that describes a disk: every setting that is not the default.
pub fn table(disk: &DiskOptions) -> Table {
    let mut table = Table::new();
    for (name, value) in FIELDS.iter().filter_map(|field| Some((field.name, (field.get)(disk)?))) {
        table.insert(name, Item::Value(value));
    }
    table.decor_mut().set_prefix("\n");
    table
}

fn disks(document: &mut DocumentMut) -> Result<&mut ArrayOfTables> {
    let item = document.entry("disk").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    item.as_array_of_tables_mut().context("its disks are not written as [[disk]] tables: write them so first")
}

fn position(disks: &ArrayOfTables, name: &str) -> Option<usize> {
    disks.iter().position(|disk| disk.get("name").and_then(Item::as_str) == Some(name))
}

/// Locks a folder against other commands that change what is in it. Waits for them.
///
/// # Errors
/// If one of them, or any user who can read the folder, keeps the lock for a minute.
pub fn lock(folder: &Path) -> Result<File> {
    let shown = folder.display();
    let lock = File::open(folder).with_context(|| format!("cannot open {shown}"))?;
    let give_up_at = Instant::now() + LOCK_TIME_MAX;
    while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if error != Errno::WOULDBLOCK {
            return Err(error).with_context(|| format!("cannot lock {shown}"));
        }
        if Instant::now() >= give_up_at {
            bail!("another process holds a lock on {shown} (`fuser {shown}` finds it): try again when it has ended");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(lock)
}

/// Applies a change to a file. Only one process at a time does.
fn change(path: &Path, change: impl FnOnce(&mut DocumentMut) -> Result<()>) -> Result<()> {
    let shown = path.display();
    let folder = path.parent().unwrap_or(path);
    let _lock = lock(folder)?;
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {shown}, where the disks of this VM are configured (a process that runs by flags alone has no such file)")
    })?;
    let mut document: DocumentMut = text.parse().with_context(|| format!("{shown} is not valid TOML"))?;
    change(&mut document).with_context(|| shown.to_string())?;
    replace(path, document.to_string().as_bytes(), MODE).with_context(|| format!("cannot write {shown}"))
}

/// Puts a file with this text at `path`, with the owner and mode of the former one; a new one has the mode `new_mode`. A link stays,
/// and the file that it leads to is replaced. After a crash there is the old file or the new one.
///
/// # Errors
/// If the system refuses. The former file is unchanged then.
pub fn replace(path: &Path, text: &[u8], new_mode: u32) -> io::Result<()> {
    let path = match path.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        path => path?,
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let new = tempfile::Builder::new().prefix(".remoca-").suffix(".new").tempfile_in(folder)?;
    let mut file = new.as_file();
    let written = match path.metadata() {
        Ok(former) => {
            let owner = fchown(file, Some(former.uid()), Some(former.gid()));
            owner.and_then(|()| file.set_permissions(former.permissions()))
        }
        Err(_) => file.set_permissions(PermissionsExt::from_mode(new_mode)),
    };
    let written = written.and_then(|()| file.write_all(text)).and_then(|()| file.sync_all());
    written?;
    new.persist(&path).map_err(|failed| failed.error)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::fields;

    const BEFORE: &str =
        "# The shop.\nversion = 1\ncache = \"2G\" # enough\n\n[[disk]]\nname = \"root\"   # boots\nimage = \"/a\"\n";

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("vms")).unwrap();
        std::fs::write(vm_path(folder.path(), "web1"), BEFORE).unwrap();
        folder
    }

    fn read(folder: &Path) -> String {
        std::fs::read_to_string(vm_path(folder, "web1")).unwrap()
    }

    #[test]
    fn a_disk_comes_and_goes_and_everything_else_stays() {
        let folder = folder();
        let path = vm_path(folder.path(), "web1");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let draft = path.with_extension("toml.new");
        std::fs::write(&draft, "a draft").unwrap();
        let disk = fields::parse("name=data,image=/b,socket=/s,swap,queues=2").unwrap();
        add_disk(folder.path(), "web1", &disk).unwrap();
        let added =
            "\n[[disk]]\nname = \"data\"\nimage = \"/b\"\nsocket = \"/s\"\nswap = true\nqueues = 2\nformat = \"raw\"\n";
        assert_eq!(read(folder.path()), format!("{BEFORE}{added}"));
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o640);
        let again = add_disk(folder.path(), "web1", &disk).unwrap_err();
        assert!(format!("{again:#}").contains("there is a disk `data` already"), "{again:#}");
        remove_disk(folder.path(), "web1", "data").unwrap();
        assert_eq!(read(folder.path()), BEFORE);
        remove_disk(folder.path(), "web1", "root").unwrap();
        assert!(!read(folder.path()).contains("disk") && read(folder.path()).contains("# enough"));
        add_disk(folder.path(), "web1", &disk).unwrap();
        assert!(read(folder.path()).ends_with(added));
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().flatten().collect();
        assert_eq!((left.len(), std::fs::read(draft).unwrap()), (2, b"a draft".to_vec()), "{left:?}");
    }

    #[test]
    fn what_cannot_be_changed_stays_as_it_is() {
        let folder = folder();
        let disk = fields::parse("name=data,image=/b").unwrap();
        for (text, words) in [("disk = [{name = 'a'}]\n", "not written as [[disk]]"), ("disk = \n", "not valid TOML")] {
            std::fs::write(vm_path(folder.path(), "web1"), text).unwrap();
            let error = format!("{:#}", add_disk(folder.path(), "web1", &disk).unwrap_err());
            assert!(error.contains(words) && error.contains("web1.toml"), "{error}");
            assert_eq!(read(folder.path()), text);
        }
        let error = format!("{:#}", remove_disk(folder.path(), "web2", "data").unwrap_err());
        assert!(error.contains("web2.toml") && error.contains("by flags alone"), "{error}");
    }

    #[test]
    fn a_link_to_a_file_stays_a_link() {
        let folder = folder();
        let [link, target] = ["link", "target"].map(|name| folder.path().join(name));
        std::fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new", MODE).unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        assert!(link.symlink_metadata().unwrap().is_symlink());
    }
}
