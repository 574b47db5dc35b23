//! The planner in a world of VM processes with virtual time: honest ones, and others that flood, oscillate, lie, hang, die and ignore.

mod adversaries;
mod back;
mod balloon;
mod guests;
mod half_done;
mod held;
mod hostile_guests;
mod known_guest;
mod recovery;
mod rounds;
mod rules;
mod short;
mod tiers;
mod world;
