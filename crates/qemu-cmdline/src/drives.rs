//! Finds the disks of a command line that the guest can write to, and rewrites the line so that a
//! disk server of Keyframe serves each of them.
//!
//! ```text
//!   user's   -drive file=a.qcow2,id=d,if=none,cache=none     -hda b.img       -blockdev qcow2,node-name=n,file=f ...
//!   run      -drive format=raw,file.driver=nbd,file.export=d,id=d,if=none      -blockdev driver=nbd,node-name=n,...
//! ```
//!
//! Invariants: the guest sees the disk of the user's line (device, address, id, serial, write cache).
//! A disk that cannot be served is refused with reason and fix. The audit finds a disk that this
//! module does not find.
//!
//! Not handled here: opening images, and guessing a format that the line does not name.

use crate::options::{self, Argument, is_on, value_of};
use crate::{CommandLineError, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A disk that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Id or node name; a made-up name that is unique in the line if it has neither.
    pub name: String,
    /// The image, as the line names it.
    pub image: PathBuf,
    /// Image format, if the line names it.
    pub format: Option<String>,
    /// True if the line discards the guest's writes at the end (`-snapshot`).
    pub temporary: bool,
    /// True if `image` is the address of an NBD export. Only QEMU can read it.
    pub remote: bool,
}

/// A server of disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskServer {
    /// The server's unix socket.
    pub socket: PathBuf,
    /// Prefix of each export's name; the disk's name follows.
    pub prefix: String,
}

/// Keys of `-drive` that tell how QEMU opens the image. They have no meaning for a served disk.
const OPENING: &[&str] = &[
    "file",
    "format",
    "driver",
    "aio",
    "snapshot",
    "cache",
    "cache.direct",
    "auto-read-only",
    "force-share",
    "lazy-refcounts",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
    "discard-no-unref",
    "read-only",
    "readonly",
];
const OPENING_PREFIXES: &[&str] = &["file.", "pass-discard-", "overlap-check"];

/// Keys of `-drive` that the guest sees, or that hold for any image.
const KEPT: &[&str] = &[
    "if",
    "id",
    "index",
    "bus",
    "unit",
    "media",
    "werror",
    "rerror",
    "detect-zeroes",
    "discard",
    "copy-on-read",
    "cache.writeback",
    "cache.no-flush",
    "node-name",
    "group",
];
const KEPT_PREFIXES: &[&str] = &["throttling", "bps", "iops", "stats-"];

/// Node drivers above a disk, which hold no data.
const FILTERS: &[&str] =
    &["throttle", "copy-on-read", "blkdebug", "blklogwrites", "blkverify", "compress"];

/// What happens to an argument.
enum Fate {
    Kept,
    Removed,
    /// Served, with these keys kept.
    Served(Drive, Keys),
}

type Keys = Vec<(String, String)>;

/// The disks of a line that the guest can write to.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn drives(arguments: &[Argument]) -> Result<Vec<Drive>> {
    let fates = fates(arguments)?;
    Ok(fates
        .into_iter()
        .filter_map(|fate| match fate {
            Fate::Served(drive, _) => Some(drive),
            _ => None,
        })
        .collect())
}

/// The line with its writable disks served by `server`.
///
/// Error: [`CommandLineError::Argument`] for a disk that cannot be served.
pub fn rewrite_drives(arguments: &[Argument], server: &DiskServer) -> Result<Vec<Argument>> {
    let mut line = Vec::with_capacity(arguments.len());
    for (argument, fate) in arguments.iter().zip(fates(arguments)?) {
        match fate {
            Fate::Kept => line.push(argument.clone()),
            Fate::Removed => {}
            Fate::Served(drive, kept) => line.push(served(argument, &drive, kept, server)?),
        }
    }
    Ok(line)
}

