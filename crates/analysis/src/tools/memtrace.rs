//! `memtrace`: every access to memory, in a Parquet file that is sorted by instruction.
//!
//! Records come through the ring (`plugins/src/tools/memtrace.rs` draws them). Columns are
//! gathered, and written a row group at a time, with one that is cut short where an interval ends.
//!
//! Instructions: the plugin counts those begun since QEMU started, of which a record has the low 32
//! bits. The interval's start is added to what was counted since the cut before. An instruction
//! that a fault starts again counts twice, which QEMU's own count does not; so what lies beyond the
//! interval's end is put at its last instruction, and the column never falls.

use super::ringed::{Counts, Ringed};
use super::{Arguments, Description, Running, Tool};
use crate::context::{Interval, MergeContext, RunContext, Summary, part_file};
use crate::error::{Error, Result};
use crate::ring::{Reader, SharedBoard, Sink};
use crate::table::{self, Column, Data, GROUP_ROWS, Kind, Layout, Table};
use keyframe_plugins::board::{Board, Record};
use keyframe_plugins::trace::{
    INSTRUCTION, PAGE_BITS, PHYSICAL, PLACES, SIZE_BITS, VIRTUAL, is_written,
};
use keyframe_plugins::{DEVICE, UNKNOWN};
use std::collections::HashMap;
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
    column(
        "icount",
        Kind::U64,
        Layout::Delta,
        "instructions executed before the one that accesses",
    ),
    column("pc", Kind::U64, Layout::Numbered, "virtual address of the instruction"),
    column("vaddr", Kind::U64, Layout::Split, "virtual address of the first byte"),
    column(
        "page",
        Kind::U32,
        Layout::Numbered,
        "guest-physical address of the first byte, divided by 4096",
    ),
    column("size", Kind::U8, Layout::Small, "bytes"),
    column("flags", Kind::U8, Layout::Small, "1 write, 2 device, 4 physical page unknown"),
];

const KIND: &str = "memtrace";
/// Records in the ring: 8 MiB, so that it stays in the cache that cores share.
const RING_RECORDS: u64 = 1 << 19;
/// The most instructions that a plugin has (`keyframe_plugins`).
const INSTRUCTIONS_MAX: usize = 1 << 24;

/// The logarithm of the largest size that a column of bytes holds.
const SIZE_MAX: u8 = 7;

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
            numbered: Vec::new(),
            places: vec![Place::default(); PLACES],
            group: 1,
            pcs: Vec::new(),
            pages: Pages::default(),
            count: 0,
        };
        sink.next_interval()?;
        let arguments =
            vec![("tool", KIND.to_owned()), ("board", shared.path()), ("ram", run.ram.argument())];
        Ok(Box::new(Ringed::new(run, Reader::start(shared, sink)?, arguments)))
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let parts: Vec<PathBuf> =
            merge.parts.iter().map(|part| part.file(KIND, "parquet")).collect();
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
    /// Which of [`Trace::pcs`].
    pc: Box<[u16; GROUP_ROWS]>,
    vaddr: Column64,
    /// Which of [`Trace::pages`].
    page: Box<[u16; GROUP_ROWS]>,
    /// The logarithm.
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

/// A virtual page, and where it is.
#[derive(Clone, Copy, Default)]
struct Place {
    vaddr: u64,
    page: u32,
    /// Of the column.
    flags: u8,
    is_defined: bool,
    /// As an instruction's.
    group: u32,
    number: u16,
}

/// The physical pages of a row group, numbered.
#[derive(Default)]
struct Pages {
    all: Vec<u64>,
    numbers: HashMap<u32, u16>,
}

/// The number of an instruction.
#[derive(Clone, Copy, Default)]
struct Numbered {
    /// The row group in which it has it.
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
    /// By the plugin's number: where each is, and what it has in the row group. Thousands run by
    /// turns, whose numbers alone fit a cache.
    instructions: Vec<u64>,
    numbered: Vec<Numbered>,
    /// By the plugin's number.
    places: Vec<Place>,
    /// The row group that is being filled, from 1 on, and the instructions and physical pages in it
    /// by number.
    group: u32,
    pcs: Vec<u64>,
    pages: Pages,
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

