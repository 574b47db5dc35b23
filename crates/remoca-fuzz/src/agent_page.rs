//! The two pages of the eviction port's block 0: what the agent reads from a host, what the host reads from an agent,
//! and whether both mean the same.

// The agent's own parser. Its crate is not used, because it would require libbpf and an eBPF compiler.
#[path = "../../remoca-agent/src/page.rs"]
mod page;

use crate::source::Source;
use page::{ADVICE_MAX, BATCH_PAGE_COUNT_MAX, IdentificationPage, PAGE_BYTES, Page, StatisticsPage};
use remoca_core::engine::{CLASSES, EngineStats};
use remoca_protocol::port;

pub fn run(data: &[u8]) {
    let mut raw = Page::ZERO;
    let length = data.len().min(PAGE_BYTES);
    raw.0[..length].copy_from_slice(&data[..length]);
    if let Ok(page) = IdentificationPage::parse(&raw) {
        assert!((1..=BATCH_PAGE_COUNT_MAX).contains(&page.batch_page_count_max));
        assert!((1..=ADVICE_MAX).contains(&page.sample_one_in) && (1..=ADVICE_MAX).contains(&page.classes));
    }
    assert_eq!(
        port::agent_stats(&data[..length]).is_some(),
        length == PAGE_BYTES && raw.0.starts_with(b"REMOCAST\x01\0\0\0")
    );
    both_ends_agree(&mut Source(data));
}

fn both_ends_agree(source: &mut Source) {
    let mut number = || u64::from(source.word()) << 7;
    let stats = EngineStats {
        evictions_reported: number(),
        evictions_admitted: number(),
        evictions_unmatched: number(),
        evictions_dropped: number(),
        ..EngineStats::default()
    };
    let cookie = number();
    let [advice, classes] = [number(), number()].map(|number| u32::try_from(number % 2048).unwrap());
    let read = IdentificationPage::parse(&Page(port::identification(&stats, cookie, advice, classes))).unwrap();
    let told = [read.received, read.matched, read.unmatched, read.dropped, read.boot_cookie];
    let meant = [stats.evictions_admitted, stats.evictions_unmatched, stats.evictions_dropped, cookie];
    assert_eq!((told[0], &told[1..]), (stats.evictions_reported, &meant[..]));
    assert_eq!([read.sample_one_in, read.classes], [advice, classes].map(|number| number.clamp(1, ADVICE_MAX)));

    let statistics = StatisticsPage {
        captured: number(),
        lost: number(),
        sampled_out: number(),
        written: number(),
        start_cookie: number(),
        memory_wait: u32::try_from(number() % 20_000).ok(),
        classes: u32::try_from(number() % 2048).unwrap(),
    };
    let mut page = Page::ZERO;
    statistics.encode(&mut page);
    let read = port::agent_stats(&page.0).unwrap();
    let told = [read.captured, read.lost, read.sampled_out, read.written, read.cookie];
    let StatisticsPage { captured, lost, sampled_out, written, start_cookie, memory_wait, classes } = statistics;
    assert_eq!(read.classes, if classes == CLASSES { classes } else { 0 });
    assert_eq!(read.memory_wait, memory_wait.map(|wait| wait.min(10_000)));
    assert_eq!(told, [captured, lost, sampled_out, written, start_cookie]);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let mut statistics = Page::ZERO;
    StatisticsPage {
        captured: 1,
        lost: 2,
        sampled_out: 3,
        written: 4,
        start_cookie: 5,
        memory_wait: Some(6),
        classes: 7,
    }
    .encode(&mut statistics);
    vec![port::identification(&EngineStats::default(), 77, 64, 128)[..64].to_vec(), statistics.0.to_vec()]
}
