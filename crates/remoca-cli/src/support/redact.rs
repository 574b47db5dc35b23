//! Removes what must stay secret from text. Pure.

/// Length from which a run of hexadecimal digits counts as a secret. Keys and tokens have 32 digits or more.
const SECRET_DIGITS: usize = 32;
const MARK: &str = "[redacted]";

/// Returns the text without long hexadecimal numbers, and without user names and passwords in addresses.
pub fn redacted(text: &str) -> String {
    without_credentials(&without_digits(text))
}

fn without_digits(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_hexdigit()) {
        let (before, run) = rest.split_at(start);
        let length = run.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(run.len());
        kept += before;
        kept += if length < SECRET_DIGITS { &run[..length] } else { MARK };
        rest = &run[length..];
    }
    kept + rest
}

/// Removes what stands between `://` and `@` in the same word.
fn without_credentials(text: &str) -> String {
    let mut parts = text.split("://");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept += "://";
        let authority = part.find(|c: char| c.is_whitespace() || "/?\"'".contains(c)).unwrap_or(part.len());
        match part[..authority].rfind('@') {
            Some(at) => {
                kept += MARK;
                kept += &part[at..];
            }
            None => kept += part,
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_passwords_are_blacked_out_and_nothing_else() {
        let key = "0123456789abcdef".repeat(4);
        assert_eq!(redacted(&format!("key={key};")), "key=[redacted];");
        assert_eq!(redacted(&key.to_uppercase()[..32]), "[redacted]");
        assert_eq!(redacted(&format!("x{key}\n{key}")), "x[redacted]\n[redacted]");
        for harmless in [
            "token=f4860115.. epoch=1",
            "6d0f1b2e-0000-4000-8000-0123456789ab",
            "0x7f32c3ddd000 of 2048 bytes",
            "nbd+unix:///root?socket=/run/a@b.sock",
            "é tcp:h:1 a@b ://",
        ] {
            assert_eq!(redacted(harmless), harmless);
        }
        assert_eq!(redacted("\"nbd://me:sword@fish@host:10809/x\" a@b"), "\"nbd://[redacted]@host:10809/x\" a@b");
    }
}
