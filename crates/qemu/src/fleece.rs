//! Captures a VM's disks at one instant through its monitor, with dirty bitmaps and point-in-time
//! exports, as libvirt's backups do.
//!
//! ```text
//!   guest ──writes──▶ copy-before-write ──▶ disk's node ◀──backing── scratch ◀── export (NBD)
//!                            └── overwritten blocks ──────────────────▶ │            └ bitmap: changed blocks
//!                                                                       └ a file of Keyframe
//!   scratch added ─▶ VM paused ─▶ one transaction: new bitmap, old one frozen, backup job ─▶ VM runs ─▶ export ─▶ read
//!     ─▶ export, job, scratch removed ─▶ frozen bitmap removed, or merged into the present one if the checkpoint failed
//! ```
//!
//! Invariants:
//! 1. Every object made here has a name that begins with `keyframe-`, by which [`sweep`] finds the
//!    leftovers of a killed engine.
//! 2. One transaction freezes a bitmap and starts its successor, so no write falls between them.
//! 3. No reader's end closes its connection: QEMU has the reader's socket open too
//!    ([`hold_connection`]), and closes it after the export has been removed. QEMU up to 8.2 aborts
//!    if the connection to a disk in an iothread is closed otherwise, as by the end of a killed
//!    engine. While a connection is negotiated, it is not in the iothread yet.
//!
//! Left out: reading the exports (the disk crate), and the file beneath the scratch node.

use crate::{Error, Qmp, Result, WritableNode};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

/// The prefix of all names.
pub(crate) const OURS: &str = "keyframe-";
/// How long QEMU may take to remove an export, a job or a node.
const GONE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes for each bit of a bitmap: the size of a stored block; more for disks with large bitmaps.
const GRANULARITY_BYTES: u64 = 4096;
const GRANULARITY_LARGE_BYTES: u64 = 64 << 10;
const LARGE_BYTES: u64 = 1 << 40;

/// The first major version of QEMU without the locks of iothreads.
const SAFE_MAJOR: u64 = 9;
/// What QEMU calls the listening socket while it is passed.
const LISTENER: &str = "keyframe-listener";
/// The beginning of the file name of each socket at which QEMU listens for an engine.
const SOCKET_PREFIX: &str = "kf-nbd-";
/// The flag of a listening socket in `/proc/net/unix`.
const ACCEPTS: u64 = 1 << 16;

/// The actions of a cut for one disk.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotPoint<'a> {
    /// The disk.
    pub disk: &'a WritableNode,
    /// The disk's number, which the names of its scratch node, job and export contain.
    pub number: usize,
    /// The number of the bitmap to freeze; `None` at the first cut.
    pub frozen: Option<u64>,
    /// The number of the bitmap to start; `None` for none.
    pub begun: Option<u64>,
}

fn name(number: usize) -> String {
    format!("{OURS}fleece-{number}")
}

/// Returns the name of bitmap number `bitmap`.
pub fn bitmap_name(bitmap: u64) -> String {
    format!("{OURS}{bitmap}")
}

/// Returns the name of the export of disk `number`.
pub fn export_name(number: usize) -> String {
    name(number)
}

/// Returns the file name of the socket at which the QEMU of member `member` listens.
pub fn socket_name(member: usize) -> String {
    format!("{SOCKET_PREFIX}{member}.sock")
}

/// Returns the number of bytes for each bit of a bitmap of `disk`.
pub fn granularity_bytes(disk: &WritableNode) -> u64 {
    if disk.disk_bytes > LARGE_BYTES { GRANULARITY_LARGE_BYTES } else { GRANULARITY_BYTES }
}

/// Has QEMU, process `pid`, listen for readers at `socket`, whose name is a [`socket_name`], also
/// if it listens for a killed engine. Keyframe makes the socket and passes it, as a confined QEMU
/// could make none there. Errors: the socket cannot be made; [`Error::Refused`], also if QEMU
/// listens for another program already.
pub fn start_server(qmp: &mut Qmp, pid: u32, socket: &Path) -> Result<()> {
    match listen(qmp, socket) {
        Err(Error::Refused { .. }) if listens_for_an_engine(pid) => {
            stop_server(qmp)?;
            listen(qmp, socket)
        }
        other => other,
    }
}

