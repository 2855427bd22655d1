//! Putting pages of RAM, many at a time. Several threads hash and encode; the order of the pages is
//! kept.
//!
//! ```text
//!            on several threads    one after the other             on several threads             one after the other
//!   pages ──▶ zero? hash ──▶ known? else its base, if it has one ──▶ delta, compressed or raw ──▶ records appended
//! ```
//!
//! The first of these that applies is stored: a reference to content that the store holds; a delta
//! on a base of the page, if it is small; the compressed page, if that saves enough; the raw page.
//!
//! Invariants: those of [`crate::pack_writer`]. A base is a plain record that was read with its
//! check and not lost since. Content that occurs twice in a batch gets one record.

use crate::Result;
use crate::bases::DeltaBase;
use crate::pack_writer::encode::{Item, hash_items, side_by_side};
use crate::pack_writer::placed::{PageInput, Placed};
use crate::pack_writer::writer::PackWriter;
use keyframe_store_format::codec::Codec;
use keyframe_store_format::derived::Derivation;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{RECORD_BYTES_MAX, RECORD_HEADER_BYTES, Record, RecordKind};
use keyframe_units::{Page, ZERO_PAGE, duration_ns, elapsed_ns};
use std::time::Instant;

/// The pages of a batch if there is one thread: they stay in its cache between two steps.
const PAGES_PER_THREAD: usize = 32;
/// The pages of a batch for each of several threads, which cost time to start.
const PAGES_PER_THREAD_OF_MANY: usize = 512;
impl PackWriter {
    /// Puts a page of RAM into the store, unless the store holds its content. Returns `None` if the
    /// page is zero. The page is durable after the next [`Self::sync`]. Error: the pack cannot be
    /// written.
    pub fn put(&mut self, input: PageInput<'_>) -> Result<Option<Placed>> {
        let mut placed = None;
        self.put_all(&[input], &mut |_, to| placed = to)?;
        Ok(placed)
    }

