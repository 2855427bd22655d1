//! Counts the sectors and the packets that a VM writes: sectors as QEMU counts them, packets in a
//! dump that QEMU makes.
//!
//! ```text
//!   disks    query-blockstats ─▶ wr_bytes / 512, wr_operations, summed over all drives
//!   packets  object-add filter-dump (one byte of each packet the guest sends) ─▶ a memfd ─▶ records counted
//! ```
//!
//! The dump is a file in memory of this process without a name and with a fixed size. QEMU opens it
//! as `/proc/PID/fd/N`. If this process is killed, QEMU stops dumping when the file is full; the
//! next measurement removes the filter, which frees the memory.
//!
//! Left out: packets that do not pass through QEMU (vhost, vDPA, a device given to the guest). QEMU
//! refuses to dump them.

use super::target::Target;
use crate::error::{Error, Result};
use keyframe_profile::pcap;
use keyframe_qemu::Qmp;
use keyframe_units::error_chain as chain;
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// The beginning of a filter's name; the pid of this process and a number follow.
const FILTER: &str = "keyframe-profile-";
/// The size of a dump: 15 million packets. Only written parts take memory.
const DUMP_BYTES: u64 = 256 << 20;
/// A dump with fewer free bytes than this counts as full.
const DUMP_SPARE_BYTES: u64 = 64 << 10;
/// The number of bytes that one read of a dump returns at most.
const CHUNK_BYTES: usize = 256 << 10;
/// The most network backends.
const NETDEVS_MAX: usize = 64;

/// The writes of the VM to all its disks since its start.
#[derive(Clone, Copy)]
pub struct DiskWrites {
    /// The number of sectors of 512 bytes.
    pub sectors: u64,
    /// The number of write requests.
    pub writes: u64,
}

/// The counters of one VM's disk writes and packets.
pub struct Counters {
    disks: bool,
    dumps: Option<Vec<Dump>>,
}

/// The dump of one network backend.
struct Dump {
    filter: String,
    file: File,
    counter: pcap::PacketCounter,
    chunk: Vec<u8>,
}

impl Counters {
    /// Begins to count. Adds a note to `target` for each kind that cannot be counted.
    pub fn new(target: &mut Target) -> Self {
        let Some(qmp) = target.qmp() else { return Self { disks: false, dumps: None } };
        let (disks, dumps) =
            (disks(qmp).and_then(|d| d.ok_or("the VM has no disks".into())), dump_all(qmp));
        target.notes.extend(disks.as_ref().err().map(|why| format!("sectors: not counted: {why}")));
        target.notes.extend(dumps.as_ref().err().map(|why| format!("packets: not counted: {why}")));
        Self { disks: disks.is_ok(), dumps: dumps.ok() }
    }

    /// Removes the dumps from QEMU.
    pub fn remove(self, target: &mut Target) {
        if let (Some(dumps), Some(qmp)) = (self.dumps, target.qmp()) {
            remove(qmp, &dumps);
        }
    }

    /// Returns the numbers of sectors and requests written since the VM's start. Returns `None` if
    /// they are not counted. Error: the monitor does not answer.
    pub fn disks(&mut self, target: &mut Target) -> Result<Option<DiskWrites>> {
        match target.qmp().filter(|_| self.disks) {
            Some(qmp) => disks(qmp).map_err(Error::Disks),
            None => Ok(None),
        }
    }

    /// Returns the number of packets that the guest has sent since [`Self::new`]; `None` if they
    /// are not counted. If a dump fails or is full, counting ends with a note.
    pub fn packets(&mut self, target: &mut Target) -> Option<u64> {
        let counted: Result<u64, String> = self.dumps.as_mut()?.iter_mut().map(Dump::count).sum();
        match counted {
            Ok(packets) => Some(packets),
            Err(why) => {
                target.notes.push(format!("packets: no longer counted: {why}"));
                if let (Some(dumps), Some(qmp)) = (self.dumps.take(), target.qmp()) {
                    remove(qmp, &dumps);
                }
                None
            }
        }
    }
}

fn remove(qmp: &mut Qmp, dumps: &[Dump]) {
    for dump in dumps {
        // A VM that has ended, or whose network backend is gone, has none.
        let _ = qmp.execute("object-del", Some(json!({ "id": dump.filter })));
    }
}

/// Returns the sums over all drives; `None` if there are none.
fn disks(qmp: &mut Qmp) -> Result<Option<DiskWrites>, String> {
    let answer = qmp.execute("query-blockstats", None).map_err(|e| chain(&e))?;
    let drives = answer.as_array().ok_or("query-blockstats: no list")?;
    let sum = |key: &str| {
        let count = |drive: &Value| drive.get("stats")?.get(key)?.as_u64();
        drives.iter().try_fold(0u64, |sum, drive| sum.checked_add(count(drive)?))
    };
    match (sum("wr_bytes"), sum("wr_operations")) {
        _ if drives.is_empty() => Ok(None),
        (Some(bytes), Some(writes)) => Ok(Some(DiskWrites { sectors: bytes / 512, writes })),
        _ => Err("query-blockstats: a drive without wr_bytes and wr_operations".into()),
    }
}

