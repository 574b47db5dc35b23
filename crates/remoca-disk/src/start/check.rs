//! What is refused before a process depends on it: options that no process can have, and a change of the configuration with which
//! a running process could not go on.

use super::exports::{self, Address};
use super::inherited;
use super::open::{
    check_size, guests_sockets, name_unit, offers, open_store, predecessor_died, refuse_other_formats,
    refuse_shared_image, store_target, vhost_config,
};
use super::options::{DiskOptions, Options, PortOptions, is_nbd_uri};
use super::settings::checked_cache;
use super::wrong::WrongOptions;
use crate::migration::Mark;
use crate::state;
use anyhow::{Context, Error, Result, anyhow, bail};
use remoca_frontend::nbd::Listener;
use remoca_io::address::Endpoint;
use remoca_io::control::left;
use remoca_io::lock::ImageLock;
use remoca_io::socket::look_at;
use remoca_protocol::port::PORT_SERIAL;
use remoca_store::OpenErrorKind;
use std::path::Path;

/// What an operator does to change what a running process cannot.
const ADVICE: &str = "with the guest shut down, restart the process";

/// Checks options as far as that is possible without opening anything.
///
/// # Errors
/// If no process can have them; the text says why.
pub fn check_options(options: &Options) -> Result<()> {
    let check = || {
        check_disks(options)?;
        checked_cache(options).map_err(Error::msg)?;
        for (spec, position) in options.disks.iter().zip(0..) {
            let name = spec.name_at(position);
            store_target(spec, false, options)?;
            if spec.socket.is_some() {
                vhost_config(&name, spec).check().with_context(|| format!("disk {name}"))?;
            }
        }
        Ok(())
    };
    check().map_err(|error: Error| error.context(WrongOptions))
}

/// Checks that the state file of a process with these options can be where it is to be. Changes nothing.
///
/// # Errors
/// If a file there is not ours; the text says what to do.
pub fn check_state(options: &Options) -> Result<()> {
    let Some(path) = &options.state else { return Ok(()) };
    state::check_place(path).map_err(|error| Error::new(error).context(WrongOptions))
}

/// How it is found out whether sockets and images that come can be had.
#[derive(Clone, Copy)]
enum Trial {
    /// They are opened, and closed again.
    Opening,
    /// They are looked at. Nothing is made, removed, locked, or asked of a server: somebody else may need it at that moment.
    Looking,
}

/// Checks that a process can start with these options where one with the options `former` ran, which has the disks `known`:
/// sockets and images that come are tried.
///
/// # Errors
/// If it cannot; the text says why.
fn check_change(options: &Options, former: &Options, known: &[&str], trial: Trial) -> Result<()> {
    check_options(options)?;
    // The former one is passed on open, whatever its mode is by now.
    if options.state != former.state {
        check_state(options)?;
    }
    let is_known = |disk: &DiskOptions, position| known.contains(&&*disk.name_at(position));
    let unknown = options.disks.iter().zip(0..).filter(|(disk, position)| !is_known(disk, *position));
    let new_sockets: Vec<&Path> = unknown.clone().filter_map(|(disk, _)| disk.socket.as_deref()).collect();
    let mut before: Vec<Endpoint> = addresses(former).collect();
    before.retain(|address| !matches!(address, Endpoint::Unix(path) if new_sockets.contains(&&**path)));
    for address in addresses(options).filter(|address| !before.contains(address)) {
        match (trial, &address) {
            (Trial::Opening, _) => drop(Listener::bind(&address, options.socket_group)?),
            (Trial::Looking, Endpoint::Unix(path)) => look_at(path)?,
            (Trial::Looking, Endpoint::Tcp(_) | Endpoint::Local(_)) => {}
        }
    }
    for (spec, position) in unknown {
        refuse_shared_image(spec, position, options)?;
        let tried = open_briefly(spec, options, trial);
        tried.with_context(|| format!("disk {} cannot be added", spec.name_at(position)))?;
    }
    Ok(())
}

