//! The description of a checkpoint: the JSON section of its file.

use crate::disk_meta::{DiskMeta, blocks_of, space_pages};
use jiff::Timestamp;
use keyframe_units::{CheckpointId, Epoch, PageIndex, PageRange, RamBlock, RamLayout};
use serde::{Deserialize, Serialize};

/// The description of a checkpoint: everything except RAM, disk blocks and device state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// The name of the VM, as the user gave it.
    pub vm: String,
    /// The id of the run: 32 hexadecimal digits, a fresh one each time a VM is started or restored.
    pub run: String,
    /// The place in the run, from 0. The epochs of the sealed checkpoints of a run are consecutive.
    pub epoch: Epoch,
    /// The checkpoint that a restore, a branch or a rollback had brought the VM back to before this
    /// one. Absent if the VM had run on since the previous checkpoint of its run. The store may not
    /// hold the parent any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<CheckpointId>,
    /// The time at which the pause of the checkpoint began, by the host's wall clock.
    pub taken_at: Timestamp,
    /// The same instant by a clock that is never set. Absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_boot: Option<SinceBoot>,
    /// The reason why it was taken: `interval`, `take`, ...
    pub reason: String,
    /// The RAM blocks, in page order.
    pub ram: RamLayout,
    /// The disks that the guest can write to, in the order of their blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskMeta>,
    /// The machine, as far as a restore needs it. Empty in the checkpoint of a group.
    pub machine: MachineMeta,
    /// The VMs of a group that was checkpointed at one instant, in the order of their RAM blocks.
    /// Empty for a single VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberMeta>,
    /// The durations of its steps.
    pub timing: Timing,
    /// The numbers of pages and bytes in it.
    pub counts: Counts,
    /// The checkpoint of another store that this one is a copy of; `None` if it is no copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The numbers of the maps that together give all pages, newest first. The first one is this
    /// checkpoint's own.
    pub map_chain: Vec<u64>,
}

impl Meta {
    /// Returns for each member of a group its RAM blocks, under the member's own names, and its
    /// first page; `None` if the list of members contradicts the list of blocks.
    pub fn members_ram(&self) -> Option<Vec<(RamLayout, PageIndex)>> {
        let mut all = Vec::with_capacity(self.members.len());
        let mut first_block = 0usize;
        for member in &self.members {
            let end = first_block.checked_add(member.ram_blocks)?;
            let blocks = self.ram.blocks().get(first_block..end)?;
            let prefix = format!("{}/", member.name);
            let own = |block: &RamBlock| {
                let name = block.name.strip_prefix(&prefix)?.to_owned();
                Some(RamBlock { name, ..block.clone() })
            };
            let layout = RamLayout::new(blocks.iter().map(own).collect::<Option<_>>()?).ok()?;
            let first =
                if blocks.is_empty() { PageIndex(0) } else { self.ram.pages_of(first_block).first };
            all.push((layout, first));
            first_block = end;
        }
        (first_block == self.ram.blocks().len()).then_some(all)
    }

    /// Returns the number of pages of RAM and blocks of disks together; `None` if it is larger than
    /// a page space.
    pub fn space_pages(&self) -> Option<u64> {
        space_pages(self.ram.len_pages(), &self.disks)
    }

    /// Returns the numbers of the blocks of disk `index`, which follow the pages of RAM; `None` if
    /// there is no such disk.
    pub fn blocks_of(&self, index: usize) -> Option<PageRange> {
        blocks_of(self.ram.len_pages(), &self.disks, index)
    }
}

/// An instant by the clock that a kernel counts from its boot on, time in suspend included. Unlike
/// the wall clock it never jumps. Two of them can be compared only within one boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SinceBoot {
    /// The boot id of the kernel, as `/proc/sys/kernel/random/boot_id` shows it.
    pub boot: String,
    /// Nanoseconds since that boot.
    pub ns: u64,
}

impl SinceBoot {
    /// Returns the nanoseconds from `earlier` to this instant, negative if `earlier` is the later
    /// one; `None` if they are of two boots.
    pub fn ns_after(&self, earlier: &Self) -> Option<i128> {
        (self.boot == earlier.boot).then(|| i128::from(self.ns) - i128::from(earlier.ns))
    }
}

