//! NBD servers that lose their cache with the connection, and syncs that fail: what a store may still say afterwards.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod store_support;

use remoca_protocol::handover::StoreKind;
use remoca_store::testing::{NbdCommand, NbdOffer, NbdRequested, Verdict, VolatileNbd};
use remoca_store::{AlignedStore, NbdOptions, NbdStore, OnLostConnection, StoreError, StoreHealth, StoreOp};
use std::time::{Duration, Instant};
use store_support::servers::unix_uri;
use store_support::{Driver, HANG_AFTER, pattern};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const EIO: StoreError = StoreError { errno: libc::EIO };
const ENOSPC: u32 = 28;

struct Setup {
    server: VolatileNbd,
    driver: Driver,
    _folder: TempDir,
}

fn start(offer: NbdOffer, options: NbdOptions) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd");
    let server = VolatileNbd::start(&socket, offer);
    let store = NbdStore::open(&unix_uri(&socket), options).unwrap();
    Setup { server, driver: Driver::boxed(AlignedStore::wrap(Box::new(store))), _folder: folder }
}

impl Setup {
    /// The server loses its cache, and is found again.
    fn lose_power(&mut self) {
        let before = self.driver.uncertain_count;
        self.server.lose_power();
        let give_up_at = Instant::now() + HANG_AFTER;
        while self.driver.uncertain_count == before {
            assert!(Instant::now() < give_up_at, "no reconnect");
            self.driver.turn(Duration::from_millis(20));
        }
        assert_eq!(self.driver.store.health(), StoreHealth::Up);
    }
}

/// Servers whose writes need more than one request, in every way that there is.
fn servers() -> Vec<NbdOffer> {
    let all = NbdOffer::default();
    vec![
        all,
        NbdOffer { fua: false, ..all },
        NbdOffer { payload_max: 64 << 10, ..all },
        NbdOffer { payload_max: 64 << 10, fua: false, write_zeroes: false, ..all },
        NbdOffer { block: 4096, payload_max: 16 << 10, fua: false, ..all },
        NbdOffer { block: 4096, write_zeroes: false, ..all },
    ]
}

/// One of each kind of modification, each in sectors of its own; longer than a request, and with parts of blocks.
fn modifications() -> Vec<(StoreOp, Option<Vec<u8>>)> {
    let write = |offset: u64, len: usize, durable| {
        let operation = StoreOp::Write { offset, len: u32::try_from(len).unwrap(), durable };
        (operation, Some(pattern(offset, len, 1)))
    };
    let zeroes = |offset, len, durable| (StoreOp::WriteZeroes { offset, len, may_unmap: true, durable }, None);
    vec![
        write(0, 128 << 10, false),
        write(128 * KIB, 128 << 10, true),
        write(256 * KIB + 512, 40 << 10, false),
        write(320 * KIB + 512, 40 << 10, true),
        zeroes(384 * KIB + 512, 130 * KIB, false),
        zeroes(640 * KIB + 512, 130 * KIB, true),
        (StoreOp::Flush, None),
    ]
}

/// What the disk has to hold in the range of a modification.
fn expected(operation: &StoreOp, data: Option<&Vec<u8>>) -> Option<(std::ops::Range<usize>, Vec<u8>)> {
    let (offset, len) = operation.range()?;
    let start = usize::try_from(offset).unwrap();
    let len = usize::try_from(len).unwrap();
    Some((start..start + len, data.cloned().unwrap_or_else(|| vec![0; len])))
}

/// The server loses power at the `n`-th request. Whether it came to that.
fn lose_at(offer: NbdOffer, options: NbdOptions, n: usize) -> bool {
    let Setup { server, mut driver, _folder } = start(offer, options);
    server.overwrite(0, &vec![0xEE; usize::try_from(offer.size).unwrap()]);
    let mut count = 0;
    server.set_rule(move |_| {
        count += 1;
        if count == n { Verdict::LosePower } else { Verdict::Do }
    });
    // Completed after the loss, or known to be durable before it.
    let mut kept = Vec::new();
    let mut open = Vec::new();
    for (operation, data) in modifications() {
        let losses = driver.uncertain_count;
        driver.run(operation, data.as_deref()).unwrap();
        if driver.uncertain_count > losses {
            open.clear();
        }
        match operation {
            StoreOp::Flush => kept.append(&mut open),
            _ if operation.is_durable() || options.write_through => kept.extend(expected(&operation, data.as_ref())),
            _ => open.extend(expected(&operation, data.as_ref())),
        }
    }
    for (range, expected) in &kept {
        assert!(server.disk()[range.clone()] == *expected, "{offer:?}: {range:?} is lost after request {n}");
    }
    driver.uncertain_count > 0
}

