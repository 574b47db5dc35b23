//! The guest's part of a soak: fio with verification, files that are created and deleted, and records that are read,
//! checked and rewritten with a journal; then the account of everything verified.

use crate::{LIMIT, Result, kernel_complaints, start_agent};
use remoca_lab::{Guest, Job};
use serde_json::Value;
use std::time::{Duration, Instant};

const FILE_COUNT: u64 = 20;
const FILE_MIB: u64 = 16;
/// Number of sectors of the data set.
pub const SECTORS: u64 = FILE_COUNT * (FILE_MIB << 20) / 512;
pub const JOURNAL: &str = "/tmp/journal";

const MIX: &str = "remoca-workload write-mix --dir /mnt/set --ratio 20 --record 96K --pattern zipf --journal /tmp/journal \
    --sync-every 20 --stop-file /tmp/stop --pauses-over 50 --json";
const CHURN: &str = "n=0; until [ -e /tmp/stop ]; do n=$((n+1)); remoca-workload churn --dir /mnt/churn --files 24 --file-size 1M \
    --steps 100 --seed $n --json >> /tmp/churn.out 2>&1 || break; done; [ -e /tmp/stop ]; echo $? > /tmp/churn.status";
/// Script of fio: every read is of data that fio wrote, and is verified. It is throttled, because its blocks are never
/// evicted and so never cached, and most reads should be those of the other jobs.
const FIO: &str = "until [ -e /tmp/stop ]; do fio --name=v --rw=randwrite --bsrange=4k-64k --blockalign=4k --ioengine=libaio \
    --direct=1 --iodepth=16 --verify=crc32c --verify_backlog=32 --verify_fatal=1 --randrepeat=0 --size=64m --loops=1000 \
    --rate_iops=150,150 --time_based --runtime=10 --directory=/mnt/fio --output-format=terse >> /tmp/fio.out 2>&1 || break; done; \
    [ -e /tmp/stop ]; echo $? > /tmp/fio.status";

/// Findings of the guest.
#[derive(Clone, Debug, Default)]
pub struct Account {
    pub verified_bytes: u64,
    pub io_errors: u64,
    pub verify_errors: u64,
    /// Descriptions of the faults.
    pub said: Vec<String>,
    pub pauses: Vec<Pause>,
}

/// A read or write of the guest that took more than 50 ms, including the fsync after it.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    pub end: Instant,
    pub length: Duration,
}

/// Work that runs in a guest.
pub struct Work {
    mix: Job,
    started: Instant,
    /// Seconds of this host per second of the guest. The guest was told the rate of its clock, which is a measured value.
    rate: f64,
}

impl Work {
    /// Makes the files, starts the agent, and starts the jobs.
    pub fn start(guest: &mut Guest) -> Result<Work> {
        guest.run("mount $(disk-by-serial data) /mnt", LIMIT)?;
        start_agent(guest)?;
        let create =
            format!("remoca-workload create --dir /mnt/set --files {FILE_COUNT} --file-size {FILE_MIB}M --seed 6");
        guest.run(&format!("{create} && mkdir /mnt/fio /mnt/churn"), LIMIT)?;
        for job in [CHURN, FIO] {
            guest.run(&format!("( {job} ) > /dev/null 2>&1 &"), LIMIT)?;
        }
        let mut mix = guest.start(MIX)?;
        guest.wait_for_line(&mut mix, "started", LIMIT)?;
        Ok(Work { mix, started: Instant::now(), rate: 1.0 })
    }

    /// Ends the jobs, reads everything once more, and returns the sums.
    pub fn finish(mut self, guest: &mut Guest) -> Result<Account> {
        let mut account = Account::default();
        self.set_clock(guest)?;
        guest.run("touch /tmp/stop", LIMIT)?;
        let mix = guest.wait(&self.mix, LIMIT)?;
        for line in mix.text().lines() {
            self.mix_line(&mut account, line);
        }
        if !mix.success() {
            account.said.push(format!("write-mix: {}", String::from_utf8_lossy(&mix.stderr)));
        }
        for job in ["churn", "fio"] {
            let wait = format!(
                "for i in $(seq 2000); do [ -s /tmp/{job}.status ] && break; sleep 0.1; done; cat /tmp/{job}.status"
            );
            let status = guest.run(&wait, LIMIT)?;
            let said = guest.run(&format!("cat /tmp/{job}.out"), LIMIT)?;
            if job == "fio" { account.fio(&said, &status) } else { account.churn(&said, &status) }
        }
        guest.run("sync; umount /mnt && mount $(disk-by-serial data) /mnt", LIMIT)?;
        let verify = format!("remoca-workload verify --dir /mnt/set --journal {JOURNAL} --json");
        account.result(&guest.try_run(&verify, LIMIT)?.text());
        account.kernel(&kernel_complaints(guest)?);
        Ok(account)
    }

