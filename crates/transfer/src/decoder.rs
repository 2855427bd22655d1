//! Decodes batches to pages, on the standby.

use crate::batch::PageEncoding;
use crate::{Error, Result};
use keyframe_bytes::{ByteReader, ReadError};
use keyframe_pages::patch::{PATCH_BYTES_MAX, apply};
use keyframe_pages::words;
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use lz4_flex::block::decompress_into;
use rustc_hash::FxHashMap;

/// The standby's copy of the VM's page space: RAM, then the disks.
pub trait EpochImage {
    /// Reads into `into` the content of `page` as of the epoch that was applied last. Error: the
    /// image cannot be read.
    fn read(&self, page: PageIndex, into: &mut Page) -> std::io::Result<()>;
}

/// The pages of an epoch that is not complete yet.
#[derive(Default)]
pub struct EpochBuffer {
    slots: FxHashMap<PageIndex, u32>,
    contents: Vec<Box<Page>>,
}

/// The slot number of a page of zeros.
const ZERO_SLOT: u32 = u32::MAX;

impl EpochBuffer {
    /// Returns the number of pages.
    #[must_use]
    pub fn len_pages(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Returns true if no page has arrived.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the pages and their contents, in rising order.
    pub fn pages(&self) -> impl Iterator<Item = (PageIndex, &Page)> {
        let mut pages: Vec<_> = self.slots.iter().map(|(page, slot)| (*page, *slot)).collect();
        pages.sort_unstable();
        pages.into_iter().map(|(page, slot)| {
            let content = self.contents.get(slot as usize).map_or(&ZERO_PAGE, |content| &**content);
            (page, content)
        })
    }

    /// Removes all pages and keeps the memory for the next epoch.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.contents.clear();
    }

    fn get(&self, page: PageIndex) -> Option<&Page> {
        let slot = *self.slots.get(&page)?;
        Some(self.contents.get(slot as usize).map_or(&ZERO_PAGE, |content| content))
    }

    fn put(&mut self, page: PageIndex, content: &Page) {
        let slot = self.slots.get(&page).copied();
        if *content == ZERO_PAGE && slot.is_none_or(|slot| slot == ZERO_SLOT) {
            self.slots.insert(page, ZERO_SLOT);
            return;
        }
        if let Some(into) = slot.and_then(|slot| self.contents.get_mut(slot as usize)) {
            into.copy_from_slice(content);
            return;
        }
        self.slots.insert(page, self.contents.len() as u32);
        self.contents.push(Box::new(*content));
    }
}

/// Decodes the batches of one stream of a VM's pages.
#[derive(Debug)]
pub struct EpochDecoder {
    space_pages: u64,
}

impl EpochDecoder {
    /// Makes a decoder for a VM of `space_pages` pages, disks included.
    #[must_use]
    pub fn new(space_pages: u64) -> Self {
        Self { space_pages }
    }

    /// Adds the pages of `batch` to `epoch`. Applies a difference to the page in `epoch`, or else
    /// to the one in `image`.
    ///
    /// Errors: [`Error::Malformed`] if the batch is malformed; [`Error::Image`] if `image` cannot
    /// be read.
    pub fn decode(
        &self,
        batch: &[u8],
        epoch: &mut EpochBuffer,
        image: &dyn EpochImage,
    ) -> Result<()> {
        let mut reader = ByteReader::new(batch);
        let mut page = 0u64;
        while !reader.is_empty() {
            let at = reader.position();
            let malformed = |problem: String| Error::Malformed { at, problem };
            let head = reader.varint().map_err(|e| malformed(e.into()))?;
            page = page.checked_add(head >> 3).filter(|page| *page < self.space_pages).ok_or_else(
                || malformed(format!("a page beyond the VM's {} pages", self.space_pages)),
            )?;
            let kind = PageEncoding::of(head & 7)
                .ok_or_else(|| malformed(format!("no kind {}", head & 7)))?;
            let mut content = ZERO_PAGE;
            self.content(kind, PageIndex(page), &mut reader, (&*epoch, image), &mut content)
                .map_err(|problem| match problem {
                    Trouble::Malformed(problem) => Error::Malformed { at, problem },
                    Trouble::Image(page, source) => Error::Image { page: page.0, source },
                })?;
            epoch.put(PageIndex(page), &content);
        }
        Ok(())
    }

