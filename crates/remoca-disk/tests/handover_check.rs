//! What programs answer that are asked whether they could take over. Alone in its process: between `fork` and `exec` a child
//! has copies of all descriptors, which would keep other tests' sockets and locks open.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that meets an error has failed")]

use remoca_disk::handover::{Checking, Successor, confirmation};
use remoca_protocol::guests::Offer;
use remoca_protocol::offer::Offers;
use rustix::event::{PollFd, PollFlags, poll};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Held by each test: a child of one would keep a program that another one writes open for writing.
static ALONE: Mutex<()> = Mutex::new(());

fn ask(program: &Path) -> Result<Successor, String> {
    let arguments = ["remoca", "disk", "--name", "x"].map(OsString::from).to_vec();
    let checking = Checking::start(program.into(), arguments, Vec::new()).unwrap();
    poll(&mut [PollFd::from_borrowed_fd(checking.wake_fd(), PollFlags::IN)], None).unwrap();
    checking.verdict().expect("it woke us")
}

fn answer_of(script: &str) -> Result<Successor, String> {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    ask(&program)
}

#[test]
fn only_a_program_that_says_so_can_take_over() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let good = r#"[ "$*" = "disk --check-handover --name x" ] && echo '{"remoca_handover":2,"version":"9.9"}'"#;
    assert_eq!(answer_of(good), Ok(Successor { version: "9.9".into(), offers: None }));
    let offers = Offers { disks: [("root".into(), Offer { queues: 4, ..Offer::default() })].into(), port: None };
    let own = answer_of(&format!("echo '{}'", confirmation(offers.clone()))).unwrap();
    assert_eq!(own, Successor { version: env!("CARGO_PKG_VERSION").into(), offers: Some(offers) });
    for (script, words) in [
        ("echo error: unexpected argument >&2; exit 2", "unexpected argument"),
        ("kill -SEGV $$", "signal"),
        ("echo hello", "is no remoca"),
        (r#"echo '{"remoca_handover":7,"version":"9.9"}'"#, "by description 7"),
        ("yes | head -c 30000 >&2; exit 1", "(exit status: 1): y"),
    ] {
        let error = answer_of(script).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    let missing = ask(Path::new("/no/such/program")).unwrap_err();
    assert!(missing.contains("cannot be started"), "{missing}");
}

/// A VM has up to 4095 disks, and a program may log something about each before it answers.
#[test]
fn an_answer_may_be_longer_than_a_pipe_holds() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let offer = |disk: u32| (format!("disk-{disk:0>60}"), Offer { queues: 4, ..Offer::default() });
    let offers = Offers { disks: (0..4095).map(offer).collect(), port: None };
    let answer = confirmation(offers.clone());
    assert!(answer.len() > 4 * (64 << 10) && answer.len() < 1 << 20, "{}", answer.len());
    let script = format!("yes | head -c 300000 >&2\ncat <<'END'\n{answer}\nEND");
    assert_eq!(answer_of(&script), Ok(Successor { version: env!("CARGO_PKG_VERSION").into(), offers: Some(offers) }));
    let error = answer_of("yes no | head -c 2000000; yes no | head -c 2000000 >&2").unwrap_err();
    assert!(error.contains("is no remoca"), "a bound on what is kept, and none on what is said: {error}");
}
