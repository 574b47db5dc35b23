//! A mapped pool and another one, both in session, driven by hand.

use super::*;
use crate::clock::SystemClock;
use crate::link::{AnswerTo, Connected, Network, PoolMemory};
use remoca_core::engine::{Leaving, layout};
use remoca_core::units::PAGE_SIZE;
use remoca_io::address::Endpoint;
use remoca_protocol::{PoolGeneration, SendCount, ServerId, Token, VERSION, decode};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LOCAL: ServerNumber = ServerNumber(0);
const REMOTE: ServerNumber = ServerNumber(1);

/// The other ends of the connections.
#[derive(Clone, Default)]
struct TwoServers(Arc<Mutex<Vec<OwnedFd>>>);

impl Network for TwoServers {
    fn token(&self) -> io::Result<Token> {
        Ok(Token([1; 16]))
    }

    fn connect(&self, endpoint: Endpoint, _: Token, _: u64, answer: AnswerTo) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        self.0.lock().unwrap().push(theirs);
        let memory = matches!(endpoint, Endpoint::Local(_)).then(|| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, 4 * PAGE_SIZE_U64).unwrap();
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
            PoolMemory::take(file, None, Duration::ZERO).unwrap()
        });
        let welcome = Welcome {
            version: VERSION,
            server_id: ServerId([1; 16]),
            pool_generation: PoolGeneration(1),
            npages: PageCount(4),
            available: PageCount(0),
            quota: PageCount(4),
            sends_received: SendCount(0),
        };
        answer.give(Ok(Connected { socket, welcome, memory }));
    }

    fn say_goodbye(&self, _: OwnedFd, _: Vec<u8>) {}
}

fn start(network: &TwoServers) -> (Servers, Host) {
    let endpoints = ["local:/l", "unix:/u"].map(|text| text.parse().unwrap());
    let link = ServerLink::start(Arc::new(network.clone()), &endpoints.to_vec().into(), None).unwrap();
    let (mut servers, host) =
        (Servers::new(Some(link), "local:/l".parse().unwrap()), Host::new(Box::new(SystemClock)).unwrap());
    for server in [LOCAL, REMOTE] {
        servers.ask(server);
        assert!(matches!(servers.next_news(&host), Some((asked, News::Answer(Some(_)))) if asked == server));
        servers.begin_session(&host, server).unwrap();
    }
    (servers, host)
}

fn at(server: ServerNumber, slot: u32) -> PoolSlot {
    PoolSlot { server, slot: SlotIndex(slot) }
}

#[test]
fn a_demoted_page_is_copied_before_another_takes_its_place() {
    let network = TwoServers::default();
    let (mut servers, host) = start(&network);
    let (old, new) = ([1; PAGE_SIZE], [2; PAGE_SIZE]);
    assert_eq!(servers.admit(Admitted { at: at(LOCAL, 3), demoted_to: None }, &old), 1, "it is there at once");
    assert_eq!(servers.admit(Admitted { at: at(LOCAL, 3), demoted_to: Some(at(REMOTE, 2)) }, &new), 1);
    assert!(servers.fetch(FetchId(1), at(LOCAL, 3)), "nothing is sent for it");
    assert_eq!(servers.read(at(LOCAL, 3)), Some(PageHere::Mapped(&new)));
    assert_eq!((servers.flush(&host, LOCAL).unwrap(), servers.flush(&host, REMOTE).unwrap()), (0, 1));
    let mut bytes = [0; 2 * PAGE_SIZE];
    let count = rustix::io::read(&network.0.lock().unwrap()[1], &mut bytes).unwrap();
    let (frame, length) = decode(&bytes[..count]).unwrap().unwrap();
    assert!(matches!(frame, Frame::SendPage { slot: SlotIndex(2), page, .. } if *page == old));
    assert_eq!(length, count);
}

#[test]
#[should_panic(expected = "cannot be copied")]
fn a_page_that_cannot_be_read_here_is_not_demoted() {
    let (mut servers, _host) = start(&TwoServers::default());
    servers.admit(Admitted { at: at(REMOTE, 0), demoted_to: Some(at(LOCAL, 0)) }, &[1; PAGE_SIZE]);
}

#[test]
fn each_server_has_its_flag_and_its_events() {
    let network = TwoServers::default();
    let (mut servers, mut host) = start(&network);
    assert_eq!(servers.next_session(None), Some(LOCAL));
    assert_eq!(servers.next_session(Some(LOCAL)), Some(REMOTE));
    assert!(servers.lost(REMOTE, Ok(Received::More)).is_none() && servers.receives_again());
    assert_eq!(servers.take_receive_again(), [REMOTE]);
    assert!(!servers.receives_again() && servers.take_receive_again().is_empty());
    for server in [REMOTE, LOCAL] {
        rustix::io::write(&network.0.lock().unwrap()[server.0 as usize], b"x").unwrap();
        let mut ready = Vec::new();
        host.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        assert_eq!(ready, [(Source::LinkSocket(server), false)]);
        servers.end_session(&host, server, |link| link.end(server, "it is over"));
    }
    assert_eq!(servers.next_session(None), None);
}