    fn content(
        &self,
        kind: PageEncoding,
        page: PageIndex,
        reader: &mut ByteReader<'_>,
        (epoch, image): (&EpochBuffer, &dyn EpochImage),
        into: &mut Page,
    ) -> Result<(), Trouble> {
        let standing = |page: PageIndex, into: &mut Page| match epoch.get(page) {
            Some(content) => {
                *into = *content;
                Ok(())
            }
            None => image.read(page, into).map_err(|source| Trouble::Image(page, source)),
        };
        match kind {
            PageEncoding::Zero => {}
            PageEncoding::Raw => *into = reader.array()?,
            PageEncoding::Lz4 => lz4(counted(reader, PAGE_BYTES)?, into)?,
            PageEncoding::Words => words::decode(counted(reader, PAGE_BYTES)?, into)?,
            PageEncoding::Patch => {
                let patch = counted(reader, PATCH_BYTES_MAX)?;
                standing(page, into)?;
                apply(patch, into)?;
            }
            PageEncoding::PackedPatch => {
                let len = reader.varint()?;
                let packed = counted(reader, PATCH_BYTES_MAX)?;
                let mut patch = [0; PATCH_BYTES_MAX];
                let patch = usize::try_from(len).ok().and_then(|len| patch.get_mut(..len));
                let patch = patch.ok_or_else(|| format!("a patch of {len} bytes"))?;
                lz4(packed, patch)?;
                standing(page, into)?;
                apply(patch, into)?;
            }
            PageEncoding::Like => {
                let like = reader.varint()?;
                if like >= self.space_pages {
                    return Err(Trouble::Malformed(format!(
                        "like page {like}, which there is not"
                    )));
                }
                standing(PageIndex(like), into)?;
            }
        }
        Ok(())
    }
}

enum Trouble {
    Malformed(String),
    Image(PageIndex, std::io::Error),
}

impl From<ReadError> for Trouble {
    fn from(error: ReadError) -> Self {
        Self::Malformed(error.into())
    }
}

impl From<String> for Trouble {
    fn from(problem: String) -> Self {
        Self::Malformed(problem)
    }
}

/// Reads a length and that many bytes.
fn counted<'a>(reader: &mut ByteReader<'a>, len_max: usize) -> Result<&'a [u8], String> {
    let len = reader.varint()?;
    let len = usize::try_from(len).ok().filter(|len| *len <= len_max);
    Ok(reader.take(len.ok_or_else(|| "a payload longer than a page".to_owned())?)?)
}

