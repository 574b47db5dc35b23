//! The plan: which servers are measured, in which situations, in which order.

use super::dialect::Dialect;

/// A server in the comparison. The raw server takes part twice, to show the noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    RawA,
    RawHeaders,
    Remoca,
    Memcached,
    Redis,
    RawB,
}

impl Contender {
    pub(crate) const ALL: [Self; 6] =
        [Self::RawA, Self::RawHeaders, Self::Remoca, Self::Memcached, Self::Redis, Self::RawB];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RawA => "raw",
            Self::RawHeaders => "raw + head",
            Self::Remoca => "remoca",
            Self::Memcached => "memcached",
            Self::Redis => "redis",
            Self::RawB => "raw again",
        }
    }

    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Self::RawA | Self::RawB => Dialect::Raw,
            Self::RawHeaders => Dialect::RawHeaders,
            Self::Remoca => Dialect::Remoca,
            Self::Memcached => Dialect::Memcached,
            Self::Redis => Dialect::Redis,
        }
    }

    /// Returns the name of the server that plays this contender.
    pub(crate) fn server(self) -> &'static str {
        match self {
            Self::RawA | Self::RawHeaders | Self::RawB => "raw",
            other => other.name(),
        }
    }

    /// Returns whether the contender must store the pages itself: others read what another one has stored.
    pub(crate) fn stores(self) -> bool {
        !matches!(self, Self::RawHeaders | Self::RawB)
    }

    /// Returns the contenders in the order of a round. Each round begins with another one, and every second order is
    /// reversed.
    pub(crate) fn order(round: usize) -> [Self; 6] {
        let mut order = Self::ALL;
        order.rotate_left(round % Self::ALL.len());
        if round % 2 == 1 {
            order.reverse();
        }
        order
    }
}

/// A situation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    D1,
    D32,
    D32x4,
    /// Stores pages on the server.
    SetD32,
    D1OneCpu,
    D32OneCpu,
    D32x4OneCpu,
    SetD32OneCpu,
}

/// Placement of client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// The client on one processor, the server on another.
    Apart,
    /// Both on one processor: neither waits for the other to wake up, and the time is the sum of their work.
    OneCpu,
}

impl Cell {
    pub(crate) const ALL: [Self; 8] = [
        Self::D1,
        Self::D32,
        Self::D32x4,
        Self::SetD32,
        Self::D1OneCpu,
        Self::D32OneCpu,
        Self::D32x4OneCpu,
        Self::SetD32OneCpu,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::D1 => "d1",
            Self::D32 => "d32",
            Self::D32x4 => "d32x4",
            Self::SetD32 => "set_d32",
            Self::D1OneCpu => "d1_one_cpu",
            Self::D32OneCpu => "d32_one_cpu",
            Self::D32x4OneCpu => "d32x4_one_cpu",
            Self::SetD32OneCpu => "set_d32_one_cpu",
        }
    }

    pub(crate) fn placement(self) -> Placement {
        match self {
            Self::D1 | Self::D32 | Self::D32x4 | Self::SetD32 => Placement::Apart,
            Self::D1OneCpu | Self::D32OneCpu | Self::D32x4OneCpu | Self::SetD32OneCpu => Placement::OneCpu,
        }
    }

    /// Returns the number of requests in flight on each connection.
    pub(crate) fn depth(self) -> usize {
        match self {
            Self::D1 | Self::D1OneCpu => 1,
            _ => 32,
        }
    }

    pub(crate) fn four_connections(self) -> bool {
        matches!(self, Self::D32x4 | Self::D32x4OneCpu)
    }

    pub(crate) fn sets(self) -> bool {
        matches!(self, Self::SetD32 | Self::SetD32OneCpu)
    }
}
