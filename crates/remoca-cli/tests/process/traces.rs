//! Traces: recorded from a running process, imported, and simulated; the simulation against the process's own counters.

use super::full_disk::Small;
use super::support::machine::{Evictions, Machine, Setup};
use super::support::model::BLOCK;
use super::support::program::{Program, REMOCA, Serve, Signal, command, expect_refusal, run, run_command, status};
use super::support::random::Random;
use super::support::wait_until;
use super::upgrade;
use remoca_io::left_out::leave_out;
use remoca_protocol::control::Status;
use remoca_protocol::trace::{HEAD_BYTES, TracedOp, parse_trace};
use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FAILURE: i32 = 1;
/// A cache of 4 MiB in pages.
const CACHE: u64 = 1024;
/// What a recording says that ended although nobody stopped it.
const EARLY: &str = "the recording has ended early";

/// A `remoca trace record` in the background.
struct Recorder {
    program: Program,
    output: PathBuf,
}

impl Recorder {
    /// Starts to record the process at `control`, and waits until it sends.
    fn start(folder: &Path, control: &Path, more: &[&str]) -> Self {
        let output = folder.join("recorded");
        let mut command = command(REMOCA);
        command.args(["trace", "record"]).arg(control).arg("-o").arg(&output).args(more);
        // Not where the trace is: there may be no room.
        let name = folder.file_name().unwrap().display();
        let program = Program::start(&mut command, &control.with_file_name(format!("recorder {name}.log")));
        wait_until("it records", || program.log().contains("recording"));
        Self { program, output }
    }

    /// Waits for its end, and returns what it said.
    fn wait(self) -> (PathBuf, String) {
        self.wait_for_end(|said| !said.contains(EARLY))
    }

    /// Waits for its end before it was stopped, and returns what it said.
    fn wait_for_early_end(self) -> (PathBuf, String) {
        self.wait_for_end(|said| said.contains(EARLY))
    }

    fn wait_for_end(mut self, is_right: impl Fn(&str) -> bool) -> (PathBuf, String) {
        wait_until("the recording ends", || !self.program.is_running());
        let said = self.program.log();
        assert!(is_right(&said), "{said}");
        (self.output.clone(), said)
    }
}

fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the blocks of the first disk whose content no other block has: which of two was evicted could not be told.
fn unique_blocks(machine: &Machine) -> Vec<usize> {
    let model = &machine.disks[0].model;
    let mut count = HashMap::new();
    model.bytes.chunks(BLOCK).for_each(|block| *count.entry(block).or_insert(0) += 1);
    let is_unique = |number: &usize| count[model.block(*number)] == 1 && model.block(*number) != [0; BLOCK];
    (0..model.bytes.len() / BLOCK).filter(is_unique).collect()
}

/// A guest with memory for 256 pages, which evicts by LRU and reports it; it reads by a skewed distribution. One of
/// `pair_each` reads is of two blocks, if the memory has neither.
fn read_as_a_guest(machine: &mut Machine, reads: u64, pair_each: u64) {
    let blocks = unique_blocks(machine);
    assert!(blocks.len() > 1500, "{}", blocks.len());
    let (mut memory, mut random) = (VecDeque::new(), Random::new(5));
    for at in 0..reads {
        let block = blocks[(0..3).map(|_| random.below(blocks.len())).min().unwrap()];
        let next = block + 1;
        let reads_next = at.is_multiple_of(pair_each) && blocks.binary_search(&next).is_ok() && !memory.contains(&next);
        if let Some(at) = memory.iter().position(|other| *other == block) {
            memory.remove(at);
        } else {
            let range = block * BLOCK..(if reads_next { next } else { block } + 1) * BLOCK;
            let pages = machine.disks[0].read(&range);
            assert!(pages == machine.disks[0].model.bytes[range]);
            reads_next.then(|| memory.push_front(next));
        }
        memory.push_front(block);
        while memory.len() > 256 {
            let victim = memory.pop_back().unwrap();
            let page = machine.disks[0].model.block(victim).to_vec();
            assert_eq!(machine.send_to_port(1, &page), 0);
            machine.pages_sent += 1;
        }
    }
}

