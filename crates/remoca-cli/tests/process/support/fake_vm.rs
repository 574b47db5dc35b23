//! A VM process that says what the test wants, or nothing: a control socket without disks behind it.

use remoca_protocol::control::{Command, CurveGrid, CurvePoint, CurveStatus, Status};
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

/// How it answers.
#[derive(Clone, Debug, Default)]
pub struct Manner {
    /// What it has, in MiB.
    pub mib: u64,
    /// Size below which everything misses, in MiB; 0 if half misses at every size.
    pub cliff_mib: u64,
    /// A name that it says in place of its own.
    pub false_name: Option<String>,
    /// Number that it says it has, in bytes, in place of what it has.
    pub false_bytes: Option<u64>,
    /// It answers with bytes without an end.
    pub babbles: bool,
    /// It takes commands that change its size, and says nothing.
    pub is_deaf: bool,
    /// Sizes that it was given, in MiB.
    pub heard: Vec<u64>,
    /// Number of times that its status was asked for.
    pub asked: u64,
}

/// A fake VM process; it ends with its folder.
#[derive(Clone)]
pub struct FakeVm {
    pub manner: Arc<Mutex<Manner>>,
}

impl FakeVm {
    /// Listens in `folder` as the VM `name`.
    pub fn start(folder: &Path, name: &str, manner: Manner) -> Self {
        let socket = folder.join(format!("{name}.ctl"));
        let listener = UnixListener::bind(&socket).unwrap();
        let (fake, name) = (Self { manner: Arc::new(Mutex::new(manner)) }, name.to_owned());
        let other = fake.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (fake, name) = (other.clone(), name.clone());
                std::thread::spawn(move || fake.serve(stream.unwrap(), &name));
            }
        });
        fake
    }

    pub fn now(&self) -> Manner {
        self.manner.lock().unwrap().clone()
    }

    pub fn change(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut self.manner.lock().unwrap());
    }

    fn serve(&self, stream: UnixStream, name: &str) {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let Ok(command) = Command::parse(line.trim_end().as_bytes()) else { return };
        if self.now().babbles {
            // Until the other side has had enough.
            while stream.get_mut().write_all(&[b'x'; 4096]).is_ok() {}
            return;
        }
        if let Command::Set { cache_bytes: Some(bytes), .. } = command {
            let mut manner = self.manner.lock().unwrap();
            manner.heard.push(bytes / MIB);
            if manner.is_deaf {
                drop(manner);
                // The client gives up.
                let _ = stream.read_line(&mut line);
                return;
            }
            manner.mib = bytes / MIB;
        }
        let manner = self.now();
        let answer = match command {
            Command::Curve { grid: Some(grid), .. } => serde_json::to_string(&manner.curve(name, grid)).unwrap(),
            _ => {
                self.change(|manner| manner.asked += 1);
                serde_json::to_string(&manner.status(name)).unwrap()
            }
        };
        // The client may be gone.
        let _ = writeln!(stream.get_mut(), "{answer}");
    }
}

impl Manner {
    fn curve(&self, name: &str, grid: CurveGrid) -> CurveStatus {
        let ratio = |bytes: u64| match self.cliff_mib {
            _ if bytes == 0 => 1.0,
            0 => 0.5,
            cliff if bytes < cliff * MIB => 1.0,
            _ => 0.05,
        };
        let point = |at: u32| {
            let bytes = u64::from(at) * grid.step_bytes;
            CurvePoint { bytes, miss_ratio: ratio(bytes), standard_error: 0.0, last_window: None }
        };
        CurveStatus {
            curve_of: name.into(),
            disk: None,
            disks: Vec::new(),
            learns_from: "evictions".into(),
            cache_bytes: self.mib * MIB,
            blocks_read: 1e6,
            followed_share: 1.0,
            reach_bytes: None,
            points: (0..grid.count).map(point).collect(),
            forecast: None,
            blocks_read_per_s: Some(1e5),
            disk_read_us: Some(5000.0),
            server_read_us: Some(200.0),
        }
    }

    fn status(&self, name: &str) -> Status {
        let bytes = self.false_bytes.unwrap_or(self.mib * MIB);
        let latency = json!({"count": 0, "sum_ns": 0, "mean_us": 0.0, "p50_us": 0.0, "p99_us": 0.0, "p999_us": 0.0, "max_us": 0.0});
        // Its guest reads on and on.
        let read_bytes = self.asked * 4096 * 100_000;
        let disk = json!({"name": "a", "image": "i", "socket": "s", "bytes": 4096, "read_only": false, "store": "up",
            "attached": true, "nbd_clients": null,
            "traffic": {"reads": 1, "read_bytes": read_bytes, "reads_from_cache": 0, "writes": 0, "written_bytes": 0}});
        let status = json!({
            "name": self.false_name.as_deref().unwrap_or(name), "pid": 1, "version": "0.2.0", "uptime_s": 1.0, "port": null,
            "server": {"endpoint": "unix:/s", "connected": true, "breaker": "closed", "error": null},
            "cache": {"enabled": true, "wanted_bytes": bytes, "granted_bytes": bytes, "used_bytes": 0,
                "admission": "evictions", "hit_ratio": null},
            "disks": [disk],
            "counters": {},
            "latency": {"read": latency, "read_from_cache": latency, "read_from_disk": latency, "write": latency},
            "hedging": {"late_after_us": 0.0, "disk": null, "server": null},
            "memory": {"index_bytes": 0, "buffer_bytes": 0, "known_blocks": 0},
        });
        serde_json::from_value(status).unwrap()
    }
}