/// Checks that a process can start with these options after one with the options `former`. If that one was killed, or ended under its guests, these may
/// still be there and connect again: they must find their own images.
///
/// # Errors
/// If it cannot; the text says why.
pub fn check_restart(options: &Options, former: &Options) -> Result<()> {
    let names: Vec<_> = former.disks.iter().zip(0..).map(|(disk, position)| disk.name_at(position)).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    if predecessor_died(former) || former.is_named && left::is_there(&former.control) {
        // An image that is no longer where it was has been moved.
        let is_there = |image: &str| is_nbd_uri(image) || Path::new(image).exists();
        let disks = names.iter().copied().zip(&former.disks).filter(|(_, disk)| is_there(&disk.image));
        let disks: Vec<_> = disks.map(|(name, disk)| (name, &*disk.image)).collect();
        if !disks.is_empty() {
            inherited::check_disks(options, &disks).map_err(Error::msg)?;
        }
        refuse_other_qcow2_images(options, former)?;
        refuse_other_sockets(options, former)?;
        if former.incoming.is_none() && options.incoming.is_some() && !are_elsewhere(former) {
            bail!("it had its disks, and would wait for them with --incoming: {ADVICE}");
        }
        refuse_other_marks(options, former)?;
        offers(options).check_beside(&offers(former)).map_err(|lacking| anyhow!("{lacking}: {ADVICE}"))?;
    }
    check_change(options, former, &names, Trial::Opening)
}

/// Checks that a process with these options could take over from a running one, which was started with the options `former` and
/// has the disks `running` (names and images). What is found out here costs no guest anything.
///
/// # Errors
/// If it could not; the text says why.
pub fn check_upgrade(options: &Options, former: &Options, running: &[(&str, &str)]) -> Result<()> {
    check_successor(options, former, running, Trial::Opening)
}

/// Checks what [`check_upgrade`] does, as far as that shows while nothing is opened that another process could need meanwhile.
///
/// # Errors
/// As [`check_upgrade`].
pub fn foresee_upgrade(options: &Options, former: &Options, running: &[(&str, &str)]) -> Result<()> {
    check_successor(options, former, running, Trial::Looking)
}

fn check_successor(options: &Options, former: &Options, running: &[(&str, &str)], trial: Trial) -> Result<()> {
    check_options(options)?;
    inherited::check_disks(options, running).map_err(Error::msg)?;
    refuse_other_qcow2_images(options, former)?;
    refuse_other_sockets(options, former)?;
    if former.incoming.is_none() && options.incoming.is_some() {
        bail!("it has its disks, and killed it would wait for them with --incoming: {ADVICE}");
    }
    refuse_other_marks(options, former)?;
    let running: Vec<_> = running.iter().map(|(name, _)| *name).collect();
    check_change(options, former, &running, trial)
}

/// Returns whether the disks of a killed process are with another one, to which they had gone before.
fn are_elsewhere(former: &Options) -> bool {
    if !super::are_files(former.disks.iter().map(|disk| &*disk.image)) {
        return former.is_named && Mark::beside(&former.control, false).says_gone();
    }
    // Their locks tell.
    former.disks.iter().any(|disk| {
        let Ok(target) = store_target(disk, true, former) else { return false };
        open_store(&target, ImageLock::default()).is_err_and(|error| error.kind == OpenErrorKind::InUse)
    })
}

/// Refuses the first image that is no file for a process that waits for its disks: the mark that says that they came is then another one.
fn refuse_other_marks(options: &Options, former: &Options) -> Result<()> {
    let are_files = |options: &Options| super::are_files(options.disks.iter().map(|disk| &*disk.image));
    if options.incoming.is_some() && are_files(former) && !are_files(options) {
        bail!(
            "if its disks have come, it would wait for them again after a kill: with an image that is no file, nothing tells it that they \
             came. Take out --incoming with this change"
        );
    }
    Ok(())
}

/// Refuses another socket for a disk or for the port: the guest that is there uses the former one.
fn refuse_other_sockets(options: &Options, former: &Options) -> Result<()> {
    for (spec, position) in options.disks.iter().zip(0..) {
        let name = spec.name_at(position);
        let same = former.disks.iter().zip(0..).find(|(disk, position)| disk.name_at(*position) == name);
        if let Some((Some(before), Some(now))) = same.map(|(disk, _)| (&disk.socket, &spec.socket))
            && before != now
        {
            bail!("the socket of {name} would be {} in place of {}: {ADVICE}", now.display(), before.display());
        }
    }
    if let (PortOptions::Socket(before), PortOptions::Socket(now)) = (&former.port, &options.port)
        && before != now
    {
        bail!("the socket of the port would be {} in place of {}: {ADVICE}", now.display(), before.display());
    }
    if former.nbd != options.nbd && !former.nbd.is_empty() && !options.nbd.is_empty() {
        bail!("NBD clients would connect at other addresses: {ADVICE}");
    }
    Ok(())
}

