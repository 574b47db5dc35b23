//! `remoca config check`: every problem of every file.

use crate::output::output;
use crate::settings::file::{DiskEntry, Entry, HOST, MEMORY, Place, Problem, SERVE, Settings, Text, VMS};
use crate::settings::{Files, host_path, vm_path};
use crate::size::{parse_size, show_size};
use crate::{disk, host, look, memory, serve};
use anyhow::{Context, Result, bail};
use remoca_disk::start::{Address, check_options, check_state};
use remoca_host::guest;
use remoca_io::address::Endpoint;
use remoca_store::format;
use remoca_view::text;
use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// Checks the files of the VMs `names`, or of all VMs, and the host's file.
///
/// # Errors
/// If there is a problem; all of them have been written to standard output.
pub fn run(names: &[String], folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        bail!("there is no folder {}, so nothing is configured, or --config names another one", folder.display());
    }
    let all = vms(folder)?;
    if let Some(name) = names.iter().find(|name| !all.contains(name)) {
        bail!("there is no {}: the VM `{name}` is not configured", vm_path(folder, name).display());
    }
    let Looked { problems, disks, count } = look(names, &all, folder, &of_host);
    let mut out = output();
    problems.iter().try_for_each(|problem| writeln!(out, "{problem}"))?;
    // No mistake: a guest may have written this.
    let is_looked_at = |disk: &&DiskEntry| !disk.options.is_qcow2 && is_meant(names, folder, &disk.place.path);
    let begin = |disk: &DiskEntry| {
        let image = PathBuf::from(&disk.options.image);
        look::begin(move || format::of(&image))
    };
    let begun = disks.iter().filter(is_looked_at).map(|disk| (disk, begin(disk))).collect();
    for (disk, found) in look::end(begun) {
        if let Some(Ok(Some(name))) = found {
            let (place, image) = (&disk.place, text::one_line(&disk.options.image, usize::MAX));
            writeln!(out, "{place}: note: {image} looks like a {name} image, and its guest sees these very bytes")?;
        }
    }
    // No mistake either: `remoca disk` serves them.
    let is_without_unit = |name: &&String| disk::check_file_name(name).is_ok() && !disk::has_unit(name);
    for name in all.iter().filter(|name| names.is_empty() || names.contains(name)).filter(is_without_unit) {
        writeln!(out, "{}: note: no unit can have this name: {}", vm_path(folder, name).display(), disk::UNIT_NAMES)?;
    }
    if let Some(note) = more_than_total(&all, folder) {
        writeln!(out, "{note}")?;
    }
    match problems.len() {
        0 => Ok(writeln!(out, "{}: no mistakes, files: {count}", folder.display())?),
        1 => bail!("1 mistake"),
        count => bail!("{count} mistakes"),
    }
}

/// Returns a note that `remoca host` cannot give each of these VMs its minimum; `None` if it can. It makes the best of that.
fn more_than_total(all: &[String], folder: &Path) -> Option<String> {
    let host = Text::read(&host_path(folder)).ok()?;
    let table = host.as_ref()?.host(HOST, &host::schema()).0;
    let Entry { place, words } = table.entries.get("total")?;
    let total = parse_size(words.first()?.split_once('=')?.1).ok()?;
    let minimum = |name: &str| {
        let vm = Text::read(&vm_path(folder, name)).ok()?;
        Some(memory::limits(&Files { vm, host: host.clone() }).ok()?.minimum_bytes)
    };
    let minimums: Vec<_> = all.iter().filter_map(|name| Some((minimum(name)?, name))).collect();
    let (largest, name) = minimums.iter().max()?;
    let sum = minimums.iter().map(|(minimum, _)| *minimum).fold(0, u64::saturating_add);
    let (sum, most, largest) = (sum > total).then(|| (show_size(sum), show_size(total), show_size(*largest)))?;
    let name = text::one_line(name, usize::MAX);
    Some(format!(
        "{place}: note: the minimums of all VMs are {sum} together, of a total of {most}. The largest is that of {name}, {largest}"
    ))
}

/// Returns all mistakes in the files of the folder.
///
/// # Errors
/// If the folder cannot be read.
pub fn mistakes(folder: &Path) -> Result<Vec<Problem>> {
    Ok(look(&[], &vms(folder)?, folder, &of_host).problems)
}

/// Returns the mistakes in the file of the VM `name`, and in what the host's file says to all VMs.
///
/// # Errors
/// If the folder cannot be read.
pub fn mistakes_of(name: &str, folder: &Path) -> Result<Vec<Problem>> {
    let of_vms = |text: &Text| {
        let (_, mut problems) = text.host(VMS, &disk::schema());
        add_new(&mut problems, text.host(MEMORY, &memory::schema()).1);
        problems
    };
    Ok(look(&[name.to_owned()], &vms(folder)?, folder, &of_vms).problems)
}

