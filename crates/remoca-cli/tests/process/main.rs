//! The real `remoca` program as processes on real sockets, without a VM: a vhost-user front end plays the guest.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "in a test a surprise is a failure, and sizes are small"
)]

mod ablation;
mod archive;
mod bad_disk;
mod bad_serve;
mod check;
mod comings;
mod configuration;
mod control;
mod curves;
mod deaths;
mod drain;
mod failed_flush;
mod forget;
mod full_disk;
mod groups;
mod growth;
mod guest_memory;
mod hanging;
mod hook;
mod host;
mod host_give_back;
mod host_guests;
mod io_thread;
mod kept;
mod local;
mod lost_store;
mod lying_guest;
mod lying_server;
mod mapped;
mod migration;
mod narrow;
mod nbd;
mod network_images;
mod outages;
mod qcow2;
mod restart;
mod screens;
mod servers;
mod strangers;
mod support;
mod tiers;
mod traces;
mod upgrade;
mod versions;
mod watchdog;
