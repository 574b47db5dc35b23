//! Changes since a commit.

use crate::run::output;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Changed lines of each file, counted from 0.
pub struct Changed(BTreeMap<PathBuf, Vec<Range<usize>>>);

impl Changed {
    /// Returns the differences between `commit` and the files of `tree`, as reported by git.
    ///
    /// # Errors
    /// If git does not know the commit.
    pub fn since(commit: &str, tree: &Path) -> Result<Self, String> {
        let mut diff = Command::new("git");
        diff.args(["diff", "--unified=0", "--no-color", "--no-ext-diff", "--no-renames", commit, "--", "crates"]);
        diff.current_dir(tree);
        Ok(Self::parse(&output(diff)?))
    }

    fn parse(diff: &str) -> Self {
        let mut files: BTreeMap<PathBuf, Vec<_>> = BTreeMap::new();
        let mut file = PathBuf::new();
        for line in diff.lines() {
            if let Some(path) = line.strip_prefix("+++ b/") {
                file = path.into();
            } else if let Some(range) = line.strip_prefix("@@ ").and_then(lines_of) {
                files.entry(file.clone()).or_default().push(range);
            }
        }
        Self(files)
    }

    /// Returns whether one of these bytes of a file is on a changed line.
    pub fn touches(&self, path: &Path, text: &str, bytes: &Range<usize>) -> bool {
        let line = |at: usize| text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        let (first, last) = (line(bytes.start), line(bytes.end));
        self.0.get(path).into_iter().flatten().any(|changed| changed.start <= last && first < changed.end)
    }
}

/// Returns the new lines of a hunk, from the text after `@@ `: `-1,2 +3,4 @@`. If lines are only removed, those beside.
fn lines_of(hunk: &str) -> Option<Range<usize>> {
    let new = hunk.split(' ').find_map(|part| part.strip_prefix('+'))?;
    let (start, count) = new.split_once(',').unwrap_or((new, "1"));
    let (start, count): (usize, usize) = (start.parse().ok()?, count.parse().ok()?);
    Some(if count == 0 { start.saturating_sub(1)..start + 1 } else { start.saturating_sub(1)..start - 1 + count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_touched_by_new_lines_and_beside_lines_that_are_gone() {
        let diff = "diff --git a/x b/x\n--- a/x\n+++ b/crates/x.rs\n@@ -1,0 +2 @@ fn\n+new\n@@ -7,2 +5,0 @@\n-gone\n";
        let changed = Changed::parse(diff);
        let text = "0\n1\n2\n3\n4\n5\n6\n";
        let touched = |path: &str, line: usize| changed.touches(Path::new(path), text, &(2 * line..2 * line + 1));
        let lines: Vec<_> = (0..7).filter(|line| touched("crates/x.rs", *line)).collect();
        assert_eq!(lines, [1, 4, 5]);
        assert!(!touched("crates/y.rs", 1));
        assert!(changed.touches(Path::new("crates/x.rs"), text, &(0..3)), "a text of several lines");
    }
}
