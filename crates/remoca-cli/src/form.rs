//! Forms of what is shown.

use clap::ValueEnum;

/// Form of what is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    Table,
    Json,
}
