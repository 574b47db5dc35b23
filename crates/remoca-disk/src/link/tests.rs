//! The list of servers, and what a successor finds of it.

use super::*;
use remoca_core::units::{PAGE_SIZE, SlotIndex};
use remoca_protocol::{PoolGeneration, RequestId, SendCount, ServerId, VERSION, Welcome, decode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, Mutex};

fn endpoints(names: &[&str]) -> Vec<Endpoint> {
    names.iter().map(|name| format!("unix:/nowhere/{name}").parse().unwrap()).collect()
}

/// Returns names and numbers of the servers, in their order.
fn servers(link: &ServerLink) -> Vec<(String, u32)> {
    let name = |server: &KnownServer| server.endpoint.to_string().replace("unix:/nowhere/", "");
    link.servers().iter().map(|server| (name(server), server.number.0)).collect()
}

fn listed(servers: &[(&str, u32)]) -> Vec<(String, u32)> {
    servers.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
}

#[test]
fn a_new_list_has_the_operators_order_and_those_that_stay_keep_number_and_token() {
    let mut link = ServerLink::start(Arc::new(HostNetwork), &endpoints(&["a", "b", "c"]).into(), None).unwrap();
    assert_eq!(servers(&link), listed(&[("a", 0), ("b", 1), ("c", 2)]));
    let before = link.roster();
    link.replace(&endpoints(&["c", "new", "a"]).into()).unwrap();
    assert_eq!(servers(&link), listed(&[("c", 2), ("new", 3), ("a", 0)]));
    assert_eq!(link.roster().last().map(|server| server.number), Some(1), "b leaves");
    link.forget_left(|_| false);
    let after = link.roster();
    let names = |link: &ServerLink| link.roster().iter().map(|it| (it.number, it.token)).collect::<Vec<_>>();
    let named = names(&link);
    assert_eq!((&after[0].token, &after[2].token), (&before[2].token, &before[0].token));
    assert!(before.iter().all(|server| server.token != after[1].token));
    let leaving = link.known(ServerNumber(3)).unwrap().endpoint.clone();
    link.replace(&vec![leaving].into()).unwrap();
    link.replace(&endpoints(&["c", "new", "a"]).into()).unwrap();
    assert_eq!(names(&link), named, "those that were leaving stay when they are named again");
    link.forget_left(|_| panic!("nobody leaves"));
    link.replace(&endpoints(&["b"]).into()).unwrap();
    assert_eq!(link.roster().len(), 4);
    link.forget_left(|number| number == ServerNumber(2));
    assert_eq!(link.roster().iter().map(|server| server.number).collect::<Vec<_>>(), [4, 2]);
    link.forget_left(|_| false);
    assert_eq!(servers(&link), listed(&[("b", 4)]), "a number is never used again: an old pool could be taken for its");
    assert_ne!(link.roster()[0].token, before[1].token);
    assert!(link.replace(&endpoints(&["a", "a"]).into()).is_err());
    assert_eq!(servers(&link), listed(&[("b", 4)]));
}

/// The index that came with it describes a pool on another host by the server's number.
#[test]
fn a_local_server_has_another_number_than_that_of_the_process_before_a_migration() {
    let server = |number, endpoint: &str| peer::Server { number, endpoint: endpoint.into(), token: [7; 16], epoch: 3 };
    let roster = [server(4, "local:/l"), server(2, "unix:/nowhere/a")];
    let here = Endpoints { listed: endpoints(&["a", "b"]), local: Some("local:/l".parse().unwrap()) };
    let link = ServerLink::resume(Arc::new(HostNetwork), &here, &roster).unwrap();
    assert_eq!(servers(&link), [("a".to_owned(), 2), ("b".to_owned(), 5), ("local:/l".to_owned(), 6)]);
    let known = link.roster();
    assert_eq!(
        (known[2].token, known[2].epoch),
        ([7; 16], 3),
        "if both are on one host, the new pool replaces the other"
    );
}

/// A network in which every server answers at once.
#[derive(Clone, Default)]
struct QuietNetwork {
    /// The other ends of all connections.
    servers: Arc<Mutex<Vec<OwnedFd>>>,
    /// What connections were left with.
    goodbyes: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Network for QuietNetwork {
    fn token(&self) -> io::Result<Token> {
        Ok(Token([1; 16]))
    }

    fn connect(&self, _: Endpoint, _: Token, _: u64, answer: AnswerTo) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        self.servers.lock().unwrap().push(theirs);
        let [npages, available, quota] = [PageCount(0), PageCount(8), PageCount(8)];
        let (server_id, pool_generation) = (ServerId([1; 16]), PoolGeneration(1));
        let sends_received = SendCount(0);
        let version = VERSION;
        let welcome = Welcome { version, server_id, pool_generation, npages, available, quota, sends_received };
        answer.give(Ok(Connected { socket: ours, welcome, memory: None }));
    }

