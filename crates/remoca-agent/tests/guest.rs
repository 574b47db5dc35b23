//! The agent in a real guest, with a port that the test can inspect.

#![allow(clippy::unwrap_used, reason = "the helpers are part of the tests")]

mod support;

use std::time::{Duration, Instant};

use remoca_lab::figures::{self, Figure, Spread};
use remoca_lab::{Guest, GuestConfig, Image, Lab, Recipe};
use support::blocks::{BlockSet, first_word};
use support::port::{Statistics, TestPort};
use support::{DATA_MIB, LIMIT, data_disk, empty_disk, guest, read_data, snapshot, start_agent, stop_agent, vmstat};

/// Waits for an event that occurs by itself, such as the agent's next statistics.
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        // Some wait for several readings.
        assert!(started.elapsed() < 3 * LIMIT, "{what} did not come");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Number of pages of a reading, about a fifth of all, that must be in the statistics before they say something of it.
const PAGES_MIN: u64 = 20_000;
/// Number of times to read until a busy host lets the port take what it is sent.
const READINGS_MAX: usize = 8;

/// Reads until far more pages of one reading are chosen, and come, than one of 64. How many the port takes depends on the host.
fn read_until_all_come(guest: &mut Guest, port: &TestPort) {
    wait_until("all pages", || {
        let received = port.state().received;
        let chosen = port.state().statistics.chosen();
        read_data(guest);
        let state = port.state();
        state.received > received + 5000 && state.statistics.chosen() > chosen + PAGES_MIN
    });
}

/// Tests that every page that reclaim evicts reaches the port, and holds what the disks hold.
#[test]
fn evicted_pages_reach_the_port_with_the_content_of_the_disks() {
    check_content("agent-content", &Recipe::bookworm(), MOUNT_EXT4);
}

/// Tests that large folios arrive page by page: XFS keeps files in folios of many pages.
#[test]
#[ignore = "long: cargo xtask test-long"]
fn large_folios_reach_the_port_page_by_page() {
    let orders = check_content("agent-folios", &Recipe::bookworm(), MOUNT_XFS);
    assert_large_folios(&orders);
}

/// Tests the same binary on the kernel of Debian 13, with multi-gen LRU and large folios.
#[test]
fn same_binary_on_linux_6_12() {
    let orders = check_content("agent-6.12", &Recipe::trixie(), MOUNT_XFS);
    assert_large_folios(&orders);
}

fn assert_large_folios(orders: &str) {
    println!("{orders}");
    let large = orders.lines().any(|line| line.contains("order:") && !line.contains(" 0 }"));
    assert!(large, "no folio of more than one page was evicted: {orders}");
}

const MOUNT_EXT4: &str = "mount -o ro,noatime $(disk-by-serial data) /mnt";

const MOUNT_XFS: &str = "mkdir -p /tmp/from && mount -o ro,noatime $(disk-by-serial data) /tmp/from
    disk=$(disk-by-serial empty) && mkfs.xfs -q $disk && mount -o noatime $disk /mnt
    cp /tmp/from/big /mnt/ && umount /mnt /tmp/from && mount -o ro,noatime $disk /mnt";

