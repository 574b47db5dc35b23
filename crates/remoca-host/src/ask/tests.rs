//! VM processes that hang beside others that answer.

use super::*;
use crate::testing::{GRID, status};
use crate::text::CHARACTERS_MAX;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(20);

fn listen(folder: &Path, name: &str) -> (PathBuf, UnixListener) {
    let socket = folder.join(name).with_extension("ctl");
    let listener = UnixListener::bind(&socket).unwrap();
    (socket, listener)
}

/// Accepts a connection, and returns it when the command has come.
fn hear(listener: &UnixListener) -> UnixStream {
    let (stream, _) = listener.accept().unwrap();
    BufReader::new(&stream).read_line(&mut String::new()).unwrap();
    stream
}

fn say(mut stream: UnixStream, name: &str) {
    let reply = Reply::Status(Box::new(status(name, 1, 1)));
    stream.write_all(&reply.line().unwrap()).unwrap();
}

fn processes(patience: Duration) -> Processes {
    Processes::with_patience(Resource::Cache, patience, LONG)
}

fn is_read(answer: &Answer) -> bool {
    matches!(answer, Answer::Read(_))
}

#[test]
fn long_words_of_a_process_are_cut() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let words = "\u{fc}".repeat(1 << 20);
    let answer = format!("{{\"error\":\"{words}\"}}\n");
    thread::spawn(move || {
        loop {
            hear(&listener).write_all(answer.as_bytes()).unwrap();
        }
    });
    let short = "\u{fc}".repeat(CHARACTERS_MAX);
    assert_eq!(processes(LONG).ask(&[("a", &socket)], None), [Answer::Silent(short.clone())]);
    assert_eq!(set(("a", &socket), Resource::Cache, 1, LONG), Outcome::Refused(short));
}

#[test]
fn a_daemon_without_descriptors_says_nothing_about_the_process_that_it_cannot_ask() {
    for shortage in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
        let answer = silence(Err(shortage.into()));
        assert!(matches!(&answer, Answer::Unasked(why) if why.starts_with("it could not be asked: ")), "{answer:?}");
    }
    assert_eq!(silence(Err(Errno::CONNREFUSED.into())), Answer::Dead);
    assert!(matches!(silence(Err(Errno::PIPE.into())), Answer::Silent(_)));
}

#[test]
fn one_whose_answer_to_a_size_is_not_believed_may_have_taken_that() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let server = thread::spawn(move || say(hear(&listener), "b"));
    let outcome = set(("a", &socket), Resource::Cache, 1, LONG);
    server.join().unwrap();
    assert!(matches!(&outcome, Outcome::Unknown(why) if why.contains("says that it is b")), "{outcome:?}");
}

#[test]
fn one_that_hangs_is_waited_for_once_and_heard_again_when_it_answers() {
    let folder = tempfile::tempdir().unwrap();
    let (hangs, hung) = listen(folder.path(), "hangs");
    let (good, answers) = listen(folder.path(), "good");
    let places: [Place<'_>; 2] = [("hangs", &hangs), ("good", &good)];
    let server = thread::spawn(move || (0..3).for_each(|_| say(hear(&answers), "good")));
    let mut processes = processes(SHORT);
    let said = processes.ask(&places[..1], None);
    assert_eq!(said, [Answer::Silent("it did not answer within 0 seconds".into())]);
    // On a machine that is busy its time is over before it has connected, now and then.
    hung.set_nonblocking(true).unwrap();
    drop(hung.accept());
    hung.set_nonblocking(false).unwrap();
    // A look that waited for it now would not end.
    processes.patience = LONG;
    for _ in 0..2 {
        let now = processes.ask(&places, None);
        assert!(now[0] == said[0] && is_read(&now[1]), "{now:?}");
    }
    // It was asked once beside these looks, and what it says now is not used.
    say(hear(&hung), "hangs");
    while !processes.late["hangs"].question.as_ref().unwrap().is_finished() {
        thread::yield_now();
    }
    let server_of_hung = thread::spawn(move || say(hear(&hung), "hangs"));
    assert!(processes.ask(&places, None).iter().all(is_read));
    assert!(processes.late.is_empty());
    server.join().unwrap();
    server_of_hung.join().unwrap();
}

/// Answers for its status, for which it `takes` so long. Returns the connections of those that ask for its curve.
fn tell_status(listener: UnixListener, name: &'static str, takes: Duration) -> Receiver<UnixStream> {
    let (sender, held) = channel();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            if matches!(Command::parse(line.trim_end().as_bytes()), Ok(Command::Curve { .. })) {
                let _ = sender.send(stream);
                continue;
            }
            thread::sleep(takes);
            // It may have given up.
            let _ = stream.write_all(&Reply::Status(Box::new(status(name, 5, 7))).line().unwrap());
        }
    });
    held
}