fn served(argument: &Argument, drive: &Drive, kept: Keys, server: &DiskServer) -> Result<Argument> {
    let is_node = argument.name() == "blockdev";
    let (option, prefix) = if is_node { ("blockdev", "") } else { ("drive", "file.") };
    let mut keys: Keys = Vec::new();
    if !is_node {
        keys.push(("format".into(), "raw".into()));
    }
    keys.extend(export_keys(prefix, server, &drive.name)?);
    if value_of(&kept, "discard").is_none() {
        // The overlay learns which blocks the guest discards.
        keys.push(("discard".into(), "unmap".into()));
    }
    keys.extend(kept);
    Ok(Argument::Option(option.into(), options::joined(&keys)))
}

/// Keys, each with `prefix` before it, that lead to the export for `name` at `server`.
pub(crate) fn export_keys(prefix: &str, server: &DiskServer, name: &str) -> Result<Keys> {
    let socket = server.socket.to_str().ok_or_else(|| CommandLineError::Argument {
        argument: server.socket.display().to_string(),
        reason: "the path of the disks' socket is not UTF-8".into(),
        fix: "choose another run directory".into(),
    })?;
    let export = format!("{}{name}", server.prefix);
    let keys =
        [("driver", "nbd"), ("server.type", "unix"), ("server.path", socket), ("export", &export)];
    Ok(keys.map(|(key, value)| (format!("{prefix}{key}"), value.into())).to_vec())
}

fn fates(arguments: &[Argument]) -> Result<Vec<Fate>> {
    let snapshot = arguments.iter().any(|a| a.name() == "snapshot");
    let nodes = Nodes::of(arguments)?;
    let mut names = Names::default();
    let mut fates = Vec::with_capacity(arguments.len());
    for (at, argument) in arguments.iter().enumerate() {
        fates.push(match (argument, argument.name()) {
            (Argument::Image(path), _) => on_index(path, 0, snapshot, &mut names),
            (_, name @ ("hda" | "hdb" | "hdc" | "hdd")) => {
                let index = name.bytes().last().map_or(0, |letter| letter - b'a');
                on_index(argument.value(), index, snapshot, &mut names)
            }
            (_, "drive") => of_drive(argument, snapshot, &mut names)?,
            (_, "blockdev") => nodes.fate(at, argument)?,
            // It would put an overlay of QEMU above the served disk.
            (_, "snapshot") => Fate::Removed,
            _ => Fate::Kept,
        });
    }
    Ok(fates)
}

/// Makes up names of drives.
#[derive(Default)]
struct Names(BTreeMap<String, u32>);

impl Names {
    fn made_up(&mut self, kind: &str) -> String {
        let count = self.0.entry(kind.into()).or_default();
        *count += 1;
        format!("{kind}-{}", *count - 1)
    }
}

/// A disk given by its index only (`-hda`, or a bare image).
fn on_index(path: &str, index: u8, temporary: bool, names: &mut Names) -> Fate {
    let name = names.made_up("hd");
    let drive = Drive { name, image: path.into(), format: None, temporary, remote: false };
    Fate::Served(drive, vec![("index".into(), index.to_string()), ("media".into(), "disk".into())])
}

fn of_drive(argument: &Argument, snapshot: bool, names: &mut Names) -> Result<Fate> {
    let mut keys = options::keys(argument.value(), "file");
    if is_read_only_drive(&keys) {
        return Ok(Fate::Kept);
    }
    let file = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
    let remote = value_of(&keys, "file.driver") == Some(NBD);
    let image = match file.filter(|file| !file.is_empty()) {
        _ if remote => address(&keys, "file."),
        None => return Ok(Fate::Kept),
        Some(file) => local(argument, file)?,
    };
    if let Some(protocol) = value_of(&keys, "file.driver").filter(|d| !remote && !is_local(d)) {
        return Err(foreign(argument, protocol));
    }
    let temporary = snapshot || is_on(&keys, "snapshot");
    let format = value_of(&keys, "format").or_else(|| value_of(&keys, "driver")).map(str::to_owned);
    if let Some(writeback) = cache(argument, &keys)? {
        keys.extend(writeback);
    }
    let id = value_of(&keys, "id").or_else(|| value_of(&keys, "node-name")).map(str::to_owned);
    let kind = value_of(&keys, "if").unwrap_or("drive").to_owned();
    let mut kept = Vec::new();
    for (key, value) in keys {
        if is_one_of(&key, KEPT, KEPT_PREFIXES) {
            kept.push((key, value));
        } else if !is_one_of(&key, OPENING, OPENING_PREFIXES) {
            return Err(unknown(argument, &key));
        }
    }
    let name = id.unwrap_or_else(|| names.made_up(&kind));
    Ok(Fate::Served(Drive { name, image, format, temporary, remote }, kept))
}