#[test]
fn only_a_mapped_session_outlives_its_connection() {
    let network = TwoServers::default();
    let (mut servers, host) = start(&network);
    servers.admit(Admitted { at: at(LOCAL, 0), demoted_to: None }, &[1; PAGE_SIZE]);
    servers.set_size(LOCAL, PageCount(2));
    network.0.lock().unwrap().clear();
    for (server, outlives) in [(LOCAL, true), (REMOTE, false)] {
        let (session, _) = servers.listen(server).unwrap();
        let received = session.receive(|_| {});
        let why = servers.lost(server, received).unwrap();
        assert_eq!(servers.outlive(&host, server, &why), outlives, "{why}");
    }
    assert_eq!(servers.next_size(), Some((LOCAL, Size::Granted(PageCount(2)))));
    assert_eq!(servers.next_size(), None);
    assert!(servers.read(at(LOCAL, 0)).is_some());
    // What its server says ends a mapped session too.
    let (_, hearing) = servers.listen(LOCAL).unwrap();
    hearing.dismissal = Some(ErrorCode::TAKEN_BACK);
    let why = servers.lost(LOCAL, Ok(Received::Drained)).unwrap();
    assert!(why.contains("took all memory back"), "{why}");
    assert!(!servers.outlive(&host, LOCAL, &why));
}

/// A local tier that was given back leaves its server without a pool.
#[test]
fn a_shortage_is_told_although_the_local_tier_has_no_pool() {
    let config = crate::driver::tests::config(1);
    let mut engine = DiskEngine::new(&config, IndexMemory::new(layout(&config).words()).unwrap());
    let endpoints = Endpoints { listed: vec!["unix:/u".parse().unwrap()], local: Some("local:/l".parse().unwrap()) };
    let link = ServerLink::start(Arc::new(TwoServers::default()), &endpoints, None).unwrap();
    let mut servers = Servers::new(Some(link), "local:/l".parse().unwrap());
    let (listed, local) = servers.numbers().unwrap();
    engine.set_local_server(Nanos(0), local);
    engine.set_servers(Nanos(0), &listed, Leaving::Drained);
    let half = PoolOffer { generation: 1, npages: PageCount(0), available: PageCount(4), sends_received: 0 };
    engine.handle_answer(Nanos(0), listed[0], Some(half));
    servers.tell_shortage(&engine);
    assert!(!servers.shortage_told, "it has not answered yet");
    engine.handle_sized(Nanos(0), listed[0], PageCount(4));
    servers.tell_shortage(&engine);
    assert!(servers.shortage_told);
    // One that is wanted has not answered.
    servers.forget_refusal();
    engine.resize(Nanos(0), PageCount(8), PageCount(1));
    servers.tell_shortage(&engine);
    assert!(!servers.shortage_told);
}

/// The engine may name a server whose connection is gone. What was kept for it would wake the driver for ever.
#[test]
fn nothing_is_left_of_a_session_that_could_not_begin() {
    let (mut servers, host) = start(&TwoServers::default());
    let nobody = ServerNumber(7);
    assert!(servers.begin_session(&host, nobody).is_err());
    servers.end_session(&host, nobody, |link| link.end(nobody, "it is over"));
    assert!(servers.lost(nobody, Ok(Received::More)).is_none() && !servers.receives_again());
    assert!(servers.lost(LOCAL, Ok(Received::More)).is_none() && servers.receives_again());
}

/// Nobody would say when it has room: what is queued would wait for ever.
#[test]
fn a_full_connection_whose_room_cannot_be_watched_is_reported() {
    let (mut servers, host) = start(&TwoServers::default());
    // The system refuses to change what is not watched.
    host.unwatch(servers.session(REMOTE).unwrap().socket_fd().unwrap());
    let error = (0..10_000).find_map(|slot| {
        servers.admit(Admitted { at: at(REMOTE, slot), demoted_to: None }, &[1; PAGE_SIZE]);
        servers.flush(&host, REMOTE).err()
    });
    let why = error.expect("its server reads nothing").to_string();
    assert!(why.contains("cannot be watched"), "{why}");
}

/// Nobody would hear that the server takes memory back, or has gone.
#[test]
fn a_connection_that_cannot_be_watched_is_reported() {
    let (mut servers, host) = start(&TwoServers::default());
    // The system refuses what is watched already.
    assert!(servers.rejoin(&host, LOCAL).is_err());
}
