//! Encodes column chunks of Parquet files. The parquet library encodes plain values; this module
//! produces the same page formats faster, because it knows more about the values.
//!
//! ```text
//!   split      0 0 0 0 ... │ 7f 7f 7f ... │ ... │ 10 18 20 ...     BYTE_STREAM_SPLIT
//!   indices    dictionary page: the different values │
//!              data page: width, one run of 8- or 16-bit indices
//!   small      the same with indices of 1, 2, 4 or 8 bits
//!   delta      header │ least difference, four widths, 256 differences less the least │ ...
//!                                                                  DELTA_BINARY_PACKED
//! ```
//!
//! The format packs indices into the bits of the largest, and stores that width in the page. With a
//! width of 8 or 16 the packed run is an array: it costs no packing, and LZ4 finds repetitions in
//! it. Small indices are packed, because LZ4 then has an eighth of the bytes to compress.
//! Measurements: docs/design/results/analysis.md; the benchmark is
//! `keyframe-bench memtrace-columns`.

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

/// Runs are counted in units of this many values.
const RUN_VALUES: usize = 8;
/// The number of values that [`transpose`] handles at once.
const SQUARE: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Differences in a block, and in each of its miniblocks, which have a width each.
const BLOCK: usize = 256;
const MINIBLOCK: usize = 64;
/// LZ4's acceleration: how fast it skips data without repetitions.
const ACCELERATION: i32 = 8;

/// Encodes columns. It keeps its buffers, because allocating them costs as much as filling them.
#[derive(Default)]
pub(crate) struct ChunkEncoder {
    plain: Vec<u8>,
    packed: Vec<u8>,
}

/// The pages of an encoded column, and their metadata.
pub(crate) struct ColumnChunk {
    bytes: Bytes,
    close: ColumnCloseResult,
}

/// A dictionary in the column's physical type.
#[derive(Clone, Copy)]
pub(crate) struct Dictionary<'a> {
    /// The encoded values.
    pub bytes: &'a [u8],
    /// The number of values.
    pub values: usize,
}

impl ChunkEncoder {
    /// Encodes a column by BYTE_STREAM_SPLIT, an encoding of Parquet: the first bytes of all
    /// values, then the second bytes, and so on. Takes the lowest `N` bytes of each value. Error:
    /// the Parquet library refuses.
    pub fn split<const N: usize>(
        &mut self,
        column: ColumnDescPtr,
        values: impl ExactSizeIterator<Item = u64>,
    ) -> Result<ColumnChunk, ParquetError> {
        let rows = values.len();
        let mut pages = PageBuilder::new(column, &mut self.packed);
        pages.data(split::<N>(values, &mut self.plain), rows, Encoding::BYTE_STREAM_SPLIT)?;
        pages.finish(rows, vec![Encoding::BYTE_STREAM_SPLIT], None)
    }

    /// Encodes `values` by their differences, with statistics of the least and largest value.
    /// Error: the Parquet library refuses.
    pub fn delta(
        &mut self,
        column: ColumnDescPtr,
        values: &[i64],
    ) -> Result<ColumnChunk, ParquetError> {
        let mut pages = PageBuilder::new(column, &mut self.packed);
        self.plain.clear();
        let is_rising = encode_differences(values, &mut self.plain);
        pages.data(&self.plain, values.len(), Encoding::DELTA_BINARY_PACKED)?;
        let (least, largest) = if is_rising {
            (values.first(), values.last())
        } else {
            (values.iter().min(), values.iter().max())
        };
        let statistics = Statistics::int64(least.copied(), largest.copied(), None, None, false);
        pages.finish(values.len(), vec![Encoding::DELTA_BINARY_PACKED], Some(statistics))
    }

