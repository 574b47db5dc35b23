//! The table `[memory]` of a VM's file, and of the host's file for all VMs: the limits that `remoca host` keeps.

use crate::settings::file::{MEMORY, Problem, Settings};
use crate::settings::layers::Merged;
use crate::settings::schema::Schema;
use crate::settings::{Files, Unusable, host_path, vm_path};
use crate::size::{parse_size, show_size};
use anyhow::{Result, anyhow, bail};
use clap::{Args, FromArgMatches};
use remoca_core::allocation::WEIGHTS;
use remoca_host::guest::Address;
use remoca_host::limits::Limits;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time within which an editor that has moved a file away puts another one in its place.
const REPLACED_WITHIN: Duration = Duration::from_secs(2);

/// Key that each VM has for itself.
pub const MONITOR: &str = "monitor";

/// Keys of the table.
#[derive(Args, Debug)]
struct MemoryArgs {
    /// Size that the VM has at least
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    minimum: u64,

    /// Size that the VM has at most [default: the total of the host]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    maximum: Option<u64>,

    /// Share of the total, against the weights of the other VMs
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_weight)]
    weight: f64,

    /// How much more may miss than with the size by weight, such as 25% of the misses there; `none` for no such bound
    #[arg(long, value_name = "PERCENT", default_value = "25%", value_parser = parse_bound)]
    bound: f64,

    /// Monitor of its hypervisor, for `remoca host --guests`: `qmp:PATH` of a QMP socket that nobody else uses, or `libvirt:DOMAIN`. Only in
    /// the file of a VM
    #[arg(long, value_name = "ADDRESS")]
    monitor: Option<Address>,

    /// Memory that its guest has at least, whatever its balloon is asked for [default: half of what it had at boot]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    guest_minimum: Option<u64>,
}

/// Returns the keys that the table may have in the host's file; [`Schema::of_vm`] has those of a VM's file.
pub fn schema() -> Schema {
    Schema::new(MemoryArgs::augment_args(clap::Command::new("memory")), &[], &[MONITOR])
}

/// Returns what the files say in the tables of the VM and of the host, with all mistakes.
pub fn tables(files: &Files) -> ([Settings; 2], Vec<Problem>) {
    let (vm, mut problems) = files.vm.as_ref().map(|text| text.vm_table(MEMORY, &schema().of_vm())).unwrap_or_default();
    let (host, of_host) = files.host.as_ref().map(|text| text.host(MEMORY, &schema())).unwrap_or_default();
    problems.extend(of_host);
    ([vm, host], problems)
}

/// Returns the limits that the files of a VM give it.
///
/// # Errors
/// If there is a mistake in them.
pub fn limits(files: &Files) -> Result<Limits> {
    let args = args(files)?;
    if let Some(maximum) = args.maximum.filter(|maximum| *maximum < args.minimum) {
        let (maximum, minimum) = (show_size(maximum), show_size(args.minimum));
        bail!("[memory]: the maximum of {maximum} is less than the minimum of {minimum}");
    }
    Ok(Limits {
        minimum_bytes: args.minimum,
        maximum_bytes: args.maximum,
        weight: args.weight,
        bound: args.bound,
        guest_minimum_bytes: args.guest_minimum,
    })
}

fn args(files: &Files) -> Result<MemoryArgs> {
    let ([vm, host], problems) = tables(files);
    if !problems.is_empty() {
        return Err(Unusable(problems).into());
    }
    Ok(MemoryArgs::from_arg_matches(&Merged::new(&schema(), &[], &[&vm, &host])?.matches)?)
}

/// Files of the configuration that are read again and again, and since when those of them are missing that were there. For a moment that
/// is a mistake, as an editor may be replacing them; then there are none.
#[derive(Default)]
pub struct KnownFiles(RefCell<BTreeMap<PathBuf, Option<Instant>>>);

impl KnownFiles {
    /// Forgets the files in `folder` of all VMs but these.
    pub fn keep<'n>(&self, folder: &Path, names: impl Iterator<Item = &'n str>) {
        let paths: BTreeSet<PathBuf> = names.map(|name| vm_path(folder, name)).chain([host_path(folder)]).collect();
        self.0.borrow_mut().retain(|path, _| paths.contains(path));
    }

    /// Returns the limits of the VM `name` by the files in `folder`, or why there are none as a text.
    ///
    /// # Errors
    /// As [`limits`], and if a file is missing that was there a moment ago.
    pub fn limits_of(&self, name: &str, folder: &Path) -> Result<Limits, String> {
        read(name, folder, |files| {
            self.note(Instant::now(), name, folder, files)?;
            limits(files)
        })
    }

    /// Returns the monitor of the guest of the VM `name` by the files in `folder`; `None` if they name none.
    ///
    /// # Errors
    /// As [`Self::limits_of`].
    pub fn monitor_of(&self, name: &str, folder: &Path) -> Result<Option<Address>, String> {
        read(name, folder, |files| {
            self.note(Instant::now(), name, folder, files)?;
            Ok(args(files)?.monitor)
        })
    }

    fn note(&self, now: Instant, name: &str, folder: &Path, files: &Files) -> Result<()> {
        let mut known = self.0.borrow_mut();
        let mut missing = None;
        for (path, file) in [(vm_path(folder, name), &files.vm), (host_path(folder), &files.host)] {
            if file.is_some() {
                known.insert(path, None);
            } else if let Some(since) = known.get(&path).map(|since| since.unwrap_or(now)) {
                if now.saturating_duration_since(since) < REPLACED_WITHIN {
                    known.insert(path.clone(), Some(since));
                    missing = Some(path);
                } else {
                    known.remove(&path);
                }
            }
        }
        missing.map_or(Ok(()), |path| Err(anyhow!("{}: it was there a moment ago, and is missing", path.display())))
    }
}

