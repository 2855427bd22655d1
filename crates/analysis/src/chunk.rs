//! Column chunks that are encoded here. The format's library takes values as they are; where more is known of them, the same pages are made
//! several times as fast.
//!
//! ```text
//!   split      0 0 0 0 ... │ 7f 7f 7f ... │ ... │ 10 18 20 ...     BYTE_STREAM_SPLIT: the first bytes of all, then the second
//!   numbers    dictionary page: the different values │ data page: width, one run, a number for each row as 8 or 16 bits
//!   growing    header │ least difference, four widths, differences of 256 rows less the least │ ...    DELTA_BINARY_PACKED
//! ```
//!
//! The format packs numbers into as few bits as the largest needs, but says that width in the page: with 8 or 16 what is packed is an array, which
//! takes no packing, and in which LZ4 finds repetitions.

use bytes::Bytes;
use lz4::block::{CompressionMode, compress_bound, compress_to_buffer};
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{CompressedPage, Page, PageWriter};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::statistics::Statistics;
use parquet::file::writer::{SerializedPageWriter, SerializedRowGroupWriter, TrackedWrite};
use parquet::schema::types::ColumnDescPtr;
use std::io::Write;

/// Values of a run are counted in eights.
const RUN_VALUES: usize = 8;
/// Values whose bytes are exchanged at once.
const SQUARE: usize = 8;
/// Differences in a block, and in each of the parts of it that have a width of their own.
const BLOCK: usize = 256;
const MINIBLOCK: usize = 64;
/// How soon LZ4 looks away from what does not repeat: a seventh of its time less, for an eighth of the size more.
const ACCELERATION: i32 = 8;

/// What columns are encoded in, one after the other: memory that is asked for anew costs as much as what is written there.
#[derive(Default)]
pub(crate) struct Encoder {
    plain: Vec<u8>,
    packed: Vec<u8>,
}

/// A column's pages and what the file says of them.
pub(crate) struct Chunk {
    bytes: Bytes,
    close: ColumnCloseResult,
}

impl Encoder {
    /// Of `values` by the first `N` of their bytes.
    pub fn split<const N: usize>(
        &mut self,
        column: ColumnDescPtr,
        values: impl ExactSizeIterator<Item = u64>,
    ) -> Result<Chunk, ParquetError> {
        let rows = values.len();
        let mut pages = Pages::new(column, &mut self.packed);
        pages.data(split::<N>(values, &mut self.plain), rows, Encoding::BYTE_STREAM_SPLIT)?;
        pages.finish(rows, vec![Encoding::BYTE_STREAM_SPLIT], None)
    }

    /// Of `values` by their differences, with the least and the largest of them.
    pub fn growing(&mut self, column: ColumnDescPtr, values: &[i64]) -> Result<Chunk, ParquetError> {
        let mut pages = Pages::new(column, &mut self.packed);
        self.plain.clear();
        let ever_grows = differences(values, &mut self.plain);
        pages.data(&self.plain, values.len(), Encoding::DELTA_BINARY_PACKED)?;
        let (least, largest) = if ever_grows {
            (values.first(), values.last())
        } else {
            (values.iter().min(), values.iter().max())
        };
        let statistics = Statistics::int64(least.copied(), largest.copied(), None, None, false);
        pages.finish(values.len(), vec![Encoding::DELTA_BINARY_PACKED], Some(statistics))
    }

    /// Of numbers that are each in `N` bytes, of values in `dictionary`, which is in the column's own type.
    pub fn numbers<const N: usize, T: Copy>(
        &mut self,
        column: ColumnDescPtr,
        (dictionary, different): (&[u8], usize),
        numbers: &[T],
        bytes_of: impl Fn(T) -> [u8; N],
    ) -> Result<Chunk, ParquetError> {
        let mut pages = Pages::new(column, &mut self.packed);
        pages.dictionary(dictionary, different)?;
        pages.data(run(numbers, bytes_of, &mut self.plain), numbers.len(), Encoding::RLE_DICTIONARY)?;
        pages.finish(numbers.len(), vec![Encoding::PLAIN, Encoding::RLE_DICTIONARY], None)
    }
}