/// True if the guest can only read the medium of a `-drive` with these keys.
pub(crate) fn is_read_only_drive(keys: &Keys) -> bool {
    is_read_only(keys) || value_of(keys, "media") == Some("cdrom")
}

/// True if a drive or a node is declared read-only. Drives have both words, nodes the second.
pub(crate) fn is_read_only(keys: &Keys) -> bool {
    is_on(keys, "readonly") || is_on(keys, "read-only")
}

pub(crate) fn is_one_of(key: &str, whole: &[&str], prefixes: &[&str]) -> bool {
    whole.contains(&key) || prefixes.iter().any(|prefix| key.starts_with(prefix))
}

/// The keys that `cache=` stands for and that the guest sees.
fn cache(argument: &Argument, keys: &Keys) -> Result<Option<Keys>> {
    let Some(mode) = value_of(keys, "cache") else { return Ok(None) };
    let (writeback, no_flush) = match mode {
        "none" | "off" | "writeback" => ("on", "off"),
        "directsync" | "writethrough" => ("off", "off"),
        "unsafe" => ("on", "on"),
        _ => return Err(unknown(argument, &format!("cache={mode}"))),
    };
    Ok(Some(vec![
        ("cache.writeback".into(), writeback.into()),
        ("cache.no-flush".into(), no_flush.into()),
    ]))
}

/// The driver of exports that QEMU reaches by NBD.
const NBD: &str = "nbd";

/// Address of the export that the keys with `prefix` lead to, in QEMU's form.
fn address(keys: &Keys, prefix: &str) -> PathBuf {
    let of = |key: &str| value_of(keys, &format!("{prefix}{key}")).unwrap_or_default();
    let export = of("export");
    match (of("server.path"), of("path")) {
        ("", "") => format!("nbd://{}:{}/{export}", of("server.host"), of("server.port")).into(),
        ("", path) | (path, _) => format!("nbd+unix:///{export}?socket={path}").into(),
    }
}

fn is_local(driver: &str) -> bool {
    matches!(driver, "file" | "host_device")
}

/// The path that `file=` names.
///
/// Error: [`CommandLineError::Argument`] if it names a protocol instead.
fn local(argument: &Argument, file: &str) -> Result<PathBuf> {
    let protocol =
        || file.strip_prefix("file:").unwrap_or(file).split(':').next().unwrap_or_default();
    path_of(file).ok_or_else(|| foreign(argument, protocol()))
}

/// The path that `file=` names; `None` if it names a protocol.
pub(crate) fn path_of(file: &str) -> Option<PathBuf> {
    let path = file.strip_prefix("file:").unwrap_or(file);
    let is_foreign = path.split_once(':').is_some_and(|(protocol, _)| !protocol.contains('/'));
    (!is_foreign).then(|| path.into())
}

fn foreign(argument: &Argument, protocol: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, which QEMU reaches by {protocol}; Keyframe serves image \
             files (raw or qcow2) and block devices"
        ),
        fix: "copy it to a file (qemu-img convert), or make the drive read-only (readonly=on)"
            .into(),
    }
}

fn unknown(argument: &Argument, key: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, which Keyframe would serve, and Keyframe does not know the \
             key {key}"
        ),
        fix: format!("remove {key}, or make the drive read-only (readonly=on)"),
    }
}

/// The nodes of all `-blockdev`, by index of the argument.
struct Nodes {
    nodes: BTreeMap<usize, Keys>,
}

