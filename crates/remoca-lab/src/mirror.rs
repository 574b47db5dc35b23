//! The source of Debian packages: the mirror that this machine itself uses, so that none is written into the project.

use std::process::Command;

use crate::error::{Context, Error, Result};

/// Mirror for a machine without a Debian source of its own, such as one with Ubuntu.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";

/// A package source and the settings that reach it.
#[derive(Debug, PartialEq, Eq)]
pub struct Mirror {
    pub uri: String,
    /// apt settings of this machine that decide how a mirror is reached, as `KEY "VALUE"`.
    pub apt_options: Vec<String>,
}

impl Mirror {
    /// Returns the mirror for Debian's `suite`: the machine's own source of that suite if it has one, else any Debian
    /// source that it has (a mirror carries all suites), else Debian's own.
    pub fn of_this_machine(suite: &str) -> Result<Mirror> {
        let targets = stdout_of(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI)|$(ORIGIN)|$(RELEASE)|$(COMPONENT)",
            "Created-By: Packages",
        ]))?;
        let uri = choose(&targets, suite).unwrap_or(DEFAULT_MIRROR).trim_end_matches('/').to_owned();
        let config = stdout_of(Command::new("apt-config").arg("dump"))?;
        Ok(Mirror { uri, apt_options: transport_options(&config) })
    }
}

fn stdout_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().context(format_args!("running {program}"))?;
    if !output.status.success() {
        return Err(Error::Command {
            command: program,
            status: output.status.to_string(),
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Picks a URI from lines of `URI|ORIGIN|RELEASE|COMPONENT`. The origin is known only after an `apt-get update`;
/// before it, a source is recognised as Debian's by its path. Returns `None` if there is no Debian source.
fn choose<'a>(targets: &'a str, suite: &str) -> Option<&'a str> {
    let mut fallback = None;
    for line in targets.lines() {
        let fields: Vec<&str> = line.split('|').collect();
        let [uri, origin, release, component] = fields[..] else { continue };
        let debian = origin == "Debian" || (origin.starts_with("$(") || origin.is_empty()) && is_main_archive(uri);
        // The security and ports archives have other suites.
        if !debian || component != "main" || !is_main_archive(uri) {
            continue;
        }
        if release == suite {
            return Some(uri);
        }
        fallback = fallback.or(Some(uri));
    }
    fallback
}

fn is_main_archive(uri: &str) -> bool {
    let last = uri.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    last == "debian" || uri.contains("/archive/debian/")
}

fn transport_options(config: &str) -> Vec<String> {
    config
        .lines()
        .filter_map(|line| line.strip_suffix(';'))
        .filter(|line| {
            let key = line.split(' ').next().unwrap_or_default().to_ascii_lowercase();
            let transport = key.starts_with("acquire::http") && (key.contains("proxy") || key.contains("cainfo"));
            let value_set = !line.ends_with("\"\"");
            value_set && (transport || key == "acquire::check-valid-until" || key == "acquire::check-date")
        })
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_source_of_the_suite_wins() {
        let targets = "http://a/debian/|Debian|trixie|main\nhttp://b/debian/|Debian|bookworm|main\n";
        assert_eq!(choose(targets, "bookworm"), Some("http://b/debian/"));
        assert_eq!(choose(targets, "sid"), Some("http://a/debian/"));
    }

    #[test]
    fn other_archives_are_passed_over() {
        let targets = "http://a/debian-security/|Debian|bookworm-security|main\n\
                       http://b/ubuntu/|Ubuntu|noble|main\n\
                       http://c/apt|Google|cloud-sdk-bookworm|main\n\
                       broken line\n";
        assert_eq!(choose(targets, "bookworm"), None);
    }

    #[test]
    fn unknown_origin_is_judged_by_its_path() {
        let targets = "http://b/ubuntu/|$(ORIGIN)|noble|main\nhttp://a/debian|$(ORIGIN)|bookworm|main\n";
        assert_eq!(choose(targets, "bookworm"), Some("http://a/debian"));
    }

    #[test]
    fn only_options_that_reach_the_mirror_are_kept() {
        let config = "APT::Architecture \"amd64\";\nAcquire::http::Proxy \"http://p:1\";\nAcquire::https::Proxy \"\";\n\
                      Acquire::Check-Valid-Until \"false\";\n";
        assert_eq!(
            transport_options(config),
            ["Acquire::http::Proxy \"http://p:1\"", "Acquire::Check-Valid-Until \"false\""]
        );
    }
}
