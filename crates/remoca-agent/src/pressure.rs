//! How much the guest's tasks wait for memory, as its kernel tells (PSI).

use std::fs::File;
use std::os::unix::fs::FileExt;

const PATH: &str = "/proc/pressure/memory";

/// The kernel's account, which some kernels do not keep.
pub struct MemoryPressure(Option<File>);

impl MemoryPressure {
    pub fn open() -> Self {
        Self(File::open(PATH).ok())
    }

    /// Returns the share of the last ten seconds in which some task waited for memory, in hundredths of a percent. Allocates nothing.
    pub fn now(&self) -> Option<u32> {
        let mut text = [0; 256];
        let count = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        parse(std::str::from_utf8(&text[..count]).ok()?)
    }
}

fn parse(text: &str) -> Option<u32> {
    let (_, rest) = text.strip_prefix("some ")?.split_once("avg10=")?;
    let (percent, rest) = rest.split_once('.')?;
    let hundredths = rest.split_whitespace().next().filter(|digits| digits.len() == 2)?;
    percent.parse::<u32>().ok()?.checked_mul(100)?.checked_add(hundredths.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        let text = "some avg10=12.34 avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse(text), Some(1234));
        assert_eq!(parse("some avg10=0.00 avg60=0.00"), Some(0));
        for text in [
            "",
            "some",
            "some avg10=1",
            "some avg10=1.2",
            "full avg10=1.00",
            "some avg10=99999999.00",
            "some avg10=-1.00",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(MemoryPressure(None).now(), None);
    }
}
