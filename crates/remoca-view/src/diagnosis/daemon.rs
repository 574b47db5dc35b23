//! Whether the host's daemon still does what it says.

use crate::finding::Finding;
use crate::text::show_seconds;
use remoca_protocol::host::HostReport;
use std::time::Duration;

/// Returns the finding that the daemon hangs, if its report is too old at `now_s`, in seconds since 1970. A thread of its own goes on showing it.
pub fn of_report(report: &HostReport, now_s: f64) -> Option<Finding> {
    let now_s = Duration::try_from_secs_f64(now_s).ok()?.as_secs();
    let age_s = report.overdue_s(now_s)?;
    let age = show_seconds(Duration::from_secs(age_s).as_secs_f64());
    Some(Finding::warning(
        "remoca host",
        format!("it last looked at the VMs {age} ago: sizes stay as they are"),
        "`journalctl --unit remoca-host` may say what it waits for; `systemctl restart remoca-host` ends that",
    ))
}

/// Returns the finding that the daemon is there and does not answer, not even the thread that shows its report. `why` says so in words.
pub fn silent(why: &str) -> Finding {
    Finding::warning(
        "remoca host",
        format!("{why}: sizes stay as they are"),
        "Is it stopped, or is the host out of CPU time? `systemctl restart remoca-host` ends that",
    )
}

#[cfg(test)]
mod tests {
    use crate::diagnosis::of_host;
    use crate::testing::host_report;
    use remoca_protocol::host::HostReport;

    #[test]
    fn a_daemon_that_hangs_is_a_problem_of_the_host() {
        let report = HostReport { at_s: 1000, interval_ms: Some(10_000), ..host_report() };
        assert!(of_host(&[], Some(&Ok(report.clone())), 1030.0).is_empty());
        let problems = of_host(&[], Some(&Ok(report.clone())), 1400.0);
        let said = problems.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(
            said.len() == 1 && said[0].contains("this host: remoca host: it last looked at the VMs 6.7m ago"),
            "{said:?}"
        );
        let older = Ok(HostReport { interval_ms: None, ..report });
        assert!(of_host(&[], Some(&older), 1e9).is_empty() && of_host(&[], Some(&older), f64::NAN).is_empty());
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_a_problem_and_one_that_is_not_there_is_none() {
        let problems = of_host(&[], Some(&Err("it has not answered for 7 s".into())), 1400.0);
        assert!(problems.len() == 1 && problems[0].cause == "host-silent", "{problems:?}");
        let said = problems[0].to_string();
        assert!(said.starts_with("warning  this host: remoca host: it has not answered for 7 s: sizes stay"), "{said}");
        assert!(said.contains("`systemctl restart remoca-host`"), "{said}");
        assert!(of_host(&[], None, 1400.0).is_empty());
    }
}