/// Answers to one that asks for a curve; it may have given up.
fn tell_no_curve(mut stream: UnixStream) {
    let _ = stream.write_all(&Reply::Error { error: "none".into() }.line().unwrap());
}

fn curve_of(answer: &Answer) -> Option<String> {
    let Answer::Read(reading) = answer else { panic!("{answer:?}") };
    assert_eq!((reading.wanted, reading.granted), (5, 7));
    reading.curve.clone().map(Result::unwrap_err)
}

#[test]
fn a_curve_that_does_not_come_is_waited_for_once_while_the_status_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let held = tell_status(listener, "a", Duration::ZERO);
    let places: [Place<'_>; 1] = [("a", &socket)];
    // On a machine that is busy the status can be late too.
    let (mut processes, said) = loop {
        let mut processes = processes(SHORT);
        let said = processes.ask(&places, Some(GRID));
        if is_read(&said[0]) {
            break (processes, said);
        }
    };
    let why = "it does not tell its curve: it did not answer within 0 seconds".to_owned();
    assert_eq!(curve_of(&said[0]), Some(why));
    // A look that waited for it now would not end.
    processes.patience = LONG;
    for _ in 0..2 {
        assert_eq!(processes.ask(&places, Some(GRID)), said);
    }
    assert_eq!(curve_of(&processes.ask(&places, None)[0]), None);
    // It is asked for it beside these looks, and when it has told it, in the next look.
    while !processes.late["a"].question.as_ref().unwrap().is_finished() {
        held.try_iter().for_each(tell_no_curve);
        thread::yield_now();
    }
    thread::spawn(move || held.iter().for_each(tell_no_curve));
    assert_eq!(curve_of(&processes.ask(&places, Some(GRID))[0]), Some("none".into()));
    assert!(processes.late.is_empty());
}

#[test]
fn a_process_has_one_time_for_its_status_and_its_curve() {
    let (patience, status_takes) = (Duration::from_millis(400), Duration::from_millis(300));
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let _held = tell_status(listener, "a", status_takes);
    // On a machine that is busy it takes longer now and then.
    let is_in_time = |_| {
        let began = Instant::now();
        let said = processes(patience).ask(&[("a", &socket)], Some(GRID));
        is_read(&said[0]) && began.elapsed() < patience + status_takes
    };
    assert!((0..100).any(is_in_time));
}

#[test]
fn one_that_does_not_tell_its_status_any_longer_either_is_silent() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, _hangs) = listen(folder.path(), "a");
    let mut processes = processes(SHORT);
    let late = Late {
        socket: socket.clone(),
        why: "no curve".into(),
        grid: Some(GRID),
        asked_at: Instant::now(),
        question: None,
    };
    processes.late.insert("a".into(), late);
    let said = processes.ask(&[("a", &socket)], Some(GRID));
    assert_eq!(said, [Answer::Silent("it did not answer within 0 seconds".into())]);
    assert!(processes.late["a"].question.is_some(), "the question beside that look goes on");
    processes.patience = LONG;
    assert_eq!(processes.ask(&[("a", &socket)], Some(GRID)), said);
    assert_eq!(processes.late["a"].grid, None);
}

