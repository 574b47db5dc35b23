//! What a VM process answered, checked: nothing that it says is believed because it says it.

use crate::curve::Curve;
use crate::guest::AGENT_SILENT_AFTER;
use crate::resource::Resource;
use remoca_protocol::control::Status;

/// Greatest size that a VM process can have: 4 TiB.
const SIZE_MAX: u64 = 1 << 42;

/// Status of a VM process, as far as the division of memory needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Number of the process, and of the programs that it has been.
    pub process: (u32, u32),
    pub wanted: u64,
    pub granted: u64,
    /// Why its size cannot be changed.
    pub fixed: Option<String>,
    /// Whether its memory server is slower than its disk, which then answers all reads.
    pub is_left_alone: bool,
    /// Blocks that its guest has read since the program started.
    pub blocks_read: u64,
    /// Memory of the host that its guest's memory takes, as far as it sees that.
    pub guest_resident: Option<u64>,
    /// Share of time in which its guest's tasks waited for memory, as its agent says, in percent.
    pub guest_waits: Option<f64>,
    /// Blocks that what is divided has answered, and those that it has not.
    pub answered: (u64, u64),
    /// `None` if the curve was not asked for.
    pub curve: Option<Result<Curve, String>>,
}

/// What came back from the control socket of a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Read(Box<Reading>),
    /// It hangs, or answers with what is not believed.
    Silent(String),
    /// It was not asked, because this system lacks what that needs. Says nothing about the process.
    Unasked(String),
    /// Nobody listens at its socket: its process was killed.
    Dead,
}

impl Reading {
    /// Checks the status that came from the socket of the VM `name`.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn new(
        name: &str,
        resource: Resource,
        status: &Status,
        curve: Option<Result<Curve, String>>,
    ) -> Result<Self, String> {
        if status.name != name {
            return Err(format!("the process at the socket of {name} says that it is {}", shown(&status.name)));
        }
        let (wanted, granted) = resource.sizes(status);
        if wanted > SIZE_MAX || granted > SIZE_MAX {
            return Err(format!("it says that it has {granted} bytes and wants {wanted}, which no process can"));
        }
        let blocks_read =
            status.disks.iter().fold(0_u64, |sum, disk| sum.saturating_add(disk.traffic.read_bytes / 4096));
        Ok(Self {
            process: (status.pid, status.upgrades),
            wanted,
            granted,
            fixed: resource.fixed(status),
            is_left_alone: status.server.as_ref().is_some_and(|server| server.breaker != "closed"),
            blocks_read,
            guest_resident: status.memory.guest_resident_bytes,
            guest_waits: guest_waits(status),
            answered: resource.answered(status),
            curve,
        })
    }

    /// Returns the size that counts.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.wanted.max(self.granted)
    }
}

/// Returns the share of the last ten seconds in which some task of the guest waited for memory, in percent, if its agent said so lately.
fn guest_waits(status: &Status) -> Option<f64> {
    let port = status.port.as_ref()?;
    let is_new = port.agent_heard_s_ago.is_some_and(|seconds| seconds <= AGENT_SILENT_AFTER.as_secs());
    let wait = port.agent.filter(|_| is_new)?.memory_wait?;
    Some(f64::from(wait) / 100.)
}

/// Returns a text of a stranger that is fit to be shown.
fn shown(text: &str) -> String {
    const CHARACTERS_MAX: usize = 40;
    text.escape_debug().take(CHARACTERS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::status;
    use serde_json::json;

    fn of(status: &Status) -> Result<Reading, String> {
        Reading::new("web1", Resource::Cache, status, None)
    }

    #[test]
    fn a_status_is_checked() {
        let good = status("web1", 8 << 20, 4 << 20);
        let reading = of(&good).unwrap();
        assert_eq!((reading.counted(), reading.fixed), (8 << 20, None));
        assert!(
            of(&Status { name: "\x1b[2J".into(), ..good.clone() }).unwrap_err().contains("says that it is \\u{1b}")
        );
        let mut huge = good;
        huge.cache.granted_bytes = u64::MAX;
        assert!(of(&huge).unwrap_err().contains("no process can"));
    }

    #[test]
    fn what_the_vm_process_knows_of_its_guest_is_read() {
        let mut status = status("web1", 0, 0);
        let of_guest = |status: &Status| of(status).map(|reading| (reading.guest_resident, reading.guest_waits));
        assert_eq!(of_guest(&status), Ok((None, None)));
        status.memory.guest_resident_bytes = Some(7);
        let told = |heard: u64| {
            json!({"socket": "p", "attached": true, "nbd_clients": null, "advice": 0, "agent_heard_s_ago": heard,
                "agent": {"captured": 0, "lost": 0, "sampled_out": 0, "written": 0, "cookie": 0, "memory_wait": 1250}})
        };
        for (heard, waits) in [(15, Some(12.5)), (16, None)] {
            status.port = Some(serde_json::from_value(told(heard)).unwrap());
            assert_eq!(of_guest(&status), Ok((Some(7), waits)));
        }
    }

    #[test]
    fn sizes_and_names_have_an_end_and_a_server_that_is_left_alone_is_seen() {
        let mut most = status("web1", SIZE_MAX, SIZE_MAX);
        let reading = of(&most).unwrap();
        assert_eq!((reading.counted(), reading.is_left_alone), (SIZE_MAX, false));
        for (wanted, granted) in [(SIZE_MAX + 1, 0), (0, SIZE_MAX + 1)] {
            assert!(of(&status("web1", wanted, granted)).is_err(), "{wanted} {granted}");
        }
        assert_eq!(of(&status("web1", 1, 2)).unwrap().counted(), 2, "the greater of both counts");
        // Between the two the disk answers as well.
        for breaker in ["half-open", "open"] {
            most.server.as_mut().unwrap().breaker = breaker.into();
            assert!(of(&most).unwrap().is_left_alone, "{breaker}");
        }
        let error = of(&Status { name: "x".repeat(100), ..most }).unwrap_err();
        assert!(error.ends_with(&format!(" {}", "x".repeat(40))), "{error}");
    }
}
