//! Connections of guests, with everything that was agreed on them, for a program that continues them.
//!
//! `F` is a descriptor: open, borrowed, or only its number in a description. The connections keep their state apart from
//! the rest of a [`Description`](crate::handover::Description), and a program that does not know a field leaves it out.

use serde::{Deserialize, Serialize};

/// Connections of one device. All fields may be missing in the description of a former program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guests<F> {
    /// Connection of a hypervisor over vhost-user.
    #[serde(default = "none")]
    pub front_end: Option<FrontEnd<F>>,
    #[serde(default = "Vec::new")]
    pub nbd: Vec<NbdClient<F>>,
}

fn none<T>() -> Option<T> {
    None
}

impl<F> Default for Guests<F> {
    fn default() -> Self {
        Self { front_end: None, nbd: Vec::new() }
    }
}

/// What a device offers to guests that connect to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Offer {
    /// Virtio features.
    pub features: u64,
    /// Features of the vhost-user protocol.
    pub protocol_features: u64,
    /// Maximum number of queues.
    pub queues: u16,
    /// Unit of requests, in bytes.
    pub sector: u32,
    /// Transmission flags of an NBD export.
    pub nbd_flags: u16,
}

/// Connection of a vhost-user front end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontEnd<F> {
    pub socket: F,
    /// Virtio features that the front end set. `None` if it has not set any yet.
    pub features: Option<u64>,
    /// Protocol features that the front end set. `None` if it has not set any yet.
    pub protocol_features: Option<u64>,
    /// What was offered when it connected. Descriptions of older programs lack this field.
    #[serde(default)]
    pub offered: Option<Offer>,
    pub memory: Vec<MemoryRegion<F>>,
    /// Record of the requests in flight.
    pub record: Option<InflightRecord<F>>,
    /// Log of the pages that are written while the VM migrates.
    pub log: Option<PageLog<F>>,
    /// Socket on which the front end is told that the configuration has changed. Descriptions of older programs lack this
    /// field.
    #[serde(default = "none")]
    pub channel: Option<F>,
    /// Size of the disk that the front end knows, in bytes; 0 if that is not certain. Descriptions of older programs lack
    /// this field.
    #[serde(default)]
    pub told_bytes: Option<u64>,
    pub queues: Vec<Queue<F>>,
}

/// Region of guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRegion<F> {
    pub file: F,
    pub file_offset: u64,
    /// First address in the guest.
    pub guest: u64,
    /// First address in the front end.
    pub user: u64,
    pub bytes: u64,
}

/// Record of the requests in flight, in a file that the front end keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InflightRecord<F> {
    pub file: F,
    pub file_offset: u64,
    pub bytes: u64,
    pub queues: u16,
    pub queue_size: u16,
}

/// Log of written pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageLog<F> {
    pub file: F,
    pub file_offset: u64,
    pub bytes: u64,
}

/// Queue of a vhost-user device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue<F> {
    pub size: u32,
    pub addresses: Option<RingAddresses>,
    /// Position in the available ring.
    pub base: u16,
    /// Eventfd of a queue that runs.
    pub kick: Option<F>,
    pub call: Option<F>,
    pub error: Option<F>,
    pub enabled: bool,
}

/// Parts of a ring in the front end's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingAddresses {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// Guest address if the used ring is to be logged.
    pub used_log: Option<u64>,
}

/// Client of an NBD export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdClient<F> {
    pub socket: F,
    pub structured_replies: bool,
    /// What it was told when it chose the export. Descriptions of older programs lack this field.
    #[serde(default)]
    pub offered: Option<Offer>,
    /// File with the following bytes, one after the other. `None` if there are none.
    pub bytes: Option<F>,
    /// Number of bytes that were received and not parsed.
    pub received: u64,
    /// Number of bytes that wait to be sent.
    pub to_send: u64,
    /// Request that has not been received, or not been executed, completely.
    pub begun: Option<BegunRequest>,
    /// Size of the export that the client was told, in bytes. Descriptions of older programs lack this field.
    #[serde(default)]
    pub told_bytes: Option<u64>,
}

