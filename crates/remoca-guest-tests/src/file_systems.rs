//! Runs one kernel and one file system through the whole system: a guest with less memory than data. Checks every
//! byte, and the fate of the pages that the guest evicted.
//!
//! Used by the test `file_systems` with two short cases, and by the program `matrix` with all of them.

use crate::{Host, Image, LIMIT, Result, assert_kernel_is_content, remoca, slow, start_agent, stop_agent};
use remoca_lab::{Guest, Lab, Recipe, store};
use std::collections::BTreeMap;

/// Trace event of a folio that leaves the page cache, for any reason.
const FOLIO_LEAVES: &str = "/sys/kernel/tracing/events/filemap/mm_filemap_delete_from_page_cache";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    Linux6_1,
    Linux6_12,
}

impl Kernel {
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Linux6_1 => "6.1",
            Kernel::Linux6_12 => "6.12",
        }
    }

    pub fn recipe(self) -> Recipe {
        match self {
            Kernel::Linux6_1 => Recipe::bookworm(),
            Kernel::Linux6_12 => Recipe::trixie(),
        }
    }
}

/// A file system, and the commands that make, mount and check it in the guest.
#[derive(Clone, Copy, Debug)]
pub struct FileSystem {
    pub name: &'static str,
    pub(crate) make: &'static str,
    pub(crate) mount_options: &'static str,
    pub(crate) check: &'static str,
    /// Whether its files are text instead of signed sectors, which cannot be compressed.
    text: bool,
}

/// ext4 with blocks of 4 KiB, whatever the size of the disk.
pub const EXT4: FileSystem = FileSystem {
    name: "ext4",
    make: "mkfs.ext4 -q -b 4096",
    mount_options: "noatime",
    check: "e2fsck -fn",
    text: false,
};

pub const XFS: FileSystem =
    FileSystem { name: "XFS", make: "mkfs.xfs -q -f", mount_options: "noatime", check: "xfs_repair -n", text: false };

pub const BTRFS: FileSystem =
    FileSystem { name: "btrfs", make: "mkfs.btrfs -q -f", mount_options: "noatime", check: "btrfs check", text: false };

/// btrfs without checksums, and with blocks written in place.
pub const BTRFS_NODATACOW: FileSystem =
    FileSystem { name: "btrfs, nodatacow", mount_options: "noatime,nodatacow", ..BTRFS };

/// btrfs with compression: the content of the page cache is not on the disk.
pub const BTRFS_COMPRESSED: FileSystem =
    FileSystem { name: "btrfs, compressed text", mount_options: "noatime,compress=zstd:1", text: true, ..BTRFS };

/// Amount of work. The guest has 256 MiB.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub file_count: u32,
    pub file_mib: u32,
    /// Number of records of 96 KiB that are accessed; one in ten is rewritten.
    pub accesses: u32,
    /// Number of sequential reads of all files after that.
    pub rounds: u32,
}

/// Fate of the evicted pages, and of the reads.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Pages of files that reclaim took, as counted by the guest's kernel.
    pub stolen: u64,
    /// Pages captured by the agent.
    pub captured: u64,
    /// Pages not captured, for lack of room in the agent's ring.
    pub lost: u64,
    /// Pages left out by the port's advice.
    pub sampled_out: u64,
    /// Pages that arrived at the port.
    pub reported: u64,
    /// Arrived pages whose content the disk is not known to hold.
    pub unmatched: u64,
    /// Arrived pages for which there was no room on the way to the memory server.
    pub dropped: u64,
    pub read_blocks: u64,
    /// Blocks read that the memory server answered, or that were known to be zero.
    pub hit_blocks: u64,
    pub folios: Folios,
}

/// Pages that left the page cache, for any reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folios {
    /// Pages of the file system under test, by the order of their folio.
    pub page_counts: BTreeMap<u32, u64>,
    /// Pages of the guest's root and payload disks, which are not cached: evictions that cannot match.
    pub elsewhere: u64,
}

impl Folios {
    fn of(guest: &mut Guest) -> Result<Folios> {
        let histogram = guest.run(&format!("cat {FOLIO_LEAVES}/hist"), LIMIT)?;
        let others = guest.run("mountpoint -d /; mountpoint -d /payload", LIMIT)?;
        Ok(Folios::parse(&histogram, &others))
    }

    /// Parses lines such as `{ s_dev:  266338336, order:          2 } hitcount:        978`, and others such as
    /// `254:0`.
    fn parse(histogram: &str, others: &str) -> Folios {
        let number = |line: &str| {
            let (major, minor) = line.split_once(':')?;
            Some((major.parse::<u64>().ok()? << 20) | minor.trim().parse::<u64>().ok()?)
        };
        let others: Vec<u64> = others.lines().filter_map(number).collect();
        let line = |line: &str| {
            let (device, rest) = line.strip_prefix("{ s_dev:")?.split_once(", order:")?;
            let (order, count) = rest.split_once("} hitcount:")?;
            let (device, order) = (device.trim().parse::<u64>().ok()?, order.trim().parse::<u32>().ok()?);
            Some((device, order, count.trim().parse::<u64>().ok()? << order))
        };
        let mut folios = Folios::default();
        for (device, order, page_count) in histogram.lines().filter_map(line) {
            if others.contains(&device) {
                folios.elsewhere += page_count;
            } else {
                *folios.page_counts.entry(order).or_default() += page_count;
            }
        }
        folios
    }

    /// Returns the share of the pages that were in folios of more than one page.
    pub fn large_share(&self) -> f64 {
        share(self.page_counts.range(1..).map(|(_, count)| count).sum(), self.page_counts.values().sum())
    }
}

