//! A connection between two processes that have a secret in common: TLS 1.3, in which each side shows a raw public key
//! (RFC 7250) that the other one expects. The keys are made from the secret, so nothing else is to be kept.
//!
//! Nothing that a stranger sends gets beyond [`Acceptor::accept`], and nothing of ours goes to one. Decision 0024.

mod channel;
#[cfg(feature = "testing")]
pub mod fuzz;
mod tls;

pub use channel::{Channel, SecureReader, SecureWriter};
pub use tls::{Acceptor, Connector};
