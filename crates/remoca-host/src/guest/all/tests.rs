//! Monitors that hang beside others that answer.

use super::*;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

const FOR_EVER: Duration = Duration::from_secs(3600);
/// Patience with which each answer is late, however fast it comes.
const NONE: Duration = Duration::ZERO;

/// A monitor that answers what it is given, and hangs as long as it is given nothing.
struct Fake {
    answers: Receiver<Said>,
    told: Arc<Mutex<Vec<u64>>>,
}

impl Monitor for Fake {
    fn read(&mut self) -> Said {
        self.answers.recv().unwrap_or(Err(Unusable::Silent("it is gone".into())))
    }

    fn set_bytes(&mut self, bytes: u64) -> Result<(), String> {
        self.told.lock().unwrap().push(bytes);
        match self.answers.recv() {
            Ok(Ok(_)) => Ok(()),
            _ => Err("it refuses".into()),
        }
    }
}

/// The other end of one.
struct Qemu {
    says: Sender<Said>,
    told: Arc<Mutex<Vec<u64>>>,
}

fn add(monitors: &mut Monitors, vm: &str) -> Qemu {
    let ((says, answers), told) = (channel(), Arc::default());
    let monitor = Fake { answers, told: Arc::clone(&told) };
    monitors.add(vm, &Address::Libvirt(vm.into()), Box::new(monitor));
    Qemu { says, told }
}

fn memory(actual_bytes: u64) -> Said {
    Ok(GuestMemory { boot_bytes: 8, actual_bytes, ..GuestMemory::default() })
}

fn why(said: &Said) -> &str {
    said.as_ref().unwrap_err().why()
}

/// Waits until the thread that asks a monitor has ended.
fn wait_for(monitors: &mut Monitors, vm: &str) {
    while monitors.all[vm].monitor.is_none() {
        let ended = monitors.ended.recv().unwrap();
        monitors.end(ended);
    }
}

#[test]
fn one_that_hangs_is_waited_for_once_and_counts_again_when_it_answers() {
    let mut monitors = Monitors::with_patience(NONE, FRESH_FOR);
    let hangs = add(&mut monitors, "hangs");
    let said = monitors.read(|_| true);
    assert!(why(&said["hangs"]).contains("the monitor libvirt:hangs has not answered in time"), "{said:?}");
    // A look that waited for it now would not end.
    (monitors.patience, monitors.fresh_for) = (FOR_EVER, FOR_EVER);
    let good = add(&mut monitors, "good");
    for actual in [7, 6] {
        good.says.send(memory(actual)).unwrap();
        let said = monitors.read(|_| true);
        assert_eq!((&said["good"], said["hangs"].is_err()), (&memory(actual), true));
    }
    hangs.says.send(memory(5)).unwrap();
    wait_for(&mut monitors, "hangs");
    good.says.send(memory(4)).unwrap();
    assert_eq!(monitors.read(|vm| vm == "good"), [("good".to_owned(), memory(4))].into());
    // What it said is still fresh, and it is asked for more.
    good.says.send(memory(3)).unwrap();
    assert_eq!(monitors.read(|_| true)["hangs"], memory(5));
    // An old answer is none.
    monitors.fresh_for = Duration::ZERO;
    good.says.send(memory(3)).unwrap();
    assert!(monitors.read(|_| true)["hangs"].is_err());
    hangs.says.send(Err(Unusable::Silent("it was late".into()))).unwrap();
    wait_for(&mut monitors, "hangs");
    monitors.all.get_mut("hangs").unwrap().is_prompt = false;
    good.says.send(memory(3)).unwrap();
    assert_eq!(why(&monitors.read(|_| true)["hangs"]), "it was late", "why it does not answer stays known");
}

#[test]
fn a_guest_whose_monitor_hangs_is_told_the_newest_size_and_a_refusal_comes_later() {
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    let qemu = add(&mut monitors, "a");
    qemu.says.send(Err(Unusable::Silent(String::new()))).unwrap();
    assert_eq!(monitors.set_bytes("a", 1), Err("it refuses".into()));
    qemu.says.send(memory(1)).unwrap();
    assert_eq!(monitors.set_bytes("a", 2), Ok(()));
    qemu.says.send(memory(2)).unwrap();
    assert_eq!(monitors.read(|_| true)["a"], memory(2));
    (monitors.left, monitors.fresh_for) = (Duration::from_millis(1), FOR_EVER);
    assert_eq!(monitors.set_bytes("a", 3), Ok(()), "it is on its way");
    assert!(monitors.read(|_| true)["a"].is_err(), "what it said before says nothing about that");
    for bytes in [4, 5] {
        assert_eq!(monitors.set_bytes("a", bytes), Ok(()));
    }
    qemu.says.send(Err(Unusable::Silent(String::new()))).unwrap();
    qemu.says.send(Err(Unusable::Silent(String::new()))).unwrap();
    wait_for(&mut monitors, "a");
    assert_eq!(*qemu.told.lock().unwrap(), [1, 2, 3, 5]);
    assert_eq!(monitors.failed(), [("a".to_owned(), 5, "it refuses".to_owned())]);
    assert!(monitors.failed().is_empty());
}

