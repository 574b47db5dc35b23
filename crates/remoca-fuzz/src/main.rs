//! The fuzzer: libFuzzer around one target. Built and started by `cargo xtask fuzz`, which chooses the target.

#![no_main]

use remoca_fuzz::{TARGETS, Target};
use std::path::Path;
use std::sync::OnceLock;

fn target() -> &'static Target {
    static TARGET: OnceLock<&Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let name = std::env::var("REMOCA_FUZZ_TARGET").expect("the name of a target in REMOCA_FUZZ_TARGET");
        TARGETS.iter().find(|target| target.name == name).expect("REMOCA_FUZZ_TARGET names a target")
    })
}

/// Prepares for the first input: lists the targets, or writes the seeds to the folder where the fuzzer looks for inputs.
fn prepare() {
    if std::env::var_os("REMOCA_FUZZ_LIST").is_some() {
        TARGETS.iter().for_each(|target| println!("{} {}", target.name, target.length_max));
        std::process::exit(0);
    }
    let Some(folder) = std::env::var_os("REMOCA_FUZZ_SEEDS") else { return };
    for (number, seed) in (target().seeds)().iter().enumerate() {
        std::fs::write(Path::new(&folder).join(format!("seed-{number}")), seed).expect("the folder can be written to");
    }
}

libfuzzer_sys::fuzz_target!(init: prepare(), |data: &[u8]| (target().run)(data));
