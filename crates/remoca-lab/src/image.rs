//! Guest images: kernel, initramfs and root file system, built from Debian packages and kept.
//!
//! An image is a folder in the laboratory's cache, named after everything it is made from. Builders take a file lock,
//! build next to it and rename, so an existing folder is complete. Package versions are not part of the name: an image
//! stays the same until its recipe changes or it is rebuilt on request.

use std::{
    fs::{self, File, Permissions},
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use rustix::fs::{FlockOperation, flock};
use tempfile::{Builder, TempDir};

use crate::{
    error::{Context, Error, Result},
    lab::{Lab, progress},
    mirror::Mirror,
    service,
};

/// Version of the recipe, raised when this file changes what an image holds.
const RECIPE_VERSION: u32 = 1;

/// Files that go into the image, or that are used to build it.
const GUEST_FILES: [(&str, &str); 5] = [
    ("build-root.sh", include_str!("../guest/build-root.sh")),
    ("initramfs-init", include_str!("../guest/initramfs-init")),
    ("init", include_str!("../guest/init")),
    ("lab.service", include_str!("../guest/lab.service")),
    ("disk-by-serial", include_str!("../guest/disk-by-serial")),
];

/// Everything an image is made from.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub suite: String,
    pub kernel_package: String,
    pub packages: Vec<String>,
}

impl Recipe {
    /// Returns Debian 12 with Linux 6.1.
    pub fn bookworm() -> Recipe {
        Recipe::of_suite("bookworm")
    }

    /// Returns Debian 13 with Linux 6.12: multi-gen LRU by default, large folios in more file systems.
    pub fn trixie() -> Recipe {
        Recipe::of_suite("trixie")
    }

    fn of_suite(suite: &str) -> Recipe {
        let packages = [
            "btrfs-progs",
            "busybox-static",
            "cryptsetup-bin",
            "e2fsprogs",
            "fio",
            "kmod",
            "mount",
            "nbd-client",
            "procps",
            "util-linux",
            "xfsprogs",
        ];
        Recipe {
            suite: suite.into(),
            kernel_package: "linux-image-cloud-amd64".into(),
            packages: packages.map(str::to_owned).to_vec(),
        }
    }

    /// Returns the Debian 12 recipe with systemd as its init, as on an ordinary machine.
    pub fn bookworm_with_systemd() -> Recipe {
        Recipe::bookworm().with(&["systemd-sysv"])
    }

    /// Returns the recipe with further packages.
    #[must_use]
    pub fn with(mut self, packages: &[&str]) -> Recipe {
        self.packages.extend(packages.iter().copied().map(str::to_owned));
        self
    }

    /// Returns the image's name: the suite, and a hash of everything that the image is made from.
    fn name(&self) -> String {
        let mut text = format!("{RECIPE_VERSION} {} {} {}", self.suite, self.kernel_package, self.packages.join(","));
        for (name, content) in GUEST_FILES {
            text.push_str(name);
            text.push_str(content);
        }
        format!("{}-{:016x}", self.suite, fnv1a(text.as_bytes()))
    }
}

/// A built image. Guests read its files, but never write them.
#[derive(Clone, Debug)]
pub struct Image {
    folder: PathBuf,
}

impl Image {
    /// Returns the recipe's image from the cache. Builds it first if it is missing, which takes about a minute.
    pub fn ensure(lab: &Lab, recipe: &Recipe) -> Result<Image> {
        let folder = lab.cache().join(recipe.name());
        if !folder.is_dir() {
            Image::build_locked(lab, recipe, &folder, false)?;
        }
        Ok(Image { folder })
    }

    /// Builds the image again, with the current packages.
    pub fn rebuild(lab: &Lab, recipe: &Recipe) -> Result<Image> {
        let folder = lab.cache().join(recipe.name());
        Image::build_locked(lab, recipe, &folder, true)?;
        Ok(Image { folder })
    }

    pub fn kernel(&self) -> PathBuf {
        self.folder.join("kernel")
    }

    pub fn initramfs(&self) -> PathBuf {
        self.folder.join("initramfs")
    }

    pub fn root(&self) -> PathBuf {
        self.folder.join("root.img")
    }

    fn build_locked(lab: &Lab, recipe: &Recipe, folder: &Path, anew: bool) -> Result<()> {
        let lock_path = folder.with_extension("lock");
        let lock = File::create(&lock_path).context_path("creating", &lock_path)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            progress("another process builds the guest image, waiting for it");
            flock(&lock, FlockOperation::LockExclusive).context_path("locking", &lock_path)?;
        }
        if folder.is_dir() && !anew {
            return Ok(());
        }
        let scratch = folder.with_extension("new");
        remove_folder(&scratch)?;
        fs::create_dir_all(&scratch).context_path("creating", &scratch)?;
        build(lab, recipe, &scratch)?;
        // Running guests hold the old files open; only their names are removed.
        remove_folder(folder)?;
        fs::rename(&scratch, folder).context_path("renaming to", folder)
    }
}

