//! A headless Chromium.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names of its program, the smallest package first.
const PROGRAMS: [&str; 4] = ["chromium-headless-shell", "chromium", "google-chrome", "chrome"];
/// Time that the page is given, as it runs in the page: fetches and timers.
const BUDGET_MS: u32 = 3000;

/// A browser of this machine.
pub struct Browser {
    program: PathBuf,
}

/// What was seen of a page.
pub struct Seen {
    /// The document as it stands after its script has run.
    pub dom: String,
    /// What the browser said, errors of the page included.
    pub said: String,
    /// Log of its network, as JSON.
    network: String,
}

impl Browser {
    /// Finds the browser: that of the variable `REMOCA_BROWSER`, else one of the search path. Returns `None`, and says so, on a system
    /// that has no package of one (Ubuntu); elsewhere `scripts/install-deps.sh` has installed it, and a missing one is an error.
    ///
    /// # Panics
    /// If it is missing where there is a package.
    #[must_use]
    pub fn find() -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let named = std::env::var_os("REMOCA_BROWSER").map(PathBuf::from);
        let folders: Vec<_> = std::env::split_paths(&path).collect();
        let in_path = || PROGRAMS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        if let Some(program) = named.into_iter().chain(in_path()).find(|program| program.is_file()) {
            return Some(Self { program });
        }
        let system = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
        assert!(
            system.lines().any(|line| line == "ID=ubuntu"),
            "there is no headless Chromium: run scripts/install-deps.sh, or set REMOCA_BROWSER to its program"
        );
        eprintln!("NOT RUN: this system has no package of a headless Chromium; set REMOCA_BROWSER to its program");
        None
    }

    fn command(&self, folder: &Path) -> Command {
        let mut command = Command::new(&self.program);
        // Its sandbox needs rights that containers do not have. It opens nothing but this page.
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]);
        command.args(["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]);
        command.args(["--enable-logging=stderr", "--log-level=0"]);
        command.arg(format!("--user-data-dir={}", folder.join("profile").display()));
        command.arg(format!("--virtual-time-budget={BUDGET_MS}")).stdin(Stdio::null());
        command
    }

    /// Opens a page, and returns what is there when its script has run.
    ///
    /// # Panics
    /// If the browser fails.
    #[must_use]
    pub fn open(&self, address: &str) -> Seen {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("network.json");
        let mut command = self.command(folder.path());
        command.arg(format!("--log-net-log={}", log.display())).args(["--dump-dom", address]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let dom = String::from_utf8_lossy(&output.stdout).into_owned();
        Seen { dom, said, network: std::fs::read_to_string(log).unwrap() }
    }

    /// Makes a picture (PNG) of a page, in a window of this size.
    ///
    /// # Panics
    /// If the browser fails.
    pub fn picture(&self, address: &str, [width, height]: [u32; 2], target: &Path) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = self.command(folder.path());
        command.arg(format!("--window-size={width},{height}")).arg(format!("--screenshot={}", target.display()));
        let output = command.arg(address).output().unwrap();
        let is_there = target.metadata().is_ok_and(|picture| picture.len() > 0);
        assert!(output.status.success() && is_there, "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Seen {
    /// Expects that the page asked for something, and only at `host`.
    ///
    /// # Panics
    /// If it asked somebody else.
    #[track_caller]
    pub fn expect_no_other_host(&self, host: &str) {
        let urls: Vec<&str> =
            self.network.split("\"url\":\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let own = format!("http://{host}/");
        assert!(urls.iter().any(|url| url.starts_with(&format!("{own}api/"))), "the page asked for nothing: {urls:?}");
        let is_own = |url: &str| url.starts_with(&own) || url.starts_with("data:");
        let others: Vec<_> = urls.iter().filter(|url| !is_own(url)).collect();
        assert!(others.is_empty(), "the page asked elsewhere: {others:?}");
    }
}
