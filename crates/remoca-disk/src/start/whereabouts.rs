//! Where the disks of the VM are when its process starts: here, with another process, or wherever their locks say.

use super::options::Incoming;

/// What is known before an image is opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signs {
    /// Whether a previous program of this very process has handed over.
    pub is_upgrade: bool,
    /// Whether a mark says that the disks came here and did not go.
    pub came: bool,
    /// Whether a mark says that the disks went from here and did not come back, and no lock says where they are.
    pub went: bool,
}

/// Where the disks are.
#[derive(Debug)]
pub(super) struct Whereabouts {
    /// Whether another process has them: they are still to come, or went to another host.
    pub are_away: bool,
    /// Where this process waits for them; `None` if it does not.
    pub incoming: Option<Incoming>,
    /// Where this process waits for them if their images turn out to be in use: they have moved on since they came here.
    pub if_in_use: Option<Incoming>,
}

impl Whereabouts {
    /// Decides by the signs where the disks are. `incoming`: where the operator told the process to wait for them.
    pub fn new(incoming: Option<Incoming>, signs: Signs) -> Self {
        // A process that waited for disks which are already here would wait forever.
        let are_here = signs.is_upgrade || signs.came;
        let (incoming, if_in_use) = if are_here { (None, incoming) } else { (incoming, None) };
        let are_away = incoming.is_some() || signs.went && !signs.is_upgrade;
        // An upgrade has the images open, and their locks.
        Self { are_away, incoming, if_in_use: if_in_use.filter(|_| !signs.is_upgrade) }
    }

    /// Makes the process wait for the disks, whose images are in use, if it has an address. Returns whether it waits.
    pub fn found_in_use(&mut self) -> bool {
        match self.if_in_use.take() {
            Some(incoming) => {
                (self.incoming, self.are_away) = (Some(incoming), true);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_here_away_or_where_their_locks_say() {
        let address = || Incoming { endpoint: "unix:/incoming".parse().unwrap(), key: None };
        // --incoming, upgrade, came, went -> away, waits, waits if the images are in use
        let table = [
            (false, false, false, false, (false, false, false)),
            (true, false, false, false, (true, true, false)),
            (true, false, true, false, (false, false, true)),
            (true, true, false, false, (false, false, false)),
            (true, true, true, true, (false, false, false)),
            (false, false, false, true, (true, false, false)),
            (true, false, false, true, (true, true, false)),
            (false, true, false, true, (false, false, false)),
            (false, false, true, false, (false, false, false)),
        ];
        for (says, is_upgrade, came, went, expected) in table {
            let mut found = Whereabouts::new(says.then(address), Signs { is_upgrade, came, went });
            let got = (found.are_away, found.incoming.is_some(), found.if_in_use.is_some());
            assert_eq!(got, expected, "--incoming {says}, upgrade {is_upgrade}, came {came}, went {went}");
            assert_eq!(found.found_in_use(), expected.2);
            assert_eq!(
                (found.are_away, found.incoming.is_some()),
                (expected.0 || expected.2, expected.1 || expected.2)
            );
            assert!(!found.found_in_use());
        }
    }
}
