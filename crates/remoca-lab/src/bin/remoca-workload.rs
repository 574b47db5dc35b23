//! `remoca-workload`: makes data that shows any wrong byte, and reads, rewrites and checks it. Runs in guests and on hosts.
//!
//! Exit code 0: everything was right; 1: something was wrong; 2: the check could not run.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Parser, Subcommand};
use remoca_lab::{
    Result,
    workload::{
        Faults, churn,
        dataset::{self, Manifest},
        journal::{After, Versions},
        pattern::Pattern,
        records::{self, Event},
        sort,
    },
};
use serde::Serialize;

#[derive(Parser)]
#[command(version, about = "Makes data that shows any wrong byte, and reads, rewrites and checks it")]
struct Arguments {
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Create files in which every 512 bytes carry a signature
    Create {
        #[arg(long)]
        dir: PathBuf,
        #[arg(long, default_value_t = 1)]
        files: u64,
        /// Size of each file, such as 16M
        #[arg(long, value_parser = parse_size)]
        file_size: u64,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Read and check every byte of the files
    Verify {
        #[arg(long)]
        dir: PathBuf,
        /// Journal of what was written since the files were created
        #[arg(long)]
        journal: Option<PathBuf>,
        /// Writes that were not durable may be lost
        #[arg(long)]
        after_crash: bool,
        /// Bypass the page cache (O_DIRECT)
        #[arg(long)]
        direct: bool,
        #[arg(long)]
        json: bool,
    },
    /// Read records and check them
    ReadRecords(AccessArguments),
    /// Read records, check them, and rewrite some
    WriteMix {
        #[command(flatten)]
        access: AccessArguments,
        /// How many of 100 accesses write
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=100))]
        ratio: u64,
        /// File on another disk that records what was written
        #[arg(long)]
        journal: PathBuf,
        /// Writes between two fsyncs; 0 for one at the end
        #[arg(long, default_value_t = 0)]
        sync_every: u64,
    },
    /// Create, read, shorten, rename and delete files
    Churn {
        #[arg(long)]
        dir: PathBuf,
        #[arg(long, default_value_t = 1000)]
        steps: u64,
        #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
        files: u64,
        /// Largest size of a file, such as 2M
        #[arg(long, default_value = "1M", value_parser = parse_size)]
        file_size: u64,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long)]
        json: bool,
    },
    /// Sort records in memory, in place, and check each of them
    Sort {
        /// Size of all records, such as 64M
        #[arg(long, value_parser = parse_size)]
        size: u64,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        #[arg(long)]
        json: bool,
    },
    /// Hold memory and keep touching it
    Pressure {
        #[arg(long)]
        mib: usize,
        #[arg(long)]
        seconds: u64,
    },
}

