//! Groups of users on the command line.

use nix::unistd::Group;

/// Returns the numeric ID of a group, given by name or number.
///
/// # Errors
/// If there is no such group.
pub fn parse_group(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(format!("there is no group `{text}` on this host")),
        Err(error) => Err(format!("cannot look up group `{text}`: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_a_name_or_a_number() {
        assert_eq!(parse_group("1234"), Ok(1234));
        assert_eq!(parse_group("root"), Ok(0));
        let error = parse_group("no-such-group").unwrap_err();
        assert!(error.contains("no group `no-such-group`"), "{error}");
    }
}