/// Begins a dump of each network backend. Error: there is no backend, or QEMU refuses a dump; all
/// dumps are removed then.
fn dump_all(qmp: &mut Qmp) -> Result<Vec<Dump>, String> {
    remove_left_over(qmp);
    let backends = backends(&qmp.hmp("info network").map_err(|e| chain(&e))?);
    if backends.is_empty() {
        return Err("the VM has no network backends".into());
    }
    if backends.len() > NETDEVS_MAX {
        return Err(format!("it has more than {NETDEVS_MAX} network backends"));
    }
    let mut dumps = Vec::new();
    for (index, backend) in backends.iter().enumerate() {
        match Dump::begin(qmp, index, backend) {
            Ok(dump) => dumps.push(dump),
            Err(why) => {
                remove(qmp, &dumps);
                return Err(format!("network backend {backend}: {why}"));
            }
        }
    }
    Ok(dumps)
}

/// Removes the filters of measurements that were killed.
fn remove_left_over(qmp: &mut Qmp) {
    // If QEMU does not answer, the filters stay in it.
    let objects = qmp.execute("qom-list", Some(json!({ "path": "/objects" }))).unwrap_or_default();
    let names = objects.as_array().into_iter().flatten().filter_map(|o| o.get("name")?.as_str());
    for name in names {
        let owner =
            name.strip_prefix(FILTER).and_then(|rest| rest.split_once('-')?.0.parse::<u32>().ok());
        if owner.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = qmp.execute("object-del", Some(json!({ "id": name })));
        }
    }
}

impl Dump {
    fn begin(qmp: &mut Qmp, index: usize, backend: &str) -> Result<Self, String> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(
            rustix::fs::memfd_create("keyframe-packets", flags)
                .map_err(|e| format!("make a file: {e}"))?,
        );
        let filter = format!("{FILTER}{}-{index}", std::process::id());
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        // The backend receives what the guest sends. One byte of each packet is the least that a
        // filter dumps.
        let arguments = json!({
            "qom-type": "filter-dump", "id": filter, "netdev": backend, "file": path, "maxlen": 1, "queue": "rx",
        });
        qmp.execute("object-add", Some(arguments)).map_err(|e| chain(&e))?;
        // QEMU truncated the file when it opened it, and writes at its own position.
        let sealed = file.set_len(DUMP_BYTES).and_then(|()| {
            Ok(rustix::fs::fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK)?)
        });
        let dump = Self {
            filter,
            file,
            counter: pcap::PacketCounter::default(),
            chunk: vec![0; CHUNK_BYTES],
        };
        match sealed {
            Ok(()) => Ok(dump),
            Err(e) => {
                remove(qmp, &[dump]);
                Err(format!("bound the file: {e}"))
            }
        }
    }

    /// Returns the number of packets so far.
    fn count(&mut self) -> Result<u64, String> {
        loop {
            let before = self.counter.offset();
            if before + DUMP_SPARE_BYTES > DUMP_BYTES {
                return Err("there were more packets than there is room for".into());
            }
            let len = self
                .file
                .read_at(&mut self.chunk, before)
                .map_err(|e| format!("read the dump: {e}"))?;
            self.counter.count(&self.chunk[..len]).map_err(|e| e.to_string())?;
            if self.counter.offset() == before {
                return Ok(self.counter.packets());
            }
        }
    }
}

/// The ids of network backends (of the other ends of network cards) in `info network`'s answer:
/// `virtio-net-pci.0: index=0,type=nic,...` and below it ` \ n0: index=0,type=user,...`.
fn backends(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in text.lines() {
        let line = line.trim().trim_start_matches("\\ ").trim_start();
        let Some((name, rest)) = line.split_once(": index=") else { continue };
        let is = |kind: &str| rest.split(',').any(|part| part.trim() == format!("type={kind}"));
        if !name.is_empty() && !is("nic") && !is("hubport") && !found.iter().any(|f| f == name) {
            found.push(name.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_told_from_network_cards() {
        let text = "virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \
                    \\ n0: index=0,type=user,net=10.0.2.0,restrict=off\r\nlonely: index=0,type=tap,ifname=t0\r\n";
        assert_eq!(backends(text), ["n0", "lonely"]);
        assert_eq!(
            backends(" \\ #net1: index=0,type=user,net=a\n \\ #net1: index=1,type=user,net=a\n"),
            ["#net1"]
        );
        assert!(
            backends("").is_empty()
                && backends("no: such\n: index=\nx: index=0,type=nic").is_empty()
        );
    }
}