#[test]
fn long_words_of_a_monitor_are_cut() {
    struct Babbles(bool);
    impl Monitor for Babbles {
        fn read(&mut self) -> Said {
            let why = "\u{fc}".repeat(1 << 20);
            self.0 = !self.0;
            Err(if self.0 { Unusable::Silent(why) } else { Unusable::Advised(why) })
        }

        fn set_bytes(&mut self, _: u64) -> Result<(), String> {
            Err("\u{fc}".repeat(1 << 20))
        }
    }
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    monitors.add("a", &Address::Libvirt("a".into()), Box::new(Babbles(false)));
    let short = "\u{fc}".repeat(crate::text::CHARACTERS_MAX);
    assert_eq!(monitors.read(|_| true)["a"], Err(Unusable::Silent(short.clone())));
    assert_eq!(monitors.read(|_| true)["a"], Err(Unusable::Advised(short.clone())));
    assert_eq!(monitors.set_bytes("a", 1), Err(short));
}

#[test]
fn a_late_refusal_of_an_older_size_is_none_of_the_new_one() {
    let mut monitors = Monitors::with_patience(NONE, FRESH_FOR);
    let qemu = add(&mut monitors, "a");
    monitors.left = Duration::ZERO;
    assert_eq!(monitors.set_bytes("a", 3), Ok(()), "it is on its way");
    qemu.says.send(Err(Unusable::Silent(String::new()))).unwrap();
    wait_for(&mut monitors, "a");
    qemu.says.send(memory(4)).unwrap();
    monitors.left = FOR_EVER;
    assert_eq!(monitors.set_bytes("a", 4), Ok(()));
    assert_eq!(monitors.failed, [("a".to_owned(), 3, "it refuses".to_owned())]);
    // Nor is that of an older call with the same size.
    qemu.says.send(memory(3)).unwrap();
    assert_eq!((monitors.set_bytes("a", 3), monitors.failed()), (Ok(()), Vec::new()));
}

#[test]
fn an_answer_is_as_old_as_the_end_of_its_call_however_late_it_is_taken() {
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    let qemu = add(&mut monitors, "a");
    qemu.says.send(memory(1)).unwrap();
    monitors.begin("a", Call::Read);
    let ended = monitors.ended.recv().unwrap();
    let taken = Instant::now();
    monitors.end(ended);
    assert!(monitors.all["a"].latest.as_ref().unwrap().0 <= taken);
}

#[test]
fn a_late_answer_counts_beyond_the_next_look_at_all() {
    let fresh_for = |seconds| Monitors::new(Duration::from_secs(seconds)).fresh_for;
    assert_eq!([1, 10, 60].map(fresh_for), [12, 12, 62].map(Duration::from_secs));
    assert_eq!(Monitors::new(Duration::MAX).fresh_for, Duration::MAX);
}

#[test]
fn a_late_answer_is_new_at_one_look_only() {
    let mut monitors = Monitors::with_patience(NONE, FOR_EVER);
    let qemu = add(&mut monitors, "a");
    assert!(monitors.read(|_| true)["a"].is_err());
    for actual in [5, 6] {
        qemu.says.send(memory(actual)).unwrap();
        wait_for(&mut monitors, "a");
        for is_repeated in [false, true, true] {
            let said = monitors.read(|_| true)["a"].clone().unwrap();
            assert_eq!((said.actual_bytes, said.is_repeated), (actual, is_repeated));
        }
    }
}

#[test]
fn monitors_come_and_go_with_their_vms() {
    let folder = tempfile::tempdir().unwrap();
    let address = |name: &str| Address::Qmp(folder.path().join(name));
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    let count = 2 * CALLS_MAX;
    monitors.keep(&(0..count).map(|number| (format!("vm{number}"), address(&number.to_string()))).collect());
    let said = monitors.read(|_| true);
    assert_eq!(said.len(), count);
    assert!(said.values().all(|said| why(said).contains("no QEMU listens there")), "{said:?}");
    assert!(monitors.set_bytes("vm0", 1).unwrap_err().contains("no QEMU listens there"));
    monitors.keep(&[("vm1".to_owned(), address("b"))].into());
    assert_eq!(monitors.read(|vm| vm == "vm0").len(), 0);
    assert!(why(&monitors.read(|vm| vm == "vm1")["vm1"]).contains("/b: "));
    assert_eq!(monitors.set_bytes("vm0", 1), Err("it has no monitor".into()));
}

