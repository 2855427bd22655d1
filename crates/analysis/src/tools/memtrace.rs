//! `memtrace`: every access to memory, in a Parquet file that is sorted by instruction.
//!
//! Records come through the ring (`plugins/src/tools/memtrace.rs` draws them). Columns are gathered, and written a row group at a
//! time, with one that is cut short where an interval ends.
//!
//! Instructions: the plugin counts those begun since QEMU started, of which a record has the low 32 bits. The interval's
//! start is added to what was counted since the cut before. An instruction that a fault starts again counts twice, which QEMU's own count
//! does not; so what lies beyond the interval's end is put at its last instruction, and the column never falls.

use super::ringed::{Counts, Ringed};
use super::{Arguments, Description, Running, Tool};
use crate::context::{Interval, MergeContext, RunContext, Summary, part_file};
use crate::error::{Error, Result};
use crate::ring::{Reader, SharedBoard, Sink};
use crate::table::{self, Column, Data, GROUP_ROWS, Kind, Layout, Table};
use keyframe_plugins::board::{Board, Record};
use keyframe_plugins::{DEVICE, TRACE_DEFINITION, TRACE_KIND_BITS, UNKNOWN};
use std::path::PathBuf;
use std::sync::Arc;

pub(super) const DESCRIPTION: Description = Description {
    name: "memtrace",
    about: "Every access to memory, as a Parquet file sorted by instruction",
    arguments: &[],
    results: &[(
        "memtrace.parquet",
        "instruction, pc, virtual address, physical page, size, write or read, device",
    )],
};

const fn column(name: &'static str, kind: Kind, layout: Layout, about: &'static str) -> Column {
    Column { name, kind, layout, about }
}

/// The columns, in order.
pub const COLUMNS: &[Column] = &[
    column("icount", Kind::U64, Layout::Delta, "instructions executed before the one that accesses"),
    column("pc", Kind::U64, Layout::Numbered, "virtual address of the instruction"),
    column("vaddr", Kind::U64, Layout::Split, "virtual address of the first byte"),
    column("page", Kind::U32, Layout::Split, "guest-physical address of the first byte, divided by 4096"),
    column("size", Kind::U8, Layout::Bytes, "bytes"),
    column("flags", Kind::U8, Layout::Bytes, "1 write, 2 device, 4 physical page unknown"),
];

const KIND: &str = "memtrace";
/// Records in the ring: 6 MiB, so that it stays in the cache that cores share.
const RING_RECORDS: u64 = 1 << 18;
/// The most instructions that a plugin has (`keyframe_plugins`).
const INSTRUCTIONS_MAX: usize = 1 << 24;

const WRITE: u8 = 1;
const DEVICE_FLAG: u8 = 2;
const UNKNOWN_FLAG: u8 = 4;

struct Memtrace;

#[expect(clippy::unnecessary_wraps, reason = "one shape for all tools")]
pub(super) fn make(_arguments: &Arguments) -> Result<Box<dyn Tool>> {
    Ok(Box::new(Memtrace))
}

impl Tool for Memtrace {
    fn name(&self) -> &str {
        DESCRIPTION.name
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        let shared = SharedBoard::create(RING_RECORDS)?;
        let mut sink = Trace {
            board: Arc::clone(&shared.board),
            dir: run.dir.clone(),
            counts: Counts::of(run),
            table: None,
            columns: Columns::new(),
            instructions: Vec::new(),
            group: 1,
            pcs: Vec::new(),
            count: 0,
        };
        sink.next_interval()?;
        let arguments =
            vec![("tool", KIND.to_owned()), ("board", shared.path()), ("ram", run.ram.argument())];
        Ok(Box::new(Ringed::new(run, Reader::start(shared, sink)?, arguments)))
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let parts: Vec<PathBuf> = merge.parts.iter().map(|part| part.file(KIND, "parquet")).collect();
        let path = merge.out.join("memtrace.parquet");
        let rows = table::concatenate(&parts, &path, COLUMNS)?;
        let bytes = std::fs::metadata(&path).map_or(0, |found| found.len());
        let each = bytes as f64 / rows.max(1) as f64;
        let line = format!("{rows} accesses, {bytes} bytes, {each:.2} each");
        Ok(Summary { lines: vec![line], files: vec![path] })
    }
}

/// Rows of a row group that is being filled.
struct Columns {
    rows: usize,
    icount: Column64,
    /// Which of [`Group::pcs`].
    pc: Box<[u16; GROUP_ROWS]>,
    vaddr: Column64,
    page: Box<[i32; GROUP_ROWS]>,
    size: Box<[u8; GROUP_ROWS]>,
    flags: Box<[u8; GROUP_ROWS]>,
}

type Column64 = Box<[i64; GROUP_ROWS]>;

