//! JSON that another program has sent, and whose texts go to a terminal.

use serde::de::DeserializeOwned;

/// Parses JSON. Control characters in its texts, but for line feeds and tabs, are replaced: a terminal would obey them.
///
/// # Errors
/// If it is no JSON, or says something else.
pub fn from_json<T: DeserializeOwned>(json: &[u8]) -> serde_json::Result<T> {
    if !may_have_controls(json) {
        return serde_json::from_slice(json);
    }
    let mut value = serde_json::from_slice(json)?;
    replace_controls(&mut value);
    serde_json::from_value(value)
}

/// Returns whether the texts of some JSON may have control characters: escaped ones (C0), or those that need no escape (DEL, C1).
fn may_have_controls(json: &[u8]) -> bool {
    json.windows(2).any(|pair| matches!(pair, [b'\\', b'u' | b'b' | b'f' | b'r'] | [0xc2, 0x80..=0x9f] | [_, 0x7f]))
}

/// Returns a text without control characters, but for line feeds and tabs.
#[must_use]
pub fn clean(text: &str) -> String {
    text.replace(|c: char| c.is_control() && !matches!(c, '\n' | '\t'), "\u{fffd}")
}

/// Replaces control characters, but for line feeds and tabs, in all texts and names of some JSON.
fn replace_controls(value: &mut serde_json::Value) {
    use serde_json::Value;
    match value {
        Value::String(text) => *text = clean(text),
        Value::Array(values) => values.iter_mut().for_each(replace_controls),
        Value::Object(fields) => {
            for (name, mut value) in std::mem::take(fields) {
                replace_controls(&mut value);
                fields.insert(clean(&name), value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced_in_names_and_texts_at_any_depth() {
        let read = from_json::<serde_json::Value>(br#"{"a\u001b": [{"b\u0007": 1}, "c\u009b\n"]}"#).unwrap();
        assert_eq!(read, serde_json::json!({"a\u{fffd}": [{"b\u{fffd}": 1}, "c\u{fffd}\n"]}));
        assert!(from_json::<serde_json::Value>(br#"{"a\u001b"}"#).is_err());
        assert!(from_json::<String>(b"1").is_err());
    }
}
