//! The file systems and kernels that differ most from ext4 on 6.1, which `faults` uses: large folios and multi-gen
//! LRU; copy on write with checksums, on several devices as far as the kernel knows. `matrix` runs all of them.

use remoca_guest_tests::Result;
use remoca_guest_tests::file_systems::{BTRFS, FileSystem, Kernel, Outcome, Scale, XFS, run};

const SCALE: Scale = Scale { file_count: 10, file_mib: 32, accesses: 500, rounds: 2 };

fn check(kernel: Kernel, file_system: &FileSystem) -> Result<Outcome> {
    let outcome = run(kernel, file_system, &SCALE)?;
    println!("{outcome:?}");
    let seen = outcome.captured + outcome.lost;
    assert!(outcome.stolen > 60_000, "the guest was not short of memory: {outcome:?}");
    assert!(seen.abs_diff(outcome.stolen) < outcome.stolen / 50, "the agent sees what reclaim takes: {outcome:?}");
    assert!(outcome.unmatched < outcome.folios.elsewhere + outcome.stolen / 50, "known content: {outcome:?}");
    assert!(outcome.hit_blocks > 20_000, "it is cached: {outcome:?}");
    Ok(outcome)
}

#[test]
fn xfs_with_large_folios_on_linux_6_12() -> Result<()> {
    let outcome = check(Kernel::Linux6_12, &XFS)?;
    assert!(outcome.folios.large_share() > 0.1, "large folios were evicted: {outcome:?}");
    Ok(())
}

#[test]
#[ignore = "long: cargo xtask test-long"]
fn btrfs_on_linux_6_1() -> Result<()> {
    check(Kernel::Linux6_1, &BTRFS).map(drop)
}
