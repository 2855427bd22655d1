//! Reads the display's registers from a device state, if the picture can be drawn from them and the
//! display's RAM block.
//!
//! ```text
//!   vga:            PCI 276 (not of an ISA card) │ 5 sr │ 14 gr │ 30 ar │ 57 cr │ 324 palette │
//!                   1099 VBE registers, start, line │ "vga.endian"
//!   bochs-display:  PCI 276 or 4116 │ 0 VBE registers │ 20 highest byte first
//! ```
//!
//! Not read: displays whose picture is not in their RAM block, and displays with other registers
//! (cirrus, qxl, vmware). [`Display::Unsupported`] names them with the reason.

use crate::sections::{Section, sections, u32_at};
use crate::{Result, StreamError};
use keyframe_screen::{Bochs, Registers, VBE_REGISTERS, Vga};

/// Length of a PCI function's part of a section: version of its format, configuration, interrupt
/// lines.
const PCI_BYTES: usize = 4 + 256 + 16;
/// The same for PCI Express.
const PCIE_BYTES: usize = 4 + 4096 + 16;
const VGA_LAYOUT: FieldLayout = FieldLayout { version: 2, len_bytes: 1131 };
const BOCHS_LAYOUT: FieldLayout = FieldLayout { version: 0, len_bytes: 21 };
/// Head of the optional part of a VGA that tells the byte order of pixels: mark, name and version.
/// One byte follows.
const ENDIAN: &[u8] = b"\x05\x0avga.endian\0\0\0\x01";

/// A VM's display: the first one that can be drawn, or else the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Display {
    /// The VM has no display.
    None,
    /// The picture is in the display's RAM block.
    InRam {
        /// QEMU's name of the device's section: `0000:00:02.0/vga`.
        device: String,
        /// QEMU's name of the RAM block: `0000:00:02.0/vga.vram`.
        block: String,
        /// The display's registers.
        registers: Registers,
    },
    /// Keyframe cannot draw the picture.
    Unsupported {
        /// The device's name on QEMU's command line.
        kind: &'static str,
        /// The reason why not.
        reason: &'static str,
    },
}

/// Displays that cannot be drawn: last part of the section's name, device name, reason.
const UNSUPPORTED: [(&str, &str, &str); 7] = [
    ("virtio-vga", "virtio-vga", "its picture is in QEMU's memory, not in the VM's RAM"),
    ("virtio-gpu", "virtio-gpu", "its picture is in QEMU's memory, not in the VM's RAM"),
    ("virtio-gpu-gl", "virtio-gpu", "its picture is in QEMU's memory, not in the VM's RAM"),
    ("cirrus_vga", "cirrus-vga", "Keyframe does not know its video modes"),
    ("qxl", "qxl", "its picture is made by commands to a viewer and is not in the VM's RAM"),
    ("vmware_vga", "vmware-svga", "Keyframe does not know its video modes"),
    ("ramfb", "ramfb", "a checkpoint does not tell where in RAM its picture is"),
];

/// Returns the display of the VM whose device state is `state`.
///
/// Errors: [`StreamError::DeviceState`] for a malformed state, or a display of an unknown version.
pub fn display(state: &[u8]) -> Result<Display> {
    crate::check(state)?;
    let all = sections(state)?;
    let kind = |section: &Section| section.name.rsplit('/').next().unwrap_or_default().to_owned();
    // The section of a vmware-svga follows one that is named like a VGA's.
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
        UNSUPPORTED.iter().find(|(name, ..)| *name == kind)
    });
    Ok(other.map_or(Display::None, |(_, kind, reason)| Display::Unsupported { kind, reason }))
}

/// The version and the length of a section's fields.
struct FieldLayout {
    version: u32,
    len_bytes: usize,
}

/// The fields after a section's PCI part, and the bytes after them. `ends` tells whether those
/// bytes can follow the fields.
fn fields<'a>(
    state: &'a [u8],
    section: &Section,
    layout: &FieldLayout,
    ends: fn(&[u8]) -> bool,
) -> Result<(&'a [u8], &'a [u8])> {
    let fail = |problem: String| StreamError::DeviceState {
        offset: section.body.start as u64,
        problem: format!("section {}: {problem}", section.name),
    };
    let &FieldLayout { version, len_bytes } = layout;
    if section.version != version {
        return Err(fail(format!("version {}; only version {version} is known", section.version)));
    }
    let body = state.get(section.body.clone()).unwrap_or_default();
    let heads: &[usize] = if section.name.contains('/') { &[PCI_BYTES, PCIE_BYTES] } else { &[0] };
    let found = heads.iter().find_map(|head| {
        let (fields, behind) = body.get(*head..)?.split_at_checked(len_bytes)?;
        ends(behind).then_some((fields, behind))
    });
    found.ok_or_else(|| fail(format!("its {} bytes are laid out in an unknown way", body.len())))
}

/// Name of the device's RAM block: on a bus, it begins with the device's address.
fn block(section: &Section, name: &str) -> String {
    match section.name.rsplit_once('/') {
        Some((address, _)) => format!("{address}/{name}"),
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
    let (fields, behind) = fields(state, section, &VGA_LAYOUT, is_optional)?;
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
    let (fields, _) = fields(state, section, &BOCHS_LAYOUT, <[u8]>::is_empty)?;
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

    /// A body whose fields begin at offset `head`.
    fn vga_body(head: usize) -> Vec<u8> {
        let mut body = vec![0; head + VGA_LAYOUT.len_bytes];
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
    fn vga_registers_are_read_at_their_offsets() {
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
        let mut body = vec![0; PCI_BYTES + BOCHS_LAYOUT.len_bytes];
        body[PCI_BYTES + 7] = 32;
        let gpu: (&str, u32, &[u8]) = ("0000:00:02.0/virtio-gpu", 1, &[0; 100]);
        let both = state(&[gpu, ("0000:00:03.0/bochs-display", 0, &body)]);
        let (block, found) = registers(display(&both).unwrap());
        assert_eq!(block, "0000:00:03.0/bochs-display-vram");
        assert!(
            matches!(found, Registers::Bochs(bochs) if bochs.vbe[3] == 32 && !bochs.is_big_endian)
        );
        let alone = display(&state(&[gpu])).unwrap();
        assert!(matches!(alone, Display::Unsupported { kind: "virtio-gpu", .. }));
        let vmware = state(&[("vga", 2, &vga_body(0)), ("0000:00:02.0/vmware_vga", 0, &[0; 9])]);
        assert!(matches!(
            display(&vmware).unwrap(),
            Display::Unsupported { kind: "vmware-svga", .. }
        ));
        assert_eq!(display(&state(&[("timer", 2, &[0; 24])])).unwrap(), Display::None);
    }

    #[test]
    fn another_layout_is_an_error() {
        let error = |version, body: &[u8]| {
            display(&state(&[("0000:00:02.0/vga", version, body)])).unwrap_err().to_string()
        };
        let body = vga_body(PCI_BYTES);
        assert!(error(3, &body).contains("version 3; only version 2 is known"));
        assert!(
            error(2, &body[..body.len() - 1]).contains("1406 bytes are laid out in an unknown way")
        );
        assert!(
            error(2, &[&body[..], &[0]].concat())
                .contains("1408 bytes are laid out in an unknown way")
        );
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
