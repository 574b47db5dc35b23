//! Files of variables as systemd reads them (`EnvironmentFile=`), and the words of `$VARIABLE` in a command line.

/// A variable's name and value.
pub type Variable = (String, String);

/// Returns the variables of a file, in its order.
///
/// # Errors
/// If a line is no assignment; the text has the number of the line.
pub fn variables(text: &str) -> Result<Vec<Variable>, String> {
    let mut variables: Vec<Variable> = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let number = 1 + text[..text.len() - rest.len()].matches('\n').count();
        let line = rest.lines().next().unwrap_or_default();
        if line.starts_with(['#', ';']) {
            if line.trim_end().ends_with('\\') {
                return Err(format!(
                    "line {number}: versions of systemd differ about a comment that ends in a backslash"
                ));
            }
            rest = &rest[line.len()..];
            continue;
        }
        if rest.is_empty() {
            return Ok(variables);
        }
        let Some((name, value)) = line.split_once('=').map(|(name, _)| (name.trim_end(), &rest[name.len() + 1..]))
        else {
            return Err(format!("line {number}: `{}` is no assignment", line.trim_end()));
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(is_name) || name.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("line {number}: `{name}` is no name of a variable"));
        }
        let (value, after) = take_value(value).map_err(|error| format!("line {number}: {error}"))?;
        variables.retain(|(other, _)| other != name);
        variables.push((name.to_owned(), value));
        rest = after;
    }
}

/// What the next character of a value is part of.
enum Part {
    /// The beginning, or what follows a closed quote: here quotes are opened, and space is skipped.
    Start,
    /// Plain text, in which quotes are plain too.
    Plain,
    Quoted(char),
}

/// Takes a value from the front of `text`. Returns it without quotes and escapes, and what follows its line.
fn take_value(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    // Length of the value without plain space at its end.
    let mut kept = 0;
    let (mut part, mut characters) = (Part::Start, text.chars());
    while let Some(c) = characters.next() {
        match (&part, c) {
            (Part::Start | Part::Plain, '\n') => break,
            (Part::Start, '"' | '\'') => part = Part::Quoted(c),
            (Part::Start, ' ' | '\t' | '\r') => {}
            (Part::Start | Part::Plain, '\\') => {
                value.extend(characters.next().filter(|c| *c != '\n'));
                part = Part::Plain;
                kept = value.len();
            }
            (Part::Plain, ' ' | '\t' | '\r') => value.push(c),
            (Part::Start | Part::Plain, _) => {
                value.push(c);
                part = Part::Plain;
                kept = value.len();
            }
            (Part::Quoted(quote), _) if c == *quote => {
                part = Part::Start;
                kept = value.len();
            }
            (Part::Quoted('"'), '\\') => match characters.next() {
                Some('\n') | None => {}
                Some(c @ ('"' | '\\' | '`' | '$')) => value.push(c),
                Some(c) => value.extend(['\\', c]),
            },
            (Part::Quoted(_), _) => value.push(c),
        }
    }
    if matches!(part, Part::Quoted(_)) {
        return Err("a quote is not closed".into());
    }
    value.truncate(kept);
    Ok((value, characters.as_str()))
}

/// Returns the words that `$VARIABLE` stands for in a command line of a unit: quotes hold a word together, a backslash takes the
/// next character as it is.
pub fn words(value: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let (mut open, mut escaped) = (None, false);
    for c in value.chars() {
        match (escaped, open, c) {
            (true, ..) => {
                word.get_or_insert_default().push(c);
                escaped = false;
            }
            (_, _, '\\') => {
                word.get_or_insert_default();
                escaped = true;
            }
            (_, Some(quote), _) if c == quote => open = None,
            (_, Some(_), _) => word.get_or_insert_default().push(c),
            (_, None, '"' | '\'') => {
                word.get_or_insert_default();
                open = Some(c);
            }
            (_, None, ' ' | '\t' | '\n' | '\r') => words.extend(word.take()),
            (_, None, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_those_that_systemd_finds() {
        let cases: &[(&str, &[(&str, &str)])] = &[
            ("", &[]),
            ("# A=1\n; B=2\n\n  \nC=3", &[("C", "3")]),
            ("A=1\nA=2\n", &[("A", "2")]),
            ("A = 1\n", &[("A", "1")]),
            ("A=a b  c \t\n", &[("A", "a b  c")]),
            ("A=\"a b \" c\n", &[("A", "a b c")]),
            ("A=--x \"a b\" 'c'\n", &[("A", "--x \"a b\" 'c'")]),
            ("A='a \"b\" \\'\n", &[("A", "a \"b\" \\")]),
            ("A=\"a \\\"b\\\" \\$c \\n\"\n", &[("A", "a \"b\" $c \\n")]),
            ("A=a\\ \\\"b\n", &[("A", "a \"b")]),
            ("A=a \\\n  b\nB=2", &[("A", "a   b"), ("B", "2")]),
            ("A=\"a \\\n  b\"\n", &[("A", "a   b")]),
            ("A=\"a\nb\"\n", &[("A", "a\nb")]),
            ("A=it is # no comment\n", &[("A", "it is # no comment")]),
            ("A=\r\nB=1\r\n", &[("A", ""), ("B", "1")]),
        ];
        for (text, expected) in cases {
            let found = variables(text).unwrap();
            let found: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            assert_eq!(found, *expected, "{text:?}");
        }
        for (text, words) in [
            ("A=1\nexport\n", "line 2: `export`"),
            ("A=1\n\n2B=1", "line 3: `2B`"),
            ("A='1", "not closed"),
            ("# no end \\\nA=1", "line 1: versions"),
        ] {
            let error = variables(text).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn words_are_those_that_systemd_passes() {
        let cases: &[(&str, &[&str])] = &[
            ("", &[]),
            ("  a  b\tc\nd ", &["a", "b", "c", "d"]),
            ("a 'b c' \"d 'e'\"f", &["a", "b c", "d 'e'f"]),
            ("a\\ b '' \"\\\"\"", &["a b", "", "\""]),
        ];
        for (text, expected) in cases {
            assert_eq!(words(text), *expected, "{text:?}");
        }
    }
}