fn counted(before: &Status, after: &Status, name: &str) -> u64 {
    after.counters[name] - before.counters[name]
}

#[test]
fn a_simulated_cache_hits_as_the_real_one_did() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    // A pool that is mapped is never late or busy, which a simulation knows nothing of.
    let setup = Setup { server: Some(server.local_address()), ..Setup::default() };
    let mut machine = Machine::start(setup);
    wait_until("it has its cache", || machine.status().cache.granted_bytes == CACHE * 4096);
    let recorder = Recorder::start(folder.path(), &machine.control(), &[]);
    let before = machine.status();
    read_as_a_guest(&mut machine, 12_000, 8);
    let after = machine.status();
    let second = run(&["trace", "record", text(&machine.control()), "-o", text(&folder.path().join("second"))]);
    expect_refusal(&second, FAILURE, &["somebody else records a trace", "`remoca trace stop test`"]);
    let stopped = run(&["trace", "stop", text(&machine.control())]);
    assert!(stopped.status.success(), "{stopped:?}");
    let (trace, said) = recorder.wait();
    assert!(said.contains("requests and evictions in"), "{said}");
    expect_refusal(&run(&["trace", "stop", text(&machine.control())]), FAILURE, &["nobody records a trace"]);

    let [reads, hits, covered, evictions] = ["read_blocks", "hit_blocks", "covered_blocks", "evictions_reported"]
        .map(|name| counted(&before, &after, name));
    let info = json(&["trace", "info", text(&trace), "-o", "json"]);
    assert_eq!([&info["lost"], &info["format"]], [&0.into(), &Value::from("remoca")]);
    assert!(info["reads"].as_u64() < Some(reads), "some are of two blocks");
    assert_eq!(info["evictions"].as_u64(), Some(evictions));
    assert_eq!(info["recorded_cache_reads"].as_u64(), Some(counted(&before, &after, "reads_from_cache")));

    let cache = format!("{}K", CACHE * 4);
    for (policy, curve) in [("lru", "exact"), ("adaptive", "sampled")] {
        let options = ["--remote", &cache, "--policy", policy, "--curve", curve, "-o", "json"];
        let simulated = json(&[&["sim", text(&trace)], &options[..]].concat());
        let blocks = &simulated["blocks"];
        let simulated_hits = blocks["remote"].as_u64().unwrap();
        assert!(hits * 3 > reads && covered > 0, "{hits} and {covered} of {reads}");
        let simulated_covered = blocks["covered"].as_u64().unwrap();
        assert_eq!([simulated_hits, simulated_covered], [hits, covered], "{policy}: of {reads}, {:?}", after.counters);
        assert_eq!((&blocks["local"], simulated["uses_evictions"].as_bool()), (&0.into(), Some(true)));
        let at = simulated["curve"].as_array().unwrap().iter().find(|point| point["bytes"] == CACHE * 4096).unwrap();
        let ratio = at["hit_ratio"].as_f64().unwrap();
        assert!((ratio - (hits + covered) as f64 / reads as f64).abs() < 0.03, "{policy}: {ratio}");
    }
    // The time of a hit is that of the trace, if it is of the only tier.
    let recorded = info["recorded_cache_ms"].as_f64().unwrap();
    let times = |options: &[&str]| json(&[&["sim", text(&trace), "-o", "json"], options].concat())["latencies"].clone();
    let only = times(&["--remote", &cache]);
    assert_eq!((only["remote_ms"].as_f64(), &only["remote_is"]), (Some(recorded), &"of-the-trace".into()));
    let said = times(&["--remote", &cache, "--remote-latency", "0.7"]);
    assert_eq!((&said["remote_ms"], &said["remote_is"]), (&0.7.into(), &"said".into()));
    let both = times(&["--local", &cache, "--remote", &cache]);
    assert_eq!(
        (&both["local_ms"], &both["remote_ms"], &both["local_is"]),
        (&0.01.into(), &0.2.into(), &"assumed".into())
    );
    machine.finish();
}

