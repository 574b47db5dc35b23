//! What a program offers to guests. Before an upgrade it is compared with what attached guests were promised: a program that
//! offers less would have to disconnect them.

use crate::guests::{FrontEnd, Guests, NbdClient, Offer};
use crate::handover::Description;
use crate::nbd::ExportFlags;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a program offers on all devices of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offers {
    /// By the names of the disks.
    pub disks: BTreeMap<String, Offer>,
    #[serde(default)]
    pub port: Option<Offer>,
}

/// Virtio feature of a disk that can only be read.
const READ_ONLY: u64 = 5;
/// Virtio features that a program may lack, by their bits.
const FEATURES: [(u64, &str); 7] = [
    (READ_ONLY, "a disk that can only be read"),
    (9, "flush"),
    (11, "a write cache that can be switched off"),
    (12, "several queues"),
    (13, "discard"),
    (14, "write-zeroes"),
    (26, "a log of written pages"),
];
/// The same for the vhost-user protocol.
const PROTOCOL_FEATURES: [(u64, &str); 7] = [
    (0, "several queues"),
    (1, "a log of written pages"),
    (3, "acknowledgements"),
    (5, "notices of another size"),
    (9, "the device's configuration"),
    (12, "a record of requests in flight"),
    (15, "more memory while it runs"),
];
const NBD_FLAGS: [(u64, &str); 6] = [
    (2, "flush"),
    (3, "durable writes"),
    (5, "trim"),
    (6, "write-zeroes"),
    (7, "reads in one piece"),
    (8, "several connections"),
];

impl Offer {
    /// Returns what a hypervisor uses, or its guest may begin to use, and this offer lacks.
    fn lacks_for_front_end<F>(&self, front_end: &FrontEnd<F>) -> Vec<String> {
        // A guest that boots uses less than the hypervisor has been offered, until its driver comes.
        let promised = front_end.features.unwrap_or(0) | front_end.offered.map_or(0, |former| former.features);
        let mut lacking = named(promised & !self.features, &FEATURES);
        let protocol = front_end.protocol_features.unwrap_or(0) & !self.protocol_features;
        lacking.extend(named(protocol, &PROTOCOL_FEATURES));
        // A driver need not use anything by which a writable disk could be told.
        let is_new = |former: Offer| self.features & !former.features & 1 << READ_ONLY != 0;
        if front_end.offered.is_some_and(is_new) {
            lacking.push("writing".into());
        }
        let promised = front_end.offered.map_or(0, |former| former.queues.into()).max(front_end.queues.len());
        if promised > usize::from(self.queues) {
            lacking.push(format!("{promised} queues (at most {})", self.queues));
        }
        lacking.extend(front_end.offered.and_then(|former| self.sector_other_than(&former)));
        lacking
    }

    /// Returns what `former` offers and this offer lacks.
    fn lacks(&self, former: &Self) -> Vec<String> {
        let mut lacking = named(former.features & !self.features, &FEATURES);
        lacking.extend(named(former.protocol_features & !self.protocol_features, &PROTOCOL_FEATURES));
        lacking.extend(named(u64::from(former.nbd_flags & !self.nbd_flags), &NBD_FLAGS));
        let can_write = |offer: &Self| {
            offer.features & 1 << READ_ONLY == 0 && !ExportFlags(offer.nbd_flags).has(ExportFlags::READ_ONLY)
        };
        if can_write(former) && !can_write(self) {
            lacking.push("writing".into());
        }
        if former.queues > self.queues {
            lacking.push(format!("{} queues (at most {})", former.queues, self.queues));
        }
        lacking.extend(self.sector_other_than(former));
        lacking
    }

    /// Returns what an NBD client was promised and this offer lacks.
    fn lacks_for_client<F>(&self, client: &NbdClient<F>) -> Vec<String> {
        let Some(former) = client.offered else { return Vec::new() };
        let mut lacking = named(u64::from(former.nbd_flags & !self.nbd_flags), &NBD_FLAGS);
        if ExportFlags(self.nbd_flags & !former.nbd_flags).has(ExportFlags::READ_ONLY) {
            lacking.push("writing".into());
        }
        lacking.extend(self.sector_other_than(&former));
        lacking
    }

    fn sector_other_than(&self, former: &Self) -> Option<String> {
        (self.sector != former.sector).then(|| format!("sectors of {} bytes", former.sector))
    }
}

