//! A QEMU with a balloon and a monitor, without a guest: memory in a file, of which the balloon gives pages back to the host.

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

const BALLOON: &str = "/machine/peripheral/balloon0";

/// How it behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    Honest,
    /// It says that its guest follows, and its memory stays where it is.
    Lies,
    /// Its guest does not follow.
    Stuck,
    /// It takes what it is asked, and says nothing.
    Hangs,
    /// Its answers are no JSON.
    Babbles,
    /// Its guest says that it is short of memory.
    Short,
}

#[derive(Debug)]
struct State {
    manner: Manner,
    boot: u64,
    actual: u64,
    /// Sizes that it was asked for.
    asked: Vec<u64>,
    messages: u64,
}

/// A running QEMU. Its monitor ends with [`FakeQemu::die`].
pub struct FakeQemu {
    pub memory: Arc<File>,
    socket: PathBuf,
    state: Arc<Mutex<State>>,
}

impl FakeQemu {
    /// Starts one with so many bytes of memory, all of it touched, and a monitor at `socket`.
    pub fn start(socket: &Path, bytes: u64, manner: Manner) -> Self {
        let memory = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(bytes).unwrap();
        fallocate(&memory, FallocateFlags::empty(), 0, bytes).unwrap();
        let state = State { manner, boot: bytes, actual: bytes, asked: Vec::new(), messages: 0 };
        let qemu = Self { memory: Arc::new(memory), socket: socket.into(), state: Arc::new(Mutex::new(state)) };
        let listener = UnixListener::bind(socket).unwrap();
        let (memory, state) = (Arc::clone(&qemu.memory), Arc::clone(&qemu.state));
        // One client after the other, as a QEMU does: what a daemon that was killed has sent comes before what its successor sends.
        std::thread::spawn(move || listener.incoming().for_each(|stream| serve(&stream.unwrap(), &memory, &state)));
        qemu
    }

    pub fn set(&self, manner: Manner) {
        self.state.lock().unwrap().manner = manner;
    }

    /// Returns what the guest has, in bytes.
    pub fn actual(&self) -> u64 {
        self.state.lock().unwrap().actual
    }

    /// Returns the sizes that the balloon was asked for.
    pub fn asked(&self) -> Vec<u64> {
        self.state.lock().unwrap().asked.clone()
    }

    /// Takes the monitor away, as if QEMU had been killed.
    pub fn die(&self) {
        std::fs::remove_file(&self.socket).unwrap();
    }
}

fn serve(stream: &UnixStream, memory: &File, state: &Mutex<State>) {
    let mut writer = stream;
    let mut say = |text: String| writeln!(writer, "{text}").is_ok();
    if !say(json!({"QMP": {"version": {}, "capabilities": []}}).to_string()) {
        return;
    }
    // The client may be gone at any time.
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        // A client that was killed may leave half a line.
        let Ok(asked) = serde_json::from_str::<Value>(&line) else { return };
        let (manner, answer) = {
            let mut state = state.lock().unwrap();
            (state.manner, answer(&asked, memory, &mut state))
        };
        let is_heard = match (manner, answer) {
            (Manner::Hangs, _) => continue,
            (Manner::Babbles, _) => say("}{".into()),
            (_, Some(answer)) => say(json!({"return": answer, "id": asked["id"]}).to_string()),
            (_, None) => say(json!({"error": {"class": "GenericError", "desc": "no"}, "id": asked["id"]}).to_string()),
        };
        if !is_heard {
            return;
        }
    }
}

fn answer(asked: &Value, memory: &File, state: &mut State) -> Option<Value> {
    let arguments = &asked["arguments"];
    Some(match asked["execute"].as_str().unwrap() {
        "qmp_capabilities" | "query-migrate" => json!({}),
        "qom-list" if arguments["path"] == "/machine/peripheral" => {
            json!([{"name": "balloon0", "type": "child<virtio-balloon-pci>"}])
        }
        "qom-list" | "query-memory-devices" => json!([]),
        "query-memdev" => json!([{"id": "ram"}]),
        "qom-get" if arguments["property"] == "guest-stats-polling-interval" => json!(2),
        "qom-get" if arguments["path"] == BALLOON && arguments["property"] == "guest-stats" => {
            state.messages += 1;
            let available = if state.manner == Manner::Short { 4096 } else { state.actual / 2 };
            // Two of one second are different as well.
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
            json!({"last-update": now + state.messages, "stats": {"stat-available-memory": available}})
        }
        "qom-get" => json!(false),
        "query-status" => json!({"running": true, "status": "running"}),
        "query-memory-size-summary" => json!({"base-memory": state.boot, "plugged-memory": 0}),
        "query-balloon" => json!({"actual": state.actual}),
        "balloon" => {
            let bytes = arguments["value"].as_u64().unwrap().min(state.boot);
            state.asked.push(bytes);
            if !matches!(state.manner, Manner::Stuck | Manner::Hangs | Manner::Babbles) {
                inflate(memory, state, bytes);
            }
            json!({})
        }
        _ => return None,
    })
}

/// Lets the balloon leave so many bytes to the guest.
fn inflate(memory: &File, state: &mut State, bytes: u64) {
    state.actual = bytes;
    if state.manner != Manner::Lies {
        fallocate(memory, FallocateFlags::empty(), 0, bytes).unwrap();
        if bytes < state.boot {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(memory, hole, bytes, state.boot - bytes).unwrap();
        }
    }
}