#[derive(Args)]
struct AccessArguments {
    #[arg(long)]
    dir: PathBuf,
    /// Size of a record
    #[arg(long, default_value = "96K", value_parser = parse_size)]
    record: u64,
    #[arg(long, value_enum, default_value = "zipf")]
    pattern: Pattern,
    /// Exponent of the zipf distribution
    #[arg(long, default_value_t = 1.0)]
    alpha: f64,
    /// Accesses, after the warm-up
    #[arg(long, default_value_t = u64::MAX)]
    count: u64,
    /// Seconds, after the warm-up
    #[arg(long)]
    seconds: Option<u64>,
    /// Accesses that are made first and reported apart
    #[arg(long, default_value_t = 0)]
    warmup: u64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// End when this file appears
    #[arg(long)]
    stop_file: Option<PathBuf>,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Report each access that takes longer than this many milliseconds
    #[arg(long, value_name = "MS")]
    pauses_over: Option<u64>,
    /// One JSON object on each line: progress every second, the result last
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("remoca-workload: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Action) -> Result<Faults> {
    match command {
        Action::Create { dir, files, file_size, seed } => {
            dataset::create(&dir, files, file_size, seed)?;
            Ok(Faults::default())
        }
        Action::Verify { dir, journal, after_crash, direct, json } => {
            let after = if after_crash { After::Crash } else { After::Order };
            let versions = match journal {
                Some(path) => Versions::read(&path, after)
                    .map_err(|source| remoca_lab::Error::Io { what: format!("reading {}", path.display()), source })?,
                None => Versions::default(),
            };
            let verified = dataset::verify(&dir, &Manifest::read(&dir)?, &versions, direct);
            report(&verified, &format!("{} sectors", verified.sectors), &verified.faults, json);
            Ok(verified.faults)
        }
        Action::ReadRecords(access) => access_records(access, None),
        Action::WriteMix { access, ratio, journal, sync_every } => {
            let writes = records::WriteOptions { percent: ratio, journal, sync_interval: sync_every };
            access_records(access, Some(writes))
        }
        Action::Churn { dir, steps, files, file_size, seed, json } => {
            let options = churn::Options {
                step_count: steps,
                file_count_max: files,
                file_sectors_max: (file_size / 512).max(1),
                seed,
            };
            let churned = churn::churn(&dir, &options)?;
            let said = format!("{} created, {} deleted", churned.created, churned.deleted);
            report(&churned, &said, &churned.faults, json);
            Ok(churned.faults)
        }
        Action::Sort { size, seed, json } => {
            let sorted = sort::sort(usize::try_from(size).unwrap_or(usize::MAX), seed);
            let faults = Faults { wrong_signatures: u64::from(!sorted.is_right()), ..Faults::default() };
            let said = format!("{} records in {:.1} s: {sorted:?}", sorted.records, sorted.sort_seconds);
            report(&sorted, &said, &faults, json);
            Ok(faults)
        }
        Action::Pressure { mib, seconds } => {
            hold_memory(mib, Duration::from_secs(seconds));
            Ok(Faults::default())
        }
    }
}

fn access_records(arguments: AccessArguments, writes: Option<records::WriteOptions>) -> Result<Faults> {
    let options = records::Options {
        folder: arguments.dir,
        record_size: usize::try_from(arguments.record).unwrap_or(usize::MAX),
        pattern: arguments.pattern,
        alpha: arguments.alpha,
        seed: arguments.seed,
        warmup_count: arguments.warmup,
        count: arguments.count,
        time_limit: arguments.seconds.map(Duration::from_secs),
        stop_file: arguments.stop_file,
        direct: arguments.direct,
        writes,
        pause: arguments.pauses_over.map(Duration::from_millis),
    };
    let json = arguments.json;
    let result = records::access(&options, |event| tell(event, json))?;
    let measured = &result.measured;
    let said = format!(
        "{} reads, mean {:.3} ms, p50 {:.3}, p99 {:.3}, max {:.3}; {} writes",
        measured.reads.count,
        measured.reads.mean_us / 1e3,
        measured.reads.p50_us / 1e3,
        measured.reads.p99_us / 1e3,
        measured.reads.max_us / 1e3,
        measured.writes.count,
    );
    report(&result, &said, &result.faults, json);
    Ok(result.faults)
}

fn tell(event: &Event, json: bool) {
    match (json, event) {
        (true, event) => print_json(event),
        (false, Event::Progress(progress)) => println!(
            "{:6.0} s  {} reads, {} writes, mean {:.3} ms in this second",
            progress.seconds,
            progress.reads,
            progress.writes,
            progress.interval_mean_us / 1e3,
        ),
        (false, Event::WarmupDone { seconds }) => println!("{seconds:6.0} s  warm-up done"),
        (false, Event::Started) => {}
        (false, Event::Pause(pause)) => println!("an access took {} ms", pause.length_us / 1000),
    }
}

/// Prints the last line: the result, as readable text or as `{"event":"result", ...}`.
fn report(result: &impl Serialize, said: &str, faults: &Faults, json: bool) {
    #[derive(Serialize)]
    struct Tagged<'a, T> {
        event: &'static str,
        #[serde(flatten)]
        result: &'a T,
    }
    if json {
        return print_json(&Tagged { event: "result", result });
    }
    println!("{said}; {} I/O errors, {} wrong signatures", faults.io_errors, faults.wrong_signatures);
    for example in &faults.examples {
        println!("  {example}");
    }
}

fn print_json(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("remoca-workload: {error}"),
    }
}

fn hold_memory(mib: usize, duration: Duration) {
    let deadline = Instant::now() + duration;
    let mut memory = vec![0u8; mib << 20];
    let mut round = 0;
    while Instant::now() < deadline {
        round = if round == u8::MAX { 1 } else { round + 1 };
        for page in memory.chunks_mut(4096) {
            page[0] = round;
        }
        // Keeps the compiler from removing the writes.
        std::hint::black_box(&mut memory);
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 10),
        Some(digits) if text.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| format!("'{text}' is no size; examples: 512, 96K, 1M"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too much"))
}