impl Offers {
    /// Checks that guests which `description` passes on could stay connected to a program with these offers.
    ///
    /// # Errors
    /// If one could not. The text names the devices and what is missing.
    pub fn check(&self, description: &Description) -> Result<(), String> {
        let disks = description.disks.iter();
        let disks = disks.map(|disk| (disk.name.as_str(), self.disks.get(&disk.name), &disk.guests));
        let devices = disks.chain([("the port", self.port.as_ref(), &description.port_guests)]);
        let refusals: Vec<_> = devices.filter_map(|(name, offer, guests)| refusal(name, offer, guests)).collect();
        match refusals.is_empty() {
            true => Ok(()),
            false => Err(refusals.join("; ")),
        }
    }
}

impl Offers {
    /// Checks that whoever was promised what `former` offers could go on with these offers. Devices that only one of them has are
    /// left out.
    ///
    /// # Errors
    /// If it could not. The text names the devices and what is missing.
    pub fn check_beside(&self, former: &Self) -> Result<(), String> {
        let disks = self.disks.iter().filter_map(|(name, offer)| Some((&**name, offer, former.disks.get(name)?)));
        let port = self.port.as_ref().zip(former.port.as_ref()).map(|(offer, former)| ("the port", offer, former));
        let refusal = |(name, offer, former): (&str, &Offer, &Offer)| {
            let lacking = offer.lacks(former);
            (!lacking.is_empty()).then(|| format!("{name} would not offer {}", lacking.join(", ")))
        };
        let refusals: Vec<_> = disks.chain(port).filter_map(refusal).collect();
        if refusals.is_empty() { Ok(()) } else { Err(refusals.join("; ")) }
    }
}

/// Returns what the guests of the device `name` would miss, or `None` if they could stay.
fn refusal<F>(name: &str, offer: Option<&Offer>, guests: &Guests<F>) -> Option<String> {
    if guests.is_empty() {
        return None;
    }
    let Some(offer) = offer else { return Some(format!("it would not have {name}, to which a guest is attached")) };
    let mut lacking: Vec<_> = guests.front_end.iter().flat_map(|guest| offer.lacks_for_front_end(guest)).collect();
    lacking.extend(guests.nbd.iter().flat_map(|client| offer.lacks_for_client(client)));
    lacking.dedup();
    (!lacking.is_empty()).then(|| format!("it does not offer {}, which the guest of {name} uses", lacking.join(", ")))
}