    /// Takes a record that is no access.
    #[cold]
    fn define(&mut self, what: u32, number: usize, is: u64) -> Result<()> {
        if what == INSTRUCTION {
            if number != self.instructions.len() || number >= INSTRUCTIONS_MAX {
                return Err(senseless("instructions are not numbered one after the other"));
            }
            self.instructions.push(is);
            self.numbered.push(Numbered::default());
            return Ok(());
        }
        let Some(place) = self.places.get_mut(number) else {
            return Err(senseless("a place beyond the last"));
        };
        if what == VIRTUAL {
            (place.vaddr, place.group, place.is_defined) = (is, 0, false);
        } else {
            let write = if is_written(number) { WRITE } else { 0 };
            (place.page, place.flags) = match u32::try_from((is & !DEVICE) >> PAGE_BITS) {
                Ok(page) if is & DEVICE == 0 => (page, write),
                Ok(page) if is != UNKNOWN => (page, write | DEVICE_FLAG),
                _ => (0, write | UNKNOWN_FLAG),
            };
            (place.group, place.is_defined) = (0, true);
        }
        Ok(())
    }

    /// Gives an instruction and a place, which there are, their numbers in the row group; in the
    /// next one where there are no more.
    #[cold]
    fn number(&mut self, instruction: usize, place: usize) -> Result<()> {
        let number = |count: usize| u16::try_from(count).ok();
        if number(self.pcs.len()).is_none() || number(self.pages.all.len()).is_none() {
            self.flush()?;
        }
        if self.numbered[instruction].group != self.group {
            let number = number(self.pcs.len()).unwrap_or(0);
            self.numbered[instruction] = Numbered { group: self.group, number };
            self.pcs.push(self.instructions[instruction]);
        }
        let place = &mut self.places[place];
        if !place.is_defined {
            return Err(senseless(UNDEFINED));
        }
        if place.group == self.group {
            return Ok(());
        }
        let Pages { all, numbers } = &mut self.pages;
        let next = number(all.len()).unwrap_or(0);
        (place.group, place.number) = (self.group, *numbers.entry(place.page).or_insert(next));
        if usize::from(place.number) == all.len() {
            all.push(place.page.into());
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        let Columns { rows, icount, pc, vaddr, page, size, flags } = &self.columns;
        if let Some((table, _)) = &mut self.table {
            table.write(&[
                Data::Long(&icount[..*rows]),
                Data::Numbered(&self.pcs, &pc[..*rows]),
                Data::Long(&vaddr[..*rows]),
                Data::Numbered(&self.pages.all, &page[..*rows]),
                Data::Small(&size[..*rows], |logarithm| 1 << logarithm),
                Data::Small(&flags[..*rows], u32::from),
            ])?;
        }
        self.columns.rows = 0;
        self.group += 1;
        self.pcs.clear();
        self.pages.all.clear();
        self.pages.numbers.clear();
        Ok(())
    }
}

const UNDEFINED: &str = "an access of an instruction or to a place that it has not defined";

fn senseless(problem: &str) -> Error {
    Error::Plugin { operation: "taking its records", problem: problem.into() }
}

impl Sink for Trace {
    #[inline]
    fn record(&mut self, record: Record) -> Result<()> {
        let [what, at] = record;
        if what as u32 >= PHYSICAL {
            return self.define(what as u32, (what >> 32) as usize, at);
        }
        let count = (what >> 32) as u32;
        self.count = self.count.wrapping_add(u64::from(count.wrapping_sub(self.count as u32)));
        if self.table.is_none() {
            return Ok(());
        }
        let number = (what as u32 >> SIZE_BITS) as usize;
        let place_number = (at >> PAGE_BITS) as usize;
        let (Some(instruction), Some(place)) =
            (self.numbered.get(number), self.places.get(place_number))
        else {
            return Err(senseless(UNDEFINED));
        };
        let (mut pc, mut page) = (instruction.number, place.number);
        let (vaddr, flags) = (place.vaddr | at & ((1 << PAGE_BITS) - 1), place.flags);
        if instruction.group != self.group || place.group != self.group {
            self.number(number, place_number)?;
            (pc, page) = (self.numbered[number].number, self.places[place_number].number);
        }
        let size = (what as u8 & ((1 << SIZE_BITS) - 1)).min(SIZE_MAX);
        let Columns { rows, .. } = self.columns;
        if rows < GROUP_ROWS {
            self.columns.icount[rows] = self.counts.icount(self.count) as i64;
            self.columns.pc[rows] = pc;
            self.columns.vaddr[rows] = vaddr as i64;
            self.columns.page[rows] = page;
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