/// Reads more than fits into memory while the agent runs. Returns the number of folios of each order that left the
/// page cache.
fn check_content(name: &str, recipe: &Recipe, mount: &str) -> String {
    const FOLIO_ORDERS: &str = "/sys/kernel/tracing/events/filemap/mm_filemap_delete_from_page_cache";
    let lab = Lab::open().unwrap();
    let image = Image::ensure(&lab, recipe).unwrap();
    let (data, empty) = (data_disk(&lab), empty_disk());
    let mut known = BlockSet::default();
    known.add_image(&data);
    known.add_image(&image.root());
    let port = TestPort::start(known);
    let mut config = guest(&lab, name).disk(snapshot("data", &data)).disk(snapshot("empty", empty.path()));
    config.qemu_args = port.qemu_args();
    config.recipe = recipe.clone();
    let mut guest = config.boot(&lab).unwrap();

    guest.run(mount, LIMIT).unwrap();
    guest.run(&format!("echo hist:keys=order > {FOLIO_ORDERS}/trigger"), LIMIT).unwrap();
    start_agent(&mut guest, "remoca-agent");
    // The agent has found the port before it captures, and captures before it sends statistics.
    wait_until("first statistics", || port.state().statistics_count > 0);
    let stolen_before = vmstat(&mut guest, "pgsteal_file");
    read_data(&mut guest);
    read_data(&mut guest);
    let stolen = vmstat(&mut guest, "pgsteal_file") - stolen_before;
    let orders = guest.run(&format!("cat {FOLIO_ORDERS}/hist"), LIMIT).unwrap();
    let score = guest.run("cat /proc/$(pidof remoca-agent)/oom_score_adj", LIMIT).unwrap();
    let locked = guest.run("sed -n 's/^VmLck:[[:space:]]*//p' /proc/$(pidof remoca-agent)/status", LIMIT).unwrap();
    let (code, said) = stop_agent(&mut guest);
    guest.shut_down().unwrap();

    let state = port.state();
    let statistics = state.statistics;
    println!("{stolen} pages stolen by reclaim, {statistics:?}, locked {locked}");
    println!("{} received in {} requests, {} matched", state.received, state.request_count, state.matched);
    assert_eq!(code, "0", "{said}");
    assert_eq!(score, "-1000");
    assert_ne!(locked, "0 kB");
    assert!(state.faults.is_empty(), "{:?}", state.faults);
    assert_eq!(state.received, statistics.written);
    assert_eq!(statistics.captured, statistics.written, "what was captured went out");
    assert_eq!(statistics.sampled_out, 0);
    let seen = statistics.captured + statistics.lost;
    let read = 2 * DATA_MIB as u64 * 256;
    assert!(stolen * 2 > read, "reclaim stole {stolen} of {read} pages: the guest was not short of memory");
    assert!(seen.abs_diff(stolen) < stolen / 50, "reclaim stole {stolen} pages, the agent saw {seen}");
    assert!(state.matched * 100 >= state.received * 98, "{} of {} match", state.matched, state.received);
    orders
}

/// Memory of a small guest, in MiB.
const SMALL_MIB: u32 = 160;
/// Number of times to measure what the agent takes. Odd, for a median.
const ROUNDS: usize = 5;

/// Number of times to unplug the port until the agent sees by itself that it is gone.
const UNPLUG_TRIES: usize = 5;

/// Unplugs the port and plugs it in again, until the agent has noticed without using it. A write of pages or statistics that
/// happens to be under way fails first, and then that is what the agent says.
fn unplug_port(guest: &mut Guest) {
    const UNPLUG: &str = "before=$(grep -c 'the port is gone' /run/agent.log)
         for disk in /sys/block/vd*; do if grep -q remoca-port $disk/serial; then
             echo 1 > $(readlink -f $disk/device)/../remove; fi; done
         until [ $(grep -c 'the port is gone' /run/agent.log) -gt $before ]; do sleep 0.1; done
         grep 'the port is gone' /run/agent.log | tail -n 1";
    const PLUG_IN: &str = "echo 1 > /sys/bus/pci/rescan
         until tail -n 1 /run/agent.log | grep -q 'sending evicted'; do sleep 0.1; done";
    let noticed = (0..UNPLUG_TRIES).any(|_| {
        let said = guest.run(UNPLUG, LIMIT).unwrap();
        guest.run(PLUG_IN, LIMIT).unwrap();
        println!("{said}");
        said.contains("it was unplugged")
    });
    assert!(noticed, "the agent did not see in {UNPLUG_TRIES} tries that its port was unplugged");
}

