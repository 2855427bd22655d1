//! Compares the disks of two sides: a replay, or a checkpoint.
//!
//! Read and compared are the blocks that either side has written, and the blocks that differ
//! between the checkpoints that they began with.
//!
//! ```text
//!   replay        overlay: written since its checkpoint ─┐
//!                 checkpoint's blocks, image             ├─▶ blocks of which the two do not hold one record ─▶ contents
//!   checkpoint    its blocks, image                     ─┘
//! ```

use super::Difference;
use crate::error::{Error, Result};
use keyframe_disk::{BLOCK_BYTES, Below, Block, DiskBlock, DiskEpoch, Extent, Slot, SlotFile};
use keyframe_store::LoadedDisks;
use keyframe_units::PageIndex;
use keyframe_vm_disks::ServedDisks;
use keyframe_vm_disks::stored::StoredDisk;
use std::sync::Arc;
use std::time::Duration;

/// A paused replay may have handed over writes that the process of its disks has not done yet. The
/// comparison is repeated so often, after pauses of this length, while blocks differ.
const SETTLE_TURNS: u32 = 10;
const SETTLE: Duration = Duration::from_millis(100);

/// The disks of a checkpoint, with what a replay has written to them since.
pub struct ComparedDisks<'a> {
    checkpoint: Arc<LoadedDisks>,
    served: Option<&'a mut ServedDisks>,
}

/// One disk, for reading.
struct Reader {
    below: Below,
    /// What the replay has written, in rising order.
    written: Vec<Extent>,
    slots: Option<SlotFile>,
}

impl<'a> ComparedDisks<'a> {
    /// Makes the disks of `checkpoint`. `served` serves them to a replay, which writes to them;
    /// `None` if there is no replay.
    pub fn new(checkpoint: Arc<LoadedDisks>, served: Option<&'a mut ServedDisks>) -> Self {
        Self { checkpoint, served }
    }

    /// Puts what was written since the checkpoint into an epoch, until [`Self::give_back`].
    fn cut(&mut self) -> Result<Vec<DiskEpoch>> {
        self.served
            .as_mut()
            .map_or(Ok(Vec::new()), |served| served.disks.cut().map_err(Error::from))
    }

    fn give_back(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        match &mut self.served {
            Some(served) => served.disks.give_back(epochs).map_err(Error::from),
            None => Ok(()),
        }
    }

    fn reader(&mut self, disk: usize, epochs: &[DiskEpoch]) -> Result<Reader> {
        let stored = StoredDisk::of(Arc::clone(&self.checkpoint), disk);
        let below = stored.ok_or_else(other_disks)?.open()?;
        let (mut written, mut slots) = (Vec::new(), None);
        if let (Some(served), Some(epoch)) = (&mut self.served, epochs.get(disk)) {
            slots = Some(served.disks.slot_file(disk)?);
            let pages = served.disks.pages(disk, *epoch);
            written = pages.collect::<Result<_, _>>()?;
        }
        Ok(Reader { below, written, slots })
    }
}

impl Reader {
    /// Returns the first written extent that ends behind block `at`.
    fn extent_from(&self, at: u64) -> Option<&Extent> {
        let next = self.written.partition_point(|extent| extent.block.0 + extent.blocks <= at);
        self.written.get(next)
    }

    /// Returns the first written block that is not before `at`.
    fn next_written(&self, at: u64) -> Option<u64> {
        self.extent_from(at).map(|extent| extent.block.0.max(at))
    }

    /// Fills `into` with the block, of which `len` bytes lie on the disk.
    fn read(&self, block: DiskBlock, into: &mut Block, len: usize) -> Result<()> {
        let written = self.extent_from(block.0).filter(|extent| extent.block <= block);
        match (written, &self.slots) {
            (Some(Extent { slot: None, .. }), _) => into.fill(0),
            (Some(Extent { block: first, slot: Some(slot), .. }), Some(slots)) => {
                let slot = u64::from(slot.0) + (block.0 - first.0);
                let slot = u32::try_from(slot)
                    .map_err(|_| Error::NotComparable("a slot beyond the overlay".into()))?;
                slots.read(Slot(slot), into)?;
            }
            _ => {
                let at = block.0 * BLOCK_BYTES as u64;
                self.below.read(at, &mut into[..len])?;
            }
        }
        into[len..].fill(0);
        Ok(())
    }
}

/// Compares the disks of two sides of one recording. Replays must be paused.
///
/// # Errors
///
/// [`Error::NotComparable`] if the two do not have the same disks; other errors if blocks cannot be
/// read.
pub fn compare_disks(
    one: &mut ComparedDisks<'_>,
    other: &mut ComparedDisks<'_>,
) -> Result<Difference> {
    let mut turn = 1;
    loop {
        let epochs = [one.cut()?, other.cut()?];
        let mut difference = Difference::default();
        for disk in 0..one.checkpoint.meta.disks.len() {
            let readers = [one.reader(disk, &epochs[0])?, other.reader(disk, &epochs[1])?];
            compare_disk(&readers, [&one.checkpoint, &other.checkpoint], disk, &mut difference)?;
        }
        one.give_back(&epochs[0])?;
        other.give_back(&epochs[1])?;
        if difference.count == 0 || turn == SETTLE_TURNS {
            return Ok(difference);
        }
        turn += 1;
        std::thread::sleep(SETTLE);
    }
}

