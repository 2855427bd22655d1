//! The disks of a line that the guest can write to, and the line with each of them served by a
//! server of ours.
//!
//! ```text
//!   user's   -drive file=a.qcow2,id=d,if=none,cache=none     -hda b.img       -blockdev qcow2,node-name=n,file=f ...
//!   run      -drive format=raw,file.driver=nbd,file.export=d,id=d,if=none      -blockdev driver=nbd,node-name=n,...
//! ```
//!
//! Invariants: what the guest sees (device, address, id, serial, write cache) is what the user's
//! line makes. A disk that cannot be served is refused, with cause and fix; one that this module
//! does not find is found by the audit.
//!
//! Left out: opening images, and guessing a format that was not given.

use crate::options::{self, Argument, is_on, value_of};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A disk that the guest can write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Its id or node name; made up, but unique in the line, where it has none.
    pub name: String,
    /// The image, as the line names it.
    pub image: PathBuf,
    /// Its format, where the line says so.
    pub format: Option<String>,
    /// The line wants what is written thrown away at the end (`-snapshot`).
    pub temporary: bool,
    /// It is no file but an export that QEMU reaches by NBD, and `image` is its address: QEMU alone
    /// can read it.
    pub remote: bool,
}

/// Who serves the disks of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskServer {
    /// Its unix socket.
    pub socket: PathBuf,
    /// What the name of each export begins with; the disk's name follows.
    pub prefix: String,
}

/// Keys of `-drive` that say how the image is opened, and say nothing where it is not opened by
/// QEMU.
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

/// Keys of `-drive` that the guest sees or that stay right over any image.
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

/// Node drivers that stand above a disk and hold none themselves.
const FILTERS: &[&str] =
    &["throttle", "copy-on-read", "blkdebug", "blklogwrites", "blkverify", "compress"];

/// What becomes of an argument.
enum Fate {
    Stays,
    Goes,
    Served(Drive, Keys),
}

type Keys = Vec<(String, String)>;

/// The disks of a line that the guest can write to.
///
/// Error: [`Error::CommandLine`] for one that cannot be served.
pub fn find(arguments: &[Argument]) -> Result<Vec<Drive>> {
    let fates = fates(arguments)?;
    Ok(fates
        .into_iter()
        .filter_map(|fate| match fate {
            Fate::Served(drive, _) => Some(drive),
            _ => None,
        })
        .collect())
}

/// The line with its disks served by `server`.
pub fn rewrite(arguments: &[Argument], server: &DiskServer) -> Result<Vec<Argument>> {
    let mut line = Vec::with_capacity(arguments.len());
    for (argument, fate) in arguments.iter().zip(fates(arguments)?) {
        match fate {
            Fate::Stays => line.push(argument.clone()),
            Fate::Goes => {}
            Fate::Served(drive, kept) => line.push(served(argument, &drive, kept, server)?),
        }
    }
    Ok(line)
}

fn served(argument: &Argument, drive: &Drive, kept: Keys, server: &DiskServer) -> Result<Argument> {
    let is_node = argument.name() == "blockdev";
    let (option, place) = if is_node { ("blockdev", "") } else { ("drive", "file.") };
    let mut keys: Keys = Vec::new();
    if !is_node {
        keys.push(("format".into(), "raw".into()));
    }
    keys.extend(export_keys(place, server, &drive.name)?);
    if value_of(&kept, "discard").is_none() {
        // The overlay is to learn of what is not needed any more.
        keys.push(("discard".into(), "unmap".into()));
    }
    keys.extend(kept);
    Ok(Argument::Option(option.into(), options::joined(&keys)))
}

/// Keys, each behind `place`, that lead to the export for `name` at `server`.
pub(crate) fn export_keys(place: &str, server: &DiskServer, name: &str) -> Result<Keys> {
    let socket = server.socket.to_str().ok_or_else(|| Error::CommandLine {
        argument: server.socket.display().to_string(),
        reason: "the path of the disks' socket is not UTF-8".into(),
        fix: "choose another run directory".into(),
    })?;
    let export = format!("{}{name}", server.prefix);
    let keys =
        [("driver", "nbd"), ("server.type", "unix"), ("server.path", socket), ("export", &export)];
    Ok(keys.map(|(key, value)| (format!("{place}{key}"), value.into())).to_vec())
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
            // It would put QEMU's own overlay above ours.
            (_, "snapshot") => Fate::Goes,
            _ => Fate::Stays,
        });
    }
    Ok(fates)
}

/// Names of drives, made up where there is none.
#[derive(Default)]
struct Names(BTreeMap<String, u32>);