/// Tests that the agent follows advice, and keeps running while its port fails, returns and restarts.
#[test]
fn agent_obeys_advice_and_outlives_failures_of_its_port() {
    let lab = Lab::open().unwrap();
    let data = data_disk(&lab);
    let port = TestPort::start(BlockSet::default());
    port.state().batch_page_count_max = 16;
    let mut config = guest(&lab, "agent-advice").disk(snapshot("data", &data));
    config.qemu_args = port.qemu_args();
    let mut guest = config.boot(&lab).unwrap();

    start_agent(&mut guest, "remoca-agent");
    let checked = guest.run("remoca-agent check", LIMIT).unwrap();
    assert!(checked.contains("in use by the agent that runs (process "), "{checked}");
    port.state().advice = 64;
    guest.run(MOUNT_EXT4, LIMIT).unwrap();
    // The agent reads advice when it writes statistics.
    wait_until("the advice's effect", || {
        read_data(&mut guest);
        port.state().statistics.sampled_out > 0
    });
    let before = port.state().statistics;
    read_data(&mut guest);
    // Few pages would say little of a share.
    wait_until("statistics", || port.state().statistics.sampled_out > before.sampled_out + PAGES_MIN);
    let after = port.state().statistics;
    let (chosen, sampled_out) = (after.chosen() - before.chosen(), after.sampled_out - before.sampled_out);
    println!("advised one of 64: {chosen} chosen, {sampled_out} sampled out");
    assert!((chosen * 32) < sampled_out && chosen * 128 > sampled_out, "{chosen} chosen, {sampled_out} not");

    // The VM process restarts, and forgets that no pages matched.
    {
        let mut state = port.state();
        state.advice = 0;
        state.boot_cookie = 2;
    }
    read_until_all_come(&mut guest, &port);

    port.state().failing = true;
    read_data(&mut guest);
    wait_until("a failed request", || port.state().failed_request_count > 0);
    guest.run("until grep -q 'the port is gone' /run/agent.log; do sleep 0.1; done", LIMIT).unwrap();
    let seen = guest.run("grep -c 'the port is gone' /run/agent.log", LIMIT).unwrap();
    assert_eq!(seen, "1");
    // While there is no port, no page is copied.
    read_data(&mut guest);
    port.state().failing = false;
    let received = port.state().received;
    guest.run("until tail -n 1 /run/agent.log | grep -q 'sending evicted'; do sleep 0.1; done", LIMIT).unwrap();
    read_until_all_come(&mut guest, &port);
    wait_until("pages after the failure", || {
        read_data(&mut guest);
        port.state().received > received + 50_000
    });
    unplug_port(&mut guest);
    let (code, said) = stop_agent(&mut guest);
    guest.shut_down().unwrap();

    let state = port.state();
    println!("{said}");
    assert_eq!(code, "0", "{said}");
    assert!(said.contains("the VM process was started anew"), "{said}");
    assert!(said.contains("the port is gone"), "{said}");
    let Statistics { captured, written, lost, .. } = state.statistics;
    assert!(captured - written < 5000 && lost > 50_000, "{captured} captured, {written} written, {lost} lost");
    assert!(state.request_page_count_max <= 16, "a request of {} pages", state.request_page_count_max);
    assert!(state.faults.is_empty(), "{:?}", state.faults);
}

/// Tests that the agent sends one class of pages if it is advised to: about as few as it should, and the same ones at each reading. Each page of
/// a large folio is judged by itself.
#[test]
fn one_class_of_pages_is_the_same_at_each_reading() {
    let lab = Lab::open().unwrap();
    let (data, empty) = (data_disk(&lab), empty_disk());
    let port = TestPort::start(BlockSet::default());
    port.state().classes = 64;
    let disks = [snapshot("data", &data), snapshot("empty", empty.path())];
    let mut config = disks.into_iter().fold(guest(&lab, "agent-classes"), GuestConfig::disk);
    config.qemu_args = port.qemu_args();
    let mut guest = config.boot(&lab).unwrap();
    guest.run(MOUNT_XFS, LIMIT).unwrap();
    start_agent(&mut guest, "remoca-agent");
    read_data(&mut guest);
    wait_until("the agent's answer", || port.state().statistics.classes == 64);
    let mut reading = || {
        for _ in 0..READINGS_MAX {
            let before = port.state().statistics;
            port.state().class.clear();
            read_data(&mut guest);
            wait_until("statistics", || port.state().statistics.sampled_out > before.sampled_out + PAGES_MIN);
            std::thread::sleep(Duration::from_secs(2));
            let after = port.state().statistics;
            let (chosen, left_out) = (after.chosen() - before.chosen(), after.sampled_out - before.sampled_out);
            let lost = after.lost - before.lost;
            println!("one class of 64: {chosen} chosen, {lost} of these lost, {left_out} left out");
            assert!(chosen * 32 < left_out && chosen * 128 > left_out);
            // There may be no room for some while the port gets no processor.
            if lost * 20 < chosen {
                return std::mem::take(&mut port.state().class);
            }
        }
        panic!("pages are lost at each of {READINGS_MAX} readings");
    };
    let (first, second) = (reading(), reading());
    let common = first.intersection(&second).count();
    println!("{} pages, {}, and {common} of these in common", first.len(), second.len());
    assert!(common * 2 > first.len(), "another reading takes other pages");
    let is_sent = |number: usize| first.contains(&first_word(number));
    let pairs = (0..DATA_MIB * 256).filter(|number| is_sent(*number) && is_sent(number + 1)).count();
    println!("{pairs} of them are before one that is in the class too");
    assert!(pairs * 8 < first.len(), "whole folios are in the class");

    port.state().classes = 0;
    wait_until("the agent's answer", || {
        read_data(&mut guest);
        port.state().statistics.classes == 0
    });
    read_until_all_come(&mut guest, &port);
    let (code, said) = stop_agent(&mut guest);
    guest.shut_down().unwrap();
    assert_eq!(code, "0", "{said}");
    assert!(port.state().faults.is_empty(), "{:?}", port.state().faults);
}

