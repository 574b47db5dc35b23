//! The frames between host and guest on the virtio-serial port, used on both sides.
//!
//! ```text
//!  0      4      8      9          13
//!  | magic | job  | kind | length   | payload ...        all numbers little-endian
//! ```
//!
//! Each request of the host opens a job with a number that the host chooses. All frames of the guest about the job
//! carry that number, and [`Kind::Exit`] comes last. A guest that reboots may leave half a frame behind: a reader
//! skips bytes until it finds the magic again.

use std::io::{self, Read, Write};

const MAGIC: [u8; 4] = *b"rLaB";
const HEADER_SIZE: usize = 13;

/// Maximum size of a payload in bytes. Longer data is sent in several frames.
pub const PAYLOAD_SIZE_MAX: usize = 64 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Host: run the payload with `sh -c`.
    Run = 1,
    /// Host: send the signal (i32) to the job's process group.
    Signal = 2,
    /// Host: create the file named by the payload and fill it with the [`Kind::Data`] that follows, up to an empty one.
    Put = 3,
    Data = 4,
    /// Host: send the content of the file named by the payload as [`Kind::Stdout`].
    Get = 5,
    /// Host: unmount everything, then power off.
    PowerOff = 6,
    /// Host: unmount everything, then reboot.
    Reboot = 7,
    /// Guest: the command server is up.
    Hello = 16,
    Stdout = 17,
    Stderr = 18,
    /// Guest: the job ended with this exit code (i32), or minus the signal that killed it.
    Exit = 19,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::{Data, Exit, Get, Hello, PowerOff, Put, Reboot, Run, Signal, Stderr, Stdout};
        [Run, Signal, Put, Data, Get, PowerOff, Reboot, Hello, Stdout, Stderr, Exit]
            .into_iter()
            .find(|&kind| kind as u8 == byte)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub job: u32,
    pub kind: Kind,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Reads the next whole frame. Returns `None` at the end of the stream.
    pub fn read(reader: &mut impl Read) -> io::Result<Option<Frame>> {
        let mut header = [0; HEADER_SIZE];
        if !fill(reader, &mut header)? {
            return Ok(None);
        }
        loop {
            if let Some((job, kind, length)) = parse_header(&header) {
                let mut payload = vec![0; length];
                return Ok(fill(reader, &mut payload)?.then_some(Frame { job, kind, payload }));
            }
            header.rotate_left(1);
            if !fill(reader, &mut header[HEADER_SIZE - 1..])? {
                return Ok(None);
            }
        }
    }

    /// Writes data of any length as frames of one kind.
    pub fn write(writer: &mut impl Write, job: u32, kind: Kind, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return write_one(writer, job, kind, data);
        }
        data.chunks(PAYLOAD_SIZE_MAX).try_for_each(|chunk| write_one(writer, job, kind, chunk))
    }

    /// Returns the payload as a number, for [`Kind::Exit`] and [`Kind::Signal`]. A payload that is too short counts as
    /// `i32::MIN`.
    pub fn number(&self) -> i32 {
        self.payload.first_chunk().map_or(i32::MIN, |bytes| i32::from_le_bytes(*bytes))
    }
}

fn write_one(writer: &mut impl Write, job: u32, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = Vec::with_capacity(HEADER_SIZE + payload.len());
    bytes.extend(MAGIC);
    bytes.extend(job.to_le_bytes());
    bytes.push(kind as u8);
    bytes.extend(length.to_le_bytes());
    bytes.extend(payload);
    writer.write_all(&bytes)
}

fn parse_header(header: &[u8; HEADER_SIZE]) -> Option<(u32, Kind, usize)> {
    let (magic, rest) = header.split_first_chunk::<4>()?;
    let (job, rest) = rest.split_first_chunk::<4>()?;
    let (&kind, length) = rest.split_first()?;
    let length = usize::try_from(u32::from_le_bytes(*length.first_chunk()?)).ok()?;
    let sane = *magic == MAGIC && length <= PAYLOAD_SIZE_MAX;
    sane.then_some((u32::from_le_bytes(*job), Kind::from_byte(kind)?, length))
}

/// Fills the buffer. Returns `false` if the stream ends first.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames_in(mut bytes: &[u8]) -> Vec<Frame> {
        std::iter::from_fn(|| Frame::read(&mut bytes).unwrap()).collect()
    }

    #[test]
    fn long_data_is_split_and_empty_data_is_one_frame() {
        let mut bytes = Vec::new();
        Frame::write(&mut bytes, 7, Kind::Data, &vec![1; PAYLOAD_SIZE_MAX + 1]).unwrap();
        Frame::write(&mut bytes, 7, Kind::Data, &[]).unwrap();
        let lengths: Vec<usize> = frames_in(&bytes).iter().map(|frame| frame.payload.len()).collect();
        assert_eq!(lengths, [PAYLOAD_SIZE_MAX, 1, 0]);
    }

    proptest! {
        #[test]
        fn a_reader_finds_the_next_frame_after_any_rubbish(rubbish in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = rubbish;
            Frame::write(&mut bytes, 3, Kind::Hello, b"up").unwrap();
            let frames = frames_in(&bytes);
            prop_assert_eq!(frames.last(), Some(&Frame { job: 3, kind: Kind::Hello, payload: b"up".to_vec() }));
        }

        #[test]
        fn no_bytes_make_a_reader_fail(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            frames_in(&bytes);
        }
    }
}
