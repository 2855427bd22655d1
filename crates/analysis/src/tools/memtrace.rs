//! `memtrace`: every memory access, in a Parquet file that is sorted by instruction.
//!
//! Records come through the ring (`plugins/src/tools/memtrace.rs` draws them). Rows are collected
//! by column and written a row group at a time. An interval's end completes a row group.
//!
//! Instruction counts: a record has the low 32 bits of the plugin's count. [`IcountMapper`] maps
//! the count to the recording's; the column never falls.

use super::ring_run::{IcountMapper, RingRun};
use super::{Tool, ToolArguments, ToolDescription, ToolRun};
use crate::context::{
    IcountInterval, MergeContext, RunContext, RunningInterval, ToolSummary, part_file,
};
use crate::error::{Error, Result};
use crate::parquet_table::{
    self, ColumnData, ColumnEncoding, ColumnSpec, ColumnType, GROUP_ROWS, ParquetTable,
};
use crate::ring_reader::{RecordSink, RingReader, SharedBoard};
use keyframe_plugins::board::{Board, Record};
use keyframe_plugins::trace::{
    INSTRUCTION, PAGE_BITS, PHYSICAL, PLACES, SIZE_BITS, VIRTUAL, is_written,
};
use keyframe_plugins::{DEVICE, UNKNOWN};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) const DESCRIPTION: ToolDescription = ToolDescription {
    name: "memtrace",
    about: "Every memory access, as a Parquet file sorted by instruction",
    arguments: &[],
    results: &[(
        "memtrace.parquet",
        "instruction, pc, virtual address, physical page, size, write or read, device",
    )],
};

const fn column(
    name: &'static str,
    kind: ColumnType,
    encoding: ColumnEncoding,
    about: &'static str,
) -> ColumnSpec {
    ColumnSpec { name, kind, encoding, about }
}

/// The columns of `memtrace.parquet`, in order.
pub const COLUMNS: &[ColumnSpec] = &[
    column(
        "icount",
        ColumnType::U64,
        ColumnEncoding::Delta,
        "instructions executed before the one that accesses",
    ),
    column("pc", ColumnType::U64, ColumnEncoding::Numbered, "virtual address of the instruction"),
    column("vaddr", ColumnType::U64, ColumnEncoding::Split, "virtual address of the first byte"),
    column(
        "page",
        ColumnType::U32,
        ColumnEncoding::Numbered,
        "guest-physical address of the first byte, divided by 4096",
    ),
    column("size", ColumnType::U8, ColumnEncoding::Small, "bytes"),
    column(
        "flags",
        ColumnType::U8,
        ColumnEncoding::Small,
        "1 write, 2 device, 4 physical page unknown",
    ),
];

const KIND: &str = "memtrace";
/// Records in the ring: 8 MiB, which stay in the cache that cores share.
const RING_RECORDS: u64 = 1 << 19;
/// The most instructions that the plugin defines (`keyframe_plugins`).
const INSTRUCTIONS_MAX: usize = 1 << 24;

/// The logarithm of the largest access size.
const SIZE_MAX: u8 = 7;

/// Values of the column `flags`.
const WRITE: u8 = 1;
const DEVICE_FLAG: u8 = 2;
const UNKNOWN_FLAG: u8 = 4;

struct Memtrace;

#[expect(clippy::unnecessary_wraps, reason = "all tools have the same signature")]
pub(super) fn make(_arguments: &ToolArguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(Memtrace))
}

impl Tool for Memtrace {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let shared = SharedBoard::create(RING_RECORDS)?;
        shared.board.start_count(run.first_running().interval.start.0);
        let mut sink = TraceSink {
            board: Arc::clone(&shared.board),
            dir: run.dir.clone(),
            icounts: IcountMapper::default(),
            table: None,
            columns: RowColumns::new(),
            instructions: Vec::new(),
            instruction_indices: Vec::new(),
            pages: vec![TracedPage::default(); PLACES],
            group: 1,
            group_pcs: Vec::new(),
            group_pages: GroupPages::default(),
            count: 0,
        };
        sink.begin(Some(run.first_running()))?;
        let arguments =
            vec![("tool", KIND.to_owned()), ("board", shared.path()), ("ram", run.ram.argument())];
        Ok(Box::new(RingRun::new(run, RingReader::start(shared, sink)?, arguments)))
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let parts: Vec<PathBuf> =
            merge.parts.iter().map(|part| part.file(KIND, "parquet")).collect();
        let path = merge.out.join("memtrace.parquet");
        let rows = parquet_table::concatenate(&parts, &path, COLUMNS)?;
        let bytes = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
        let each = bytes as f64 / rows.max(1) as f64;
        let line = format!("{rows} accesses, {bytes} bytes, {each:.2} each");
        Ok(ToolSummary { lines: vec![line], files: vec![path] })
    }
}