    fn say_goodbye(&self, _: OwnedFd, left: Vec<u8>) {
        self.goodbyes.lock().unwrap().push(left);
    }
}

/// Returns the pages of a stream and whether it ends with a BYE.
fn pages_and_bye(mut stream: &[u8]) -> (usize, bool) {
    let (mut pages, mut is_over) = (0, false);
    while let Some((frame, length)) = decode(stream).unwrap() {
        assert!(!is_over, "nothing follows a BYE");
        match frame {
            Frame::SendPage { .. } => pages += 1,
            Frame::Bye => is_over = true,
            other => panic!("{other:?} was not sent"),
        }
        stream = &stream[length..];
    }
    assert!(stream.is_empty(), "a part of a frame");
    (pages, is_over)
}

/// Returns a link to these servers, each of which has answered and waits.
fn asked(network: &QuietNetwork, names: &[&str]) -> ServerLink {
    let mut link = ServerLink::start(Arc::new(network.clone()), &endpoints(names).into(), None).unwrap();
    let numbers: Vec<_> = link.servers().iter().map(|server| server.number).collect();
    for server in numbers {
        link.ask(server);
        assert!(
            matches!(link.take_news(Instant::now()), Some((answered, News::Answer(Some(_)))) if answered == server)
        );
    }
    link
}

/// Returns the servers of the sessions, as the driver walks them.
fn sessions(link: &ServerLink) -> Vec<ServerNumber> {
    std::iter::successors(link.next_session(None), |server| link.next_session(Some(*server))).collect()
}

/// A server that hears no BYE keeps the pool's memory until its grace time is over.
#[test]
fn a_server_whose_pool_is_not_needed_any_more_is_told() {
    let network = QuietNetwork::default();
    let mut link = asked(&network, &["a", "b", "c"]);
    let [a, b, c] = [0, 1, 2].map(ServerNumber);
    assert!(!link.begin(ServerNumber(3)), "nobody has asked it");
    assert!(link.begin(b));
    assert_eq!((sessions(&link), link.current().map(|server| server.number)), (vec![b], Some(b)));
    let goodbyes = || std::mem::take(&mut *network.goodbyes.lock().unwrap());
    let told = || goodbyes().iter().map(|left| pages_and_bye(left)).collect::<Vec<_>>();
    link.release(a);
    link.release(a);
    assert_eq!(told(), [(0, true)], "once");

    for slot in 0..5 {
        link.session_mut(b).unwrap().send_page(SlotIndex(slot), &[0; PAGE_SIZE]);
    }
    link.leave(b);
    assert_eq!(told(), [(5, true)], "what was queued goes before it");
    assert!(!link.has_session(b) && link.session_mut(b).is_none());
    link.leave(b);
    assert_eq!(told(), []);

    // One that is lost may be found again, with the pool.
    assert!(link.begin(c));
    link.end(c, "it does not answer");
    assert_eq!((told(), sessions(&link)), (vec![], vec![]));
    assert!(link.current().unwrap().error().unwrap().contains("does not answer"));
}

/// A server may be asked twice, and its pool is that of the session.
#[test]
fn a_second_connection_to_a_server_with_a_session_goes_without_a_word() {
    let network = QuietNetwork::default();
    let mut link = asked(&network, &["a"]);
    let a = ServerNumber(0);
    assert!(link.begin(a));
    link.ask(a);
    assert!(matches!(link.take_news(Instant::now()), Some((_, News::Answer(Some(_))))));
    link.release(a);
    assert!(network.goodbyes.lock().unwrap().is_empty() && link.has_session(a));
    let closed = rustix::io::read(&network.servers.lock().unwrap()[1], &mut [0; 1]);
    assert_eq!(closed, Ok(0), "it is closed");
}

/// Returns the slots of the pages that a server was sent, and of those that it was asked for.
fn received(server: &OwnedFd) -> (Vec<u32>, Vec<u32>) {
    let mut bytes = vec![0; 1 << 16];
    let count = match rustix::io::read(server, &mut bytes) {
        Ok(count) => count,
        Err(rustix::io::Errno::AGAIN) => 0,
        Err(error) => panic!("{error}"),
    };
    let (mut sent, mut requested, mut stream) = (Vec::new(), Vec::new(), &bytes[..count]);
    while let Some((frame, length)) = decode(stream).unwrap() {
        match frame {
            Frame::SendPage { slot, .. } => sent.push(slot.0),
            Frame::Request { slot, .. } => requested.push(slot.0),
            other => panic!("{other:?} was not queued"),
        }
        stream = &stream[length..];
    }
    (sent, requested)
}

