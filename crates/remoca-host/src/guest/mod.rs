//! Memory of guests: read and moved by the monitor of each hypervisor, within deadlines and bounds.
//!
//! [`Monitor`] is what the daemon sees, [`Monitors`] asks those of all guests at once. `qemu` speaks QMP, `virsh` runs `virsh` and reads
//! what it prints with `domain`; `statistics` turns what guests tell into rates.
//!
//! What a guest or its hypervisor says is a hint. What counts as lent is decided by the planner, from what the host saw fall.

mod address;
mod all;
mod domain;
mod monitor;
mod qemu;
mod statistics;
mod virsh;

pub use address::Address;
pub use all::Monitors;
pub use monitor::{AGENT_SILENT_AFTER, GuestMemory, Monitor, Pressure, Unusable};
pub use qemu::Qemu;
pub use virsh::Virsh;
