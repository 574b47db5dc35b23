//! A file that tells a restarted process where the disks are. It is valid only in the boot in which it was made.
//!
//! Its name is that of the control socket with a suffix, so that no two processes share one. Where the image's lock
//! decides, `.here` says that the disks came: without it, a process restarted with `--incoming` would wait for disks
//! that no process sends. If the VM has moved on, the lock reveals it. Where the lock does not reach other hosts,
//! `.gone` says that the disks went: without it, a restarted source would be an owner again.

use remoca_io::small_file::{self, with_ending};
use std::path::{Path, PathBuf};

/// Length of a boot's id, and of every mark.
const BOOT_ID_BYTES: u64 = 37;

/// The mark of one VM process.
pub struct Mark {
    path: PathBuf,
    lock_reaches: bool,
}

impl Mark {
    /// Returns the mark of the process with this control socket.
    #[must_use]
    pub fn beside(control: &Path, lock_reaches: bool) -> Self {
        Self { path: with_ending(control, if lock_reaches { ".here" } else { ".gone" }), lock_reaches }
    }

    /// Returns whether, in this boot, the disks came here and did not go.
    #[must_use]
    pub fn says_here(&self) -> bool {
        self.lock_reaches && self.is_set()
    }

    /// Returns whether, in this boot, the disks went from here and did not come back, and no lock says where they are.
    #[must_use]
    pub fn says_gone(&self) -> bool {
        !self.lock_reaches && self.is_set()
    }

    fn is_set(&self) -> bool {
        let boot = boot_id();
        boot.is_some() && small_file::read(&self.path, BOOT_ID_BYTES + 1).ok() == boot
    }

    pub(crate) fn disks_came(&self) {
        self.put(self.lock_reaches);
    }

    pub(crate) fn disks_went(&self) {
        self.put(!self.lock_reaches);
    }

    /// Updates the mark when the process ends in good order. `.here` is removed unless the guest stays, which then
    /// waits for a successor that has the disks. `.gone` stays: another host keeps the disks that it has.
    pub(crate) fn process_ends(&self, guest_stays: bool) {
        if self.lock_reaches && !guest_stays {
            self.put(false);
        }
    }

    fn put(&self, there: bool) {
        if !there {
            // There may be none.
            let _ = std::fs::remove_file(&self.path);
            return;
        }
        let written = boot_id().map(|boot| small_file::write(&self.path, &boot));
        if !matches!(written, Some(Ok(()))) {
            let remedy = match self.lock_reaches {
                true => "if this process dies, start it again without --incoming",
                false => "do not start this process again: it would take the disks for its own",
            };
            tracing::warn!("cannot write {}: {remedy}", self.path.display());
        }
    }
}

fn boot_id() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_it_says_depends_on_whether_the_lock_reaches() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vm.ctl");
        let (here, gone) = (Mark::beside(&control, true), Mark::beside(&control, false));
        let say = || (here.says_here(), here.says_gone(), gone.says_here(), gone.says_gone());
        assert_eq!(say(), (false, false, false, false));
        [&here, &gone].into_iter().for_each(Mark::disks_came);
        assert_eq!(say(), (true, false, false, false));
        let mode = std::fs::metadata(folder.path().join("vm.ctl.here")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else reads or writes it");
        [&here, &gone].into_iter().for_each(Mark::disks_went);
        assert_eq!(say(), (false, false, false, true));
        here.disks_came();
        [&here, &gone].into_iter().for_each(|mark| mark.process_ends(true));
        assert_eq!(say(), (true, false, false, true));
        [&here, &gone].into_iter().for_each(|mark| mark.process_ends(false));
        assert_eq!(say(), (false, false, false, true));
        std::fs::write(folder.path().join("vm.ctl.gone"), "of another boot").unwrap();
        assert_eq!(say(), (false, false, false, false));
    }

    #[test]
    fn no_two_processes_share_one_whatever_their_names() {
        let folder = tempfile::tempdir().unwrap();
        for lock_reaches in [true, false] {
            let marks = ["prod", "prod.a", "prod.b", "prod.a.ctl", "prod.ctl", "prod.here", "prod.gone"]
                .map(|name| Mark::beside(&folder.path().join(name), lock_reaches));
            for mark in &marks {
                mark.put(true);
                assert_eq!(marks.iter().filter(|mark| mark.is_set()).count(), 1, "{}", mark.path.display());
                mark.put(false);
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, boot_id().unwrap()).unwrap();
        let mark = Mark::beside(&folder.path().join("vm.ctl"), true);
        std::os::unix::fs::symlink(&other, &mark.path).unwrap();
        assert!(!mark.is_set(), "somebody else's file is no mark");
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, with_ending(&mark.path, ".new")).unwrap();
        mark.put(true);
        assert!(mark.is_set());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    }
}
