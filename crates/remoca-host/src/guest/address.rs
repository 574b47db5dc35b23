//! Where the monitor of a guest is, as the operator writes it: `qmp:/run/remoca/web1.qmp` or `libvirt:web1`.

use super::monitor::Monitor;
use super::qemu::Qemu;
use super::virsh::Virsh;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest name of a domain.
const NAME_BYTES_MAX: usize = 255;

/// Address of a monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Unix socket of a QMP monitor of QEMU that nobody else uses.
    Qmp(PathBuf),
    /// Domain of libvirt, which is asked by `virsh`. Its own monitor is never touched.
    Libvirt(String),
}

impl Address {
    /// Returns the monitor there. Nothing is asked yet.
    #[must_use]
    pub fn monitor(&self) -> Box<dyn Monitor> {
        match self {
            Self::Qmp(socket) => Box::new(Qemu::new(socket.clone())),
            Self::Libvirt(name) => Box::new(Virsh::new(name.clone())),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            Err(format!("`{text}` is no monitor: {what}. Write `qmp:/PATH/OF/SOCKET` or `libvirt:NAME-OF-DOMAIN`"))
        };
        if text.chars().any(char::is_control) {
            return wrong("it has a control character");
        }
        match text.split_once(':') {
            Some(("qmp", path)) if path.starts_with('/') => Ok(Self::Qmp(path.into())),
            Some(("qmp", _)) => wrong("the path of its socket does not begin with `/`"),
            Some(("libvirt", "")) => wrong("the name of its domain is missing"),
            Some(("libvirt", name)) if name.starts_with('-') => wrong("no domain is named like that"),
            Some(("libvirt", name)) if name.len() > NAME_BYTES_MAX => wrong("the name of its domain is too long"),
            Some(("libvirt", name)) => Ok(Self::Libvirt(name.into())),
            _ => wrong("it begins neither with `qmp:` nor with `libvirt:`"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qmp(path) => write!(f, "qmp:{}", path.display()),
            Self::Libvirt(name) => write!(f, "libvirt:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_and_shown_as_it_is_written() {
        for good in ["qmp:/run/remoca/web1.qmp", "libvirt:web1", "libvirt:web 1:a"] {
            assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
        }
        for (bad, why) in [
            ("web1", "begins neither"),
            ("qmp:", "does not begin with `/`"),
            ("qmp:run/a", "does not begin with `/`"),
            ("libvirt:", "is missing"),
            ("libvirt:--all", "no domain is named"),
            ("libvirt:a\nb", "control character"),
            ("unix:/a", "begins neither"),
        ] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(format!("libvirt:{}", "a".repeat(256)).parse::<Address>().is_err());
    }
}
