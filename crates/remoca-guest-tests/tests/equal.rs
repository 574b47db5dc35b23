//! Memory is worth as much as a local tier as it is to the guest (the paper's section 3.4), and the curve says so beforehand. In small; the command
//! is `cargo run -p remoca-guest-tests --bin curves`.

use remoca_guest_tests::readers::{Bench, Kind, MIB, Memory, Work};
use remoca_guest_tests::{Result, remoca};
use remoca_protocol::control::CurveGrid;

const GUEST_MIB: u32 = 96;
const TIER_MIB: u32 = 32;
const GRID: CurveGrid = CurveGrid { first_bytes: 0, step_bytes: MIB, count: 65 };

#[test]
fn a_local_tier_is_worth_as_much_as_memory_of_the_guest() -> Result<()> {
    let bench = Bench::new(remoca()?, &[("set", 96)], 64 * MIB)?;
    let work = Work { set: "set", pattern: "rand", count: 1200, noise: None };
    let read = |left_mib: u32, kind: Kind| {
        let memory = Memory { boot_mib: GUEST_MIB + TIER_MIB, left_mib, lends: false };
        let mut vm = bench.start("vm", memory, kind)?;
        let warm = vm.read(&work, 1, GRID)?;
        let counted = vm.read(&work, 2, GRID)?;
        vm.end().map(|()| (warm.lost + counted.lost, counted))
    };
    let (lost, tiered) = read(GUEST_MIB, Kind::Tiered(u64::from(TIER_MIB) * MIB))?;
    let (_, all) = read(GUEST_MIB + TIER_MIB, Kind::Watched)?;
    let expected = tiered.expected_from_disk(u64::from(TIER_MIB) * MIB);
    let (with, without) = (tiered.from_disk as f64, all.from_disk as f64);
    println!(
        "{} read, {with} from disk, {lost} evictions lost; {expected:.0} by the curve; with all memory {without}",
        tiered.read
    );
    // A page that the agent had no room for is read once more.
    let (least, most) = (without * 0.85, without * 1.15 + lost as f64);
    assert!((least..=most).contains(&with), "{with} from disk with a tier, {without} with all memory");
    assert!((least..=most).contains(&expected), "{expected} by the curve, {without} with all memory");
    assert!(tiered.read as f64 > without * 1.3, "the guest's memory answers nearly all: the tier was not tested");
    Ok(())
}
