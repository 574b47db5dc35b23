//! The rate of this machine's time stamp counter.
//!
//! Under software emulation the guest's counter is the host's. The guest's kernel measures its rate at boot. On a busy host
//! the measured rate was wrong by a factor of 20, and so were all of the guest's times. So the guest is told the rate.

use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

/// Rate of a guest clock that counts instructions: a tick is one instruction.
pub const INSTRUCTION_KHZ: u64 = 1_000_000;

/// Returns the rate of the counter in kHz. Measured once.
pub fn tick_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> u64 {
    let mut rates = [(); 5].map(|()| {
        let (started, first) = (Instant::now(), ticks());
        thread::sleep(Duration::from_millis(20));
        let (last, elapsed) = (ticks(), started.elapsed());
        u64::try_from(u128::from(last - first) * 1_000_000 / elapsed.as_nanos()).unwrap_or_default()
    });
    // An interruption between reading the counter and the clock spoils a measurement. The middle one of five is sound.
    rates.sort_unstable();
    rates[2]
}

fn ticks() -> u64 {
    // SAFETY: reading the counter touches no memory, and every x86-64 processor has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_one_of_a_processor() {
        assert!((100_000..20_000_000).contains(&tick_khz()), "{}", tick_khz());
    }
}
