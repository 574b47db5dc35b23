//! Another VM process's input to the migration connection. The target is in `remoca-disk`.

use crate::memory;
use remoca_disk::testing::{fuzz_migration, fuzz_migration_read};

/// Maximum number of bytes that a JSON list allocates per byte of input. A stream buffer and an error allocate some more.
const BYTES_FOR_ONE: usize = 64;
const SOME_MORE: usize = 64 << 10;

pub fn run(data: &[u8]) {
    memory::bounded(data.len() * BYTES_FOR_ONE + SOME_MORE, || fuzz_migration_read(data));
    fuzz_migration(data);
}
