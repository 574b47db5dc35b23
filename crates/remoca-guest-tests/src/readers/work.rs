//! Reads by a pattern, as `remoca-workload read-records` makes them in the guest.

/// Bytes of a record.
pub const RECORD_BYTES: u64 = 64 << 10;
/// Number of rounds of a work with a background task.
const ROUNDS: u64 = 32;
/// What the background task reads in each round, in MiB.
const NOISE_MIB: u64 = 1;
/// Turns after which the background task begins again: far more than any guest and its tier hold.
const NOISE_TURNS: u64 = 8;

/// Reads of the records of a folder.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Folder under `/mnt`.
    pub set: &'static str,
    /// `seq`, `rand`, `zipf` (exponent 1) or `class`.
    pub pattern: &'static str,
    /// Number of records to read.
    pub count: u64,
    /// Folder that a light task in the background reads through, 1 MiB after every 32nd part of the records.
    pub noise: Option<&'static str>,
}

impl Work {
    /// Returns the command for the guest. The same turn makes the same reads.
    #[must_use]
    pub fn command(&self, turn: u64) -> String {
        let Self { set, pattern, count, noise } = self;
        let read = |seed: &str, count: u64| {
            format!(
                "remoca-workload read-records --json --dir /mnt/{set} --pattern {pattern} --record {RECORD_BYTES} --seed {seed} --count {count}"
            )
        };
        let Some(noise) = noise else { return read(&turn.to_string(), *count) };
        // Files have 16 MiB.
        let (first, cycle, reads) = (turn * ROUNDS, NOISE_TURNS * ROUNDS, read("$((1000 + i))", count / ROUNDS));
        let (last, of_file, chunks) = (first + ROUNDS - 1, 16 / NOISE_MIB, NOISE_MIB * 16);
        format!(
            "set -e; for i in $(seq {first} {last}); do {reads}; dd if=/mnt/{noise}/f$(printf %05d $((i % {cycle} / {of_file}))) of=/dev/null \
             bs=64k count={chunks} skip=$((i % {of_file} * {chunks})) 2> /dev/null; done"
        )
    }

    /// Returns how many MiB the background task reads in so many turns, of which it begins again at most once.
    #[must_use]
    pub fn noise_mib(turns: u64) -> u64 {
        turns.min(NOISE_TURNS) * ROUNDS * NOISE_MIB
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_differ_and_the_background_task_goes_on() {
        let work = Work { set: "a", pattern: "zipf", count: 64, noise: None };
        assert!(work.command(0).ends_with("--seed 0 --count 64") && work.command(1).ends_with("--seed 1 --count 64"));
        let mixed = Work { noise: Some("n"), ..work }.command(1);
        assert!(
            mixed.contains("seq 32 63")
                && mixed.contains("--count 2;")
                && mixed.contains("/mnt/n/f$(printf %05d $((i % 256 / 16)))"),
            "{mixed}"
        );
        assert_eq!((Work::noise_mib(2), Work::noise_mib(20)), (64, 256));
    }
}
