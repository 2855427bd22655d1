//! What a checkpoint tells about itself: the JSON section of its file, and what `list` and `show`
//! print.

use crate::disks::DiskMeta;
use jiff::Timestamp;
use keyframe_units::{CheckpointId, Epoch, PageIndex, RamBlock, RamLayout};
use serde::{Deserialize, Serialize};

/// A sealed checkpoint: complete, verifiable, immutable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    /// Its number in the store.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: Meta,
    /// The tags that point to it now, in alphabetical order.
    pub tags: Vec<String>,
}

/// Everything that a checkpoint tells about itself besides RAM and device state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meta {
    /// The name of the VM, as the user gave it.
    pub vm: String,
    /// The id of the run: 32 hexadecimal digits, a fresh one each time a VM is started or restored.
    pub run: String,
    /// The place in the run; the epochs of the sealed checkpoints of a run are consecutive.
    pub epoch: Epoch,
    /// The checkpoint that the VM had been brought back to before this one, by a restore, a branch
    /// or a rollback; absent where it simply had run on since the one before in its run. Perhaps
    /// not in the store any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<CheckpointId>,
    /// When the pause of the checkpoint began.
    pub taken_at: Timestamp,
    /// Why it was taken: `interval`, `take`, ...
    pub reason: String,
    /// The RAM blocks, in page order.
    pub ram: RamLayout,
    /// The disks that the guest can write to, in the order of their blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskMeta>,
    /// The machine, as far as a restore needs it. Empty where the checkpoint is a group's.
    pub machine: MachineMeta,
    /// The VMs of a group that was checkpointed at one instant, in the order of their RAM blocks;
    /// empty for one VM alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberMeta>,
    /// How long things took.
    pub timing: Timing,
    /// How many pages and bytes it took.
    pub counts: Counts,
    /// The checkpoint that this one is a copy of, in another store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The map runs that together give the page map, newest first; the first one is this
    /// checkpoint's own.
    pub map_chain: Vec<u64>,
}

impl Meta {
    /// Of each member of a group, its own RAM blocks as it calls them, and where its pages begin.
    /// `None` where the list of members and that of the blocks contradict each other.
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
}

/// A checkpoint where it was taken: the same for it and for all copies of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// The id of that store.
    pub store: String,
    /// Its number there.
    pub checkpoint: CheckpointId,
}

/// One VM of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberMeta {
    /// Its name, which no other member has. Its RAM blocks are listed as `NAME/BLOCK`.
    pub name: String,
    /// Its QEMU's process id: packets in flight name it by that.
    pub pid: u32,
    /// How many of the checkpoint's RAM blocks are its own: the first ones that no member before it
    /// has.
    pub ram_blocks: usize,
    /// Its machine.
    pub machine: MachineMeta,
}

/// The machine that a checkpoint was taken of.
pub use keyframe_machine::MachineSpec as MachineMeta;

/// The position of a checkpoint in a recording.
pub use keyframe_machine::RecordingPosition as Recorded;

/// How long the steps of the checkpoint took, measured in that very cycle. All in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// From the previous checkpoint's pause to this one's; 0 for the first.
    pub interval_ns: u64,
    /// How much later than planned the checkpoint began because the encoder was behind.
    pub backlog_ns: u64,
    /// The whole pause, from before QEMU is asked to stop until it has confirmed that the VM runs.
    pub pause_ns: u64,
    /// The parts of the pause.
    pub pause: PausePhases,
    /// Copy rounds while the guest ran.
    pub precopy_rounds: u32,
    /// The strategy's name.
    pub strategy: String,
    /// Pages copied in each round, the one inside the pause last.
    pub round_pages: Vec<u64>,
    /// Hashing, deduplication, compression and appending, until the seal began.
    pub encode_ns: u64,
}

/// The parts of a pause, in nanoseconds, consecutive but for the order: the device state comes
/// before the scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PausePhases {
    /// Until QEMU confirmed the stop.
    pub stop: u64,
    /// The last scan for dirty pages.
    pub scan: u64,
    /// Copying them.
    pub copy: u64,
    /// Saving the device state.
    pub device_state: u64,
    /// Until QEMU confirmed that the VM runs.
    pub resume: u64,
}

/// Pages and bytes of one checkpoint. `dirty_pages` is the sum of zero, deduplicated, unchanged and
/// stored pages: a page that was put more than once counts with its last put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Distinct pages put into the checkpoint.
    pub dirty_pages: u64,
    /// Of these: all zeros.
    pub zero_pages: u64,
    /// Of these: content that the store already held (elsewhere).
    pub dedup_pages: u64,
    /// Of the deduplicated ones: content that a disk had brought into the store.
    pub dedup_disk_pages: u64,
    /// Of the dirty ones: content that the page already had at the previous checkpoint.
    pub unchanged_pages: u64,
    /// Of these: content new to the store.
    pub stored_pages: u64,
    /// Bytes appended to packs for this checkpoint: record headers and contents superseded before
    /// the seal included.
    pub stored_bytes: u64,
    /// The size of its map file.
    pub map_bytes: u64,
    /// The device state as stored (compressed where that helps).
    pub device_bytes: u64,
}