impl Nodes {
    fn of(arguments: &[Argument]) -> Result<Self> {
        let mut nodes = BTreeMap::new();
        for (at, argument) in arguments.iter().enumerate().filter(|(_, a)| a.name() == "blockdev") {
            let keys = flat(argument.value()).ok_or_else(|| CommandLineError::Argument {
                argument: argument.display(),
                reason: "its value begins like JSON and is malformed".into(),
                fix: "correct it; QEMU refuses it too".into(),
            })?;
            nodes.insert(at, keys);
        }
        Ok(Self { nodes })
    }

    fn named(&self, name: &str) -> Option<&Keys> {
        self.nodes.values().find(|keys| value_of(keys, "node-name") == Some(name))
    }

    /// True if a format node has the node `name` as its file.
    fn is_file_of_another(&self, name: &str) -> bool {
        self.nodes.values().any(|keys| {
            value_of(keys, "file") == Some(name)
                && matches!(value_of(keys, "driver"), Some("raw" | "qcow2"))
        })
    }

    /// True if each format node over `name` is read-only.
    fn has_only_read_only_users(&self, name: &str) -> bool {
        self.nodes.values().filter(|keys| value_of(keys, "file") == Some(name)).all(is_read_only)
    }

    fn fate(&self, at: usize, argument: &Argument) -> Result<Fate> {
        let Some(keys) = self.nodes.get(&at) else { return Ok(Fate::Kept) };
        let driver = value_of(keys, "driver").unwrap_or_default();
        let name = value_of(keys, "node-name").unwrap_or_default();
        if is_read_only(keys) || FILTERS.contains(&driver) {
            return Ok(Fate::Kept);
        }
        let (protocol, image) = match driver {
            "raw" | "qcow2" => match value_of(keys, "file") {
                Some(below) => {
                    let below = self.named(below).ok_or_else(|| CommandLineError::Argument {
                        argument: argument.display(),
                        reason: format!("no -blockdev of the line has the node name {below}"),
                        fix: "define it with -blockdev too".into(),
                    })?;
                    (value_of(below, "driver"), image_of(below, ""))
                }
                None => (value_of(keys, "file.driver"), image_of(keys, "file.")),
            },
            _ if (is_local(driver) || driver == NBD) && self.is_file_of_another(name) => {
                return Ok(if self.has_only_read_only_users(name) {
                    Fate::Kept
                } else {
                    Fate::Removed
                });
            }
            other => (Some(other), image_of(keys, "")),
        };
        let protocol = protocol.unwrap_or_default();
        let remote = protocol == NBD;
        let Some(image) = image.filter(|_| remote || is_local(protocol)) else {
            return Err(foreign(argument, protocol));
        };
        let kept = node_keys(argument, keys)?;
        let format = if matches!(driver, "raw" | "qcow2") { driver } else { "raw" };
        let format = Some(format.to_owned());
        Ok(Fate::Served(Drive { name: name.into(), image, format, temporary: false, remote }, kept))
    }
}

/// The file that a node's keys with `prefix` name, or the address of its export.
fn image_of(keys: &Keys, prefix: &str) -> Option<PathBuf> {
    if value_of(keys, &format!("{prefix}driver")) == Some(NBD) {
        return Some(address(keys, prefix));
    }
    value_of(keys, &format!("{prefix}filename")).map(PathBuf::from)
}