#[test]
fn two_sessions_send_and_receive_apart_and_end_apart() {
    let network = QuietNetwork::default();
    let mut link = asked(&network, &["a", "b", "c"]);
    let [a, b, c] = [0, 1, 2].map(ServerNumber);
    // The order in which they begin does not matter to the walk.
    assert!(link.begin(b) && link.begin(a));
    assert_eq!(sessions(&link), [a, b]);
    assert_eq!(link.current().unwrap().number, a, "it began last");

    for (server, slots) in [(a, 0..2), (b, 5..8)] {
        let session = link.session_mut(server).unwrap();
        slots.clone().for_each(|slot| assert_eq!(session.send_page(SlotIndex(slot), &[1; PAGE_SIZE]), 0));
        let request = Frame::Request { request: RequestId(slots.start), slot: SlotIndex(slots.end) };
        request.encode(session.begin_fetch(SlotIndex(slots.end)).unwrap());
    }
    let flushed: Vec<_> =
        sessions(&link).into_iter().map(|server| link.session_mut(server).unwrap().flush().unwrap()).collect();
    assert_eq!(flushed, [2, 3]);
    {
        let servers = network.servers.lock().unwrap();
        let at = |server: ServerNumber| received(&servers[server.0 as usize]);
        assert_eq!(at(a), (vec![0, 1], vec![2]));
        assert_eq!(at(b), (vec![5, 6, 7], vec![8]));
        assert_eq!(at(c), (vec![], vec![]), "it has no session");
        let mut answer = Vec::new();
        Frame::SendPage { request: RequestId(5), slot: SlotIndex(5), page: &[1; PAGE_SIZE] }.encode(&mut answer);
        let size = Frame::Sized { request: RequestId(0), npages: PageCount(9), available: PageCount(0) };
        size.encode(&mut answer);
        rustix::io::write(&servers[1], &answer).unwrap();
    }
    let mut heard = [0, 0];
    for (server, heard) in [a, b].into_iter().zip(&mut heard) {
        link.session_mut(server).unwrap().receive(|_| *heard += 1).unwrap();
    }
    assert_eq!(heard, [0, 2]);
    let traffic: Vec<_> = link.sessions().iter().map(|session| (session.granted().0, session.traffic())).collect();
    assert_eq!(traffic[0], (0, Traffic { sent: 2, requested: 1, ..Traffic::default() }));
    assert_eq!(traffic[1], (9, Traffic { sent: 3, requested: 1, received: 1, taken_back: 0 }));

    // One that is lost between two steps of the walk leaves the others their turns.
    link.end(a, "its cable");
    assert_eq!((link.next_session(Some(a)), sessions(&link)), (Some(b), vec![b]));
    assert_eq!(link.current().unwrap().number, b, "the one that began last is lost");
    assert!(link.session_mut(b).unwrap().flush().is_ok());
    assert!(link.begin(c));
    assert_eq!(sessions(&link), [b, c]);
    let lost = &link.servers()[0];
    assert!(lost.error().unwrap().contains("its cable") && link.servers()[1].error().is_none());
}

#[test]
fn there_are_as_many_sessions_as_pools() {
    let names: Vec<String> = (0..remoca_core::units::POOLS_MAX).map(|name| name.to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut link = asked(&QuietNetwork::default(), &names);
    link.servers().iter().map(|server| server.number).collect::<Vec<_>>().into_iter().for_each(|server| {
        assert!(link.begin(server));
    });
    link.replace(&endpoints(&["one more"]).into()).unwrap();
    let more = link.servers()[0].number;
    link.ask(more);
    link.take_news(Instant::now()).unwrap();
    assert!(!link.begin(more));
    link.leave(ServerNumber(0));
    assert!(link.begin(more), "it still waits");
}

/// Returns the header of an empty state file.
fn header() -> Arc<Header> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(Header::bytes(1)).unwrap();
    Arc::new(Header::map(&file, 1).unwrap())
}

/// Returns number and epoch of each server in a header, and whether it leaves.
fn kept(header: &Header) -> Vec<(u32, u64, bool)> {
    header.roster().iter().map(|entry| (entry.number.0, entry.epoch, entry.leaves)).collect()
}

/// A server refuses an epoch that was used before.
#[test]
fn a_successor_goes_on_with_numbers_and_epochs() {
    let (network, header, b) = (QuietNetwork::default(), header(), ServerNumber(1));
    let start = |names: &[&str]| {
        let header = Some(Arc::clone(&header));
        ServerLink::start(Arc::new(network.clone()), &endpoints(names).into(), header).unwrap()
    };
    let mut link = start(&["a", "b"]);
    (0..2).for_each(|_| link.ask(b));
    assert_eq!(kept(&header), [(0, 0, false), (1, 2, false)]);
    drop(link);
    let mut link = start(&["b", "c"]);
    assert_eq!(servers(&link), listed(&[("b", 1), ("c", 2)]));
    link.ask(b);
    assert_eq!(kept(&header), [(1, 3, false), (2, 0, false), (0, 0, true)]);
    link.replace(&endpoints(&["b"]).into()).unwrap();
    link.forget_left(|_| false);
    assert_eq!(kept(&header), [(1, 3, false)]);
    drop(link);
    assert_eq!(servers(&start(&["d"])), listed(&[("d", 3)]), "no number is used again");
}