/// Pages fall from the local tier into the other one, and rise again.
#[test]
fn simulated_tiers_hit_as_the_real_ones_did() {
    // A server that gets no processor for a while is left alone meanwhile, which a simulation knows nothing of.
    let compared: Vec<_> = (0..5).map(|_| compare_tiers()).take_while(Result::is_err).collect();
    assert!(compared.len() < 5, "{compared:?}");
}

/// Returns what differs if that may be because the server was late. Fails the test if it was not.
fn compare_tiers() -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let [near, far] = ["near", "far"].map(|name| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        Serve::start(&folder, "16M")
    });
    let arguments = ["--local", "1M", "--local-server", &near.local_address()].map(String::from).to_vec();
    let mut machine =
        Machine::start(Setup { server: Some(far.address.clone()), cache: "3M", arguments, ..Setup::default() });
    let pools = |machine: &Machine| {
        let pools = machine.status().pools;
        [true, false].map(|is_local| pools.iter().find(|pool| pool.is_local_tier == is_local).cloned())
    };
    let granted = |machine: &Machine| pools(machine).map(|pool| pool.map_or(0, |pool| pool.granted_bytes));
    wait_until("it has both tiers", || granted(&machine) == [1 << 20, 3 << 20]);
    let recorder = Recorder::start(folder.path(), &machine.control(), &[]);
    read_as_a_guest(&mut machine, 12_000, u64::MAX);
    let hits = pools(&machine).map(|pool| pool.unwrap().hits);
    let counters = machine.status().counters;
    let is_late = ["covered_blocks", "fetch_timeouts", "evictions_dropped"].iter().any(|name| counters[*name] > 0);
    assert!(run(&["trace", "stop", text(&machine.control())]).status.success());
    let (trace, _) = recorder.wait();
    for policy in ["lru", "adaptive"] {
        let options = ["--local", "1M", "--remote", "3M", "--policy", policy, "-o", "json"];
        let simulated = json(&[&["sim", text(&trace)], &options[..]].concat());
        let simulated = ["local", "remote"].map(|tier| simulated["blocks"][tier].as_u64().unwrap());
        // A page that was late is asked of the disk, and a page for which there was no room on the way is not there.
        let is_close = |(simulated, hits): (&u64, &u64)| simulated.abs_diff(*hits) <= hits / 50;
        if !simulated.iter().zip(&hits).all(is_close) {
            let differs = format!("{policy}: {simulated:?} of {hits:?}, {counters:?}");
            assert!(is_late, "{differs}");
            return Err(differs);
        }
    }
    assert!(hits.iter().all(|hits| *hits > 500), "{hits:?}");
    machine.finish();
    Ok(())
}