impl Chunk {
    /// Puts it into `group` as its next column.
    pub fn append<W: Write + Send>(
        self,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<(), ParquetError> {
        group.append_column(&self.bytes, self.close)
    }
}

/// The first `len` bytes of `all`, whatever they hold.
fn room(all: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if all.len() < len {
        all.resize(len, 0);
    }
    &mut all[..len]
}

/// The first bytes of all values, then the second bytes, and so on, as far as `N`; in `data`.
fn split<const N: usize>(mut values: impl ExactSizeIterator<Item = u64>, data: &mut Vec<u8>) -> &[u8] {
    let rows = values.len();
    let data = room(data, N * rows);
    for begin in (0..rows).step_by(SQUARE) {
        let rows_here = SQUARE.min(rows - begin);
        let square = transposed(std::array::from_fn(|_| values.next().unwrap_or(0)));
        for (number, word) in square.into_iter().take(N).enumerate() {
            let at = number * rows + begin;
            match data[at..].first_chunk_mut() {
                Some(out) if rows_here == SQUARE => *out = word.to_le_bytes(),
                _ => data[at..at + rows_here].copy_from_slice(&word.to_le_bytes()[..rows_here]),
            }
        }
    }
    data
}

/// The first bytes of eight words as the first word, and so on.
fn transposed(mut words: [u64; SQUARE]) -> [u64; SQUARE] {
    for (step, mask) in [(4, 0x0000_0000_ffff_ffff), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)] {
        let bits = 8 * step;
        for low in (0..SQUARE).filter(|word| word & step == 0) {
            let moved = (words[low] >> bits ^ words[low + step]) & mask;
            words[low] ^= moved << bits;
            words[low + step] ^= moved;
        }
    }
    words
}

/// Appends the first value, then in blocks how much each is larger than the one before. Wrapping, as the format wants it. Returns whether
/// none is less than the one before.
fn differences(values: &[i64], data: &mut Vec<u8>) -> bool {
    let mut ever_grows = true;
    let (first, rest) = values.split_first().map_or((0, &[][..]), |(first, rest)| (*first, rest));
    for number in [BLOCK as u64, (BLOCK / MINIBLOCK) as u64, values.len() as u64, zigzag(first)] {
        varint(data, number);
    }
    for (number, block) in rest.chunks(BLOCK).enumerate() {
        let before = &values[number * BLOCK..];
        let mut larger = [0; BLOCK];
        let each = larger.iter_mut().zip(block).zip(before);
        each.for_each(|((larger, value), before)| *larger = value.wrapping_sub(*before));
        let larger = &mut larger[..block.len()];
        // Zero will do where none is below it, and takes no look for the least of all.
        let least = match larger.iter().fold(0, |all, larger| all | *larger) {
            0.. => 0,
            _ => larger.iter().copied().min().unwrap_or(0),
        };
        ever_grows &= least == 0;
        varint(data, zigzag(least));
        let widths = data.len();
        data.resize(widths + BLOCK / MINIBLOCK, 0);
        let parts = larger.chunks_mut(MINIBLOCK).enumerate();
        for (part, larger) in parts {
            let mut bits = 0;
            for larger in larger.iter_mut() {
                *larger = larger.wrapping_sub(least);
                bits |= *larger as u64;
            }
            let bytes = match u64::BITS - bits.leading_zeros() {
                0 => 0,
                1..=8 => 1,
                9..=16 => 2,
                17..=32 => 4,
                _ => 8,
            };
            data[widths + part] = 8 * bytes as u8;
            let begin = data.len();
            data.resize(begin + bytes * MINIBLOCK, 0);
            if bytes == 1 {
                let all = data[begin..].iter_mut().zip(larger);
                all.for_each(|(out, larger)| *out = *larger as u8);
            } else if bytes > 1 {
                let all = data[begin..].chunks_exact_mut(bytes).zip(larger);
                all.for_each(|(out, larger)| out.copy_from_slice(&larger.to_le_bytes()[..bytes]));
            }
        }
    }
    ever_grows
}

fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63) as u64
}

/// Seven bits a byte, the lowest first.
fn varint(data: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        data.push(number as u8 | 0x80);
        number >>= 7;
    }
    data.push(number as u8);
}

/// A packed run of numbers that are `N` bytes wide, behind that width in bits; in `data`.
fn run<'a, const N: usize, T: Copy>(
    numbers: &[T],
    bytes_of: impl Fn(T) -> [u8; N],
    data: &'a mut Vec<u8>,
) -> &'a [u8] {
    let runs = numbers.len().div_ceil(RUN_VALUES);
    let mut head = vec![(N * 8) as u8];
    varint(&mut head, (runs << 1 | 1) as u64);
    let data = room(data, head.len() + N * runs * RUN_VALUES);
    let (begin, packed) = data.split_at_mut(head.len());
    begin.copy_from_slice(&head);
    let mut places = packed.chunks_exact_mut(N);
    // In this order: the other takes a place before it sees that there is no number for it.
    for (number, out) in numbers.iter().zip(places.by_ref()) {
        out.copy_from_slice(&bytes_of(*number));
    }
    places.for_each(|out| out.fill(0));
    data
}

