//! Images: there, and locked by this VM alone.

use crate::look;
use crate::size::show_size;
use crate::vm::Vm;
use remoca_disk::start::DiskOptions;
use remoca_io::lock::{LockFailure, probe};
use remoca_protocol::control::{DiskStatus, Status};
use remoca_view::diagnosis::{WAITS, why_unreachable};
use remoca_view::finding::Finding;
use std::fs::{File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Checks the images of a VM. If its process hangs, it is not known what it says of them.
pub(super) fn check(vm: &Vm, hangs: bool) -> Vec<Finding> {
    let begun = match &vm.running {
        Some(status) => {
            let status = Arc::new(status.clone());
            (0..status.disks.len()).map(|at| begin_running(&status, at)).collect()
        }
        None => vm.disks().map(|(name, disk)| begin_configured(format!("image {name}"), disk.clone(), hangs)).collect(),
    };
    let does_not_answer = |(what, image): (String, String)| {
        let advice = "Is its server there, and the way to it? Whoever reads the image waits until it answers";
        Finding::failed(what, format!("{image}: its file system does not answer"), advice)
    };
    look::end(begun).map(|(image, found)| found.unwrap_or_else(|| does_not_answer(image))).collect()
}

/// A look at an image: what is checked, the image, and what is found.
type Look = ((String, String), Receiver<Finding>);

fn begin_running(status: &Arc<Status>, at: usize) -> Look {
    let (disk, status) = (&status.disks[at], Arc::clone(status));
    let image = (format!("image {}", disk.name), disk.image.clone());
    (image, look::begin(move || of_running(&status, &status.disks[at])))
}

fn begin_configured(what: String, disk: DiskOptions, hangs: bool) -> Look {
    let image = (what.clone(), disk.image.clone());
    (image, look::begin(move || of_configured(what, &disk, hangs)))
}

fn of_running(status: &Status, disk: &DiskStatus) -> Finding {
    let (what, name, image) = (format!("image {}", disk.name), &status.name, &disk.image);
    if let Some(error) = &disk.failed_flush {
        let advice = format!(
            "Is the image sound? See docs/failures.md, then `remoca set {name} --clear-failed-flush {}`",
            disk.name
        );
        return Finding::failed(what, format!("{image}: a flush failed ({error}), and all later ones do"), advice);
    }
    if !status.has_disks() {
        return Finding::warning(
            what,
            format!("{image}: another process has it, as the VM migrates"),
            "See `remoca status -v`",
        );
    }
    if is_replaced(status, disk) {
        let advice = format!(
            "The guest works on a file that has no name, or another one, and that is lost with the process. Put it back in place before the \
             process ends, for example from /proc/{}/fd",
            status.pid
        );
        return Finding::failed(what, format!("{image}: not the file that this process serves"), advice);
    }
    match disk.store.as_str() {
        "up" => Finding::ok(what, format!("{image}, {}, locked by this process", show_size(disk.bytes))),
        _ => Finding::failed(what, why_unreachable(disk), WAITS),
    }
}

/// Returns whether another file, or none, has the path of the image of `disk`, and not the one that the process serves. Returns `false`
/// where that cannot be known.
pub(crate) fn is_replaced(status: &Status, disk: &DiskStatus) -> bool {
    disk.store == "up" && is_elsewhere(status.pid, &disk.image)
}

/// Returns whether the process `pid` has none of its files open at the path `image`, as it sees it. Returns `false` where that cannot be
/// known, and for images of other servers.
fn is_elsewhere(pid: u32, image: &str) -> bool {
    if !image.starts_with('/') {
        return false;
    }
    let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let identity = |file: &Metadata| match file.file_type().is_block_device() {
        true => (0, file.rdev()),
        false => (file.dev(), file.ino()),
    };
    let served = files.flatten().filter_map(|file| std::fs::metadata(file.path()).ok());
    let served: Vec<_> = served.map(|file| identity(&file)).collect();
    match std::fs::metadata(format!("/proc/{pid}/root{image}")) {
        Ok(named) => !served.contains(&identity(&named)),
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}

fn of_configured(what: String, disk: &DiskOptions, hangs: bool) -> Finding {
    let image = &disk.image;
    if image.starts_with("nbd:") || image.starts_with("nbd+unix:") {
        return Finding::warning(
            what,
            format!("{image}: not looked at"),
            "Its server is asked when the process starts",
        );
    }
    let opened = File::options().read(true).write(!disk.read_only).open(image);
    let (file, metadata) = match opened.and_then(|file| file.metadata().map(|metadata| (file, metadata))) {
        Ok(found) => found,
        Err(error) => return Finding::failed(what, format!("{image}: {error}"), "Is the path right?"),
    };
    match probe(&file, disk.read_only) {
        Ok(()) if metadata.is_file() => {
            Finding::ok(what, format!("{image}, {}, used by nobody", show_size(metadata.len())))
        }
        Ok(()) => Finding::ok(what, format!("{image}, used by nobody")),
        Err(LockFailure::InUse) if hangs => {
            Finding::ok(what, format!("{image}: locked, as it is while its process is there"))
        }
        Err(LockFailure::InUse) => Finding::failed(
            what,
            format!("{image}: another program uses it"),
            "Is a guest attached to the image itself, or another `remoca disk` running?",
        ),
        Err(LockFailure::Unsupported(error)) => Finding::warning(
            what,
            format!("{image}: cannot be locked ({error})"),
            "Make sure that nothing else writes to it",
        ),
    }
}
