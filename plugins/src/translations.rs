//! A cache of address translations: QEMU is asked once for each page, until its translation may have
//! changed.
//!
//! ```text
//!   access ── page, read or write ──▶ entry of this generation? ──yes──▶ the page's guest-physical address
//!                                          └─no─▶ ask QEMU, keep the answer
//!   an instruction that may remap is about to run ─▶ next generation: all entries are invalid
//! ```
//!
//! QEMU searches its TLB and then its list of RAM blocks, which costs several times as much as the
//! rest of a record. Only an instruction can change a translation: one that writes a control
//! register, invalidates translations, returns from system management, switches tasks, or accesses a
//! device, which may move memory. All of these are recognized by their first bytes ([`remaps`]).
//! Recognizing too many costs time; missing one would give wrong addresses. An access to a device
//! counts as such an instruction, too.
//!
//! A changed page table entry without any of these is seen late, as a processor may see it late. The
//! entry of a page that was not present before is seen at once, as there was no access to it.
//!
//! Invariant: a cut begins a generation, so that an interval's answers do not depend on earlier
//! intervals.
//!
//! Not handled: task gates of interrupts on 32-bit guests, and system management interrupts that are
//! not caused by an instruction.

use crate::api::{Accesses, Instruction, MemoryCallback, MemoryInfo};
use crate::board::Board;
use crate::physical::{DEVICE, Physical};
use crate::state::State;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of entries: first those of reads, then those of writes. Each half has as many as twice
/// the largest first-level TLB.
pub const ENTRIES: usize = 1024;
/// The number of entries of reads.
pub const READS: usize = ENTRIES / 2;
/// The number of bits of an offset in a page.
pub const PAGE_BITS: u32 = 12;
/// The mask of an offset in a page.
pub const PAGE_MASK: u64 = (1 << PAGE_BITS) - 1;
/// The number of generations: a generation is stored in the offset bits of a key.
const GENERATIONS: u64 = PAGE_MASK + 1;

#[derive(Clone, Copy)]
struct Entry {
    /// The address of the virtual page, and the generation.
    key: u64,
    /// The guest-physical address of the page.
    at: u64,
}

/// The cached translations.
struct Translations {
    entries: [Entry; ENTRIES],
    generation: u64,
    /// The board's number of cuts.
    cuts: &'static AtomicU64,
    cuts_seen: u64,
}

/// Resolves accesses to guest-physical addresses, with a cache.
pub struct AccessResolver {
    physical: Physical,
    known: &'static State<Translations>,
}

impl AccessResolver {
    /// An empty cache over `physical`.
    pub fn new(physical: Physical, board: &'static Board) -> Self {
        Self { physical, known: State::leak(Translations::new(board)) }
    }

    /// Registers one of `callbacks` with `data` for the accesses of `instruction`: the second one if
    /// the instruction may remap, because its accesses precede the change and must not be cached.
    /// Each execution of such an instruction begins a generation.
    pub fn on_memory(
        &self,
        instruction: &Instruction<'_>,
        callbacks: [MemoryCallback; 2],
        data: *mut c_void,
    ) {
        let (bytes, len) = instruction.bytes();
        let may_remap = remaps(&bytes[..len], instruction.pc());
        if may_remap {
            instruction.on_executed(on_remap, self.known.data());
        }
        instruction.on_memory(Accesses::All, callbacks[usize::from(may_remap)], data);
    }

    /// The target of the access for which the running memory callback was called; `store` for a
    /// write, `REMAPS` in the second callback of [`AccessResolver::on_memory`].
    #[inline]
    pub fn of_access<const REMAPS: bool>(&self, info: MemoryInfo, vaddr: u64, store: bool) -> u64 {
        if REMAPS {
            return self.physical.of_access(info, vaddr);
        }
        // SAFETY: its own data, on the vCPU's thread; no other reference exists while this one
        // lives.
        let known = unsafe { State::<Translations>::of(self.known.data()) };
        known.find(vaddr, store).unwrap_or_else(|| self.learn(known, info, vaddr, store))
    }

    /// Whether the entry at `place` has the translation of `vaddr`, for an instruction that does
    /// not remap.
    #[inline]
    pub fn is_known(&self, vaddr: u64, place: u64) -> bool {
        // SAFETY: its own data, on the vCPU's thread; no other reference exists while this one
        // lives.
        unsafe { State::<Translations>::of(self.known.data()) }.is_known(vaddr, place)
    }

