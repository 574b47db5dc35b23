//! Places at which a build for tests kills itself (feature `ablation`; no effect in any other build).
//!
//! `--kill-at PLACE:N` makes the process send itself SIGKILL when it passes a place for the N-th time. Such places are
//! moments between two stores or two system calls that a kill from outside would hit once in a million. With
//! `--panic-at PLACE:N` it panics there.

/// The narrow places.
pub const PLACES: [&str; 15] = [
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
    // A connection to a memory server became the session.
    "session-begun",
    // Nothing is in flight; the description is written; the new program has read it; it has opened everything.
    "handover-drained",
    "handover-described",
    "handover-received",
    "handover-opened",
];

#[cfg(feature = "ablation")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static ARMED: OnceLock<Armed> = OnceLock::new();

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

    /// Counts a passage of `place` if it is armed. Ends the process at the armed passage.
    pub fn passes(place: &str) {
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
pub use armed::{End, end_at, passes};

/// Does nothing. Only a build with the feature `ablation` counts passages.
#[cfg(not(feature = "ablation"))]
#[inline(always)]
pub fn passes(_place: &str) {}
