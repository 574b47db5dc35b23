//! The list of servers, and what a successor finds of it.

use super::*;
use remoca_core::units::{PAGE_SIZE, SlotIndex};
use remoca_protocol::{PoolGeneration, SendCount, ServerId, VERSION, decode};
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
    let mut link = ServerLink::start(Arc::new(HostNetwork), &endpoints(&["a", "b", "c"]), None).unwrap();
    assert_eq!(servers(&link), listed(&[("a", 0), ("b", 1), ("c", 2)]));
    let before = link.roster();
    link.replace(&endpoints(&["c", "new", "a"])).unwrap();
    assert_eq!(servers(&link), listed(&[("c", 2), ("new", 3), ("a", 0)]));
    let after = link.roster();
    assert_eq!((&after[0].token, &after[2].token), (&before[2].token, &before[0].token));
    assert!(before.iter().all(|server| server.token != after[1].token));
    link.replace(&endpoints(&["b"])).unwrap();
    assert_eq!(servers(&link), listed(&[("b", 4)]), "a number is never used again: an old pool could be taken for its");
    assert_ne!(link.roster()[0].token, before[1].token);
    assert!(link.replace(&endpoints(&["a", "a"])).is_err());
    assert_eq!(servers(&link), listed(&[("b", 4)]));
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
        answer.give(Ok((
            ours,
            Welcome { version: VERSION, server_id, pool_generation, npages, available, quota, sends_received },
        )));
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

/// A server that hears no BYE keeps the pool's memory until its grace time is over.
#[test]
fn a_server_whose_pool_is_not_needed_any_more_is_told() {
    let network = QuietNetwork::default();
    let mut link = ServerLink::start(Arc::new(network.clone()), &endpoints(&["a", "b", "c"]), None).unwrap();
    let [a, b, c] = [0, 1, 2].map(ServerNumber);
    for server in [a, b, c] {
        link.ask(server);
        assert!(matches!(link.take_answer(Instant::now()), Some((answered, Some(_))) if answered == server));
    }
    assert!(!link.begin(ServerNumber(3)), "nobody has asked it");
    assert!(link.begin(b) && !link.begin(b));
    assert_eq!((link.session(), link.current().map(|server| server.number)), (Some(b), Some(b)));
    let goodbyes = || std::mem::take(&mut *network.goodbyes.lock().unwrap());
    let told = || goodbyes().iter().map(|left| pages_and_bye(left)).collect::<Vec<_>>();
    link.release(a);
    link.release(a);
    assert_eq!(told(), [(0, true)], "once");

    (0..5).for_each(|slot| link.session_mut().unwrap().send_page(SlotIndex(slot), &[0; PAGE_SIZE]));
    link.leave();
    assert_eq!(told(), [(5, true)], "what was queued goes before it");
    assert!(link.session().is_none() && link.session_mut().is_none());
    link.leave();
    assert_eq!(told(), []);

    // One that is lost may be found again, with the pool.
    assert!(link.begin(c));
    link.end("it does not answer");
    assert_eq!((told(), link.session()), (vec![], None));
    assert!(link.current().unwrap().error().unwrap().contains("does not answer"));
}
