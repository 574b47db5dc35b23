//! A stranger's input to a protected connection. The target is in `remoca-disk`.

use crate::memory;
use remoca_io::secure::fuzz;

/// Size of the library's buffers, keys and configuration, for both sides.
const BYTES_MAX: usize = 512 << 10;

pub fn run(data: &[u8]) {
    memory::bounded(BYTES_MAX, || fuzz::run(data));
}
