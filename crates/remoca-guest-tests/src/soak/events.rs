//! Events of a soak, and their order.
//!
//! A deck with every event that is possible on a store is dealt in random order, repeatedly. So even a short soak has
//! each of them.

use remoca_lab::workload::pattern::Random;

/// An event that concerns one process or its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    KillDisk,
    /// The VM process is killed, and a service manager keeps the connections of the hypervisor.
    KillDiskKept,
    /// The VM process is killed, and its successor is killed as soon as it serves.
    KillDiskTwice,
    /// The VM process and all memory servers are killed.
    KillAll,
    StopDisk,
    RestartDisk,
    UpgradeDisk,
    /// The VM process is killed during the hand-over to its successor.
    KillInUpgrade,
    ResizeCache,
    SwitchCache,
    ChangeServers,
    /// The local tier becomes larger or smaller, or is given back.
    ResizeLocal,
    KillLocalServer,
    RestartLocalServer,
    StopLocalServer,
    KillServer,
    StopServer,
    RestartServer,
    ResizeServer,
    CutConnections,
    HangConnections,
    DelayConnections,
    KillAgent,
    StopAgent,
    RestartAgent,
    /// A disk is added to the running VM, with one of two images.
    AddDisk,
    /// That disk is removed.
    RemoveDisk,
    /// Its image grows.
    GrowDisk,
    KillStore,
    StopStore,
}

impl Event {
    /// Events possible on every store.
    pub const ALWAYS: [Event; 28] = [
        Event::KillDisk,
        Event::KillDiskKept,
        Event::KillDiskTwice,
        Event::KillAll,
        Event::StopDisk,
        Event::RestartDisk,
        Event::UpgradeDisk,
        Event::KillInUpgrade,
        Event::ResizeCache,
        Event::SwitchCache,
        Event::ChangeServers,
        Event::ResizeLocal,
        Event::KillLocalServer,
        Event::RestartLocalServer,
        Event::StopLocalServer,
        Event::KillServer,
        Event::StopServer,
        Event::RestartServer,
        Event::ResizeServer,
        Event::CutConnections,
        Event::HangConnections,
        Event::DelayConnections,
        Event::KillAgent,
        Event::StopAgent,
        Event::RestartAgent,
        Event::AddDisk,
        Event::RemoveDisk,
        Event::GrowDisk,
    ];

    /// Events possible on a store with a server process of its own.
    pub const OF_STORE: [Event; 2] = [Event::KillStore, Event::StopStore];

    /// Returns the name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Event::KillDisk => "kill_disk",
            Event::KillDiskKept => "kill_disk_connections_kept",
            Event::KillDiskTwice => "kill_disk_twice",
            Event::KillAll => "kill_disk_and_servers",
            Event::StopDisk => "stop_continue_disk",
            Event::RestartDisk => "terminate_start_disk",
            Event::UpgradeDisk => "upgrade_disk",
            Event::KillInUpgrade => "kill_disk_in_upgrade",
            Event::ResizeCache => "resize_cache",
            Event::SwitchCache => "cache_off_on",
            Event::ChangeServers => "change_servers",
            Event::ResizeLocal => "resize_local_tier",
            Event::KillLocalServer => "kill_local_server",
            Event::RestartLocalServer => "terminate_start_local_server",
            Event::StopLocalServer => "stop_continue_local_server",
            Event::KillServer => "kill_server",
            Event::StopServer => "stop_continue_server",
            Event::RestartServer => "terminate_start_server",
            Event::ResizeServer => "resize_server_memory",
            Event::CutConnections => "cut_connections",
            Event::HangConnections => "hang_connections",
            Event::DelayConnections => "delay_connections",
            Event::KillAgent => "kill_agent",
            Event::StopAgent => "stop_continue_agent",
            Event::RestartAgent => "terminate_start_agent",
            Event::AddDisk => "add_disk",
            Event::RemoveDisk => "remove_disk",
            Event::GrowDisk => "grow_image",
            Event::KillStore => "kill_nbd_server",
            Event::StopStore => "stop_continue_nbd_server",
        }
    }

    /// Returns whether the VM process is killed. If so, with an NBD server, its successor waits for the server to settle.
    pub fn kills_disk(self) -> bool {
        matches!(
            self,
            Event::KillDisk | Event::KillDiskKept | Event::KillDiskTwice | Event::KillAll | Event::KillInUpgrade
        )
    }

    /// Returns whether the event has to wait as long as the guest's disk does.
    pub fn needs_the_disk(self) -> bool {
        matches!(
            self,
            Event::KillDiskKept | Event::UpgradeDisk | Event::RestartAgent | Event::AddDisk | Event::RemoveDisk
        )
    }

    /// Returns whether the guest's agent is started, which takes some time.
    pub fn starts_agent(self) -> bool {
        matches!(self, Event::KillAgent | Event::RestartAgent)
    }

    /// Returns whether another VM process serves the disk afterwards.
    pub fn restarts_disk(self) -> bool {
        matches!(
            self,
            Event::KillDisk
                | Event::KillDiskKept
                | Event::KillDiskTwice
                | Event::KillAll
                | Event::RestartDisk
                | Event::UpgradeDisk
                | Event::KillInUpgrade
                | Event::AddDisk
                | Event::RemoveDisk
        )
    }
}

/// Deals events: each once in a round, or later if it is not suitable at the time.
pub struct Deck {
    kinds: Vec<Event>,
    left: Vec<Event>,
    /// Events never dealt so far.
    missing: Vec<Event>,
}

impl Deck {
    pub fn new(kinds: Vec<Event>) -> Deck {
        Deck { left: Vec::new(), missing: kinds.clone(), kinds }
    }

    /// Deals a suitable event; some kind must be suitable. If none of the remaining ones is, the next round is shuffled in.
    pub fn deal(&mut self, random: &mut Random, suits: impl Fn(Event) -> bool) -> Event {
        if !self.left.iter().any(|event| suits(*event)) {
            self.left.extend(&self.kinds);
        }
        let suitable: Vec<usize> = (0..self.left.len()).filter(|at| suits(self.left[*at])).collect();
        let drawn = usize::try_from(random.below(u64::try_from(suitable.len()).unwrap_or(1))).unwrap_or_default();
        let event = self.left.swap_remove(suitable[drawn]);
        self.missing.retain(|missing| *missing != event);
        event
    }

    /// Returns whether each event has been dealt.
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_holds_every_event_once_and_a_seed_gives_the_same_order() {
        let kinds: Vec<Event> = Event::ALWAYS.into_iter().chain(Event::OF_STORE).collect();
        let deal = |seed| {
            let (mut deck, mut random) = (Deck::new(kinds.clone()), Random::new(seed));
            let mut dealt = Vec::new();
            while !deck.is_complete() {
                dealt.push(deck.deal(&mut random, |_| true));
            }
            dealt
        };
        let mut sorted = deal(1);
        assert_eq!(sorted, deal(1));
        assert_ne!(sorted, deal(2));
        let (mut deck, mut random) = (Deck::new(kinds.clone()), Random::new(3));
        let calm = |event| event != Event::KillDisk;
        assert!((0..100).all(|_| calm(deck.deal(&mut random, calm))) && !deck.is_complete());
        let next = (0..2 * kinds.len()).map(|_| deck.deal(&mut random, |_| true));
        assert!(next.filter(|event| !calm(*event)).count() > 1, "what did not suit comes later");
        sorted.sort_unstable();
        assert_eq!(sorted, kinds);
    }
}
