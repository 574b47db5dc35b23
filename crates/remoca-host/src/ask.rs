//! Asks VM processes over their control sockets. Each has its own deadline, and a thread of its own waits for it.

use crate::curve::Curve;
use crate::planner::Outcome;
use crate::reading::{Answer, Reading};
use crate::resource::Resource;
use crate::text::shortened;
use remoca_io::control::call_within;
use remoca_protocol::control::{Command, CurveGrid, Reply, Status};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

/// Time that a VM process has for each answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time that it has to change its size: its index may have to grow first.
const SET_PATIENCE: Duration = Duration::from_secs(5);
/// Number of processes that are asked at the same time.
const ASKED_AT_A_TIME_MAX: usize = 64;

/// A VM with its control socket.
pub type Place<'p> = (&'p str, &'p Path);

/// Asks all processes, several at a time, for their status, and for their curve at the sizes of `grid`. Returns the answers in the same order.
#[must_use]
pub fn ask_all(places: &[Place<'_>], resource: Resource, grid: Option<CurveGrid>) -> Vec<Answer> {
    let batch = |batch: &[Place<'_>]| -> Vec<Answer> {
        thread::scope(|scope| {
            let asked: Vec<_> = batch.iter().map(|place| scope.spawn(move || ask(*place, resource, grid))).collect();
            let silent = |_| Answer::Silent("asking it panicked".into());
            let answer = |asked: ScopedJoinHandle<'_, Answer>| asked.join().unwrap_or_else(silent);
            asked.into_iter().map(answer).collect()
        })
    };
    places.chunks(ASKED_AT_A_TIME_MAX).flat_map(batch).collect()
}

/// Sends a command to a process. Returns its reply, with the beginning of what it says of an error.
fn call(socket: &Path, command: Command, patience: Duration) -> io::Result<Reply> {
    match call_within(socket, command, patience) {
        Ok(Reply::Error { error }) => Ok(Reply::Error { error: shortened(error) }),
        reply => reply,
    }
}

fn ask((name, socket): Place<'_>, resource: Resource, grid: Option<CurveGrid>) -> Answer {
    let status = match call(socket, Command::Status, PATIENCE) {
        Ok(Reply::Status(status)) => status,
        other => return silence(other),
    };
    let grid = grid.map(|grid| resource.grid(&status, grid));
    let curve = grid.map(|grid| match call(socket, Command::Curve { disk: None, grid: Some(grid) }, PATIENCE) {
        Ok(Reply::Curve(curve)) => resource.says_enough(&status, &curve).and_then(|()| {
            let mut curve = Curve::new(&curve, grid)?;
            curve.saved_us = resource.saved_us(&status).or(curve.saved_us);
            Ok(curve)
        }),
        Ok(Reply::Error { error }) if error.starts_with("this is no command") => {
            Err("its process is of an older version: `remoca upgrade` brings it to this one".into())
        }
        Ok(Reply::Error { error }) => Err(error),
        Ok(Reply::Status(_)) => Err("it answers with something else than a curve".into()),
        Err(error) => Err(format!("it does not tell its curve: {error}")),
    });
    read(name, resource, &status, curve)
}

fn read(name: &str, resource: Resource, status: &Status, curve: Option<Result<Curve, String>>) -> Answer {
    match Reading::new(name, resource, status, curve) {
        Ok(mut reading) => {
            reading.fixed = reading.fixed.or_else(|| resource.first_server(status).and_then(nobody_at));
            Answer::Read(Box::new(reading))
        }
        Err(why) => Answer::Silent(why),
    }
}

/// Returns what it means that no server has a socket at `path`; `None` if one has, or the path is one of the process alone.
fn nobody_at(path: &str) -> Option<String> {
    let is_there = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_socket());
    (Path::new(path).is_absolute() && !is_there).then(|| {
        format!(
            "no memory server listens at {path} (`remoca serve --listen unix:{path}`), where its local tier would be"
        )
    })
}

/// Returns what it means that no status came.
fn silence(answer: io::Result<Reply>) -> Answer {
    match answer {
        Ok(Reply::Error { error }) => Answer::Silent(error),
        Ok(Reply::Status(_) | Reply::Curve(_)) => {
            Answer::Silent("it answers with something else than its status".into())
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Answer::Dead
        }
        Err(error) => Answer::Silent(error.to_string()),
    }
}

/// Gives the VM a size.
#[must_use]
pub fn set((name, socket): Place<'_>, resource: Resource, bytes: u64) -> Outcome {
    match call(socket, resource.command(bytes), SET_PATIENCE) {
        Ok(Reply::Status(status)) => Outcome::Answered(read(name, resource, &status, None)),
        Ok(Reply::Error { error }) => Outcome::Refused(error),
        Ok(Reply::Curve(_)) => Outcome::Unknown("it answers with something else than its status".into()),
        Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
            Outcome::NotSent("its process was killed".into())
        }
        Err(error) => Outcome::Unknown(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::CHARACTERS_MAX;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn long_words_of_a_process_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("a.ctl");
        let listener = UnixListener::bind(&socket).unwrap();
        let words = "\u{fc}".repeat(1 << 20);
        let answer = format!("{{\"error\":\"{words}\"}}\n");
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                (&stream).write_all(answer.as_bytes()).unwrap();
            }
        });
        let place: Place<'_> = ("a", &socket);
        let short = "\u{fc}".repeat(CHARACTERS_MAX);
        assert_eq!(ask_all(&[place], Resource::Cache, None), [Answer::Silent(short.clone())]);
        assert_eq!(set(place, Resource::Cache, 1), Outcome::Refused(short));
    }
}