/// Returns the names of the bits that are set in `bits`.
fn named(bits: u64, names: &[(u64, &str)]) -> Vec<String> {
    let name = |bit: u64| {
        let known = names.iter().find(|(number, _)| *number == bit);
        known.map_or_else(|| format!("feature bit {bit}"), |(_, name)| (*name).to_owned())
    };
    (0..64).filter(|bit| bits & 1 << bit != 0).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::{PassedDisk, PassedStore, StoreKind};
    use std::os::fd::RawFd;

    const OFFER: Offer = Offer { features: 0x7200, protocol_features: 0x920B, queues: 4, sector: 512, nbd_flags: 0x6D };

    fn description(guests: Guests<RawFd>) -> Description {
        let kind = StoreKind::File { flush_failed: None };
        let (name, image, store) = ("root".into(), "/a".into(), PassedStore { fd: 3, kind });
        let disk = PassedDisk { name, image, socket: None, store, write_cache_off: false, had_bytes: None, guests };
        Description { disks: vec![disk], ..Description::default() }
    }

    fn hypervisor(features: u64, queues: usize) -> Guests<RawFd> {
        let queue = crate::guests::Queue {
            size: 8,
            addresses: None,
            base: 0,
            kick: None,
            call: None,
            error: None,
            enabled: false,
        };
        let front_end = FrontEnd {
            socket: 4,
            features: Some(features),
            protocol_features: Some(OFFER.protocol_features),
            offered: Some(OFFER),
            memory: Vec::new(),
            record: None,
            log: None,
            channel: None,
            told_bytes: None,
            queues: vec![queue; queues],
        };
        Guests { front_end: Some(front_end), nbd: Vec::new() }
    }

    fn client(offered: Option<Offer>) -> Guests<RawFd> {
        let client = NbdClient {
            socket: 5,
            structured_replies: false,
            offered,
            bytes: None,
            received: 0,
            to_send: 0,
            begun: None,
            told_bytes: None,
        };
        Guests { front_end: None, nbd: vec![client] }
    }

    #[track_caller]
    fn expect(offer: Offer, guests: Guests<RawFd>, verdict: &str) {
        let offers = Offers { disks: [("root".into(), offer)].into(), port: None };
        let said = offers.check(&description(guests)).err().unwrap_or_default();
        let whole = format!("it does not offer {verdict}, which the guest of root uses");
        assert_eq!(said, if verdict.is_empty() { verdict } else { &whole });
    }

    #[test]
    fn a_program_that_offers_less_than_a_hypervisor_uses_is_refused() {
        expect(OFFER, hypervisor(0x7200, 4), "");
        // It may boot another system.
        expect(Offer { features: 0x5200, ..OFFER }, hypervisor(0x5200, 4), "discard");
        expect(Offer { features: 0x5200, ..OFFER }, hypervisor(0x7200, 4), "discard");
        expect(Offer { features: 0x7000, ..OFFER }, hypervisor(0x0210, 4), "feature bit 4, flush");
        expect(Offer { features: 0x7220, ..OFFER }, hypervisor(0, 0), "writing");
        expect(Offer { protocol_features: 0x820B, ..OFFER }, hypervisor(0, 0), "a record of requests in flight");
        expect(Offer { queues: 3, ..OFFER }, hypervisor(0, 4), "4 queues (at most 3)");
        expect(Offer { queues: 3, ..OFFER }, hypervisor(0, 1), "4 queues (at most 3)");
        expect(Offer { sector: 4096, ..OFFER }, hypervisor(0, 0), "sectors of 512 bytes");
        expect(Offer::default(), Guests::default(), "");
    }

    #[test]
    fn a_program_that_offers_less_than_an_nbd_client_was_told_is_refused() {
        expect(OFFER, client(Some(OFFER)), "");
        expect(Offer { nbd_flags: 0x4D, ..OFFER }, client(Some(OFFER)), "trim");
        expect(Offer { nbd_flags: 0x6F, ..OFFER }, client(Some(OFFER)), "writing");
        expect(Offer { nbd_flags: 0, ..OFFER }, client(None), "");
    }

    #[test]
    fn offers_that_promise_less_than_former_ones_are_refused_for_what_both_have() {
        let offers = |name: &str, offer| Offers { disks: [(name.into(), offer)].into(), port: Some(OFFER) };
        let former = offers("root", OFFER);
        for (offer, verdict) in [
            (OFFER, ""),
            (Offer { queues: 8, ..OFFER }, ""),
            (Offer { features: 0x5200, ..OFFER }, "root would not offer discard"),
            (Offer { features: 0x7220, ..OFFER }, "root would not offer writing"),
            (Offer { nbd_flags: 0x6F, ..OFFER }, "root would not offer writing"),
            (Offer { nbd_flags: 0x2D, ..OFFER }, "root would not offer write-zeroes"),
            (Offer { protocol_features: 0x820B, ..OFFER }, "root would not offer a record of requests in flight"),
            (Offer { queues: 3, ..OFFER }, "root would not offer 4 queues (at most 3)"),
            (Offer { sector: 4096, ..OFFER }, "root would not offer sectors of 512 bytes"),
        ] {
            assert_eq!(offers("root", offer).check_beside(&former).err().unwrap_or_default(), verdict);
        }
        assert_eq!(offers("other", Offer::default()).check_beside(&former), Ok(()));
        let said = Offers { port: Some(Offer { queues: 1, ..OFFER }), ..former.clone() }.check_beside(&former);
        assert_eq!(said.unwrap_err(), "the port would not offer 4 queues (at most 1)");
    }

    #[test]
    fn an_offer_of_a_later_program_is_read_whatever_it_has_besides() {
        let text = r#"{"disks":{"root":{"features":29184,"queues":4,"zones":[1]}},"zoned":{"root":true}}"#;
        let offers: Offers = serde_json::from_str(text).unwrap();
        let offer = Offer { features: 0x7200, queues: 4, ..Offer::default() };
        assert_eq!(offers, Offers { disks: [("root".into(), offer)].into(), port: None });
    }

    #[test]
    fn a_disk_that_goes_is_refused_if_a_guest_is_attached() {
        let none = Offers::default();
        assert_eq!(none.check(&description(Guests::default())), Ok(()));
        let said = none.check(&description(client(None))).unwrap_err();
        assert_eq!(said, "it would not have root, to which a guest is attached");
        let mut port = description(Guests::default());
        port.port_guests = client(None);
        assert!(none.check(&port).unwrap_err().contains("the port"));
    }
}
