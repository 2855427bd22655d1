//! Putting blocks of disks.

use crate::Result;
use crate::pack_writer::open_pack::OpenPack;
use crate::pack_writer::placed::{Placed, PlacedBlock};
use crate::pack_writer::writer::PackWriter;
use crate::sectors::{SectorFinder, Tags};
use crate::tuning::Tuning;
use keyframe_store_format::codec::{Codec, SAVING_BYTES_MIN};
use keyframe_store_format::composed::{Composition, PART_BYTES, PARTS, PagePart, sectors};
use keyframe_store_format::disk_meta::SectorCounts;
use keyframe_store_format::page_hash::PageHash;
use keyframe_store_format::page_ref::PageRef;
use keyframe_store_format::record::{Record, RecordKind};
use keyframe_units::Page;

impl PackWriter {
    /// Prepares the writer for the next run. `with_disks` is true if the run has disks.
    pub fn begin_run(&mut self, with_disks: bool) {
        self.bases.clear();
        if !with_disks {
            self.finder = None;
        } else if self.finder.is_none() {
            let Tuning { sector_index_bytes, sector_parts_min, .. } = self.tuning;
            self.finder =
                SectorFinder::new(&self.inner.config.key, sector_index_bytes, sector_parts_min);
            self.learnt_from = self.next_pack;
        }
    }

    /// Puts a block of a disk that is not zero into the store, unless the store holds its content.
    /// It is durable after the next [`Self::sync`]. Returns its record. Error: the pack cannot be
    /// written.
    pub fn put_block(&mut self, page: &Page) -> Result<PlacedBlock> {
        let hash = PageHash::of(&self.inner.config.key, page);
        if let Some(placed) = self.known(hash, page) {
            let whole = PARTS as u64;
            let mut sectors = SectorCounts::default();
            match placed {
                Placed::Known(_, kind) if kind.is_of_ram() => {
                    sectors.against_ram_whole_sectors = whole;
                }
                _ => sectors.against_disk_whole_sectors = whole,
            }
            return Ok(PlacedBlock { placed, composed: false, sectors });
        }
        let mut pack = self.take_pack()?;
        let place = PageRef::new(pack.number, pack.end());
        let tags = self.finder.as_ref().map(|finder| finder.tags(page));
        let composition = tags.as_ref().and_then(|tags| self.compose(page, tags, &pack));
        let codec = composition.and_then(|composition| self.encode_composed(&composition, page));
        let (kind, payload) = match codec {
            Some(codec) => (RecordKind::Composed, (codec, self.composed.as_slice())),
            None => (RecordKind::Block, self.compressors[0].compress(page)),
        };
        let len_bytes = pack.append(hash, kind, payload);
        let composed = kind == RecordKind::Composed;
        if let (Some(finder), Some(tags), RecordKind::Block) = (&mut self.finder, &tags, kind) {
            finder.learn(tags, place);
        }
        let sectors = self.count_sectors(page, composition.as_ref().filter(|_| composed), &pack);
        self.index.insert(hash, place, kind);
        self.give_back(pack)?;
        Ok(PlacedBlock { placed: Placed::New(place, len_bytes), composed, sectors })
    }

    /// The parts of a block that the store holds, in `pack` or in other packs.
    fn compose(&mut self, page: &Page, tags: &Tags, pack: &OpenPack) -> Option<Composition> {
        let inner = &self.inner;
        let end = PageRef::new(pack.number, pack.end());
        self.finder.as_mut()?.compose(page, tags, &mut |record, into| {
            // A derived record lies after those that it refers to.
            if record >= end {
                return false;
            }
            if record.pack() == pack.number && record.offset() >= pack.flushed {
                let bytes = pack
                    .buffer
                    .get((record.offset() - pack.flushed) as usize..)
                    .unwrap_or_default();
                return Record::parse(bytes, record)
                    .and_then(|record| record.decompress(into))
                    .is_ok();
            }
            inner.read_plain(record, into).is_ok()
        })
    }

    /// Encodes a composition into `self.composed`; `None` if the plain block is not larger.
    fn encode_composed(&mut self, composition: &Composition, page: &Page) -> Option<Codec> {
        let plain_len = self.compressors[0].compress(page).1.len();
        self.composed.clear();
        let codec = composition.encode(page, &mut self.compressors[0], &mut self.composed);
        (self.composed.len() + SAVING_BYTES_MIN <= plain_len).then_some(codec)
    }

    /// The sectors of a new block, by how each was stored.
    fn count_sectors(
        &self,
        page: &Page,
        composition: Option<&Composition>,
        pack: &OpenPack,
    ) -> SectorCounts {
        let mut counts = SectorCounts::default();
        for (at, sector) in sectors(page).iter().enumerate() {
            let counted = match composition.and_then(|c| c.0.get(at)) {
                Some(PagePart::Of(record, _)) if self.is_of_ram(*record, pack) => {
                    &mut counts.against_ram_part_sectors
                }
                Some(PagePart::Of(..)) => &mut counts.against_disk_part_sectors,
                _ if *sector == [0; PART_BYTES] => &mut counts.zero_sectors,
                _ => &mut counts.not_deduplicated_sectors,
            };
            *counted += 1;
        }
        counts
    }
}
