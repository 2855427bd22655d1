//! Putting pages of RAM, many at a time: what can be done side by side is, in the order of the
//! pages.
//!
//! ```text
//!            side by side          one after the other              side by side                   one after the other
//!   pages ──▶ zero? hash ──▶ known? else its base, if it has one ──▶ delta, compressed or raw ──▶ records appended
//! ```
//!
//! What is smallest for its cost: a reference to what the store holds; a delta on a base of the
//! page, where it takes little; else the page compressed, where it takes less than a page, or as it
//! is.
//!
//! Invariants: as in [`super`]. A base is a plain record, read with its check and not lost since;
//! content that comes twice in a batch gets one record.

use super::{OpenPack, PackWriter, Placed};
use crate::Result;
use crate::bases::{At, Base, Bases};
use crate::codec::{Codec, PageCompressor};
use crate::delta::{DELTA_HEADER_BYTES, Delta};
use crate::derived::Derivation;
use crate::identity::{HashKey, LANES, PageHash, PageRef};
use crate::record::{Kind, RECORD_BYTES_MAX, RECORD_HEADER_BYTES, Record};
use keyframe_pages::patch::{PATCH_BYTES_MAX, diff};
use keyframe_units::{Page, PageIndex, ZERO_PAGE};

/// Pages that one thread works on at a time: they stay in its cache between the two steps.
pub const PAGES_PER_THREAD: usize = 32;
/// And where there are several, for whom beginning and ending costs more.
pub const PAGES_PER_THREAD_OF_MANY: usize = 512;
/// A patch of so many bytes is taken without a look at what compressing the page would give.
const PATCH_BYTES_SMALL: usize = 512;

/// A page to put.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub content: &'a Page,
    /// Which page it is, and what record it was until now; a page without has no base.
    pub home: Option<(PageIndex, PageRef)>,
}

/// What is being done with a page.
struct Item<'a> {
    input: Input<'a>,
    /// None: all zeros.
    hash: Option<PageHash>,
    base: Option<At>,
    /// There was something that it could have been a delta on: it is written again and again.
    has_base: bool,
    /// The record that the delta stands on.
    on: PageRef,
    encoded: Option<(Kind, Codec)>,
    scratch: Scratch,
    placed: Option<Placed>,
}

/// Memory for what is stored of a page, used again for the next.
#[derive(Debug, Default)]
pub struct Scratch {
    payload: Vec<u8>,
}

impl Item<'_> {
    fn encode(&mut self, bases: &Bases, compressor: &mut PageCompressor) {
        if self.placed.is_some() || self.hash.is_none() {
            return;
        }
        let base = self.base.and_then(|at| bases.get(at)).filter(|(base, _)| !base.is_worn());
        let delta = base.and_then(|(base, content)| {
            let codec = self.encode_delta(base, content, compressor)?;
            Some((base, codec, self.scratch.payload.len()))
        });
        if let Some((base, codec, len)) = delta
            && (len <= DELTA_HEADER_BYTES + PATCH_BYTES_SMALL
                || is_worth_it(len, base.payload_bytes))
        {
            (self.encoded, self.on) = (Some((Kind::Delta, codec)), base.record);
            return;
        }
        let alone = compressor.compress(self.input.content);
        // A page on its own is read in one step, and is a base for the next.
        match delta {
            Some((base, codec, len)) if is_worth_it(len, alone.1.len()) => {
                (self.encoded, self.on) = (Some((Kind::Delta, codec)), base.record);
            }
            _ => self.take_alone(alone),
        }
    }

    fn take_alone(&mut self, (codec, payload): (Codec, &[u8])) {
        self.scratch.payload.clear();
        if codec != Codec::Raw {
            self.scratch.payload.extend_from_slice(payload);
        }
        self.encoded = Some((Kind::Page, codec));
    }

    /// The payload of a delta; none where that is too long to be one.
    fn encode_delta(
        &mut self,
        base: Base,
        content: &Page,
        compressor: &mut PageCompressor,
    ) -> Option<Codec> {
        let payload = &mut self.scratch.payload;
        Delta::begin(base.record, base.hash, payload);
        if !diff(content, self.input.content, PATCH_BYTES_MAX, payload) {
            return None;
        }
        Some(compress_patch(payload, compressor))
    }

    fn payload(&self, codec: Codec, kind: Kind) -> &[u8] {
        if kind == Kind::Page && codec == Codec::Raw {
            self.input.content
        } else {
            &self.scratch.payload
        }
    }
}

/// A delta against the page alone, which is read in one step. That takes about what its base does:
/// where a delta is worth it by that measure, the page need not be compressed to know.
fn is_worth_it(delta_bytes: usize, alone_bytes: usize) -> bool {
    delta_bytes <= alone_bytes / 4 * 3
}

/// Compresses the patch in the payload of a delta, where it is long enough to gain by it.
pub fn compress_patch(payload: &mut Vec<u8>, compressor: &mut PageCompressor) -> Codec {
    if payload.len() <= DELTA_HEADER_BYTES + PATCH_BYTES_SMALL {
        return Codec::Raw;
    }
    let (codec, stored) =
        compressor.compress_part(payload.get(DELTA_HEADER_BYTES..).unwrap_or_default());
    if codec != Codec::Raw {
        let stored = stored.to_vec();
        payload.truncate(DELTA_HEADER_BYTES);
        payload.extend_from_slice(&stored);
    }
    codec
}

