//! The settings of one disk: the keys of `--disk KEY=VALUE,...` and of `[[disk]]` in a VM's file, from one list.

use super::schema::unknown;
use remoca_disk::start::{DiskOptions, QUEUES_DEFAULT};
use remoca_store::OnLostConnection;
use std::path::PathBuf;
use toml_edit::Value;

/// One setting of a disk.
pub struct Field {
    pub name: &'static str,
    /// Name of its value in help texts; empty if it is on or off.
    value: &'static str,
    pub doc: &'static str,
    pub set: fn(&mut DiskOptions, &str) -> Result<(), String>,
    /// Function that returns the value as a file has it, or `None` if it is the default.
    pub get: fn(&DiskOptions) -> Option<Value>,
}

/// All settings of a disk.
pub const FIELDS: [Field; 10] = [
    Field {
        name: "name",
        value: "NAME",
        doc: "name of the disk, and its serial number [default: disk0, disk1, ...]",
        set: |disk, name| text(name).map(|name| disk.name = Some(name)),
        get: |disk| disk.name.as_deref().map(Value::from),
    },
    Field {
        name: "image",
        value: "IMAGE",
        doc: "raw file, block device, or NBD URI",
        set: |disk, image| text(image).map(|image| disk.image = image),
        get: |disk| Some(disk.image.as_str().into()),
    },
    Field {
        name: "socket",
        value: "PATH",
        doc: "vhost-user socket that the hypervisor connects to. With --nbd, disks without one are NBD exports",
        set: |disk, path| text(path).map(|path| disk.socket = Some(PathBuf::from(path))),
        get: |disk| disk.socket.as_ref().map(|path| path.display().to_string().into()),
    },
    Field {
        name: "read-only",
        value: "",
        doc: "the guest can only read it",
        set: |disk, value| switch(value).map(|on| disk.read_only = on),
        get: |disk| disk.read_only.then(|| true.into()),
    },
    Field {
        name: "swap",
        value: "",
        doc: "the whole disk is a swap area; areas with a signature are recognised without it",
        set: |disk, value| switch(value).map(|on| disk.swap = on),
        get: |disk| disk.swap.then(|| true.into()),
    },
    Field {
        name: "sector",
        value: "512|4096",
        doc: "unit of the guest's requests, in bytes [default: 512]",
        set: |disk, value| match value {
            "512" | "4096" => {
                disk.sector = if value == "512" { 512 } else { 4096 };
                Ok(())
            }
            _ => Err("must be 512 or 4096".into()),
        },
        get: |disk| (disk.sector != 512).then(|| i64::from(disk.sector).into()),
    },
    Field {
        name: "queues",
        value: "N",
        doc: "maximum number of queues, 1 to 64 [default: 64]",
        set: |disk, count| {
            let queues = count.parse().ok().filter(|queues| (1..=QUEUES_DEFAULT).contains(queues));
            disk.queues =
                queues.ok_or_else(|| format!("`{count}` is not a number of queues: 1 to {QUEUES_DEFAULT}"))?;
            Ok(())
        },
        get: |disk| (disk.queues != QUEUES_DEFAULT).then(|| i64::from(disk.queues).into()),
    },
    Field {
        name: "on-loss",
        value: "continue|fail",
        doc: "for NBD images: a server that comes back may have lost writes that it had not flushed. With `fail` the next flush then \
              fails [default: continue; of a qcow2 image without write-through: fail]",
        set: |disk, value| {
            disk.on_loss = match value {
                "continue" => OnLostConnection::Continue,
                "fail" => OnLostConnection::FailFlush,
                _ => return Err("must be continue or fail".into()),
            };
            Ok(())
        },
        get: |disk| (disk.on_loss == OnLostConnection::FailFlush).then(|| "fail".into()),
    },
    Field {
        name: "write-through",
        value: "",
        doc: "for NBD images: each write is synced, so that nothing can be lost",
        set: |disk, value| switch(value).map(|on| disk.write_through = on),
        get: |disk| disk.write_through.then(|| true.into()),
    },
    Field {
        name: "format",
        value: "raw|qcow2",
        doc: "what the image is. The unit remoca-qcow2@ of the VM serves one that is qcow2",
        set: |disk, value| {
            (disk.is_raw, disk.is_qcow2) = match value {
                "raw" => (true, false),
                // What qemu-nbd serves is raw.
                "qcow2" => (true, true),
                _ => return Err("must be raw or qcow2; qemu-nbd can serve other formats (docs/guests.md)".into()),
            };
            Ok(())
        },
        get: |disk| Some(if disk.is_qcow2 { "qcow2" } else { "raw" }.into()),
    },
];