/// What is in the files.
struct Looked {
    problems: Vec<Problem>,
    /// Disks of all VMs.
    disks: Vec<DiskEntry>,
    /// Number of files that were checked.
    count: usize,
}

/// Returns whether a file is that of one of the VMs `names`, or there are no names.
fn is_meant(names: &[String], folder: &Path, path: &Path) -> bool {
    names.is_empty() || names.iter().any(|name| vm_path(folder, name) == path)
}

/// Checks the files of the VMs `names`, or of `all` VMs, and the host's file by `of_host`.
fn look(names: &[String], all: &[String], folder: &Path, of_host: &dyn Fn(&Text) -> Vec<Problem>) -> Looked {
    let (mut problems, mut disks, mut uses, mut count) = (Vec::new(), Vec::new(), Vec::<Use>::new(), 0);
    let host = read(&host_path(folder), &mut problems);
    if let Some(text) = &host {
        count += 1;
        problems.extend(of_host(text));
    }
    for name in all {
        let Some(text) = read(&vm_path(folder, name), &mut problems) else { continue };
        let (settings, mut of_vm) = text.vm(&disk::schema().of_vm());
        let (memory, of_memory) = text.vm_table(MEMORY, &memory::schema().of_vm());
        add_new(&mut of_vm, of_memory);
        uses.extend(uses_of(&settings, &memory));
        disks.extend(settings.disks.into_iter().flatten());
        if is_meant(names, folder, &text.path) {
            count += 1;
            let checked = match disk::check_file_name(name) {
                Ok(()) if of_vm.is_empty() => combined(name, &text, host.as_ref()),
                named => named,
            };
            if let Err(error) = checked {
                problems.push(Problem { place: Place { path: text.path, line: 1 }, text: format!("{error:#}") });
            }
            problems.extend(of_vm);
        }
    }
    // What a file shares with one that is not asked for is a problem of the former.
    uses.sort_by_key(|used| is_meant(names, folder, &used.place.path));
    problems.extend(shared(&uses).into_iter().filter(|problem| is_meant(names, folder, &problem.place.path)));
    Looked { problems, disks, count }
}

/// Returns the names of all VMs that have a file.
pub fn vms(folder: &Path) -> Result<Vec<String>> {
    let folder = folder.join("vms");
    let entries = match std::fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let files = paths.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let mut names: Vec<_> = files.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}

fn read(path: &Path, problems: &mut Vec<Problem>) -> Option<Text> {
    Text::read(path).unwrap_or_else(|problem| {
        problems.push(problem);
        None
    })
}

/// Checks what the files of the VM `name` say together. Each of them is right.
fn combined(name: &str, vm: &Text, host: Option<&Text>) -> Result<()> {
    let files = Files { vm: Some(vm.clone()), host: host.cloned() };
    if memory::tables(&files).1.is_empty() {
        memory::limits(&files)?;
    }
    // Mistakes of the host's file are reported as such.
    let Ok([settings, _]) = files.settings_of_vm(disk::schema) else { return Ok(()) };
    // Flags say which disks there are.
    if settings.disks.is_none() {
        return Ok(());
    }
    let words = ["--name", name].map(OsString::from);
    let options = disk::options_of(&files, &words, &Path::new(name).with_extension("ctl"))?;
    if options.incoming.as_ref().is_some_and(|incoming| incoming.key.is_none()) {
        bail!("`incoming` without `incoming-key`: `remoca migrate --new-key FILE` makes a key");
    }
    check_options(&options)?;
    // The default place depends on who starts the process.
    if settings.entries.contains_key("state") { check_state(&options) } else { Ok(()) }
}

/// Returns the problems of the host's file, each once.
fn of_host(text: &Text) -> Vec<Problem> {
    let (_, mut problems) = text.host(VMS, &disk::schema());
    for (table, schema) in [(SERVE, serve::schema()), (HOST, host::schema()), (MEMORY, memory::schema())] {
        add_new(&mut problems, text.host(table, &schema).1);
    }
    type Check = fn(&Settings) -> Result<()>;
    for (table, schema, check) in [(SERVE, serve::schema(), serve::check as Check), (HOST, host::schema(), host::check)]
    {
        let (settings, wrong) = text.host(table, &schema);
        let Some(line) = settings.entries.values().map(|entry| entry.place.line).min() else { continue };
        if wrong.is_empty()
            && let Err(error) = check(&settings)
        {
            let place = Place { path: text.path.clone(), line };
            problems.push(Problem { place, text: format!("[{table}]: {error:#}") });
        }
    }
    problems
}

