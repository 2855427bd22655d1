//! Parquet files: tables in row groups of columns, and files merged from parts without decoding
//! them.
//!
//! ```text
//!   part 0   │ row group │ row group │ rest │ footer       an interval's end completes a row group
//!   part 1   │ row group │ rest │ footer
//!   merged   │ row group │ row group │ rest │ row group │ rest │ footer
//! ```
//!
//! Invariant: the same rows in the same intervals give the same bytes. A file contains no time, no
//! version of this program and nothing about the machine.

use crate::column_chunk::{ChunkEncoder, Dictionary};
use crate::error::{Error, Result, file};
use parquet::basic::{Compression, Encoding, LogicalType, Repetition, Type as Physical};
use parquet::column::writer::ColumnCloseResult;
use parquet::data_type::{Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaDataReader;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{ColumnDescPtr, ColumnPath, Type};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The number of rows of a full row group, twice that of DuckDB's. In smaller row groups the
/// dictionary of instructions would take a tenth of the file.
pub const GROUP_ROWS: usize = 245_760;
/// The most row groups of a merged file.
const GROUPS_MAX: usize = 1 << 24;

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// Unsigned, 64 bits.
    U64,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 8 bits.
    U8,
}

/// The encoding of a column, before LZ4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnEncoding {
    /// The values themselves: LZ4 finds repetitions.
    Plain,
    /// BYTE_STREAM_SPLIT: the first bytes of all values, then the second bytes, and so on. For
    /// addresses, whose upper bytes hardly change.
    Split,
    /// DELTA_BINARY_PACKED: differences. For rising values.
    Delta,
    /// Indices into a dictionary that the library builds. For few different values.
    Dictionary,
    /// Indices into a dictionary that the caller has built ([`ColumnData::Numbered`]).
    Numbered,
    /// Small indices whose values a function tells ([`ColumnData::Small`]).
    Small,
}

/// The definition of a column.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSpec {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: ColumnType,
    /// Its encoding.
    pub encoding: ColumnEncoding,
    /// Its meaning, for documentation.
    pub about: &'static str,
}

/// A column's values in the row group that is being filled.
#[derive(Clone, Debug)]
pub enum ColumnBuffer {
    /// Values of [`ColumnType::U64`], with the same bits as signed numbers.
    Long(Vec<i64>),
    /// Values of [`ColumnType::U32`] and [`ColumnType::U8`].
    Int(Vec<i32>),
}

/// A column's values in a complete row group.
#[derive(Clone, Copy, Debug)]
pub enum ColumnData<'a> {
    /// Values of [`ColumnType::U64`].
    Long(&'a [i64]),
    /// Values of [`ColumnType::U32`] and [`ColumnType::U8`].
    Int(&'a [i32]),
    /// For [`ColumnEncoding::Numbered`]: the different values, and each row's index into them.
    Numbered(&'a [u64], &'a [u16]),
    /// For [`ColumnEncoding::Small`]: each row's index, and the value of an index.
    Small(&'a [u8], fn(u8) -> u32),
}

impl ColumnData<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Long(all) => all.len(),
            Self::Int(all) => all.len(),
            Self::Numbered(_, all) => all.len(),
            Self::Small(all, _) => all.len(),
        }
    }

    /// Writes the column as the next one of `group`.
    fn write<W: Write + Send>(
        self,
        encoder: &mut ChunkEncoder,
        encoding: ColumnEncoding,
        column: ColumnDescPtr,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<(), ParquetError> {
        let chunk = match (self, encoding) {
            (Self::Long(all), ColumnEncoding::Split) => {
                encoder.split::<8>(column, all.iter().map(|value| *value as u64))?
            }
            (Self::Int(all), ColumnEncoding::Split) => {
                encoder.split::<4>(column, all.iter().map(|value| *value as u64))?
            }
            (Self::Long(all), ColumnEncoding::Delta) => encoder.delta(column, all)?,
            (Self::Numbered(values, numbers), _) => {
                let dictionary: Vec<u8> = match column.physical_type() {
                    Physical::INT64 => {
                        values.iter().flat_map(|value| value.to_le_bytes()).collect()
                    }
                    _ => values.iter().flat_map(|value| (*value as u32).to_le_bytes()).collect(),
                };
                let dictionary = Dictionary { bytes: &dictionary, values: values.len() };
                if values.len() <= 1 << u8::BITS {
                    encoder.indices(column, dictionary, numbers, |number| [number as u8])?
                } else {
                    encoder.indices(column, dictionary, numbers, u16::to_le_bytes)?
                }
            }
            (Self::Small(all, value), _) => encoder.small(column, all, value)?,
            (Self::Long(_) | Self::Int(_), _) => {
                let Some(mut column) = group.next_column()? else { return Ok(()) };
                match self {
                    Self::Long(all) => column.typed::<Int64Type>().write_batch(all, None, None)?,
                    Self::Int(all) => column.typed::<Int32Type>().write_batch(all, None, None)?,
                    Self::Numbered(..) | Self::Small(..) => 0,
                };
                return column.close();
            }
        };
        chunk.append(group)
    }
}

