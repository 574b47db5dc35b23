//! Tests that cannot run everywhere: they fail where they cannot, unless somebody has said that they may be left out.

use std::io::Write;

/// Returns whether this user is root, as a test wants that `needs` that. Leaves the test out otherwise, as [`leave_out`].
///
/// # Panics
/// As [`leave_out`].
#[must_use]
#[track_caller]
pub fn is_root(needs: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        leave_out(needs);
    }
    is_root
}

/// Says, past the capture of outputs, that this test is left out, if `REMOCA_SKIP_ROOT` is set.
///
/// # Panics
/// If that is not set, or `CI` is: then no test is left out.
#[track_caller]
pub fn leave_out(why: &str) {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    assert!(
        is_set("REMOCA_SKIP_ROOT") && !is_set("CI"),
        "{why}: run it as root, or leave such tests out with REMOCA_SKIP_ROOT=1"
    );
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    // Not by `eprintln!`, which nobody sees of a test that passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}