/// Pages as they are written.
struct Pages<'a> {
    column: ColumnDescPtr,
    packed: &'a mut Vec<u8>,
    out: TrackedWrite<Vec<u8>>,
    dictionary: Option<i64>,
    data: i64,
    uncompressed: usize,
}

impl<'a> Pages<'a> {
    fn new(column: ColumnDescPtr, packed: &'a mut Vec<u8>) -> Self {
        let out = TrackedWrite::new(Vec::new());
        Self { column, packed, out, dictionary: None, data: 0, uncompressed: 0 }
    }

    fn dictionary(&mut self, values: &[u8], count: usize) -> Result<(), ParquetError> {
        let buf = compressed(values, self.packed)?;
        let num_values = number(count)?;
        let page = Page::DictionaryPage { buf, num_values, encoding: Encoding::PLAIN, is_sorted: false };
        self.dictionary = Some(self.write(page, values.len())? as i64);
        Ok(())
    }

    fn data(&mut self, data: &[u8], count: usize, encoding: Encoding) -> Result<(), ParquetError> {
        let page = Page::DataPage {
            buf: compressed(data, self.packed)?,
            num_values: number(count)?,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        };
        self.data = self.write(page, data.len())? as i64;
        Ok(())
    }

    /// Where it begins.
    fn write(&mut self, page: Page, uncompressed: usize) -> Result<u64, ParquetError> {
        let spec =
            SerializedPageWriter::new(&mut self.out).write_page(CompressedPage::new(page, uncompressed))?;
        self.uncompressed += spec.uncompressed_size;
        Ok(spec.offset)
    }

    fn finish(
        self,
        rows: usize,
        mut encodings: Vec<Encoding>,
        statistics: Option<Statistics>,
    ) -> Result<Chunk, ParquetError> {
        // Of levels, which a column without any has in none of its pages.
        encodings.push(Encoding::RLE);
        let bytes = Bytes::from(self.out.into_inner()?);
        let mut metadata = ColumnChunkMetaData::builder(self.column)
            .set_compression(Compression::LZ4_RAW)
            .set_encodings(encodings)
            .set_num_values(rows as i64)
            .set_total_compressed_size(bytes.len() as i64)
            .set_total_uncompressed_size(self.uncompressed as i64)
            .set_dictionary_page_offset(self.dictionary)
            .set_data_page_offset(self.data);
        if let Some(statistics) = statistics {
            metadata = metadata.set_statistics(statistics);
        }
        let metadata = metadata.build()?;
        let close = ColumnCloseResult {
            bytes_written: bytes.len() as u64,
            rows_written: rows as u64,
            metadata,
            bloom_filter: None,
            column_index: None,
            offset_index: None,
        };
        Ok(Chunk { bytes, close })
    }
}

/// Compresses in `packed`.
fn compressed(data: &[u8], packed: &mut Vec<u8>) -> Result<Bytes, ParquetError> {
    let failed = |e: std::io::Error| ParquetError::External(e.into());
    let packed = room(packed, compress_bound(data.len()).map_err(failed)?);
    let len =
        compress_to_buffer(data, Some(CompressionMode::FAST(ACCELERATION)), false, packed).map_err(failed)?;
    Ok(Bytes::copy_from_slice(&packed[..len]))
}

fn number(count: usize) -> Result<u32, ParquetError> {
    u32::try_from(count).map_err(|e| ParquetError::External(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_run_is_an_array_behind_its_width_and_length() {
        let of = |n: usize| run(&vec![0x102_u16; n], u16::to_le_bytes, &mut vec![9; 999]).to_vec();
        assert_eq!(of(1), [&[16, 0b11, 2, 1][..], &[0; 14]].concat());
        assert_eq!((of(8)[..2].to_vec(), of(8).len()), (vec![16, 0b11], 18));
        // 64 eights: 129, in two bytes of seven bits.
        assert_eq!((of(512)[..3].to_vec(), of(512).len()), (vec![16, 0x81, 1], 3 + 1024));
        assert_eq!(run(&[7_u8, 8], |n| [n], &mut Vec::new()), [8, 0b11, 7, 8, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn split_values_are_all_there(values in prop::collection::vec(any::<u64>(), 0..100)) {
            let (mut all, mut half) = (vec![9; 999], Vec::new());
            let all = split::<8>(values.iter().copied(), &mut all);
            let half = split::<4>(values.iter().copied(), &mut half);
            prop_assert_eq!(all.len(), values.len() * 8);
            prop_assert_eq!(half, &all[..values.len() * 4]);
            for (row, value) in values.iter().enumerate() {
                let back: [u8; 8] = std::array::from_fn(|byte| all[byte * values.len() + row]);
                prop_assert_eq!(u64::from_le_bytes(back), *value);
            }
        }
    }
}