/// Adds the problems that are not there yet.
fn add_new(problems: &mut Vec<Problem>, more: Vec<Problem>) {
    for problem in more {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
}

/// What one VM of a host can have, and no other one beside it.
enum What {
    /// An image, a socket or another file.
    Path(PathBuf),
    /// `HOST:PORT`
    Tcp(String),
    /// Domain of libvirt whose monitor is asked.
    Domain(String),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Domain(name) => write!(f, "libvirt:{name}"),
        }
    }
}

impl What {
    /// Returns what has this path, of which `/var/run` is the same as `/run`.
    fn of_path(path: &Path) -> Self {
        Self::Path(path.strip_prefix("/var/run").map_or_else(|_| path.into(), |rest| Path::new("/run").join(rest)))
    }

    /// Returns what has this address, or `None` if it is that of no socket.
    fn of_address(text: &str) -> Option<Self> {
        match text.parse::<Address>().ok()? {
            Address::Endpoint(Endpoint::Unix(path)) => Some(Self::of_path(&path)),
            Address::Endpoint(Endpoint::Tcp(address)) => Some(Self::Tcp(address)),
            Address::Endpoint(Endpoint::Local(_)) | Address::Systemd => None,
        }
    }

    /// Returns what has this monitor, or `None` if it is none.
    fn of_monitor(text: &str) -> Option<Self> {
        match text.parse().ok()? {
            guest::Address::Qmp(path) => Some(Self::of_path(&path)),
            guest::Address::Libvirt(name) => Some(Self::Domain(name)),
        }
    }

    /// Returns whether two VMs cannot have the one and the other at the same time.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Path(one), Self::Path(other)) => one == other,
            (Self::Tcp(one), Self::Tcp(other)) => is_same_address(one, other),
            (Self::Domain(one), Self::Domain(other)) => one == other,
            (Self::Path(_) | Self::Tcp(_) | Self::Domain(_), _) => false,
        }
    }
}

/// Returns whether a process that listens at one of two addresses keeps others from the other one. Names are not resolved.
fn is_same_address(one: &str, other: &str) -> bool {
    let parts = |address: &str| {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
        (if host == "localhost" { "127.0.0.1".into() } else { host }, port.parse::<u16>().ok())
    };
    // `0.0.0.0` takes no address of IPv6, and `[::]` those of both kinds.
    let takes = |any: &str, other: &str| match any.parse::<IpAddr>() {
        Ok(address) => address.is_unspecified() && (address.is_ipv6() || other.parse::<Ipv6Addr>().is_err()),
        Err(_) => false,
    };
    let ((one, one_port), (other, other_port)) = (parts(one), parts(other));
    one_port == other_port && (one == other || takes(&one, &other) || takes(&other, &one))
}

/// A place in a file that says what a VM has.
struct Use {
    what: What,
    /// Name of what is there.
    by: String,
    place: Place,
}

/// Returns everything that the file of a VM, and its table `memory`, say to be of this VM alone.
fn uses_of(settings: &Settings, memory: &Settings) -> Vec<Use> {
    let mut uses = Vec::new();
    for DiskEntry { place, options } in settings.disks.iter().flatten() {
        let image = (!options.read_only).then(|| Path::new(&options.image));
        let paths = image.into_iter().chain(options.socket.as_deref()).filter(|path| !path.as_os_str().is_empty());
        uses.extend(paths.map(|path| Use { what: What::of_path(path), by: "the disk".into(), place: place.clone() }));
    }
    let of_one = settings.entries.iter().filter(|(key, _)| disk::PER_VM.contains(&key.as_str()));
    let of_one = of_one.chain(memory.entries.get_key_value(memory::MONITOR));
    for (key, Entry { place, words }) in of_one {
        // What is only on or off has no value.
        for (_, value) in words.iter().filter_map(|word| word.split_once('=')) {
            let what = match key.as_str() {
                "nbd" | "incoming" => What::of_address(value),
                memory::MONITOR => What::of_monitor(value),
                _ => Some(What::of_path(Path::new(value))),
            };
            uses.extend(what.map(|what| Use { what, by: format!("`{key}`"), place: place.clone() }));
        }
    }
    uses
}

