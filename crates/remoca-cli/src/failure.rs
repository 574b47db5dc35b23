//! Exit codes of a start that failed, for the service manager: what no further start can mend is not tried again at once.

use crate::output::say;
use crate::settings::Unusable;
use anyhow::Error;
use remoca_disk::start::WrongOptions;
use remoca_io::socket::SocketError;
use remoca_store::{OpenError, OpenErrorKind};
use std::io::ErrorKind;
use std::process::ExitCode;
use std::time::Duration;

/// An image is missing, or cannot be used as it is (EX_NOINPUT of sysexits.h).
const NO_IMAGE: u8 = 66;
/// A socket cannot be made where it should be (EX_CANTCREAT).
const NO_SOCKET: u8 = 73;
/// The configuration cannot be used (EX_CONFIG).
const CONFIGURATION: u8 = 78;
/// How long a process waits before it ends, if a guest may wait for its disks: the service manager starts it again then.
const PAUSE: Duration = Duration::from_secs(5);

/// How long it waits after an error that may pass by itself, such as an address that this host does not have yet.
const SHORT_PAUSE: Duration = Duration::from_secs(1);

/// A start that failed and that is tried again.
#[derive(Debug, thiserror::Error)]
#[error("a guest may wait for its disks, so the start is tried every {} seconds", PAUSE.as_secs())]
struct TriedAgain;

/// Returns the exit code for an error. 66, 73 and 78 say that the operator has to correct something first.
pub fn exit_code(error: &Error) -> ExitCode {
    match code(error) {
        Some(code) if error.downcast_ref::<TriedAgain>().is_none() => {
            if is_a_service() {
                say("this is not tried again: correct it, then start the unit");
            }
            code.into()
        }
        _ => ExitCode::FAILURE,
    }
}

/// Returns whether an error stays until the operator corrects something: no start can succeed before.
pub fn needs_correction(error: &Error) -> bool {
    code(error).is_some()
}

/// Returns the error of a VM process that could not start. Under a service manager, if a process of the same name ran since the host
/// booted, its guest may be waiting: what is missing may come back, so the process ends after a pause, to be started again.
pub fn of_start(error: Error, is_successor: bool) -> Error {
    // A key, a trace file, a folder for the state: what the options name is not there, or closed to this process.
    let error = match code(&error) {
        None if find::<std::io::Error>(&error).is_some_and(is_for_the_operator) => error.context(WrongOptions),
        _ => error,
    };
    let is_in_use = find::<OpenError>(&error).is_some_and(|error| error.kind == OpenErrorKind::InUse);
    match code(&error) {
        _ if !is_a_service() => error,
        Some(_) if !is_successor => error,
        Some(_) => {
            let error = error.context(TriedAgain);
            tracing::error!("{error:#}");
            std::thread::sleep(PAUSE);
            error
        }
        // Held by a process that is about to end.
        None if is_in_use => error,
        None => {
            std::thread::sleep(SHORT_PAUSE);
            error
        }
    }
}

fn is_a_service() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

fn code(error: &Error) -> Option<u8> {
    let is_wrong = find::<Unusable>(error).is_some()
        || find::<WrongOptions>(error).is_some()
        || find::<clap::Error>(error).is_some();
    let configuration = is_wrong.then_some(CONFIGURATION);
    let image = || find::<OpenError>(error).filter(|error| is_lasting(error.kind)).map(|_| NO_IMAGE);
    let socket = || find::<SocketError>(error).filter(|error| is_wrong_place(error)).map(|_| NO_SOCKET);
    configuration.or_else(image).or_else(socket)
}

/// Returns the error of type `E` that is behind `error`, if there is one.
fn find<'e, E: std::error::Error + Send + Sync + 'static>(error: &'e Error) -> Option<&'e E> {
    let within = |cause: &'e (dyn std::error::Error + 'static)| {
        let io = || cause.downcast_ref::<std::io::Error>()?.get_ref()?.downcast_ref();
        cause.downcast_ref().or_else(io)
    };
    error.downcast_ref().or_else(|| error.chain().find_map(within))
}

/// Returns whether an image stays unusable until somebody does something.
fn is_lasting(kind: OpenErrorKind) -> bool {
    match kind {
        OpenErrorKind::Missing
        | OpenErrorKind::NotAnImage
        | OpenErrorKind::Empty
        | OpenErrorKind::NotRaw
        | OpenErrorKind::OddSize
        | OpenErrorKind::CannotLock
        | OpenErrorKind::PermissionDenied
        | OpenErrorKind::ReadOnly
        | OpenErrorKind::Unsuitable => true,
        OpenErrorKind::InUse | OpenErrorKind::Unreachable | OpenErrorKind::Protocol | OpenErrorKind::System => false,
    }
}

fn is_wrong_place(error: &SocketError) -> bool {
    match error {
        SocketError::PathTooLong { .. } | SocketError::NotASocket(_) | SocketError::Group { .. } => true,
        SocketError::Bind { source, .. } => is_for_the_operator(source),
        SocketError::InUse(_) | SocketError::WrongDescriptor | SocketError::Descriptor(_) => false,
    }
}

fn is_for_the_operator(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory
            | ErrorKind::AlreadyExists
            | ErrorKind::PermissionDenied
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use remoca_io::socket::SocketSource;

    const UNITS: [&str; 3] = [
        include_str!("../../../packaging/remoca-disk@.service"),
        include_str!("../../../packaging/remoca-host.service"),
        include_str!("../../../packaging/remoca-web.service"),
    ];

    /// `remoca host` says so where somebody else has its lock.
    #[test]
    fn the_units_of_the_host_start_again_after_five_seconds_for_ever() {
        for line in ["\nStartLimitIntervalSec=0\n", "\nRestart=on-failure\n", "\nRestartSec=5\n"] {
            assert!(UNITS[1].contains(line), "{line}");
        }
    }

    #[test]
    fn a_unit_does_not_try_again_what_is_said_not_to_be_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = SocketSource::bind(&folder.path().join("missing/socket"), None).unwrap_err();
        // As those of `remoca host` and `remoca web` arrive.
        let errors = [Error::from(std::io::Error::other(socket)), Error::msg("mistakes").context(WrongOptions)];
        let codes = errors.map(|error| code(&error).unwrap().to_string());
        assert_eq!(codes, ["73", "78"]);
        for unit in UNITS {
            let prevented = unit.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus=")).unwrap();
            for code in &codes {
                assert!(prevented.split(' ').any(|other| other == code), "{code}: {unit}");
            }
        }
    }
}
