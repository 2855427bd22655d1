//! What a device state tells about the VM's display: its registers, where those are enough to draw what it shows.
//!
//! ```text
//!   vga:            PCI 276 (not of an ISA card) │ 0 latch sr gr ar │ 56 cr │ 328 palette │ 1096 VBE: 1 │ 1099 registers │ 1119 start, line │ "vga.endian"
//!   bochs-display:  PCI 276 or 4116 │ 0 VBE registers │ 20 highest byte first
//! ```
//!
//! Left out: displays whose picture is elsewhere than in their RAM block, and those with registers of their own (cirrus, qxl, vmware):
//! they are named, with the reason.

use super::sections::{Section, sections, u32_at};
use crate::{Error, Result};
use keyframe_screen::{Bochs, Registers, VBE_REGISTERS, Vga};

/// A PCI function's part of a section: version of its format, configuration, interrupt lines.
const PCI_BYTES: usize = 4 + 256 + 16;
/// The same on PCI Express.
const PCIE_BYTES: usize = 4 + 4096 + 16;
const VGA_BYTES: usize = 1131;
const VGA_VERSION: u32 = 2;
const BOCHS_BYTES: usize = 21;
const BOCHS_VERSION: u32 = 0;
/// The optional part of a VGA that says which byte of a pixel comes first: mark, name, version, and one byte.
const ENDIAN: &[u8] = b"\x05\x0avga.endian\0\0\0\x01";

/// A VM's display: the first one that can be drawn, or else the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Display {
    /// It has none.
    None,
    /// What it shows is in its RAM block.
    InRam {
        /// The device, as QEMU names its state: `0000:00:02.0/vga`.
        device: String,
        /// Its RAM block, as QEMU names it: `0000:00:02.0/vga.vram`.
        block: String,
        /// Its registers.
        registers: Registers,
    },
    /// What it shows cannot be drawn.
    Elsewhere {
        /// The kind of device, as QEMU's command line has it.
        kind: &'static str,
        /// Why not.
        why: &'static str,
    },
}

/// Devices that show something else than what is in a VGA's memory: the end of a section's name, the kind, why.
const ELSEWHERE: [(&str, &str, &str); 7] = [
    ("virtio-vga", "virtio-vga", "its picture is in QEMU, and not in RAM of the VM"),
    ("virtio-gpu", "virtio-gpu", "its picture is in QEMU, and not in RAM of the VM"),
    ("virtio-gpu-gl", "virtio-gpu", "its picture is in QEMU, and not in RAM of the VM"),
    ("cirrus_vga", "cirrus-vga", "its modes are not known here"),
    ("qxl", "qxl", "its picture is made by commands to a viewer, and not in RAM of the VM"),
    ("vmware_vga", "vmware-svga", "its modes are not known here"),
    ("ramfb", "ramfb", "where its picture is in RAM is not in a checkpoint"),
];

/// The display of the VM whose device state is `state`.
///
/// Errors: [`Error::DeviceStream`] for a state that is not understood.
pub fn display(state: &[u8]) -> Result<Display> {
    super::check(state)?;
    let all = sections(state)?;
    let kind = |section: &Section| section.name.rsplit('/').next().unwrap_or_default().to_owned();
    // Its first part is the section of a VGA.
    let is_vmware = all.iter().any(|section| kind(section) == "vmware_vga");
    for section in &all {
        match kind(section).as_str() {
            "vga" if !is_vmware => return vga(state, section),
            "bochs-display" => return bochs(state, section),
            _ => {}
        }
    }
    let other = all.iter().find_map(|section| {
        let kind = kind(section);
        ELSEWHERE.iter().find(|(name, ..)| *name == kind)
    });
    Ok(other.map_or(Display::None, |(_, kind, why)| Display::Elsewhere { kind, why }))
}

/// The fields of a section behind what it has as a PCI function: `len` bytes, and what follows them. `ends` says whether the
/// latter can be that.
fn fields<'a>(
    state: &'a [u8],
    section: &Section,
    (version, len): (u32, usize),
    ends: fn(&[u8]) -> bool,
) -> Result<(&'a [u8], &'a [u8])> {
    let fail = |problem: String| Error::DeviceStream {
        offset: section.body.start as u64,
        problem: format!("section {}: {problem}", section.name),
    };
    if section.version != version {
        return Err(fail(format!("version {}; known is {version}", section.version)));
    }
    let body = state.get(section.body.clone()).unwrap_or_default();
    let heads: &[usize] = if section.name.contains('/') { &[PCI_BYTES, PCIE_BYTES] } else { &[0] };
    let found = heads.iter().find_map(|head| {
        let (fields, behind) = body.get(*head..)?.split_at_checked(len)?;
        ends(behind).then_some((fields, behind))
    });
    found.ok_or_else(|| fail(format!("its {} bytes are laid out in a way that is not known", body.len())))
}

/// A block of the device whose section this is: on a bus, its name begins with the device's place.
fn block(section: &Section, name: &str) -> String {
    match section.name.rsplit_once('/') {
        Some((place, _)) => format!("{place}/{name}"),
        None => name.to_owned(),
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

fn vbe(bytes: &[u8], at: usize) -> [u16; VBE_REGISTERS] {
    std::array::from_fn(|number| u16::from_be_bytes(array(bytes, at + number * 2)))
}

fn vga(state: &[u8], section: &Section) -> Result<Display> {
    let is_optional = |behind: &[u8]| behind.is_empty() || behind.starts_with(ENDIAN);
    let (fields, behind) = fields(state, section, (VGA_VERSION, VGA_BYTES), is_optional)?;
    let registers = Vga {
        sequencer: array(fields, 5),
        graphics: array(fields, 14),
        attribute_index: array::<1>(fields, 30)[0],
        attributes: array(fields, 31),
        crtc: array(fields, 57),
        palette: array(fields, 324),
        vbe: vbe(fields, 1099),
        vbe_start: u32_at(fields, 1119).unwrap_or_default(),
        vbe_line_bytes: u32_at(fields, 1123).unwrap_or_default(),
        is_big_endian: behind.get(ENDIAN.len()).is_some_and(|byte| *byte != 0),
    };
    Ok(Display::InRam {
        device: section.name.clone(),
        block: block(section, "vga.vram"),
        registers: Registers::Vga(Box::new(registers)),
    })
}

fn bochs(state: &[u8], section: &Section) -> Result<Display> {
    let (fields, _) = fields(state, section, (BOCHS_VERSION, BOCHS_BYTES), <[u8]>::is_empty)?;
    let registers =
        Bochs { vbe: vbe(fields, 0), is_big_endian: fields.last().is_some_and(|byte| *byte != 0) };
    Ok(Display::InRam {
        device: section.name.clone(),
        block: block(section, "bochs-display-vram"),
        registers: Registers::Bochs(registers),
    })
}