impl ColumnBuffer {
    /// Makes an empty buffer for a column of this type.
    pub fn new(kind: ColumnType) -> Self {
        match kind {
            ColumnType::U64 => Self::Long(Vec::new()),
            ColumnType::U32 | ColumnType::U8 => Self::Int(Vec::new()),
        }
    }

    /// Appends a value, truncated to the column's type.
    pub fn push(&mut self, value: u64) {
        match self {
            Self::Long(all) => all.push(value as i64),
            Self::Int(all) => all.push(value as i32),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Long(all) => all.len(),
            Self::Int(all) => all.len(),
        }
    }

    fn clear(&mut self) {
        match self {
            Self::Long(all) => all.clear(),
            Self::Int(all) => all.clear(),
        }
    }

    fn data(&self) -> ColumnData<'_> {
        match self {
            Self::Long(all) => ColumnData::Long(all),
            Self::Int(all) => ColumnData::Int(all),
        }
    }
}

/// A Parquet file that is being written, row group by row group.
pub struct ParquetTable {
    path: PathBuf,
    unfinished: PathBuf,
    writer: SerializedFileWriter<BufWriter<File>>,
    encodings: Vec<ColumnEncoding>,
    encoder: ChunkEncoder,
    /// The row group that is being filled, by column.
    pub values: Vec<ColumnBuffer>,
}

impl ParquetTable {
    /// Begins a file with these columns. The file appears at `path` when it is complete.
    ///
    /// Errors: [`Error::File`] if the file cannot be created, [`Error::Parquet`] if its beginning
    /// cannot be written.
    pub fn create(path: &Path, columns: &[ColumnSpec]) -> Result<Self> {
        let unfinished = path.with_extension("unfinished");
        let out = File::create(&unfinished).map_err(file("creating", &unfinished))?;
        let out = BufWriter::with_capacity(1 << 18, out);
        let writer = SerializedFileWriter::new(out, Arc::new(schema(columns)), properties(columns));
        let writer = writer.map_err(failed("beginning", path))?;
        let values = columns.iter().map(|column| ColumnBuffer::new(column.kind)).collect();
        let encodings = columns.iter().map(|column| column.encoding).collect();
        let encoder = ChunkEncoder::default();
        Ok(Self { path: path.to_owned(), unfinished, writer, encodings, encoder, values })
    }

    /// Returns the number of rows in the row group that is being filled.
    pub fn rows(&self) -> usize {
        self.values.first().map_or(0, ColumnBuffer::len)
    }

    /// Ends a row, after the caller has pushed its values to all columns, and writes the row group
    /// if it is full. Error: [`Error::Parquet`] if it cannot be written.
    pub fn complete_row(&mut self) -> Result<()> {
        if self.rows() >= GROUP_ROWS { self.flush() } else { Ok(()) }
    }

    /// Writes the rows so far as a row group. Writes nothing if there are no rows. Error:
    /// [`Error::Parquet`] if the row group cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        let data: Vec<_> = self.values.iter().map(ColumnBuffer::data).collect();
        let written = write_group(&mut self.writer, &mut self.encoder, &self.encodings, &data);
        written.map_err(failed("writing a row group of", &self.path))?;
        self.values.iter_mut().for_each(ColumnBuffer::clear);
        Ok(())
    }

    /// Writes one row group: `data` has all columns in their order, each with the same number of
    /// rows. Writes nothing if there are no rows. Error: [`Error::Parquet`] if the row group cannot
    /// be written.
    pub fn write(&mut self, data: &[ColumnData<'_>]) -> Result<()> {
        let written = write_group(&mut self.writer, &mut self.encoder, &self.encodings, data);
        written.map_err(failed("writing a row group of", &self.path))
    }

    /// Writes the remaining rows, completes the file, and returns its number of rows. Errors:
    /// [`Error::Parquet`] if it cannot be written, [`Error::File`] if it cannot get its final name.
    pub fn finish(mut self) -> Result<u64> {
        self.flush()?;
        let metadata = self.writer.close().map_err(failed("completing", &self.path))?;
        std::fs::rename(&self.unfinished, &self.path).map_err(file("renaming to", &self.path))?;
        Ok(metadata.file_metadata().num_rows() as u64)
    }
}

