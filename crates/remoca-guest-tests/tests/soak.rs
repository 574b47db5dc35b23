//! Two minutes of `make soak`: everything around a working guest is killed, stopped, restarted, resized or cut off. The
//! guest waits, loses no request and sees no error, and the cache fills again.

use remoca_guest_tests::soak::events::Event;
use remoca_guest_tests::soak::{self, Options, Report, StoreKind};
use std::path::Path;
use std::time::Duration;

#[test]
fn the_disk_outlives_everything_around_it() {
    let options = Options { seed: 4, time: Duration::from_secs(60), calm_restarts: 1 };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/soak/short");
    let runs = [StoreKind::RawFile, StoreKind::Nbd].map(|kind| soak::run(kind, &options, &folder, &mut |_| {}));
    let report = Report::new(options.seed, 2, runs.into());
    for run in &report.runs {
        println!("{run}");
        for event in Event::ALWAYS {
            assert!(run.events.contains_key(event.name()), "{} never happened", event.name());
        }
    }
    for event in Event::OF_STORE {
        assert!(report.events.contains_key(event.name()), "{} never happened", event.name());
    }
    assert!(report.passed, "{report:?}");
}