/// Returns a problem for each place that has what a place before it has.
fn shared(uses: &[Use]) -> Vec<Problem> {
    let problem = |(at, Use { what, place, .. }): (usize, &Use)| {
        let other = uses[..at].iter().find(|other| other.what.is_same(what))?;
        let text = format!("{what} is also used by {} at {}", other.by, other.place);
        Some(Problem { place: place.clone(), text })
    };
    uses.iter().enumerate().filter_map(problem).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the mistakes in the files of two VMs with these settings, each after its line.
    fn mistakes_of_two(first: &str, second: &str, names: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("vms")).unwrap();
        for (name, settings) in [("a", first), ("b", second)] {
            let disk = format!("[[disk]]\nname = 'x'\nimage = '/{name}'\nformat = 'raw'\nsocket = '/{name}.sock'\n");
            std::fs::write(vm_path(folder.path(), name), format!("version = 1\n{settings}\n{disk}")).unwrap();
        }
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let looked = look(&names, &vms(folder.path()).unwrap(), folder.path(), &|_| Vec::new());
        let vms = folder.path().join("vms").display().to_string();
        looked.problems.iter().map(|problem| problem.to_string().replace(&format!("{vms}/"), "")).collect()
    }

    #[test]
    fn what_one_vm_alone_can_have_is_not_shared() {
        for (first, second, found) in [
            ("port = '/run/p'", "port = '/var/run//p'", "b.toml:2: /run/p is also used by `port` at a.toml:2"),
            ("port = '/p'", "state = '/p'", "b.toml:2: /p is also used by `port` at a.toml:2"),
            ("trace = '/t'", "trace = '/t'", "b.toml:2: /t is also used by `trace` at a.toml:2"),
            ("", "port = '/a.sock'", "b.toml:2: /a.sock is also used by the disk at a.toml:3"),
            (
                "[memory]\nmonitor = 'qmp:/run/q'",
                "[memory]\nmonitor = 'qmp:/var/run/./q'",
                "b.toml:3: /run/q is also used by `monitor` at a.toml:3",
            ),
            (
                "[memory]\nmonitor = 'libvirt:web1'",
                "[memory]\nmonitor = 'libvirt:web1'",
                "b.toml:3: libvirt:web1 is also used by `monitor` at a.toml:3",
            ),
            ("port = '/q'", "[memory]\nmonitor = 'qmp:/q'", "b.toml:3: /q is also used by `port` at a.toml:2"),
            (
                "incoming = 'tcp:h:1'\nincoming-key = '/k'",
                "incoming = 'tcp:H:1'\nincoming-key = '/k'",
                "b.toml:2: tcp:H:1 is also used by `incoming` at a.toml:2",
            ),
        ] {
            assert_eq!(mistakes_of_two(first, second, &[]), [found]);
        }
        let one = |name| mistakes_of_two("trace = '/t'", "trace = '/t'", &[name]);
        assert_eq!(one("a"), ["a.toml:2: /t is also used by `trace` at b.toml:2"]);
        assert_eq!(one("b"), ["b.toml:2: /t is also used by `trace` at a.toml:2"]);
        assert!(mistakes_of_two("port = '/p'\nstate = '/s'", "port = '/q'\nstate = '/r'", &[]).is_empty());
    }

    #[test]
    fn minimums_that_are_more_than_there_is_are_noted() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("vms")).unwrap();
        let note = |total: &str, minimum: &str| {
            let host = format!("version = 1\n[host]\n{total}\n[memory]\nminimum = '1G'\n");
            std::fs::write(host_path(folder.path()), host).unwrap();
            for (name, table) in [("a", ""), ("b", minimum)] {
                std::fs::write(vm_path(folder.path(), name), format!("version = 1\n{table}\n")).unwrap();
            }
            let note = more_than_total(&vms(folder.path()).unwrap(), folder.path());
            note.map(|note| note.rsplit_once("note: ").unwrap().1.to_owned())
        };
        let found = "the minimums of all VMs are 4G together, of a total of 2G. The largest is that of b, 3G";
        assert_eq!(note("total = '2G'", "[memory]\nminimum = '3G'").as_deref(), Some(found));
        assert_eq!(note("total = '2G'", ""), None);
        assert_eq!(note("", "[memory]\nminimum = '3G'"), None, "flags may say the total");
    }

    #[test]
    fn an_address_is_one_however_it_is_written() {
        let are_same = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|address| What::of_address(address).unwrap());
            one.is_same(&other)
        };
        for (one, other) in [
            ("unix:/run/n", "unix:/var/run/./n"),
            ("tcp:localhost:7", "tcp:127.0.0.1:7"),
            ("tcp:[::1]:7", "tcp:[::]:7"),
            ("tcp:0.0.0.0:7", "tcp:host:7"),
            ("tcp:10.0.0.1:7", "tcp:[::]:7"),
        ] {
            assert!(are_same(one, other) && are_same(other, one), "{one} {other}");
        }
        for (one, other) in [
            ("unix:/n", "unix:/m"),
            ("tcp:0.0.0.0:7", "tcp:0.0.0.0:8"),
            ("tcp:10.0.0.1:7", "tcp:10.0.0.2:7"),
            ("tcp:[::1]:7", "tcp:0.0.0.0:7"),
        ] {
            assert!(!are_same(one, other) && !are_same(other, one), "{one} {other}");
        }
        assert!(What::of_address("systemd").is_none(), "each unit has sockets of its own");
    }
}