    /// Encodes a column whose values are in `dictionary`. `numbers` has the index of each row's
    /// value, which `bytes_of` encodes in `N` bytes. Error: the Parquet library refuses.
    pub fn indices<const N: usize, T: Copy>(
        &mut self,
        column: ColumnDescPtr,
        dictionary: Dictionary<'_>,
        numbers: &[T],
        bytes_of: impl Fn(T) -> [u8; N],
    ) -> Result<ColumnChunk, ParquetError> {
        let data = run(numbers, bytes_of, &mut self.plain);
        Self::with_dictionary(column, &mut self.packed, dictionary, data, numbers.len())
    }

    /// Encodes a column of few different values. `numbers` has the index of each row's value, and
    /// `value` returns the value of an index. Error: the Parquet library refuses.
    pub fn small(
        &mut self,
        column: ColumnDescPtr,
        numbers: &[u8],
        value: impl Fn(u8) -> u32,
    ) -> Result<ColumnChunk, ParquetError> {
        let largest = numbers.iter().copied().max().unwrap_or(0);
        let dictionary: Vec<u8> =
            (0..=largest).flat_map(|number| value(number).to_le_bytes()).collect();
        let data = match largest {
            0..2 => packed_run::<1>(numbers, &mut self.plain),
            2..4 => packed_run::<2>(numbers, &mut self.plain),
            4..16 => packed_run::<4>(numbers, &mut self.plain),
            16.. => run(numbers, |number| [number], &mut self.plain),
        };
        let dictionary = Dictionary { bytes: &dictionary, values: usize::from(largest) + 1 };
        Self::with_dictionary(column, &mut self.packed, dictionary, data, numbers.len())
    }

    fn with_dictionary(
        column: ColumnDescPtr,
        packed: &mut Vec<u8>,
        dictionary: Dictionary<'_>,
        data: &[u8],
        rows: usize,
    ) -> Result<ColumnChunk, ParquetError> {
        let mut pages = PageBuilder::new(column, packed);
        pages.dictionary(dictionary)?;
        pages.data(data, rows, Encoding::RLE_DICTIONARY)?;
        pages.finish(rows, vec![Encoding::PLAIN, Encoding::RLE_DICTIONARY], None)
    }
}

impl ColumnChunk {
    /// Appends the chunk to `group` as its next column. Error: the Parquet library refuses.
    pub fn append<W: Write + Send>(
        self,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<(), ParquetError> {
        group.append_column(&self.bytes, self.close)
    }
}

/// The first `len` bytes of `all`, with unspecified contents.
fn room(all: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if all.len() < len {
        all.resize(len, 0);
    }
    &mut all[..len]
}

/// Writes the first bytes of all values to `data`, then the second bytes, and so on up to `N`.
/// Writes whole cache lines: the bytes of a row are so far apart that they share few cache sets.
fn split<const N: usize>(
    mut values: impl ExactSizeIterator<Item = u64>,
    data: &mut Vec<u8>,
) -> &[u8] {
    let rows = values.len();
    let data = room(data, N * rows);
    let mut lines = [[[0; SQUARE]; LINE / SQUARE]; SQUARE];
    for begin in (0..rows).step_by(LINE) {
        for column in 0..LINE / SQUARE {
            let square = transpose(std::array::from_fn(|_| values.next().unwrap_or(0)));
            for (line, word) in lines.iter_mut().zip(square) {
                line[column] = word.to_le_bytes();
            }
        }
        for (number, line) in lines.iter().take(N).enumerate() {
            let line = line.as_flattened();
            let out = &mut data[number * rows + begin..(number + 1) * rows];
            match out.first_chunk_mut::<LINE>() {
                Some(out) => out.copy_from_slice(line),
                None => out.copy_from_slice(&line[..out.len()]),
            }
        }
    }
    data
}

/// Transposes a square of eight words by eight bytes.
fn transpose(mut words: [u64; SQUARE]) -> [u64; SQUARE] {
    for (step, mask) in
        [(4, 0x0000_0000_ffff_ffff), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)]
    {
        let bits = 8 * step;
        for low in (0..SQUARE).filter(|word| word & step == 0) {
            let moved = (words[low] >> bits ^ words[low + step]) & mask;
            words[low] ^= moved << bits;
            words[low + step] ^= moved;
        }
    }
    words
}