/// Blocks are admitted as they are read: the guest has no agent.
#[test]
fn a_simulated_cache_of_reads_hits_as_one_over_nbd_did() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("image"), Random::new(9).bytes(16 << 20)).unwrap();
    let mut disk = command(REMOCA);
    disk.arg("disk").arg("--disk").arg(format!("image={},name=root", path("image").display()));
    disk.args(["--cache", "4M", "--no-hedge", "--server", &server.local_address()]);
    disk.arg("--nbd").arg(format!("unix:{}", path("nbd").display())).arg("--control").arg(path("control"));
    let mut disk = Program::start(&mut disk, &path("disk.log"));
    let cache_is_ready = || {
        std::os::unix::net::UnixStream::connect(path("control")).is_ok()
            && status(&path("control")).cache.granted_bytes == CACHE * 4096
    };
    wait_until("it has its cache", cache_is_ready);

    let recorder = Recorder::start(folder.path(), &path("control"), &["--time", "1h"]);
    let mut fio = command("fio");
    fio.current_dir(folder.path()).args(["--name=reads", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--iodepth=1"]);
    fio.args(["--random_distribution=zipf:0.8", "--norandommap", "--randseed=3", "--number_ios=8000", "--size=16M"]);
    fio.arg("--io_size=32M").arg(format!("--uri=nbd+unix:///root?socket={}", path("nbd").display()));
    let output = run_command(&mut fio);
    assert!(output.status.success(), "{output:?}");
    let counters = status(&path("control")).counters;
    recorder.program.signal(Signal::INT);
    let (trace, said) = recorder.wait();
    let (reads, hits) = (counters["read_blocks"], counters["hit_blocks"]);
    let info = json(&["trace", "info", text(&trace), "-o", "json"]);
    assert_eq!((info["read_blocks"].as_u64(), info["evictions"].as_u64()), (Some(reads), Some(0)), "{said}");
    let simulated = json(&["sim", text(&trace), "--remote", "4M", "--policy", "adaptive", "-o", "json"]);
    assert!(reads >= 8000 && hits * 5 > reads, "{hits} of {reads}");
    assert_eq!(simulated["blocks"]["remote"].as_u64(), Some(hits), "of {reads}, {counters:?}");
    disk.terminate();
}

#[test]
fn a_recording_ends_at_its_size_and_with_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = Machine::start(Setup::default());
    let recorder = Recorder::start(folder.path(), &machine.control(), &["--size", "100K"]);
    let mut recorder = Some(recorder);
    wait_until("the size is reached", || {
        machine.run(20);
        !recorder.as_mut().unwrap().program.is_running()
    });
    let (trace, said) = recorder.take().unwrap().wait();
    assert!(said.contains("The size is reached"), "{said}");
    let length = std::fs::metadata(&trace).unwrap().len();
    assert!((50 << 10..=100 << 10).contains(&length), "{length}");
    json(&["trace", "info", text(&trace), "-o", "json"]);

    // What was recorded is not lost to a command that is said again.
    let again = run(&["trace", "record", text(&machine.control()), "-o", text(&trace), "--time", "1s"]);
    expect_refusal(&again, FAILURE, &["there is a file ", "already", "--force"]);
    assert_eq!(std::fs::metadata(&trace).unwrap().len(), length);
    let recorder = Recorder::start(folder.path(), &machine.control(), &["--force"]);
    machine.run(20);
    machine.program.terminate();
    let (trace, said) = recorder.wait_for_early_end();
    assert!(said.contains("The VM process has ended the trace"), "{said}");
    assert!(json(&["trace", "info", text(&trace), "-o", "json"])["reads"].as_u64() > Some(0));
    machine.restart();
    machine.pages_sent = 0;
    machine.finish();
}

