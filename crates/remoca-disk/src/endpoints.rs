//! The memory servers of a VM process.

use remoca_io::address::Endpoint;

/// Maximum number of servers that one process knows.
pub const SERVERS_MAX: usize = 16;

/// Addresses of the memory servers of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoints {
    /// The operator's list.
    pub listed: Vec<Endpoint>,
    /// Server of the local tier, which is none of the list; `None` if there is no such tier.
    pub local: Option<Endpoint>,
}

impl Endpoints {
    /// Returns whether there is no server.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.listed.is_empty() && self.local.is_none()
    }

    /// Returns all servers, that of the local tier last.
    pub fn iter(&self) -> impl Iterator<Item = &Endpoint> {
        self.listed.iter().chain(&self.local)
    }

    /// Returns the position of a server, or `None` if it is not one of them.
    #[must_use]
    pub fn position(&self, endpoint: &Endpoint) -> Option<usize> {
        self.iter().position(|it| it == endpoint)
    }

    /// Checks that there are servers, and not too many or the same one twice.
    ///
    /// # Errors
    /// If that is not so. The text says why.
    pub fn check(&self) -> Result<(), String> {
        let all: Vec<_> = self.iter().collect();
        if all.is_empty() || all.len() > SERVERS_MAX {
            return Err(format!("{} memory servers: a VM process has 1 to {SERVERS_MAX}", all.len()));
        }
        if self.local.is_some() && self.listed.iter().any(|endpoint| matches!(endpoint, Endpoint::Local(_))) {
            return Err(
                "a local: address among the memory servers, beside a local tier, which is such memory already: leave out the address, \
                 or the local tier (size 0; its server is --local-server)"
                    .into()
            );
        }
        if let Some(local) = self.local.iter().find(|endpoint| !matches!(endpoint, Endpoint::Local(_))) {
            return Err(format!("the server of the local tier is local:PATH, and not {local}"));
        }
        match all.iter().enumerate().find(|(at, endpoint)| all[..*at].contains(endpoint)) {
            Some((_, twice)) => Err(format!("the memory server {twice} is given twice")),
            None => Ok(()),
        }
    }
}

impl From<Vec<Endpoint>> for Endpoints {
    fn from(listed: Vec<Endpoint>) -> Self {
        Self { listed, local: None }
    }
}