    /// The target of the access at `place`, which lies in memory, if its translation is cached, for
    /// an instruction that does not remap.
    #[inline]
    pub fn known_target(&self, vaddr: u64, place: u64) -> Option<u64> {
        // SAFETY: its own data, on the vCPU's thread; no other reference exists while this one
        // lives.
        unsafe { State::<Translations>::of(self.known.data()) }.known(vaddr, place)
    }

    #[cold]
    fn learn(&self, known: &mut Translations, info: MemoryInfo, vaddr: u64, store: bool) -> u64 {
        let at = self.physical.of_access(info, vaddr);
        if at & DEVICE == 0 {
            known.keep(vaddr, store, at);
        } else {
            // The access to a device may have moved memory.
            known.forget();
        }
        at
    }
}

impl Translations {
    fn new(board: &'static Board) -> Self {
        let entries = [Entry { key: 0, at: 0 }; ENTRIES];
        Self { entries, generation: 1, cuts: board.cuts_word(), cuts_seen: board.cuts() }
    }

    /// Invalidates all entries.
    fn forget(&mut self) {
        self.generation += 1;
        if self.generation == GENERATIONS {
            self.entries.fill(Entry { key: 0, at: 0 });
            self.generation = 1;
        }
    }

    /// The guest-physical address of `vaddr`, if an access of the same kind to its page is cached.
    fn find(&mut self, vaddr: u64, store: bool) -> Option<u64> {
        let cuts = self.cuts.load(Ordering::Relaxed);
        if cuts != self.cuts_seen {
            self.cuts_seen = cuts;
            self.forget();
        }
        self.known(vaddr, place(vaddr, store))
    }

    /// As [`Translations::find`], but finds nothing after a cut until `find` has been called.
    #[inline]
    fn known(&self, vaddr: u64, place: u64) -> Option<u64> {
        self.is_known(vaddr, place).then(|| self.entries[number(place)].at | vaddr & PAGE_MASK)
    }

    #[inline]
    fn is_known(&self, vaddr: u64, place: u64) -> bool {
        self.entries[number(place)].key == self.key(vaddr)
            && self.cuts.load(Ordering::Relaxed) == self.cuts_seen
    }

    /// Caches that such an access to `vaddr` went to memory at `at`.
    fn keep(&mut self, vaddr: u64, store: bool, at: u64) {
        if (vaddr ^ at) & PAGE_MASK == 0 {
            self.entries[number(place(vaddr, store))] =
                Entry { key: self.key(vaddr), at: at & !PAGE_MASK };
        }
    }

    #[inline]
    fn key(&self, vaddr: u64) -> u64 {
        vaddr & !PAGE_MASK | self.generation
    }
}

/// The place of an access: the number of its entry, and the offset in the page.
#[inline]
fn place(vaddr: u64, store: bool) -> u64 {
    place_of_read(vaddr) | if store { STORE } else { 0 }
}

/// The difference between the place of a write and that of a read.
pub const STORE: u64 = (READS as u64) << PAGE_BITS;

/// The place of a read.
#[inline]
pub fn place_of_read(vaddr: u64) -> u64 {
    vaddr & (STORE - 1)
}

#[inline]
fn number(place: u64) -> usize {
    (place >> PAGE_BITS) as usize % ENTRIES
}

extern "C" fn on_remap(_vcpu: c_uint, data: *mut c_void) {
    // SAFETY: registered with this type's data; on the vCPU's thread.
    unsafe { State::<Translations>::of(data) }.forget();
}