impl Columns {
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

/// A place for each row of a row group.
#[expect(clippy::unnecessary_box_returns, reason = "too large for a thread's stack")]
fn zeros<T: Copy + Default>() -> Box<[T; GROUP_ROWS]> {
    let all = vec![T::default(); GROUP_ROWS].into_boxed_slice();
    all.try_into().unwrap_or_else(|_| unreachable!("it is that long"))
}

/// An instruction.
struct Instruction {
    pc: u64,
    /// The row group in which it has `number`.
    group: u32,
    number: u16,
}

struct Trace {
    board: Arc<Board>,
    dir: PathBuf,
    counts: Counts,
    /// Of the interval that runs; none where it is dropped, or all are done.
    table: Option<(Table, Interval)>,
    columns: Columns,
    /// By the plugin's number.
    instructions: Vec<Instruction>,
    /// The row group that is being filled, from 1 on, and the instructions in it by number.
    group: u32,
    pcs: Vec<u64>,
    /// Instructions begun, as of the last record.
    count: u64,
}

impl Trace {
    fn next_interval(&mut self) -> Result<()> {
        self.count = self.board.counted(0);
        if let Some((interval, true)) = self.counts.next_interval(self.count) {
            let path = part_file(&self.dir, interval.index, KIND, "parquet");
            self.table = Some((Table::create(&path, COLUMNS)?, interval));
        }
        Ok(())
    }

    fn define(&mut self, [pc, number, _]: Record) -> Result<()> {
        if number != self.instructions.len() as u64 || self.instructions.len() >= INSTRUCTIONS_MAX {
            return Err(senseless("instructions are not numbered one after the other"));
        }
        self.instructions.push(Instruction { pc, group: 0, number: 0 });
        Ok(())
    }

    /// Gives an instruction its number in the row group; in the next one where there are no more.
    #[cold]
    fn number(&mut self, at: usize) -> Result<u16> {
        let number = |count: usize| u16::try_from(count).ok();
        if number(self.pcs.len()).is_none() {
            self.flush()?;
        }
        let instruction = &mut self.instructions[at];
        (instruction.group, instruction.number) = (self.group, number(self.pcs.len()).unwrap_or(0));
        self.pcs.push(instruction.pc);
        Ok(instruction.number)
    }

    fn flush(&mut self) -> Result<()> {
        let Columns { rows, icount, pc, vaddr, page, size, flags } = &self.columns;
        if let Some((table, _)) = &mut self.table {
            table.write(&[
                Data::Long(&icount[..*rows]),
                Data::Numbered(&self.pcs, &pc[..*rows]),
                Data::Long(&vaddr[..*rows]),
                Data::Int(&page[..*rows]),
                Data::Bytes(&size[..*rows]),
                Data::Bytes(&flags[..*rows]),
            ])?;
        }
        self.columns.rows = 0;
        self.group += 1;
        self.pcs.clear();
        Ok(())
    }
}

fn senseless(problem: &str) -> Error {
    Error::Plugin { operation: "taking its records", problem: problem.into() }
}

impl Sink for Trace {
    #[inline]
    fn record(&mut self, record: Record) -> Result<()> {
        let [vaddr, physical, last] = record;
        if last as u32 == TRACE_DEFINITION {
            return self.define(record);
        }
        let count = (last >> 32) as u32;
        self.count = self.count.wrapping_add(u64::from(count.wrapping_sub(self.count as u32)));
        if self.table.is_none() {
            return Ok(());
        }
        let (number, kind) = ((last as u32 >> TRACE_KIND_BITS) as usize, last as u8);
        let Some(instruction) = self.instructions.get(number) else {
            return Err(senseless("an access of an instruction that it has not defined"));
        };
        let is_numbered = instruction.group == self.group;
        let pc = if is_numbered { instruction.number } else { self.number(number)? };
        let (write, size) = (kind & WRITE, 1 << (kind >> 1 & 7));
        let (page, flags) = match u32::try_from((physical & !DEVICE) >> 12) {
            Ok(page) if physical & DEVICE == 0 => (page, write),
            Ok(page) if physical != UNKNOWN => (page, write | DEVICE_FLAG),
            _ => (0, write | UNKNOWN_FLAG),
        };
        let Columns { rows, .. } = self.columns;
        if rows < GROUP_ROWS {
            self.columns.icount[rows] = self.counts.icount(self.count) as i64;
            self.columns.pc[rows] = pc;
            self.columns.vaddr[rows] = vaddr as i64;
            self.columns.page[rows] = page as i32;
            self.columns.size[rows] = size;
            self.columns.flags[rows] = flags;
        }
        self.columns.rows = rows + 1;
        if rows + 1 == GROUP_ROWS { self.flush() } else { Ok(()) }
    }

    fn cut(&mut self) -> Result<()> {
        self.flush()?;
        if let Some((table, _)) = self.table.take() {
            table.finish()?;
        }
        self.next_interval()
    }
}
