//! The processes of a soak, and the faults inflicted on them: one VM process, two memory servers behind faulty
//! networks, the server of its local tier, a guest with its agent, and the store's server if it has one.

use super::donors::{Donor, TIER_BYTES, Tier};
use super::events::Event;
use super::extra::{self, Extra};
use crate::hotplug::change_disks;
use crate::{Host, Image, LIMIT, Result, end_agent, launch_agent, remoca, stop_agent, wait_for_agent};
use remoca_lab::store::{self, Nbdkit, NbdkitConfig, NbdkitSource};
use remoca_lab::workload::pattern::Random;
use remoca_lab::{Disk, DiskSource, Guest, Lab};
use remoca_protocol::control::Status;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const RETRY: Duration = Duration::from_millis(200);
const CACHE: &str = "256M";
pub const CACHE_BYTES: u64 = 256 * MIB;
const SERVER_MEMORY: [&str; 3] = ["64M", "256M", "384M"];

/// Kind of store of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    RawFile,
    Nbd,
}

impl StoreKind {
    /// Returns the name in the report.
    pub fn name(self) -> &'static str {
        match self {
            StoreKind::RawFile => "raw file",
            StoreKind::Nbd => "nbd",
        }
    }
}

pub struct Stage {
    pub guest: Guest,
    pub host: Host,
    donors: [Donor; 2],
    tier: Tier,
    nbdkit: Option<Nbdkit>,
    /// Number of times that the store's server ended by itself.
    pub store_crashes: u64,
    /// The disk that comes and goes.
    pub extra: Extra,
    pub image: PathBuf,
}

impl Stage {
    /// Starts all processes and boots the guest.
    pub fn start(kind: StoreKind) -> Result<Stage> {
        let lab = Lab::open()?;
        let program = remoca()?;
        let mut host = Host::new(program.clone(), "0")?;
        host.keep_connections();
        let folder = host.folder().to_owned();
        let image = folder.join("data.img");
        store::sparse_image(&image, 1 << 30)?;
        store::format_ext4(&image)?;
        let donor = |name| Donor::start(&program, &folder, name, SERVER_MEMORY[2]);
        let donors = [donor("first")?, donor("second")?];
        let tier = Tier::start(&program, &folder)?;
        let nbdkit = match kind {
            StoreKind::RawFile => None,
            StoreKind::Nbd => {
                let source = NbdkitSource::File(image.clone());
                let (read_delay, write_delay) = (Duration::ZERO, Duration::ZERO);
                Some(NbdkitConfig { source, read_delay, write_delay, thread_count: 8 }.start(&folder)?)
            }
        };
        let path = nbdkit.as_ref().map_or(image.clone(), |nbdkit| nbdkit.uri().into());
        host.configure(&[Image { name: "data", path, options: "" }])?;
        start_disk(&mut host, &donors, &tier)?;
        let mut config = host.guest(&lab, &format!("soak-{}", kind.name().replace(' ', "-")))?;
        config.disks.push(Disk::vhost_user("data", &host.socket("data")));
        config.qemu_args.extend(["-device", extra::SLOT_DEVICE].map(Into::into));
        for disk in &mut config.disks {
            if let DiskSource::VhostUser { reconnect, .. } = &mut disk.source {
                *reconnect = true;
            }
        }
        let mut guest = config.boot(&lab)?;
        let extra = Extra::new(guest.qmp()?, &host);
        Ok(Stage { guest, host, donors, tier, nbdkit, store_crashes: 0, extra, image })
    }

