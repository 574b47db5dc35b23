//! The keys of the configuration's files, for the manual page: each with the help text of its flag.

use crate::settings::fields::FIELDS;
use crate::settings::schema::{self, Schema};
use crate::{disk, host, memory, serve};

/// Returns sections of a manual page with every key.
pub fn manual() -> String {
    let mut text = keys("KEYS OF vms/NAME.toml", &disk::schema().of_vm());
    text += ".SH KEYS OF [[disk]] IN vms/NAME.toml\n";
    FIELDS.iter().for_each(|field| text += &entry(field.name, field.doc));
    text += &keys("KEYS OF [vms] IN remoca.toml", &disk::schema());
    text += &keys("KEYS OF [memory] IN BOTH", &memory::schema().of_vm());
    text += &keys("KEYS OF [serve] IN remoca.toml", &serve::schema());
    text + &keys("KEYS OF [host] IN remoca.toml", &host::schema())
}

fn keys(title: &str, schema: &Schema) -> String {
    let mut text = format!(".SH {title}\n");
    for arg in schema.keys().filter(|arg| arg.get_long() != Some("disk")) {
        let value = match arg.get_value_names().and_then(|names| names.first()) {
            _ if schema::is_switch(arg) => "true|false".to_owned(),
            Some(name) if schema::is_list(arg) => format!("[{name}, ...]"),
            name => name.map(ToString::to_string).unwrap_or_default(),
        };
        let default: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let is_shown = !default.is_empty() && !schema::is_switch(arg);
        let default = if is_shown { format!(" [default: {}]", default.join(", ")) } else { String::new() };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        text += &entry(&format!("{} = {value}", arg.get_long().unwrap_or_default()), &format!("{help}{default}"));
    }
    text
}

fn entry(head: &str, text: &str) -> String {
    let plain = |text: &str| text.replace('\\', "\\e").replace('-', "\\-").replace('\n', " ");
    format!(".TP\n\\fB{}\\fR\n\\&{}\n", plain(head), plain(text))
}