/// Appends the first value, then blocks of the differences between neighbours, wrapping as the
/// format requires. Returns whether no value is less than the one before.
fn encode_differences(values: &[i64], data: &mut Vec<u8>) -> bool {
    let mut is_rising = true;
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
        // If no difference is negative, 0 serves as the least one, without a search.
        let least = match larger.iter().fold(0, |all, larger| all | *larger) {
            0.. => 0,
            _ => larger.iter().copied().min().unwrap_or(0),
        };
        is_rising &= least == 0;
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
    is_rising
}

fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63) as u64
}

/// Appends a number in groups of seven bits, the lowest first (LEB128).
fn varint(data: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        data.push(number as u8 | 0x80);
        number >>= 7;
    }
    data.push(number as u8);
}

/// Writes a width in bits and a packed run of numbers of `N` bytes to `data`.
fn run<'a, const N: usize, T: Copy>(
    numbers: &[T],
    bytes_of: impl Fn(T) -> [u8; N],
    data: &'a mut Vec<u8>,
) -> &'a [u8] {
    let (all, packed) = run_of(numbers.len(), N * 8, data);
    let mut places = all[packed..].chunks_exact_mut(N);
    // In this order, `zip` does not consume an element of `places` after the last number.
    for (number, out) in numbers.iter().zip(places.by_ref()) {
        out.copy_from_slice(&bytes_of(*number));
    }
    places.for_each(|out| out.fill(0));
    all
}

/// Writes a packed run of numbers below 2^`BITS` to `data`; `BITS` is 1, 2 or 4.
fn packed_run<'a, const BITS: usize>(numbers: &[u8], data: &'a mut Vec<u8>) -> &'a [u8] {
    let (all, packed) = run_of(numbers.len(), BITS, data);
    for (eight, out) in numbers.chunks(RUN_VALUES).zip(all[packed..].chunks_exact_mut(BITS)) {
        let mut word = [0; RUN_VALUES];
        match eight.as_array() {
            Some(eight) => word = *eight,
            None => word[..eight.len()].copy_from_slice(eight),
        }
        out.copy_from_slice(&narrow::<BITS>(u64::from_le_bytes(word)).to_le_bytes()[..BITS]);
    }
    all
}

/// Moves the lowest `BITS` bits of eight bytes together.
fn narrow<const BITS: usize>(mut word: u64) -> u64 {
    for step in 0..3 {
        let (bits, room) = (BITS << step, 8 << step);
        let pair = (1 << (2 * bits)) - 1;
        let pairs = (0..u64::BITS as usize).step_by(2 * room).fold(0, |all, at| all | pair << at);
        word = (word | word >> (room - bits)) & pairs;
    }
    word
}

/// Prepares a packed run of `numbers` numbers of `bits` bits in `data`. Returns the run, with its
/// header written, and the offset of the numbers.
fn run_of(numbers: usize, bits: usize, data: &mut Vec<u8>) -> (&mut [u8], usize) {
    let runs = numbers.div_ceil(RUN_VALUES);
    let mut head = vec![bits as u8];
    varint(&mut head, (runs << 1 | 1) as u64);
    let data = room(data, head.len() + bits * runs);
    data[..head.len()].copy_from_slice(&head);
    (data, head.len())
}

/// Writes the pages of a chunk.
struct PageBuilder<'a> {
    column: ColumnDescPtr,
    packed: &'a mut Vec<u8>,
    out: TrackedWrite<Vec<u8>>,
    dictionary: Option<i64>,
    data: i64,
    uncompressed: usize,
}

