//! Attempts to connect, and what comes of them.

use super::ServerLink;
use super::away::{KeptPool, News, Waiting};
use super::connect::{Answer, AnswerTo, Asker, Connected, LinkError};
use super::memory::{Passed, PoolMemory};
use remoca_core::engine::ServerNumber;
use remoca_core::units::PageCount;
use remoca_io::address::Endpoint;
use remoca_io::show::sentence;
use remoca_io::wake;
use remoca_protocol::{SendCount, Welcome};
use std::mem::discriminant;
use std::sync::Arc;
use std::time::Instant;

impl ServerLink {
    /// Starts to connect to a server. [`Self::take_news`] will return the outcome.
    pub fn ask(&mut self, number: ServerNumber) {
        self.connect(number, Asker::Engine);
    }

    pub(super) fn connect(&mut self, number: ServerNumber, asker: Asker) {
        let Some(slot) = self.servers.iter().position(|server| server.number == number) else { return };
        let memory = self.sessions.with(number).and_then(|session| session.memory().map(PoolMemory::id));
        let server = &mut self.servers[slot];
        server.is_told = false;
        server.epoch = server.epoch.saturating_add(1);
        let (endpoint, token, epoch) = (server.endpoint.clone(), server.token, server.epoch);
        let owned = memory.or(server.kept.as_ref().map(|kept| kept.memory.id()));
        if let Some(header) = &self.kept {
            header.set_epoch(slot, epoch);
        }
        let (queue, wake) = (self.answer_queue.clone(), Arc::clone(&self.wake));
        self.network.connect(endpoint, token, epoch, AnswerTo { server: number, asker, owned, queue, wake });
    }

    /// Returns the next news of a server, or `None` if there are none. A connection of a server that the engine asked waits
    /// for [`Self::begin`] or [`Self::release`].
    pub fn take_news(&mut self, now: Instant) -> Option<(ServerNumber, News)> {
        wake::clear(&*self.wake);
        loop {
            let (number, asker, answer) = self.answers.try_recv().ok()?;
            let news = match asker {
                Asker::Engine => Some(News::Answer(self.note_answer(number, answer, now))),
                Asker::Link => self.end_rejoin(number, answer, now),
                Asker::GivingBack => {
                    self.give_back(answer);
                    None
                }
            };
            if let Some(news) = news {
                return Some((number, news));
            }
        }
    }

    fn note_answer(&mut self, number: ServerNumber, answer: Answer, now: Instant) -> Option<Welcome> {
        let Some(server) = self.servers.iter_mut().find(|server| server.number == number) else {
            // The engine releases the connection of a server that is no longer listed.
            let Connected { socket, welcome, .. } = answer.ok()?;
            self.waiting.push(Waiting { server: number, socket: Some(socket), welcome, memory: None });
            return Some(welcome);
        };
        let (socket, mut welcome, memory) = match answer {
            Ok(Connected { socket, welcome, memory }) => {
                let memory = match memory {
                    Some(Passed::New(memory)) => Some(memory),
                    Some(Passed::Owned) => server.kept.take().map(|kept| kept.memory),
                    None => None,
                };
                if memory.is_none() && matches!(server.endpoint, Endpoint::Local(_)) {
                    // Its session ended while it was asked. The lock went with it: another attempt takes it again.
                    return None;
                }
                let possible = welcome.npages.0.saturating_add(welcome.available.0);
                server.answered = Some((now, PageCount(possible)));
                server.error = None;
                // What a former program had there is not what the server has now.
                server.kept = None;
                (Some(socket), welcome, memory)
            }
            Err(error) => {
                let kept = server.kept.take().map(KeptPool::into_offer);
                self.note_error(number, error);
                let (welcome, memory) = kept?;
                (None, welcome, Some(memory))
            }
        };
        if memory.is_some() {
            // The server does not see the pages that are written.
            welcome.sends_received = SendCount(self.server(number).map_or(0, |server| server.sends));
        }
        self.waiting.push(Waiting { server: number, socket, welcome, memory });
        Some(welcome)
    }

    /// Records the error of a server. Logs it unless the error before it was of the same kind.
    pub(super) fn note_error(&mut self, number: ServerNumber, error: LinkError) {
        let (alone, connected) = (self.servers().len() == 1, !self.sessions.is_empty());
        let is_away = self.sessions.contains(number);
        let Some(server) = self.server(number) else { return };
        if server.error.as_ref().map(discriminant) != Some(discriminant(&error)) {
            let next = match (is_away, connected, alone) {
                (true, ..) => "Its pool is in use as before; trying again.",
                (false, true, _) => "It is passed over.",
                (false, false, true) => "Reads go to the disk; trying again.",
                (false, false, false) => "It is passed over; trying again later.",
            };
            tracing::warn!("{} {next}", sentence(&error.to_string()));
        }
        server.error = Some(error);
    }
}
