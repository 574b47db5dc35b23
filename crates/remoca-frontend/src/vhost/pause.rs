//! Keeps the control thread of a device between two messages, so that another program can continue its connection.
//!
//! The I/O thread asks for the pause and must not wait. The control thread may wait for the I/O thread within a message.
//! So a pause begins between two messages, and the I/O thread is woken when a message that delayed it is done.

use remoca_io::wake;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The state that both threads share.
pub(super) struct Pause {
    state: Mutex<State>,
    over: Condvar,
    /// The eventfd of the I/O thread.
    wake: Arc<OwnedFd>,
    /// The eventfd of the control thread, raised when a pause ends.
    ended: OwnedFd,
}

#[derive(Default)]
struct State {
    wanted: bool,
    /// Whether the control thread is within a message, or accepts or loses a front end.
    works: bool,
}

/// Permission to receive and answer one message. Dropping it lets a pause begin.
pub(super) struct Work<'a>(&'a Pause);

impl Pause {
    /// Creates a pause that is not wanted. Its end of work wakes the I/O thread by `wake`.
    pub fn new(wake: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), over: Condvar::new(), wake, ended: wake::new()? })
    }

    /// Returns the eventfd that is raised when a pause ends: the program that was to continue the connection does not.
    pub fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    /// Waits until no pause is wanted, and returns the permission to handle one message.
    pub fn begin_work(&self) -> Work<'_> {
        let mut state = self.state();
        while state.wanted {
            state = self.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.works = true;
        Work(self)
    }

    /// Asks for a pause. Returns whether it has begun: the control thread is between two messages and stays there until
    /// [`Self::end`]. Otherwise the I/O thread is woken when it can be asked for again.
    pub fn begin(&self) -> bool {
        let mut state = self.state();
        state.wanted = true;
        !state.works
    }

    /// Returns whether a pause has begun.
    pub fn has_begun(&self) -> bool {
        let state = self.state();
        state.wanted && !state.works
    }

    /// Ends the pause, or the wish for one.
    pub fn end(&self) {
        self.state().wanted = false;
        self.over.notify_all();
        wake::raise(&self.ended);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.works = false;
        if state.wanted {
            wake::raise(&*self.0.wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_pause_waits_for_the_message_and_the_next_message_for_its_end() {
        let pause = Pause::new(Arc::new(wake::new().unwrap())).unwrap();
        let work = pause.begin_work();
        assert!(!pause.begin() && !pause.has_begun());
        drop(work);
        let mut counter = [0; 8];
        rustix::io::read(&*pause.wake, &mut counter).expect("the I/O thread is woken");
        assert!(pause.begin() && pause.has_begun());
        std::thread::scope(|scope| {
            let (begun, told) = channel();
            let pause = &pause;
            scope.spawn(move || {
                let _work = pause.begin_work();
                begun.send(()).unwrap();
            });
            assert!(told.try_recv().is_err());
            assert!(rustix::io::read(&pause.ended, &mut [0; 8]).is_err());
            pause.end();
            rustix::io::read(&pause.ended, &mut [0; 8]).expect("the control thread is woken");
            told.recv().unwrap();
        });
        assert!(!pause.has_begun());
        assert!(rustix::io::read(&*pause.wake, &mut counter).is_err(), "nobody waits");
    }
}