impl Names {
    fn made_up(&mut self, kind: &str) -> String {
        let count = self.0.entry(kind.into()).or_default();
        *count += 1;
        format!("{kind}-{}", *count - 1)
    }
}

/// `-hda` and its like.
fn on_index(path: &str, index: u8, temporary: bool, names: &mut Names) -> Fate {
    let name = names.made_up("hd");
    let drive = Drive { name, image: path.into(), format: None, temporary, remote: false };
    Fate::Served(drive, vec![("index".into(), index.to_string()), ("media".into(), "disk".into())])
}

fn of_drive(argument: &Argument, snapshot: bool, names: &mut Names) -> Result<Fate> {
    let mut keys = options::keys(argument.value(), "file");
    if is_read_only_drive(&keys) {
        return Ok(Fate::Stays);
    }
    let file = value_of(&keys, "file").or_else(|| value_of(&keys, "file.filename"));
    let remote = value_of(&keys, "file.driver") == Some(NBD);
    let image = match file.filter(|file| !file.is_empty()) {
        _ if remote => address(&keys, "file."),
        None => return Ok(Fate::Stays),
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

/// Whether the guest can only read what a `-drive` of these keys names.
pub(crate) fn is_read_only_drive(keys: &Keys) -> bool {
    is_read_only(keys) || value_of(keys, "media") == Some("cdrom")
}

/// Whether a drive or a node says so of itself: the one has both words, the other the second.
pub(crate) fn is_read_only(keys: &Keys) -> bool {
    is_on(keys, "readonly") || is_on(keys, "read-only")
}

pub(crate) fn is_one_of(key: &str, whole: &[&str], prefixes: &[&str]) -> bool {
    whole.contains(&key) || prefixes.iter().any(|prefix| key.starts_with(prefix))
}

/// `cache=` says what the guest is told of its write cache, among others.
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

/// Where the export is that keys which begin with `prefix` lead to, as QEMU writes it.
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

/// The path of a file, of what `file=` says.
fn local(argument: &Argument, file: &str) -> Result<PathBuf> {
    let protocol =
        || file.strip_prefix("file:").unwrap_or(file).split(':').next().unwrap_or_default();
    path_of(file).ok_or_else(|| foreign(argument, protocol()))
}

/// The same; none where it is reached by a protocol.
pub(crate) fn path_of(file: &str) -> Option<PathBuf> {
    let path = file.strip_prefix("file:").unwrap_or(file);
    let is_foreign = path.split_once(':').is_some_and(|(protocol, _)| !protocol.contains('/'));
    (!is_foreign).then(|| path.into())
}

fn foreign(argument: &Argument, protocol: &str) -> Error {
    Error::CommandLine {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, which is reached by {protocol}: Keyframe serves images that are files \
             (raw or qcow2) and block devices"
        ),
        fix: "copy it to a file (qemu-img convert), or make the drive read-only (readonly=on)"
            .into(),
    }
}

fn unknown(argument: &Argument, key: &str) -> Error {
    Error::CommandLine {
        argument: argument.display(),
        reason: format!(
            "the guest can write to this disk, and Keyframe, which serves such disks itself, does not know {key}"
        ),
        fix: format!("leave {key} out, or make the drive read-only (readonly=on)"),
    }
}

/// The nodes of all `-blockdev`, by their place in the line.
struct Nodes {
    nodes: BTreeMap<usize, Keys>,
}

impl Nodes {
    fn of(arguments: &[Argument]) -> Result<Self> {
        let mut nodes = BTreeMap::new();
        for (at, argument) in arguments.iter().enumerate().filter(|(_, a)| a.name() == "blockdev") {
            let keys = flat(argument.value()).ok_or_else(|| Error::CommandLine {
                argument: argument.display(),
                reason: "its value begins as JSON does, and is none".into(),
                fix: "correct it; QEMU does not take it either".into(),
            })?;
            nodes.insert(at, keys);
        }
        Ok(Self { nodes })
    }

    fn named(&self, name: &str) -> Option<&Keys> {
        self.nodes.values().find(|keys| value_of(keys, "node-name") == Some(name))
    }

    /// Whether a node that is itself served, or is above one, takes `name` as its file.
    fn is_file_of_another(&self, name: &str) -> bool {
        self.nodes.values().any(|keys| {
            value_of(keys, "file") == Some(name)
                && matches!(value_of(keys, "driver"), Some("raw" | "qcow2"))
        })
    }

    /// Whether each format node over `name` is read-only.
    fn users_read_only(&self, name: &str) -> bool {
        self.nodes.values().filter(|keys| value_of(keys, "file") == Some(name)).all(is_read_only)
    }

    fn fate(&self, at: usize, argument: &Argument) -> Result<Fate> {
        let Some(keys) = self.nodes.get(&at) else { return Ok(Fate::Stays) };
        let driver = value_of(keys, "driver").unwrap_or_default();
        let name = value_of(keys, "node-name").unwrap_or_default();
        if is_read_only(keys) || FILTERS.contains(&driver) {
            return Ok(Fate::Stays);
        }
        let (protocol, image) = match driver {
            "raw" | "qcow2" => match value_of(keys, "file") {
                Some(below) => {
                    let below = self.named(below).ok_or_else(|| Error::CommandLine {
                        argument: argument.display(),
                        reason: format!("no -blockdev of the line has the node name {below}"),
                        fix: "define it with -blockdev too".into(),
                    })?;
                    (value_of(below, "driver"), image_of(below, ""))
                }
                None => (value_of(keys, "file.driver"), image_of(keys, "file.")),
            },
            _ if (is_local(driver) || driver == NBD) && self.is_file_of_another(name) => {
                return Ok(if self.users_read_only(name) { Fate::Stays } else { Fate::Goes });
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

/// The file of a node, of its keys that begin with `prefix`; or the address of an export.
fn image_of(keys: &Keys, prefix: &str) -> Option<PathBuf> {
    if value_of(keys, &format!("{prefix}driver")) == Some(NBD) {
        return Some(address(keys, prefix));
    }
    value_of(keys, &format!("{prefix}filename")).map(PathBuf::from)
}

/// Keys of a node that stay.
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

/// The keys of a `-blockdev`, nested ones as `a.b`.
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

/// Whether `file`, as QEMU describes an open image, is served at `socket`.
pub(crate) fn is_served(file: &str, socket: &Path) -> bool {
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
        let words: Vec<String> =
            rewrite(&line(words), &server()).unwrap().iter().flat_map(Argument::words).collect();
        words.join(" ")
    }

    #[test]
    fn a_drive_keeps_what_the_guest_sees_of_it() {
        let text =
            rewritten(&["-drive", "file=a,,b.img,format=qcow2,if=none,id=d,cache=none,aio=native"]);
        assert_eq!(
            text,
            "-drive format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/d.sock,file.export=a/d,\
             discard=unmap,if=none,id=d,cache.writeback=on,cache.no-flush=off"
        );
        let drive = &find(&line(&["-drive", "file=a,,b.img,format=qcow2,id=d"])).unwrap()[0];
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
        assert_eq!(find(&line(&["-blockdev", json])).unwrap()[0].format.as_deref(), Some("raw"));
    }

    #[test]
    fn what_is_read_only_or_empty_stays() {
        for words in [
            &["-drive", "file=a,readonly=on"][..],
            &["-drive", "file=a,readonly=yes"],
            &["-drive", "file=a,media=cdrom"],
            &["-drive", "if=floppy"],
            &["-cdrom", "a"],
            &["-blockdev", "raw,node-name=n,read-only=on,file.driver=file,file.filename=a"],
        ] {
            assert_eq!(rewritten(words), words.join(" "));
            assert_eq!(find(&line(words)).unwrap(), []);
        }
    }

    #[test]
    fn a_snapshot_is_an_overlay_that_is_thrown_away() {
        for words in
            [&["-snapshot", "-drive", "file=a,id=d"][..], &["-drive", "file=a,id=d,snapshot=y"]]
        {
            assert!(!rewritten(words).contains("snapshot"));
            assert!(find(&line(words)).unwrap()[0].temporary);
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
            let found = find(&line(&line_words)).unwrap();
            assert_eq!(found.len(), 1, "{line_words:?}");
            assert!(found[0].remote && found[0].name == name, "{found:?}");
            assert_eq!(found[0].image, PathBuf::from(image));
            let text = rewritten(&line_words);
            assert!(text.contains("server.path=/run/d.sock") && !text.contains("a.sock"), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused_with_a_fix() {
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
            let error = find(&line(words)).unwrap_err();
            assert!(error.fix().is_some(), "{words:?}: {error}");
        }
    }

    proptest! {
        /// What was served once stays as it is: a restore rewrites the user's line, not ours.
        #[test]
        fn no_line_panics(values in prop::collection::vec("(file=|id=|if=|a|,|=|\\{|\\}|\"|driver|:|raw){0,8}", 0..5)) {
            let words: Vec<String> = values.into_iter().flat_map(|v| ["-drive".into(), v.clone(), "-blockdev".into(), v]).collect();
            if let Ok(arguments) = options::parse(&words) {
                let _ = rewrite(&arguments, &server());
            }
        }
    }
}