fn compare_disk(
    [one, other]: &[Reader; 2],
    [first, second]: [&LoadedDisks; 2],
    disk: usize,
    difference: &mut Difference,
) -> Result<()> {
    let of = |disks: &LoadedDisks| {
        Some((disks.meta.disks.get(disk)?.clone(), disks.meta.blocks_of(disk)?))
    };
    let (Some((meta, blocks)), Some((its, its_blocks))) = (of(first), of(second)) else {
        return Err(other_disks());
    };
    if (&meta.name, meta.disk_bytes, blocks) != (&its.name, its.disk_bytes, its_blocks) {
        let text = format!("disk {} of one is disk {} of the other", meta.name, its.name);
        return Err(Error::NotComparable(text));
    }
    let stored = |at: u64| {
        let next = first.next_differing(second, PageIndex(blocks.first.0.checked_add(at)?))?;
        next.0.checked_sub(blocks.first.0)
    };
    let (mut a, mut b) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
    let mut next_stored = stored(0);
    let mut at = 0;
    loop {
        if next_stored.is_some_and(|next| next < at) {
            next_stored = stored(at);
        }
        let next =
            [one.next_written(at), other.next_written(at), next_stored].into_iter().flatten().min();
        let Some(block) = next.filter(|next| *next < blocks.len_pages) else { return Ok(()) };
        let offset = block * BLOCK_BYTES as u64;
        let len = meta.disk_bytes.saturating_sub(offset).min(BLOCK_BYTES as u64) as usize;
        one.read(DiskBlock(block), &mut a, len)?;
        other.read(DiskBlock(block), &mut b, len)?;
        if a != b {
            difference.add(&meta.name, offset);
        }
        at = block + 1;
    }
}

/// The error of two sides with different disks.
fn other_disks() -> Error {
    Error::NotComparable("the two have not the same disks".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_disk::{Base, Lasting, Overlay};
    use keyframe_store::{BaseMeta, DiskMeta, DiskState, SealRequest, Store};
    use keyframe_units::{BlockKind, PAGE_BYTES, RamBlock, RamLayout};

    /// Ten blocks and a sector.
    const DISK_BYTES: u64 = 10 * BLOCK_BYTES as u64 + 512;

    fn page(value: u8) -> Block {
        [value; BLOCK_BYTES]
    }

    /// Checkpoints of a VM with one disk, each with what is put before it: block, value.
    fn checkpoints(store: &Store, puts: &[&[(u64, u8)]]) -> Vec<Arc<LoadedDisks>> {
        let bytes = PAGE_BYTES as u64;
        let block = RamBlock {
            name: "ram".into(),
            kind: BlockKind::Backend,
            used_bytes: bytes,
            total_bytes: bytes,
        };
        let ram = RamLayout::new(vec![block]).unwrap();
        let disk = DiskMeta {
            name: "d".into(),
            disk_bytes: DISK_BYTES,
            base: BaseMeta::blank(),
            ..DiskMeta::default()
        };
        let mut writer = store.lock_writer("test").unwrap();
        let mut run = writer.begin_run_with("vm", &ram, vec![disk], DiskState::default()).unwrap();
        let each = puts.iter().map(|puts| {
            puts.iter().for_each(|(block, value)| {
                run.put_block(0, *block, &page(*value)).map(drop).unwrap();
            });
            let sealed = run.seal(SealRequest::of_pages(&ram, "test"));
            Arc::new(store.load_disks(sealed.unwrap().id).unwrap())
        });
        each.collect()
    }

    fn differing_blocks(
        one: (&Arc<LoadedDisks>, &[Extent], Option<SlotFile>),
        other: &Arc<LoadedDisks>,
    ) -> Vec<u64> {
        let below =
            |of: &Arc<LoadedDisks>| StoredDisk::of(Arc::clone(of), 0).unwrap().open().unwrap();
        let readers = [
            Reader { below: below(one.0), written: one.1.to_vec(), slots: one.2 },
            Reader { below: below(other), written: Vec::new(), slots: None },
        ];
        let mut difference = Difference::default();
        compare_disk(&readers, [one.0, other], 0, &mut difference).unwrap();
        assert_eq!(difference.count, difference.first.len() as u64);
        difference.first.into_iter().map(|one| one.offset_bytes / BLOCK_BYTES as u64).collect()
    }

    #[test]
    fn every_block_that_differs_is_found_on_either_side() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::init(&dir.path().join("S")).unwrap();
        // The second checkpoint writes block 1 as it was, 2 with another value, and the last sector.
        let all = checkpoints(&store, &[&[(1, 1), (2, 2), (3, 3)], &[(1, 1), (2, 9), (10, 7)]]);
        assert_eq!(differing_blocks((&all[0], &[], None), &all[0]), [0; 0]);
        assert_eq!(differing_blocks((&all[0], &[], None), &all[1]), [2, 10]);

        // A replay from the first wrote some blocks of the second, and others.
        let dir = dir.path().join("overlay");
        let overlay = Overlay::create(&dir, DISK_BYTES, Lasting::Durable).unwrap();
        let base = Base::blank(DISK_BYTES).unwrap();
        let beneath = |at: u64, buf: &mut [u8]| base.read(at, buf);
        let at = |block: u64| block * BLOCK_BYTES as u64;
        overlay.write(at(2), &page(9), &beneath).unwrap();
        overlay.write(at(5), &page(5), &beneath).unwrap();
        overlay.write(at(10), &page(7)[..512], &beneath).unwrap();
        overlay.zero(at(3), BLOCK_BYTES as u64, &beneath).unwrap();
        let epoch = overlay.cut().unwrap();
        let (written, _) = overlay.pages(epoch, DiskBlock(0), 100).unwrap();
        let slots = || Some(SlotFile::open(&dir).unwrap());
        assert_eq!(differing_blocks((&all[0], &written, slots()), &all[1]), [3, 5]);
        assert_eq!(differing_blocks((&all[0], &written, slots()), &all[0]), [2, 3, 5, 10]);
    }
}