fn remove_folder(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).context_path("removing", folder)?;
    }
    Ok(())
}

fn build(lab: &Lab, recipe: &Recipe, folder: &Path) -> Result<()> {
    let started = Instant::now();
    let mirror = Mirror::of_this_machine(&recipe.suite)?;
    progress(format_args!(
        "building the {} guest image from {} (once; about a minute and 120 MB to download)",
        recipe.suite, mirror.uri
    ));
    let scripts = guest_files()?;
    let command = mmdebstrap(recipe, &mirror, scripts.path(), folder);
    let log = lab.cache().join(format!("{}.build.log", recipe.name()));
    run_with_progress(command, &log)?;

    let made = folder.join("lab-out");
    for name in ["kernel", "initramfs", "root.img", "kernel-version"] {
        fs::rename(made.join(name), folder.join(name)).context_path("taking from the build", &made.join(name))?;
    }
    remove_folder(&made)?;
    // Copying the image out of the build wrote its holes as zeroes. Best effort: this only saves space.
    let _ = service::run(service::tool("fallocate").arg("--dig-holes").arg(folder.join("root.img")));
    progress(format_args!("guest image ready after {} s", started.elapsed().as_secs()));
    Ok(())
}

/// Copies the guest's files to a folder that the build can read. Without root, the build runs as another user, who may
/// have no access to this user's home.
fn guest_files() -> Result<TempDir> {
    let everyone = Permissions::from_mode(0o755);
    let folder = Builder::new().prefix("lab-").permissions(everyone.clone()).tempdir();
    let folder = folder.context("creating a folder for the guest's files")?;
    for (name, content) in GUEST_FILES {
        let path = folder.path().join(name);
        fs::write(&path, content).context_path("writing", &path)?;
        fs::set_permissions(&path, everyone.clone()).context_path("sharing", &path)?;
    }
    Ok(folder)
}

fn mmdebstrap(recipe: &Recipe, mirror: &Mirror, scripts: &Path, folder: &Path) -> Command {
    let mut command = service::tool("mmdebstrap");
    command.args(["--variant=apt", "--format=null"]);
    command.arg(format!("--include={}", recipe.packages.join(",")));
    for unwanted in ["doc", "man", "locale", "info"] {
        command.arg(format!("--dpkgopt=path-exclude=/usr/share/{unwanted}/*"));
    }
    command.arg("--aptopt=Acquire::Retries \"3\"");
    for option in &mirror.apt_options {
        command.arg(format!("--aptopt={option}"));
    }
    command.arg(format!("--customize-hook=sh '{}' \"$1\"", scripts.join("build-root.sh").display()));
    command.arg(format!("--customize-hook=copy-out /lab-out '{}'", folder.display()));
    command.args([&recipe.suite, "-", &mirror.uri]);
    command.env("LAB_KERNEL_PACKAGE", &recipe.kernel_package).env("LAB_GUEST_FILES", scripts);
    command
}

/// Runs a long command, shows its informational lines and keeps all its output in a log.
fn run_with_progress(mut command: Command, log_path: &Path) -> Result<()> {
    let mut log = File::create(log_path).context_path("creating", log_path)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = service::spawn(command)?;
    let mut tail = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).lines() {
            let line = line.context("reading from mmdebstrap")?;
            writeln!(log, "{line}").context_path("writing", log_path)?;
            if let Some(step) = line.strip_prefix("I: ") {
                progress(format_args!("  {step}"));
            }
            tail.push(line);
            if tail.len() > 15 {
                tail.remove(0);
            }
        }
    }
    let status = child.wait().context("waiting for mmdebstrap")?;
    if !status.success() {
        return Err(Error::Command {
            command: format!("mmdebstrap, whole output in {}", log_path.display()),
            status: status.to_string(),
            output: tail.join("\n"),
        });
    }
    Ok(())
}

/// Hashes with FNV-1a, to distinguish recipes. Collisions are no security risk here.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_follows_the_recipe() {
        let recipe = Recipe::bookworm();
        let other = recipe.clone().with(&["strace"]);
        assert!(recipe.name().starts_with("bookworm-"));
        assert_eq!(recipe.name(), Recipe::bookworm().name());
        assert_ne!(recipe.name(), other.name());
    }
}