fn read<T>(name: &str, folder: &Path, of: impl Fn(&Files) -> Result<T>) -> Result<T, String> {
    let files = Files::read(folder, Some(name)).map_err(anyhow::Error::from);
    files.and_then(|files| of(&files)).map_err(|error| format!("{error:#}").replace("\n ", ";"))
}

fn parse_weight(text: &str) -> Result<f64, String> {
    let (least, most) = (WEIGHTS.start(), WEIGHTS.end());
    let error = || format!("`{text}` is not a weight: write a number from {least} to {most}, such as 2");
    text.parse().ok().filter(|weight| WEIGHTS.contains(weight)).ok_or_else(error)
}

fn parse_bound(text: &str) -> Result<f64, String> {
    let error = || format!("`{text}` is not a bound: write a percentage, such as 25%, or none");
    if text == "none" {
        return Ok(f64::INFINITY);
    }
    let percent: Option<f64> = text.strip_suffix('%').and_then(|number| number.parse().ok());
    percent.filter(|percent| percent.is_finite() && *percent >= 0.).map(|percent| percent / 100.).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::file::Text;

    fn files(vm: &str, host: &str) -> Files {
        let text = |path: &str, text: &str| Some(Text { path: path.into(), text: format!("version = 1\n{text}") });
        Files { vm: text("V", vm), host: text("H", host) }
    }

    #[test]
    fn a_file_that_was_there_is_a_mistake_while_it_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = vm_path(folder.path(), "web1");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let (known, began) = (KnownFiles::default(), Instant::now());
        let minimum = || known.limits_of("web1", folder.path()).map(|limits| limits.minimum_bytes);
        assert_eq!(minimum(), Ok(0), "there has never been one");
        for _ in 0..2 {
            std::fs::write(&path, "version = 1\n[memory]\nminimum = \"1G\"\n").unwrap();
            assert_eq!(minimum(), Ok(1 << 30));
            std::fs::remove_file(&path).unwrap();
            let why = minimum().unwrap_err();
            assert!(why.contains("web1.toml: it was there a moment ago"), "{why}");
        }
        let later = began + Duration::from_secs(600);
        assert!(known.note(later, "web1", folder.path(), &Files::default()).is_ok());
        assert_eq!((minimum(), known.monitor_of("web1", folder.path())), (Ok(0), Ok(None)));
    }

    #[test]
    fn a_vm_that_comes_again_without_its_file_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let (path, known) = (vm_path(folder.path(), "web1"), KnownFiles::default());
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let minimum = || known.limits_of("web1", folder.path()).map(|limits| limits.minimum_bytes);
        std::fs::write(&path, "version = 1\n[memory]\nminimum = \"1G\"\n").unwrap();
        std::fs::write(host_path(folder.path()), "version = 1\n").unwrap();
        assert_eq!(minimum(), Ok(1 << 30));
        std::fs::remove_file(&path).unwrap();
        known.keep(folder.path(), ["web1"].into_iter());
        assert!(minimum().is_err());
        known.keep(folder.path(), ["web2"].into_iter());
        assert_eq!((minimum(), known.0.borrow().len()), (Ok(0), 1), "that of the host is known");
    }

    #[test]
    fn a_vms_table_is_before_the_hosts_and_that_before_the_defaults() {
        let of = |vm: &str, host: &str| limits(&files(vm, host)).unwrap();
        assert_eq!(of("", ""), Limits::default());
        let both =
            of("cache = '1G'\n[memory]\nminimum = '1G'\nbound = 'none'\n", "[memory]\nweight = 2\nbound = '5%'\n");
        assert_eq!((both.minimum_bytes, both.weight, both.bound), (1 << 30, 2., f64::INFINITY));
        assert!((of("[memory]\nweight = 0.5\n", "").weight - 0.5).abs() < 1e-9);
        assert!((of("", "[memory]\nbound = '5%'\n").bound - 0.05).abs() < 1e-9);
        let text = "[memory]\nmonitor = 'libvirt:web1'\nguest-minimum = '512M'\n";
        assert_eq!(of(text, "").guest_minimum_bytes, Some(512 << 20));
        assert_eq!(args(&files(text, "")).unwrap().monitor, "libvirt:web1".parse().ok());
    }

    #[test]
    fn mistakes_are_told_with_their_lines() {
        let wrong = |vm: &str| format!("{:#}", limits(&files(vm, "")).unwrap_err());
        assert!(wrong("[memory]\nminimun = '1G'\n").contains("V:3: unknown key `minimun`: did you mean `minimum`?"));
        assert!(wrong("[memory]\nweight = 0\n").contains("V:3: weight: `0` is not a weight"));
        for bound in ["-1%", "25", "0.25", "%"] {
            let words = format!("V:3: bound: `{bound}` is not a bound: write a percentage");
            assert!(wrong(&format!("[memory]\nbound = '{bound}'\n")).contains(&words), "{bound}");
        }
        assert!(wrong("[memory]\nminimum = '2G'\nmaximum = '1G'\n").contains("is less than the minimum"));
        assert!(wrong("[memory]\nmonitor = 'web1'\n").contains("V:3: monitor: `web1` is no monitor"));
        let of_all = limits(&files("", "[memory]\nmonitor = 'libvirt:web1'\n")).unwrap_err();
        assert!(format!("{of_all:#}").contains("H:3: `monitor` belongs into the file of a VM"), "{of_all:#}");
        assert!(wrong("memory = 1\n").contains("V:2: `memory` must be a table: [memory]"));
    }
}