#[test]
fn numbers_and_epochs_of_another_process_are_believed_within_limits() {
    let server = |number, name: &str, epoch| peer::Server {
        number,
        endpoint: format!("unix:/nowhere/{name}"),
        token: [7; 16],
        epoch,
    };
    for (roster, expected) in [
        (vec![server(NUMBER_MAX + 1, "a", 3)], [(0, 0), (1, 0)]),
        (vec![server(NUMBER_MAX, "a", u64::MAX)], [(NUMBER_MAX, u64::MAX / 2), (NUMBER_MAX + 1, 0)]),
        (vec![server(4, "a", 3), server(4, "b", 3)], [(4, 3), (5, 0)]),
    ] {
        let link = ServerLink::resume(Arc::new(HostNetwork), &endpoints(&["a", "b"]).into(), &roster).unwrap();
        assert_eq!(link.roster().iter().map(|it| (it.number, it.epoch)).collect::<Vec<_>>(), expected);
    }
}

/// Nobody else would tell it, and it would keep the memory until its grace time is over.
#[test]
fn a_server_that_is_forgotten_is_told_unless_it_knows_or_was_never_asked() {
    let network = QuietNetwork::default();
    let mut link = asked(&network, &["told", "lost", "left"]);
    let [told, lost, left] = [0, 1, 2].map(ServerNumber);
    link.release(told);
    assert!(link.begin(lost) && link.begin(left));
    link.leave(left);
    link.end(lost, "it does not answer");
    network.goodbyes.lock().unwrap().clear();
    let connections = || network.servers.lock().unwrap().len();
    let before = connections();
    link.replace(&endpoints(&["new"]).into()).unwrap();
    link.forget_left(|_| false);
    assert_eq!(connections(), before + 1);
    assert!(link.take_news(Instant::now()).is_none(), "nobody asked");
    let goodbyes: Vec<_> = network.goodbyes.lock().unwrap().iter().map(|left| pages_and_bye(left)).collect();
    assert_eq!(goodbyes, [(0, true)]);

    link.replace(&endpoints(&["newer"]).into()).unwrap();
    link.forget_left(|_| false);
    assert_eq!(connections(), before + 1, "it was never asked");
    // One that was told, and asked again since.
    let newer = link.servers()[0].number;
    link.ask(newer);
    link.take_news(Instant::now()).unwrap();
    link.release(newer);
    link.ask(newer);
    link.replace(&endpoints(&["newest"]).into()).unwrap();
    link.forget_left(|_| false);
    assert_eq!(connections(), before + 4);
}

/// The engine knows it still, and gives the connection up.
#[test]
fn the_answer_of_a_server_that_was_forgotten_is_passed_on() {
    let (network, a) = (QuietNetwork::default(), ServerNumber(0));
    let mut link = ServerLink::start(Arc::new(network.clone()), &endpoints(&["a"]).into(), None).unwrap();
    link.ask(a);
    link.replace(&endpoints(&["b"]).into()).unwrap();
    link.forget_left(|_| false);
    assert!(matches!(link.take_news(Instant::now()), Some((ServerNumber(0), News::Answer(Some(_))))));
    assert!(network.goodbyes.lock().unwrap().is_empty());
    link.release(a);
    assert!(link.take_news(Instant::now()).is_none());
    let goodbyes: Vec<_> = network.goodbyes.lock().unwrap().iter().map(|left| pages_and_bye(left)).collect();
    assert_eq!(goodbyes, [(0, true); 2], "this connection, and the one that gives the pool back");
}

#[test]
fn at_the_end_each_server_hears_a_goodbye_after_its_pages() {
    let network = QuietNetwork::default();
    let mut link = asked(&network, &["a", "b"]);
    let [a, b] = [0, 1].map(ServerNumber);
    assert!(link.begin(a) && link.begin(b));
    link.session_mut(b).unwrap().send_page(SlotIndex(0), &[0; PAGE_SIZE]);
    link.goodbye();
    let heard = |server: &OwnedFd| {
        let mut bytes = vec![0; 1 << 16];
        let count = rustix::io::read(server, &mut bytes).unwrap();
        pages_and_bye(&bytes[..count])
    };
    let heard: Vec<_> = network.servers.lock().unwrap().iter().map(heard).collect();
    assert_eq!(heard, [(0, true), (1, true)]);
}
