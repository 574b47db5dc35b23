//! The planner in a world of VM processes with virtual time: honest ones, and others that flood, oscillate, lie, hang, die and ignore.

mod adversaries;
mod balloon;
mod guests;
mod hostile_guests;
mod recovery;
mod rules;
mod tiers;
mod world;