#[test]
fn what_completes_after_a_loss_is_there_after_the_next_flush() {
    for offer in servers() {
        let mut n = 1;
        while lose_at(offer, NbdOptions::default(), n) {
            n += 1;
        }
        assert!(n > modifications().len(), "each request was the last one");
    }
}

#[test]
fn with_write_through_nothing_acknowledged_is_lost() {
    let options = NbdOptions { write_through: true, ..NbdOptions::default() };
    for offer in servers() {
        let mut n = 1;
        while lose_at(offer, options, n) {
            n += 1;
        }
    }
}

#[test]
fn a_loss_with_unflushed_writes_fails_the_next_flush_if_that_is_wanted() {
    let fail = NbdOptions { on_lost_connection: OnLostConnection::FailFlush, ..NbdOptions::default() };
    for (options, after) in [(NbdOptions::default(), Ok(())), (fail, Err(EIO))] {
        let mut setup = start(NbdOffer::default(), options);
        setup.driver.write(0, &[1; 4096], false).unwrap();
        setup.driver.flush().unwrap();
        setup.lose_power();
        setup.driver.flush().expect("everything was flushed");
        setup.driver.write(0, &[2; 4096], true).unwrap();
        setup.driver.run(StoreOp::Discard { offset: 8192, len: 4096 }, None).unwrap();
        setup.lose_power();
        setup.driver.flush().expect("a durable write needs no flush, a discard nothing");

        setup.driver.write(0, &[3; 4096], false).unwrap();
        setup.lose_power();
        assert_eq!(setup.driver.store.failed_flush(), after.err().map(|error| error.errno));
        assert_eq!(setup.driver.flush(), after);
        assert_eq!(setup.driver.write(0, &[4; 4096], true), after);
        setup.driver.write(0, &[5; 4096], false).expect("a plain write promises nothing");
        assert_eq!(setup.driver.flush(), after, "it stays so");

        setup.driver.store.set_failed_flush(None);
        setup.driver.flush().expect("the operator says that the image is sound");
        setup.lose_power();
        setup.driver.flush().expect("and what was flushed since is not in doubt");
    }
}

/// The flush was on its way when the writes that it is about were lost.
/// An upgrade: another program goes on with the connection, and hears what the former one knew.
fn adopted(setup: Setup, options: NbdOptions) -> Setup {
    let Setup { server, driver, _folder } = setup;
    let (connection, kind) = driver.store.hand_over().unwrap();
    let StoreKind::Nbd(passed) = kind else { panic!("{kind:?} is no connection") };
    let connection = connection.try_clone_to_owned().unwrap();
    // The server never sees its client leave.
    std::mem::forget(driver);
    let store = NbdStore::adopt(connection, &unix_uri(&_folder.path().join("nbd")), options, &passed).unwrap();
    Setup { server, driver: Driver::boxed(AlignedStore::wrap(Box::new(store))), _folder }
}

#[test]
fn a_program_that_goes_on_with_the_connection_knows_what_was_not_flushed() {
    let fail = NbdOptions { on_lost_connection: OnLostConnection::FailFlush, ..NbdOptions::default() };
    for offer in [NbdOffer::default(), NbdOffer { block: 4096, ..NbdOffer::default() }] {
        for (is_flushed, upgrades, after) in [(false, 1, Err(EIO)), (false, 3, Err(EIO)), (true, 1, Ok(()))] {
            let mut setup = start(offer, fail);
            setup.driver.write(0, &[1; 4096], false).unwrap();
            if is_flushed {
                setup.driver.flush().unwrap();
            }
            for _ in 0..upgrades {
                setup = adopted(setup, fail);
            }
            setup.lose_power();
            assert_eq!(setup.driver.flush(), after, "flushed before: {is_flushed}, {upgrades} upgrades");
            assert_eq!(adopted(setup, fail).driver.flush(), after, "a flush that has failed stays failed");
        }
    }
}