/// The store and number that a checkpoint was taken under. All copies of it have the same origin.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// The id of that store.
    pub store: String,
    /// Its number in that store.
    pub checkpoint: CheckpointId,
}

/// One VM of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberMeta {
    /// Its name, unique in the group. Its RAM blocks are listed as `NAME/BLOCK`.
    pub name: String,
    /// The process id of its QEMU, which identifies it in the packets in flight.
    pub pid: u32,
    /// The number of its RAM blocks. They follow those of the member before it.
    pub ram_blocks: usize,
    /// Its machine.
    pub machine: MachineMeta,
}

/// The machine that a checkpoint was taken of.
pub use keyframe_machine::MachineSpec as MachineMeta;

/// The position of a checkpoint in a recording.
pub use keyframe_machine::RecordingPosition as Recorded;

/// Durations of the steps of a checkpoint, measured in its cycle. All in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// The time from the previous checkpoint's pause to this one's; 0 for the first.
    pub interval_ns: u64,
    /// The delay of the checkpoint's begin because the encoder had not finished the previous one.
    pub backlog_ns: u64,
    /// The duration of the whole pause, from before QEMU is asked to stop until it has confirmed
    /// that the VM runs.
    pub pause_ns: u64,
    /// The durations of the steps of the pause.
    pub pause: PausePhases,
    /// The number of copy rounds during which the guest ran.
    pub precopy_rounds: u32,
    /// The strategy's name.
    pub strategy: String,
    /// How the last dirty pages were found, in the pause: `window` by a window of page faults,
    /// `scan` by a look at all of RAM, `scan:REASON` by a scan because the window could not name
    /// them. Empty if this was not noted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub found_by: String,
    /// The number of pages copied in each round, the one inside the pause last.
    pub round_pages: Vec<u64>,
    /// The time of hashing, deduplication, compression and appending, until the seal began.
    pub encode_ns: u64,
    /// The durations of the steps of storing it; `None` if they were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processing: Option<ProcessingPhases>,
}

/// The steps of storing a checkpoint, in nanoseconds. The first four concern pages of RAM, also those
/// that pre-copy stored before the pause; `encode_ns` without their sum is the encoder's other work.
/// The last three belong to the seal. Writing the checkpoint's own file is not measured, because that
/// file holds these numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessingPhases {
    /// The time of hashing pages.
    pub hash: u64,
    /// The time of looking for their content in the store, and for bases of deltas.
    pub look_up: u64,
    /// The time of making deltas and of compressing.
    pub compress: u64,
    /// The time of appending records to packs.
    pub append: u64,
    /// The time of reading and storing the written blocks of all disks.
    pub disks: u64,
    /// The time of flushing and syncing the packs.
    pub sync: u64,
    /// The time of making and writing the map of pages and blocks.
    pub map: u64,
}

/// The parts of a pause, in nanoseconds. They follow each other without a gap; the device state
/// comes before the scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PausePhases {
    /// The time until QEMU confirmed the stop.
    pub stop: u64,
    /// The time of the last scan for dirty pages.
    pub scan: u64,
    /// The time of copying these pages.
    pub copy: u64,
    /// The time of saving the device state.
    pub device_state: u64,
    /// The time from the request to resume until QEMU confirmed that the VM runs.
    pub resume: u64,
}

/// Pages and bytes of one checkpoint. `dirty_pages` is the sum of zero, deduplicated, unchanged and
/// stored pages: a page that was put more than once counts with its last put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// The number of distinct pages put into the checkpoint.
    pub dirty_pages: u64,
    /// The number of put pages that are all zeros.
    pub zero_pages: u64,
    /// The number of put pages whose content another record of the store held.
    pub dedup_pages: u64,
    /// The number of deduplicated pages whose content a disk brought into the store.
    pub dedup_disk_pages: u64,
    /// The number of put pages whose content is that of the previous checkpoint.
    pub unchanged_pages: u64,
    /// The number of put pages whose content was new to the store.
    pub stored_pages: u64,
    /// The number of bytes appended to packs for this checkpoint, with record headers and contents
    /// that a later put replaced.
    pub stored_bytes: u64,
    /// The size of its map file, in bytes.
    pub map_bytes: u64,
    /// The size of the device state in the file, in bytes.
    pub device_bytes: u64,
}
