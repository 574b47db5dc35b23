//! Plans that once failed: each file of `regressions/` is one, with a description in its first line. A plan that names
//! a rule fails without that rule, and passes with it. The other plans must pass.
//!
//! To add one: `cargo xtask sim --seed S --save crates/remoca-sim/regressions/NAME.plan`, and describe it in `what`.

use remoca_sim::{Options, Saved, load, run};
use std::fs;
use std::path::Path;

fn saved() -> Vec<Saved> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut paths: Vec<_> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .expect("the folder of the plans can be read");
    paths.sort();
    let text = |path: &Path| fs::read_to_string(path).expect("a plan can be read");
    paths.iter().map(|path| load(&path.display().to_string(), &text(path)).expect("it is a plan")).collect()
}

#[test]
fn plans_that_failed_pass() {
    let plans = saved();
    assert!(!plans.is_empty());
    for Saved { plan, options, what } in plans {
        assert!(!what.is_empty(), "{} does not say what it was", plan.origin);
        let all_rules = Options { omit: None, omit_host: None, ..options };
        run(&plan, &all_rules).unwrap_or_else(|failure| panic!("{failure}\nit was: {what}"));
    }
}

#[test]
fn plans_that_need_a_rule_fail_without_it() {
    let mut all = saved();
    all.retain(|saved| (saved.options.omit, saved.options.omit_host) != (None, None));
    all.retain(|Saved { plan, options, .. }| run(plan, options).is_ok());
    let stale: Vec<_> = all.iter().map(|saved| saved.plan.origin.to_string()).collect();
    assert!(
        stale.is_empty(),
        "{stale:?} pass without their rule as well: find others with `cargo xtask sim --omit RULE --seeds 2000 --save FILE`"
    );
}
