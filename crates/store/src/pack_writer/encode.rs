//! Hashing and encoding pages, many at a time on several threads.

use crate::bases::{At, Bases, DeltaBase};
use crate::pack_writer::placed::{PageInput, Placed};
use keyframe_pages::patch::{PATCH_BYTES_MAX, diff};
use keyframe_store_format::codec::{Codec, PageCompressor};
use keyframe_store_format::delta::{DELTA_HEADER_BYTES, Delta};
use keyframe_store_format::page_hash::{HashKey, LANES, PageHash};
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::RecordKind;
use keyframe_units::{Page, ZERO_PAGE};

/// A patch of at most this many bytes is taken without compressing the page for comparison.
const PATCH_BYTES_SMALL: usize = 512;

/// A page that is being encoded as a record.
pub struct Item<'a> {
    pub input: PageInput<'a>,
    /// The page hash. `None` if the page is zero.
    pub hash: Option<PageHash>,
    pub base: Option<At>,
    /// True if the page was written before, so that it has a base or an earlier record.
    pub has_base: bool,
    /// The base of the delta.
    pub on: PageRef,
    pub encoded: Option<(RecordKind, Codec)>,
    pub scratch: Scratch,
    pub placed: Option<Placed>,
}

/// A buffer for the payload of a page. The next page uses it again.
#[derive(Debug, Default)]
pub struct Scratch {
    payload: Vec<u8>,
}

impl Item<'_> {
    /// Encodes the page as a delta if it has a base in `bases`, and compresses it otherwise.
    pub fn encode(&mut self, bases: &Bases, compressor: &mut PageCompressor) {
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
            (self.encoded, self.on) = (Some((RecordKind::Delta, codec)), base.record);
            return;
        }
        let alone = compressor.compress(self.input.content);
        // A plain page is read in one step, and can be a base.
        match delta {
            Some((base, codec, len)) if is_worth_it(len, alone.1.len()) => {
                (self.encoded, self.on) = (Some((RecordKind::Delta, codec)), base.record);
            }
            _ => self.take_alone(alone),
        }
    }

    /// Takes the compressed content as the record's payload, without a base.
    pub fn take_alone(&mut self, (codec, payload): (Codec, &[u8])) {
        self.scratch.payload.clear();
        if codec != Codec::Raw {
            self.scratch.payload.extend_from_slice(payload);
        }
        self.encoded = Some((RecordKind::Page, codec));
    }

    /// Makes the payload of a delta; `None` if the patch is too long.
    fn encode_delta(
        &mut self,
        base: DeltaBase,
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

    /// Returns the payload of the new record with this codec and kind.
    pub fn payload(&self, codec: Codec, kind: RecordKind) -> &[u8] {
        if kind == RecordKind::Page && codec == Codec::Raw {
            self.input.content
        } else {
            &self.scratch.payload
        }
    }
}

/// True if a delta saves enough against the plain page to be worth a second step at each read. A
/// plain page takes about as much as its base. So the base's length often answers this without
/// compressing the page.
fn is_worth_it(delta_bytes: usize, alone_bytes: usize) -> bool {
    delta_bytes <= alone_bytes / 4 * 3
}

/// Compresses the patch in `payload`, the payload of a delta, if it is long enough. Returns the
/// codec.
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

/// Sets the hash of each page that is not zero.
pub fn hash_items(items: &mut [Item<'_>], key: &HashKey) {
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
            let hashes = PageHash::of_many(key, &pages[..count]);
            for (at, hash) in waiting[..count].iter().zip(hashes) {
                items[*at].hash = Some(hash);
            }
            count = 0;
        }
    }
}

/// Divides the items among threads, one for each compressor, and calls `work` on each of them.
pub fn side_by_side<'a, 'b>(
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
