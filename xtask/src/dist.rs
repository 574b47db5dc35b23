//! `cargo xtask dist`: the Debian packages `remoca` (for hosts) and `remoca-agent` (for guests), in `out/dist`.
//!
//! Cargo builds the programs; dpkg's own tools find their dependencies and pack them. The rest of a package is in
//! `packaging/`. The same tree and compiler produce the same bytes: times are those of the changelog, owners are root.

use crate::run::{cargo, output, project};
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const USAGE: &str = "\
usage: cargo xtask dist [--profile NAME] [--out DIR]

  --profile NAME  cargo's profile of the programs [default: release]
  --out DIR       where the packages go [default: out/dist]";

struct Package {
    name: &'static str,
    /// Path of the program in the package; its last part is cargo's name of the program.
    program: &'static str,
    /// Files of the project, with destination and mode.
    files: &'static [(&'static str, &'static str, u32)],
    /// Folders of the project, with their destinations.
    folders: &'static [(&'static str, &'static str)],
}

const PACKAGES: [Package; 2] = [
    Package {
        name: "remoca",
        program: "usr/bin/remoca",
        files: &[
            ("packaging/remoca-vhost-user-blk", "usr/libexec/remoca-vhost-user-blk", 0o755),
            ("packaging/50-remoca.json", "usr/share/qemu/vhost-user/50-remoca.json", 0o644),
            ("packaging/remoca-disk@.service", "usr/lib/systemd/system/remoca-disk@.service", 0o644),
            ("packaging/remoca-qcow2@.service", "usr/lib/systemd/system/remoca-qcow2@.service", 0o644),
            ("packaging/remoca-serve.service", "usr/lib/systemd/system/remoca-serve.service", 0o644),
            ("packaging/remoca-host.service", "usr/lib/systemd/system/remoca-host.service", 0o644),
            ("packaging/remoca-web.service", "usr/lib/systemd/system/remoca-web.service", 0o644),
            ("packaging/libvirt-guests.conf", "usr/lib/systemd/system/libvirt-guests.service.d/remoca.conf", 0o644),
            ("packaging/libvirt-hook", "etc/libvirt/hooks/qemu.d/remoca", 0o755),
            // Without a comment: docs/guests.md had operators write the same, and dpkg asks about a file that is different.
            ("packaging/apparmor-libvirt-qemu", "etc/apparmor.d/abstractions/libvirt-qemu.d/remoca", 0o644),
            ("packaging/needrestart.conf", "etc/needrestart/conf.d/remoca.conf", 0o644),
            ("packaging/remoca.toml", "usr/share/doc/remoca/examples/remoca.toml", 0o644),
            ("packaging/web1.toml", "usr/share/doc/remoca/examples/web1.toml", 0o644),
            ("packaging/grafana-dashboard.json", "usr/share/doc/remoca/examples/grafana-dashboard.json", 0o644),
            ("packaging/prometheus-alerts.yaml", "usr/share/doc/remoca/examples/prometheus-alerts.yaml", 0o644),
            ("README.md", "usr/share/doc/remoca/README.md", 0o644),
        ],
        folders: &[("docs", "usr/share/doc/remoca/docs")],
    },
    Package {
        name: "remoca-agent",
        program: "usr/sbin/remoca-agent",
        files: &[
            ("packaging/remoca-agent.service", "usr/lib/systemd/system/remoca-agent.service", 0o644),
            ("packaging/debian/remoca-agent/lintian-overrides", "usr/share/lintian/overrides/remoca-agent", 0o644),
        ],
        folders: &[],
    },
];

/// Common parts of all packages.
struct Release {
    version: String,
    architecture: String,
    /// Seconds since 1970, for every time in a package.
    timestamp: String,
    programs: PathBuf,
}

/// Builds the programs and packs them.
///
/// # Errors
/// A text that says what failed.
pub fn run(arguments: Vec<OsString>) -> Result<(), String> {
    let (mut profile, mut out) = ("release".to_owned(), project().join("out/dist"));
    let mut arguments = arguments.into_iter();
    while let Some(option) = arguments.next() {
        match (option.to_str(), arguments.next()) {
            (Some("--profile"), Some(value)) => profile = value.to_string_lossy().into_owned(),
            (Some("--out"), Some(value)) => out = std::path::absolute(value).map_err(|error| error.to_string())?,
            (Some("--help"), None) => {
                println!("{USAGE}");
                return Ok(());
            }
            _ => return Err(USAGE.into()),
        }
    }
    let release = Release::build(&profile)?;
    fs::create_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;
    for package in &PACKAGES {
        println!("{}", package.pack(&release, &out)?.display());
    }
    Ok(())
}

