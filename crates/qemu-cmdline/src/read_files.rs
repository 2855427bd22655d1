//! Finds the files of a command line that QEMU only reads: kernel, firmware, CDs, read-only disks.
//!
//! Not found: files that QEMU looks for in its own directories (`-bios` without a path is looked
//! for in the VM's directory alone), and those of a `-readconfig`.

use crate::drives::{DriveKeys, flattened_keys, is_read_only_drive, path_of};
use crate::options::{self, Argument, is_on, value_of};

/// A file that a command line names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedFile {
    /// The option, with its dash.
    pub option: String,
    /// The path, as the command line names it.
    pub path: String,
    /// The image format, if the command line names it.
    pub format: Option<String>,
    /// True if the guest reads it while it runs.
    pub is_medium: bool,
    /// True if the command line says which images lie beneath it, so that its header does not.
    pub has_own_layers: bool,
}

/// Returns the files of a command line that QEMU only reads. `words` begins with the binary.
/// Returns none if the line cannot be parsed.
pub fn named_files(words: &[String]) -> Vec<NamedFile> {
    let Ok(line) = options::parse(words.get(1..).unwrap_or_default()) else { return Vec::new() };
    let mut files: Vec<NamedFile> = line.iter().flat_map(of_argument).collect();
    files.extend(of_nodes(&line));
    files
}

fn of_argument(argument: &Argument) -> Vec<NamedFile> {
    let value = argument.value();
    let option = format!("-{}", argument.name());
    let read = |path: &str| NamedFile {
        option: option.clone(),
        path: path.into(),
        format: None,
        is_medium: false,
        has_own_layers: false,
    };
    match argument.name() {
        "kernel" | "initrd" | "dtb" | "bios" if !value.is_empty() => vec![read(value)],
        "fw_cfg" | "smbios" => {
            let keys = options::keys(value, if argument.name() == "fw_cfg" { "name" } else { "" });
            value_of(&keys, "file").map(read).into_iter().collect()
        }
        "acpitable" => {
            let keys = options::keys(value, "");
            let files = ["file", "data"].iter().filter_map(|key| value_of(&keys, key));
            files.flat_map(|files| files.split(':')).map(read).collect()
        }
        "option-rom" => {
            let keys = options::keys(value, "romfile");
            value_of(&keys, "romfile").map(read).into_iter().collect()
        }
        "device" => {
            let keys = options::properties(value, "driver").unwrap_or_default();
            let is_loader = matches!(value_of(&keys, "driver"), Some("loader" | "guest-loader"));
            let loaded = value_of(&keys, "file").filter(|_| is_loader);
            let files = value_of(&keys, "romfile").into_iter().chain(loaded);
            files.filter(|path| !path.is_empty()).map(read).collect()
        }
        "cdrom" => path_of(value)
            .map(|path| NamedFile { is_medium: true, ..read(&path.to_string_lossy()) })
            .into_iter()
            .collect(),
        "drive" => drive(argument, &read).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn drive(argument: &Argument, read: &dyn Fn(&str) -> NamedFile) -> Option<NamedFile> {
    let keys = options::keys(argument.value(), "file");
    if !is_read_only_drive(&keys) {
        return None;
    }
    let image = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
    let path = path_of(image.filter(|image| !image.is_empty())?)?;
    let format = value_of(&keys, "format").or_else(|| value_of(&keys, "driver"));
    // A flash chip's content is in a RAM block.
    let is_medium = value_of(&keys, "if") != Some("pflash");
    let format = format.map(str::to_owned);
    let has_own_layers = has_own_layers(&keys);
    Some(NamedFile { format, is_medium, has_own_layers, ..read(&path.to_string_lossy()) })
}

/// True if the keys of a drive or node name the images beneath it.
fn has_own_layers(keys: &[(String, String)]) -> bool {
    let names = |key: &str| key.split('.').any(|part| matches!(part, "backing" | "data-file"));
    keys.iter().any(|(key, _)| names(key))
}

/// The files of `-blockdev` that no node may write to.
fn of_nodes(line: &[Argument]) -> Vec<NamedFile> {
    let nodes = line.iter().filter(|argument| argument.name() == "blockdev");
    let nodes: Vec<_> = nodes.filter_map(|argument| flattened_keys(argument.value())).collect();
    let name = |keys: &DriveKeys, key: &str| value_of(keys, key).map(str::to_owned);
    let mut files = Vec::new();
    for keys in &nodes {
        let own = name(keys, "node-name");
        let mut users = nodes.iter().filter(|user| own.is_some() && name(user, "file") == own);
        let format = users.clone().find_map(|user| name(user, "driver"));
        let read_only = is_on(keys, "read-only")
            || users.clone().next().is_some() && users.all(|user| is_on(user, "read-only"));
        let path = value_of(keys, "filename").or_else(|| value_of(keys, "file.filename"));
        let Some(path) = path.filter(|_| read_only) else { continue };
        let driver = name(keys, "driver").filter(|driver| driver != "file");
        let users = nodes.iter().filter(|user| own.is_some() && name(user, "file") == own);
        let has_own_layers =
            has_own_layers(keys) || users.into_iter().any(|user| has_own_layers(user));
        files.push(NamedFile {
            option: "-blockdev".into(),
            path: path.into(),
            format: format.or(driver),
            is_medium: true,
            has_own_layers,
        });
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> Vec<(String, String, bool)> {
        let words: Vec<_> = format!("q {line}").split_whitespace().map(str::to_owned).collect();
        named_files(&words).into_iter().map(|f| (f.option, f.path, f.is_medium)).collect()
    }

    #[test]
    fn files_that_are_only_read_are_found() {
        let file =
            |option: &str, path: &str, medium| vec![(option.to_owned(), path.to_owned(), medium)];
        for (line, expected) in [
            ("-kernel /k", file("-kernel", "/k", false)),
            ("-fw_cfg name=opt/x,file=/f", file("-fw_cfg", "/f", false)),
            ("-fw_cfg opt/x,string=s", vec![]),
            ("-acpitable file=/a", file("-acpitable", "/a", false)),
            ("-device e1000,romfile=/r", file("-device", "/r", false)),
            ("-device e1000,romfile=", vec![]),
            ("-device loader,file=/l,addr=0", file("-device", "/l", false)),
            ("-cdrom c.iso", file("-cdrom", "c.iso", true)),
            ("-drive file=/d,readonly=on", file("-drive", "/d", true)),
            ("-drive file=/d,media=cdrom", file("-drive", "/d", true)),
            ("-drive file=/d,if=pflash,readonly=on", file("-drive", "/d", false)),
            ("-drive file=/d", vec![]),
            ("-drive file=nbd://h/e,readonly=on", vec![]),
            (
                "-blockdev driver=raw,node-name=d,read-only=on,file.driver=file,file.filename=/d",
                file("-blockdev", "/d", true),
            ),
            (
                r#"-blockdev {"driver":"file","filename":"/d","node-name":"s"} -blockdev {"driver":"qcow2","node-name":"f","file":"s","read-only":true}"#,
                file("-blockdev", "/d", true),
            ),
            (
                "-blockdev driver=file,filename=/d,node-name=s -blockdev driver=raw,node-name=f,file=s",
                vec![],
            ),
        ] {
            assert_eq!(found(line), expected, "{line}");
        }
    }
}