/// The keys of a node that are kept.
///
/// Error: [`CommandLineError::Argument`] for an unknown key.
fn node_keys(argument: &Argument, keys: &Keys) -> Result<Keys> {
    const NODE_KEPT: &[&str] = &["node-name", "discard", "detect-zeroes", "cache.no-flush"];
    const NODE_OPENING: &[&str] = &[
        "filename",
        "locking",
        "drop-cache",
        "aio-max-batch",
        "pr-manager",
        "x-check-cache-dropped",
    ];
    const EXPORT: &[&str] =
        &["export", "path", "reconnect-delay", "open-timeout", "tls-creds", "tls-hostname"];
    let is_export = value_of(keys, "driver") == Some(NBD);
    let opens_export = |key: &str| is_export && is_one_of(key, EXPORT, &["server."]);
    let mut kept = Vec::new();
    for (key, value) in keys {
        if NODE_KEPT.contains(&key.as_str()) {
            kept.push((key.clone(), value.clone()));
        } else if !is_one_of(key, OPENING, OPENING_PREFIXES)
            && !NODE_OPENING.contains(&key.as_str())
            && !opens_export(key)
        {
            return Err(unknown(argument, key));
        }
    }
    Ok(kept)
}

/// Keys and values of a `-blockdev`, nested ones as `a.b`. `None` for malformed JSON.
fn flat(value: &str) -> Option<Keys> {
    use serde_json::Value;
    fn add(prefix: &str, value: Value, keys: &mut Keys) {
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    let key = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
                    add(&key, value, keys);
                }
            }
            Value::String(text) => keys.push((prefix.into(), text)),
            Value::Bool(on) => keys.push((prefix.into(), if on { "on" } else { "off" }.into())),
            other => keys.push((prefix.into(), other.to_string())),
        }
    }
    if !value.trim_start().starts_with('{') {
        return Some(options::keys(value, "driver"));
    }
    // serde_json bounds the depth.
    let object: Value = serde_json::from_str(value).ok()?;
    let mut keys = Keys::new();
    add("", object, &mut keys);
    Some(keys)
}

