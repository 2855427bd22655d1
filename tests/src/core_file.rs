//! Reads the registers in an ELF core of an x86-64 VM, as `keyframe export --format elf` writes it.

const PROGRAM_HEADERS: usize = 64;
const PROGRAM_BYTES: usize = 56;
const NOTE_HEAD_BYTES: usize = 12;
/// Where the registers lie in Linux' `elf_prstatus`, and CR3 in QEMU's note.
const PRSTATUS_REGISTERS: usize = 112;
const RIP: usize = PRSTATUS_REGISTERS + 16 * 8;
const RSP: usize = PRSTATUS_REGISTERS + 19 * 8;
const CR3: usize = 416;
/// In an entry of a page table: it is present; it maps a large page.
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Some registers of a processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreRegisters {
    /// The instruction pointer.
    pub rip: u64,
    /// The stack pointer.
    pub rsp: u64,
    /// The physical address of the page tables.
    pub cr3: u64,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Returns the registers of all processors in the core file `core`.
pub fn core_registers(core: &[u8]) -> Vec<CoreRegisters> {
    let (at, len) = (word(core, PROGRAM_HEADERS + 8), word(core, PROGRAM_HEADERS + 32));
    let mut notes = &core[at as usize..][..len as usize];
    let (mut statuses, mut states) = (Vec::new(), Vec::new());
    while !notes.is_empty() {
        let half = |at: usize| u32::from_le_bytes(notes[at..at + 4].try_into().unwrap()) as usize;
        let (name, contents) = (half(0).next_multiple_of(4), half(4));
        let (name, contents) =
            (&notes[NOTE_HEAD_BYTES..][..name], &notes[NOTE_HEAD_BYTES + name..][..contents]);
        if name.starts_with(b"CORE") { &mut statuses } else { &mut states }.push(contents);
        notes = &notes[NOTE_HEAD_BYTES + name.len() + contents.len().next_multiple_of(4)..];
    }
    assert_eq!(statuses.len(), states.len());
    let both = statuses.iter().zip(&states);
    both.map(|(status, state)| CoreRegisters {
        rip: word(status, RIP),
        rsp: word(status, RSP),
        cr3: word(state, CR3),
    })
    .collect()
}

/// Returns the physical address of the virtual address `address`, by the page tables at `cr3` in
/// `ram`, the guest's RAM from address 0; `None` if it is not mapped.
pub fn translate(ram: &[u8], cr3: u64, address: u64) -> Option<u64> {
    let mut table = cr3 & ADDRESS;
    for level in (0..4).rev() {
        let shift = 12 + 9 * level;
        let entry = word(ram, (table + (address >> shift & 0x1ff) * 8) as usize);
        if entry & PRESENT == 0 {
            return None;
        }
        if level == 0 || entry & LARGE != 0 {
            let within = (1 << shift) - 1;
            return Some(entry & ADDRESS & !within | address & within);
        }
        table = entry & ADDRESS;
    }
    None
}

/// Returns the text of a static ELF program: its address, and its bytes.
pub fn text(program: &[u8]) -> (u64, &[u8]) {
    let header = |k: usize| &program[PROGRAM_HEADERS + k * PROGRAM_BYTES..][..PROGRAM_BYTES];
    // The first segment is the one that can be executed.
    let first = header(0);
    assert_eq!(first[4] & 1, 1, "the first segment is no code");
    let (at, len) = (word(first, 8) as usize, word(first, 32) as usize);
    (word(first, 16), &program[at..][..len])
}