#[test]
fn what_is_no_trace_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let msr = "128166372003061629,hm,1,Read,383496192,32768,413\n128166372016382155,hm,1,Write,310983168,20480,1239\n";
    std::fs::write(path("good"), msr).unwrap();
    std::fs::write(path("absurd"), format!("{msr}128166372016382156,hm,1,Read,18446744073709551615,512,1\n")).unwrap();
    std::fs::write(path("other"), "hello\n").unwrap();
    let import = |name: &str, more: &[&str]| {
        let [from, to] = [path(name), path("out")];
        run(&[&["trace", "import", text(&from), "-o", text(&to)], more].concat())
    };
    expect_refusal(&import("absurd", &[]), FAILURE, &["line 3", "(msr)", "no disk is larger than 4 PiB"]);
    expect_refusal(&import("other", &[]), FAILURE, &["the format of the trace is not recognized", "--format"]);
    expect_refusal(&import("missing", &[]), FAILURE, &["cannot open the trace"]);
    let device = run(&["trace", "import", text(&path("good")), "-o", "/dev/null"]);
    expect_refusal(&device, FAILURE, &["/dev/null is no file"]);
    let names = || std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(names(), 3, "nothing is left behind");

    let imported = import("good", &[]);
    assert!(imported.status.success() && names() == 4, "{imported:?}");
    let whole = std::fs::read(path("out")).unwrap();
    std::fs::write(path("cut"), &whole[..whole.len() - 1]).unwrap();
    let page = path("page.html");
    let sim = |name: &str, more: &[&str]| {
        let from = path(name);
        run(&[&["sim", text(&from), "--html", text(&page)], more].concat())
    };
    expect_refusal(&sim("cut", &[]), FAILURE, &["the trace is cut short", "at byte 16", "--accept-cut"]);
    expect_refusal(&sim("good", &["--memory", "1K", "--local", "1M"]), FAILURE, &["different blocks", "--memory"]);
    assert!(!page.exists() && names() == 5);
    let accepted = sim("cut", &["--accept-cut"]);
    assert!(String::from_utf8(accepted.stdout).unwrap().contains("The rest is missing: the trace is cut short"));

    expect_refusal(&import("good", &[]), FAILURE, &["there is a file ", "already", "--force"]);
    assert_eq!(std::fs::read(path("out")).unwrap(), whole);
    assert!(import("good", &["--force"]).status.success());
    expect_refusal(&sim("good", &[]), FAILURE, &["there is a file ", "page.html already", "--force"]);
    let more = ["--guest", "1M", "--local", "1M", "--remote", "2M", "--curve", "exact", "--force"];
    let shown = sim("good", &more);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.lines().all(|line| line.len() <= 80), "{shown}");
    assert!(shown.contains("remote tier") && shown.contains("Mean read: "), "{shown}");
    let slow = run(&["sim", text(&path("good")), "--disk-latency", "123456789"]);
    let slow = String::from_utf8(slow.stdout).unwrap();
    assert!(slow.contains(" 100.0 123456789.000\n"), "{slow}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && !page.contains("http"), "it loads nothing from elsewhere");
}

#[test]
fn sizes_of_less_than_a_block_are_refused_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    std::fs::write(&trace, "1,hm,1,Read,0,4096,413\n").unwrap();
    let sim = |options: &[&str]| run(&[&["sim", text(&trace)], options].concat());
    expect_refusal(&sim(&["--guest", "4095"]), FAILURE, &["--guest is less than a block:", "at least 4K"]);
    let sampled = sim(&["--local", "1M", "--one-of", "4096"]);
    expect_refusal(&sampled, FAILURE, &["--local is less than a block in the share of --one-of 4096", "at least 16M"]);
    assert!(sim(&["--remote", "16M", "--one-of", "4096"]).status.success());
    let page = folder.path().join("page");
    let huge = sim(&["--local", "9000000T", "--remote", "9000000T", "--html", text(&page)]);
    assert!(huge.status.success(), "{huge:?}");
}

/// Waits until a recording into `folder` has received a whole frame.
fn wait_for_a_frame(folder: &Path) {
    let length = |entry: std::io::Result<std::fs::DirEntry>| Some(entry.ok()?.metadata().ok()?.len());
    wait_until("a frame is there", || {
        let mut lengths = std::fs::read_dir(folder).unwrap().filter_map(length);
        lengths.any(|length| length > HEAD_BYTES as u64)
    });
}

