//! Tests with a device state that Firecracker 1.12.1 saved of a VM of two processors, the second of
//! which had not run. To be small, it has one CPUID entry and three MSRs of each processor, short
//! texts in place of XSAVE and interrupt controllers, and no devices.

use super::*;
use proptest::prelude::*;

const RECORDED: &[u8] = include_bytes!("../../tests/golden/state-6.0.0.bin");

fn x86(cpu: &CpuRegisters) -> &X86Registers {
    let RegisterValues::X86_64(values) = &cpu.values else { panic!("{cpu:?}") };
    values
}

fn problem(state: &[u8]) -> String {
    read(state).unwrap_err().to_string()
}

#[test]
fn the_registers_of_a_recorded_state_are_those_of_its_vm() {
    let cpus = read(RECORDED).unwrap();
    assert_eq!(cpus.iter().map(|cpu| cpu.index).collect::<Vec<_>>(), [0, 1]);
    let first = x86(&cpus[0]);
    // In the payload's text, and below the top of its stack.
    assert_eq!((first.rip, first.general[4], first.rflags), (0x10_04f8, 0x10_5f50, 0x82));
    assert_eq!((first.general[0], first.general[15]), (0x164_e000, 0x9e37_79b9_7f4a_7c15));
    // As Firecracker's boot set-up has made them.
    assert_eq!(first.control, [0xe000_0011, 0, 0, 0x9000, 0x20]);
    let table = |base, limit| SegmentRegister { base, limit, ..SegmentRegister::default() };
    assert_eq!((first.gdt, first.idt), (table(0x500, 0x1f), table(0x520, 7)));
    let segment = |selector, flags| SegmentRegister { selector, base: 0, limit: u32::MAX, flags };
    let [es, cs, ss, ds, fs, gs] = first.segments;
    // A 64-bit code segment, present, accessed.
    assert_eq!(cs, segment(8, 0x00a0_9b00));
    assert_eq!([es, ss, ds, fs, gs], [segment(16, 0x00c0_9300); 5]);
    assert_eq!(first.tr, segment(24, 0x0080_8b00));
    let second = x86(&cpus[1]);
    assert_eq!((second.rip, second.general[4], second.rflags), (0x10_0000, 0x8ff0, 2));
}

#[test]
fn each_register_is_read_at_its_place() {
    let numbered = |count: u64, first: u64| (0..count).flat_map(move |k| (first + k).to_le_bytes());
    let regs: Vec<u8> = numbered(18, 0).collect();
    let mut sregs: Vec<u8> =
        (0..8u8).flat_map(|k| [[k; 14].to_vec(), vec![0; 10]].concat()).collect();
    sregs.extend((8..10u8).flat_map(|k| [[k; 10].to_vec(), vec![0; 6]].concat()));
    sregs.extend(numbered(11, 100));
    assert_eq!((regs.len(), sregs.len()), (144, 312), "the sizes of KVM's structures");
    let found = registers(&regs, &sregs, 7).unwrap();
    // KVM: rax rbx rcx rdx rsi rdi rsp rbp. A core: rax rcx rdx rbx rsp rbp rsi rdi.
    assert_eq!(found.general, [0, 2, 3, 1, 6, 7, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!((found.rip, found.rflags, found.kernel_gs_base), (16, 17, 7));
    assert_eq!(found.control, [100, 0, 101, 102, 103]);
    assert_eq!(found.segments.map(|s| s.selector), [2, 0, 5, 1, 3, 4].map(|k| k * 0x0101));
    assert_eq!(found.segments.map(|s| s.limit), [2, 0, 5, 1, 3, 4].map(|k| k * 0x0101_0101));
    assert_eq!((found.tr.selector, found.ldt.selector), (0x0606, 0x0707));
    assert_eq!((found.gdt.limit, found.idt.limit), (0x0808, 0x0909));
    assert_eq!(found.gdt.base, 0x0808_0808_0808_0808);
}

#[test]
fn an_unusable_segment_is_not_present() {
    let segment = |unusable| {
        let bytes = [&[0; 14][..], &[2, 1, 3, 0, 1, 0, 0, 0, unusable, 0]].concat();
        read_segment(&mut ByteReader::new(&bytes)).unwrap().flags
    };
    assert_eq!((segment(0), segment(1)), (0xf200, 0x7200));
}

#[test]
fn another_version_is_named_in_the_error() {
    let mut other = RECORDED.to_vec();
    other[16] = b'8';
    let said = problem(&other);
    assert!(said.contains("\"8.0.0\"") && said.contains("Firecracker 1.12 alone"), "{said}");
    other[16] = 0xff;
    assert!(problem(&other).contains("unknown version"));
    assert!(problem(b"QEVM").contains("it has 4 bytes"));
}

#[test]
fn a_state_that_ends_early_is_an_error() {
    for len in 0..RECORDED.len() {
        assert!(read(&RECORDED[..len]).is_err(), "{len}");
    }
}

#[test]
fn a_long_length_allocates_nothing() {
    // The number of the processors, then each length before it.
    for at in 0..RECORDED.len() - 8 {
        let mut state = RECORDED.to_vec();
        state[at..at + 8].fill(0xff);
        let _ = read(&state);
    }
}

proptest! {
    #[test]
    fn no_state_panics(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        tail in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut state = RECORDED.to_vec();
        for (at, byte) in flips {
            let at = at.index(state.len());
            state[at] = byte;
        }
        let _ = read(&state);
        let head = &RECORDED[..21];
        let _ = read(&[head, &tail].concat());
    }
}
