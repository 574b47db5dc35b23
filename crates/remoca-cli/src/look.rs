//! Looks at images, whose file systems may hang: the command says so then, and does not wait.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time in which a file system that is well has answered.
const PATIENCE: Duration = Duration::from_secs(5);

/// Begins to look at an image. Nobody waits for the thread, which stays in the kernel as long as the file system hangs.
pub fn begin<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (sender, found) = sync_channel(1);
    thread::spawn(move || drop(sender.send(look())));
    found
}

/// Returns what was found at each image; `None` where the file system hangs. Of several that hang, none is waited for after the other.
pub fn end<K, T>(begun: Vec<(K, Receiver<T>)>) -> impl Iterator<Item = (K, Option<T>)> {
    let give_up_at = Instant::now() + PATIENCE;
    let found =
        move |receiver: Receiver<T>| receiver.recv_timeout(give_up_at.saturating_duration_since(Instant::now())).ok();
    begun.into_iter().map(move |(image, receiver)| (image, found(receiver)))
}
