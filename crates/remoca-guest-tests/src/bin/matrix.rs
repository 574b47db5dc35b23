//! Prints the fate of evicted pages under each kernel and file system, as a table in Markdown.
//!
//! `cargo run --release -p remoca-guest-tests --bin matrix [PART OF A ROW'S NAME]`

use remoca_guest_tests::Result;
use remoca_guest_tests::file_systems::{
    BTRFS, BTRFS_COMPRESSED, BTRFS_NODATACOW, EXT4, Kernel, Outcome, Scale, XFS, run, share,
};

const SCALE: Scale = Scale { file_count: 12, file_mib: 32, accesses: 3000, rounds: 3 };

fn main() -> Result<()> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!(
        "| Linux, file system | evicted | in large folios | lost | matched | unmatched | of other disks | dropped | hits |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for kernel in [Kernel::Linux6_1, Kernel::Linux6_12] {
        for file_system in [EXT4, XFS, BTRFS, BTRFS_NODATACOW, BTRFS_COMPRESSED] {
            let name = format!("{}, {}", kernel.name(), file_system.name);
            if name.contains(&wanted) {
                println!("{}", row(&name, &run(kernel, &file_system, &SCALE)?));
            }
        }
    }
    Ok(())
}

fn row(name: &str, outcome: &Outcome) -> String {
    let Outcome { stolen, lost, reported, unmatched, dropped, .. } = outcome;
    let of_all = |count: u64| format!("{count} ({:.2} %)", share(count, *stolen) * 100.0);
    let of_reported = |count: u64| format!("{count} ({:.2} %)", share(count, *reported) * 100.0);
    format!(
        "| {name} | {stolen} | {:.0} % | {} | {} | {} | {} | {} | {:.1} % |",
        outcome.folios.large_share() * 100.0,
        of_all(*lost),
        of_reported(reported - unmatched),
        of_reported(*unmatched),
        outcome.folios.elsewhere,
        of_reported(*dropped),
        outcome.hit_ratio() * 100.0,
    )
}
