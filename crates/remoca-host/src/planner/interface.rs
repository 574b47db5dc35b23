//! What goes into the planner and comes out of it.

use super::moves::{Intent, Move, Side, Stage};
use crate::limits::Limits;
use crate::plan::{Memory, Policy};
use crate::reading::Answer;
use crate::resource::Resource;
use remoca_protocol::host::HostDecision;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most units that memory is divided in.
const UNITS_MAX: u64 = 2048;
/// Smallest unit: memory servers allocate in pieces of that size.
const UNIT_BYTES_MIN: u64 = 2 << 20;

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub resource: Resource,
    pub total_bytes: u64,
    pub policy: Policy,
    /// Whether sizes are changed.
    pub applies: bool,
    pub interval: Duration,
    /// Time in which a VM changes at most once.
    pub window: Duration,
    /// Number of times that a process must have been read before it is changed.
    pub readings_min: u32,
    /// How guests take part; `None` if their memory stays as it is.
    pub guests: Option<GuestTerms>,
}

impl Settings {
    /// Returns what is divided, and in which units, if guests lend nothing.
    #[must_use]
    pub fn memory(&self) -> Memory {
        Memory { total_bytes: self.total_bytes, unit_bytes: unit_of(self.total_bytes) }
    }
}

/// Returns the unit in which so much memory is divided.
pub(super) fn unit_of(bytes: u64) -> u64 {
    bytes.div_ceil(UNITS_MAX).max(UNIT_BYTES_MIN).next_power_of_two()
}

/// The present, for the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Time since the start of the daemon.
    pub now: Duration,
    /// Seconds since 1970.
    pub unix_s: u64,
}

/// What the memory of guests is moved by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestTerms {
    /// Memory of the total that is never planned with: guests that are short of memory get theirs back from it.
    pub reserve_bytes: u64,
    /// Time from the end of a round to the next one.
    pub rest: Duration,
}

impl GuestTerms {
    /// Guests lend nothing, and get back what they have lent.
    pub const NO_ROUNDS: Self = Self { reserve_bytes: 0, rest: Duration::MAX };
}

/// What a round is about now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No round is on.
    #[default]
    Rest,
    Lend,
    Observe,
    Divide,
    Return,
    /// What is given back is on its way.
    End,
}

/// The round that is on, or the pause after the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    pub phase: Phase,
    /// When it began, in seconds since 1970; 0 if there was no round yet.
    pub since_s: u64,
}

/// What must outlive the daemon about the memory of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestRecord {
    pub home_bytes: u64,
    pub base_bytes: u64,
    pub asked_bytes: u64,
    /// Whether its balloon may still be at work on less than it is asked to leave: the last command did not get through.
    #[serde(default)]
    pub is_untold: bool,
    /// Until when its balloon is not asked again, and until when it lends nothing because it was short of memory, in seconds since 1970.
    #[serde(default)]
    pub left_until_s: u64,
    #[serde(default)]
    pub spared_until_s: u64,
    /// When its VM was seen to be gone, in seconds since 1970; 0 while that is there.
    #[serde(default)]
    pub gone_s: u64,
}

impl GuestRecord {
    /// Returns what was taken from the guest, whether the host has seen it or not.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.base_bytes.saturating_sub(self.asked_bytes)
    }

    /// Returns whether it may have less memory than its own.
    #[must_use]
    pub fn lacks(&self) -> bool {
        self.taken() > 0 || self.is_untold
    }
}

/// What a daemon leaves to its successor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Tier that the sizes are those of.
    #[serde(default)]
    pub resource: Resource,
    /// What all VMs may have together in it, without the reserve; 0 if nobody said that.
    #[serde(default)]
    pub total_bytes: u64,
    /// When all VMs were read last, in seconds since 1970; 0 if nobody says. It stays while one counts that only a former daemon has heard.
    #[serde(default)]
    pub read_s: u64,
    pub intent: Option<Intent>,
    /// Newest known size of each VM, in bytes.
    pub sizes: BTreeMap<String, u64>,
    /// VMs whose processes were killed so long ago that their sizes no longer count. Their sockets are still there.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub dead: BTreeSet<String>,
    /// When VMs were changed last, or were to be, in seconds since 1970.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed: BTreeMap<String, u64>,
    /// Memory of guests, of which some was taken or may be.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub guests: BTreeMap<String, GuestRecord>,
    #[serde(default)]
    pub round: Round,
    /// What guests that are short of memory get from the reserve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reliefs: Vec<Move>,
    pub decisions: Vec<HostDecision>,
}

impl Record {
    /// Leaves to a later daemon what guests were promised, and unless the intent `goes_on` what they were to get by that: it counts as
    /// given, and their balloons may not have heard of it.
    pub(super) fn leave_guests(&mut self, goes_on: bool) {
        let moves = self.intent.iter().filter(|_| !goes_on).flat_map(|intent| &intent.moves);
        let is_given = |change: &&Move| change.side == Side::Guest && change.stage == Stage::Begun && !change.takes();
        for change in moves.filter(is_given).chain(&self.reliefs) {
            self.guests.entry(change.vm.clone()).and_modify(|sizes| sizes.is_untold = true);
        }
        self.reliefs.clear();
    }
}

/// A VM whose control socket was found, with what is known of it.
#[derive(Clone, Debug)]
pub struct Heard {
    pub vm: String,
    pub limits: Result<Limits, String>,
    pub answer: Answer,
}

/// A command to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub vm: String,
    /// Which memory of it gets this size.
    pub side: Side,
    pub bytes: u64,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The process answered with its new status.
    Answered(Answer),
    /// The monitor has passed it on. Whether the guest follows is seen later.
    Told,
    /// The process refused, and says why.
    Refused(String),
    /// No answer came: it may have been executed.
    Unknown(String),
    /// The command was not sent.
    NotSent(String),
}

/// When the daemon asks VMs next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// All of them, with their curves, at this time.
    All(Duration),
    /// Those that are to give memory back, at this time.
    Awaited(Duration, Vec<String>),
}

impl Look {
    /// Returns when it is.
    #[must_use]
    pub fn at(&self) -> Duration {
        match self {
            Self::All(at) | Self::Awaited(at, _) => *at,
        }
    }
}
