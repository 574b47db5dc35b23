//! Numbers in the lines of a text.

/// Returns the number that the bytes are.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Returns some bytes of a trace as they can be shown to people: short, and without control characters or a byte order mark.
pub(super) fn shown(text: &[u8]) -> String {
    const CHARACTERS_MAX: usize = 60;
    let text = String::from_utf8_lossy(text);
    let is_unseen = |c: char| c.is_control() || c == '\u{feff}';
    let shown: String = text.chars().take(CHARACTERS_MAX).map(|c| if is_unseen(c) { '?' } else { c }).collect();
    if text.chars().count() > CHARACTERS_MAX { shown + "..." } else { shown }
}