    /// Performs one event to its end: stopped processes run again, and killed ones have been restarted.
    pub fn perform(&mut self, event: Event, random: &mut Random) -> Result<()> {
        self.revive_store()?;
        let away = Duration::from_millis(random.below(700));
        let stopped = Duration::from_millis(200 + random.below(1200));
        let one = usize::try_from(random.below(2)).unwrap_or_default();
        match event {
            Event::KillDisk => {
                self.kill_disk()?;
                sleep(away);
                self.start_disk()?;
            }
            Event::KillDiskKept => self.kill_disk_kept(away)?,
            Event::KillDiskTwice => {
                self.kill_disk()?;
                self.start_disk()?;
                self.kill_disk()?;
                sleep(away);
                self.start_disk()?;
            }
            Event::KillAll => {
                self.kill_disk()?;
                self.donors.iter_mut().try_for_each(|donor| donor.service.kill())?;
                self.tier.kill()?;
                sleep(away);
                self.start_disk()?;
                self.tier.start_again()?;
                self.donors.iter_mut().try_for_each(|donor| donor.start_again(SERVER_MEMORY[2]))?;
            }
            Event::StopDisk => {
                self.host.process()?.freeze()?;
                sleep(stopped);
                self.host.process()?.thaw()?;
            }
            Event::RestartDisk => {
                self.host.stop_process()?;
                self.host.manager()?.forget();
                sleep(away);
                self.start_disk()?;
            }
            Event::UpgradeDisk => self.patiently(|host| host.upgrade().map(drop))?,
            Event::KillInUpgrade => {
                let upgrade = self.host.upgrade_in_background();
                sleep(away / 2);
                self.kill_disk()?;
                // The process was killed before, during or after the upgrade, so any answer is right.
                let _ = upgrade.join();
                self.wait_for_silence()?;
                self.start_disk()?;
            }
            Event::ResizeCache => {
                self.host.set(Some((1 + random.below(16)) * 16 * MIB), None)?;
            }
            Event::SwitchCache => {
                self.host.set(None, Some(false))?;
                sleep(away);
                self.host.set(None, Some(true))?;
            }
            Event::ChangeServers => self.change_servers(random)?,
            Event::ResizeLocal | Event::KillLocalServer | Event::RestartLocalServer => {
                self.tier.perform(event, &self.host, random, away)?;
            }
            Event::StopLocalServer => self.tier.perform(event, &self.host, random, stopped)?,
            Event::StopServer => {
                self.donors[one].service.freeze()?;
                sleep(stopped);
                self.donors[one].service.thaw()?;
            }
            Event::KillServer => {
                self.donors[one].service.kill()?;
                sleep(away);
                self.donors[one].start_again(SERVER_MEMORY[2])?;
            }
            Event::RestartServer | Event::ResizeServer => {
                let draw = if event == Event::ResizeServer { random.below(3) } else { 2 };
                self.donors[one].service.terminate(LIMIT)?;
                sleep(away);
                self.donors[one].start_again(SERVER_MEMORY[usize::try_from(draw)?])?;
            }
            Event::CutConnections => self.donors.iter().for_each(|donor| donor.proxy.cut()),
            Event::HangConnections => {
                self.donors[one].proxy.hang();
                sleep(stopped);
                self.donors[one].proxy.pass();
            }
            Event::DelayConnections => {
                self.donors[one].proxy.delay(Duration::from_millis(1 + random.below(50)));
                sleep(stopped);
                self.donors[one].proxy.pass();
            }
            Event::KillAgent => {
                end_agent(&mut self.guest, "KILL")?;
                sleep(away);
                launch_agent(&mut self.guest)?;
            }
            Event::StopAgent => {
                self.in_guest("kill -STOP $(cat /tmp/agent.pid)")?;
                sleep(stopped);
                self.in_guest("kill -CONT $(cat /tmp/agent.pid)")?;
            }
            Event::RestartAgent => {
                stop_agent(&mut self.guest)?;
                launch_agent(&mut self.guest)?;
            }
            Event::AddDisk => {
                let disk = self.extra.prepare(&self.host)?;
                self.patiently(|host| change_disks(host, "add", &[&disk]).map(drop))?;
                self.extra.plug(&mut self.guest, &self.host)?;
            }
            Event::RemoveDisk => {
                self.extra.unplug(&mut self.guest, &self.host)?;
                self.patiently(|host| change_disks(host, "remove", &[extra::NAME]).map(drop))?;
            }
            Event::GrowDisk => {
                let is_told = random.below(2) == 0;
                let tell = || if is_told { change_disks(&self.host, "rescan", &[]).map(drop) } else { Ok(()) };
                self.extra.grow(&mut self.guest, tell)?;
            }
            Event::KillStore => self.nbdkit()?.kill_and_restart(away)?,
            Event::StopStore => {
                self.nbdkit()?.service().freeze()?;
                sleep(stopped);
                self.nbdkit()?.service().thaw()?;
            }
        }
        Ok(())
    }

    /// Restores servers, cache and agent to their initial state.
    pub fn heal(&mut self) -> Result<()> {
        self.revive_store()?;
        for donor in &mut self.donors {
            donor.service.terminate(LIMIT)?;
            donor.start_again(SERVER_MEMORY[2])?;
        }
        self.host.set_servers(self.donors.iter().map(|donor| donor.proxy.address()).collect())?;
        self.host.set(Some(CACHE_BYTES), Some(true))?;
        self.host.set_local(TIER_BYTES)?;
        self.wait_until("the local tier is back", |status| status.cache.local_granted_bytes == TIER_BYTES)?;
        wait_for_agent(&mut self.guest)
    }

    /// Ends the VM process, then the store's server, so that no process uses the image.
    pub fn release_image(&mut self) -> Result<()> {
        self.revive_store()?;
        self.host.stop_process()?;
        match self.nbdkit.take().map(Nbdkit::stop) {
            Some(status) if !status.as_ref().is_ok_and(|status| status.success()) => {
                Err(format!("nbdkit ended with {status:?}").into())
            }
            _ => Ok(()),
        }
    }

