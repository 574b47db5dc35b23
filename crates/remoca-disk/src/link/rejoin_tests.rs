//! Mapped sessions over a network of one server, which goes away and comes back.

use super::super::away::BACKOFF_MAX;
use super::super::connect::{AnswerTo, LinkError, Network};
use super::super::mapped::OWN_REQUEST;
use super::super::memory::tests::memory;
use super::super::session::{PageHere, Received};
use super::*;
use remoca_core::units::{PAGE_SIZE, SlotIndex};
use remoca_protocol::{ErrorCode, Frame, PoolGeneration, SendCount, ServerId, Token, Welcome, decode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SERVER: ServerNumber = ServerNumber(0);

/// The server, as the link sees it.
struct Server {
    /// Memory, generation and size of its pool.
    pool: (OwnedFd, u64, u32),
    is_away: bool,
    /// Whether it refuses those that say hello.
    refuses: bool,
    /// The other end of the last connection, and its epoch.
    socket: Option<(OwnedFd, u64)>,
}

#[derive(Clone)]
struct LocalNetwork(Arc<Mutex<Server>>);

impl LocalNetwork {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Server { pool: (memory(8), 1, 4), is_away: false, refuses: false, socket: None })))
    }

    /// Returns a link to the server, with a session.
    fn link(&self) -> ServerLink {
        let endpoints = ["local:/nowhere".parse().unwrap()];
        let mut link = ServerLink::start(Arc::new(self.clone()), &endpoints.to_vec().into(), None).unwrap();
        link.ask(SERVER);
        assert!(matches!(link.take_news(Instant::now()), Some((SERVER, News::Answer(Some(_))))));
        assert!(link.begin(SERVER));
        link
    }

    /// Returns the sizes that the client asked for since the last call.
    fn asked(&self) -> Vec<u32> {
        let mut bytes = vec![0; 4096];
        let server = self.0.lock().unwrap();
        let count = match rustix::io::read(&server.socket.as_ref().unwrap().0, &mut bytes) {
            Err(rustix::io::Errno::AGAIN) => 0,
            count => count.unwrap(),
        };
        let (mut sizes, mut stream) = (Vec::new(), &bytes[..count]);
        while let Some((frame, length)) = decode(stream).unwrap() {
            let Frame::SetSize { npages, .. } = frame else { panic!("{frame:?} on a mapped session") };
            sizes.push(npages.0);
            stream = &stream[length..];
        }
        sizes
    }

    fn say(&self, frame: &Frame<'_>) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        rustix::io::write(&self.0.lock().unwrap().socket.as_ref().unwrap().0, &bytes).unwrap();
    }

    fn go_away(&self) {
        let mut server = self.0.lock().unwrap();
        (server.is_away, server.socket) = (true, None);
    }

    /// Returns with the same pool, of this size.
    fn come_back(&self, npages: u32) {
        let mut server = self.0.lock().unwrap();
        server.is_away = false;
        server.pool.2 = npages;
    }

    /// Gives the pool another generation, or other memory.
    fn replace_pool(&self, generation: u64, keeps_memory: bool) {
        let pool = &mut self.0.lock().unwrap().pool;
        pool.1 = generation;
        if !keeps_memory {
            pool.0 = memory(8);
        }
    }
}

impl Network for LocalNetwork {
    fn token(&self) -> io::Result<Token> {
        Ok(Token([1; 16]))
    }

    fn connect(&self, endpoint: Endpoint, _: Token, epoch: u64, answer: AnswerTo) {
        let mut server = self.0.lock().unwrap();
        if server.refuses {
            return answer.give(Err(LinkError::Refused(endpoint, ErrorCode::Busy)));
        }
        if server.is_away {
            let error = io::ErrorKind::ConnectionRefused.into();
            return answer.give(Err(LinkError::Unreachable(endpoint, error)));
        }
        assert!(server.socket.as_ref().is_none_or(|(_, before)| *before < epoch));
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        server.socket = Some((theirs, epoch));
        let (memory, generation, npages) = &server.pool;
        let memory = PoolMemory::take(memory.try_clone().unwrap(), answer.owned, Duration::ZERO);
        let memory = memory.map_err(|error| LinkError::Memory(endpoint, error));
        let welcome = Welcome {
            version: remoca_protocol::MAPPED_VERSION,
            server_id: ServerId([1; 16]),
            pool_generation: PoolGeneration(*generation),
            npages: PageCount(*npages),
            available: PageCount(4),
            quota: PageCount(8),
            sends_received: SendCount(0),
        };
        answer.give(memory.map(|memory| Connected { socket, welcome, memory: Some(memory) }));
    }

