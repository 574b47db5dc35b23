//! Records traces of real guests: what programs read, write and make the guest evict, from the first mount of a new file system's disk on.
//!
//! For each workload, a guest without remoca makes the files, once. Then a guest of 96 MiB with the agent, whose disk is behind a `remoca disk`
//! with an empty cache, runs programs on them while `remoca trace record` runs. Read-ahead is Linux's own. What the simulation says of the
//! cache is printed beside what the VM process counted.
//!
//! `cargo run -p remoca-guest-tests --bin traces [PART OF A WORKLOAD'S NAME [MINUTES]]` writes `out/traces/NAME.trace`, of at most so many minutes (30). The
//! beginning of each, without times, also goes to `out/traces/short/NAME.trace`: those in `crates/remoca-bench/traces`.

use remoca_guest_tests::{Host, Image, LIMIT, Result, remoca, start_agent};
use remoca_lab::{Disk, Guest, GuestConfig, Lab, Recipe, Service, store};
use remoca_protocol::control::Status;
use remoca_protocol::trace::{FrameEncoder, TraceRecord, TracedOp, head, parse_trace};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Memory of the guest that makes the files.
const MAKER_MIB: u32 = 512;
const GUEST_MIB: u32 = 96;
const CACHE: &str = "48M";
const CACHE_BYTES: u64 = 48 << 20;
const IMAGE_BYTES: u64 = 2 << 30;
/// Time limit for the files of a workload, and for its programs unless the caller says less.
const WORK_MINUTES: u64 = 30;
/// Bytes of a short trace, without its head and the headers of its frames.
const SHORT_BYTES: usize = 300_000;

/// Programs that a guest runs. Both scripts have the file system at `/mnt`.
struct Workload {
    name: &'static str,
    make: &'static str,
    run: &'static str,
}

