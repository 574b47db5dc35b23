//! What a guest attaches to: a device with requests to execute, whatever protocol brings them.
//!
//! [`device::Frontend`] is a vhost-user device ([`vhost`]) or an NBD export ([`nbd`]). The driver of the VM process owns it,
//! executes the requests, and knows neither protocol.

pub mod device;
pub mod nbd;
pub mod request;
#[cfg(feature = "testing")]
pub mod testing;
pub mod vhost;