    fn say_goodbye(&self, _: OwnedFd, _: Vec<u8>) {}
}

fn write(link: &mut ServerLink, slot: u32) {
    let page = [u8::try_from(slot).unwrap() + 1; PAGE_SIZE];
    assert_eq!(link.session_mut(SERVER).unwrap().send_page(SlotIndex(slot), &page), 1, "it is there at once");
}

/// Returns the first byte of the page of a slot, or `None` if the page is not there.
fn read(link: &mut ServerLink, slot: u32) -> Option<u8> {
    let session = link.session_mut(SERVER).unwrap();
    assert!(session.begin_fetch(SlotIndex(slot)).is_none(), "a page of a mapped pool is not asked for");
    session.read(SlotIndex(slot)).map(|page| match page {
        PageHere::Mapped(page) => page[0],
        PageHere::Unsent(_) => panic!("a page of a mapped pool does not wait"),
    })
}

/// The connection is lost. Returns the answer to an outstanding SETSIZE.
fn lose(link: &mut ServerLink, network: &LocalNetwork) -> Option<Size> {
    network.go_away();
    let session = link.session_mut(SERVER).unwrap();
    assert!(session.receive(|_| {}).is_err() && session.outlives_connection());
    link.detach(SERVER, "it is gone")
}

fn size(link: &mut ServerLink, npages: u32) -> Size {
    link.session_mut(SERVER).unwrap().set_size(PageCount(npages))
}

#[test]
fn a_pool_is_in_use_while_its_server_is_away() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    (0..4).for_each(|slot| write(&mut link, slot));
    assert_eq!(lose(&mut link, &network), None);
    write(&mut link, 0);
    link.session_mut(SERVER).unwrap().move_page(SlotIndex(3), SlotIndex(1));
    assert_eq!([0, 1, 2].map(|slot| read(&mut link, slot)), [Some(1), Some(4), Some(3)]);
    assert_eq!(link.session_mut(SERVER).unwrap().flush().unwrap(), 0);
    assert_eq!([5, 2].map(|npages| size(&mut link, npages)), [Size::Refused, Size::Granted(PageCount(2))]);
    assert_eq!([1, 2].map(|slot| read(&mut link, slot)), [Some(4), None]);

    // It is asked again and again, each time after a longer pause.
    let mut now = Instant::now();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let due = link.next_deadline(now).unwrap();
        pauses.push(due - now);
        now = due;
        assert_eq!(link.run_timers(now), None);
        assert_eq!(link.next_deadline(now), None, "one attempt at a time");
        assert!(link.take_news(now).is_none(), "nobody hears of attempts in vain");
    }
    assert!(pauses[0].is_zero() && pauses[1..].is_sorted() && pauses[7] == BACKOFF_MAX, "{pauses:?}");

    network.come_back(4);
    now = link.next_deadline(now).unwrap();
    assert_eq!(link.run_timers(now), None);
    assert!(matches!(link.take_news(now), Some((SERVER, News::Rejoined))));
    assert_eq!((link.next_deadline(now), link.begin(SERVER)), (None, false));
    link.session_mut(SERVER).unwrap().flush().unwrap();
    assert_eq!(network.asked(), [2], "it hears what was given up");
    assert_eq!(read(&mut link, 1), Some(4));
    assert_eq!(size(&mut link, 3), Size::Asked);
}

/// To the pool, a server that refuses is as one that is gone. To the operator it is not.
#[test]
fn it_is_known_why_a_server_that_is_away_does_not_come_back() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    assert_eq!(lose(&mut link, &network), None);
    let mut now = Instant::now();
    for (refuses, why) in [(false, "cannot be reached"), (true, "as many clients as it takes")] {
        network.0.lock().unwrap().refuses = refuses;
        now = link.next_deadline(now).unwrap();
        assert_eq!(link.run_timers(now), None);
        assert!(link.take_news(now).is_none());
        let error = link.known(SERVER).unwrap().error().expect("it is not back");
        assert!(error.contains(why), "{error}");
    }
    network.0.lock().unwrap().refuses = false;
    network.come_back(4);
    now = link.next_deadline(now).unwrap();
    assert_eq!(link.run_timers(now), None);
    assert!(matches!(link.take_news(now), Some((SERVER, News::Rejoined))));
    assert_eq!(link.known(SERVER).unwrap().error(), None);
}