fn write_group(
    writer: &mut SerializedFileWriter<BufWriter<File>>,
    encoder: &mut ChunkEncoder,
    encodings: &[ColumnEncoding],
    data: &[ColumnData<'_>],
) -> Result<(), ParquetError> {
    if data.first().is_none_or(|first| first.len() == 0) {
        return Ok(());
    }
    let columns = writer.schema_descr().columns().to_vec();
    let mut group = writer.next_row_group()?;
    for ((data, encoding), column) in data.iter().zip(encodings).zip(columns) {
        data.write(encoder, *encoding, column, &mut group)?;
    }
    group.close()?;
    Ok(())
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(ParquetError) -> Error {
    let path = path.to_owned();
    move |source| Error::Parquet { operation, path, source }
}

/// Copies the row groups of `parts` into the file at `path` without decoding them. Returns the
/// number of rows.
///
/// Errors: [`Error::File`] if a part cannot be opened, or the file at `path` not be created;
/// [`Error::Parquet`] if a part has no valid footer, or row groups cannot be copied;
/// [`Error::Damaged`] if a part has other columns than `columns`, or the parts have too many row
/// groups.
pub fn concatenate(parts: &[PathBuf], path: &Path, columns: &[ColumnSpec]) -> Result<u64> {
    let mut out = ParquetTable::create(path, columns)?;
    let expected = schema(columns);
    let mut groups = 0;
    for part in parts {
        let input = File::open(part).map_err(file("opening", part))?;
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&input);
        let metadata = metadata.map_err(failed("reading the footer of", part))?;
        if *metadata.file_metadata().schema() != expected {
            return Err(Error::Damaged {
                path: part.clone(),
                place: "footer".into(),
                problem: "its columns are not this tool's; run the analysis again".into(),
            });
        }
        groups += metadata.num_row_groups();
        if groups > GROUPS_MAX {
            return Err(Error::Damaged {
                path: part.clone(),
                place: "footer".into(),
                problem: format!("more than {GROUPS_MAX} row groups in all"),
            });
        }
        let spliced = metadata
            .row_groups()
            .iter()
            .try_for_each(|group| splice(&mut out.writer, &input, group));
        spliced.map_err(failed("copying row groups of", part))?;
    }
    out.finish()
}

/// What the footer of a Parquet file tells about the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetSummary {
    /// The number of rows.
    pub rows: u64,
    /// The number of row groups.
    pub row_groups: u64,
    /// Each column's name, and its size in the file in bytes.
    pub columns: Vec<(String, u64)>,
}

/// Reads the footer of the Parquet file at `path`. Errors: [`Error::File`] if the file cannot be
/// opened, [`Error::Parquet`] if the footer is invalid.
pub fn summary(path: &Path) -> Result<ParquetSummary> {
    let input = File::open(path).map_err(file("opening", path))?;
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&input);
    let metadata = metadata.map_err(failed("reading the footer of", path))?;
    let names = metadata.file_metadata().schema_descr().columns();
    let mut columns: Vec<(String, u64)> =
        names.iter().map(|column| (column.path().string(), 0)).collect();
    for group in metadata.row_groups() {
        for ((_, sum), column) in columns.iter_mut().zip(group.columns()) {
            *sum = sum.saturating_add(u64::try_from(column.compressed_size()).unwrap_or(0));
        }
    }
    let rows = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
    Ok(ParquetSummary { rows, row_groups: metadata.num_row_groups() as u64, columns })
}

fn splice(
    writer: &mut SerializedFileWriter<BufWriter<File>>,
    input: &File,
    group: &parquet::file::metadata::RowGroupMetaData,
) -> Result<(), ParquetError> {
    let mut out = writer.next_row_group()?;
    for column in group.columns() {
        let close = ColumnCloseResult {
            bytes_written: u64::try_from(column.compressed_size())
                .map_err(|e| ParquetError::External(e.into()))?,
            rows_written: u64::try_from(group.num_rows())
                .map_err(|e| ParquetError::External(e.into()))?,
            metadata: column.clone(),
            bloom_filter: None,
            column_index: None,
            offset_index: None,
        };
        out.append_column(input, close)?;
    }
    out.close()?;
    Ok(())
}

