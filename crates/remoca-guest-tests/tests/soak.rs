//! A minute or two of `make soak`: everything around a working guest is killed, stopped, restarted, resized or cut off. The
//! guest waits, loses no request and sees no error, and the cache fills again.

use remoca_guest_tests::soak::events::Event;
use remoca_guest_tests::soak::{self, Options, Report, StoreKind};
use std::path::Path;
use std::time::Duration;

/// Torments a guest whose disk is of this kind. Each of the events that every disk has happens, and each of `others`.
fn torment(kind: StoreKind, folder: &str, others: &[Event]) {
    // Calm restarts give a ratio of hits, which nothing here judges.
    let options = Options { seed: 4, time: Duration::from_secs(40), calm_restarts: 0 };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/soak").join(folder);
    let run = soak::run(kind, &options, &folder, &mut |_| {});
    println!("{run}");
    for event in Event::ALWAYS.iter().chain(others) {
        assert!(run.events.contains_key(event.name()), "{} never happened", event.name());
    }
    let report = Report::new(options.seed, 1, vec![run]);
    assert!(report.passed, "{report:?}");
}

#[test]
fn a_disk_in_a_file_outlives_everything_around_it() {
    torment(StoreKind::RawFile, "file", &[]);
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn a_disk_on_an_nbd_server_outlives_everything_around_it() {
    torment(StoreKind::Nbd, "nbd", &Event::OF_STORE);
}
