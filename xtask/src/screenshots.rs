//! `cargo xtask screenshots`: pictures of `remoca top` and of the page for the documentation, in `docs/images`.

use crate::run::{Step, cargo, project};
use std::ffi::OsString;

/// Makes the pictures. They show VMs that are made up, some of them ill.
///
/// # Errors
/// If there is no headless Chromium, or something else failed.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    if !arguments.is_empty() {
        return Err("usage: cargo xtask screenshots".into());
    }
    let mut make =
        cargo(["run", "--quiet", "--package", "remoca-view", "--example", "screenshots", "--", "docs/images"]);
    make.current_dir(project());
    Step::new("screenshots", make).run()
}