#[test]
fn a_flush_that_is_sent_again_speaks_for_nothing_that_was_lost_before_it() {
    let options = NbdOptions { on_lost_connection: OnLostConnection::FailFlush, ..NbdOptions::default() };
    let mut setup = start(NbdOffer::default(), options);
    setup.driver.write(0, &[1; 4096], false).unwrap();
    let mut is_first = true;
    setup.server.set_rule(move |request| match request.command {
        NbdCommand::Flush if std::mem::take(&mut is_first) => Verdict::LosePower,
        _ => Verdict::Do,
    });
    assert_eq!(setup.driver.flush(), Err(EIO));
}

fn fails_once(command: NbdCommand, error: u32) -> impl FnMut(&NbdRequested) -> Verdict + Send + 'static {
    let mut is_first = true;
    move |request| {
        if request.command == command && std::mem::take(&mut is_first) { Verdict::Fail(error) } else { Verdict::Do }
    }
}

/// It may be the report of a write that was acknowledged before.
#[test]
fn a_sync_behind_a_durable_write_that_fails_fails_all_later_flushes() {
    let durable = || StoreOp::Write { offset: 8192, len: 512, durable: true };
    let zeroes = || StoreOp::WriteZeroes { offset: 8192, len: 512, may_unmap: true, durable: true };
    for block in [512, 4096] {
        for (operation, data) in [(durable(), Some([7; 512])), (zeroes(), None), (StoreOp::Flush, None)] {
            let offer = NbdOffer { fua: false, block, ..NbdOffer::default() };
            let Setup { server, mut driver, _folder } = start(offer, NbdOptions::default());
            driver.write(0, &[1; 4096], false).unwrap();
            server.set_rule(fails_once(NbdCommand::Flush, ENOSPC));
            let full = Err(StoreError { errno: libc::ENOSPC });
            assert_eq!(driver.run(operation, data.as_ref().map(|data| &data[..])).map(drop), full);
            assert_eq!(driver.flush(), full, "{operation:?} in blocks of {block}");
            assert_eq!(driver.write(0, &[1; 4096], true), full);
            driver.write(0, &[1; 4096], false).unwrap();
            assert_eq!(driver.store.failed_flush(), Some(libc::ENOSPC));
        }
    }
}

/// Nothing that was acknowledged is lost by it: a full disk is no reason to stop the guest.
#[test]
fn a_durable_write_that_is_refused_for_want_of_space_fails_alone() {
    for block in [512, 4096] {
        for fua in [true, false] {
            let offer = NbdOffer { fua, block, ..NbdOffer::default() };
            let Setup { server, mut driver, _folder } = start(offer, NbdOptions::default());
            server.set_rule(|request| match request.command {
                NbdCommand::Write => Verdict::Fail(ENOSPC),
                _ => Verdict::Do,
            });
            assert_eq!(driver.write(0, &[1; 512], true), Err(StoreError { errno: libc::ENOSPC }));
            server.set_rule(|_| Verdict::Do);
            driver.flush().unwrap();
            driver.write(0, &[1; 512], true).unwrap();
            assert_eq!(driver.store.failed_flush(), None);
        }
    }
}

/// A server makes more durable than the bytes that came with FUA: its error may be about writes that were acknowledged.
#[test]
fn a_sync_for_fua_that_finds_no_space_fails_all_later_flushes() {
    for block in [512, 4096] {
        let Setup { server, mut driver, _folder } =
            start(NbdOffer { block, ..NbdOffer::default() }, NbdOptions::default());
        driver.write(8192, &[1; 4096], false).unwrap();
        let mut is_first = true;
        server.set_rule(move |request| match request.fua && std::mem::take(&mut is_first) {
            true => Verdict::Fail(ENOSPC),
            false => Verdict::Do,
        });
        let full = Err(StoreError { errno: libc::ENOSPC });
        assert_eq!(driver.write(0, &[1; 512], true), full);
        assert_eq!(driver.flush(), full, "blocks of {block}");
        assert_eq!(driver.store.failed_flush(), Some(libc::ENOSPC));
    }
}

