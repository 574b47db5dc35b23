//! Work of a VM process that takes the same instructions each time: what `A2.3` and `remoca-bench instructions` count.

use crate::cpus::{Cpus, pin_this_thread};
use crate::steps;
use crate::vm::{Folder, MemoryServer, ServerOptions, Vm, VmOptions, pinned};
use anyhow::Result;
use clap::ValueEnum;

/// Size of a local tier that holds the whole image.
const TIER: &str = "512M";
/// Memory of a server with room for that.
const MEMORY: &str = "600M";
/// Size of the image: a curve follows one block in 16 of it.
pub const IMAGE_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Reads that the local tier answers. Nothing reports evictions, so a curve is told a read and an eviction of each block.
    Hit,
    /// Reads that the disk answers, of a guest with an agent that reports nothing known: the curve's queue stays empty.
    Miss,
    /// Reads that the local tier answers, and pages that an agent reports as evicted, one for each.
    Evicted,
}

/// A memory server, and the processors that it, a client and a VM process run on.
pub struct Setting {
    pub folder: Folder,
    server: MemoryServer,
    tier: String,
    /// Processor of VM processes.
    pub processor: usize,
}

impl Setting {
    /// Starts a memory server, and moves the calling thread to the processor of clients.
    pub fn new() -> Result<Self> {
        let (folder, cpus) = (Folder::new()?, Cpus::choose()?);
        let prefix = pinned(Some(cpus.behind));
        let options = ServerOptions { prefix: &prefix, memory: Some(MEMORY), ..ServerOptions::default() };
        let server = MemoryServer::start(&folder.0, &options)?;
        let tier = server.local_endpoint();
        pin_this_thread(cpus.client)?;
        Ok(Self { folder, server, tier, processor: cpus.server })
    }

    /// Starts a VM process with the cache that the work is meant for, and fills it.
    pub fn start(&self, name: &str, kind: Kind, options: VmOptions<'_>) -> Result<Vm> {
        let options = VmOptions {
            // Without memory for its cache the VM process would not hash what it reads.
            server: (kind == Kind::Miss).then_some(&self.server.endpoint),
            local: (kind != Kind::Miss).then_some((&self.tier, TIER)),
            cache: Some(if kind == Kind::Miss { TIER } else { "0" }),
            port: kind != Kind::Hit,
            inflight: true,
            processor: Some(self.processor),
            environment: Some(steps::ENVIRONMENT),
            ..options
        };
        let mut vm = Vm::start(&self.folder.0, name, &options)?;
        match kind {
            Kind::Hit => vm.fill()?,
            Kind::Miss => vm.evict_unknown(1)?,
            Kind::Evicted => vm.evict_all()?,
        }
        Ok(vm)
    }
}

/// The reads and evictions, which are the same for each process.
pub struct Work {
    kind: Kind,
    /// Reads that are begun together. The next ones begin when all of them have ended, so that a turn of the process has the same work
    /// each time. Where pages are evicted, those that were read are reported together.
    depth: usize,
    blocks: u64,
    random: u64,
    /// Number of reads so far.
    pub reads: u64,
}

impl Work {
    pub fn new(kind: Kind, depth: usize, blocks: u64) -> Self {
        Self { kind, depth, blocks, random: 0x9e37_79b9_7f4a_7c15, reads: 0 }
    }

    /// Reads `times` as many blocks as are begun together, and evicts them if that is the kind. Returns the number of blocks.
    pub fn run(&mut self, vm: &mut Vm, times: usize) -> Result<u64> {
        let before = self.reads;
        for _ in 0..times {
            let blocks = self.draw();
            let mut next = blocks.iter().copied();
            vm.client().reads(self.depth, || next.next())?;
            if self.kind == Kind::Evicted {
                vm.evict_blocks(&blocks)?;
            }
            self.reads += blocks.len() as u64;
        }
        Ok(self.reads - before)
    }

    /// Returns blocks of which no two are the same: once read, one would be in the tier no more.
    fn draw(&mut self) -> Vec<u64> {
        let mut blocks = Vec::new();
        while blocks.len() < self.depth {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = (self.random >> 33) % self.blocks;
            if !blocks.contains(&block) {
                blocks.push(block);
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_processes_get_the_same_blocks_and_none_twice_at_once() {
        let [mut one, mut other] = [Work::new(Kind::Hit, 32, 40), Work::new(Kind::Hit, 32, 40)];
        for _ in 0..10 {
            let blocks = one.draw();
            assert_eq!(blocks, other.draw());
            assert_eq!(blocks.iter().collect::<std::collections::BTreeSet<_>>().len(), 32);
        }
    }
}
