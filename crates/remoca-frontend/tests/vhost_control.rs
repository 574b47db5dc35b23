//! Front ends that say what cannot be: refused and disconnected, and the next one is served.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remoca_frontend::testing::{Backend, Command, Options, RamDisk, TestGuest};
use remoca_frontend::vhost::{DeviceConfig, VhostDevice};
use remoca_io::socket::SocketSource;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

fn start() -> (Backend, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = DeviceConfig::disk("control", "control", 1 << 20);
    config.queue_count_max = 2;
    let disk = Arc::new(Mutex::new(RamDisk::new(1 << 20)));
    (Backend::spawn(config, &folder.path().join("s"), disk), folder)
}

fn options() -> Options {
    Options { queue_size: 16, data_bytes: 4096, ..Options::default() }
}

/// A new guest finds the device as if nothing had happened.
fn assert_serves(backend: &Backend) {
    let mut guest = TestGuest::new(options());
    guest.connect(&backend.socket).unwrap();
    assert_eq!(guest.run(0, Command::Flush), 0);
}

fn region(guest: &TestGuest, index: usize) -> VhostUserMemoryRegionInfo {
    guest.regions()[index]
}

#[test]
fn messages_that_cannot_be_are_refused() {
    type Case = (&'static str, fn(&mut TestGuest) -> vhost::Result<()>);
    let cases: [Case; 19] = [
        ("features that were not offered", |guest| guest.frontend().set_features(1 << 29)),
        ("memory beyond the end of its file", |guest| {
            let mut long = region(guest, 1);
            long.memory_size += 1 << 30;
            guest.frontend().set_mem_table(&[long]).map(drop)
        }),
        ("memory that wraps around", |guest| {
            let mut last = region(guest, 0);
            last.guest_phys_addr = u64::MAX - 4095;
            guest.frontend().add_mem_region(&last).map(drop)
        }),
        ("memory at an odd offset", |guest| {
            let mut odd = region(guest, 1);
            (odd.mmap_offset, odd.memory_size) = (1, 4096);
            guest.frontend().set_mem_table(&[odd]).map(drop)
        }),
        ("memory that overlaps", |guest| {
            let first = region(guest, 0);
            guest.frontend().set_mem_table(&[first, first]).map(drop)
        }),
        ("memory in no file", |guest| {
            let mut wrong = region(guest, 0);
            let (pipe, _writer) = rustix::pipe::pipe().unwrap();
            wrong.mmap_handle = pipe.as_raw_fd();
            guest.frontend().set_mem_table(&[wrong]).map(drop)
        }),
        ("removal of memory that is not there", |guest| {
            let mut missing = region(guest, 0);
            missing.guest_phys_addr += 4096;
            guest.frontend().remove_mem_region(&missing)
        }),
        ("a queue without addresses", |guest| {
            let kick = EventFd::new(EFD_NONBLOCK).unwrap();
            guest.frontend().set_vring_num(0, 16)?;
            guest.frontend().set_vring_kick(0, &kick)
        }),
        ("a queue outside the memory", |guest| {
            let kick = EventFd::new(EFD_NONBLOCK).unwrap();
            let addresses =
                VringConfigData { desc_table_addr: 0x1000, used_ring_addr: 0x2000, ..VringConfigData::default() };
            guest.share_memory()?;
            guest.frontend().set_vring_num(0, 16)?;
            guest.frontend().set_vring_addr(0, &addresses)?;
            guest.frontend().set_vring_kick(0, &kick)
        }),
        ("a queue of no descriptors", |guest| start_with_size(guest, 0)),
        ("a queue of three descriptors", |guest| start_with_size(guest, 3)),
        ("a queue of too many descriptors", |guest| start_with_size(guest, 2048)),
        ("a kick that cannot be waited for", |guest| {
            guest.share_memory()?;
            let file = File::open("/proc/self/exe").unwrap();
            // SAFETY: the descriptor is owned by the file alone, which gives it up here.
            let wrong = unsafe { std::os::fd::FromRawFd::from_raw_fd(std::os::fd::IntoRawFd::into_raw_fd(file)) };
            guest.queues[0].kick = wrong;
            guest.start_queue(0, 0)
        }),
        ("a change of a running queue", |guest| {
            guest.share_memory()?;
            guest.start_queue(0, 0)?;
            guest.frontend().set_vring_num(0, 8)
        }),
        ("memory without the running queue", |guest| {
            guest.share_memory()?;
            guest.start_queue(0, 0)?;
            let slots = region(guest, 1);
            guest.frontend().set_mem_table(&[slots]).map(drop)
        }),
        ("a record of requests that is too short", |guest| {
            let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).unwrap());
            ftruncate(&file, 64).unwrap();
            let shape = VhostUserInflight::new(64, 0, 1, 16);
            guest.frontend().set_inflight_fd(&shape, file.as_raw_fd())
        }),
        ("a record that is longer than its file", |guest| {
            let file = File::from(memfd_create("long", MemfdFlags::CLOEXEC).unwrap());
            let shape = VhostUserInflight::new(4096, 0, 1, 16);
            guest.frontend().set_inflight_fd(&shape, file.as_raw_fd())
        }),
        ("a queue that is larger than its record", |guest| {
            guest.share_memory()?;
            let (made, file) = guest.frontend().get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 8))?;
            let shape = VhostUserInflight::new(made.mmap_size, 0, 1, 8);
            guest.frontend().set_inflight_fd(&shape, file.as_raw_fd())?;
            guest.start_queue(0, 0)
        }),
        ("another byte of the configuration", |guest| {
            guest.frontend().set_config(0, VhostUserConfigFlags::WRITABLE, &[1])
        }),
    ];
    let (backend, _folder) = start();
    for (name, case) in cases {
        let mut guest = TestGuest::new(options());
        guest.negotiate(&backend.socket).unwrap();
        assert!(case(&mut guest).is_err(), "{name}");
        assert!(guest.frontend().get_features().is_err(), "{name}: still connected");
        assert_serves(&backend);
    }
}

