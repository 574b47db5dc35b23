//! `remoca-agent check`: reports what would work in this guest, one line per item, without capturing anything.

use std::io::{self, Write};
use std::path::Path;

use crate::capture::Capture;
use crate::error::AgentError;
use crate::port::Port;
use crate::process;

/// Prints the findings. Returns the first failure, so that the exit code is the same as that of a start.
pub fn check(port: Option<&Path>, ring_bytes: u32) -> Result<(), AgentError> {
    let steps: [(&str, Result<String, AgentError>); 6] = [
        ("kernel BTF", process::check_btf().map(|()| "there".to_owned())),
        ("capabilities", process::check_capabilities().map(|()| "CAP_BPF, CAP_PERFMON".to_owned())),
        ("kernel symbols", process::check_kernel_symbols().map(|()| "readable".to_owned())),
        ("eviction port", check_port(port)),
        ("eBPF program", check_program(ring_bytes)),
        ("locked memory", process::lock_memory().map(|()| "allowed".to_owned())),
    ];
    let mut first_failure = Ok(());
    for (what, result) in steps {
        let line = match &result {
            Ok(finding) => format!("{what:<16} ok      {finding}"),
            Err(error) => format!("{what:<16} FAILED  {error}"),
        };
        // The exit code also reports the failure if standard output is closed.
        writeln!(io::stdout(), "{line}").ok();
        first_failure = first_failure.and(result.map(drop));
    }
    first_failure
}

fn check_port(port: Option<&Path>) -> Result<String, AgentError> {
    let opened = Port::open(port);
    if let Err(AgentError::PortInUse(device)) = &opened
        && let Some(pid) = process::agent_that_uses(device)
    {
        return Ok(format!("{}, in use by the agent that runs (process {pid})", device.display()));
    }
    let (port, identification) = opened?;
    let page_count_max = port.batch_page_count_max(&identification);
    let advice = match identification.sample_one_in {
        1 => "wants all pages".to_owned(),
        one_in => format!("wants about one page of {one_in}"),
    };
    Ok(format!("{}, {page_count_max} pages at once, {advice}", port.device().display()))
}

/// Loads and attaches the program, and removes it again.
fn check_program(ring_bytes: u32) -> Result<String, AgentError> {
    let capture = Capture::load(ring_bytes)?;
    capture.set_paused(true);
    drop(capture.attach()?);
    if process::is_tracing_off() {
        return Err(AgentError::Busy(process::TRACING_OFF.to_owned()));
    }
    Ok("loads and attaches".to_owned())
}