impl<'a> PageBuilder<'a> {
    fn new(column: ColumnDescPtr, packed: &'a mut Vec<u8>) -> Self {
        let out = TrackedWrite::new(Vec::new());
        Self { column, packed, out, dictionary: None, data: 0, uncompressed: 0 }
    }

    fn dictionary(&mut self, dictionary: Dictionary<'_>) -> Result<(), ParquetError> {
        let buf = compress(dictionary.bytes, self.packed)?;
        let num_values = to_u32(dictionary.values)?;
        let page =
            Page::DictionaryPage { buf, num_values, encoding: Encoding::PLAIN, is_sorted: false };
        self.dictionary = Some(self.write(page, dictionary.bytes.len())? as i64);
        Ok(())
    }

    fn data(&mut self, data: &[u8], count: usize, encoding: Encoding) -> Result<(), ParquetError> {
        let page = Page::DataPage {
            buf: compress(data, self.packed)?,
            num_values: to_u32(count)?,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        };
        self.data = self.write(page, data.len())? as i64;
        Ok(())
    }

    /// Writes a page and returns its offset.
    fn write(&mut self, page: Page, uncompressed: usize) -> Result<u64, ParquetError> {
        let spec = SerializedPageWriter::new(&mut self.out)
            .write_page(CompressedPage::new(page, uncompressed))?;
        self.uncompressed += spec.uncompressed_size;
        Ok(spec.offset)
    }

    fn finish(
        self,
        rows: usize,
        mut encodings: Vec<Encoding>,
        statistics: Option<Statistics>,
    ) -> Result<ColumnChunk, ParquetError> {
        // RLE is the encoding of levels, of which a required column has none.
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
        Ok(ColumnChunk { bytes, close })
    }
}

/// Compresses `data`, with `packed` as a buffer.
fn compress(data: &[u8], packed: &mut Vec<u8>) -> Result<Bytes, ParquetError> {
    let failed = |e: std::io::Error| ParquetError::External(e.into());
    let packed = room(packed, compress_bound(data.len()).map_err(failed)?);
    let len = compress_to_buffer(data, Some(CompressionMode::FAST(ACCELERATION)), false, packed)
        .map_err(failed)?;
    Ok(Bytes::copy_from_slice(&packed[..len]))
}

fn to_u32(count: usize) -> Result<u32, ParquetError> {
    u32::try_from(count).map_err(|e| ParquetError::External(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_run_is_its_width_its_length_and_an_array() {
        let of = |n: usize| run(&vec![0x102_u16; n], u16::to_le_bytes, &mut vec![9; 999]).to_vec();
        assert_eq!(of(1), [&[16, 0b11, 2, 1][..], &[0; 14]].concat());
        assert_eq!((of(8)[..2].to_vec(), of(8).len()), (vec![16, 0b11], 18));
        // 64 eights: 129, in two bytes of seven bits.
        assert_eq!((of(512)[..3].to_vec(), of(512).len()), (vec![16, 0x81, 1], 3 + 1024));
        assert_eq!(run(&[7_u8, 8], |n| [n], &mut Vec::new()), [8, 0b11, 7, 8, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn small_numbers_are_packed_from_the_lowest_bit_on() {
        let ones = [1, 0, 1, 1, 0, 0, 0, 1, 1];
        assert_eq!(packed_run::<1>(&ones, &mut vec![9; 99]), [1, 0b101, 0b1000_1101, 1]);
        assert_eq!(packed_run::<2>(&[3, 0, 1, 2], &mut vec![9; 99]), [2, 0b11, 0b1001_0011, 0]);
        assert_eq!(packed_run::<4>(&[15, 0, 7], &mut vec![9; 99]), [4, 0b11, 0x0f, 0x07, 0, 0]);
        assert_eq!(packed_run::<1>(&[], &mut Vec::new()), [1, 1]);
    }

    proptest! {
        #[test]
        fn split_values_are_complete(values in prop::collection::vec(any::<u64>(), 0..100)) {
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