/// Refuses another qcow2 image for a disk. The process knows only the server of it.
fn refuse_other_qcow2_images(options: &Options, former: &Options) -> Result<()> {
    for (spec, position) in options.disks.iter().zip(0..) {
        let name = spec.name_at(position);
        let same = former.disks.iter().zip(0..).find(|(disk, position)| disk.name_at(*position) == name);
        if let Some((Some(before), Some(now))) = same.map(|(disk, _)| (&disk.qcow2_image, &spec.qcow2_image))
            && before != now
        {
            bail!("disk {name} would be {now} in place of {before}: {ADVICE}");
        }
    }
    Ok(())
}

/// Returns the addresses at which a process with these options listens for guests.
pub fn addresses(options: &Options) -> impl Iterator<Item = Endpoint> {
    let tcp = options.nbd.iter().filter_map(|address| match address {
        Address::Endpoint(endpoint @ Endpoint::Tcp(_)) => Some(endpoint.clone()),
        Address::Endpoint(Endpoint::Unix(_) | Endpoint::Local(_)) | Address::Systemd => None,
    });
    guests_sockets(options).map(|path| Endpoint::Unix(path.into())).chain(tcp)
}

/// Opens the image of a disk that comes, checks it, and closes it.
fn open_briefly(spec: &DiskOptions, options: &Options, trial: Trial) -> Result<()> {
    if !spec.is_raw {
        refuse_other_formats(&spec.image)?;
    }
    let lock = match trial {
        Trial::Opening => ImageLock::default(),
        Trial::Looking if is_nbd_uri(&spec.image) => return Ok(()),
        Trial::Looking => ImageLock::Off,
    };
    let opened = open_store(&store_target(spec, false, options)?, lock);
    let store = opened.map_err(|error| name_unit(error.into(), spec, &options.name))?;
    check_size(spec, store.geometry().size, false)
}

/// Refuses options without a disk, with a disk to which no client could connect, or with a name or a socket that is given
/// twice.
fn check_disks(options: &Options) -> Result<()> {
    if options.disks.is_empty() {
        bail!("no disk: say --image IMAGE --socket PATH, or --disk image=IMAGE,socket=PATH");
    }
    if let Some(disk) = options.disks.iter().find(|disk| disk.socket.is_none())
        && options.nbd.is_empty()
    {
        bail!(
            "{}: where does the hypervisor connect? Say --socket PATH (--fd N, socket=PATH), or --nbd ADDRESS",
            disk.image
        );
    }
    refuse_shared_names(options)?;
    refuse_shared_sockets(options)?;
    exports::check_activation(&options.nbd, options.fd)?;
    let has_exports = options.port == PortOptions::NbdExport || options.disks.iter().any(|disk| disk.socket.is_none());
    if !options.nbd.is_empty() && !has_exports {
        bail!("--nbd has nothing to offer: leave out socket= of the disks that NBD clients are to have");
    }
    Ok(())
}

/// Refuses a name that two disks have, or a disk and the port: by its name a disk is found again.
fn refuse_shared_names(options: &Options) -> Result<()> {
    let mut names: Vec<_> = options.disks.iter().zip(0..).map(|(disk, position)| disk.name_at(position)).collect();
    names.extend((options.port == PortOptions::NbdExport).then(|| PORT_SERIAL.to_owned()));
    names.sort();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => bail!("the name {} is given twice: give each disk its own with name=", pair[0]),
        None => Ok(()),
    }
}