fn listen(qmp: &mut Qmp, socket: &Path) -> Result<()> {
    let failed = |operation: &str| Error::io(format!("{operation} {}", socket.display()));
    match std::fs::remove_file(socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(failed("remove")(e)),
        _ => {}
    }
    let listener = UnixListener::bind(socket).map_err(failed("listen at"))?;
    qmp.execute_passing("getfd", json!({ "fdname": LISTENER }), listener.as_fd())?;
    let address = json!({ "type": "fd", "data": { "str": LISTENER } });
    let started = qmp.execute("nbd-server-start", Some(json!({ "addr": address })));
    if started.is_err() {
        let _ = qmp.execute("closefd", Some(json!({ "fdname": LISTENER })));
    }
    started.map(drop)
}

/// True if process `pid` listens at a socket that an engine has named.
fn listens_for_an_engine(pid: u32) -> bool {
    let sockets = std::fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    let named: Vec<String> = sockets.lines().filter_map(engines_listener).collect();
    let opened = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    opened
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .any(|file| named.iter().any(|socket| file.as_os_str() == socket.as_str()))
}

/// What `/proc/PID/fd` calls the socket of this line of `/proc/net/unix`, if it listens under a
/// name of an engine.
fn engines_listener(line: &str) -> Option<String> {
    let mut fields = line.split_whitespace();
    let flags = u64::from_str_radix(fields.nth(3)?, 16).ok()?;
    let (inode, path) = (fields.nth(2)?, fields.next()?);
    let is_named = Path::new(path).file_name()?.to_str()?.starts_with(SOCKET_PREFIX);
    (flags & ACCEPTS != 0 && is_named).then(|| format!("socket:[{inode}]"))
}

/// Has QEMU keep `connection`, a reader's connection to the export of disk `number`, open until
/// [`take_away`]. To be called before the reader negotiates. Error: QEMU refuses or does not
/// answer.
pub fn hold_connection(qmp: &mut Qmp, number: usize, connection: BorrowedFd<'_>) -> Result<()> {
    let arguments = json!({ "fdname": export_name(number) });
    qmp.execute_passing("getfd", arguments, connection).map(drop)
}

/// Adds a scratch node of disk `number` over the empty qcow2 image `file`. QEMU gets the open file,
/// as a confined QEMU could not open it, and keeps it open. Errors: `file` cannot be opened; QEMU
/// refuses or does not answer.
pub fn add_scratch(qmp: &mut Qmp, number: usize, file: &Path, disk: &WritableNode) -> Result<()> {
    let open = File::options().read(true).write(true).open(file);
    let open = open.map_err(Error::io(format!("open {}", file.display())))?;
    let set = qmp.add_fd(&name(number), open.as_fd())?;
    let below = json!({ "driver": "file", "filename": format!("/dev/fdset/{set}") });
    let node = json!({ "driver": "qcow2", "node-name": name(number), "file": below, "backing": disk.node });
    let added = qmp.execute("blockdev-add", Some(node));
    let removed = qmp.execute("remove-fd", Some(json!({ "fdset-id": set })));
    added.and(removed).map(drop)
}