/// Cloud Hypervisor asks for as many queues as its guest uses, of the size of the first one, and passes on what it gets.
#[test]
fn a_record_has_room_for_all_queues_that_the_guest_may_use() {
    let (backend, _folder) = start();
    let mut guest = TestGuest::new(Options { queue_count: 2, ..options() });
    guest.negotiate(&backend.socket).unwrap();
    guest.share_memory().unwrap();
    let (shape, file) = guest.frontend().get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 8)).unwrap();
    assert_eq!((shape.num_queues, shape.queue_size), (2, 1024));
    guest.frontend().set_inflight_fd(&shape, file.as_raw_fd()).unwrap();
    guest.start_queue(1, 0).expect("it has 16 entries");
    assert_eq!(guest.run(1, Command::Flush), 0);
}

fn start_with_size(guest: &mut TestGuest, size: u16) -> vhost::Result<()> {
    guest.share_memory()?;
    guest.queues[0].size = size;
    guest.start_queue(0, 0)
}

#[test]
fn queues_that_do_not_exist_are_refused() {
    let (backend, _folder) = start();
    let mut guest = TestGuest::new(Options { queue_count: 3, ..options() });
    guest.negotiate(&backend.socket).unwrap();
    assert!(guest.frontend().set_vring_num(2, 16).is_err());
    let mut guest = TestGuest::new(options());
    guest.negotiate(&backend.socket).unwrap();
    assert_eq!(guest.frontend().get_queue_num().unwrap(), 2);
    drop(guest);
    assert_serves(&backend);
}