#[test]
fn a_recording_ends_with_an_upgrade_and_with_a_process_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = Machine::start(Setup::default());
    machine.outlives = true;
    for is_killed in [false, true] {
        let output = folder.path().join(if is_killed { "killed" } else { "upgraded" });
        std::fs::create_dir(&output).unwrap();
        let before = machine.counter("reads");
        let recorder = Recorder::start(&output, &machine.control(), &[]);
        machine.run(250);
        wait_for_a_frame(&output);
        let answered = machine.counter("reads") - before;
        if is_killed {
            machine.program.kill();
        } else {
            let (done, said) = upgrade::upgrade_in_time(&mut machine, || None);
            assert!(done, "{said}");
        }
        let (trace, said) = recorder.wait_for_early_end();
        assert!(said.contains("The VM process has ended the trace") || said.contains("was lost"), "{said}");
        let recorded = json(&["trace", "info", text(&trace), "-o", "json"])["reads"].as_u64().unwrap();
        // An upgrade sends what is ready first.
        assert!(recorded > 1000 && (is_killed || recorded >= answered), "{recorded} of {answered}");
    }
    machine.restart();
    machine.pages_sent = 0;
    machine.finish();
}

/// A trace that comes through a pipe is imported until somebody has enough of it.
#[test]
fn an_import_that_is_interrupted_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let [pipe, output] = ["pipe", "output"].map(|name| folder.path().join(name));
    std::fs::create_dir(&output).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    // Open for both, it waits for nobody.
    let mut trace = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    for signal in [Signal::INT, Signal::TERM] {
        // Whatever this process ignores: programs in the background often ignore SIGINT.
        let mut import = command("env");
        import.args(["--default-signal=INT,TERM", REMOCA, "trace", "import", "--format", "blkparse"]);
        import.arg(&pipe).arg("-o").arg(output.join("trace"));
        let mut program = Program::start(&mut import, &folder.path().join("log"));
        // More than is looked at to tell the format, and less than a pipe holds.
        trace
            .write_all(&b"  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]\n".repeat(400))
            .unwrap();
        let files = || std::fs::read_dir(&output).unwrap().count();
        wait_until("a file is begun", || files() == 1);
        program.signal(signal);
        wait_until("it ends", || !program.is_running());
        assert_eq!(files(), 0, "{}", program.log());
    }
}

/// It was started with `nohup`, and its terminal is closed.
#[test]
fn an_import_that_ignores_a_signal_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let [pipe, output] = ["pipe", "output"].map(|name| folder.path().join(name));
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let mut import = command("sh");
    import.args(["-c", "trap '' HUP; exec \"$@\"", "sh", REMOCA, "trace", "import", "--format", "blkparse"]);
    let mut program = Program::start(import.arg(&pipe).arg("-o").arg(&output), &folder.path().join("log"));
    let mut trace = std::fs::File::options().write(true).open(&pipe).unwrap();
    let lines = b"  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]\n".repeat(400);
    trace.write_all(&lines).unwrap();
    wait_until("a file is begun", || std::fs::read_dir(folder.path()).unwrap().count() == 3);
    program.signal(Signal::HUP);
    trace.write_all(&lines).unwrap();
    drop(trace);
    wait_until("it ends", || !program.is_running());
    assert!(output.exists(), "{}", program.log());
}

/// One that was started with `nohup` goes on.
#[test]
fn a_recording_ends_with_its_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = Machine::start(Setup::default());
    for is_ignored in [true, false] {
        let output = folder.path().join(if is_ignored { "ignored" } else { "ended" });
        let signal = if is_ignored { "--ignore-signal=HUP" } else { "--default-signal=HUP" };
        let mut record = command("env");
        record.args([signal, REMOCA, "trace", "record"]).arg(machine.control()).arg("-o").arg(&output);
        let mut program = Program::start(&mut record, &output.with_extension("log"));
        wait_until("it records", || program.log().contains("recording"));
        machine.run(20);
        program.signal(Signal::HUP);
        if is_ignored {
            std::thread::sleep(Duration::from_secs(1));
            assert!(program.is_running(), "{}", program.log());
            assert!(run(&["trace", "stop", text(&machine.control())]).status.success());
        }
        wait_until("the recording ends", || !program.is_running());
        assert!(output.exists() && !program.log().contains(EARLY), "{}", program.log());
    }
    machine.finish();
}