fn schema(columns: &[ColumnSpec]) -> Type {
    let integer = |bit_width| Some(LogicalType::integer(bit_width, false));
    let fields = columns.iter().map(|column| {
        let (physical, logical) = match column.kind {
            ColumnType::U64 => (Physical::INT64, integer(64)),
            ColumnType::U32 => (Physical::INT32, integer(32)),
            ColumnType::U8 => (Physical::INT32, integer(8)),
        };
        let field = Type::primitive_type_builder(column.name, physical)
            .with_repetition(Repetition::REQUIRED)
            .with_logical_type(logical);
        field.build().map(Arc::new).expect("the column definitions are valid")
    });
    let schema = Type::group_type_builder("schema").with_fields(fields.collect());
    schema.build().expect("the schema is valid")
}

fn properties(columns: &[ColumnSpec]) -> WriterPropertiesPtr {
    let mut properties = WriterProperties::builder()
        .set_created_by("keyframe".into())
        .set_compression(Compression::LZ4_RAW)
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        // A column of a row group is one page, so that LZ4 sees all of it.
        .set_data_page_row_count_limit(GROUP_ROWS)
        .set_data_page_size_limit(1 << 24)
        .set_write_batch_size(GROUP_ROWS);
    for column in columns {
        let path = ColumnPath::from(column.name);
        properties = match column.encoding {
            ColumnEncoding::Plain => properties.set_column_encoding(path, Encoding::PLAIN),
            ColumnEncoding::Dictionary => properties.set_column_dictionary_enabled(path, true),
            // `column_chunk` encodes these.
            ColumnEncoding::Split
            | ColumnEncoding::Delta
            | ColumnEncoding::Numbered
            | ColumnEncoding::Small => properties,
        };
    }
    Arc::new(properties.build())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::column::reader::ColumnReader;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use proptest::prelude::*;

    const COLUMNS: &[ColumnSpec] = &[
        ColumnSpec { name: "a", kind: ColumnType::U64, encoding: ColumnEncoding::Delta, about: "" },
        ColumnSpec { name: "b", kind: ColumnType::U64, encoding: ColumnEncoding::Split, about: "" },
        ColumnSpec {
            name: "c",
            kind: ColumnType::U32,
            encoding: ColumnEncoding::Dictionary,
            about: "",
        },
        ColumnSpec { name: "d", kind: ColumnType::U8, encoding: ColumnEncoding::Plain, about: "" },
    ];

    /// Rows `from..to`, with a row group cut at each of `cuts`.
    fn write(path: &Path, from: u64, to: u64, cuts: &[u64]) {
        let mut table = ParquetTable::create(path, COLUMNS).unwrap();
        for row in from..to {
            if cuts.contains(&row) {
                table.flush().unwrap();
            }
            let values = [row, u64::MAX - row * 4097, row % 7, row % 3];
            table.values.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
            table.complete_row().unwrap();
        }
        assert_eq!(table.finish().unwrap(), to - from);
    }

    #[test]
    fn parts_put_together_are_the_bytes_of_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let (full, end) = (GROUP_ROWS as u64, 2 * GROUP_ROWS as u64 + 10);
        write(&file("0"), 0, 100, &[]);
        write(&file("1"), 100, 100, &[]);
        write(&file("2"), 100, full + 107, &[]);
        write(&file("3"), full + 107, end, &[]);
        let parts: Vec<_> = ["0", "1", "2", "3"].map(file).into();
        assert_eq!(concatenate(&parts, &file("merged"), COLUMNS).unwrap(), end);
        write(&file("whole"), 0, end, &[100, full + 107]);
        // A result is always merged from parts, even if there is only one: the footer says a little
        // less of what was copied.
        let whole = concatenate(&[file("whole")], &file("again"), COLUMNS).unwrap();
        assert_eq!(whole, end);
        assert!(std::fs::read(file("merged")).unwrap() == std::fs::read(file("again")).unwrap());
    }

    const ENCODINGS: &[ColumnSpec] = &[
        ColumnSpec {
            name: "delta",
            kind: ColumnType::U64,
            encoding: ColumnEncoding::Delta,
            about: "",
        },
        ColumnSpec {
            name: "numbered",
            kind: ColumnType::U64,
            encoding: ColumnEncoding::Numbered,
            about: "",
        },
        ColumnSpec {
            name: "split",
            kind: ColumnType::U64,
            encoding: ColumnEncoding::Split,
            about: "",
        },
        ColumnSpec {
            name: "half",
            kind: ColumnType::U32,
            encoding: ColumnEncoding::Split,
            about: "",
        },
        ColumnSpec {
            name: "small",
            kind: ColumnType::U8,
            encoding: ColumnEncoding::Small,
            about: "",
        },
        ColumnSpec {
            name: "few",
            kind: ColumnType::U32,
            encoding: ColumnEncoding::Numbered,
            about: "",
        },
    ];

    /// As the format's own library reads them.
    fn read(path: &Path, column: usize) -> Vec<i64> {
        let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
        let mut all = Vec::new();
        for group in 0..reader.num_row_groups() {
            let group = reader.get_row_group(group).unwrap();
            let rows = group.metadata().num_rows() as usize;
            match group.get_column_reader(column).unwrap() {
                ColumnReader::Int64ColumnReader(mut values) => {
                    values.read_records(rows, None, None, &mut all).unwrap();
                }
                ColumnReader::Int32ColumnReader(mut values) => {
                    let mut some = Vec::new();
                    values.read_records(rows, None, None, &mut some).unwrap();
                    all.extend(some.into_iter().map(i64::from));
                }
                _ => panic!("a column of another type"),
            }
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// The format's library reads any values that were encoded here.
        #[test]
        fn what_is_encoded_here_is_read_by_others(
            steps in prop::collection::vec((0u32..64, any::<u64>()), 1..700),
            dictionary in prop::collection::vec(any::<u64>(), 1..300),
            bits in 0..8,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("table");
            // Small steps and large, forth and back.
            let delta: Vec<i64> = steps.iter().scan(0u64, |at, (shift, step)| {
                *at = at.wrapping_add(step >> shift);
                Some(*at as i64)
            }).collect();
            let split: Vec<i64> = steps.iter().map(|(_, step)| *step as i64).collect();
            let half: Vec<i32> = split.iter().map(|value| *value as i32).collect();
            let numbers: Vec<u16> = split.iter().map(|value| (*value as u64 % dictionary.len() as u64) as u16).collect();
            let small: Vec<u8> = split.iter().map(|value| *value as u8 >> bits).collect();
            let mut table = ParquetTable::create(&path, ENCODINGS).unwrap();
            for _ in 0..2 {
                table.write(&[
                    ColumnData::Long(&delta),
                    ColumnData::Numbered(&dictionary, &numbers),
                    ColumnData::Long(&split),
                    ColumnData::Int(&half),
                    ColumnData::Small(&small, |number| u32::from(number) * 3),
                    ColumnData::Numbered(&dictionary, &numbers),
                ]).unwrap();
            }
            prop_assert_eq!(table.finish().unwrap(), 2 * steps.len() as u64);
            let numbered: Vec<i64> = numbers.iter().map(|number| dictionary[usize::from(*number)] as i64).collect();
            let few: Vec<i64> = numbered.iter().map(|value| (*value as i32).into()).collect();
            let half: Vec<i64> = half.into_iter().map(i64::from).collect();
            let small: Vec<i64> = small.into_iter().map(|number| i64::from(number) * 3).collect();
            for (column, values) in [delta, numbered, split, half, small, few].into_iter().enumerate() {
                prop_assert_eq!(read(&path, column), [&values[..], &values].concat());
            }
        }
    }

    #[test]
    fn invalid_parts_and_parts_of_other_tools_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (part, out) = (dir.path().join("part"), dir.path().join("out"));
        write(&part, 0, 10, &[]);
        let whole = std::fs::read(&part).unwrap();
        let refused = |bytes: &[u8], columns: &[ColumnSpec]| {
            std::fs::write(&part, bytes).unwrap();
            concatenate(std::slice::from_ref(&part), &out, columns).is_err()
        };
        assert!(!refused(&whole, COLUMNS));
        assert!(refused(&whole, &COLUMNS[..2]), "other columns");
        assert!(refused(b"", COLUMNS));
        assert!(refused(&whole[..whole.len() / 2], COLUMNS));
        let mut broken = whole.clone();
        let footer = broken.len() - 8;
        broken[footer..footer + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(refused(&broken, COLUMNS), "a footer longer than the file");
    }
}