impl PackWriter {
    /// Makes sure that the store holds a page of RAM. It is durable after the next [`Self::sync`].
    pub fn put(&mut self, input: Input<'_>) -> Result<Option<Placed>> {
        let mut placed = None;
        self.put_all(&[input], &mut |_, to| placed = to)?;
        Ok(placed)
    }

    /// The same for many, whose pages are told of in their order; nothing of those that are all
    /// zeros.
    pub fn put_all(
        &mut self,
        inputs: &[Input<'_>],
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
        inputs: &[Input<'_>],
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
        side_by_side(&mut items, &mut self.compressors, &|items, _| look(items, &key));
        self.bases.begin_batch();
        let (mut bytes, mut content) = (Vec::new(), ZERO_PAGE);
        for item in &mut items {
            self.find(item, &mut bytes, &mut content);
        }
        let (bases, compressors) = (&self.bases, &mut self.compressors);
        side_by_side(&mut items, compressors, &|items, compressor| {
            for item in items {
                item.encode(bases, compressor);
            }
        });
        self.bases.begin_batch();
        let appended = items.iter_mut().try_for_each(|item| self.append(item));
        if appended.is_ok() {
            items.iter().enumerate().for_each(|(at, item)| placed(at, item.placed));
        }
        scratch.extend(items.into_iter().map(|item| item.scratch));
        self.scratch = scratch;
        appended
    }

    /// Where it is already; else what it could be a delta on, which is read into `bytes` and
    /// `content` where it has to be.
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

    /// The plain record that `of` is, or is a delta on; none where it cannot be read.
    fn read_base(&self, of: PageRef, bytes: &mut Vec<u8>, page: &mut Page) -> Option<Base> {
        let record = self.read_record(of, bytes)?;
        let of = match record.kind {
            Kind::Delta => match record.derivation(page).ok()? {
                Derivation::Delta(delta) => delta.base,
                Derivation::Parts(_) => return None,
            },
            _ => of,
        };
        let record = self.read_record(of, bytes)?;
        record.decompress(page).ok()?;
        Some(Base::new(of, record.hash, record.len_bytes() - RECORD_HEADER_BYTES))
    }

    /// A record that a base may be read from; it may not be in the file yet.
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
            // The pack ends before.
            let len = pack.file.len_bytes().ok()?.saturating_sub(at.offset());
            bytes.truncate(len.min(RECORD_BYTES_MAX as u64) as usize);
            pack.file.read_at(at.offset(), bytes).ok()?;
        }
        pack.parse(bytes, at).ok()
    }

    fn append(&mut self, item: &mut Item<'_>) -> Result<()> {
        let Some(hash) = item.hash.filter(|_| item.encoded.is_some()) else { return Ok(()) };
        // An earlier one of the batch may have brought it.
        if let Some(known) = self.known(hash, item.input.content) {
            item.placed = Some(known);
            return Ok(());
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        if item.on >= place
            && let Some(compressor) = self.compressors.first_mut()
        {
            // Somebody else's, in a pack behind this one.
            item.take_alone(compressor.compress(item.input.content));
        }
        let (kind, codec) = item.encoded.unwrap_or((Kind::Page, Codec::Raw));
        let len_bytes = pack.append(hash, kind, (codec, item.payload(codec, kind)));
        self.index.insert(hash, place, kind);
        if kind == Kind::Page
            && let Some(finder) = &mut self.finder
        {
            let tags = finder.tags(item.input.content);
            finder.learn(&tags, place);
        }
        if let Some((page, _)) = item.input.home {
            match kind {
                Kind::Delta => self.bases.used(page, len_bytes),
                // What was written once may never be again: its base is read when it is.
                _ if item.has_base => {
                    let payload_bytes = item.payload(codec, kind).len();
                    self.bases.insert(
                        page,
                        Base::new(place, hash, payload_bytes),
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

impl OpenPack {
    /// What is to come into the file, from the record at `at` on; none where that is in it.
    fn unflushed(&self, at: PageRef) -> Option<&[u8]> {
        let at = at.offset().checked_sub(self.flushed)?;
        self.buffer.get(at as usize..)
    }
}

/// Hashes those that are not zero.
fn look(items: &mut [Item<'_>], key: &HashKey) {
    let mut waiting = [0; LANES];
    let mut pages = [&ZERO_PAGE; LANES];
    let mut count = 0;
    for at in 0..=items.len() {
        if let Some(item) = items.get(at) {
            if *item.input.content == ZERO_PAGE {
                continue;
            }
            (waiting[count], pages[count]) = (at, item.input.content);
            count += 1;
        }
        if count == LANES || at == items.len() {
            let hashes = PageHash::of_some(key, &pages[..count]);
            for (at, hash) in waiting[..count].iter().zip(hashes) {
                items[*at].hash = Some(hash);
            }
            count = 0;
        }
    }
}

/// Does `work` for all items, on as many threads as there are compressors.
fn side_by_side<'a, 'b>(
    items: &mut [Item<'a>],
    compressors: &mut [PageCompressor],
    work: &(dyn Fn(&mut [Item<'a>], &mut PageCompressor) + Sync + 'b),
) {
    if let [compressor] = compressors {
        return work(items, compressor);
    }
    let per_thread = items.len().div_ceil(compressors.len().max(1)).max(1);
    let mut shares = items.chunks_mut(per_thread).zip(compressors);
    let Some((first, compressor)) = shares.next() else { return };
    std::thread::scope(|scope| {
        for (share, compressor) in shares {
            scope.spawn(move || work(share, compressor));
        }
        work(first, compressor);
    });
}