/// The rows of the row group that is being filled, by column.
struct RowColumns {
    rows: usize,
    icount: Column64,
    /// Indices into [`TraceSink::group_pcs`].
    pc: Box<[u16; GROUP_ROWS]>,
    vaddr: Column64,
    /// Indices into [`TraceSink::group_pages`].
    page: Box<[u16; GROUP_ROWS]>,
    /// Logarithms of the sizes.
    size: Box<[u8; GROUP_ROWS]>,
    flags: Box<[u8; GROUP_ROWS]>,
}

type Column64 = Box<[i64; GROUP_ROWS]>;

impl RowColumns {
    fn new() -> Self {
        Self {
            rows: 0,
            icount: zeros(),
            pc: zeros(),
            vaddr: zeros(),
            page: zeros(),
            size: zeros(),
            flags: zeros(),
        }
    }
}

/// An array of zeros with an element for each row of a row group.
#[expect(clippy::unnecessary_box_returns, reason = "too large for a thread's stack")]
fn zeros<T: Copy + Default>() -> Box<[T; GROUP_ROWS]> {
    let all = vec![T::default(); GROUP_ROWS].into_boxed_slice();
    all.try_into().unwrap_or_else(|_| unreachable!("the slice has that length"))
}

/// A virtual page that the plugin has defined, and its physical page.
#[derive(Clone, Copy, Default)]
struct TracedPage {
    vaddr: u64,
    page: u32,
    /// The bits of the column `flags`.
    flags: u8,
    is_defined: bool,
    /// The row group in which `index` is valid.
    group: u32,
    /// The physical page's index in [`GroupPages`].
    index: u16,
}

/// The different physical pages of a row group.
#[derive(Default)]
struct GroupPages {
    all: Vec<u64>,
    indices: HashMap<u32, u16>,
}

/// An instruction's index in the row group's dictionary.
#[derive(Clone, Copy, Default)]
struct GroupIndex {
    /// The row group in which `index` is valid.
    group: u32,
    index: u16,
}

/// Collects accesses into row groups.
struct TraceSink {
    board: Arc<Board>,
    dir: PathBuf,
    icounts: IcountMapper,
    /// The part of the running interval; none if that is a warm-up, or all intervals have ended.
    table: Option<ParquetTable>,
    columns: RowColumns,
    /// Addresses of the instructions, by the plugin's number. They are apart from the indices,
    /// which alone fit the processor's cache if thousands of instructions run in turn.
    instructions: Vec<u64>,
    instruction_indices: Vec<GroupIndex>,
    /// Pages by the plugin's number.
    pages: Vec<TracedPage>,
    /// The number of the row group that is being filled, from 1 on.
    group: u32,
    /// The different instructions of the row group.
    group_pcs: Vec<u64>,
    group_pages: GroupPages,
    /// Instructions begun, as of the last record.
    count: u64,
}

impl TraceSink {
    fn begin(&mut self, running: Option<RunningInterval>) -> Result<()> {
        let Some(RunningInterval { interval, is_kept }) = running else { return Ok(()) };
        self.count = self.icounts.begin(interval, &self.board);
        if is_kept {
            let path = part_file(&self.dir, interval.index, KIND, "parquet");
            self.table = Some(ParquetTable::create(&path, COLUMNS)?);
        }
        Ok(())
    }

    /// Handles a record that defines an instruction or a page.
    #[cold]
    fn define(&mut self, kind: u32, number: usize, value: u64) -> Result<()> {
        if kind == INSTRUCTION {
            if number != self.instructions.len() || number >= INSTRUCTIONS_MAX {
                return Err(invalid_record("instructions are not numbered in order"));
            }
            self.instructions.push(value);
            self.instruction_indices.push(GroupIndex::default());
            return Ok(());
        }
        let Some(page) = self.pages.get_mut(number) else {
            return Err(invalid_record("the number of a page is too large"));
        };
        if kind == VIRTUAL {
            (page.vaddr, page.group, page.is_defined) = (value, 0, false);
        } else {
            let write = if is_written(number) { WRITE } else { 0 };
            (page.page, page.flags) = match u32::try_from((value & !DEVICE) >> PAGE_BITS) {
                Ok(page) if value & DEVICE == 0 => (page, write),
                Ok(page) if value != UNKNOWN => (page, write | DEVICE_FLAG),
                _ => (0, write | UNKNOWN_FLAG),
            };
            (page.group, page.is_defined) = (0, true);
        }
        Ok(())
    }

