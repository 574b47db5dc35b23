//! Answers to the messages of a front end.
//!
//! The handler keeps the content of the messages (memory, addresses, bases) and turns it into a few commands for the
//! I/O thread. An invalid message is refused with a reason, and the front end is disconnected: a state that the two
//! sides see differently would be worse.

mod replay;

pub(super) use replay::replay;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error as VhostError, GpuBackend, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};

use super::back_channel;
use super::command::{Command, IoThread, failure};
use super::config::{DeviceConfig, PROTOCOL_FEATURES, QUEUE_SIZE_MAX, WRITEBACK_OFFSET};
use super::inflight::InflightRegion;
use super::layout::RingLayout;
use super::log::DirtyLog;
use super::memory::{MemoryTable, REGION_COUNT_MAX};
use remoca_io::wake;
use remoca_protocol::guests::Offer;
use remoca_protocol::guests::RingAddresses;

type Result<T> = std::result::Result<T, VhostError>;

/// What the front end said about one queue.
#[derive(Default, Clone)]
struct Vring {
    size: u32,
    addresses: Option<RingAddresses>,
    base: u16,
    running: bool,
    /// The eventfds. A queue that does not run has no kick.
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: bool,
}

/// The messages of one front end, and the answers to them.
pub(super) type Requests = BackendReqHandler<Mutex<Handler>>;

pub(crate) struct Handler {
    config: Arc<DeviceConfig>,
    io: IoThread,
    /// What was offered to the front end when it connected.
    offered: Offer,
    features: Option<u64>,
    protocol_features: Option<u64>,
    table: MemoryTable,
    vrings: Vec<Vring>,
    inflight: Option<Arc<InflightRegion>>,
    /// Where the front end is told of changes.
    channel: Option<OwnedFd>,
}

impl Handler {
    pub fn new(config: Arc<DeviceConfig>, io: IoThread) -> Self {
        let vrings = vec![Vring::default(); usize::from(config.queue_count_max)];
        let table = MemoryTable::empty(io.log.clone());
        let offered = config.offer();
        Handler {
            config,
            io,
            offered,
            features: None,
            protocol_features: None,
            table,
            vrings,
            inflight: None,
            channel: None,
        }
    }

    /// Attaches a front end.
    pub fn attach(&mut self) -> Result<()> {
        self.offered = self.config.offer();
        self.io.call(Command::Attach).map(drop)
    }

    /// Makes the front end count as connected, now that all that was agreed on is in place.
    pub fn note_attached(&mut self) -> Result<()> {
        self.io.call(Command::Attached).map(drop)
    }

    /// Detaches a front end that has disconnected. Blocks until none of its requests are in flight.
    pub fn detach(&mut self) -> Result<()> {
        (self.features, self.protocol_features) = (None, None);
        self.table = MemoryTable::empty(self.io.log.clone());
        self.vrings.fill(Vring::default());
        self.inflight = None;
        self.channel = None;
        self.io.call(Command::Detach).map(drop)
    }

