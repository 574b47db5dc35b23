// Part of a tree with mutants, of each crate that has some. Written by `cargo xtask mutants`; not part of xtask's own code.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of mutants. Reaching one beyond it would never be recorded.
const COUNT_MAX: usize = 1 << 17;

/// Returns whether mutant `number` is the one selected for this run.
pub fn on(number: usize) -> bool {
    static CHOSEN: OnceLock<usize> = OnceLock::new();
    let chosen = || std::env::var("REMOCA_MUTANT").ok().and_then(|number| number.parse().ok());
    *CHOSEN.get_or_init(|| chosen().unwrap_or(usize::MAX)) == number
}

/// Records at once that mutant `number` was reached, because the process may be killed. No descriptor stays open.
pub fn reached(number: usize) {
    static NOTES: OnceLock<Option<std::ffi::OsString>> = OnceLock::new();
    static NOTED: [AtomicBool; COUNT_MAX] = [const { AtomicBool::new(false) }; COUNT_MAX];
    let Some(path) = NOTES.get_or_init(|| std::env::var_os("REMOCA_REACHED")) else { return };
    if NOTED.get(number).is_some_and(|noted| !noted.swap(true, Ordering::Relaxed)) {
        let file = OpenOptions::new().write(true).open(path);
        let _ = file.and_then(|file| file.write_at(&[1], number as u64));
    }
}