/// Nothing waits for a client that takes nothing, and another one may take its place.
#[test]
fn a_recorder_that_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    [&first, &second].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
    let mut machine = Machine::start(Setup::default());
    let hanging = Recorder::start(&first, &machine.control(), &[]);
    hanging.program.signal(Signal::STOP);
    machine.run(250);
    assert!(run(&["trace", "stop", text(&machine.control())]).status.success());
    let recorder = Recorder::start(&second, &machine.control(), &[]);
    machine.run(10);
    assert!(run(&["trace", "stop", text(&machine.control())]).status.success());
    let (trace, _) = recorder.wait();
    assert!(json(&["trace", "info", text(&trace), "-o", "json"])["reads"].as_u64() > Some(0));
    hanging.program.signal(Signal::CONT);
    let (trace, said) = hanging.wait();
    assert!(said.contains("The VM process has ended the trace"), "{said}");
    assert!(json(&["trace", "info", text(&trace), "-o", "json"])["reads"].as_u64() > Some(1000));
    machine.finish();
}

/// The guest does not notice, and what there was room for is a sound trace.
#[test]
fn a_full_disk_ends_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let [of_command, of_process] = ["command", "process"].map(|name| Small::mount(&folder.path().join(name), "64K"));
    let (Some(of_command), Some(of_process)) = (of_command, of_process) else {
        return leave_out("this user may not mount a file system in memory");
    };
    let file = of_process.0.join("trace");
    let arguments = vec!["--trace".into(), file.display().to_string()];
    let mut machine = Machine::start(Setup { arguments, ..Setup::default() });
    machine.outlives = true;
    let mut recorder = Recorder::start(&of_command.0, &machine.control(), &[]);
    machine.run_until("both are full", |machine| {
        machine.program.log().contains("the trace ends here") && !recorder.program.is_running()
    });
    let (trace, said) = recorder.wait_for_early_end();
    assert!(said.contains("No space left") && said.contains("requests and evictions in"), "{said}");
    expect_refusal(&run(&["trace", "stop", text(&machine.control())]), FAILURE, &["nobody records a trace"]);
    assert!(json(&["trace", "info", text(&trace), "-o", "json"])["reads"].as_u64() > Some(1000));
    let before = parse_trace(&std::fs::read(&file).unwrap()).unwrap().records.len();
    assert!(before > 1000);
    let lost = machine.status().trace_lost.unwrap();
    assert!(lost > 0, "all that was not written is counted");
    of_process.grow("8M");
    let (done, said) = upgrade::upgrade_in_time(&mut machine, || None);
    assert!(done, "{said}");
    machine.run(10);
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
    let whole = parse_trace(&std::fs::read(&file).unwrap()).unwrap();
    assert!(whole.records.len() > before, "a later program goes on with it");
    assert!(whole.lost >= lost, "{} of {lost} are told", whole.lost);
    json(&["trace", "info", text(&file), "-o", "json"]);
}

/// Only blocks that the disk is known to hold are in the trace.
#[test]
fn a_guest_that_lies_while_it_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let server = Serve::start(folder.path(), "16M");
    let mut machine = Machine::start(Setup { server: Some(server.address.clone()), ..Setup::default() });
    machine.evictions = Evictions::LYING;
    let recorder = Recorder::start(folder.path(), &machine.control(), &[]);
    let before = machine.status();
    machine.run_until_hits(300);
    let after = machine.status();
    assert!(run(&["trace", "stop", text(&machine.control())]).status.success());
    let (trace, _) = recorder.wait();
    let records = parse_trace(&std::fs::read(&trace).unwrap()).unwrap().records;
    let evicted: Vec<_> = records.iter().filter(|record| record.op == TracedOp::Evicted).collect();
    let count = |outcome: &str| counted(&before, &after, &format!("evictions_{outcome}"));
    let known = count("reported") - count("unmatched") - count("zero");
    let recorded = evicted.len() as u64;
    // A cached page may outlive its block: sent again, it is a duplicate of none.
    assert!(recorded <= known && recorded + count("duplicate") >= known, "{recorded} of {known}");
    assert!(count("unmatched") > recorded / 4 && recorded > 0, "the lies were told");
    let blocks = (machine.disks[0].model.bytes.len() / BLOCK) as u64;
    assert!(evicted.iter().all(|record| record.block < blocks && record.blocks == 1 && record.disk == 0));
    json(&["sim", text(&trace), "--remote", "4M", "--policy", "adaptive", "-o", "json"]);
    machine.finish();
}

