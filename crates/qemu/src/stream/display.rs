//! What a device state tells about the VM's display: its registers, where those are enough to draw
//! what it shows.
//!
//! ```text
//!   vga:            PCI 276 (not of an ISA card) │ 5 sr │ 14 gr │ 30 ar │ 57 cr │ 324 palette │ 1099 VBE registers, start, line │ "vga.endian"
//!   bochs-display:  PCI 276 or 4116 │ 0 VBE registers │ 20 highest byte first
//! ```
//!
//! Left out: displays whose picture is elsewhere than in their RAM block, and those with registers
//! of their own (cirrus, qxl, vmware): they are named, with the reason.

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
/// The optional part of a VGA that says which byte of a pixel comes first: mark, name, version, and
/// one byte.
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

/// Devices that show something else than what is in a VGA's memory: the end of a section's name,
/// the kind, why.
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

/// The fields of a section behind what it has as a PCI function: `len` bytes, and what follows
/// them. `ends` says whether the latter can be that.
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
    found.ok_or_else(|| {
        fail(format!("its {} bytes are laid out in a way that is not known", body.len()))
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state(sections: &[(&str, u32, &[u8])]) -> Vec<u8> {
        let mut out = b"QEVM\0\0\0\x03".to_vec();
        for (id, (name, version, body)) in (0u32..).zip(sections) {
            out.push(4);
            out.extend(id.to_be_bytes());
            out.push(name.len() as u8);
            out.extend(name.as_bytes());
            out.extend([0; 4]);
            out.extend(version.to_be_bytes());
            out.extend(*body);
            out.push(0x7e);
            out.extend(id.to_be_bytes());
        }
        out.push(0);
        out
    }

    /// A body whose fields begin behind `head` bytes.
    fn vga_body(head: usize) -> Vec<u8> {
        let mut body = vec![0; head + VGA_BYTES];
        for (at, value) in
            [(5, 1), (14 + 6, 5), (30, 0x20), (31 + 0x10, 0x0c), (57 + 0x12, 0x8f), (324, 63)]
        {
            body[head + at] = value;
        }
        body[head + 1099 + 2..head + 1099 + 4].copy_from_slice(&800u16.to_be_bytes());
        body[head + 1119..head + 1127].copy_from_slice(&[0, 0, 0, 7, 0, 0, 12, 128]);
        body
    }

    fn registers(display: Display) -> (String, Registers) {
        match display {
            Display::InRam { block, registers, .. } => (block, registers),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_vgas_registers_are_where_the_drawing_says() {
        let on_pci =
            state(&[("timer", 2, &[0; 24]), ("0000:00:02.0/vga", 2, &vga_body(PCI_BYTES))]);
        let (block, found) = registers(display(&on_pci).unwrap());
        let Registers::Vga(vga) = found.clone() else { panic!("{found:?}") };
        assert_eq!(block, "0000:00:02.0/vga.vram");
        assert_eq!((vga.sequencer[0], vga.graphics[6], vga.attribute_index), (1, 5, 0x20));
        assert_eq!((vga.attributes[0x10], vga.crtc[0x12], vga.palette[0]), (0x0c, 0x8f, 63));
        assert_eq!((vga.vbe[1], vga.vbe_start, vga.vbe_line_bytes), (800, 7, 3200));
        // On PCI Express, and without PCI, they are the same.
        let express = state(&[("0000:00:02.0/vga", 2, &vga_body(PCIE_BYTES))]);
        assert_eq!(registers(display(&express).unwrap()).1, found);
        let isa = state(&[("vga", 2, &vga_body(0))]);
        assert_eq!(registers(display(&isa).unwrap()), ("vga.vram".into(), found));
        let mut swapped = vga_body(0);
        swapped.extend(ENDIAN);
        swapped.push(1);
        let (_, found) = registers(display(&state(&[("vga", 2, &swapped)])).unwrap());
        assert!(matches!(found, Registers::Vga(vga) if vga.is_big_endian));
    }

    #[test]
    fn the_first_display_that_can_be_drawn_is_shown() {
        let mut body = vec![0; PCI_BYTES + BOCHS_BYTES];
        body[PCI_BYTES + 7] = 32;
        let gpu: (&str, u32, &[u8]) = ("0000:00:02.0/virtio-gpu", 1, &[0; 100]);
        let both = state(&[gpu, ("0000:00:03.0/bochs-display", 0, &body)]);
        let (block, found) = registers(display(&both).unwrap());
        assert_eq!(block, "0000:00:03.0/bochs-display-vram");
        assert!(
            matches!(found, Registers::Bochs(bochs) if bochs.vbe[3] == 32 && !bochs.is_big_endian)
        );
        let alone = display(&state(&[gpu])).unwrap();
        assert!(matches!(alone, Display::Elsewhere { kind: "virtio-gpu", .. }));
        let vmware = state(&[("vga", 2, &vga_body(0)), ("0000:00:02.0/vmware_vga", 0, &[0; 9])]);
        assert!(matches!(
            display(&vmware).unwrap(),
            Display::Elsewhere { kind: "vmware-svga", .. }
        ));
        assert_eq!(display(&state(&[("timer", 2, &[0; 24])])).unwrap(), Display::None);
    }

    #[test]
    fn another_layout_is_an_error() {
        let error = |version, body: &[u8]| {
            display(&state(&[("0000:00:02.0/vga", version, body)])).unwrap_err().to_string()
        };
        let body = vga_body(PCI_BYTES);
        assert!(error(3, &body).contains("version 3; known is 2"));
        assert!(error(2, &body[..body.len() - 1]).contains("1406 bytes are laid out in a way"));
        assert!(error(2, &[&body[..], &[0]].concat()).contains("1408 bytes are laid out in a way"));
    }

    proptest! {
        #[test]
        fn no_state_panics(body in prop::collection::vec(any::<u8>(), 0..1500), version in 0u32..4) {
            for name in ["vga", "0000:00:02.0/vga", "x/bochs-display", "x/virtio-gpu", "/"] {
                let _ = display(&state(&[(name, version, &body)]));
            }
            let _ = display(&body);
        }
    }
}
