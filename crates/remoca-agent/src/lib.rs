//! The guest agent: captures the pages that the guest evicts with eBPF, and writes them to the eviction port.
//!
//! `bpf/capture.bpf.c` copies each page that reclaim takes from the page cache into a ring. [`run`] writes these pages
//! in batches to the [`port`], an extra disk of the VM, behind which the VM process looks them up by content. Decision
//! 0006 gives the reasons and the cost.

pub mod capture;
pub mod check;
pub mod cli;
pub mod error;
pub mod pace;
pub mod page;
pub mod port;
pub mod pressure;
pub mod process;
pub mod ring;
pub mod run;