impl Outcome {
    pub fn hit_ratio(&self) -> f64 {
        share(self.hit_blocks, self.read_blocks)
    }
}

pub fn share(part: u64, whole: u64) -> f64 {
    // The counts are far below 2^52.
    #[expect(clippy::cast_precision_loss, reason = "a share is rounded anyway")]
    let share = part as f64 / whole.max(1) as f64;
    share
}

/// Runs one case. A wrong byte or a complaint of the guest's kernel is an error, or a panic.
pub fn run(kernel: Kernel, file_system: &FileSystem, scale: &Scale) -> Result<Outcome> {
    let lab = Lab::open()?;
    let mut host = Host::new(remoca()?, "640M")?;
    let image = host.folder().join("data.img");
    store::sparse_image(&image, 1 << 30)?;
    host.start_server()?;
    let disk = slow(&image, &host, 5)?;
    host.start_process(&[Image { name: "data", path: disk.uri().into(), options: "" }], "512M", &[])?;
    let mut config =
        host.guest(&lab, &format!("file-system-{}-{}", kernel.name(), file_system.name.replace(", ", "-")))?;
    config.recipe = kernel.recipe();
    let mut guest = config.boot(&lab)?;
    guest.run(&format!("{} $(disk-by-serial data)", file_system.make), LIMIT)?;
    mount(&mut guest, file_system)?;
    guest.run(&format!("echo hist:keys=s_dev,order > {FOLIO_LEAVES}/trigger"), LIMIT)?;
    start_agent(&mut guest)?;
    // The agent has found the port before it captures, and captures before it sends statistics.
    host.wait_until("the agent captures", |status| status.port.as_ref().is_some_and(|port| port.agent.is_some()))?;

    let stolen_before = stolen(&mut guest)?;
    let verify = work(&mut guest, file_system, scale)?;
    for round in 0..scale.rounds {
        guest.run(&verify, LIMIT)?;
        if round == 0 {
            guest.run("umount /mnt", LIMIT)?;
            mount(&mut guest, file_system)?;
        }
    }
    let stolen = stolen(&mut guest)? - stolen_before;
    let folios = Folios::of(&mut guest)?;
    stop_agent(&mut guest)?;
    let status = host.status()?;

    // Reads the same again, from the disk only.
    host.set(None, Some(false))?;
    guest.run("sync; echo 3 > /proc/sys/vm/drop_caches", LIMIT)?;
    guest.run(&verify, LIMIT)?;
    guest.run("umount /mnt", LIMIT)?;
    guest.run(&format!("{} $(disk-by-serial data)", file_system.check), LIMIT)?;
    assert_kernel_is_content(&mut guest)?;
    guest.shut_down()?;
    host.stop_process()?;

    let counter = |name: &str| status.counters.get(name).copied().ok_or_else(|| format!("there is no counter {name}"));
    for wrong in ["disk_errors", "fetch_wrong", "foreign_writes"] {
        assert_eq!(counter(wrong)?, 0, "{wrong}: {status:?}");
    }
    let agent = status.port.as_ref().and_then(|port| port.agent).ok_or("the agent said nothing of itself")?;
    Ok(Outcome {
        stolen,
        captured: agent.captured,
        lost: agent.lost,
        sampled_out: agent.sampled_out,
        reported: counter("evictions_reported")?,
        unmatched: counter("evictions_unmatched")?,
        dropped: counter("evictions_dropped")?,
        read_blocks: counter("read_blocks")?,
        hit_blocks: counter("hit_blocks")? + counter("zero_blocks")?,
        folios,
    })
}

fn mount(guest: &mut Guest, file_system: &FileSystem) -> Result<()> {
    guest.run(&format!("mount -o {} $(disk-by-serial data) /mnt", file_system.mount_options), LIMIT)?;
    Ok(())
}

/// Makes the files and works on them. Returns the command that reads and checks all of them.
fn work(guest: &mut Guest, file_system: &FileSystem, scale: &Scale) -> Result<String> {
    let Scale { file_count, file_mib, accesses, .. } = scale;
    if file_system.text {
        let make = format!(
            "mkdir /mnt/set && cd /mnt/set && for i in $(seq {file_count}); do
                seq ${{i}}00000000 ${{i}}99999999 | head -c {file_mib}M > $i; done; cksum * > /tmp/sums; sync"
        );
        guest.run(&make, LIMIT)?;
        return Ok("cd /mnt/set && cksum * | cmp - /tmp/sums".to_owned());
    }
    guest.run(
        &format!("remoca-workload create --dir /mnt/set --files {file_count} --file-size {file_mib}M --seed 5 && sync"),
        LIMIT,
    )?;
    guest.run(
        &format!(
            "remoca-workload write-mix --dir /mnt/set --journal /tmp/journal --record 96K --pattern zipf --ratio 10 \
             --sync-every 50 --count {accesses}"
        ),
        LIMIT,
    )?;
    Ok("remoca-workload verify --dir /mnt/set --journal /tmp/journal".to_owned())
}

fn stolen(guest: &mut Guest) -> Result<u64> {
    Ok(guest.run("sed -n 's/^pgsteal_file //p' /proc/vmstat", LIMIT)?.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folios_are_read_from_the_histogram() {
        let text = "# event histogram\n{ s_dev:  266338336, order:          6 } hitcount:          2\n\
                    { s_dev:  266338304, order:          0 } hitcount:         12\n\nTotals:\n";
        let expected = Folios { page_counts: BTreeMap::from([(6, 128)]), elsewhere: 12 };
        assert_eq!(Folios::parse(text, "254:0\n254:16"), expected);
    }
}
