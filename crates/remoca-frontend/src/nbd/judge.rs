//! Decides which requests are refused, and translates error numbers.

use super::ExportGeometry;
use remoca_protocol::nbd::{COMMAND_DONT_FRAGMENT, COMMAND_FUA, COMMAND_NO_HOLE, Command, PAYLOAD_MAX, Request};

/// Checks a request. Fails with the error number of this system with which the request is refused.
pub(super) fn judge(request: &Request, geometry: &ExportGeometry, structured: bool) -> Result<(), i32> {
    let ExportGeometry { size, block, read_only, can_trim, can_write_zeroes, .. } = *geometry;
    let (modifies, more_flags) = match request.command {
        Command::Read if structured => (false, COMMAND_DONT_FRAGMENT),
        Command::Read | Command::Flush => (false, 0),
        Command::Write => (true, 0),
        Command::Trim if can_trim || read_only => (true, 0),
        Command::WriteZeroes if can_write_zeroes || read_only => (true, COMMAND_NO_HOLE),
        Command::Trim | Command::WriteZeroes | Command::Disconnect | Command::Other(_) => return Err(libc::EINVAL),
    };
    if request.flags & !(COMMAND_FUA | more_flags) != 0 {
        return Err(libc::EINVAL);
    }
    if modifies && read_only {
        return Err(libc::EPERM);
    }
    if request.command == Command::Flush {
        return Ok(());
    }
    let block = u64::from(block);
    let end = request.offset.checked_add(request.len.into()).filter(|end| *end <= size);
    match end {
        None if matches!(request.command, Command::Write | Command::WriteZeroes) => Err(libc::ENOSPC),
        None => Err(libc::EINVAL),
        Some(end) if request.len == 0 || !request.offset.is_multiple_of(block) || !end.is_multiple_of(block) => {
            Err(libc::EINVAL)
        }
        Some(_) if request.command == Command::Read && request.len > PAYLOAD_MAX => Err(libc::EINVAL),
        Some(_) => Ok(()),
    }
}

/// Returns the protocol's error number for an error number of this system.
pub(super) fn error_code(errno: i32) -> u32 {
    match errno {
        libc::EPERM | libc::EROFS => 1,
        libc::ENOMEM => 12,
        libc::EINVAL => 22,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => 28,
        libc::EOVERFLOW => 75,
        libc::EOPNOTSUPP => 95,
        libc::ESHUTDOWN => 108,
        _ => 5,
    }
}