impl Release {
    fn build(profile: &str) -> Result<Self, String> {
        let changelog = |field| {
            let mut command = Command::new("dpkg-parsechangelog");
            command.arg("-l").arg(project().join("packaging/debian/changelog")).arg("-S").arg(field);
            output(command)
        };
        let version = changelog("Version")?;
        if version != env!("CARGO_PKG_VERSION") {
            let cargos = env!("CARGO_PKG_VERSION");
            return Err(format!("packaging/debian/changelog begins with version {version}, Cargo.toml has {cargos}"));
        }
        let timestamp = std::env::var("SOURCE_DATE_EPOCH").map_or_else(|_| changelog("Timestamp"), Ok)?;
        let mut architecture = Command::new("dpkg");
        architecture.arg("--print-architecture");
        let architecture = output(architecture)?;

        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| project().join("target"), PathBuf::from);
        // One after the other. Together, each would be built with the features that the other needs in shared crates.
        for package in ["remoca-cli", "remoca-agent"] {
            let mut build = cargo(["build", "--quiet", "--profile", profile, "--package", package, "--target-dir"]);
            build.current_dir(project()).arg(&target);
            output(build)?;
        }
        let programs = target.join(if profile == "dev" { "debug" } else { profile });
        Ok(Self { version, architecture, timestamp, programs })
    }
}

impl Package {
    fn pack(&self, release: &Release, out: &Path) -> Result<PathBuf, String> {
        let scratch = release.programs.join("dist").join(self.name);
        if scratch.exists() {
            fs::remove_dir_all(&scratch).map_err(|error| format!("{}: {error}", scratch.display()))?;
        }
        let tree = scratch.join("tree");
        self.stage(release, &tree)?;
        self.write_control(release, &scratch, &tree)?;
        set_folder_modes(&tree)?;
        let deb = out.join(format!("{}_{}_{}.deb", self.name, release.version, release.architecture));
        let mut command = Command::new("dpkg-deb");
        command.env("SOURCE_DATE_EPOCH", &release.timestamp);
        command.args(["--root-owner-group", "-Zxz", "--build"]).arg(&tree).arg(&deb);
        output(command)?;
        Ok(deb)
    }

    /// Places all files except the control files.
    fn stage(&self, release: &Release, tree: &Path) -> Result<(), String> {
        for (source, target, mode) in self.files {
            copy(&project().join(source), &tree.join(target), *mode)?;
        }
        for (source, target) in self.folders {
            let source = project().join(source);
            for file in files_below(&source)? {
                let below = file.strip_prefix(&source).unwrap_or(&file);
                copy(&file, &tree.join(target).join(below), 0o644)?;
            }
        }
        let doc = tree.join("usr/share/doc").join(self.name);
        copy(&project().join("packaging/debian/copyright"), &doc.join("copyright"), 0o644)?;
        copy(&project().join("packaging/debian/changelog"), &doc.join("changelog"), 0o644)?;
        gzip(&doc.join("changelog"))?;

        let target = tree.join(self.program);
        copy(&release.programs.join(target.file_name().unwrap_or_default()), &target, 0o755)?;
        let mut strip = Command::new("strip");
        strip.args(["--strip-unneeded", "--remove-section=.comment", "--remove-section=.note"]).arg(&target);
        output(strip)?;
        self.stage_manuals(&target, tree)
    }