/// Cuts all `points` at one instant. The VM must be paused, and each point needs its scratch node.
/// Error: QEMU refuses or does not answer.
pub fn cut(qmp: &mut Qmp, points: &[SnapshotPoint<'_>]) -> Result<()> {
    let mut actions = Vec::with_capacity(points.len() * 3);
    for point in points {
        let (node, granularity) = (&point.disk.node, granularity_bytes(point.disk));
        if let Some(begun) = point.begun.map(bitmap_name) {
            let begun = json!({ "node": node, "name": begun, "granularity": granularity, "persistent": false });
            actions.push(json!({ "type": "block-dirty-bitmap-add", "data": begun }));
        }
        if let Some(frozen) = point.frozen.map(bitmap_name) {
            let frozen = json!({ "node": node, "name": frozen });
            actions.push(json!({ "type": "block-dirty-bitmap-disable", "data": frozen }));
        }
        let id = name(point.number);
        let job = json!({ "device": node, "job-id": id, "target": id, "sync": "none" });
        actions.push(json!({ "type": "blockdev-backup", "data": job }));
    }
    qmp.execute("transaction", Some(json!({ "actions": actions }))).map(drop)
}

/// Exports disk `number` as it was at its cut, with bitmap `frozen` for the blocks that were
/// written; with `None`, without a bitmap. Error: QEMU refuses or does not answer.
pub fn export(qmp: &mut Qmp, number: usize, frozen: Option<u64>) -> Result<()> {
    let id = name(number);
    let bitmaps: Vec<String> = frozen.map(bitmap_name).into_iter().collect();
    let export = json!({
        "type": "nbd", "id": id, "node-name": id, "name": id, "writable": false, "bitmaps": bitmaps,
    });
    qmp.execute("block-export-add", Some(export)).map(drop)
}

/// Removes bitmap `frozen` of `disk` after its checkpoint has succeeded. Error: QEMU refuses or
/// does not answer.
pub fn forget(qmp: &mut Qmp, disk: &WritableNode, frozen: u64) -> Result<()> {
    let bitmap = json!({ "node": disk.node, "name": bitmap_name(frozen) });
    qmp.execute("block-dirty-bitmap-remove", Some(bitmap)).map(drop)
}

/// Merges bitmap `frozen` of `disk` into bitmap `present` after the checkpoint has failed. Error:
/// QEMU refuses or does not answer.
pub fn give_back(qmp: &mut Qmp, disk: &WritableNode, frozen: u64, present: u64) -> Result<()> {
    let merge = json!({ "node": disk.node, "target": bitmap_name(present), "bitmaps": [bitmap_name(frozen)] });
    qmp.execute("block-dirty-bitmap-merge", Some(merge))?;
    forget(qmp, disk, frozen)
}

/// Removes all exports, jobs and scratch nodes of Keyframe. Error: QEMU refuses or does not answer.
pub fn take_away(qmp: &mut Qmp) -> Result<()> {
    let exports = named(qmp, "query-block-exports", None, "id")?;
    for id in &exports {
        qmp.execute("block-export-del", Some(json!({ "id": id, "mode": "hard" })))?;
    }
    gone(qmp, "query-block-exports", "id")?;
    for id in exports {
        // It has none if the engine ended before its reader was connected, and none that this
        // monitor could close if the engine had another one.
        let _ = qmp.execute("closefd", Some(json!({ "fdname": id })));
    }
    for id in named(qmp, "query-jobs", None, "id")? {
        // One that is on its way out takes no more orders.
        let _ = qmp.execute("job-cancel", Some(json!({ "id": id })));
    }
    gone(qmp, "query-jobs", "id")?;
    let deadline = Instant::now() + GONE_TIMEOUT;
    for node in named(qmp, "query-named-block-nodes", Some(json!({ "flat": true })), "node-name")? {
        // It is in use for a moment after the job's end.
        while let Err(error) = qmp.execute("blockdev-del", Some(json!({ "node-name": node }))) {
            if Instant::now() > deadline || !matches!(error, Error::Refused { .. }) {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// Removes all objects of Keyframe from QEMU, also those of a killed engine. Returns true if there
/// were any. Error: QEMU refuses or does not answer.
pub fn sweep(qmp: &mut Qmp) -> Result<bool> {
    take_away(qmp)?;
    let nodes = qmp.execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
    let mut found = false;
    for node in nodes.as_array().into_iter().flatten() {
        let bitmaps = node.get("dirty-bitmaps").and_then(Value::as_array);
        for bitmap in bitmaps.into_iter().flatten().filter_map(|b| b.get("name")?.as_str()) {
            if bitmap.starts_with(OURS) {
                let name = json!({ "node": node.get("node-name"), "name": bitmap });
                qmp.execute("block-dirty-bitmap-remove", Some(name))?;
                found = true;
            }
        }
    }
    if found {
        // Where there are bitmaps of ours, the server is ours too: it was started before them, and
        // QEMU has but one.
        stop_server(qmp)?;
    }
    Ok(found)
}

/// Has QEMU stop listening for readers. Error: QEMU refuses or does not answer.
pub fn stop_server(qmp: &mut Qmp) -> Result<()> {
    match qmp.execute("nbd-server-stop", None) {
        // It does not run.
        Ok(_) | Err(Error::Refused { .. }) => Ok(()),
        Err(other) => Err(other),
    }
}

/// Returns the name of a job on the VM's disks that another program started; `None` if there is
/// none. Error: QEMU refuses or does not answer.
pub fn other_job(qmp: &mut Qmp) -> Result<Option<String>> {
    let jobs = qmp.execute("query-block-jobs", None)?;
    let names = jobs.as_array().into_iter().flatten().filter_map(|job| job.get("device")?.as_str());
    Ok(names.filter(|name| !name.starts_with(OURS)).map(str::to_owned).next())
}

/// Returns the first of `nodes` whose disk QEMU throttles and serves in an iothread, if this QEMU
/// does not survive a pause of such a disk with a backup job: before version 9.0, `cont` moves the
/// disk to its iothread and waits for throttled requests with a lock that it does not have.
///
/// Error: QEMU refuses or does not answer.
pub fn fragile_disk(qmp: &mut Qmp, nodes: &[&str]) -> Result<Option<String>> {
    let version = qmp.execute("query-version", None)?;
    let major = version.get("qemu").and_then(|qemu| qemu.get("major")).and_then(Value::as_u64);
    if major.is_some_and(|major| major >= SAFE_MAJOR) {
        return Ok(None);
    }
    let blocks = qmp.execute("query-block", None)?;
    let Some(blocks) = blocks.as_array() else {
        return Err(qmp.unexpected("query-block", &blocks));
    };
    for block in blocks {
        let Some((node, device)) = throttled(block).filter(|(node, _)| nodes.contains(node)) else {
            continue;
        };
        // Only virtio-blk has an iothread of its own.
        let asked = json!({ "path": device, "property": "iothread" });
        if let Ok(Value::String(iothread)) = qmp.execute("qom-get", Some(asked))
            && !iothread.is_empty()
        {
            return Ok(Some(node.to_owned()));
        }
    }
    Ok(None)
}

/// The node and the device of a disk of `query-block`, if its backend is throttled.
fn throttled(block: &Value) -> Option<(&str, &str)> {
    let inserted = block.get("inserted")?;
    let limits = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];
    let is_limited = |key: &&str| inserted.get(*key).and_then(Value::as_u64).is_some_and(|n| n > 0);
    limits.iter().find(|key| is_limited(key))?;
    Some((inserted.get("node-name")?.as_str()?, block.get("qdev")?.as_str()?))
}

/// The names with Keyframe's prefix that `query` lists.
fn named(qmp: &mut Qmp, query: &str, arguments: Option<Value>, key: &str) -> Result<Vec<String>> {
    let answer = qmp.execute(query, arguments)?;
    let Some(all) = answer.as_array() else { return Err(qmp.unexpected(query, &answer)) };
    let names = all.iter().filter_map(|one| one.get(key)?.as_str());
    Ok(names.filter(|name| name.starts_with(OURS)).map(str::to_owned).collect())
}

fn gone(qmp: &mut Qmp, query: &str, key: &str) -> Result<()> {
    let deadline = Instant::now() + GONE_TIMEOUT;
    loop {
        let left = named(qmp, query, None, key)?;
        let Some(first) = left.first() else { return Ok(()) };
        if Instant::now() > deadline {
            return Err(Error::Timeout {
                monitor: first.clone(),
                operation: format!("wait until {query} does not list it"),
                waited_ms: u64::try_from(GONE_TIMEOUT.as_millis()).unwrap_or(u64::MAX),
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_throttled_if_any_limit_is_set() {
        let block = |limit: u64| json!({ "qdev": "/d", "inserted": { "node-name": "n", "bps": 0, "iops_wr": limit } });
        assert_eq!(throttled(&block(300)), Some(("n", "/d")));
        assert_eq!(throttled(&block(0)), None);
        assert_eq!(throttled(&json!({ "qdev": "/d" })), None, "an empty drive");
    }

    #[test]
    fn a_server_of_an_engine_is_known_by_its_sockets_name() {
        let folder = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let other = UnixListener::bind(folder.path().join("nbd-0.sock")).unwrap();
        assert!(!listens_for_an_engine(pid), "another program's: {other:?}");
        let ours = UnixListener::bind(folder.path().join(socket_name(3))).unwrap();
        assert!(listens_for_an_engine(pid));
        let path = folder.path().join(socket_name(3));
        let connected = std::os::unix::net::UnixStream::connect(path).unwrap();
        let accepted = ours.accept().unwrap();
        drop(ours);
        assert!(!listens_for_an_engine(pid), "connections alone: {connected:?}, {accepted:?}");
    }
}
