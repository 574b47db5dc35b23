//! A running `remoca web`, and what other screens show of its snapshots.

use super::program::{Program, REMOCA, command, run};
use super::wait_until;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

/// A page of some VMs.
pub struct Page {
    /// Ends with this.
    _program: Program,
    pub address: String,
}

impl Page {
    /// Starts the page of the VM processes with these control sockets, with a snapshot each second.
    pub fn start(folder: &Path, controls: &[PathBuf]) -> Self {
        Self::start_every(1, folder, controls)
    }

    /// Starts the page with a snapshot each `seconds`.
    pub fn start_every(seconds: u32, folder: &Path, controls: &[PathBuf]) -> Self {
        let mut command = command(REMOCA);
        command.args(["web", "--listen", "127.0.0.1:0", "--interval", &seconds.to_string()]).args(controls);
        let mut program = Program::start(&mut command, &folder.join("web.log"));
        let mut address = String::new();
        wait_until("the page listens", || {
            assert!(program.is_running(), "{}", program.log());
            let log = program.log();
            let line = log.lines().find_map(|line| line.strip_prefix("listening on http://"));
            address = line.map(|line| line.trim_end_matches('/').to_owned()).unwrap_or_default();
            !address.is_empty()
        });
        Self { _program: program, address }
    }

    /// Returns the content of a path.
    #[track_caller]
    pub fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, content) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.0 200 "), "{path}: {answer}");
        content.to_owned()
    }

    #[track_caller]
    pub fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.get(path)).unwrap()
    }

    /// Returns the causes of what is wrong, in order.
    pub fn causes(&self) -> Vec<String> {
        let overview = self.json("/api/overview");
        let problems = overview["problems"].as_array().unwrap();
        problems.iter().map(|problem| problem["cause"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns what another command shows of the page's newest snapshot.
    #[track_caller]
    pub fn shown_by(&self, arguments: &[&str]) -> String {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["--from", &self.address]).collect();
        let output = run(&arguments);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}
