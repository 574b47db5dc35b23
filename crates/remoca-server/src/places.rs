//! The places of connections that have not said what they want, and the tasks that listen to them.
//!
//! Used for each kind of socket apart: for clients between accept and session, and for operators. `doorway.rs` decides who has to
//! make room.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::task::{AbortHandle, yield_now};

use crate::doorway::{Doorway, Entered};
use crate::stream::Peer;

/// The connections that are waited for.
#[derive(Debug)]
pub(crate) struct Places {
    taken: Mutex<TakenPlaces>,
    /// Notified when a connection has left.
    freed: Notify,
}

#[derive(Debug)]
struct TakenPlaces {
    doorway: Doorway,
    /// Handles that end a connection that has to make room.
    ends: HashMap<u64, AbortHandle>,
    /// Whether the operator was told that silent connections are ended.
    told: bool,
}

impl Places {
    pub(crate) fn new(most: usize, most_of_peer: usize) -> Self {
        let doorway = Doorway::new(most, most_of_peer);
        let taken = TakenPlaces { doorway, ends: HashMap::new(), told: false };
        Self { taken: Mutex::new(taken), freed: Notify::new() }
    }

    /// Runs `serve` as a task with a place for a connection. When this returns, the task has read what the connection had sent.
    pub(crate) async fn begin<F>(self: &Arc<Self>, peer: Peer, serve: impl FnOnce(Place) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let place = self.enter(peer).await;
        let number = place.number;
        let task = tokio::spawn(serve(place));
        self.taken().ends.insert(number, task.abort_handle());
        // Otherwise others could take its place before it was looked at.
        yield_now().await;
    }

    /// Takes a place for a connection. If all places are taken, ends another connection for it. Waits while all
    /// others have said what they want.
    async fn enter(self: &Arc<Self>, peer: Peer) -> Place {
        loop {
            let freed = self.freed.notified();
            if let Some(place) = self.try_enter(peer) {
                return place;
            }
            freed.await;
        }
    }

    fn try_enter(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut taken = self.taken();
        let Entered::In { number, instead } = taken.doorway.enter(peer) else { return None };
        let ended = instead.and_then(|instead| taken.ends.remove(&instead));
        if let Some(ended) = &ended {
            ended.abort();
        }
        if std::mem::replace(&mut taken.told, ended.is_some()) != ended.is_some() && ended.is_some() {
            tracing::warn!(?peer, "connections that say nothing are ended to make room for others");
        }
        Some(Place { places: Arc::clone(self), number })
    }

    fn taken(&self) -> MutexGuard<'_, TakenPlaces> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection; freed when dropped.
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Place {
    /// Marks the connection as one that has said what it wants, so that it is no longer ended to make room.
    pub(crate) fn hear(&self) {
        self.places.taken().doorway.hear(self.number);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        taken.doorway.leave(self.number);
        taken.ends.remove(&self.number);
        drop(taken);
        self.places.freed.notify_waiters();
    }
}