/// A service manager starts a process again with the same arguments.
#[test]
fn a_process_that_starts_again_goes_on_with_its_trace() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace");
    let arguments = vec!["--trace".into(), file.display().to_string()];
    let mut machine = Machine::start(Setup { arguments, ..Setup::default() });
    let records = || parse_trace(&std::fs::read(&file).unwrap()).unwrap().records.len();
    machine.run(300);
    wait_until("frames are in the file", || records() > 1000);
    machine.program.kill();
    // In the middle of a write.
    let torn = std::fs::metadata(&file).unwrap().len() - 1;
    std::fs::File::options().write(true).open(&file).unwrap().set_len(torn).unwrap();
    let before = records();
    machine.restart();
    machine.run(20);
    machine.program.terminate();
    let log = machine.program.log();
    assert!(log.contains("ended within a frame") && log.contains("goes on"), "{log}");
    assert!(records() > before, "{before}");
    json(&["trace", "info", text(&file), "-o", "json"]);

    // A guest may wait for its disks, whatever is in the way of a trace.
    std::fs::write(&file, "no trace").unwrap();
    machine.restart();
    machine.run(20);
    assert!(machine.program.log().contains("no request is recorded"), "{}", machine.program.log());
    assert_eq!(std::fs::read(&file).unwrap(), b"no trace");
    machine.pages_sent = machine.counter("evictions_reported");
    machine.finish();
}

/// The first process of a name has no guest yet.
#[test]
fn a_trace_overwrites_no_other_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("image"), vec![7; 1 << 20]).unwrap();
    let [disk, nbd] = [format!("image={}", path("image")), format!("unix:{}", path("nbd"))];
    let arguments = ["disk", "--disk", &disk, "--nbd", &nbd, "--control", &path("control"), "--trace", &path("image")];
    expect_refusal(&run(&arguments), 78, &["there is a file ", "it is not overwritten", "Name another file"]);
    assert_eq!(std::fs::read(path("image")).unwrap(), vec![7; 1 << 20]);
}

/// An image in place of another is a disk with another number.
#[test]
fn a_trace_has_as_many_disks_as_records_are_of() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    for name in ["first", "second"] {
        std::fs::write(path(name), Random::new(9).bytes(1 << 20)).unwrap();
        let [disk, nbd] = [format!("image={},name={name}", path(name)), format!("unix:{}", path("nbd"))];
        let mut process = command(REMOCA);
        process.args(["disk", "--name", "vm", "--disk", &disk, "--nbd", &nbd, "--nbd-port"]);
        process.args(["--control", &path("control"), "--trace", &path(&format!("{name}.trace"))]);
        let mut process = Program::start(&mut process, &folder.path().join("log"));
        wait_until("it serves", || std::os::unix::net::UnixStream::connect(path("control")).is_ok());
        let mut fio = command("fio");
        fio.current_dir(folder.path()).args(["--name=reads", "--ioengine=nbd", "--rw=randread", "--bs=4k"]);
        fio.args(["--number_ios=10", "--size=1M"]).arg(format!("--uri=nbd+unix:///{name}?socket={}", path("nbd")));
        let output = run_command(&mut fio);
        assert!(output.status.success(), "{output:?}");
        process.terminate();
        let info = json(&["trace", "info", &path(&format!("{name}.trace")), "-o", "json"]);
        assert_eq!((&info["disks"], &info["reads"]), (&1.into(), &10.into()), "{name}");
    }
}
