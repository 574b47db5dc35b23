//! Kinds of file systems, by the magic numbers that `statfs` reports.

use rustix::fs::FsWord;

/// Those of a disk for which nobody but the kernel of this host answers, and that set the change time of a file at every write by its
/// clock.
const LOCAL: [FsWord; 4] =
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::F2FS_SUPER_MAGIC];
/// Those of memfds, and the kernel's for eventfds and sockets.
const IN_MEMORY: [FsWord; 4] = [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, ANONYMOUS_MAGIC, SOCKET_MAGIC];
const ANONYMOUS_MAGIC: FsWord = 0x0904_1934;
const SOCKET_MAGIC: FsWord = 0x534f_434b;

/// Returns whether the file system is ext4, XFS, Btrfs or F2FS.
#[must_use]
pub fn is_local(kind: FsWord) -> bool {
    LOCAL.contains(&kind)
}

/// Returns whether nobody but the kernel of this host answers for a file of this kind of file system. One of FUSE or of a network may
/// make whoever asks wait, and so may one that lies over one of these.
#[must_use]
pub fn is_of_this_host(kind: FsWord) -> bool {
    is_local(kind) || IN_MEMORY.contains(&kind)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test a surprise is a failure")]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn memory_sockets_and_disks_are_of_this_host_and_nothing_for_which_somebody_else_answers() {
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let (socket, _other) = UnixStream::pair().unwrap();
        for fd in [memory.as_fd(), event.as_fd(), socket.as_fd()] {
            let kind = rustix::fs::fstatfs(fd).unwrap().f_type;
            assert!(is_of_this_host(kind) && !is_local(kind), "{kind:x}");
        }
        assert!(LOCAL.into_iter().all(is_of_this_host));
        // FUSE, NFS, overlayfs, which may lie over either, and one that nobody knows.
        assert!(![0x6573_5546, 0x6969, 0x794c_7630, 0x1234_5678].into_iter().any(is_of_this_host));
    }
}