#[test]
fn a_size_that_a_lost_server_was_asked_for_has_an_answer() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    (0..4).for_each(|slot| write(&mut link, slot));
    assert_eq!((size(&mut link, 2), read(&mut link, 2)), (Size::Asked, None));
    assert_eq!(lose(&mut link, &network), Some(Size::Granted(PageCount(2))));
    assert_eq!([1, 2].map(|slot| read(&mut link, slot)), [Some(2), None]);

    let network = LocalNetwork::new();
    let mut link = network.link();
    write(&mut link, 3);
    assert_eq!(size(&mut link, 6), Size::Asked);
    assert_eq!(lose(&mut link, &network), Some(Size::Refused));
    write(&mut link, 4);
    assert_eq!([3, 4].map(|slot| read(&mut link, slot)), [Some(4), None]);

    // Of two sizes the last one counts, and nothing was given up for the first.
    let network = LocalNetwork::new();
    let mut link = network.link();
    write(&mut link, 3);
    assert_eq!([2, 6].map(|npages| size(&mut link, npages)), [Size::Asked; 2]);
    assert_eq!(lose(&mut link, &network), Some(Size::Refused));
    assert_eq!(read(&mut link, 3), Some(4));
}

#[test]
fn a_server_that_owes_a_size_for_too_long_counts_as_away() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    let now = Instant::now();
    assert_eq!((link.next_deadline(now), link.run_timers(now)), (None, None));
    assert_eq!(size(&mut link, 6), Size::Asked);
    assert_eq!((link.next_deadline(now), link.run_timers(now)), (Some(now), None));
    let overdue = link.next_deadline(now).unwrap();
    assert!(
        overdue > now + Duration::from_secs(1) && overdue < now + Duration::from_secs(10),
        "before the engine gives up"
    );
    assert_eq!((link.run_timers(now), link.run_timers(overdue)), (None, Some(SERVER)));
    assert_eq!(link.detach(SERVER, "it does not answer"), Some(Size::Refused));
    // It did what it was asked for and did not say so. What nobody knows of goes back; the engine will ask again.
    network.come_back(6);
    assert_eq!(link.run_timers(overdue), None);
    assert!(matches!(link.take_news(overdue), Some((SERVER, News::Rejoined))));
    link.session_mut(SERVER).unwrap().flush().unwrap();
    assert_eq!(network.asked(), [4]);
    assert_eq!((link.sessions()[0].granted().0, link.next_deadline(overdue)), (4, None));
}

#[test]
fn a_server_that_comes_back_with_less_or_another_pool_ends_the_session() {
    let without = "without the pool";
    for (npages, generation, keeps_memory, words) in
        [(3, 1, true, "took memory back"), (4, 2, false, without), (4, 2, true, without), (4, 1, false, without)]
    {
        let network = LocalNetwork::new();
        let mut link = network.link();
        write(&mut link, 0);
        lose(&mut link, &network);
        network.replace_pool(generation, keeps_memory);
        network.come_back(npages);
        let now = link.next_deadline(Instant::now()).unwrap();
        assert_eq!(link.run_timers(now), None);
        let Some((SERVER, News::Over(why))) = link.take_news(now) else { panic!("it goes on") };
        assert!(why.contains(words), "{why}");
        link.end(SERVER, &why);
        assert_eq!(link.next_deadline(now), None);
        // As the engine does.
        link.ask(SERVER);
        let Some((SERVER, News::Answer(Some(welcome)))) = link.take_news(now) else { panic!("it has answered") };
        assert_eq!((welcome.npages.0, welcome.sends_received.0), (npages, 1));
        assert!(link.begin(SERVER));
        assert_eq!(read(&mut link, 0), keeps_memory.then_some(1));
    }
}

#[test]
fn memory_that_is_taken_back_is_given_at_once() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    (0..4).for_each(|slot| write(&mut link, slot));
    network.say(&Frame::TakeBack { npages: PageCount(2) });
    let session = link.session_mut(SERVER).unwrap();
    let mut heard = 0;
    let taken = session.receive(|frame| heard += u32::from(matches!(frame, Frame::TakeBack { .. }))).unwrap();
    assert_eq!((taken, heard), (Received::Drained, 1), "the engine hears of it");
    assert_eq!([1, 2].map(|slot| read(&mut link, slot)), [Some(2), None]);
    link.session_mut(SERVER).unwrap().flush().unwrap();
    assert_eq!(network.asked(), [2]);
    network.say(&Frame::Sized { request: OWN_REQUEST, npages: PageCount(2), available: PageCount(0) });
    let session = link.session_mut(SERVER).unwrap();
    session.receive(|_| panic!("the engine did not ask")).unwrap();
    assert_eq!((session.traffic().taken_back, session.granted()), (1, PageCount(2)));
    assert!(session.flush().is_ok() && session.outlives_connection(), "the session goes on");
    assert_eq!([1, 2].map(|slot| read(&mut link, slot)), [Some(2), None]);
}

