//! Texts of VM processes and monitors. They get into the record, which has 4 MiB at most.

/// Maximum length of such a text, in characters.
pub const CHARACTERS_MAX: usize = 400;

/// Returns the beginning of a text, or all of a short one.
#[must_use]
pub fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(CHARACTERS_MAX) {
        text.truncate(end);
    }
    text
}
