//! Fuzzing of the VM process's formats, and the far end of a migration. Behind the feature `testing`; never part of the
//! program.

pub use crate::migration::fuzz::{
    read_all as fuzz_migration_read, run as fuzz_migration, seeds as fuzz_migration_seeds,
};
pub use crate::migration::model::{FarEnd, Wanted, listening};
pub use crate::state::fuzz::{run as fuzz_state_header, seeds as fuzz_state_header_seeds};
