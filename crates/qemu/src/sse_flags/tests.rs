use super::firmware;
use super::layout::{CpuLayout, Trial};
use super::search::CpuNames;
use super::*;

const MXCSR_AT: usize = 0x344;
const FLAGS_AT: usize = 0x336;
const RIP: u64 = 0x1234;
const RIP_AT: usize = 32 * 8;

/// The trials as QEMU 7.2 has shown them: the flags, and MXCSR with all of them.
const SEEN: [(u16, u32); 9] = [
    (0x0, 0x1f80),
    (0x401, 0x1f81),
    (0x2, 0x1f84),
    (0x10, 0x1fa0),
    (0x14, 0x1fa8),
    (0x18, 0x1fb0),
    (0x0, 0x1f80),
    (0x40, 0x9fb0),
    (0x20, 0x1fc0),
];

fn names() -> CpuNames {
    CpuNames::new("AuthenticAMD", "QEMU Virtual CPU version 2.5+").unwrap()
}

fn memory(flags: u16, mxcsr: u32) -> Vec<u8> {
    let mut memory = vec![0; 0x4000];
    memory[RIP_AT..RIP_AT + 8].copy_from_slice(&RIP.to_le_bytes());
    memory[FLAGS_AT..FLAGS_AT + 2].copy_from_slice(&flags.to_le_bytes());
    memory[MXCSR_AT..MXCSR_AT + 4].copy_from_slice(&mxcsr.to_le_bytes());
    memory[0x346c..0x3478].copy_from_slice(&names().vendor);
    memory[0x36c0..0x36f0].copy_from_slice(&names().model);
    memory
}

fn trials(memory: impl Fn(u16, u32) -> Vec<u8>) -> Vec<Trial> {
    SEEN.iter()
        .map(|(flags, mxcsr)| Trial { memory: memory(*flags, *mxcsr), mxcsr: *mxcsr, rip: RIP })
        .collect()
}

#[test]
fn the_layout_follows_from_the_trials() {
    let layout = CpuLayout::of_trials(&trials(memory), &names()).unwrap();
    assert_eq!((layout.rip, layout.vendor, layout.model), (RIP_AT, 0x346c, 0x36c0));
    for (flags, mxcsr) in [(0x401, 0x01), (0x12, 0x24), (0x5f, 0x3d), (0x20, 0), (0x8000, 0)] {
        let memory = memory(flags, 0x1f80);
        assert_eq!((layout.flags(&memory), layout.mxcsr(&memory)), (Some(mxcsr), Some(0x1f80)));
    }
    assert_eq!(layout.flags(&[0; 100]), None);
}

#[test]
fn a_layout_with_two_places_or_another_order_of_flags_is_unknown() {
    let twice = |flags: u16, mxcsr| {
        let mut memory = memory(flags, mxcsr);
        memory[0x200..0x202].copy_from_slice(&flags.to_le_bytes());
        memory
    };
    assert!(CpuLayout::of_trials(&trials(twice), &names()).is_none());
    let no_inexact = |flags: u16, mxcsr| memory(flags & !0x10, mxcsr);
    assert!(CpuLayout::of_trials(&trials(no_inexact), &names()).is_none());
    assert!(CpuLayout::of_trials(&[], &names()).is_none());
}

#[test]
fn the_cache_gives_back_what_it_got_and_ignores_damage() {
    let cache = tempfile::tempdir().unwrap();
    let layout = CpuLayout::of_trials(&trials(memory), &names()).unwrap();
    assert_eq!(CpuLayout::load(cache.path(), "ab"), None);
    layout.store(cache.path(), "ab");
    assert_eq!(CpuLayout::load(cache.path(), "ab"), Some(layout));
    let file = cache.path().join("cpu-layouts/ab.json");
    let text = std::fs::read_to_string(&file).unwrap();
    for damaged in [&text[1..], &text.replace("822", "8220000"), &text.replace("n\":1", "n\":2")] {
        assert_ne!(damaged, text);
        std::fs::write(&file, damaged).unwrap();
        assert_eq!(CpuLayout::load(cache.path(), "ab"), None, "{damaged}");
    }
}

#[test]
fn flags_go_to_the_cpu_whose_registers_agree() {
    let cpu = |rax, flags| {
        let mut general = [0; 16];
        general[0] = rax;
        CpuMemory { general, rip: 7, mxcsr: 0x1f80, flags }
    };
    let saved = |rax| {
        let CpuMemory { general, rip, mxcsr, .. } = cpu(rax, 0);
        SavedCpu { index: 0, general, rip, mxcsr }
    };
    let layout = CpuLayout::of_trials(&trials(memory), &names()).unwrap();
    let flags = SseFlags {
        process: Process::open(std::process::id()).unwrap(),
        layout,
        names: names(),
        ram: Vec::new(),
        cpus: Vec::new(),
        searched_for: 0,
        searches_left: 0,
        noted: vec![cpu(1, 0x21), cpu(2, 0), cpu(3, 0), cpu(3, 0), cpu(4, 1), cpu(4, 2)],
    };
    let found: Vec<_> = [1, 2, 3, 4, 5].map(|rax| flags.flags_of(&saved(rax))).into();
    assert_eq!(found, [Some(0x21), Some(0), Some(0), None, None]);
    assert_eq!(flags.flags_of(&SavedCpu { mxcsr: 0x1f00, ..saved(1) }), None);
}

#[test]
fn the_firmware_fits_and_jumps_to_its_code() {
    let image = firmware::image();
    assert_eq!(image.len(), 64 << 10);
    assert_eq!(&image[0xfff0..0xfff5], [0xea, 0, 0, 0, 0xf0]);
    // The table is where the code expects it.
    assert_eq!(image[0x70..0x74], 0x1f80u32.to_le_bytes());
}
