//! The whole system with real guests. Each file stands for itself; `cargo xtask test` runs one test after the other.

mod added;
mod backup;
mod balloon;
mod capture;
mod correctness;
mod encrypted;
mod equal;
mod faults;
mod file_systems;
mod five_minutes;
mod kept;
mod libvirt;
mod lies;
mod loops;
mod migration;
mod nbd;
mod package;
mod soak;
mod swap;
mod take_out;
mod units;
