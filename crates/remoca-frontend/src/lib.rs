//! The devices that guests attach to. A device yields requests to execute, independent of the protocol that carries
//! them.
//!
//! [`device::Frontend`] is a vhost-user device ([`vhost`]) or an NBD export ([`nbd`]). The driver of the VM process owns it,
//! executes the requests, and knows neither protocol.

pub mod device;
pub mod nbd;
mod passing;
pub mod request;
#[cfg(feature = "testing")]
pub mod testing;
pub mod vhost;
mod waiting;

pub use waiting::answer_messages;
