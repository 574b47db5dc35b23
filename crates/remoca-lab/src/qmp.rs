//! A small QMP client: QEMU's machine protocol, JSON messages on one line each.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use serde_json::{Value, json};

use crate::error::{Error, Result};

/// Time limit for an answer: QEMU answers at once unless it hangs.
const LIMIT: Duration = Duration::from_secs(30);
const MESSAGE_SIZE_MAX: u64 = 16 << 20;

#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Qmp {
    pub(crate) fn open(socket: UnixStream) -> Result<Qmp> {
        socket.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        let writer = socket.try_clone().map_err(failed)?;
        let mut qmp = Qmp { reader: BufReader::new(socket), writer };
        let greeting = qmp.receive()?;
        if greeting.get("QMP").is_none() {
            return Err(Error::Qmp(format!("unexpected greeting {greeting}")));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.writer, "{request}").map_err(failed)?;
        loop {
            let mut message = self.receive()?;
            if let Some(error) = message.get("error") {
                return Err(Error::Qmp(format!("{command}: {error}")));
            }
            // Events may arrive before the result.
            if let Some(result) = message.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    /// Returns whether the guest's processors are running.
    pub fn is_running(&mut self) -> Result<bool> {
        let status = self.execute("query-status", json!({}))?;
        Ok(status["running"].as_bool().unwrap_or(false))
    }

    /// Stops the guest's processors.
    pub fn pause(&mut self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    pub fn resume(&mut self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    fn receive(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self.reader.by_ref().take(MESSAGE_SIZE_MAX).read_line(&mut line) {
            Ok(0) => Err(Error::Qmp("QEMU closed the connection".into())),
            Ok(_) => serde_json::from_str(&line).map_err(|error| Error::Qmp(format!("{error} in {line}"))),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Err(Error::Qmp(format!("no answer within {} s", LIMIT.as_secs())))
            }
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::Qmp(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_among_events_and_errors_are_told() {
        let (socket, mut qemu) = UnixStream::pair().unwrap();
        qemu.write_all(
            b"{\"QMP\":{}}\n{\"return\":{}}\n{\"event\":\"STOP\"}\n{\"return\":{\"running\":true}}\n\
              {\"error\":{\"desc\":\"no\"}}\nrubbish\n",
        )
        .unwrap();
        let mut qmp = Qmp::open(socket).unwrap();
        assert!(qmp.is_running().unwrap());
        assert!(qmp.pause().unwrap_err().to_string().contains("\"no\""));
        assert!(qmp.resume().is_err());
        drop(qemu);
        assert!(qmp.resume().is_err());
    }
}
