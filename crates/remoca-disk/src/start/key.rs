//! Where a key comes from: a file, or a credential of systemd. Never the command line, which every user of the host can
//! read.

use anyhow::{Result, anyhow, bail};
use remoca_io::key;
use remoca_protocol::control::Secret;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Advice for an operator who has no key.
pub const ADVICE: &str = "`remoca migrate --new-key FILE` makes one; copy it to the other host (scp), for root alone";

/// The source of a key, as an option names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    File(PathBuf),
    /// A file in `$CREDENTIALS_DIRECTORY`, which systemd protects from other users.
    Credential(String),
}

impl FromStr for KeySource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("credential:") {
            _ if text.is_empty() => Err("write FILE or credential:NAME".into()),
            Some(name) if name.is_empty() || name.contains('/') || name.starts_with('.') => {
                Err(format!("`{name}` is no name of a credential"))
            }
            Some(name) => Ok(Self::Credential(name.into())),
            None => Ok(Self::File(text.into())),
        }
    }
}

impl KeySource {
    /// Reads the key.
    ///
    /// # Errors
    /// If the key cannot be read, is not a valid key, or can be read by others. The text says what to do.
    pub fn read(&self) -> Result<Secret> {
        match self {
            Self::File(path) => key::read(path, true).map_err(|error| anyhow!(error)),
            Self::Credential(name) => {
                let Some(directory) = std::env::var_os("CREDENTIALS_DIRECTORY") else {
                    bail!(
                        "there is no $CREDENTIALS_DIRECTORY for credential:{name}: say LoadCredential={name}:FILE in the unit"
                    );
                };
                key::read(&Path::new(&directory).join(name), false).map_err(|error| anyhow!(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_a_file_or_a_credential_of_this_process() {
        assert_eq!("/etc/remoca/key".parse(), Ok(KeySource::File("/etc/remoca/key".into())));
        assert_eq!("credential:key".parse(), Ok(KeySource::Credential("key".into())));
        for bad in ["", "credential:", "credential:../../etc/shadow", "credential:.."] {
            assert!(bad.parse::<KeySource>().is_err(), "{bad}");
        }
    }
}