/// True if `file`, QEMU's description of an open image, is served at `socket`.
pub fn is_served(file: &str, socket: &Path) -> bool {
    let text = socket.to_string_lossy();
    file.contains(&*text) || file.contains(&text.replace('/', "%2F"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(words: &[&str]) -> Vec<Argument> {
        options::parse(&words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    fn server() -> DiskServer {
        DiskServer { socket: "/run/d.sock".into(), prefix: "a/".into() }
    }

    fn rewritten(words: &[&str]) -> String {
        let words: Vec<String> = rewrite_drives(&line(words), &server())
            .unwrap()
            .iter()
            .flat_map(Argument::words)
            .collect();
        words.join(" ")
    }

    #[test]
    fn a_drive_keeps_the_keys_that_the_guest_sees() {
        let text =
            rewritten(&["-drive", "file=a,,b.img,format=qcow2,if=none,id=d,cache=none,aio=native"]);
        assert_eq!(
            text,
            "-drive format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/d.sock,file.export=a/d,\
             discard=unmap,if=none,id=d,cache.writeback=on,cache.no-flush=off"
        );
        let drive = &drives(&line(&["-drive", "file=a,,b.img,format=qcow2,id=d"])).unwrap()[0];
        assert_eq!((drive.name.as_str(), drive.image.to_str()), ("d", Some("a,b.img")));
        assert_eq!(drive.format.as_deref(), Some("qcow2"));
        assert!(
            rewritten(&["-drive", "file=a,cache=writethrough"]).contains("cache.writeback=off")
        );
    }

    #[test]
    fn images_without_a_drive_get_one_at_their_index() {
        assert!(rewritten(&["-m", "64", "a.img"]).contains("index=0,media=disk"));
        let text = rewritten(&["-hdc", "a.img", "-hda", "b.img"]);
        assert!(text.contains("export=a/hd-0") && text.contains("index=2,media=disk"), "{text}");
        assert!(text.contains("export=a/hd-1"), "{text}");
    }

    #[test]
    fn nodes_are_served_in_each_of_their_forms() {
        let two = [
            "-blockdev",
            "driver=file,node-name=f,filename=a",
            "-blockdev",
            "qcow2,node-name=n,file=f",
        ];
        let nbd = "-blockdev driver=nbd,server.type=unix,server.path=/run/d.sock,export=a/n,discard=unmap,node-name=n";
        assert_eq!(rewritten(&two), nbd);
        let json = r#"{"driver":"raw","node-name":"n","file":{"driver":"file","filename":"a"}}"#;
        assert_eq!(rewritten(&["-blockdev", json]), nbd);
        assert_eq!(rewritten(&["-blockdev", "file,node-name=n,filename=a"]), nbd);
        assert_eq!(drives(&line(&["-blockdev", json])).unwrap()[0].format.as_deref(), Some("raw"));
    }

    #[test]
    fn read_only_and_empty_drives_are_kept() {
        for words in [
            &["-drive", "file=a,readonly=on"][..],
            &["-drive", "file=a,readonly=yes"],
            &["-drive", "file=a,media=cdrom"],
            &["-drive", "if=floppy"],
            &["-cdrom", "a"],
            &["-blockdev", "raw,node-name=n,read-only=on,file.driver=file,file.filename=a"],
        ] {
            assert_eq!(rewritten(words), words.join(" "));
            assert_eq!(drives(&line(words)).unwrap(), []);
        }
    }

    #[test]
    fn a_snapshot_is_an_overlay_that_is_thrown_away() {
        for words in
            [&["-snapshot", "-drive", "file=a,id=d"][..], &["-drive", "file=a,id=d,snapshot=y"]]
        {
            assert!(!rewritten(words).contains("snapshot"));
            assert!(drives(&line(words)).unwrap()[0].temporary);
        }
    }

    #[test]
    fn exports_that_qemu_reaches_are_disks_too() {
        let served = "-drive format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/a.sock,file.export=d,id=d";
        let node =
            "-blockdev driver=nbd,server.type=unix,server.path=/run/a.sock,export=n,node-name=n";
        let json = r#"{"driver":"raw","node-name":"n","file":{"driver":"nbd","server":{"type":"inet","host":"h","port":"9"}}}"#;
        let below = [
            "-blockdev",
            "nbd,node-name=f,path=/run/a.sock",
            "-blockdev",
            "raw,node-name=n,file=f",
        ];
        let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
        for (line_words, name, image) in [
            (words(served), "d", "nbd+unix:///d?socket=/run/a.sock"),
            (words(node), "n", "nbd+unix:///n?socket=/run/a.sock"),
            (vec!["-blockdev", json], "n", "nbd://h:9/"),
            (below.to_vec(), "n", "nbd+unix:///?socket=/run/a.sock"),
        ] {
            let found = drives(&line(&line_words)).unwrap();
            assert_eq!(found.len(), 1, "{line_words:?}");
            assert!(found[0].remote && found[0].name == name, "{found:?}");
            assert_eq!(found[0].image, PathBuf::from(image));
            let text = rewritten(&line_words);
            assert!(text.contains("server.path=/run/d.sock") && !text.contains("a.sock"), "{text}");
        }
    }

    #[test]
    fn disks_that_cannot_be_served_are_refused_with_a_fix() {
        for words in [
            &["-drive", "file=fat:rw:/tmp,id=d"][..],
            &["-drive", "file=nbd://host/x"],
            &["-drive", "file=json:{},if=virtio"],
            &["-drive", "file=a,encrypt.key-secret=s"],
            &["-drive", "file=a,offset=512"],
            &["-blockdev", "driver=rbd,node-name=n,pool=p,image=i"],
            &["-blockdev", "driver=qcow2,node-name=n,file=gone"],
            &["-blockdev", "driver=qcow2,node-name=n,backing=b,file.driver=file,file.filename=a"],
            &["-blockdev", "{"],
        ] {
            let error = drives(&line(words)).unwrap_err();
            assert!(error.fix().is_some(), "{words:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_line_panics(values in prop::collection::vec("(file=|id=|if=|a|,|=|\\{|\\}|\"|driver|:|raw){0,8}", 0..5)) {
            let words: Vec<String> = values.into_iter().flat_map(|v| ["-drive".into(), v.clone(), "-blockdev".into(), v]).collect();
            if let Ok(arguments) = options::parse(&words) {
                let _ = rewrite_drives(&arguments, &server());
            }
        }
    }
}