#[test]
fn memory_can_be_added_and_removed_one_region_at_a_time() {
    let (backend, _folder) = start();
    let mut guest = TestGuest::new(options());
    guest.negotiate(&backend.socket).unwrap();
    assert_eq!(guest.frontend().get_max_mem_slots().unwrap(), 128);
    let (rings, slots) = (region(&guest, 0), region(&guest, 1));
    guest.frontend().add_mem_region(&slots).unwrap();
    guest.frontend().add_mem_region(&rings).unwrap();
    guest.start_queue(0, 0).unwrap();
    assert_eq!(guest.run(0, Command::Flush), 0);
    guest.frontend().remove_mem_region(&slots).unwrap();
    guest.frontend().add_mem_region(&slots).unwrap();
    assert_eq!(guest.run(0, Command::Flush), 0);
}

#[test]
fn bytes_that_are_no_messages_end_the_connection() {
    let (backend, _folder) = start();
    let header =
        |request: u32, flags: u32, size: u32| [request.to_ne_bytes(), flags.to_ne_bytes(), size.to_ne_bytes()].concat();
    let messages = [
        vec![0xff; 4096],
        header(1, 1, u32::MAX),
        header(1, 2, 0),
        header(u32::MAX, 1, 0),
        header(5, 1, 8),
        header(24, 1, 4096),
        // SET_FEATURES with half of its payload, and then the end.
        [header(2, 1, 8), vec![0; 4]].concat(),
        // SET_VRING_KICK that promises a descriptor and brings none.
        [header(12, 1, 8), vec![0; 8]].concat(),
        header(1, 1, 0)[..7].to_vec(),
    ];
    for message in messages {
        let mut stream = UnixStream::connect(&backend.socket).unwrap();
        stream.write_all(&message).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // Refused, with bytes unread or not, or answered and then closed.
        let _ = stream.read_to_end(&mut Vec::new());
        assert_serves(&backend);
    }
}

#[test]
fn a_device_can_be_dropped_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let config = || DeviceConfig::disk("drop", "drop", 1 << 20);
    // While it listens,
    drop(VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap());
    assert!(!socket.exists());
    // while half of a message has come,
    let device = VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap();
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(&[1, 0, 0]).unwrap();
    drop(device);
    // and while the control thread waits for its answer.
    let device = VhostDevice::new(config(), SocketSource::bind(&socket, None).unwrap()).unwrap();
    let guest = std::thread::spawn({
        let socket = socket.clone();
        move || TestGuest::new(options()).negotiate(&socket).is_err()
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(device);
    assert!(guest.join().unwrap());
}

#[test]
fn a_single_connection_ends_its_device() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let source = SocketSource::from_descriptor(ours.into()).unwrap();
    let mut device = VhostDevice::new(DeviceConfig::disk("one", "one", 1 << 20), source).unwrap();
    assert!(!device.is_finished());
    drop(theirs);
    while !device.is_finished() {
        device.handle_events().unwrap();
        device.notify();
        std::thread::yield_now();
    }
    assert!(!device.is_connected());
}

#[test]
fn a_listening_descriptor_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let source = SocketSource::from_descriptor(listener.into()).unwrap();
    let mut device = VhostDevice::new(DeviceConfig::disk("fd", "fd", 1 << 20), source).unwrap();
    let guest = std::thread::spawn(move || {
        let mut guest = TestGuest::new(options());
        guest.connect(&socket).unwrap();
        (guest.run(0, Command::GetId), guest.regions().iter().map(|region| region.memory_size).sum::<u64>())
    });
    let mut guest_memory_bytes = 0;
    while !guest.is_finished() {
        device.handle_events().unwrap();
        guest_memory_bytes = guest_memory_bytes.max(device.guest_memory_bytes());
        assert!(device.pop().is_none(), "GET_ID is answered by the device");
        device.notify();
    }
    assert_eq!(guest.join().unwrap(), (0, guest_memory_bytes));
    assert!(folder.path().join("s").exists(), "a socket that somebody else made is left alone");
    drop(device);
    assert!(folder.path().join("s").exists());
}