/// Whether an instruction at `pc` can change the translation of an address.
fn remaps(bytes: &[u8], pc: u64) -> bool {
    // In 32-bit code some of these are not prefixes but whole, harmless instructions (inc, dec).
    // harmless.
    let is_prefix = |byte: &&u8| matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3);
    let prefixes = bytes.iter().take_while(is_prefix).count();
    let byte = |k: usize| bytes.get(prefixes + k).copied();
    let register = |k: usize| byte(k).map_or(0, |modrm| modrm >> 3 & 7);
    match byte(0) {
        // in, out, ins, outs; far call and jump, which can switch tasks.
        Some(0xe4..=0xe7 | 0xec..=0xef | 0x6c..=0x6f | 0x9a | 0xea) => true,
        Some(0xff) => matches!(register(1), 3 | 5),
        // iret, which can switch tasks in 32-bit code alone.
        Some(0xcf) => pc >> 32 == 0,
        Some(0x0f) => match byte(1) {
            // lmsw, invlpg, and what virtualizes; not swapgs, clac, stac and others that are
            // frequent.
            Some(0x01) => match byte(2) {
                Some(0xc8..=0xcb | 0xd0 | 0xf8 | 0xf9) => false,
                Some(modrm) => modrm >= 0xc0 || register(2) >= 5,
                None => true,
            },
            // mov to a control register, wrmsr, rsm.
            Some(0x22 | 0x30 | 0xaa) => true,
            // invept, invvpid, invpcid.
            Some(0x38) => matches!(byte(2), Some(0x80..=0x82)),
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    const KERNEL: u64 = 0xffff_ffff_8100_0000;

    #[test]
    fn remapping_instructions_are_recognized() {
        let all: [&[u8]; 22] = [
            &[0x0f, 0x22, 0xd8],
            &[0x41, 0x0f, 0x22, 0xdc],
            &[0x0f, 0x22, 0xc0],
            &[0x0f, 0x01, 0x38],
            &[0x41, 0x0f, 0x01, 0x3c, 0x24],
            &[0x66, 0x0f, 0x38, 0x82, 0x04, 0x24],
            &[0x0f, 0x01, 0xf0],
            &[0x0f, 0x01, 0x30],
            &[0x0f, 0x01, 0xdf],
            &[0x0f, 0x30],
            &[0x0f, 0xaa],
            &[0xe6, 0x92],
            &[0xef],
            &[0x66, 0xed],
            &[0xec],
            &[0xf3, 0x6f],
            &[0x6c],
            &[0xea, 0, 0, 0, 0, 8, 0],
            &[0x9a, 0, 0, 0, 0, 8, 0],
            &[0x48, 0xff, 0x28],
            &[0xff, 0x18],
            &[0x0f, 0x01],
        ];
        for bytes in all {
            assert!(remaps(bytes, KERNEL), "{bytes:x?}");
        }
        let harmless: [&[u8]; 17] = [
            &[0x0f, 0x20, 0xd8],
            &[0x0f, 0x23, 0xf8],
            &[0x0f, 0x01, 0xf8],
            &[0x0f, 0x01, 0xca],
            &[0x0f, 0x01, 0xcb],
            &[0x0f, 0x01, 0xf9],
            &[0x0f, 0x01, 0x10],
            &[0x0f, 0x05],
            &[0x48, 0x0f, 0x07],
            &[0x48, 0xcf],
            &[0x48, 0x89, 0x44, 0x24, 0x08],
            &[0xff, 0xd0],
            &[0xff, 0x74, 0x24, 0x08],
            &[0xf3, 0x48, 0xa5],
            &[0x40],
            &[0xf4],
            &[],
        ];
        for bytes in harmless {
            assert!(!remaps(bytes, KERNEL), "{bytes:x?}");
        }
        assert!(remaps(&[0xcf], 0xc010_0000), "it may switch tasks");
    }

    /// A new board without a ring.
    pub fn board() -> &'static Board {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("keyframe-board-{}-{number}", std::process::id()));
        let file =
            std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let board = Board::create(&file.unwrap(), 0).unwrap();
        std::fs::remove_file(&path).unwrap();
        Box::leak(Box::new(board))
    }

    #[test]
    fn translations_are_found_until_they_are_invalidated() {
        let board = board();
        let mut known = Translations::new(board);
        assert_eq!(known.find(0x1234, false), None);
        known.keep(0x1234, false, 0x7_0234);
        assert_eq!((known.find(0x1fff, false), known.find(0x1fff, true)), (Some(0x7_0fff), None));
        assert_eq!(
            known.find(0x1234 + (ENTRIES as u64 / 2) * 4096, false),
            None,
            "another page of that entry"
        );
        known.keep(0x1234, true, 0x8_0234);
        assert_eq!(
            (known.find(0x1000, true), known.find(0x1000, false)),
            (Some(0x8_0000), Some(0x7_0000))
        );
        known.keep(0x5678, false, 0x9_0000);
        assert_eq!(known.find(0x5678, false), None, "another offset in its page");
        for forgets in 1..=GENERATIONS + 1 {
            known.forget();
            assert_eq!(known.find(0x1000, true), None, "after {forgets}");
        }
        known.keep(0x1234, false, 0x7_0234);
        board.cut();
        assert_eq!(known.find(0x1234, false), None, "a cut");
    }
}
