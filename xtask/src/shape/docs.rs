//! Judges the first line of a function's documentation by its first word.

/// Kind of a first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doc {
    /// Says what the function does or returns.
    Says,
    /// Names something: a noun with its article, or a question that the result answers.
    Names,
    /// States a fact, in whatever words.
    States,
}

/// Words that end like a verb but are not one.
const NOUNS: [&str; 38] = [
    "addresses",
    "always",
    "answers",
    "blocks",
    "buffers",
    "bytes",
    "chains",
    "clients",
    "connections",
    "credentials",
    "disks",
    "entries",
    "errors",
    "events",
    "files",
    "flags",
    "frames",
    "is",
    "its",
    "lines",
    "nanoseconds",
    "numbers",
    "others",
    "pages",
    "perhaps",
    "pieces",
    "queues",
    "reads",
    "requests",
    "seconds",
    "sessions",
    "slots",
    "things",
    "this",
    "thus",
    "times",
    "words",
    "yes",
];
/// First words of a line that names the result.
const NAMES: [&str; 11] = ["a", "all", "an", "how", "the", "what", "when", "where", "whether", "which", "why"];

/// Judges the first line of a doc comment. Returns `None` if it is empty.
pub fn judge(text: &str) -> Option<Doc> {
    let first = text.split_whitespace().next()?;
    let word: String = first.chars().filter(|letter| letter.is_alphabetic()).collect::<String>().to_lowercase();
    let second = text.split_whitespace().nth(1).unwrap_or_default();
    // "Reads the header" is a verb, "Reads of the guest" is not.
    let is_verb = word.ends_with('s')
        && !word.ends_with("ss")
        && (!NOUNS.contains(&word.as_str())
            || ["reads", "answers", "buffers", "frames"].contains(&word.as_str())
                && !["of", "that", "which", "are", "in", "from", "on"].contains(&second));
    Some(match word.as_str() {
        _ if is_verb => Doc::Says,
        // The marks of a heading, such as that of errors, have no letters.
        "" => Doc::States,
        word if NAMES.contains(&word) => Doc::Names,
        _ => Doc::States,
    })
}

/// Returns the first line of the documentation among these attributes, or `None` if there is none.
pub fn first_line(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &pair.value else { return None };
        pair.path.is_ident("doc").then(|| text.value().trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_words_are_told_apart() {
        for (text, doc) in [
            ("Returns the slot of a page.", Doc::Says),
            ("Reads every block once.", Doc::Says),
            ("Reads of the guest in flight.", Doc::States),
            ("Whether the index is full.", Doc::Names),
            ("Nobody will come back.", Doc::States),
            ("Pages left for the network.", Doc::States),
            ("Passes it on.", Doc::Says),
            ("Notes that it is gone.", Doc::Says),
        ] {
            assert_eq!(judge(text), Some(doc), "{text}");
        }
        assert_eq!(judge(""), None);
    }
}
