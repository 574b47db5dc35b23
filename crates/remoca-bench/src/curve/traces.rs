//! Traces of what a guest's programs read, and what of it a cache below the guest sees.

use crate::guest::{PageCache, Random, Zipf, scattered};

/// Event that a cache below a guest sees, of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Read(u64),
    Evicted(u64),
    /// The block has another content now.
    Forgotten(u64),
    /// A read that no cache answers.
    Missed,
}

/// Where the blocks of a trace lie on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In one run.
    Contiguous,
    /// In runs of 64 blocks, spread over the disk.
    Extents,
    /// Each one anywhere.
    Scattered,
}

impl Layout {
    fn place(self, block: u64) -> u64 {
        match self {
            Self::Contiguous => block,
            Self::Extents => scattered(block / 64) * 64 + block % 64,
            Self::Scattered => scattered(block),
        }
    }
}

/// Returns named traces over about `n` blocks: the block of each read of a program.
pub fn traces(n: u64, seed: u64) -> Vec<(&'static str, Vec<u64>)> {
    let mut random = Random(seed);
    let reads = 0..24 * n;
    let mut popular = |ranks: u64, exponent: f64| {
        let (law, mut random) = (Zipf::new(ranks, exponent), Random(random.next()));
        // Neighbours are not equally popular.
        move || (law.rank(&mut random) * 7919 + 1) % ranks
    };
    let [mut mild, mut strong, mut beside, mut first, mut second, mut mixed] =
        [(n, 0.8), (n, 1.1), (n / 2, 0.9), (n / 2, 0.9), (n / 3, 0.7), (n / 3, 1.0)].map(|(r, e)| popular(r, e));
    let mut any = move |end: u64| random.next() % end;
    let mut newest = 0;
    vec![
        ("uniform", reads.clone().map(|_| any(n)).collect()),
        ("zipf 0.8", reads.clone().map(|_| mild()).collect()),
        ("zipf 1.1", reads.clone().map(|_| strong()).collect()),
        ("loop", reads.clone().map(|at| at % n).collect()),
        (
            "zipf 0.9 and a scan",
            reads.clone().map(|at| if at % 2 == 0 { beside() } else { n + at / 2 % (8 * n) }).collect(),
        ),
        ("phase change", reads.clone().map(|at| if at < 12 * n { first() } else { 2 * n + second() }).collect()),
        (
            "mixture",
            reads
                .clone()
                .map(|at| match any(10) {
                    0..5 => mixed(),
                    5..7 => n + at / 5 % (n / 8),
                    7..9 => 2 * n + at / 5 % (n / 3),
                    _ => 3 * n + any(n / 2),
                })
                .collect(),
        ),
        (
            "recency",
            reads
                .map(|_| {
                    newest += u64::from(any(5) == 0);
                    n + newest - any(n).min(any(n))
                })
                .collect(),
        ),
    ]
}

/// Returns what a cache sees below a guest of `guest_pages` pages in LRU order.
pub fn below_guest(reads: &[u64], guest_pages: usize, layout: Layout) -> Vec<Event> {
    let mut memory = PageCache::default();
    let mut events = Vec::new();
    for block in reads {
        if !memory.touch(*block) {
            events.push(Event::Read(layout.place(*block)));
            events.extend(memory.evict(guest_pages).map(|old| Event::Evicted(layout.place(old))));
        }
    }
    events
}