/// Keys that every disk in a file has, and why.
pub const REQUIRED: [(&str, &str); 3] = [
    ("name", "by its name it is found when disks come and go"),
    ("image", "say which file, block device or NBD URI it is"),
    ("format", "say format = \"raw\" if the image is raw, or \"qcow2\"; docs/guests.md has the others"),
];

/// Returns the help text of `--disk`.
pub fn help() -> String {
    let form = |field: &Field| match field.value {
        "" => format!("{}: {}", field.name, field.doc),
        value => format!("{}={value}: {}", field.name, field.doc),
    };
    let fields: Vec<_> = FIELDS.iter().map(form).collect();
    format!("A disk; may be repeated. Its keys: {}", fields.join("; "))
}

/// Parses `KEY=VALUE,...`. A key without a value is on.
///
/// # Errors
/// If a key is unknown or given twice, a value is wrong, or there is no image.
pub fn parse(words: &str) -> Result<DiskOptions, String> {
    let mut disk = DiskOptions::new(String::new());
    let mut given = Vec::new();
    for word in words.split(',') {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let Some(field) = FIELDS.iter().find(|field| field.name == key) else {
            return Err(unknown(key, FIELDS.iter().map(|field| field.name)));
        };
        if given.contains(&key) {
            return Err(format!("{key} is given twice: say it once, and give another disk a --disk of its own"));
        }
        given.push(key);
        (field.set)(&mut disk, value).map_err(|error| format!("{key}: {error}"))?;
    }
    match disk.image.as_str() {
        "" => Err("a disk needs image=IMAGE".into()),
        _ => Ok(disk),
    }
}

fn text(value: &str) -> Result<String, String> {
    if value.is_empty() { Err("must not be empty".into()) } else { Ok(value.to_owned()) }
}

fn switch(value: &str) -> Result<bool, String> {
    match value {
        "" | "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err("must be on or off".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_limits_are_told() {
        let disk = DiskOptions::new(String::new());
        let is_told = |name: &str, words: &str| {
            let field = FIELDS.iter().find(|field| field.name == name).unwrap();
            assert!(field.doc.contains(words), "{name} has no `{words}`: {}", field.doc);
        };
        is_told("sector", &format!("[default: {}]", disk.sector));
        is_told("queues", &format!("1 to {QUEUES_DEFAULT} [default: {}]", disk.queues));
        assert_eq!(disk.on_loss, OnLostConnection::Continue);
        is_told("on-loss", "[default: continue;");
    }

    #[test]
    fn disks_are_described_by_keys() {
        let disk = parse("image=/a,socket=/b,read-only,swap,sector=4096,name=root,queues=2").unwrap();
        assert_eq!((disk.image.as_str(), disk.read_only, disk.swap, disk.queues), ("/a", true, true, 2));
        assert_eq!((disk.sector, disk.name.as_deref()), (4096, Some("root")));
        let disk = parse("image=nbd://host,on-loss=fail,write-through").unwrap();
        assert_eq!((disk.on_loss, disk.write_through), (OnLostConnection::FailFlush, true));
        for bad in ["", "image=/a,on-loss=hope", "socket=/b", "image=/a,socket=/b,x=1", "image=/a,socket=/b,sector=520"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
