//! Passes a connection to another program of this process, which continues it: what the front end has said is said
//! again, by that program to itself.

use super::{Handler, Requests, Result, Vring};
use crate::vhost::command::failure;
use crate::vhost::memory;
use remoca_io::handover::Pass;
use remoca_protocol::guests::{FrontEnd, Queue};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserLog};

/// Numbers of the messages in the vhost-user specification.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
/// Flags of a message that wants no acknowledgement: the version of the protocol.
const PLAIN: u32 = 1;

/// Brings `handler` and its device to the state of the connection. Returns what answers its next messages.
///
/// # Errors
/// If this program cannot offer what was agreed on, or cannot map what was shared. The front end has to connect again.
pub(in crate::vhost) fn replay(front_end: FrontEnd<OwnedFd>, handler: &Arc<Mutex<Handler>>) -> Result<Requests> {
    let (own, theirs) = UnixStream::pair().map_err(failure)?;
    let mut requests = BackendReqHandler::from_stream(theirs, handler.clone());
    // The crate keeps the features to itself, and takes them from messages alone. Which were offered it has to know even
    // if the front end has not set any yet: later it acknowledges messages only if it could.
    let set = |request, value: Option<u64>| value.map(|value| message(request, &value.to_ne_bytes()));
    let messages = [
        Some(message(GET_FEATURES, &[])),
        set(SET_FEATURES, front_end.features),
        Some(message(GET_PROTOCOL_FEATURES, &[])),
        set(SET_PROTOCOL_FEATURES, front_end.protocol_features),
    ];
    for message in messages.into_iter().flatten() {
        (&own).write_all(&message).map_err(failure)?;
        requests.handle_request()?;
    }
    put_in_place(&front_end.socket, &requests)?;
    handler.lock().unwrap_or_else(PoisonError::into_inner).restore(front_end)?;
    Ok(requests)
}

fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("payloads have 8 bytes at most");
    [&request.to_ne_bytes(), &PLAIN.to_ne_bytes(), &length.to_ne_bytes(), payload].concat()
}

/// Makes the connection `socket` the one that `requests` answers.
fn put_in_place(socket: &OwnedFd, requests: &Requests) -> Result<()> {
    // SAFETY: the descriptor is open as long as `requests` owns it. It is only replaced here, and never closed.
    let mut target = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(requests.as_raw_fd()) });
    rustix::io::dup3(socket, &mut target, rustix::io::DupFlags::CLOEXEC)
        .map_err(|error| failure(io::Error::from(error)))
}

impl Vring {
    fn is_used(&self) -> bool {
        self.size > 0 || self.addresses.is_some() || self.call.is_some() || self.error.is_some() || self.enabled
    }

    fn pass<G>(&self, pass: &mut Pass<'_, G>) -> io::Result<Queue<G>> {
        let Self { size, addresses, base, enabled, .. } = *self;
        let [kick, call, error] =
            [&self.kick, &self.call, &self.error].map(|fd| fd.as_ref().map(|fd| pass(fd.as_fd())).transpose());
        Ok(Queue { size, addresses, base, kick: kick?, call: call?, error: error?, enabled })
    }
}

impl Handler {
    /// Returns the connection over `socket`, for a program that continues it. Descriptors are what `pass` returns for
    /// them. The positions of queues that run are those at which they started, and nobody
    /// knows which size the front end was told. Queues that the front end has never used
    /// are left out: the other program need not have them.
    pub fn pass<G>(&self, socket: G, pass: &mut Pass<'_, G>) -> io::Result<FrontEnd<G>> {
        let used = self.vrings.iter().rposition(Vring::is_used).map_or(0, |last| last + 1);
        let queues = self.vrings[..used].iter().map(|vring| vring.pass(pass)).collect::<io::Result<_>>()?;
        Ok(FrontEnd {
            socket,
            features: self.features,
            protocol_features: self.protocol_features,
            offered: Some(self.offered),
            memory: self.table.pass(pass)?,
            record: self.inflight.as_ref().map(|record| record.pass(pass)).transpose()?,
            log: self.io.log.pass(pass)?,
            channel: self.channel.as_ref().map(|channel| pass(channel.as_fd())).transpose()?,
            told_bytes: Some(0),
            queues,
        })
    }

    /// Restores everything but the features, which must be restored already, from the connection of a former program.
    pub fn restore(&mut self, front_end: FrontEnd<OwnedFd>) -> Result<()> {
        let FrontEnd { offered, memory, record, log, channel, told_bytes, queues, .. } = front_end;
        self.offered = offered.unwrap_or_else(|| self.config.offer_before_offers());
        self.set_channel(channel, told_bytes)?;
        if !memory.is_empty() {
            let (regions, files) = memory.into_iter().map(memory::region_of).unzip::<_, _, Vec<_>, Vec<_>>();
            self.set_mem_table(&regions, files, None)?;
        }
        if let Some(record) = record {
            let (bytes, offset) = (record.bytes, record.file_offset);
            let given = VhostUserInflight::new(bytes, offset, record.queues, record.queue_size);
            self.set_inflight_fd(&given, record.file.into())?;
        }
        if let Some(log) = log {
            self.set_log_base(&VhostUserLog::new(log.bytes, log.file_offset), log.file.into())?;
        }
        for (queue, index) in queues.into_iter().zip(0_u8..) {
            let vring = self.stopped_vring(index.into())?;
            (vring.size, vring.addresses, vring.base) = (queue.size, queue.addresses, queue.base);
            // Without an eventfd, the queue has none either.
            self.set_vring_call(index, queue.call.map(File::from))?;
            self.set_vring_err(index, queue.error.map(File::from))?;
            if let Some(kick) = queue.kick {
                self.set_vring_kick(index, Some(kick.into()))?;
            }
            self.set_vring_enable(index.into(), queue.enabled)?;
        }
        Ok(())
    }
}
