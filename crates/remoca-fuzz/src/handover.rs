//! What a successor of a process finds: the description of an upgrade (text), or the header of a state file (anything that does
//! not begin like text). The targets are in `remoca-disk`.

use crate::memory;
use remoca_disk::testing::{
    fuzz_description, fuzz_description_read, fuzz_description_seeds, fuzz_state_header, fuzz_state_header_seeds,
};

/// A list in JSON takes so many bytes for each of its own, at most; an error some more.
const BYTES_FOR_ONE: usize = 64;
const SOME_MORE: usize = 16 << 10;

pub fn run(data: &[u8]) {
    if data.first().is_some_and(|first| *first != 0) {
        memory::bounded(data.len() * BYTES_FOR_ONE + SOME_MORE, || fuzz_description_read(data));
        fuzz_description(data);
    } else {
        fuzz_state_header(data.get(1..).unwrap_or_default());
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let headers = fuzz_state_header_seeds().into_iter().map(|changes| [&[0], &changes[..]].concat());
    fuzz_description_seeds().into_iter().chain(headers).collect()
}