/// Refuses a socket that is given twice. This is checked here, because the second user would be told that "another
/// process" has it.
fn refuse_shared_sockets(options: &Options) -> Result<()> {
    let mut sockets: Vec<&Path> = guests_sockets(options).chain([&*options.control]).collect();
    sockets.sort();
    match sockets.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            bail!(
                "socket {} is given twice: each disk, the port, --nbd and --control need their own",
                pair[0].display()
            )
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::Incoming;
    use super::super::settings::tests::options;
    use super::*;

    /// Its file is to have them come back, and nothing else removes what the killed process left.
    #[test]
    fn a_killed_process_whose_disks_had_gone_may_wait_for_them() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, image) = (folder.path().join("s"), folder.path().join("image"));
        let _left = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let is_refused = |image: &str| {
            let disks = vec![DiskOptions { socket: Some(socket.clone()), ..DiskOptions::new(image.into()) }];
            let incoming = Some(Incoming { endpoint: "tcp:b:1".parse().unwrap(), key: None });
            let with = |incoming| Options {
                control: folder.path().join("vm.ctl"),
                disks: disks.clone(),
                incoming,
                ..options(&[], 0)
            };
            let checked = check_restart(&with(incoming), &with(None));
            checked.is_err_and(|error| error.to_string().starts_with("it had its disks"))
        };
        let (file, server) = (image.display().to_string(), "nbd://server");
        assert!(is_refused(&file) && is_refused(server));
        let target = store_target(&DiskOptions::new(file.clone()), true, &options(&[], 0)).unwrap();
        let _elsewhere = open_store(&target, ImageLock::default()).unwrap();
        Mark::beside(&folder.path().join("vm.ctl"), false).disks_go().unwrap();
        assert!(!is_refused(&file) && !is_refused(server));
    }

    /// A guest waits at the socket that a killed process left, and another process may be about to lock the image.
    #[test]
    fn what_comes_is_foreseen_without_touching_it() {
        let folder = tempfile::tempdir().unwrap();
        let [socket, image, other] = ["s", "image", "other"].map(|name| folder.path().join(name));
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        for image in [&image, &other] {
            std::fs::File::create(image).unwrap().set_len(1 << 20).unwrap();
        }
        let used = std::fs::File::options().read(true).write(true).open(&other).unwrap();
        remoca_io::lock::lock(&used, false).unwrap();
        let [image, other] = [image, other].map(|image| image.display().to_string());
        let disk = |name: &str, image: &str, socket: &Path| DiskOptions {
            name: Some(name.into()),
            socket: Some(socket.into()),
            ..DiskOptions::new(image.into())
        };
        let with = |more: &[DiskOptions]| {
            let first = disk("a", &image, &folder.path().join("a"));
            Options { disks: [&[first], more].concat(), ..options(&["tcp:a:1"], 1 << 20) }
        };
        let foreseen = |more: DiskOptions| foresee_upgrade(&with(&[more]), &with(&[]), &[("a", &*image)]);
        foreseen(disk("b", &other, &socket)).unwrap();
        assert!(socket.exists(), "nobody has taken its place");
        let nowhere = foreseen(disk("b", "/no/such/image", &socket)).unwrap_err().to_string();
        assert!(nowhere.contains("disk b cannot be added"), "{nowhere}");
        assert!(foreseen(disk("b", &other, Path::new("/no/such/folder/s"))).is_err());
        let _listener = std::os::unix::net::UnixListener::bind(folder.path().join("taken")).unwrap();
        assert!(foreseen(disk("b", &other, &folder.path().join("taken"))).is_err());
    }

    /// The mark at which a killed process sees that its disks came is another one when not all images are files.
    #[test]
    fn a_process_whose_disks_came_gets_no_disk_whose_lock_does_not_reach() {
        let folder = tempfile::tempdir().unwrap();
        let disk = |name: &str, image: String| DiskOptions {
            name: Some(name.into()),
            socket: Some(folder.path().join(name)),
            ..DiskOptions::new(image)
        };
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let image = image.display().to_string();
        let incoming = || Some(Incoming { endpoint: "tcp:b:1".parse().unwrap(), key: None });
        let nowhere = format!("nbd+unix:///?socket={}", folder.path().join("nowhere").display());
        let with = |images: &[(&str, &str)], incoming| {
            let disks = images.iter().map(|(name, image)| disk(name, (*image).into())).collect();
            Options { disks, incoming, ..options(&["tcp:a:1"], 1 << 20) }
        };
        let (one, two) = ([("a", &*image)], [("a", &*image), ("b", &*nowhere)]);
        let other = [("b", &*nowhere), ("c", &*nowhere)];
        let refusal = |options: &Options, former: &Options, running: &[(&str, &str)]| {
            format!("{:#}", check_upgrade(options, former, running).unwrap_err())
        };
        let text = refusal(&with(&two, incoming()), &with(&one, incoming()), &one);
        assert!(text.contains("Take out --incoming with this change"), "{text}");
        for (options, former, running) in [
            (with(&two, None), with(&one, incoming()), &one),
            (with(&two, None), with(&one, None), &one),
            (with(&other, incoming()), with(&other[..1], incoming()), &[other[0]]),
        ] {
            let text = refusal(&options, &former, running);
            assert!(text.contains("cannot be added"), "its server is asked: {text}");
        }
        let mut with_qcow2 = with(&two, None);
        with_qcow2.disks[1].qcow2_image = Some("/b.qcow2".into());
        let text = refusal(&with_qcow2, &with(&one, None), &one);
        assert!(text.contains("the unit remoca-qcow2@vm, which serves /b.qcow2"), "{text}");
    }
}