#[test]
fn two_vms_with_one_monitor_have_none() {
    let address = Address::Qmp(PathBuf::from("/nowhere"));
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    let both = [("a".to_owned(), address.clone()), ("b".to_owned(), address.clone())].into();
    monitors.keep(&both);
    let said = monitors.read(|_| true);
    assert!(why(&said["a"]).starts_with("the file of b names") && why(&said["b"]).starts_with("the file of a names"));
    assert!(monitors.set_bytes("a", 1).unwrap_err().starts_with("the file of b names"));
    monitors.keep(&[("a".to_owned(), address)].into());
    assert!(why(&monitors.read(|_| true)["a"]).contains("no QEMU listens there"));
}

#[test]
fn one_that_panics_is_asked_again() {
    struct Panics(bool);
    impl Monitor for Panics {
        fn read(&mut self) -> Said {
            assert!(std::mem::replace(&mut self.0, true), "the first time");
            memory(1)
        }

        fn set_bytes(&mut self, _: u64) -> Result<(), String> {
            panic!("always");
        }
    }
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    monitors.add("a", &Address::Libvirt("a".into()), Box::new(Panics(false)));
    assert_eq!(why(&monitors.read(|_| true)["a"]), "asking its monitor panicked");
    assert_eq!(monitors.read(|_| true)["a"], memory(1));
    assert_eq!(monitors.set_bytes("a", 1), Err("telling its monitor panicked".into()));
}

#[test]
fn an_answer_of_a_former_monitor_counts_for_nobody() {
    let mut monitors = Monitors::with_patience(FOR_EVER, FRESH_FOR);
    let former = add(&mut monitors, "a");
    former.says.send(memory(1)).unwrap();
    monitors.begin("a", Call::Read);
    let ended = monitors.ended.recv().unwrap();
    let present = add(&mut monitors, "a");
    monitors.sender.send(ended).unwrap();
    present.says.send(memory(2)).unwrap();
    assert!(monitors.begin("a", Call::Read));
    monitors.wait(["a".to_owned()].into(), FOR_EVER);
    assert_eq!(monitors.all["a"].said(Instant::now(), FOR_EVER), memory(2));
}

#[test]
fn only_so_many_are_asked_at_a_time_in_turn_and_late_ones_leave_room() {
    let mut monitors = Monitors::with_patience(NONE, FRESH_FOR);
    let names: Vec<String> = (100..101 + CALLS_MAX + LATE_CALLS_MAX).map(|number| number.to_string()).collect();
    let all: BTreeMap<&str, Qemu> = names.iter().map(|name| (name.as_str(), add(&mut monitors, name))).collect();
    let called = |monitors: &Monitors| -> Vec<String> {
        let called = monitors.all.iter().filter(|(_, known)| known.monitor.is_none());
        called.map(|(name, _)| name.clone()).collect()
    };
    let answer = |monitors: &mut Monitors| {
        for name in called(monitors) {
            all[name.as_str()].says.send(memory(7)).unwrap();
            wait_for(monitors, &name);
        }
        assert_eq!(monitors.calls, 0);
    };
    let said = monitors.read(|_| true);
    assert_eq!(called(&monitors), names[..CALLS_MAX]);
    assert!(why(&said[&names[CALLS_MAX]]).contains("when it is its turn"), "{said:?}");
    // A size does not wait.
    monitors.left = Duration::ZERO;
    assert_eq!(monitors.set_bytes(&names[CALLS_MAX], 7), Ok(()));
    assert_eq!(monitors.calls, CALLS_MAX + 1);
    answer(&mut monitors);
    monitors.all.get_mut(&names[CALLS_MAX]).unwrap().is_prompt = false;
    // Those that were not asked yet.
    monitors.read(|_| true);
    assert_eq!(called(&monitors), names[CALLS_MAX + 1..]);
    answer(&mut monitors);
    // All are late. Those that were asked first are asked, and there is room for one that is in time.
    for _ in 0..2 {
        monitors.read(|_| true);
        assert_eq!(called(&monitors), names[..LATE_CALLS_MAX]);
    }
    let good = add(&mut monitors, "good");
    good.says.send(memory(6)).unwrap();
    monitors.patience = FOR_EVER;
    assert_eq!(monitors.read(|_| true)["good"], memory(6));
    answer(&mut monitors);
    // The next ones. One that is no longer there counts until its call has ended.
    good.says.send(memory(6)).unwrap();
    monitors.read(|_| true);
    assert_eq!(called(&monitors), names[LATE_CALLS_MAX..2 * LATE_CALLS_MAX]);
    monitors.keep(&BTreeMap::new());
    assert_eq!(monitors.calls, LATE_CALLS_MAX);
    all[names[LATE_CALLS_MAX].as_str()].says.send(memory(7)).unwrap();
    let ended = monitors.ended.recv().unwrap();
    monitors.end(ended);
    assert_eq!(monitors.calls, LATE_CALLS_MAX - 1);
}
