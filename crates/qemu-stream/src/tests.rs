//! Written streams are read back by a reader that follows QEMU's code, not the writer's.

use super::*;
use keyframe_units::{PAGE_BYTES, Page};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io;

/// A stream as `xen-save-devices-state` writes it: header, one section, end mark.
pub(crate) fn state() -> Vec<u8> {
    let mut state = b"QEVM\0\0\0\x03\x04\0\0\0\x02\x05timer\0\0\0\0\0\0\0\x02".to_vec();
    state.extend([7; 24]);
    state.extend(b"\x7e\0\0\0\x02\0");
    state
}

/// Reads bytes from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(len);
        self.0 = tail;
        head
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    fn name(&mut self) -> String {
        let len = usize::from(self.take(1)[0]);
        String::from_utf8(self.take(len).to_vec()).unwrap()
    }

    fn footer(&mut self) {
        assert_eq!((self.take(1), self.u32()), (&[0x7e][..], 0x7000));
    }
}

/// Reads a `ram` section as QEMU does: sizes, then pages into blocks that are full of garbage.
fn load(stream: &[u8]) -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    let mut r = Reader(stream);
    assert_eq!(r.take(8), b"QEVM\0\0\0\x03");
    assert_eq!(
        (r.take(1), r.u32(), r.name(), r.u32(), r.u32()),
        (&[1][..], 0x7000, "ram".into(), 0, 4)
    );
    let total = r.u64();
    assert_eq!(total & 0xfff, 4);
    let mut blocks = BTreeMap::new();
    let mut listed = 0;
    while listed < total & !0xfff {
        let (name, len) = (r.name(), r.u64());
        listed += len;
        blocks.insert(name, vec![0xaa; len as usize]);
    }
    assert_eq!(listed, total & !0xfff);
    assert_eq!(r.u64(), 0x10);
    r.footer();
    assert_eq!((r.take(1), r.u32()), (&[3][..], 0x7000));
    let mut current = String::new();
    loop {
        let word = r.u64();
        let (offset, flags) = ((word & !0xfff) as usize, word & 0xfff);
        if flags == 0x10 {
            break;
        }
        if flags & 0x20 == 0 {
            current = r.name();
        }
        let page = &mut blocks.get_mut(&current).unwrap()[offset..offset + PAGE_BYTES];
        match flags & !0x20 {
            8 => page.copy_from_slice(r.take(PAGE_BYTES)),
            2 => page.fill(r.take(1)[0]),
            other => panic!("flags {other:#x}"),
        }
    }
    r.footer();
    (blocks, r.0.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn qemus_reader_gets_the_blocks_back(
        blocks in prop::collection::btree_map("[a-z/@.]{1,40}", prop::collection::vec(0u8..3, 1..12), 1..5)
    ) {
        // A page is given as its fill byte; zero pages are left out for every other block.
        let content = |fills: &Vec<u8>| fills.iter().flat_map(|f| [*f; PAGE_BYTES]).collect::<Vec<u8>>();
        let mut readers: Vec<_> = blocks.values().enumerate().map(|(k, fills)| {
            move |sink: &mut dyn FnMut(u64, &Page) -> io::Result<()>| {
                fills.iter().enumerate().filter(|(_, f)| **f != 0 || k % 2 == 0)
                    .try_for_each(|(i, f)| sink((i * PAGE_BYTES) as u64, &[*f; PAGE_BYTES]))
            }
        }).collect();
        let mut list: Vec<StreamBlock<'_>> = blocks.iter().zip(&mut readers).map(|((name, fills), reader)| {
            StreamBlock { name, used_bytes: (fills.len() * PAGE_BYTES) as u64, pages: reader }
        }).collect();
        let mut out = Vec::new();
        splice_ram(&state(), &mut list, &mut out).unwrap();
        let (loaded, rest) = load(&out);
        prop_assert_eq!(rest, &state()[8..]);
        prop_assert_eq!(loaded, blocks.iter().map(|(n, f)| (n.clone(), content(f))).collect());
    }

    #[test]
    fn no_state_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..60), keep in 0usize..40) {
        let _ = check(&bytes);
        let good = state();
        bytes.splice(..0, good[..keep.min(good.len())].iter().copied());
        let _ = check(&bytes);
    }
}

#[test]
fn a_state_without_small_blocks_is_written_unchanged() {
    let mut out = Vec::new();
    splice_ram(&state(), &mut [], &mut out).unwrap();
    assert_eq!(out, state());
}

#[test]
fn damage_is_reported_with_its_offset() {
    let good = state();
    check(&good).unwrap();
    for cut in 0..good.len() {
        assert!(check(&good[..cut]).is_err(), "cut at {cut}");
    }
    for (at, value, word) in [
        (0, b'X', "QEVM"),
        (7, 2, "version"),
        (8, 9, "unknown type"),
        (8, 7, "configuration"),
        (8, 0, "no device"),
        (14, b'\n', "named"),
    ] {
        let mut bad = good.clone();
        bad[at] = value;
        let error = check(&bad).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("byte"), "{error}");
        assert!(splice_ram(&bad, &mut [], &mut Vec::new()).is_err());
    }
}

#[test]
fn blocks_that_the_format_cannot_hold_are_refused() {
    let long = "x".repeat(256);
    for (name, used_bytes) in
        [("", 4096), (long.as_str(), 4096), ("a", 0), ("a", 100), ("a", u64::MAX - 4095)]
    {
        let mut block = [StreamBlock { name, used_bytes, pages: &mut |_| Ok(()) }];
        assert!(splice_ram(&state(), &mut block, &mut Vec::new()).is_err(), "{name} {used_bytes}");
    }
    // A reader that falls back, goes beyond the end, or between pages.
    for offsets in [[4096, 0], [0, 8192], [0, 100]] {
        let pages = &mut |sink: &mut dyn FnMut(u64, &Page) -> io::Result<()>| {
            offsets.iter().try_for_each(|o| sink(*o, &[1; PAGE_BYTES]))
        };
        let mut block = [StreamBlock { name: "a", used_bytes: 8192, pages }];
        let error = splice_ram(&state(), &mut block, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("RAM block a"), "{error}");
    }
}