    /// Adds an instruction and a page, which must have been defined, to the row group's
    /// dictionaries. Completes the row group first if a dictionary is full.
    #[cold]
    fn index(&mut self, instruction: usize, page: usize) -> Result<()> {
        let next_index = |count: usize| u16::try_from(count).ok();
        if next_index(self.group_pcs.len()).is_none()
            || next_index(self.group_pages.all.len()).is_none()
        {
            self.flush()?;
        }
        if self.instruction_indices[instruction].group != self.group {
            let index = next_index(self.group_pcs.len()).unwrap_or(0);
            self.instruction_indices[instruction] = GroupIndex { group: self.group, index };
            self.group_pcs.push(self.instructions[instruction]);
        }
        let page = &mut self.pages[page];
        if !page.is_defined {
            return Err(invalid_record(UNDEFINED));
        }
        if page.group == self.group {
            return Ok(());
        }
        let GroupPages { all, indices } = &mut self.group_pages;
        let next = next_index(all.len()).unwrap_or(0);
        (page.group, page.index) = (self.group, *indices.entry(page.page).or_insert(next));
        if usize::from(page.index) == all.len() {
            all.push(page.page.into());
        }
        Ok(())
    }

    /// Completes the row group.
    fn flush(&mut self) -> Result<()> {
        let RowColumns { rows, icount, pc, vaddr, page, size, flags } = &self.columns;
        if let Some(table) = &mut self.table {
            table.write(&[
                ColumnData::Long(&icount[..*rows]),
                ColumnData::Numbered(&self.group_pcs, &pc[..*rows]),
                ColumnData::Long(&vaddr[..*rows]),
                ColumnData::Numbered(&self.group_pages.all, &page[..*rows]),
                ColumnData::Small(&size[..*rows], |logarithm| 1 << logarithm),
                ColumnData::Small(&flags[..*rows], u32::from),
            ])?;
        }
        self.columns.rows = 0;
        self.group += 1;
        self.group_pcs.clear();
        self.group_pages.all.clear();
        self.group_pages.indices.clear();
        Ok(())
    }
}

const UNDEFINED: &str = "an access names an instruction or a page that is not defined";

fn invalid_record(problem: &str) -> Error {
    Error::Plugin { operation: "reading its records", problem: problem.into() }
}

impl RecordSink for TraceSink {
    #[inline]
    fn record(&mut self, record: Record) -> Result<()> {
        let [head, at] = record;
        if head as u32 >= PHYSICAL {
            return self.define(head as u32, (head >> 32) as usize, at);
        }
        let count = (head >> 32) as u32;
        self.count = self.count.wrapping_add(u64::from(count.wrapping_sub(self.count as u32)));
        if self.table.is_none() {
            return Ok(());
        }
        let number = (head as u32 >> SIZE_BITS) as usize;
        let page_number = (at >> PAGE_BITS) as usize;
        let (Some(instruction), Some(traced)) =
            (self.instruction_indices.get(number), self.pages.get(page_number))
        else {
            return Err(invalid_record(UNDEFINED));
        };
        let (mut pc, mut page) = (instruction.index, traced.index);
        let (vaddr, flags) = (traced.vaddr | at & ((1 << PAGE_BITS) - 1), traced.flags);
        if instruction.group != self.group || traced.group != self.group {
            self.index(number, page_number)?;
            (pc, page) = (self.instruction_indices[number].index, self.pages[page_number].index);
        }
        let size = (head as u8 & ((1 << SIZE_BITS) - 1)).min(SIZE_MAX);
        let RowColumns { rows, .. } = self.columns;
        if rows < GROUP_ROWS {
            self.columns.icount[rows] = self.icounts.icount(self.count) as i64;
            self.columns.pc[rows] = pc;
            self.columns.vaddr[rows] = vaddr as i64;
            self.columns.page[rows] = page;
            self.columns.size[rows] = size;
            self.columns.flags[rows] = flags;
        }
        self.columns.rows = rows + 1;
        if rows + 1 == GROUP_ROWS { self.flush() } else { Ok(()) }
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.flush()?;
        if let Some(table) = self.table.take() {
            table.finish()?;
        }
        self.begin(next.map(RunningInterval::kept))
    }
}
