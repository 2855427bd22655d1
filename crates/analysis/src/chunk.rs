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
use lz4::block::{compress_bound, compress_to_buffer};
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

/// A column's pages and what the file says of them.
pub(crate) struct Chunk {
    bytes: Bytes,
    close: ColumnCloseResult,
}

impl Chunk {
    /// Of `values` by the first `N` of their bytes.
    pub fn split<const N: usize>(
        column: ColumnDescPtr,
        values: impl ExactSizeIterator<Item = u64>,
    ) -> Result<Self, ParquetError> {
        let rows = values.len();
        let mut pages = Pages::new(column);
        pages.data(&split::<N>(values), rows, Encoding::BYTE_STREAM_SPLIT)?;
        pages.finish(rows, vec![Encoding::BYTE_STREAM_SPLIT], None)
    }

    /// Of `values` by their differences, with the least and the largest of them.
    pub fn growing(column: ColumnDescPtr, values: &[i64]) -> Result<Self, ParquetError> {
        let mut pages = Pages::new(column);
        pages.data(&differences(values), values.len(), Encoding::DELTA_BINARY_PACKED)?;
        let (least, largest) = (values.iter().min().copied(), values.iter().max().copied());
        let statistics = Statistics::int64(least, largest, None, None, false);
        pages.finish(values.len(), vec![Encoding::DELTA_BINARY_PACKED], Some(statistics))
    }

    /// Of numbers that are each in `N` bytes, of values in `dictionary`, which is in the column's own type.
    pub fn numbers<const N: usize, T: Copy>(
        column: ColumnDescPtr,
        (dictionary, different): (&[u8], usize),
        numbers: &[T],
        bytes_of: impl Fn(T) -> [u8; N],
    ) -> Result<Self, ParquetError> {
        let data = run(numbers, bytes_of);
        let mut pages = Pages::new(column);
        pages.dictionary(dictionary, different)?;
        pages.data(&data, numbers.len(), Encoding::RLE_DICTIONARY)?;
        pages.finish(numbers.len(), vec![Encoding::PLAIN, Encoding::RLE_DICTIONARY], None)
    }

    /// Puts it into `group` as its next column.
    pub fn append<W: Write + Send>(
        self,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<(), ParquetError> {
        group.append_column(&self.bytes, self.close)
    }
}

/// The first bytes of all values, then the second bytes, and so on, as far as `N`.
fn split<const N: usize>(mut values: impl ExactSizeIterator<Item = u64>) -> Vec<u8> {
    let rows = values.len();
    let mut data = vec![0; N * rows];
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

/// The first value, then in blocks how much each is larger than the one before. Wrapping, as the format wants it.
fn differences(values: &[i64]) -> Vec<u8> {
    let mut data = Vec::with_capacity(64 + 2 * values.len());
    let (first, rest) = values.split_first().map_or((0, &[][..]), |(first, rest)| (*first, rest));
    for number in [BLOCK as u64, (BLOCK / MINIBLOCK) as u64, values.len() as u64, zigzag(first)] {
        varint(&mut data, number);
    }
    for (number, block) in rest.chunks(BLOCK).enumerate() {
        let before = &values[number * BLOCK..];
        let mut larger = [0; BLOCK];
        let each = larger.iter_mut().zip(block).zip(before);
        each.for_each(|((larger, value), before)| *larger = value.wrapping_sub(*before));
        let least = larger[..block.len()].iter().copied().min().unwrap_or(0);
        varint(&mut data, zigzag(least));
        let widths = data.len();
        data.resize(widths + BLOCK / MINIBLOCK, 0);
        let parts = larger[..block.len()].chunks_mut(MINIBLOCK).enumerate();
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
    data
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

/// A packed run of numbers that are `N` bytes wide, behind that width in bits.
fn run<const N: usize, T: Copy>(numbers: &[T], bytes_of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let runs = numbers.len().div_ceil(RUN_VALUES);
    let mut data = Vec::with_capacity(8 + N * runs * RUN_VALUES);
    data.push((N * 8) as u8);
    varint(&mut data, (runs << 1 | 1) as u64);
    let begin = data.len();
    data.resize(begin + N * runs * RUN_VALUES, 0);
    for (out, number) in data[begin..].chunks_exact_mut(N).zip(numbers) {
        out.copy_from_slice(&bytes_of(*number));
    }
    data
}

/// Pages as they are written.
struct Pages {
    column: ColumnDescPtr,
    out: TrackedWrite<Vec<u8>>,
    dictionary: Option<i64>,
    data: i64,
    uncompressed: usize,
}

impl Pages {
    fn new(column: ColumnDescPtr) -> Self {
        Self { column, out: TrackedWrite::new(Vec::new()), dictionary: None, data: 0, uncompressed: 0 }
    }

    fn dictionary(&mut self, values: &[u8], count: usize) -> Result<(), ParquetError> {
        let buf = compressed(values)?;
        let num_values = number(count)?;
        let page = Page::DictionaryPage { buf, num_values, encoding: Encoding::PLAIN, is_sorted: false };
        self.dictionary = Some(self.write(page, values.len())? as i64);
        Ok(())
    }

    fn data(&mut self, data: &[u8], count: usize, encoding: Encoding) -> Result<(), ParquetError> {
        let page = Page::DataPage {
            buf: compressed(data)?,
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

fn compressed(data: &[u8]) -> Result<Bytes, ParquetError> {
    let failed = |e: std::io::Error| ParquetError::External(e.into());
    let mut out = vec![0; compress_bound(data.len()).map_err(failed)?];
    let len = compress_to_buffer(data, None, false, &mut out).map_err(failed)?;
    out.truncate(len);
    Ok(out.into())
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
        let of = |n: usize| run(&vec![0x102_u16; n], u16::to_le_bytes);
        assert_eq!(of(1), [&[16, 0b11, 2, 1][..], &[0; 14]].concat());
        assert_eq!((of(8)[..2].to_vec(), of(8).len()), (vec![16, 0b11], 18));
        // 64 eights: 129, in two bytes of seven bits.
        assert_eq!((of(512)[..3].to_vec(), of(512).len()), (vec![16, 0x81, 1], 3 + 1024));
        assert_eq!(run(&[7_u8, 8], |n| [n]), [8, 0b11, 7, 8, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn split_values_are_all_there(values in prop::collection::vec(any::<u64>(), 0..100)) {
            let (all, half) = (split::<8>(values.iter().copied()), split::<4>(values.iter().copied()));
            prop_assert_eq!(all.len(), values.len() * 8);
            prop_assert_eq!(&half, &all[..values.len() * 4]);
            for (row, value) in values.iter().enumerate() {
                let back: [u8; 8] = std::array::from_fn(|byte| all[byte * values.len() + row]);
                prop_assert_eq!(u64::from_le_bytes(back), *value);
            }
        }
    }
}