const WORKLOADS: [Workload; 3] = [
    // An SQLite table of about 250 MiB with an index. Rows are read one by one, newer ones more often; by the index, where popular keys have rows
    // all over the table; in ranges; and twice all of them. Some are changed.
    Workload {
        name: "database",
        make: "sqlite3 /mnt/shop.db \"
            PRAGMA page_size = 4096; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
            CREATE TABLE item (id INTEGER PRIMARY KEY, owner INT, price INT, note BLOB);
            WITH RECURSIVE n(i, x) AS (SELECT 1, 12345 UNION ALL SELECT i + 1, x * 1103515245 + 12345 & 2147483647 FROM n WHERE i < 600000)
            INSERT INTO item SELECT i, x >> 8 & 32767, x >> 4 & 1023, randomblob(400) FROM n;
            CREATE INDEX owners ON item (owner);\"",
        run: "numbers() { echo \"WITH RECURSIVE n(i, x) AS (SELECT 1, $1 UNION ALL SELECT i + 1, x * 1103515245 + 12345 & 2147483647 FROM n WHERE i < $2),
                u(u) AS (SELECT x / 2147483648.0 FROM n)\"; }
            for turn in $(seq 1 16); do
                {
                    echo \"$(numbers $((turn * 7919)) 2000) SELECT count(length(note)) FROM u CROSS JOIN item ON id = 600000 - CAST(599999 * u * u * u * u AS INT);\"
                    echo \"$(numbers $((turn * 104729)) 200) SELECT sum(price) FROM u CROSS JOIN item ON owner = CAST(32767 * u * u * u AS INT) * 20503 & 32767;\"
                    echo \"$(numbers $((turn * 31337)) 3) SELECT sum(length(note)) FROM u CROSS JOIN item ON id BETWEEN CAST(590000 * u AS INT) AND CAST(590000 * u AS INT) + 4000;\"
                    echo \"$(numbers $((turn * 65537)) 50) UPDATE item SET price = price + 1 WHERE id IN (SELECT 600000 - CAST(599999 * u * u * u * u AS INT) FROM u);\"
                    [ $((turn % 8)) != 4 ] || echo \"SELECT max(length(note)) FROM item;\"
                } | sqlite3 /mnt/shop.db > /tmp/said || exit 1
            done",
    },
    // The programs and libraries of a system: folders are read whole, some far more often than others, names are looked up, parts are searched, and
    // twice all is packed.
    Workload {
        name: "files",
        make: "mkdir /mnt/tree && cp -a /usr /mnt/tree && cd /mnt/tree && find . -type f -printf '%h\\t%p\\n' | sort > /mnt/names",
        run: "cd /mnt/tree
            for turn in $(seq 1 20); do
                awk -F '\\t' -v turn=$turn '
                    $1 != last { folders++; last = $1 } { name[folders] = name[folders] $2 \"\\n\" }
                    END { srand(turn); for (i = 0; i < 150; i++) printf \"%s\", name[1 + int(folders * rand() ^ 3)] }' /mnt/names |
                    xargs -d '\\n' cat > /dev/null
                [ $((turn % 3)) != 0 ] || find . -newer /mnt/names > /dev/null
                [ $((turn % 4)) != 0 ] || grep -rl include usr/lib/gcc usr/include usr/share > /dev/null
                [ $((turn % 5)) != 0 ] || find usr/bin usr/sbin -type f -exec md5sum {} + > /dev/null
                [ $((turn % 10)) != 6 ] || tar c . | cat > /dev/null
            done; true",
    },
    // A server's file of 320 MiB: blocks are read by Zipf's law, one in 10 is written. Twice all of it is read in order.
    // fio reserves more memory than the guest has.
    Workload {
        name: "server",
        make: "dd if=/dev/urandom of=/mnt/file bs=1M count=320",
        run: "echo 1 > /proc/sys/vm/overcommit_memory
            for turn in $(seq 1 8); do
                fio --name=zipf --filename=/mnt/file --rw=randrw --rwmixread=90 --bs=4k --size=320M --number_ios=12000 --randseed=$turn \
                    --random_distribution=zipf:0.9 --norandommap --ioengine=psync --allow_file_create=0 --invalidate=0 > /dev/null || exit 1
                [ $((turn % 4)) != 2 ] || dd if=/mnt/file of=/dev/null bs=64k
            done",
    },
];

fn main() -> Result<()> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let minutes = std::env::args().nth(2).map_or(Ok(WORK_MINUTES), |minutes| minutes.parse())?;
    let lab = Lab::open()?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../out/traces");
    std::fs::create_dir_all(folder.join("short"))?;
    println!(
        "| workload | records | blocks read | from the cache, counted | simulated | written | evicted | different |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let chosen: Vec<_> = WORKLOADS.iter().filter(|workload| workload.name.contains(&wanted)).collect();
    if chosen.is_empty() {
        return Err(format!("there is no workload {wanted}: database, files, server").into());
    }
    for workload in chosen {
        let path = folder.join(workload.name).with_extension("trace");
        let image = folder.join(workload.name).with_extension("img");
        if !image.exists() {
            eprintln!("{}: files", workload.name);
            make(&lab, workload, &image)?;
        }
        let (before, after) = record(&lab, workload, &image, &path, minutes)?;
        shorten(&path, &folder.join("short").join(workload.name).with_extension("trace"))?;
        compare(workload, &path, &before, &after)?;
    }
    Ok(())
}

/// Returns the image of the guests. The larger packages are files to read.
fn recipe() -> Recipe {
    Recipe::bookworm().with(&["gcc", "libc6-dev", "python3", "sqlite3"])
}

/// Returns the guest that makes the files.
fn guest(name: &str, mib: u32) -> GuestConfig {
    let mut config = GuestConfig::new(name, mib);
    config.recipe = recipe();
    config.boot_limit = LIMIT;
    config
}

/// Makes the files of a workload on a new image.
fn make(lab: &Lab, workload: &Workload, image: &Path) -> Result<()> {
    let unfinished = image.with_extension("new");
    store::sparse_image(&unfinished, IMAGE_BYTES)?;
    store::format_ext4(&unfinished)?;
    let mut guest = guest("traces-maker", MAKER_MIB).disk(Disk::file("data", &unfinished)).boot(lab)?;
    guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
    guest.run(workload.make, Duration::from_secs(WORK_MINUTES * 60))?;
    guest.run("sync; umount /mnt", LIMIT)?;
    guest.shut_down()?;
    Ok(std::fs::rename(unfinished, image)?)
}

/// Runs a workload behind a VM process for at most so many minutes, and records it. Returns the status of the process before and after.
fn record(lab: &Lab, workload: &Workload, image: &Path, trace: &Path, minutes: u64) -> Result<(Status, Status)> {
    let mut host = Host::new(remoca()?, "64M")?;
    let copy = host.folder().join("data.img");
    let status = Command::new("cp").arg("--sparse=always").args([image, &copy]).status()?;
    if !status.success() {
        return Err(format!("cp ended with {status}").into());
    }
    host.start_server()?;
    // A hedged read would be counted at the disk although the cache has the block.
    host.start_process(&[Image { name: "data", path: copy, options: "" }], CACHE, &["--no-hedge"])?;
    host.wait_until("the cache has its size", |status| status.cache.granted_bytes == CACHE_BYTES)?;
    let mut config = host.guest(lab, "traces")?;
    config.recipe = recipe();
    config.memory_mib = GUEST_MIB;
    let mut guest = config.boot(lab)?;
    start_agent(&mut guest)?;
    let before = host.status()?;
    let recorder = start_recorder(&host, trace, minutes)?;
    eprintln!("{}: recording", workload.name);
    run(&mut guest, workload.run, minutes)?;
    let after = host.status()?;
    stop_recorder(recorder)?;
    guest.shut_down()?;
    host.stop_process()?;
    Ok((before, after))
}

fn run(guest: &mut Guest, script: &str, minutes: u64) -> Result<()> {
    guest.run("mount -o noatime $(disk-by-serial data) /mnt", LIMIT)?;
    guest.put("/tmp/work", script.as_bytes())?;
    let limit = Duration::from_secs(minutes * 60);
    guest.run(&format!("timeout {} sh /tmp/work || [ $? = 124 ]", limit.as_secs()), limit + LIMIT)?;
    // The agent sends the last pages once a second.
    guest.run("sync; sleep 1.1", LIMIT)?;
    Ok(())
}

fn start_recorder(host: &Host, trace: &Path, minutes: u64) -> Result<Service> {
    let mut command = Command::new(host.program());
    command.args(["trace", "record", "--time", &format!("{}m", minutes + 30)]).arg(host.control()).arg("-o").arg(trace);
    let mut recorder = Service::start("remoca trace record", command, &host.folder().join("record.log"))?;
    recorder.wait_for_log("recording", LIMIT)?;
    Ok(recorder)
}

fn stop_recorder(mut recorder: Service) -> Result<()> {
    let status = recorder.terminate(LIMIT)?;
    let said = recorder.log_tail();
    eprintln!("{said}");
    if status.success() { Ok(()) } else { Err(format!("remoca trace record ended with {status}: {said}").into()) }
}

/// Writes the first records of a trace without their times, and as many as fit.
fn shorten(from: &Path, to: &Path) -> Result<()> {
    let trace = parse_trace(&std::fs::read(from)?)?;
    if trace.lost > 0 {
        return Err(format!("{} records were lost: the machine is too busy to record", trace.lost).into());
    }
    let (mut bytes, mut encoder, mut used) = (head().to_vec(), FrameEncoder::new(), 0);
    let mut end_frame = |encoder: &mut FrameEncoder| {
        let frame = encoder.finish(0, true);
        used += frame.len();
        bytes.extend(frame);
        used < SHORT_BYTES
    };
    for record in trace.records {
        encoder.push(&TraceRecord { issued_ns: 0, latency_ns: 0, ..record });
        if encoder.is_full() && !end_frame(&mut encoder) {
            break;
        }
    }
    if encoder.records() > 0 {
        end_frame(&mut encoder);
    }
    Ok(std::fs::write(to, bytes)?)
}

/// Prints what the VM process counted beside what the simulation says of the trace.
fn compare(workload: &Workload, path: &Path, before: &Status, after: &Status) -> Result<()> {
    let grown = |name: &str| {
        let of = |status: &Status| status.counters.get(name).copied().unwrap_or_default();
        of(after) - of(before)
    };
    let output = Command::new(remoca()?)
        .args(["sim", "--remote", CACHE, "--policy", "adaptive", "--curve", "none", "-o", "json"])
        .arg(path)
        .output()?;
    if !output.status.success() {
        return Err(format!("remoca sim: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let simulated: Value = serde_json::from_slice(&output.stdout)?;
    let records = parse_trace(&std::fs::read(path)?)?.records;
    let blocks =
        |op: TracedOp| records.iter().filter(|record| record.op == op).map(|record| record.blocks).sum::<u64>();
    // Blocks that the cache had, but that were read from the disk along with their neighbours, count as hits of single blocks.
    let counted = grown("hit_blocks") + grown("covered_blocks");
    println!(
        "| {} | {} | {} | {counted} | {} | {} | {} | {} |",
        workload.name,
        records.len(),
        grown("read_blocks"),
        simulated["blocks"]["remote"],
        blocks(TracedOp::Write),
        blocks(TracedOp::Evicted),
        simulated["footprint"],
    );
    eprintln!("{:?}", after.counters);
    Ok(())
}
