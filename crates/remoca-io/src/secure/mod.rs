//! A connection between two processes that share a secret. It uses TLS 1.3, in which each side shows a raw public key
//! (RFC 7250) that the other one expects. The keys are derived from the secret, so nothing else has to be stored.
//!
//! Nothing that a stranger sends gets past [`Acceptor::accept`], and no data are sent to a stranger. See decision 0024.

mod channel;
#[cfg(feature = "testing")]
pub mod fuzz;
mod tls;

pub use channel::{Channel, SecureReader, SecureWriter};
pub use tls::{Acceptor, Connector};
