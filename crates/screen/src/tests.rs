//! Pictures against what is expected of them, and against drawing that asks for each pixel by
//! itself.

use crate::fuzzing::draw;
use crate::registers::vbe;
use crate::{Bochs, PIXELS_MAX, Picture, PictureProblem, Registers, Screen, Vga};
use proptest::prelude::*;

fn pixel(picture: &Picture, x: u32, y: u32) -> [u8; 3] {
    let at = (y as usize * picture.width as usize + x as usize) * 3;
    picture.rgb[at..at + 3].try_into().unwrap()
}

/// What `vga` shows of `memory`.
fn shown(vga: &Vga, memory: &[u8]) -> Picture {
    let screen = Screen::new(&Registers::Vga(Box::new(vga.clone())), memory.len() as u64).unwrap();
    let needs = screen.needs();
    screen.draw(&memory[needs.start as usize..needs.end as usize])
}

/// A VGA that shows something: the colours of the palette are 0, 4, 8, ... in blue, and the
/// colour's number in red.
fn vga() -> Vga {
    let mut vga = Vga { attribute_index: 0x20, ..Vga::default() };
    for colour in 0..=255u8 {
        vga.palette[usize::from(colour) * 3] = colour & 0x3f;
        vga.palette[usize::from(colour) * 3 + 2] = colour >> 6;
    }
    for (colour, to) in vga.attributes.iter_mut().take(16).zip(0..) {
        *colour = to;
    }
    vga.attributes[0x12] = 0xf;
    vga
}

fn with_vbe(width: u16, height: u16, bits: u16) -> Vga {
    let mut vga = vga();
    vga.vbe[vbe::ENABLE] = vbe::ENABLED;
    (vga.vbe[vbe::WIDTH], vga.vbe[vbe::HEIGHT], vga.vbe[vbe::BITS]) = (width, height, bits);
    vga.vbe_line_bytes = u32::from(width) * u32::from(bits) / 8;
    vga
}

/// 80 columns of 25 lines, 16 pixels tall, fonts at 0.
fn text() -> Vga {
    let mut vga = vga();
    vga.crtc[0x01] = 79;
    vga.crtc[0x07] = 0x02;
    vga.crtc[0x09] = 15;
    vga.crtc[0x0a] = 0x20;
    vga.crtc[0x12] = 0x8f;
    vga.crtc[0x13] = 40 * 2 / 2;
    vga.crtc[0x18] = 0xff;
    vga.crtc[0x07] |= 0x10;
    vga.crtc[0x09] |= 0x40;
    vga
}

/// The part of a colour that is shown of palette colour `number`.
fn expected(number: u8) -> [u8; 3] {
    let eight = |six: u8| six << 2 | (six & 1) << 1 | six & 1;
    [eight(number & 0x3f), 0, eight(number >> 6)]
}

#[test]
fn a_linear_picture_begins_at_its_start_and_has_its_own_lines() {
    let mut vga = with_vbe(8, 2, 32);
    (vga.vbe_start, vga.vbe_line_bytes) = (3, 64);
    let mut memory = vec![0; 4096];
    memory[12..15].copy_from_slice(&[1, 2, 3]);
    memory[12 + 64 + 28..12 + 64 + 31].copy_from_slice(&[4, 5, 6]);
    let picture = shown(&vga, &memory);
    assert_eq!((picture.width, picture.height), (8, 2));
    assert_eq!((pixel(&picture, 0, 0), pixel(&picture, 7, 1)), ([3, 2, 1], [6, 5, 4]));
    vga.is_big_endian = true;
    memory[12..16].copy_from_slice(&[9, 1, 2, 3]);
    assert_eq!(pixel(&shown(&vga, &memory), 0, 0), [1, 2, 3]);
}

#[test]
fn each_depth_has_its_colours() {
    let memory = |bytes: &[u8]| [bytes, &vec![0; 65536]].concat()[..65536].to_vec();
    let first = |bits, bytes: &[u8]| pixel(&shown(&with_vbe(64, 8, bits), &memory(bytes)), 0, 0);
    assert_eq!(first(8, &[77]), expected(77));
    assert_eq!(first(15, &[0xff, 0x7f]), [0xff; 3]);
    assert_eq!(first(15, &[0x00, 0x40]), [0x84, 0, 0]);
    assert_eq!(first(16, &[0xff, 0xff]), [0xff; 3]);
    assert_eq!(first(16, &[0x00, 0x80]), [0x84, 0, 0]);
    assert_eq!(first(24, &[1, 2, 3]), [3, 2, 1]);
    let mut vga = with_vbe(64, 8, 8);
    vga.vbe[vbe::ENABLE] |= vbe::EIGHT_BIT_PALETTE;
    assert_eq!(pixel(&shown(&vga, &memory(&[77])), 0, 0), [0x0d, 0, 1]);
    let odd = Screen::new(&Registers::Vga(Box::new(with_vbe(64, 8, 12))), 65536).unwrap_err();
    assert_eq!(odd, PictureProblem::Bits { bits: 12 });
}

#[test]
fn a_picture_that_reaches_beyond_the_memory_begins_anew() {
    let mut vga = with_vbe(16, 4, 8);
    vga.vbe_start = 4;
    let memory: Vec<u8> = (0..64).collect();
    let picture = shown(&vga, &memory);
    assert_eq!((pixel(&picture, 0, 0), pixel(&picture, 0, 3)), (expected(16), expected(0)));
}

