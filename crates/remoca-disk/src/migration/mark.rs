//! A file that tells a restarted process where the disks are. It is valid only in the boot in which it was made.
//!
//! Its name is that of the control socket with a suffix, so that no two processes share one. Where the image's lock
//! decides, `.here` says that the disks came: without it, a process restarted with `--incoming` would wait for disks
//! that no process sends. If the VM has moved on, the lock reveals it. Where the lock does not reach other hosts,
//! `.gone` says that the disks went: without it, a restarted source would be an owner again. So it takes its room before
//! they go, as `.gone.ready`, and they do not go without it.

use remoca_io::small_file::{self, with_ending};
use std::io;
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

    /// Takes the room for the mark without which the disks may not go, if there is one.
    ///
    /// # Errors
    /// If that is impossible; the text says what to do.
    pub(crate) fn prepare(&self) -> Result<(), String> {
        let ready = self.ready();
        if self.lock_reaches || self.is_set() || is_of_this_boot(&ready) {
            return Ok(());
        }
        write(&ready).map_err(|error| explain(&ready, &error))
    }

    pub(crate) fn disks_came(&self) {
        if !self.lock_reaches {
            // They may go again, and there may be no mark.
            let _ = std::fs::rename(&self.path, self.ready());
            self.remove();
        } else if let Err(error) = write(&self.path) {
            tracing::warn!(
                "cannot write {}: {error}. If this process dies, start it again without --incoming",
                self.path.display()
            );
        }
    }

    /// Records that the disks go. Called before they do.
    ///
    /// # Errors
    /// If a restarted process would not know it. The text says what to do.
    pub(crate) fn disks_go(&self) -> Result<(), String> {
        if self.lock_reaches {
            self.remove();
            return Ok(());
        }
        // Somebody may have removed what was prepared, or it is of another boot.
        let _ = std::fs::rename(self.ready(), &self.path);
        if self.is_set() {
            return Ok(());
        }
        write(&self.path).map_err(|error| explain(&self.path, &error))
    }

    /// Updates the mark when the process ends in good order. `.here` is removed unless the guest stays, which then
    /// waits for a successor that has the disks. `.gone` stays: another host keeps the disks that it has.
    pub(crate) fn process_ends(&self, guest_stays: bool) {
        if !self.lock_reaches {
            let _ = std::fs::remove_file(self.ready());
        } else if !guest_stays {
            self.remove();
        }
    }

    /// Returns the path of a mark that has its room, and says nothing yet.
    fn ready(&self) -> PathBuf {
        with_ending(&self.path, ".ready")
    }

    fn is_set(&self) -> bool {
        is_of_this_boot(&self.path)
    }

    /// Removes the mark, if there is one.
    fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn write(path: &Path) -> io::Result<()> {
    small_file::write(path, boot_id()?)
}

fn is_of_this_boot(path: &Path) -> bool {
    boot_id().is_ok_and(|boot| small_file::read(path, BOOT_ID_BYTES + 1).is_ok_and(|text| text == boot))
}

fn boot_id() -> io::Result<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
}

fn explain(path: &Path, error: &io::Error) -> String {
    format!(
        "cannot write {}: {error}. That file would say after a restart that another process has the disks, and no lock of these images \
         reaches other hosts. Make room for it, then say `remoca migrate` again",
        path.display()
    )
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
        [&here, &gone].into_iter().for_each(|mark| mark.disks_go().unwrap());
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
    fn the_one_without_which_disks_may_not_go_has_its_room_before() {
        let folder = tempfile::tempdir().unwrap();
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let control = folder.path().join("vm.ctl");
        let (here, gone) = (Mark::beside(&control, true), Mark::beside(&control, false));
        here.prepare().unwrap();
        assert_eq!(files(), 0, "it is not needed");
        gone.prepare().unwrap();
        assert!(!gone.says_gone() && gone.ready().is_file());
        for _ in 0..2 {
            gone.disks_go().unwrap();
            gone.prepare().unwrap();
            assert!(gone.says_gone() && files() == 1);
            gone.disks_came();
            assert!(!gone.says_gone() && gone.ready().is_file() && files() == 1, "they may go again");
        }
        std::fs::write(gone.ready(), "of another boot").unwrap();
        gone.disks_go().unwrap();
        assert!(gone.says_gone());
        gone.disks_came();
        gone.process_ends(true);
        assert_eq!(files(), 0);
        // As on a file system that is full.
        std::fs::create_dir(gone.ready()).unwrap();
        assert!(gone.prepare().unwrap_err().contains("vm.ctl.gone.ready"));
        std::fs::create_dir(&gone.path).unwrap();
        assert!(gone.disks_go().unwrap_err().contains("Make room"));
        assert!(!gone.says_gone());
    }

    #[test]
    fn no_two_processes_share_one_whatever_their_names() {
        let folder = tempfile::tempdir().unwrap();
        for lock_reaches in [true, false] {
            let marks = ["prod", "prod.a", "prod.b", "prod.a.ctl", "prod.ctl", "prod.here", "prod.gone"]
                .map(|name| Mark::beside(&folder.path().join(name), lock_reaches));
            for mark in &marks {
                write(&mark.path).unwrap();
                assert_eq!(marks.iter().filter(|mark| mark.is_set()).count(), 1, "{}", mark.path.display());
                mark.remove();
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
        write(&mark.path).unwrap();
        assert!(mark.is_set());
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    }
}