    /// Compares the clocks at the next progress line.
    fn set_clock(&mut self, guest: &mut Guest) -> Result<()> {
        loop {
            let asked = Instant::now();
            let Some(line) = guest.next_line(&mut self.mix, LIMIT)? else { return Ok(()) };
            let line = serde_json::from_str::<Value>(&line)?;
            let seconds = line["seconds"].as_f64().filter(|seconds| *seconds > 0.0);
            if let Some(seconds) = seconds.filter(|_| asked.elapsed() > Duration::from_millis(100)) {
                self.rate = self.started.elapsed().as_secs_f64() / seconds;
                return Ok(());
            }
        }
    }

    fn mix_line(&self, account: &mut Account, line: &str) {
        let Ok(line) = serde_json::from_str::<Value>(line) else { return };
        let number = |name: &str| line[name].as_u64().unwrap_or_default();
        match line["event"].as_str() {
            Some("pause") => account.pauses.push(Pause {
                end: self.started + Duration::from_micros(number("end_us")).mul_f64(self.rate),
                length: Duration::from_micros(number("length_us")),
            }),
            Some("result") => {
                account.verified_bytes +=
                    line["measured"]["reads"]["count"].as_u64().unwrap_or_default() * number("record_size");
                account.faults(&line);
            }
            _ => {}
        }
    }
}

impl Account {
    /// Adds a check of the data set from outside the guest.
    pub fn offline(&mut self, sectors: u64, faults: &remoca_lab::workload::Faults) {
        self.verified_bytes += sectors * 512;
        self.io_errors += faults.io_errors;
        self.verify_errors += faults.wrong_signatures;
        self.said.extend(faults.examples.iter().map(|example| format!("offline: {example}")));
        if sectors != SECTORS {
            self.verify_errors += 1;
            self.said.push(format!("offline: {sectors} sectors in place of {SECTORS}"));
        }
    }

    fn churn(&mut self, said: &str, status: &str) {
        said.lines().for_each(|line| self.result(line));
        self.ended("churn", said, status);
    }

    /// Adds the result line of a program that checked sectors.
    fn result(&mut self, line: &str) {
        let Ok(line) = serde_json::from_str::<Value>(line) else {
            return self.said.push(format!("no result: {line}"));
        };
        let sectors = line["sectors"].as_u64().or(line["verified_sectors"].as_u64());
        self.verified_bytes += sectors.unwrap_or_default() * 512;
        self.faults(&line);
    }

    fn faults(&mut self, line: &Value) {
        self.io_errors += line["io_errors"].as_u64().unwrap_or_default();
        self.verify_errors += line["wrong_signatures"].as_u64().unwrap_or_default();
        self.said.extend(line["examples"].as_array().into_iter().flatten().map(Value::to_string));
    }

    /// Adds the result of fio. Its terse lines have the KiB read in the sixth field.
    fn fio(&mut self, said: &str, status: &str) {
        for line in said.lines().filter(|line| line.starts_with("3;")) {
            let read_kib = line.split(';').nth(5).and_then(|field| field.parse::<u64>().ok());
            self.verified_bytes += read_kib.unwrap_or_default() * 1024;
        }
        if said.contains("verify:") || said.contains("bad magic header") {
            self.verify_errors += 1;
        }
        self.ended("fio", said, status);
    }

    fn ended(&mut self, job: &str, said: &str, status: &str) {
        if status != "0" {
            self.io_errors += 1;
            let tail: Vec<&str> = said.lines().rev().take(8).collect();
            self.said.push(format!("{job} ended early: {}", tail.join(" | ")));
        }
    }

    fn kernel(&mut self, complaints: &str) {
        for line in complaints.lines() {
            self.io_errors += 1;
            self.said.push(format!("the guest's kernel: {line}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_verified_is_added_up() {
        let mut account = Account::default();
        account.churn("{\"verified_sectors\":3,\"io_errors\":0,\"wrong_signatures\":0,\"examples\":[]}", "0");
        account.fio("3;fio-3.33;v;0;0;40;1\n3;fio-3.33;v;0;0;2;1", "0");
        assert_eq!(account.verified_bytes, 3 * 512 + 42 * 1024);
        assert_eq!((account.io_errors, account.verify_errors), (0, 0));
        assert!(account.said.is_empty(), "{account:?}");
    }

    #[test]
    fn no_fault_is_overlooked() {
        let errors = |judge: &dyn Fn(&mut Account)| {
            let mut account = Account::default();
            judge(&mut account);
            (account.io_errors, account.verify_errors, account.said.len())
        };
        let wrong = "{\"verified_sectors\":3,\"io_errors\":0,\"wrong_signatures\":2,\"examples\":[\"a\"]}";
        assert_eq!(errors(&|account| account.churn(wrong, "0")), (0, 2, 1));
        assert_eq!(errors(&|account| account.churn("{\"io_errors\":4}", "1")), (5, 0, 1));
        assert_eq!(errors(&|account| account.result("remoca-workload: no such folder")), (0, 0, 1));
        assert_eq!(errors(&|account| account.fio("verify: bad header rand_seed 1, wanted 2", "1")), (1, 1, 1));
        assert_eq!(errors(&|account| account.kernel("[ 1.0] I/O error, dev vda\n[ 1.1] EXT4-fs error")), (2, 0, 2));
        assert_eq!(errors(&|account| account.offline(SECTORS - 1, &Default::default())), (0, 1, 1));
    }
}
