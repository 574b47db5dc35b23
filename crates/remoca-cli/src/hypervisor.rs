//! The libvirt and the QEMU of this host: their versions, asked of their own programs.

use remoca_io::program::printed;
use std::fmt;
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

/// How long another program may take. A libvirt that hangs must not hang its caller.
const PATIENCE: Duration = Duration::from_secs(10);
/// QEMU's programs: by Debian's name, and where Red Hat has it.
const QEMUS: [&str; 3] = ["qemu-system-x86_64", "qemu-system-aarch64", "/usr/libexec/qemu-kvm"];

/// Version of a program: major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        match (numbers.next(), numbers.next()) {
            (Some(Some(major)), Some(Some(minor))) => Ok(Self(major, minor)),
            _ => Err(format!("`{text}` is no version: write it like 9.0")),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Returns the version of the libvirt that is installed, or `None` if there is none.
pub fn libvirt() -> Option<Version> {
    said("virsh", &["--version"])?.trim().parse().ok()
}

/// Returns the version of the QEMU that is installed, or `None` if there is none.
pub fn qemu() -> Option<Version> {
    QEMUS.iter().find_map(|program| qemu_version(&said(program, &["--version"])?))
}

fn qemu_version(said: &str) -> Option<Version> {
    let number = said.split_once("version ")?.1;
    number.split(|c: char| !c.is_ascii_digit() && c != '.').next()?.parse().ok()
}

/// Returns what a program prints, or `None` if it is not there, fails, or takes too long.
pub fn said(program: &str, arguments: &[&str]) -> Option<String> {
    printed(Command::new(program).args(arguments), PATIENCE).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        assert_eq!("9.0.0".parse(), Ok(Version(9, 0)));
        assert!("9.10".parse::<Version>().unwrap() > Version(9, 2));
        assert!("new".parse::<Version>().is_err() && "9".parse::<Version>().is_err());
        let debian = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright";
        assert_eq!(qemu_version(debian), Some(Version(10, 0)));
        assert_eq!(qemu_version("nothing"), None);
    }

    #[test]
    fn a_program_that_is_missing_or_fails_says_nothing() {
        assert_eq!(said("echo", &["a"]).as_deref(), Some("a\n"));
        assert_eq!(said("false", &[]), None);
        assert_eq!(said("/there/is/no/such/program", &[]), None);
    }
}