    /// Places the manual pages and completions that the program writes (`generate`).
    fn stage_manuals(&self, program: &Path, tree: &Path) -> Result<(), String> {
        let (folder, name) = (tree.with_file_name("manuals"), self.name);
        let mut generate = Command::new(program);
        generate.arg("generate").arg(&folder);
        output(generate)?;
        for (file, target) in [
            (format!("{name}.bash"), format!("usr/share/bash-completion/completions/{name}")),
            (format!("_{name}"), format!("usr/share/zsh/vendor-completions/_{name}")),
            (format!("{name}.fish"), format!("usr/share/fish/vendor_completions.d/{name}.fish")),
        ] {
            copy(&folder.join(file), &tree.join(target), 0o644)?;
        }
        for page in files_below(&folder)?.iter().filter(|file| file.extension().is_some_and(|section| section == "1")) {
            let target = tree.join("usr/share/man/man1").join(page.file_name().unwrap_or_default());
            copy(page, &target, 0o644)?;
            gzip(&target)?;
        }
        Ok(())
    }

    fn write_control(&self, release: &Release, scratch: &Path, tree: &Path) -> Result<(), String> {
        let control = tree.join("DEBIAN");
        let source = project().join("packaging/debian").join(self.name);
        let paths = files_below(tree)?;

        let names: Vec<_> = paths.iter().map(|path| path.strip_prefix(tree).unwrap_or(path)).collect();
        let mut sums = Command::new("md5sum");
        sums.current_dir(tree).args(&names);
        write(&control.join("md5sums"), &(output(sums)? + "\n"))?;
        let settings = names.iter().filter(|name| name.starts_with("etc"));
        let settings: String = settings.map(|name| format!("/{}\n", name.display())).collect();
        if !settings.is_empty() {
            write(&control.join("conffiles"), &settings)?;
        }
        for script in ["postinst", "prerm", "postrm"] {
            copy(&source.join(script), &control.join(script), 0o755)?;
        }

        let bytes: u64 = paths.iter().filter_map(|path| fs::metadata(path).ok()).map(|data| data.len()).sum();
        let template = source.join("control");
        let template = fs::read_to_string(&template).map_err(|error| format!("{}: {error}", template.display()))?;
        let (package, rest) = template.split_once('\n').ok_or("an empty control file")?;
        let Release { version, architecture, .. } = release;
        let mut fields = format!("{package}\nVersion: {version}\nArchitecture: {architecture}\n");
        fields += &format!("Installed-Size: {}\n", bytes.div_ceil(1024));
        let depends = self.dependencies(scratch, tree)?;
        if !depends.is_empty() {
            fields += &format!("Depends: {depends}\n");
        }
        write(&control.join("control"), &(fields + rest))
    }

    /// Returns the libraries that the program needs, as packages. Empty for a statically linked program.
    fn dependencies(&self, scratch: &Path, tree: &Path) -> Result<String, String> {
        // dpkg-shlibdeps expects to run in an unpacked source package.
        write(
            &scratch.join("debian/control"),
            &format!("Source: remoca\n\nPackage: {}\nArchitecture: any\n", self.name),
        )?;
        let mut command = Command::new("dpkg-shlibdeps");
        command.current_dir(scratch).arg("-O").arg(tree.join(self.program));
        let found = output(command)?;
        Ok(found.lines().find_map(|line| line.strip_prefix("shlibs:Depends=")).unwrap_or_default().to_owned())
    }
}

/// Compresses a file as Debian's policy wants it, without its name and time.
fn gzip(file: &Path) -> Result<(), String> {
    let mut gzip = Command::new("gzip");
    gzip.args(["-9", "--no-name"]).arg(file);
    output(gzip).map(drop)
}

/// Returns all files in a folder and its subfolders, sorted.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for path in entries(folder)? {
        if path.is_dir() { found.extend(files_below(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

/// Sets the modes of folders, regardless of the umask.
fn set_folder_modes(folder: &Path) -> Result<(), String> {
    set_mode(folder, 0o755)?;
    entries(folder)?.iter().filter(|path| path.is_dir()).try_for_each(|path| set_folder_modes(path))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let context = |error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(context)?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>().map_err(context)?;
    paths.sort();
    Ok(paths)
}

fn copy(source: &Path, target: &Path, mode: u32) -> Result<(), String> {
    make_parent(target)?;
    fs::copy(source, target).map_err(|error| format!("{} to {}: {error}", source.display(), target.display()))?;
    set_mode(target, mode)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    make_parent(path)?;
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    set_mode(path, 0o644)
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|error| format!("{}: {error}", parent.display()))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), String> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(|error| format!("{}: {error}", path.display()))
}
