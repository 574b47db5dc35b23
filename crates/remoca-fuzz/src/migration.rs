//! Another VM process's input to the migration connection. The target is in `remoca-disk`.

use crate::memory;
use remoca_disk::testing::{fuzz_migration, fuzz_migration_read};

/// Maximum bytes that a list in JSON takes for each of its own; a stream buffer and an error take some more.
const BYTES_FOR_ONE: usize = 64;
const SOME_MORE: usize = 64 << 10;

pub fn run(data: &[u8]) {
    memory::bounded(data.len() * BYTES_FOR_ONE + SOME_MORE, || fuzz_migration_read(data));
    fuzz_migration(data);
}
