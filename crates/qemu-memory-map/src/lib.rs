//! The guest's physical memory, as QEMU's monitor describes it: where RAM and firmware lie
//! ([`regions`]), and which parts a reset of the machine overwrites ([`reset_files`]). Pure: the caller
//! asks QEMU, and gives the answers.

pub mod regions;
pub mod reset_files;

/// QEMU's description of the guest's memory contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MapError(pub String);

/// A layout of blocks with these names, kinds and sizes in bytes.
#[cfg(test)]
fn layout_of(blocks: &[(&str, keyframe_units::BlockKind, usize)]) -> keyframe_units::RamLayout {
    let block = |&(name, kind, bytes): &(&str, keyframe_units::BlockKind, usize)| {
        let bytes = bytes as u64;
        let name = name.into();
        keyframe_units::RamBlock { name, kind, used_bytes: bytes, total_bytes: bytes }
    };
    keyframe_units::RamLayout::new(blocks.iter().map(block).collect()).unwrap()
}