/// Rest of a request of an NBD client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BegunRequest {
    /// Write that was refused. Its payload is still to be received, and then the error to be sent.
    Refused { cookie: u64, error: i32, bytes: u32 },
    /// Write of which `filled` bytes were received and not written. They are the last ones in the client's file.
    Write { cookie: u64, durable: bool, start: u64, end: u64, filled: u64, error: Option<i32> },
    /// Read that has not been handed out. `in_one`: the data go out in one run.
    Read { cookie: u64, start: u64, end: u64, in_one: bool, error: Option<i32> },
}

impl Offer {
    /// Returns whether this offer has anything that `former` had not.
    #[must_use]
    pub fn adds_to(&self, former: &Self) -> bool {
        self.features & !former.features != 0
            || self.protocol_features & !former.protocol_features != 0
            || self.nbd_flags & !former.nbd_flags != 0
    }
}

impl<F> Guests<F> {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.front_end.is_none() && self.nbd.is_empty()
    }

    /// Replaces each descriptor by what `map` returns for it.
    ///
    /// # Errors
    /// The first error of `map`.
    pub fn try_map<G, E>(self, map: &mut impl FnMut(F) -> Result<G, E>) -> Result<Guests<G>, E> {
        let front_end = self.front_end.map(|front_end| front_end.try_map(map)).transpose()?;
        let nbd = self.nbd.into_iter().map(|client| client.try_map(map)).collect::<Result<_, _>>()?;
        Ok(Guests { front_end, nbd })
    }
}

impl<F: Copy> Guests<F> {
    /// Returns all descriptors.
    #[must_use]
    pub fn descriptors(&self) -> Vec<F> {
        let mut all = Vec::new();
        let mut note = |fd| -> Result<(), std::convert::Infallible> {
            all.push(fd);
            Ok(())
        };
        let Ok(_) = self.clone().try_map(&mut note);
        all
    }
}

impl<F> FrontEnd<F> {
    /// Replaces each descriptor by what `map` returns for it.
    ///
    /// # Errors
    /// The first error of `map`.
    pub fn try_map<G, E>(self, map: &mut impl FnMut(F) -> Result<G, E>) -> Result<FrontEnd<G>, E> {
        let Self { socket, features, protocol_features, offered, memory, record, log, channel, told_bytes, queues } =
            self;
        let socket = map(socket)?;
        let region = |MemoryRegion { file, file_offset, guest, user, bytes }| {
            Ok(MemoryRegion { file: map(file)?, file_offset, guest, user, bytes })
        };
        let memory = memory.into_iter().map(region).collect::<Result<_, _>>()?;
        let record = match record {
            Some(InflightRecord { file, file_offset, bytes, queues, queue_size }) => {
                Some(InflightRecord { file: map(file)?, file_offset, bytes, queues, queue_size })
            }
            None => None,
        };
        let log = match log {
            Some(PageLog { file, file_offset, bytes }) => Some(PageLog { file: map(file)?, file_offset, bytes }),
            None => None,
        };
        let channel = channel.map(&mut *map).transpose()?;
        let queue = |Queue { size, addresses, base, kick, call, error, enabled }| {
            let [kick, call, error] = [kick, call, error].map(|fd| fd.map(&mut *map).transpose());
            Ok(Queue { size, addresses, base, kick: kick?, call: call?, error: error?, enabled })
        };
        let queues = queues.into_iter().map(queue).collect::<Result<_, _>>()?;
        Ok(FrontEnd { socket, features, protocol_features, offered, memory, record, log, channel, told_bytes, queues })
    }
}

impl<F> NbdClient<F> {
    fn try_map<G, E>(self, map: &mut impl FnMut(F) -> Result<G, E>) -> Result<NbdClient<G>, E> {
        let Self { socket, structured_replies, offered, bytes, received, to_send, begun, told_bytes } = self;
        let (socket, bytes) = (map(socket)?, bytes.map(map).transpose()?);
        Ok(NbdClient { socket, structured_replies, offered, bytes, received, to_send, begun, told_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_before_is_new() {
        let offer = Offer { features: 0x7200, nbd_flags: 0x6D, ..Offer::default() };
        assert!(!offer.adds_to(&offer));
        assert!(offer.adds_to(&Offer { features: 0x5200, ..offer }));
        assert!(!Offer { features: 0x5200, ..offer }.adds_to(&offer));
        assert!(offer.adds_to(&Offer { nbd_flags: 0, ..offer }));
    }
}