    /// Puts many pages. Calls `placed` for each in order, with its index, and `None` if the page is
    /// zero. Error: the pack cannot be written.
    pub fn put_all(
        &mut self,
        inputs: &[PageInput<'_>],
        placed: &mut dyn FnMut(usize, Option<Placed>),
    ) -> Result<()> {
        let threads = self.compressors.len();
        let per_thread = if threads > 1 { PAGES_PER_THREAD_OF_MANY } else { PAGES_PER_THREAD };
        let mut first = 0;
        for batch in inputs.chunks(per_thread * threads) {
            self.put_batch(batch, &mut |at, to| placed(first + at, to))?;
            first += batch.len();
        }
        Ok(())
    }

    fn put_batch(
        &mut self,
        inputs: &[PageInput<'_>],
        placed: &mut dyn FnMut(usize, Option<Placed>),
    ) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut items: Vec<Item<'_>> = inputs
            .iter()
            .map(|input| Item {
                input: *input,
                hash: None,
                base: None,
                has_base: false,
                on: PageRef::ZERO,
                encoded: None,
                scratch: scratch.pop().unwrap_or_default(),
                placed: None,
            })
            .collect();
        let key = self.inner.config.key.clone();
        let began = Instant::now();
        side_by_side(&mut items, &mut self.compressors, &|items, _| hash_items(items, &key));
        let hashed = Instant::now();
        self.bases.begin_batch();
        let (mut bytes, mut content) = (Vec::new(), ZERO_PAGE);
        for item in &mut items {
            self.find(item, &mut bytes, &mut content);
        }
        let found = Instant::now();
        let (bases, compressors) = (&self.bases, &mut self.compressors);
        side_by_side(&mut items, compressors, &|items, compressor| {
            for item in items {
                item.encode(bases, compressor);
            }
        });
        let encoded = Instant::now();
        self.bases.begin_batch();
        let appended = items.iter_mut().try_for_each(|item| self.append_page(item));
        self.times.hash += duration_ns(hashed - began);
        self.times.look_up += duration_ns(found - hashed);
        self.times.compress += duration_ns(encoded - found);
        self.times.append += elapsed_ns(encoded);
        if appended.is_ok() {
            items.iter().enumerate().for_each(|(at, item)| placed(at, item.placed));
        }
        scratch.extend(items.into_iter().map(|item| item.scratch));
        self.scratch = scratch;
        appended
    }

    /// Looks for the content in the store, else for a base. Reads the base into `content` if it is
    /// not in memory. `bytes` is a buffer.
    fn find(&mut self, item: &mut Item<'_>, bytes: &mut Vec<u8>, content: &mut Page) {
        let Some(hash) = item.hash else { return };
        item.placed = self.known(hash, item.input.content);
        let Some((page, before)) = item.input.home.filter(|_| item.placed.is_none()) else {
            return;
        };
        item.base = self.bases.find(page);
        item.has_base = item.base.is_some() || before != PageRef::ZERO;
        if item.base.is_none()
            && before != PageRef::ZERO
            && let Some(base) = self.read_base(before, bytes, content)
        {
            item.base = self.bases.insert(page, base, content);
        }
    }

    /// The plain record `of`, or the base of the delta `of`; `None` if it cannot be read.
    fn read_base(&self, of: PageRef, bytes: &mut Vec<u8>, page: &mut Page) -> Option<DeltaBase> {
        let record = self.read_record(of, bytes)?;
        let of = match record.kind {
            RecordKind::Delta => match record.derivation(page).ok()? {
                Derivation::Delta(delta) => delta.base,
                Derivation::Parts(_) => return None,
            },
            _ => of,
        };
        let record = self.read_record(of, bytes)?;
        record.decompress(page).ok()?;
        Some(DeltaBase::new(of, record.hash, record.len_bytes() - RECORD_HEADER_BYTES))
    }

    /// Reads a record for use as a base. It may still be in the buffer of the open pack.
    fn read_record<'a>(&self, at: PageRef, bytes: &'a mut Vec<u8>) -> Option<Record<'a>> {
        if self.given_up.contains(&at.pack()) {
            return None;
        }
        let open = self.open.as_ref().filter(|pack| pack.number == at.pack());
        if let Some(unflushed) = open.and_then(|pack| pack.unflushed(at)) {
            bytes.clear();
            bytes.extend_from_slice(unflushed.get(..RECORD_BYTES_MAX).unwrap_or(unflushed));
            return Record::parse(bytes, at).ok();
        }
        let pack = self.inner.pack(at.pack()).ok()?;
        bytes.resize(RECORD_BYTES_MAX, 0);
        if pack.file.read_at(at.offset(), bytes).is_err() {
            // The pack ends earlier.
            let len = pack.file.len_bytes().ok()?.saturating_sub(at.offset());
            bytes.truncate(len.min(RECORD_BYTES_MAX as u64) as usize);
            pack.file.read_at(at.offset(), bytes).ok()?;
        }
        pack.parse(bytes, at).ok()
    }

    /// Appends the record of an encoded page.
    fn append_page(&mut self, item: &mut Item<'_>) -> Result<()> {
        let Some(hash) = item.hash.filter(|_| item.encoded.is_some()) else { return Ok(()) };
        // An earlier page of the batch may have the same content.
        if let Some(known) = self.known(hash, item.input.content) {
            item.placed = Some(known);
            return Ok(());
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        if item.on >= place
            && let Some(compressor) = self.compressors.first_mut()
        {
            // A prune wrote the base into a later pack than the open one.
            item.take_alone(compressor.compress(item.input.content));
        }
        let (kind, codec) = item.encoded.unwrap_or((RecordKind::Page, Codec::Raw));
        let len_bytes = pack.append(hash, kind, (codec, item.payload(codec, kind)));
        self.index.insert(hash, place, kind);
        if kind == RecordKind::Page
            && let Some(finder) = &mut self.finder
        {
            let tags = finder.tags(item.input.content);
            finder.learn(&tags, place);
        }
        if let Some((page, _)) = item.input.home {
            match kind {
                RecordKind::Delta => self.bases.used(page, len_bytes),
                // A page gets a base in memory only when it is written for the second time.
                _ if item.has_base => {
                    let payload_bytes = item.payload(codec, kind).len();
                    self.bases.insert(
                        page,
                        DeltaBase::new(place, hash, payload_bytes),
                        item.input.content,
                    );
                }
                _ => {}
            }
        }
        item.placed = Some(Placed::New(place, len_bytes));
        self.give_back(pack)
    }
}
