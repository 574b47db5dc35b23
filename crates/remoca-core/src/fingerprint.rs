//! Fingerprints: 96 bits of a keyed hash of a page's bytes, which address content everywhere in remoca.
//!
//! The engine computes a fingerprint of every page that goes to or comes from the disk, the guest or a memory server.
//! The hash is AEGIS-128X2 used as a MAC with a secret key that never leaves the VM's process. So neither a guest nor a
//! memory server can prepare two pages with one fingerprint. For a pseudo-random function, the chance that `q` foreign
//! pages hit any of `n` known fingerprints is at most `q * n / 2^96`: 2^-36 for 2^40 evictions (twelve days at a
//! million a second) against 2^20 known blocks. Decision 0002 compares the alternatives.

use crate::units::PAGE_SIZE;
use aegis::aegis128x2::Aegis128X2Mac;

/// Fingerprint of one page, 96 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u32; 3]);

/// Hash function for fingerprints, with one secret key.
#[derive(Clone)]
pub struct Fingerprinter {
    mac: Aegis128X2Mac<16>,
    zero: Fingerprint,
}

impl Fingerprinter {
    /// Returns a fingerprinter for `key`, which must be random and stay secret.
    #[must_use]
    pub fn new(key: &[u8; 16]) -> Self {
        let mac = Aegis128X2Mac::new(key);
        let mut this = Self { mac, zero: Fingerprint([0; 3]) };
        this.zero = this.page(&[0; PAGE_SIZE]);
        this
    }

    /// Returns the fingerprint of `page`, which must be [`PAGE_SIZE`] bytes long.
    #[must_use]
    pub fn page(&self, page: &[u8]) -> Fingerprint {
        debug_assert_eq!(page.len(), PAGE_SIZE);
        let mut mac = self.mac.clone();
        mac.update(page);
        let tag = mac.finalize();
        let word = |i: usize| u32::from_le_bytes([tag[i], tag[i + 1], tag[i + 2], tag[i + 3]]);
        Fingerprint([word(0), word(4), word(8)])
    }

    /// Returns the fingerprint of a page of zeroes.
    #[must_use]
    pub fn zero(&self) -> Fingerprint {
        self.zero
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_contents_tell_apart() {
        let a = Fingerprinter::new(&[1; 16]);
        let b = Fingerprinter::new(&[2; 16]);
        let mut page = vec![7; PAGE_SIZE];
        let before = a.page(&page);
        assert_eq!(before, a.page(&page));
        assert_ne!(before, b.page(&page));
        page[4095] ^= 1;
        assert_ne!(before, a.page(&page));
        assert_eq!(a.zero(), a.page(&[0; PAGE_SIZE]));
    }
}