#[test]
fn a_server_that_is_lost_while_it_takes_memory_back_hears_of_it_when_it_is_back() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    (0..4).for_each(|slot| write(&mut link, slot));
    network.say(&Frame::TakeBack { npages: PageCount(2) });
    link.session_mut(SERVER).unwrap().receive(|_| {}).unwrap();
    lose(&mut link, &network);
    // It was killed before it had the answer.
    network.come_back(4);
    let now = link.next_deadline(Instant::now()).unwrap();
    assert_eq!(link.run_timers(now), None);
    let Some((SERVER, News::Rejoined)) = link.take_news(now) else { panic!("it goes on") };
    link.session_mut(SERVER).unwrap().flush().unwrap();
    assert_eq!(network.asked(), [2]);
    assert_eq!([1, 2].map(|slot| read(&mut link, slot)), [Some(2), None]);
}

/// The next program of the process has the memory and no connection.
#[test]
fn a_pool_that_was_passed_on_is_used_while_its_server_is_away() {
    for is_away in [true, false] {
        let network = LocalNetwork::new();
        let mut former = network.link();
        write(&mut former, 2);
        let passed: Vec<_> = former
            .mapped_pools()
            .map(|(server, memory, generation, granted)| {
                let memory = rustix::io::fcntl_dupfd_cloexec(memory, 0).unwrap();
                (server.to_string(), KeptPool::new(PoolMemory::adopt(memory).unwrap(), generation, granted))
            })
            .collect();
        assert_eq!(passed.len(), 1);
        drop(former);
        network.0.lock().unwrap().is_away = is_away;
        let endpoints = ["local:/nowhere".parse().unwrap()];
        network.0.lock().unwrap().socket = None;
        let mut link = ServerLink::start(Arc::new(network.clone()), &endpoints.to_vec().into(), None).unwrap();
        link.keep_pools(passed);
        assert_eq!(link.mapped_pools().count(), 1, "it could be passed on again");
        link.ask(SERVER);
        let Some((SERVER, News::Answer(Some(welcome)))) = link.take_news(Instant::now()) else { panic!("an offer") };
        assert_eq!((welcome.pool_generation.0, welcome.npages.0), (1, 4));
        assert!(link.begin(SERVER));
        assert_eq!(read(&mut link, 2), Some(3));
        assert_eq!(link.sessions()[0].socket_fd().is_none(), is_away);
        assert_eq!(link.next_deadline(Instant::now()).is_some(), is_away);
    }
}

/// What was left of a frame would be taken for the start of the first one of the new connection.
#[test]
fn a_new_connection_begins_with_a_whole_frame() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    let mut bytes = Vec::new();
    Frame::TakeBack { npages: PageCount(1) }.encode(&mut bytes);
    rustix::io::write(&network.0.lock().unwrap().socket.as_ref().unwrap().0, &bytes[..7]).unwrap();
    link.session_mut(SERVER).unwrap().receive(|_| panic!("this is no frame")).unwrap();
    lose(&mut link, &network);
    network.come_back(4);
    let now = link.next_deadline(Instant::now()).unwrap();
    assert_eq!(link.run_timers(now), None);
    assert!(matches!(link.take_news(now), Some((SERVER, News::Rejoined))));
    network.say(&Frame::TakeBack { npages: PageCount(2) });
    let mut heard = Vec::new();
    let received = link.session_mut(SERVER).unwrap().receive(|frame| {
        if let Frame::TakeBack { npages } = frame {
            heard.push(npages.0);
        }
    });
    assert_eq!(received.unwrap(), Received::Drained);
    assert_eq!(heard, [2]);
}

/// The lock on its memory went with the session.
#[test]
fn the_answer_to_a_session_that_has_ended_is_none() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    write(&mut link, 0);
    link.ask(SERVER);
    link.end(SERVER, "it is over");
    assert!(matches!(link.take_news(Instant::now()), Some((SERVER, News::Answer(None)))));
    assert!(!link.begin(SERVER));
    link.ask(SERVER);
    assert!(matches!(link.take_news(Instant::now()), Some((SERVER, News::Answer(Some(_))))));
    assert!(link.begin(SERVER));
    assert_eq!(read(&mut link, 0), Some(1));
}