    /// Waits until no process listens on the sockets of a killed process. A program that it was starting may briefly
    /// hold them.
    fn wait_for_silence(&self) -> Result<()> {
        let give_up_at = Instant::now() + LIMIT;
        let sockets = ["data", "port", extra::NAME].map(|name| self.host.socket(name));
        while sockets.iter().chain([&self.host.control()]).any(|socket| UnixStream::connect(socket).is_ok()) {
            if Instant::now() > give_up_at {
                return Err("somebody still listens on the sockets of a process that was killed".into());
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits for `time` without events.
    pub fn rest(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.revive_store()?;
            sleep(RETRY.min(end.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }

    pub fn wait_until(&mut self, what: &str, done: impl Fn(&Status) -> bool) -> Result<()> {
        let give_up_at = Instant::now() + LIMIT;
        loop {
            let status = self.host.status()?;
            if done(&status) {
                return Ok(());
            }
            if Instant::now() > give_up_at {
                return Err(format!("{what}: not in time; status: {status:?}").into());
            }
            self.rest(RETRY)?;
        }
    }

    /// Kills the VM process, and starts another one after `away`, to which the hypervisor stays connected.
    fn kill_disk_kept(&mut self, away: Duration) -> Result<()> {
        // QEMU, which may have connected again, has sent all of its messages when a queue of each device runs.
        let read = |serial| format!("dd if=$(disk-by-serial {serial}) of=/dev/null bs=4k count=1 iflag=direct");
        let extra = if self.extra.is_there { extra::NAME } else { "data" };
        self.in_guest(&["data", "remoca-port", extra].map(read).join(" && "))?;
        self.wait_until("the connections are kept", |status| {
            status.disks.iter().all(|disk| disk.outlives_crash)
                && status.port.as_ref().is_some_and(|port| port.outlives_crash)
        })?;
        let (connects, late) = (self.connects(), self.late_starts());
        self.host.kill_process()?;
        sleep(away);
        self.start_disk()?;
        // On a busy machine a start may take longer than connections are kept for.
        match self.connects() == connects || self.late_starts() > late {
            true => Ok(()),
            false => Err(format!("the hypervisor has connected again: {}", self.host.log()).into()),
        }
    }

    /// Kills the VM process, and closes the connections of the hypervisor.
    fn kill_disk(&mut self) -> Result<()> {
        self.host.kill_process()?;
        self.host.manager()?.forget();
        Ok(())
    }

    /// Returns how often a hypervisor has connected so far.
    fn connects(&self) -> usize {
        self.host.log().matches("a hypervisor is connected").count()
    }

    /// Returns how often a hypervisor was disconnected so far because a process did not become ready.
    fn late_starts(&self) -> usize {
        self.host.log().matches("because this process is not ready after 5 s").count()
    }

    fn start_disk(&mut self) -> Result<()> {
        match start_disk(&mut self.host, &self.donors, &self.tier) {
            Err(_) if self.revive_store()? => start_disk(&mut self.host, &self.donors, &self.tier),
            result => result,
        }
    }

    /// Restarts nbdkit if it has ended, as a service manager would. nbdkit 1.32 sometimes ends with an assertion
    /// (`raw_send_socket`, `sock >= 0`) when its client disconnects while it answers.
    fn revive_store(&mut self) -> Result<bool> {
        let has_ended = self.nbdkit.as_mut().map_or(Ok(false), Nbdkit::revive)?;
        self.store_crashes += u64::from(has_ended);
        Ok(has_ended)
    }

    /// Does what the VM process may refuse, and retries if it does. Upgrades are refused while an NBD server has its time
    /// after a crash.
    fn patiently(&mut self, deed: impl Fn(&Host) -> Result<()>) -> Result<()> {
        let started = Instant::now();
        loop {
            match deed(&self.host) {
                Err(error) if error.to_string().to_lowercase().contains("try again") && started.elapsed() < LIMIT => {
                    self.rest(RETRY)?;
                }
                result => return result,
            }
        }
    }

    fn change_servers(&mut self, random: &mut Random) -> Result<()> {
        let [first, second] = self.donors.each_ref().map(|donor| donor.proxy.address());
        let servers = match random.below(3) {
            0 => vec![first],
            1 => vec![second],
            _ => vec![second, first],
        };
        self.host.set_servers(servers)?;
        Ok(())
    }

    fn nbdkit(&mut self) -> Result<&mut Nbdkit> {
        self.nbdkit.as_mut().ok_or_else(|| "this store has no server".into())
    }

    fn in_guest(&mut self, command: &str) -> Result<()> {
        self.guest.run(&format!("{command} || {{ tail /tmp/agent.log; exit 1; }}"), LIMIT)?;
        Ok(())
    }
}

fn start_disk(host: &mut Host, [first, second]: &[Donor; 2], tier: &Tier) -> Result<()> {
    host.connect_to(first.proxy.socket());
    let (address, tier) = (second.proxy.address(), tier.options());
    host.start_configured(CACHE, &[&["--server", &address], &tier.each_ref().map(String::as_str)[..]].concat())
}