/// Tests that a small guest keeps its memory: what the agent takes is measured after it has sent pages, several times because
/// the guest's kernel takes and gives back megabytes as well. Leaves the figure for `make bench-targets` (P19).
#[test]
fn agent_takes_little_of_a_small_guest() {
    // No shell waits for the agent, which would count as well.
    const START: &str = "remoca-agent < /dev/null > /run/agent.log 2>&1 &
         until grep -q 'sending evicted pages' /run/agent.log; do sleep 0.05; done";
    const STOP: &str = "kill $(pidof remoca-agent); while pidof remoca-agent > /dev/null; do sleep 0.05; done";
    let lab = Lab::open().unwrap();
    let data = data_disk(&lab);
    let port = TestPort::start(BlockSet::default());
    let mut config = guest(&lab, "agent-footprint").disk(snapshot("data", &data));
    config.memory_mib = SMALL_MIB;
    config.qemu_args = port.qemu_args();
    let mut guest = config.boot(&lab).unwrap();
    guest.run(MOUNT_EXT4, LIMIT).unwrap();
    read_data(&mut guest);

    let mut without = vec![memory_available_kib(&mut guest)];
    let mut with_agent = Vec::new();
    for _ in 0..ROUNDS {
        guest.run(START, LIMIT).unwrap();
        guest.run("head -c 200M /mnt/big > /dev/null", LIMIT).unwrap();
        with_agent.push(memory_available_kib(&mut guest));
        guest.run(STOP, LIMIT).unwrap();
        without.push(memory_available_kib(&mut guest));
    }
    let said = guest.run("cat /run/agent.log", LIMIT).unwrap();
    guest.shut_down().unwrap();

    let mut taken: Vec<i64> = (0..ROUNDS).map(|n| (without[n] + without[n + 1]) / 2 - with_agent[n]).collect();
    println!("{said}\navailable without: {without:?} KiB, with the agent {with_agent:?} KiB: it takes {taken:?} KiB");
    taken.sort_unstable();
    let median = taken[ROUNDS / 2];
    assert!(median >= 1, "the noise is larger than what the agent takes: {taken:?} KiB");
    let megabytes = |kib: i64| kib as f64 * 1024.0 / 1e6;
    let spread = Spread::of(taken.iter().copied().map(megabytes).collect()).unwrap();
    figures::save("agent-memory", &[Figure::of_rounds("P19", ROUNDS, spread, None)], &()).unwrap();
    assert!(median <= 4000, "the agent takes {median} KiB");
}

/// Returns the memory that the guest could give to programs, in KiB, once nothing is cached.
fn memory_available_kib(guest: &mut Guest) -> i64 {
    let command =
        "sync; echo 3 > /proc/sys/vm/drop_caches; sed -n 's/^MemAvailable: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    guest.run(command, LIMIT).unwrap().parse().unwrap()
}
