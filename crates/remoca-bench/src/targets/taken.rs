//! Targets that have commands of their own: the last result of each is taken from the file that it wrote.

use crate::wanted::{Row, Wanted};
use remoca_lab::figures::{Figures, load};

/// A target, the file with its last result, and the command that writes it.
pub struct Taken {
    pub number: &'static str,
    /// Name in `out/bench`, without the ending.
    pub file: &'static str,
    pub command: &'static str,
}

pub const TAKEN: &[Taken] = &[
    Taken {
        number: "P14",
        file: "agent-cost",
        command: "cargo run --release -p remoca-guest-tests --bin agent-cost time",
    },
    Taken { number: "P15", file: "demo", command: "make demo" },
    Taken { number: "P16", file: "streams", command: "cargo run --release -p remoca-bench -- streams" },
    Taken {
        number: "P19",
        file: "agent-memory",
        command: "cargo test -p remoca-agent --test guest agent_takes_little_of_a_small_guest",
    },
    Taken { number: "P20", file: "upgrade", command: "cargo run --release -p remoca-bench -- upgrade" },
];

impl Taken {
    /// Returns the rows of the last result.
    pub fn rows(&self, wanted: &[&Wanted]) -> Vec<Row> {
        self.rows_of(wanted, load(self.file).map_err(|error| error.to_string()))
    }

    fn rows_of(&self, wanted: &[&Wanted], loaded: Result<Option<Figures>, String>) -> Vec<Row> {
        let row = |wanted: &&Wanted| match &loaded {
            Err(error) => wanted.without_value(self.command, error),
            Ok(None) => wanted
                .without_value(self.command, &format!("out/bench/{}.json does not exist: run its command", self.file)),
            Ok(Some(figures)) => match figures.figures.iter().find(|figure| figure.id == wanted.id) {
                Some(figure) => wanted.row(figure, self.command, figures.made_unix_s, figures.load_average),
                None => wanted.without_value(
                    self.command,
                    &format!("the last run, in out/bench/{}.json, left it out", self.file),
                ),
            },
        };
        wanted.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wanted::WANTED;
    use remoca_lab::figures::Figure;

    #[test]
    fn the_last_result_is_taken_with_its_time() {
        let taken = TAKEN.iter().find(|taken| taken.number == "P20").expect("P20");
        let wanted: Vec<&Wanted> = WANTED.iter().filter(|wanted| wanted.number() == "P20").collect();
        let figures = Figures {
            made_unix_s: 1_800_000_000,
            load_average: Some(0.25),
            figures: vec![Figure::single("P20-longest", 60.0)],
        };
        let rows = taken.rows_of(&wanted, Ok(Some(figures)));
        assert_eq!((rows[0].id.as_str(), rows[0].value, rows[0].met), ("P20-longest", Some(60.0), Some(false)));
        assert_eq!((rows[0].made_unix_s, rows[0].command.as_str()), (Some(1_800_000_000), taken.command));
        assert!(
            rows[1].value.is_none() && rows[1].reason.as_ref().is_some_and(|reason| reason.contains("left it out"))
        );
        for loaded in [Ok(None), Err("it has no figures".to_owned())] {
            let rows = taken.rows_of(&wanted, loaded);
            assert!(rows.iter().all(|row| row.value.is_none() && row.reason.is_some()));
        }
    }
}
