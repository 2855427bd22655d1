//! Both encoders, for one column.

use super::trace::{Numbered, RowGroup, Trace};
use crate::Error;
use keyframe_analysis::parquet_table::{
    ColumnData, ColumnSpec, ColumnType, GROUP_ROWS, ParquetTable,
};
use keyframe_analysis::tools::MEMTRACE_COLUMNS;
use parquet::basic::{Compression, Encoding};
use parquet::data_type::{Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::ColumnPath;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// An encoder of columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ColumnEncoder {
    /// Keyframe's.
    Own,
    /// The parquet crate's.
    Library,
}

impl ColumnEncoder {
    /// Both, in the order in which they alternate.
    pub const ALL: [Self; 2] = [Self::Own, Self::Library];

    /// Its name in keys.
    pub fn key(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Library => "library",
        }
    }
}

/// The values of a column, as the library takes them.
enum PlainValues {
    Long(Vec<i64>),
    Int(Vec<i32>),
}

/// Writes column number `column` of all rows to a file in `dir`. Returns the time in nanoseconds, and
/// the file's size in bytes.
pub fn encode(
    encoder: ColumnEncoder,
    trace: &Trace,
    column: usize,
    dir: &Path,
) -> Result<(f64, u64), Error> {
    let spec = MEMTRACE_COLUMNS[column];
    let path = dir.join(format!("{}.{}.parquet", spec.name, encoder.key()));
    let operation = format!("write {}", path.display());
    let ns = match encoder {
        ColumnEncoder::Own => own(trace, spec, &path).map_err(|e| Error::failed(operation, e))?,
        ColumnEncoder::Library => {
            let plain: Vec<_> = trace.groups.iter().map(|group| plain(group, spec)).collect();
            library(&plain, spec, &path).map_err(|e| Error::failed(operation, e))?
        }
    };
    let size = std::fs::metadata(&path).map_err(Error::io(format!("read {}", path.display())))?;
    Ok((ns, size.len()))
}

fn own(trace: &Trace, spec: ColumnSpec, path: &Path) -> keyframe_analysis::Result<f64> {
    let began = Instant::now();
    let mut table = ParquetTable::create(path, &[spec])?;
    for group in &trace.groups {
        table.write(&[match spec.name {
            "icount" => ColumnData::Long(&group.icount),
            "pc" => ColumnData::Numbered(&group.pc.values, &group.pc.indices),
            "vaddr" => ColumnData::Long(&group.vaddr),
            "page" => ColumnData::Numbered(&group.page.values, &group.page.indices),
            "size" => ColumnData::Small(&group.size, |logarithm| 1 << logarithm),
            _ => ColumnData::Small(&group.flags, u32::from),
        }])?;
    }
    table.finish()?;
    Ok(began.elapsed().as_nanos() as f64)
}

fn plain(group: &RowGroup, spec: ColumnSpec) -> PlainValues {
    let long = |column: &Numbered| column.rows().map(u64::cast_signed).collect();
    let int = |column: &Numbered| column.rows().map(|value| value as i32).collect();
    match spec.name {
        "icount" => PlainValues::Long(group.icount.clone()),
        "pc" => PlainValues::Long(long(&group.pc)),
        "vaddr" => PlainValues::Long(group.vaddr.clone()),
        "page" => PlainValues::Int(int(&group.page)),
        "size" => PlainValues::Int(group.size.iter().map(|size| 1 << size).collect()),
        _ => PlainValues::Int(group.flags.iter().map(|flags| i32::from(*flags)).collect()),
    }
}

fn library(groups: &[PlainValues], spec: ColumnSpec, path: &Path) -> Result<f64, ParquetError> {
    let (physical, bits) = match spec.kind {
        ColumnType::U64 => ("INT64", 64),
        ColumnType::U32 => ("INT32", 32),
        ColumnType::U8 => ("INT32", 8),
    };
    let name = spec.name;
    let schema = parse_message_type(&format!(
        "message schema {{ REQUIRED {physical} {name} (INTEGER({bits},false)); }}"
    ))?;
    let began = Instant::now();
    // A column of a row group is one page, as with the own encoders.
    let properties = WriterProperties::builder()
        .set_compression(Compression::LZ4_RAW)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_data_page_row_count_limit(GROUP_ROWS)
        .set_data_page_size_limit(1 << 24)
        .set_dictionary_page_size_limit(1 << 24)
        .set_write_batch_size(GROUP_ROWS);
    let path_of = ColumnPath::from(name);
    let properties = match name {
        "icount" => properties
            .set_dictionary_enabled(false)
            .set_column_encoding(path_of, Encoding::DELTA_BINARY_PACKED),
        "vaddr" => properties
            .set_dictionary_enabled(false)
            .set_column_encoding(path_of, Encoding::BYTE_STREAM_SPLIT),
        _ => properties.set_dictionary_enabled(true),
    };
    let file = BufWriter::with_capacity(1 << 18, File::create(path)?);
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties.build()))?;
    for values in groups {
        let mut group = writer.next_row_group()?;
        if let Some(mut column) = group.next_column()? {
            match values {
                PlainValues::Long(all) => {
                    column.typed::<Int64Type>().write_batch(all, None, None)?;
                }
                PlainValues::Int(all) => {
                    column.typed::<Int32Type>().write_batch(all, None, None)?;
                }
            }
            column.close()?;
        }
        group.close()?;
    }
    writer.close()?;
    Ok(began.elapsed().as_nanos() as f64)
}
