//! Disks for guests: created, served slowly, and inspected on the host.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitStatus,
    thread,
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    error::{Context, Error, Result},
    service::{Service, run, tool},
    workload::{
        dataset::{self, Manifest, Verified},
        journal::Versions,
    },
};

/// Time limit for a start, on a host that may be writing gigabytes meanwhile.
const START_LIMIT: Duration = Duration::from_secs(240);
const STOP_LIMIT: Duration = Duration::from_secs(240);

/// Creates an image of zeroes that takes no space yet.
pub fn sparse_image(path: &Path, size: u64) -> Result<()> {
    let file = File::create(path).context_path("creating", path)?;
    file.set_len(size).context_path("sizing", path)
}

/// Makes an empty ext4 file system on an image or device.
pub fn format_ext4(image: &Path) -> Result<()> {
    run(tool("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(image)).map(drop)
}

/// Makes an image with an ext4 file system of the folder's content. Holes stay holes.
pub fn ext4_of_folder(image: &Path, size: u64, folder: &Path) -> Result<()> {
    sparse_image(image, size)?;
    run(tool("mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).arg(folder).arg(image)).map(drop)
}

/// Makes a small ext4 image, without a journal, that holds the files under the given names.
pub(crate) fn image_of_files(image: &Path, files: &[(String, PathBuf)]) -> Result<()> {
    let folder = image.with_extension("files");
    fs::create_dir_all(&folder).context_path("creating", &folder)?;
    let mut size_mib = 4;
    for (name, source) in files {
        if name.contains('/') || name.is_empty() {
            return Err(Error::Invalid(format!("'{name}' is no name for a payload file")));
        }
        let size = fs::copy(source, folder.join(name)).context_path("copying", source)?;
        size_mib += size.div_ceil(1 << 20);
    }
    run(tool("mke2fs")
        .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-F", "-d"])
        .arg(&folder)
        .arg(image)
        .arg(format!("{size_mib}M")))?;
    fs::remove_dir_all(&folder).context_path("removing", &folder)
}

/// Checks the ext4 file system of an image without changing it. Returns an error if it has any fault.
///
/// The image must have been unmounted: a journal that was not replayed counts as a fault.
pub fn check_ext4(image: &Path) -> Result<()> {
    run(tool("e2fsck").args(["-f", "-n"]).arg(image)).map(drop)
}

/// Copies a folder out of an image's ext4 file system without mounting it. `source` is the path in the image, `target`
/// a new folder.
pub fn dump_ext4(image: &Path, source: &str, target: &Path) -> Result<()> {
    fs::create_dir_all(target).context_path("creating", target)?;
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let inner = target.join("dump");
    fs::create_dir_all(&inner).context_path("creating", &inner)?;
    let request = format!("rdump {} {}", quoted(source), quoted(&inner.display().to_string()));
    let mut command = tool("debugfs");
    command.args(["-R", &request]).arg(image);
    let output = command.output().context("running debugfs")?;
    // debugfs always exits with success. Its output after the version shows the result.
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let complaints: Vec<&str> =
        said.lines().skip(1).filter(|line| !line.contains("while changing ownership")).collect();
    if !output.status.success() || !complaints.is_empty() {
        return Err(Error::Command {
            command: format!("{command:?}"),
            status: output.status.to_string(),
            output: complaints.join("\n"),
        });
    }
    // debugfs makes a folder in the given one, with the name of the source.
    let name = Path::new(source).file_name();
    let made = name.map_or_else(|| inner.clone(), |name| inner.join(name));
    for entry in fs::read_dir(&made).context_path("reading", &made)? {
        let entry = entry.context_path("reading", &made)?;
        fs::rename(entry.path(), target.join(entry.file_name())).context_path("moving", &entry.path())?;
    }
    fs::remove_dir_all(&inner).context_path("removing", &inner)
}

/// Copies the data set in a folder of an image's ext4 file system out of the image, and checks every byte of it.
pub fn verify_ext4(image: &Path, source: &str, versions: &Versions) -> Result<Verified> {
    let beside = image.parent().unwrap_or(Path::new("."));
    let folder = TempDir::new_in(beside).context_path("creating a folder in", beside)?;
    dump_ext4(image, source, folder.path())?;
    let manifest = Manifest::read(folder.path())?;
    Ok(dataset::verify(folder.path(), &manifest, versions, false))
}

/// The store that nbdkit serves, and its speed.
#[derive(Clone, Debug)]
pub struct NbdkitConfig {
    pub source: NbdkitSource,
    pub read_delay: Duration,
    pub write_delay: Duration,
    /// Number of requests served at once. With 1, each waits for the previous one, as on a disk with a single arm.
    pub thread_count: u32,
}

#[derive(Clone, Debug)]
pub enum NbdkitSource {
    File(PathBuf),
    /// This many bytes of memory.
    Memory(u64),
}

impl NbdkitConfig {
    /// Returns a disk that takes `read_delay` for each read, one after another.
    pub fn slow_file(path: &Path, read_delay: Duration) -> NbdkitConfig {
        NbdkitConfig {
            source: NbdkitSource::File(path.to_owned()),
            read_delay,
            write_delay: Duration::ZERO,
            thread_count: 1,
        }
    }

    /// Starts the server, and waits until it answers. Its log goes to the given folder.
    pub fn start(&self, log_folder: &Path) -> Result<Nbdkit> {
        // A short path of its own, because the name of a Unix socket has at most 107 bytes.
        let folder = TempDir::with_prefix("lab-").context("creating a folder for a socket")?;
        let socket = folder.path().join("nbd");
        let log = log_folder.join("nbdkit.log");
        let service = self.start_at(&socket, &log)?;
        Ok(Nbdkit { service, socket, config: self.clone(), log, _folder: folder })
    }

    fn start_at(&self, socket: &Path, log: &Path) -> Result<Service> {
        let mut command = tool("nbdkit");
        command.args(["--foreground", "--threads"]);
        command.arg(self.thread_count.to_string()).arg("--unix").arg(socket);
        let delayed = !(self.read_delay.is_zero() && self.write_delay.is_zero());
        if delayed {
            command.arg("--filter=delay");
        }
        match &self.source {
            NbdkitSource::File(path) => command.arg("file").arg(path),
            NbdkitSource::Memory(size) => command.arg("memory").arg(size.to_string()),
        };
        if delayed {
            command.arg(format!("rdelay={}ms", self.read_delay.as_millis()));
            command.arg(format!("wdelay={}ms", self.write_delay.as_millis()));
        }
        let mut service = Service::start("nbdkit", command, log)?;
        service.wait_for_socket(socket, START_LIMIT)?;
        Ok(service)
    }
}

/// A running nbdkit. Killed when dropped.
#[derive(Debug)]
pub struct Nbdkit {
    service: Service,
    socket: PathBuf,
    config: NbdkitConfig,
    log: PathBuf,
    _folder: TempDir,
}

impl Nbdkit {
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the server's address, such as `nbd+unix:///?socket=/tmp/lab-x/nbd`.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    pub fn service(&mut self) -> &mut Service {
        &mut self.service
    }

    /// Kills the server, and restarts it at the same address after `away`.
    pub fn kill_and_restart(&mut self, away: Duration) -> Result<()> {
        self.service.kill()?;
        thread::sleep(away);
        self.start_again()
    }

    /// Restarts the server if it has ended by itself. Returns whether it had.
    pub fn revive(&mut self) -> Result<bool> {
        let has_ended = self.service.exit_status()?.is_some();
        if has_ended {
            self.start_again()?;
        }
        Ok(has_ended)
    }

    fn start_again(&mut self) -> Result<()> {
        // nbdkit does not start where another one left its socket behind.
        fs::remove_file(&self.socket).context_path("removing", &self.socket)?;
        self.service = self.config.start_at(&self.socket, &self.log)?;
        Ok(())
    }

    /// Asks the server to finish its work and end, and waits for that.
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.service.terminate(STOP_LIMIT)
    }
}

/// A loop device over an image; removed when dropped. Needs root.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches an image. With a `sector_size` of 4096, the device accepts no smaller reads and writes.
    pub fn attach(image: &Path, sector_size: u32) -> Result<LoopDevice> {
        let said =
            run(tool("losetup").args(["--find", "--show", "--sector-size", &sector_size.to_string()]).arg(image))?;
        Ok(LoopDevice { path: PathBuf::from(String::from_utf8_lossy(&said).trim()) })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A device still in use is removed with its last user.
        let _ = run(tool("losetup").arg("--detach").arg(&self.path));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::unix::{fs::FileExt, net::UnixStream},
    };

    use super::*;

    #[test]
    fn a_data_set_is_checked_in_an_image_from_outside() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        dataset::create(&source.join("data set"), 2, 64 * 1024, 1).unwrap();
        let image = folder.path().join("disk.img");
        ext4_of_folder(&image, 16 << 20, &source).unwrap();
        check_ext4(&image).unwrap();
        let versions = Versions::default();
        let verified = verify_ext4(&image, "/data set", &versions).unwrap();
        assert_eq!((verified.sectors, verified.faults.is_empty()), (256, true));
        assert!(verify_ext4(&image, "/missing", &versions).unwrap_err().to_string().contains("not found"));

        // One sector of the image that holds file content, found by its signature.
        let file = File::options().read(true).write(true).open(&image).unwrap();
        let mut sector = [0; 512];
        let index = (0..32768).find(|index| {
            file.read_exact_at(&mut sector, index * 512).unwrap();
            sector.starts_with(b"remocaS1")
        });
        file.write_all_at(&[7; 512], index.unwrap() * 512).unwrap();
        assert_eq!(verify_ext4(&image, "/data set", &versions).unwrap().faults.wrong_signatures, 1);

        // The first block group's descriptors.
        file.write_all_at(&[0xff; 64], 4096).unwrap();
        assert!(check_ext4(&image).is_err());
    }

    #[test]
    fn nbdkit_serves_and_ends_with_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        sparse_image(&image, 1 << 20).unwrap();
        let mut nbdkit = NbdkitConfig::slow_file(&image, Duration::from_millis(1)).start(folder.path()).unwrap();
        let mut greeting = [0; 8];
        UnixStream::connect(nbdkit.socket()).unwrap().read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGIC");
        assert!(nbdkit.service().exit_status().unwrap().is_none());
        let socket = nbdkit.socket().to_owned();
        assert!(nbdkit.stop().unwrap().success());
        assert!(UnixStream::connect(socket).is_err());

        let missing = NbdkitConfig::slow_file(Path::new("/missing"), Duration::ZERO).start(folder.path());
        assert!(missing.unwrap_err().to_string().contains("/missing"));
    }

    #[test]
    fn a_loop_device_has_the_sector_size_asked_for() {
        if !remoca_io::left_out::is_root("loop devices need root") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        sparse_image(&image, 1 << 20).unwrap();
        let device = LoopDevice::attach(&image, 4096).unwrap();
        let name = device.path().file_name().unwrap().to_owned();
        let size = Path::new("/sys/block").join(name).join("queue/logical_block_size");
        assert_eq!(fs::read_to_string(&size).unwrap().trim(), "4096");
    }
}