    /// Receives the next message over `front_end` if it is one that the vhost crate cannot handle. Returns whether it was.
    ///
    /// # Errors
    /// If the message is not valid, or the device is shut down.
    pub fn receive(&mut self, front_end: &UnixStream) -> Result<bool> {
        let agreed = VhostUserProtocolFeatures::from_bits_truncate(self.protocol_features.unwrap_or(0));
        if !agreed.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
            return Ok(false);
        }
        let received = back_channel::receive(front_end, agreed.contains(VhostUserProtocolFeatures::REPLY_ACK))?;
        let Some(channel) = received else { return Ok(false) };
        self.set_channel(Some(channel), None)?;
        Ok(true)
    }

    /// Sets where the front end is told of changes, and the size of the disk that a former program has told it.
    fn set_channel(&mut self, channel: Option<OwnedFd>, told_bytes: Option<u64>) -> Result<()> {
        self.channel = channel.as_ref().map(OwnedFd::try_clone).transpose().map_err(failure)?;
        self.io.call(Command::SetChannel { channel, told_bytes }).map(drop)
    }

    /// Returns whether the front end would be offered more if it connected now.
    pub fn has_news(&self) -> bool {
        self.config.offer().adds_to(&self.offered)
    }

    /// Returns whether another process could continue the connection after a kill, whatever is in flight.
    pub fn outlives_process(&self) -> bool {
        let protocol = VhostUserProtocolFeatures::from_bits_truncate(self.protocol_features.unwrap_or(0));
        let is_recorded = |number| self.inflight.as_ref().is_some_and(|record| record.has(number));
        let mut running = self.vrings.iter().enumerate().filter(|(_, vring)| vring.running);
        protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) && running.all(|(number, _)| is_recorded(number))
    }

    /// Returns whether the guest has its write cache on.
    pub fn write_cache(&self) -> bool {
        self.io.write_cache.is_on()
    }

    fn offered(&self) -> u64 {
        self.config.offer().features
    }

    /// Returns the number of queue `index` and its state.
    fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring)> {
        let number = u16::try_from(index).map_err(|_| VhostError::InvalidParam)?;
        let vring = self.vrings.get_mut(usize::from(number));
        let vring = vring.ok_or_else(|| failure(format!("there is no queue {index}")))?;
        Ok((number, vring))
    }

    /// Returns the state of a queue for a change that is not possible while its ring runs. Fails if the queue is
    /// running.
    fn stopped_vring(&mut self, index: u32) -> Result<&mut Vring> {
        match self.vring(index)? {
            (_, vring) if vring.running => Err(failure(format!("queue {index} is running"))),
            (_, vring) => Ok(vring),
        }
    }

    /// Switches to another memory table, and relocates the running rings.
    fn change_memory(&mut self, table: MemoryTable) -> Result<()> {
        let layouts = self.vrings.iter().map(|vring| match vring.running {
            true => layout_of(&table, vring).map(Some),
            false => Ok(None),
        });
        let layouts = layouts.collect::<Result<Vec<_>>>()?;
        let (memory, footprint) = (table.memory().clone(), table.footprint());
        self.io.call(Command::SetMemory { memory, footprint, layouts })?;
        self.table = table;
        Ok(())
    }

    fn start_queue(&mut self, index: u32, kick: Arc<OwnedFd>) -> Result<()> {
        let table = self.table.clone();
        let region = self.inflight.clone();
        let (queue, vring) = self.vring(index)?;
        let layout = layout_of(&table, vring)?;
        let base = vring.base;
        self.io.call(Command::StartQueue { queue, layout, base, kick: kick.clone(), region })?;
        let has_enable = self.features.unwrap_or(0) & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let (_, vring) = self.vring(index)?;
        (vring.running, vring.kick) = (true, Some(kick));
        vring.enabled |= !has_enable;
        Ok(())
    }

    fn stop_queue(&mut self, index: u32) -> Result<u16> {
        let (queue, vring) = self.vring(index)?;
        if vring.running {
            let base = self.io.call(Command::StopQueue { queue })?;
            let (_, vring) = self.vring(index)?;
            (vring.running, vring.kick) = (false, None);
            vring.base = base;
        }
        Ok(self.vring(index)?.1.base)
    }

    fn set_writeback_cache(&mut self, writeback: bool) -> Result<()> {
        self.io.call(Command::SetWriteback(writeback))?;
        if let Some(region) = &self.inflight {
            region.set_writeback(writeback);
        }
        Ok(())
    }
}

fn layout_of(table: &MemoryTable, vring: &Vring) -> Result<RingLayout> {
    let addresses = vring.addresses.as_ref().ok_or_else(|| failure("the queue has no addresses yet"))?;
    table.ring_layout(addresses, vring.size).map_err(failure)
}