/// The answer was on its way when the server took memory back.
#[test]
fn a_larger_size_is_worth_no_more_than_what_is_taken_back() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    write(&mut link, 3);
    assert_eq!(size(&mut link, 6), Size::Asked);
    network.say(&Frame::TakeBack { npages: PageCount(2) });
    let request = remoca_protocol::RequestId(0);
    network.say(&Frame::Sized { request, npages: PageCount(6), available: PageCount(0) });
    let session = link.session_mut(SERVER).unwrap();
    session.receive(|_| {}).unwrap();
    assert_eq!(session.granted(), PageCount(2));
    assert_eq!(read(&mut link, 3), None);
}

#[test]
fn a_session_that_cannot_use_its_memory_says_why_at_the_end_of_the_turn() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    let session = link.session_mut(SERVER).unwrap();
    ["its memory", "what came of that"].into_iter().for_each(|why| session.end(why));
    assert_eq!(session.flush().unwrap_err().to_string(), "its memory");
    assert!(!session.outlives_connection());
}

/// A page that a successor does not count is given up.
#[test]
fn the_state_file_says_how_many_pages_were_written() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(Header::bytes(1)).unwrap();
    let header = Arc::new(Header::map(&file, 1).unwrap());
    let (network, endpoint) = (LocalNetwork::new(), "local:/nowhere".parse::<Endpoint>().unwrap());
    let sends = || header.roster()[0].sends;
    let start = || {
        let (network, header) = (Arc::new(network.clone()), Some(Arc::clone(&header)));
        let mut link = ServerLink::start(network, &vec![endpoint.clone()].into(), header).unwrap();
        link.ask(SERVER);
        let Some((SERVER, News::Answer(Some(welcome)))) = link.take_news(Instant::now()) else { panic!("no answer") };
        assert!(link.begin(SERVER));
        (link, welcome.sends_received.0)
    };
    let (mut link, counted) = start();
    (0..3).for_each(|slot| write(&mut link, slot));
    assert_eq!((counted, sends()), (0, 0));
    link.keep_sends_of(SERVER);
    assert_eq!(sends(), 3);
    write(&mut link, 3);
    link.end(SERVER, "it is over");
    assert_eq!(sends(), 4);
    drop(link);
    assert_eq!(start().1, 4);
}

/// Its socket takes little, and what it does not read would wait here.
#[test]
fn a_server_that_takes_memory_back_without_end_and_reads_nothing_loses_its_connection() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    write(&mut link, 0);
    for count in 0.. {
        assert!(count < 50_000, "all of its answers are kept");
        network.say(&Frame::TakeBack { npages: PageCount(2) });
        let session = link.session_mut(SERVER).unwrap();
        if let Err(error) = session.receive(|_| {}) {
            assert!(error.to_string().contains("reads no answers"), "{error}");
            break;
        }
        session.flush().unwrap();
    }
    assert!(link.session_mut(SERVER).unwrap().outlives_connection());
    assert_eq!(read(&mut link, 0), Some(1));
}

/// Each attempt is a thread, and two lines in the log.
#[test]
fn a_server_that_comes_back_and_hangs_up_again_and_again_is_not_stormed() {
    let network = LocalNetwork::new();
    let mut link = network.link();
    let mut now = Instant::now();
    let mut pause = |link: &mut ServerLink, lasted: Duration| {
        now += lasted;
        lose(link, &network);
        network.come_back(4);
        let due = link.next_deadline(now).unwrap().max(now);
        let pause = due - now;
        now = due;
        assert_eq!(link.run_timers(now), None);
        assert!(matches!(link.take_news(now), Some((SERVER, News::Rejoined))));
        assert_eq!(link.next_deadline(now), None);
        pause
    };
    let pauses: Vec<_> = (0..9).map(|_| pause(&mut link, Duration::ZERO)).collect();
    assert!(pauses[0].is_zero() && pauses[1] > Duration::ZERO, "{pauses:?}");
    assert!(pauses.is_sorted() && pauses[8] == BACKOFF_MAX, "{pauses:?}");
    assert_eq!([60, 0].map(|lasted| pause(&mut link, Duration::from_secs(lasted))), [Duration::ZERO, pauses[1]]);
}
