//! Places at which a build for tests kills itself (feature `ablation`; no effect in any other build).
//!
//! `--kill-at PLACE:N` makes the process send itself SIGKILL when it passes a place for the N-th time. Such places are
//! moments between two stores or two system calls that a kill from outside would hit once in a million. With
//! `--panic-at PLACE:N` it panics there. With `--hold-at PLACE:FILE` the thread waits there as long as the file exists.

/// The narrow places.
pub const PLACES: [&str; 24] = [
    // A batch of completions is linked into the in-flight record; the guest sees it; one of its marks is cleared.
    "publish-begun",
    "publish-seen",
    "publish-half-cleared",
    // The index has forgotten the block; its write is submitted to the kernel; the write is done.
    "write-forgotten",
    "disk-submitted",
    "disk-done",
    // The index has its new size; the memory server was told.
    "resize-begun",
    "resize-done",
    // A front end connected (again); one of its requests is being repeated.
    "queue-recovered",
    "request-repeated",
    // A message of a hypervisor can be read; it is answered; what it changed outlives this process, where that is kept.
    "message-begun",
    "message-answered",
    "message-kept",
    // Hypervisors whose connections were kept have waited for too long.
    "patience-over",
    // A connection to a memory server became the session.
    "session-begun",
    // Nothing is in flight; the description is written; the new program has read it; it has opened everything.
    "handover-drained",
    "handover-described",
    "handover-received",
    // The index of a former process is found, and not used yet.
    "index-found",
    "handover-opened",
    // What was known of a disk that goes is void, its record is not; each disk has its number, those that came no record.
    "disk-forgotten",
    "disk-numbered",
    // The state file has the size of an image that has grown; the engine knows it, the guest does not.
    "size-recorded",
    "size-followed",
];

#[cfg(feature = "ablation")]
mod armed {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    static IS_TEST_PROGRAM: AtomicBool = AtomicBool::new(false);
    static ARMED: OnceLock<Armed> = OnceLock::new();
    static HELD: OnceLock<Vec<(String, PathBuf)>> = OnceLock::new();

    struct Armed {
        place: String,
        left: AtomicU64,
        end: End,
    }

    /// How the process ends at a place.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum End {
        Kill,
        Panic,
    }

    /// Notes that this is the program for tests, which may take its time on a busy machine.
    pub fn note_test_program() {
        IS_TEST_PROGRAM.store(true, Ordering::Relaxed);
    }

    /// Returns whether this is the program for tests.
    pub fn is_test_program() -> bool {
        IS_TEST_PROGRAM.load(Ordering::Relaxed)
    }

    /// Makes the process end at the `passage`-th passage of `place`, the first being 1.
    ///
    /// # Errors
    /// If there is no such place, `passage` is zero, or a place was set before.
    pub fn end_at(place: &str, passage: u64, end: End) -> Result<(), String> {
        if !super::PLACES.contains(&place) || passage == 0 {
            return Err(format!("no passage {passage} of `{place}`; places are {}", super::PLACES.join(", ")));
        }
        let armed = Armed { place: place.to_owned(), left: AtomicU64::new(passage), end };
        ARMED.set(armed).map_err(|_| "a process dies once".into())
    }

    /// Makes threads wait at each place as long as its file exists.
    ///
    /// # Errors
    /// If there is no such place, or places were set before.
    pub fn hold_at(places: Vec<(String, PathBuf)>) -> Result<(), String> {
        if let Some((place, _)) = places.iter().find(|(place, _)| !super::PLACES.contains(&place.as_str())) {
            return Err(format!("no place `{place}`; places are {}", super::PLACES.join(", ")));
        }
        HELD.set(places).map_err(|_| "where a process is held is said once".into())
    }

    /// Waits at `place` if threads are held there. Counts a passage of `place` if it is armed. Ends the process at the
    /// armed passage.
    pub fn passes(place: &str) {
        let is_held = || HELD.get().is_some_and(|all| all.iter().any(|(held, file)| held == place && file.exists()));
        while is_held() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        if let Some(armed) = ARMED.get()
            && armed.place == place
            && armed.left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            match armed.end {
                // No thread of this process continues after the kill.
                End::Kill => {
                    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
                }
                End::Panic => panic!("`{place}` is passed"),
            }
        }
    }
}

#[cfg(feature = "ablation")]
pub use armed::{End, end_at, hold_at, is_test_program, note_test_program, passes};

/// Does nothing. Only a build with the feature `ablation` counts passages.
#[cfg(not(feature = "ablation"))]
#[inline(always)]
pub fn passes(_place: &str) {}

/// Returns false. Only a build with the feature `ablation` can be the program for tests.
#[cfg(not(feature = "ablation"))]
pub const fn is_test_program() -> bool {
    false
}