#[test]
fn a_display_without_vga_is_linear_too() {
    let mut bochs = Bochs::default();
    let screen = |bochs| Screen::new(&Registers::Bochs(bochs), 1 << 20);
    assert_eq!(screen(bochs).unwrap_err(), PictureProblem::NoMode);
    (bochs.vbe[vbe::WIDTH], bochs.vbe[vbe::HEIGHT], bochs.vbe[vbe::BITS]) = (64, 64, 32);
    (bochs.vbe[vbe::VIRTUAL_WIDTH], bochs.vbe[vbe::X_OFFSET], bochs.vbe[vbe::Y_OFFSET]) =
        (128, 2, 3);
    assert_eq!(screen(bochs).unwrap().needs(), 3 * 512 + 8..(3 + 63) * 512 + 8 + 256);
    bochs.vbe[vbe::Y_OFFSET] = 0xffff;
    assert_eq!(screen(bochs).unwrap_err(), PictureProblem::Beyond { memory_bytes: 1 << 20 });
}

#[test]
fn text_has_its_shapes_colours_and_cursor() {
    let mut memory = vec![0; 256 << 10];
    // The second character of the second line: an A in 14 on 1.
    memory[640 / 2 + 4..][..2].copy_from_slice(&[b'A', 0x1e]);
    // Its shape: a stroke at the left and right of its third line.
    memory[2 + (32 * usize::from(b'A') + 2) * 4] = 0b1000_0001;
    let mut vga = text();
    vga.sequencer[1] = 1;
    let picture = shown(&vga, &memory);
    assert_eq!((picture.width, picture.height), (640, 400));
    let of = |picture: &Picture, x: u32, y: u32| pixel(picture, 8 + x, 16 + y);
    assert_eq!([0, 1, 7].map(|x| of(&picture, x, 2)), [14, 1, 14].map(expected));
    assert_eq!((of(&picture, 0, 3), pixel(&picture, 0, 0)), (expected(1), expected(0)));
    // The cursor, in its lower lines.
    (vga.crtc[0x0a], vga.crtc[0x0b], vga.crtc[0x0f]) = (14, 31, 81);
    let picture = shown(&vga, &memory);
    assert_eq!([13, 14, 15].map(|y| of(&picture, 3, y)), [1, 14, 14].map(expected));
    // Nine pixels across; the ninth is the paper's, and only line drawings go on into it.
    vga.sequencer[1] = 0;
    let picture = shown(&vga, &memory);
    assert_eq!((picture.width, pixel(&picture, 9 + 8, 16 + 2)), (720, expected(1)));
    memory[640 / 2 + 4] = 0xc4;
    memory[2 + (32 * 0xc4 + 2) * 4] = 0xff;
    assert_eq!(pixel(&shown(&vga, &memory), 9 + 8, 16 + 2), expected(1));
    vga.attributes[0x10] |= 4;
    assert_eq!(pixel(&shown(&vga, &memory), 9 + 8, 16 + 2), expected(14));
}

#[test]
fn sixteen_colours_lie_in_planes_and_256_in_bytes() {
    let mut vga = vga();
    (vga.crtc[0x01], vga.crtc[0x12], vga.crtc[0x13], vga.crtc[0x17]) = (79, 199, 40, 3);
    (vga.crtc[0x18], vga.crtc[0x07], vga.graphics[6]) = (0xff, 0x10, 1);
    let mut memory = vec![0; 256 << 10];
    // Bit 7 in planes 0 and 2, bit 0 in plane 3; the next line in plane 1.
    memory[..4].copy_from_slice(&[0x80, 0, 0x80, 1]);
    memory[320 + 1] = 0x40;
    let picture = shown(&vga, &memory);
    assert_eq!((picture.width, picture.height), (640, 200));
    assert_eq!([0, 1, 7].map(|x| pixel(&picture, x, 0)), [5, 0, 8].map(expected));
    assert_eq!(pixel(&picture, 1, 1), expected(2));
    // The same as bytes: pixels twice across, and each line twice.
    vga.graphics[5] = 0x40;
    vga.crtc[0x09] = 1;
    let picture = shown(&vga, &memory);
    assert_eq!([0, 1, 2, 5].map(|x| pixel(&picture, x, 1)), [0x80, 0x80, 0, 0x80].map(expected));
}

#[test]
fn what_cannot_be_is_refused_and_what_is_blank_is_black() {
    let too_large = with_vbe(16000, 12000, 8);
    let refused = Screen::new(&Registers::Vga(Box::new(too_large)), 16 << 20).unwrap_err();
    assert_eq!(refused, PictureProblem::TooLarge { width: 16000, height: 12000 });
    const { assert!(16000 * 12000 > PIXELS_MAX) };
    let fresh = Screen::new(&Registers::Vga(Box::default()), 16 << 20).unwrap_err();
    assert_eq!(fresh, PictureProblem::NoMode);
    let mut blank = with_vbe(64, 64, 32);
    blank.attribute_index = 0;
    let picture = shown(&blank, &vec![0xff; 65536]);
    assert!(picture.width == 64 && picture.rgb.iter().all(|byte| *byte == 0));
}

proptest! {
    #[test]
    fn no_registers_panic(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
        draw(&bytes);
    }

    /// Memory that begins later or ends earlier is as if its bytes were zeros.
    #[test]
    fn short_memory_is_zeros(columns in 1u8..40, len in 0usize..3000) {
        let mut vga = text();
        vga.crtc[0x01] = columns;
        let screen = Screen::new(&Registers::Vga(Box::new(vga)), 1 << 20).unwrap();
        let mut whole: Vec<u8> = (0..screen.needs().end).map(|at| (at % 251) as u8).collect();
        let short = screen.draw(&whole[..len]);
        whole[len..].fill(0);
        prop_assert_eq!(short, screen.draw(&whole));
    }
}
