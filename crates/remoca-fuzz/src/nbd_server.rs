//! Clients of the NBD frontend: their negotiation, and requests of every kind. The target is in `remoca-disk`.

const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    [&b"IHAVEOPT"[..], &number.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

/// Returns a GO option with the name, and no request for further information.
fn go(number: u32, name: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).unwrap();
    option(number, &[&length.to_be_bytes()[..], name.as_bytes(), &[0, 0]].concat())
}

fn request(command: u16, flags: u16, offset: u64, length: u32) -> Vec<u8> {
    let (magic, cookie) = (0x2560_9513_u32, 0x1122_3344_u64 << 16 | u64::from(command));
    [
        &magic.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset.to_be_bytes(),
        &length.to_be_bytes(),
    ]
    .concat()
}

pub fn seeds() -> Vec<Vec<u8>> {
    let flags = 3_u32.to_be_bytes().to_vec();
    let write = [request(1, 1, 4096, 512), vec![0x5a; 512]].concat();
    let requests = [
        request(0, 0, 4096, 512),
        write.clone(),
        request(3, 0, 0, 0),
        request(4, 0, 8192, 4096),
        request(6, 2, 8192, 4096),
        request(0, 0, 0, 4096),
        request(2, 0, 0, 0),
    ]
    .concat();
    let client =
        |mode: u8, options: &[Vec<u8>], requests: &[u8]| [&[mode], &flags[..], &options.concat(), requests].concat();
    vec![
        client(0, &[option(STRUCTURED_REPLY, &[]), go(GO, "disk")], &requests),
        client(7, &[option(3, &[]), go(6, "disk"), go(GO, "missing"), go(GO, "")], &requests),
        client(40, &[option(1, b"disk")], &requests),
        client(3, &[go(GO, "remoca-port")], &write),
        client(3, &[go(GO, "read-only")], &write),
        client(0, &[option(5, &[]), option(2, &[])], &[]),
    ]
}