/// With an error that is no refusal, whatever wraps the store.
#[test]
fn a_durable_write_that_fails_is_known_to_whoever_asks() {
    for block in [512, 4096] {
        let offer = NbdOffer { block, ..NbdOffer::default() };
        let Setup { server, mut driver, _folder } = start(offer, NbdOptions::default());
        server.set_rule(fails_once(NbdCommand::Write, 5));
        assert_eq!(driver.write(512, &[1; 512], true), Err(EIO));
        assert_eq!(driver.store.failed_flush(), Some(libc::EIO), "blocks of {block}");
        assert_eq!(driver.flush(), Err(EIO));
    }
}

/// What the guest has as a plain write is a durable one for the server, and its error speaks of the others just the same.
#[test]
fn with_write_through_a_plain_write_that_fails_fails_all_later_flushes() {
    let options = NbdOptions { write_through: true, ..NbdOptions::default() };
    for (fua, after) in [(true, Err(EIO)), (false, Ok(()))] {
        let Setup { server, mut driver, _folder } = start(NbdOffer { fua, ..NbdOffer::default() }, options);
        server.set_rule(fails_once(NbdCommand::Write, 5));
        assert_eq!(driver.write(0, &[1; 4096], false), Err(EIO));
        assert_eq!(driver.flush(), after, "FUA: {fua}; without it the write itself failed, and no sync");
        assert_eq!(driver.write(0, &[1; 4096], false), after);
    }
}

/// The guest was told what the first server could do.
#[test]
fn a_server_that_comes_back_with_less_gets_only_what_it_can_do() {
    let all = NbdOffer::default();
    let less = NbdOffer { fua: false, trim: false, write_zeroes: false, payload_max: 4096, ..all };
    let Setup { server, mut driver, _folder } = start(all, NbdOptions::default());
    // Nothing is answered until the other server is there.
    server.set_rule(|request| if request.connection == 1 { Verdict::LosePower } else { Verdict::Do });
    server.overwrite(0, &vec![0xEE; usize::try_from(all.size).unwrap()]);
    server.set_offer(less);
    let operations = [
        (StoreOp::Discard { offset: 0, len: 4096 }, None),
        (StoreOp::WriteZeroes { offset: 8192, len: 16384, may_unmap: true, durable: true }, None),
        (StoreOp::Write { offset: 65536, len: 16384, durable: true }, Some(pattern(65536, 16384, 1))),
        (StoreOp::Flush, None),
    ];
    for round in ["outstanding", "new"] {
        let tokens: Vec<_> =
            operations.iter().map(|(operation, data)| driver.queue(*operation, data.as_deref())).collect();
        driver.store.kick(Instant::now());
        for (token, (operation, _)) in tokens.into_iter().zip(&operations) {
            driver.wait(token).result.unwrap_or_else(|error| panic!("{round} {operation:?}: {error}"));
        }
    }
    assert_eq!(driver.uncertain_count, 1);
    assert_eq!(server.disk()[8192..24576], [0; 16384]);
    assert_eq!(server.disk()[65536..81920], pattern(65536, 16384, 1));
    assert_eq!(server.disk()[..4096], [0xEE; 4096], "it cannot trim");
}

#[test]
fn a_server_that_comes_back_without_flush_is_not_used() {
    let all = NbdOffer::default();
    let mut setup = start(all, NbdOptions::default());
    setup.driver.write(0, &[1; 4096], false).unwrap();
    setup.server.set_offer(NbdOffer { flush: false, ..all });
    setup.server.lose_power();
    setup.server.take_log();
    let flush = setup.driver.start(StoreOp::Flush, None);
    // Long enough for several attempts.
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        setup.driver.turn(Duration::from_millis(20));
    }
    assert_ne!(setup.driver.store.health(), StoreHealth::Up);
    assert_eq!((setup.driver.take_completed().len(), setup.server.take_log().len()), (0, 0));
    setup.server.set_offer(all);
    setup.driver.wait(flush).result.unwrap();
}
