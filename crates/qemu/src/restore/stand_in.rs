//! Stands in for a kernel or an initial RAM disk whose file is gone.
//!
//! QEMU reads these files at its start, and the restored guest does not: its kernel is in its RAM.
//! With a stand-in QEMU makes the same devices and ROMs. After a reset the guest does not boot.

use crate::Result;
use crate::vm::{inherited_path, memfd};
use keyframe_qemu_cmdline::Argument;
use keyframe_units::RamLayout;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The name of QEMU's ROM that starts a PVH kernel.
const PVH_ROM: &str = "pvh.bin";
/// The name of QEMU's ROM that starts a multiboot kernel.
const MULTIBOOT_ROM: &str = "multiboot";
/// The place of a stand-in's path on a planned command line.
const KERNEL: &str = "/keyframe-stand-in-kernel";
const INITRD: &str = "/keyframe-stand-in-initrd";

/// Names stand-ins in place of files of `line` that are gone. Relative paths begin in `directory`.
/// Returns notes for the user. A multiboot kernel has no stand-in.
pub(super) fn name_stand_ins(
    line: &mut [Argument],
    directory: &Path,
    ram: &RamLayout,
) -> Vec<String> {
    let is_multiboot = ram.blocks().iter().any(|block| block.name.contains(MULTIBOOT_ROM));
    let mut notes = Vec::new();
    for argument in line {
        let stand_in = match argument.name() {
            "kernel" if !is_multiboot => KERNEL,
            "initrd" if !is_multiboot => INITRD,
            _ => continue,
        };
        if directory.join(argument.value()).exists() {
            continue;
        }
        notes.push(format!(
            "{} is gone: the VM goes on from its RAM, and does not boot after a reset",
            argument.display()
        ));
        *argument = Argument::Option(argument.name().into(), stand_in.into());
    }
    notes
}

/// Makes the stand-ins that `words` name.
pub(super) fn make_stand_ins(words: &mut [String], ram: &RamLayout) -> Result<Vec<OwnedFd>> {
    let mut files = Vec::new();
    for word in words {
        let content = match word.as_str() {
            KERNEL if ram.blocks().iter().any(|block| block.name.contains(PVH_ROM)) => pvh_kernel(),
            KERNEL => linux_kernel(),
            INITRD => vec![0; 4096],
            _ => continue,
        };
        let file = memfd("stand-in", &content)?;
        *word = inherited_path(&file);
        files.push(file);
    }
    Ok(files)
}

/// A file with the header of a Linux kernel (boot protocol 2.12), without code.
fn linux_kernel() -> Vec<u8> {
    let mut kernel = vec![0; 64 << 10];
    kernel[0x1f1] = 4; // setup sectors
    kernel[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x020c_u16.to_le_bytes());
    kernel[0x211] = 1; // loaded high
    kernel[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes()); // highest initrd address
    kernel[0x238..0x23c].copy_from_slice(&2047_u32.to_le_bytes()); // longest command line
    kernel
}

/// An ELF file with a note of the entry for PVH, without code.
fn pvh_kernel() -> Vec<u8> {
    const LOAD: u64 = 0x0100_0000;
    let mut kernel = Vec::new();
    kernel.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    kernel.extend([2u16, 62].iter().flat_map(|n| n.to_le_bytes())); // an executable, x86-64
    kernel.extend(1u32.to_le_bytes());
    kernel.extend([LOAD, 64, 0].iter().flat_map(|n| n.to_le_bytes())); // entry, program headers
    kernel.extend(0u32.to_le_bytes());
    kernel.extend([64u16, 56, 2, 64, 0, 0].iter().flat_map(|n| n.to_le_bytes()));
    let mut header = |kind: u32, flags: u32, offset: u64, address: u64, bytes: u64| {
        kernel.extend([kind, flags].iter().flat_map(|n| n.to_le_bytes()));
        let fields = [offset, address, address, bytes, bytes, 4];
        kernel.extend(fields.iter().flat_map(|n| n.to_le_bytes()));
    };
    header(1, 5, 256, LOAD, 64);
    header(4, 4, 192, 0, 24);
    kernel.resize(192, 0);
    // The note XEN_ELFNOTE_PHYS32_ENTRY with an entry of 8 bytes.
    kernel.extend([4u32, 8, 18].iter().flat_map(|n| n.to_le_bytes()));
    kernel.extend(b"Xen\0");
    kernel.extend(LOAD.to_le_bytes());
    kernel.resize(4096, 0);
    kernel
}
