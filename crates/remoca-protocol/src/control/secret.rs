//! A secret that two processes share, as text.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Size of a secret in bytes.
pub const SECRET_BYTES: usize = 32;
/// Size of the text of a secret in bytes.
pub const TEXT_BYTES: usize = 2 * SECRET_BYTES;

/// Secret of 256 random bits, written as 64 hexadecimal digits. It is never a password: an attacker who sees a
/// handshake could try all likely passwords.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Secret([u8; SECRET_BYTES]);

impl Secret {
    /// Returns a secret of these bytes, which must be random.
    #[must_use]
    pub fn new(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes from which keys are derived.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the secret as hexadecimal digits, which must be kept secret as well.
    #[must_use]
    pub fn text(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(TEXT_BYTES), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl FromStr for Secret {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const WRONG: &str = "a key has 64 hexadecimal digits, as `remoca migrate --new-key FILE` makes it";
        let mut bytes = [0; SECRET_BYTES];
        if text.len() != TEXT_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(WRONG);
        }
        for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
            *byte = text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or(WRONG)?;
        }
        match bytes.iter().all(|byte| *byte == bytes[0]) {
            true => Err("a key of equal bytes is no secret: make one with `remoca migrate --new-key FILE`"),
            false => Ok(Self(bytes)),
        }
    }
}

impl TryFrom<String> for Secret {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Secret> for String {
    fn from(secret: Secret) -> Self {
        secret.text()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_no_key() {
        let good = "0123456789abcdef".repeat(4);
        assert!(good.parse::<Secret>().is_ok());
        for bad in
            ["", "swordfish", &good[1..], &format!("{good}0"), &"0".repeat(64), &"é".repeat(32), &"+1".repeat(32)]
        {
            let error = bad.parse::<Secret>().unwrap_err();
            assert!(error.contains("--new-key"), "{bad}: {error}");
        }
    }
}