fn unsupported<T>() -> Result<T> {
    Err(VhostError::InvalidOperation("not offered by this back end"))
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        for index in 0..u32::from(self.config.queue_count_max) {
            self.stop_queue(index)?;
        }
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            return Err(failure(format!("features {unknown:#x} were not offered")));
        }
        self.features = Some(features);
        self.io.call(Command::SetFeatures(features)).map(drop)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let table = self.table.with_all(regions, files).map_err(failure)?;
        self.change_memory(table)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.stopped_vring(index)?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let used_log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let addresses = RingAddresses { descriptors, available, used, used_log };
        // A front end that starts or ends a migration sends the same addresses again while the ring is running.
        let (queue, vring) = self.vring(index)?;
        let same = vring.addresses.is_some_and(|old| RingAddresses { used_log, ..old } == addresses);
        if vring.running && same {
            self.io.call(Command::LogRing { queue, used_log })?;
            self.vring(index)?.1.addresses = Some(addresses);
        } else {
            self.stopped_vring(index)?.addresses = Some(addresses);
        }
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| failure(format!("base {base} of a split ring")))?;
        self.stopped_vring(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        Ok(VhostUserVringState::new(index, u32::from(self.stop_queue(index)?)))
    }

    fn set_vring_kick(&mut self, index: u8, kick: Option<File>) -> Result<()> {
        let index = u32::from(index);
        let kick = kick.ok_or_else(|| failure("a queue without a kick eventfd would have to be polled"))?;
        let kick = Arc::new(wake::received(kick.into()).map_err(failure)?);
        match self.vring(index)? {
            (queue, vring) if vring.running => {
                vring.kick = Some(kick.clone());
                self.io.call(Command::SetKick { queue, kick }).map(drop)
            }
            _ => self.start_queue(index, kick),
        }
    }

    fn set_vring_call(&mut self, index: u8, call: Option<File>) -> Result<()> {
        let call = call.map(|call| wake::received(call.into()).map(Arc::new)).transpose().map_err(failure)?;
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.call = call.clone();
        self.io.call(Command::SetCall { queue, call }).map(drop)
    }

    fn set_vring_err(&mut self, index: u8, error: Option<File>) -> Result<()> {
        let error = error.map(|error| wake::received(error.into()).map(Arc::new)).transpose().map_err(failure)?;
        let (queue, vring) = self.vring(u32::from(index))?;
        vring.error = error.clone();
        self.io.call(Command::SetError { queue, error }).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !PROTOCOL_FEATURES.bits() {
            0 => {
                self.protocol_features = Some(features);
                Ok(())
            }
            unknown => Err(failure(format!("protocol features {unknown:#x} were not offered"))),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.config.queue_count_max))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let (queue, vring) = self.vring(index)?;
        vring.enabled = enable;
        self.io.call(Command::EnableQueue { queue, enable }).map(drop)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // Fields of later versions of the specification read as zero: they belong to features that are not offered.
        let space = self.config.configuration_space(self.io.capacity.bytes(), self.io.write_cache.is_on());
        let rest = usize::try_from(offset).ok().and_then(|offset| space.get(offset..)).unwrap_or_default();
        let size = usize::try_from(size).map_err(|_| VhostError::InvalidParam)?;
        let mut answer = rest[..rest.len().min(size)].to_vec();
        answer.resize(size, 0);
        Ok(answer)
    }

    fn set_config(&mut self, offset: u32, data: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        match (offset, data) {
            // The byte that the guest may write. Front ends pass on its value even if the feature was not negotiated.
            (WRITEBACK_OFFSET, [writeback]) => self.set_writeback_cache(*writeback != 0),
            _ => Err(failure(format!("{} bytes of the configuration at {offset} cannot be written", data.len()))),
        }
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        // Cloud Hypervisor asks for as many queues as the guest uses, of the size of the first one, and takes the record that it gets. Its
        // guest may use others, and make them larger.
        let queues = wanted.num_queues.max(self.config.queue_count_max);
        let size = wanted.queue_size.max(QUEUE_SIZE_MAX);
        let (file, bytes) = InflightRegion::create(queues, size, self.io.write_cache.is_on()).map_err(failure)?;
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        if self.vrings.iter().any(|vring| vring.running) {
            return Err(failure("the record of requests in flight cannot change while a queue runs"));
        }
        wake::keep(&file).map_err(failure)?;
        let region = InflightRegion::open(file, given.mmap_size, given.mmap_offset, given.num_queues, given.queue_size);
        let region = Arc::new(region.map_err(failure)?);
        // What is known already asks for no flush, for which the hypervisor would wait within this message.
        if let Some(writeback) = region.writeback().filter(|writeback| *writeback != self.io.write_cache.is_on()) {
            self.set_writeback_cache(writeback)?;
        }
        self.inflight = Some(region);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGION_COUNT_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<u64>> {
        let table = self.table.with_added(region, file).map_err(failure)?;
        self.change_memory(table)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let table = self.table.with_removed(region).map_err(failure)?;
        self.change_memory(table)
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        unsupported()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        unsupported()
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported()
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        wake::keep(&file).map_err(failure)?;
        let log = DirtyLog::open(file, log.mmap_size, log.mmap_offset).map_err(failure)?;
        self.io.call(Command::SetLog(log)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost::device::VhostDevice;

    /// Nobody knows how far the others had got.
    #[test]
    fn a_connection_outlives_the_process_only_while_all_queues_that_run_are_in_the_record() {
        let config = DeviceConfig::disk("test", "serial", 1 << 20);
        let (_device, io) = VhostDevice::without_front_end(config.clone(), None).unwrap();
        let mut handler = Handler::new(Arc::new(config), io);
        assert!(!handler.outlives_process(), "it is not agreed that there is a record");
        handler.protocol_features = Some(PROTOCOL_FEATURES.bits());
        assert!(handler.outlives_process(), "no queue runs");
        handler.vrings[0].running = true;
        assert!(!handler.outlives_process());
        let (file, bytes) = InflightRegion::create(2, 8, true).unwrap();
        handler.inflight = Some(Arc::new(InflightRegion::open(file, bytes, 0, 2, 8).unwrap()));
        for (number, is_recorded) in [(0, true), (1, true), (2, false)] {
            handler.vrings[number].running = true;
            assert_eq!(handler.outlives_process(), is_recorded, "queue {number}");
        }
    }
}
