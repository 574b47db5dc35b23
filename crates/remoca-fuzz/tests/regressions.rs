//! The seeds of each target, and every input that once made it fail: `regressions/TARGET/*`.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use remoca_fuzz::TARGETS;
use std::fs;
use std::path::Path;

#[test]
fn seeds_and_old_findings_do_no_harm() {
    let regressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    for target in &TARGETS {
        let seeds = (target.seeds)();
        assert!(!seeds.is_empty(), "{} has nothing to start from", target.name);
        for seed in &seeds {
            assert!(seed.len() <= target.length_max, "{}: a seed of {} bytes", target.name, seed.len());
            (target.run)(seed);
        }
        (target.run)(&[]);
        for entry in fs::read_dir(regressions.join(target.name)).into_iter().flatten() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            (target.run)(&fs::read(path).unwrap());
        }
    }
}

#[test]
fn findings_belong_to_a_target() {
    let regressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    for entry in fs::read_dir(regressions).into_iter().flatten() {
        let name = entry.unwrap().file_name();
        assert!(TARGETS.iter().any(|target| name == target.name), "there is no target {}", name.display());
    }
}