#[test]
fn one_that_is_told_a_size_is_not_asked_for_a_late_curve() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let mut processes = processes(LONG);
    processes.note_late("a", &socket, Lateness { why: String::new(), grid: Some(GRID) });
    let step = Step { vm: "a".into(), side: crate::planner::Side::Tier, bytes: 1 };
    processes.set(&socket, &step).unwrap();
    let stream = hear(&listener);
    assert!(!is_read(&processes.ask(&[("a", &socket)], Some(GRID))[0]));
    assert!(processes.late["a"].question.is_none());
    say(stream, "a");
    processes.outcome(Instant::now() + LONG).unwrap();
    processes.ask(&[], None);
    assert!(processes.late["a"].question.is_some());
}

#[test]
fn many_that_are_late_are_asked_in_turn_and_those_that_are_gone_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let count = ASKED_AT_A_TIME_MAX + 10;
    let listeners: Vec<_> = (0..count).map(|number| listen(folder.path(), &number.to_string())).collect();
    let mut processes = processes(LONG);
    for (number, (socket, _)) in listeners.iter().enumerate() {
        let late =
            Late { socket: socket.clone(), why: String::new(), grid: None, asked_at: Instant::now(), question: None };
        processes.late.insert(number.to_string(), late);
    }
    let asked = |processes: &Processes| -> Vec<usize> {
        let asked = processes.late.iter().filter(|(_, late)| late.question.is_some());
        asked.map(|(name, _)| name.parse().unwrap()).collect()
    };
    processes.ask(&[], None);
    processes.ask(&[], None);
    let mut first = asked(&processes);
    first.sort_unstable();
    assert_eq!(first, (0..ASKED_AT_A_TIME_MAX).collect::<Vec<_>>(), "those that were asked first are first");
    // Their sockets are closed, and then there is nobody.
    drop(listeners);
    while !processes.late.is_empty() {
        processes.ask(&[], None);
        thread::yield_now();
    }
}

#[test]
fn one_that_hangs_holds_up_no_others_however_many_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..=ASKED_AT_A_TIME_MAX).map(|number| format!("vm{number}")).collect();
    let (sockets, listeners): (Vec<_>, Vec<_>) = names.iter().map(|name| listen(folder.path(), name)).unzip();
    let (all_but_first, is_last) = channel();
    let servers: Vec<_> = names.iter().cloned().zip(listeners).collect();
    let mut is_last = Some(is_last);
    for (name, listener) in servers {
        let (sender, receiver) = (all_but_first.clone(), is_last.take());
        thread::spawn(move || {
            let stream = hear(&listener);
            match receiver {
                // It hangs until all others were asked.
                Some(receiver) => (0..ASKED_AT_A_TIME_MAX).for_each(|_| receiver.recv().unwrap()),
                None => sender.send(()).unwrap(),
            }
            say(stream, &name);
        });
    }
    let places: Vec<Place<'_>> =
        names.iter().zip(&sockets).map(|(name, socket)| (name.as_str(), socket.as_path())).collect();
    let said = processes(Duration::from_secs(60)).ask(&places, None);
    assert!(said.iter().all(is_read), "{:?}", said[0]);
}

#[test]
fn one_that_is_told_a_size_is_not_asked_until_it_answers() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, listener) = listen(folder.path(), "a");
    let step = Step { vm: "a".into(), side: crate::planner::Side::Tier, bytes: 1 };
    let mut processes = processes(LONG);
    assert!(processes.outcome(Instant::now()).is_none());
    processes.set(&socket, &step).unwrap();
    let stream = hear(&listener);
    let said = processes.ask(&[("a", &socket)], None);
    assert_eq!(said, [Answer::Silent("it has not answered yet to the size that it was told".into())]);
    say(stream, "a");
    let (of, outcome) = processes.outcome(Instant::now() + LONG).unwrap();
    assert!(of == step && matches!(outcome, Outcome::Answered(Answer::Read(_))), "{outcome:?}");
    assert!(!processes.is_told());
}