fn lz4(packed: &[u8], into: &mut [u8]) -> Result<(), String> {
    let len = decompress_into(packed, into).map_err(|e| format!("LZ4: {e}"))?;
    if len == into.len() { Ok(()) } else { Err(format!("LZ4 gave {len} bytes of {}", into.len())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EpochEncoder;
    use proptest::prelude::*;

    const PAGES: u64 = 40;

    struct Memory(Vec<Page>);

    impl EpochImage for Memory {
        fn read(&self, page: PageIndex, into: &mut Page) -> std::io::Result<()> {
            *into = self.0[page.0 as usize];
            Ok(())
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// Write so many bytes of a value at a place of a page.
        Write(u64, usize, usize, u8),
        Noise(u64, u8),
        Copy(u64, u64),
        Zero(u64),
        /// Send what is dirty without completing the epoch.
        Send,
        Finish,
        Abandon,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..PAGES, 0usize..4096, 1usize..300, any::<u8>()).prop_map(|(p, a, l, v)| Step::Write(p, a, l, v)),
            2 => (0..PAGES, any::<u8>()).prop_map(|(p, s)| Step::Noise(p, s)),
            2 => (0..PAGES, 0..PAGES).prop_map(|(a, b)| Step::Copy(a, b)),
            1 => (0..PAGES).prop_map(Step::Zero),
            3 => Just(Step::Send),
            3 => Just(Step::Finish),
            1 => Just(Step::Abandon),
        ]
    }

    fn noise(seed: u8) -> Page {
        let mut x = u64::from(seed) + 1;
        std::array::from_fn(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x as u8
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Against whole images: whatever is sent, abandoned and evicted, the standby ends with the
        /// VM's pages.
        #[test]
        fn the_standby_has_what_the_vm_had(steps in prop::collection::vec(step(), 1..80), bases in 0usize..50) {
            let mut vm = vec![ZERO_PAGE; PAGES as usize];
            let mut image = Memory(vm.clone());
            let mut dirty = std::collections::BTreeSet::new();
            let mut owed = dirty.clone();
            let (mut encoder, decoder) = (EpochEncoder::new(bases * PAGE_BYTES), EpochDecoder::new(PAGES));
            let mut epoch = EpochBuffer::default();
            let send = |vm: &[Page], dirty: &mut std::collections::BTreeSet<u64>, owed: &mut std::collections::BTreeSet<u64>,
                            encoder: &mut EpochEncoder, epoch: &mut EpochBuffer, image: &Memory| {
                let pages: Vec<_> = dirty.iter().map(|p| (PageIndex(*p), &vm[*p as usize])).collect();
                let mut batch = Vec::new();
                let sent = encoder.encode(&pages, &mut batch);
                assert_eq!(sent.bytes, batch.len() as u64);
                assert_eq!(sent.pages, sent.zero + sent.like + sent.patched + sent.compressed + sent.raw + sent.same);
                decoder.decode(&batch, epoch, image).unwrap();
                owed.append(dirty);
            };
            for step in steps.into_iter().chain([Step::Finish]) {
                match step {
                    Step::Write(p, at, len, v) => {
                        let end = (at + len).min(PAGE_BYTES);
                        vm[p as usize][at..end].fill(v);
                        dirty.insert(p);
                    }
                    Step::Noise(p, seed) => { vm[p as usize] = noise(seed); dirty.insert(p); }
                    Step::Copy(from, to) => { vm[to as usize] = vm[from as usize]; dirty.insert(to); }
                    Step::Zero(p) => { vm[p as usize] = ZERO_PAGE; dirty.insert(p); }
                    Step::Send => send(&vm, &mut dirty, &mut owed, &mut encoder, &mut epoch, &image),
                    Step::Finish => {
                        send(&vm, &mut dirty, &mut owed, &mut encoder, &mut epoch, &image);
                        for (page, content) in epoch.pages() { image.0[page.0 as usize] = *content; }
                        epoch.clear();
                        encoder.finish();
                        owed.clear();
                        prop_assert!(image.0 == vm);
                    }
                    Step::Abandon => {
                        epoch.clear();
                        encoder.abandon();
                        dirty.append(&mut owed);
                    }
                }
            }
        }

        #[test]
        fn arbitrary_batches_never_panic(batch in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut epoch = EpochBuffer::default();
            let _ = EpochDecoder::new(PAGES).decode(&batch, &mut epoch, &Memory(vec![ZERO_PAGE; PAGES as usize]));
            prop_assert!(epoch.len_pages() <= PAGES && epoch.pages().all(|(page, _)| page.0 < PAGES));
        }
    }

    #[test]
    fn a_page_that_changes_a_few_words_takes_tens_of_bytes() {
        let mut encoder = EpochEncoder::new(1 << 20);
        let mut page = noise(3);
        let mut out = Vec::new();
        assert_eq!(encoder.encode(&[(PageIndex(7), &page)], &mut out).raw, 1);
        encoder.finish();
        for word in [8, 900, 4000] {
            page[word] ^= 0x55;
        }
        out.clear();
        let sent = encoder.encode(&[(PageIndex(7), &page)], &mut out);
        assert!(sent.patched == 1 && sent.bytes < 40, "{sent:?}");
        encoder.finish();
        out.clear();
        let sent = encoder.encode(&[(PageIndex(7), &page), (PageIndex(9), &page)], &mut out);
        assert_eq!((sent.same, sent.like, sent.bytes), (1, 1, 2), "{sent:?}");
    }
}
