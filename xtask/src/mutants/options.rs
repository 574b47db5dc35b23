//! Options of `cargo xtask mutants`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

pub const USAGE: &str = "\
usage: cargo xtask mutants [OPTION...]

Tries mutants: small changes of the code that some test must see. Without options those of the project's list
(xtask/mutants), all in one build. Says which tests see them and which survive, and fails if one does that the list does
not call harmless.

  --changed COMMIT  those that are generated on lines changed since COMMIT, and of the list those in functions with such lines
  --most N          no more generated ones for --changed than this [default: 60]
  --sample N        N generated ones of each module as well: of the crate's, or of those given
  --seed N          which ones these are [default: 1]
  --crate NAME      only mutants of this crate, such as remoca-disk
  --module NAME     only mutants of this module of a crate, such as store::nbd; again for further ones
  --only TEXT       only mutants with this in their name
  --generated       none of the list
  --unit            meets only the unit tests of the crates that have mutants: quick to build
  --sim SEEDS       in place of tests: the first seed of the simulator, below this number, that sees each mutant of the list
  --budget SECONDS  of tests for each mutant, those that the list names aside; quick tests come first [default: 120]
  --workers N       mutants tried at the same time [default: one for each processor]
  --tree FOLDER     another tree of the project; what of the list it has not is left out
  --names           say which mutants there are, and do not try them";

/// Selection of mutants, and settings of their trial.
#[derive(Default)]
pub struct Options {
    pub changed: Option<String>,
    pub most: usize,
    pub sample: usize,
    pub seed: u64,
    pub crates: Vec<String>,
    pub modules: Vec<String>,
    pub only: Option<String>,
    pub generated: bool,
    pub unit: bool,
    /// Number of seeds of the simulator that are run instead of tests; `None` to run tests.
    pub sim: Option<u64>,
    pub budget: Duration,
    pub workers: usize,
    pub tree: Option<PathBuf>,
    pub names: bool,
}

impl Options {
    /// Parses the arguments. Returns `None` if help was requested.
    ///
    /// # Errors
    /// The usage text.
    pub fn parse(arguments: Vec<OsString>) -> Result<Option<Self>, String> {
        let workers = std::thread::available_parallelism().map_or(2, usize::from);
        let budget = Duration::from_secs(120);
        let mut options = Self { most: 60, seed: 1, workers, budget, ..Self::default() };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().and_then(|value| value.into_string().ok()).ok_or(USAGE.to_owned());
            match argument.to_str().ok_or(USAGE)? {
                "--help" => return Ok(None),
                "--changed" => options.changed = Some(value()?),
                "--most" => options.most = number(&value()?)?,
                "--sample" => options.sample = number(&value()?)?,
                "--seed" => options.seed = number(&value()?)?,
                "--crate" => options.crates.push(value()?.replace('-', "_")),
                "--module" => options.modules.push(value()?),
                "--only" => options.only = Some(value()?),
                "--generated" => options.generated = true,
                "--sim" => options.sim = Some(number(&value()?)?),
                "--unit" => options.unit = true,
                "--budget" => options.budget = Duration::from_secs(number(&value()?)?),
                "--workers" => options.workers = number::<usize>(&value()?)?.max(1),
                "--tree" => options.tree = Some(value()?.into()),
                "--names" => options.names = true,
                _ => return Err(USAGE.into()),
            }
        }
        Ok(Some(options))
    }

    /// Returns whether the options select mutants of this item.
    pub fn wants(&self, item: &str) -> bool {
        let (krate, rest) = item.split_once("::").unwrap_or((item, ""));
        let within = |module: &String| rest.strip_prefix(&**module).is_some_and(|rest| rest.starts_with("::"));
        (self.crates.is_empty() || self.crates.iter().any(|name| name == krate))
            && (self.modules.is_empty() || self.modules.iter().any(within))
    }
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
    value.parse().map_err(|_| USAGE.into())
}
