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
use crate::table::{self, Column, Kind, Layout, Table, Values};
use keyframe_plugins::board::{Board, Record};
use keyframe_plugins::{DEVICE, TRACE_DEFINITION, UNKNOWN};
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
    column("pc", Kind::U64, Layout::Split, "virtual address of the instruction"),
    column("vaddr", Kind::U64, Layout::Split, "virtual address of the first byte"),
    column("page", Kind::U32, Layout::Split, "guest-physical address of the first byte, divided by 4096"),
    column("size", Kind::U8, Layout::Split, "bytes"),
    column("flags", Kind::U8, Layout::Split, "1 write, 2 device, 4 physical page unknown"),
];

const KIND: &str = "memtrace";
/// Records in the ring: 3 MiB, so that it stays in the cache that cores share.
const RING_RECORDS: u64 = 1 << 17;
/// The most sites that a plugin has (`keyframe_plugins`).
const SITES_MAX: usize = 1 << 24;

const WRITE: i32 = 1;
const DEVICE_FLAG: i32 = 2;
const UNKNOWN_FLAG: i32 = 4;

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
            columns: Columns::with_room(),
            sites: Vec::new(),
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

/// A row group that is being filled.
struct Columns {
    icount: Vec<i64>,
    pc: Vec<i64>,
    vaddr: Vec<i64>,
    page: Vec<i32>,
    size: Vec<i32>,
    flags: Vec<i32>,
}

impl Columns {
    fn with_room() -> Self {
        let long = || Vec::with_capacity(table::GROUP_ROWS);
        let int = || Vec::with_capacity(table::GROUP_ROWS);
        Self { icount: long(), pc: long(), vaddr: long(), page: int(), size: int(), flags: int() }
    }

    /// Exchanges what is filled for what was written.
    fn swap(&mut self, values: &mut [Values]) {
        if let [
            Values::Long(icount),
            Values::Long(pc),
            Values::Long(vaddr),
            Values::Int(page),
            Values::Int(size),
            Values::Int(flags),
        ] = values
        {
            std::mem::swap(&mut self.icount, icount);
            std::mem::swap(&mut self.pc, pc);
            std::mem::swap(&mut self.vaddr, vaddr);
            std::mem::swap(&mut self.page, page);
            std::mem::swap(&mut self.size, size);
            std::mem::swap(&mut self.flags, flags);
        }
    }
}

/// What is constant of an access.
#[derive(Clone, Copy)]
struct Site {
    pc: i64,
    size: i32,
    flags: i32,
}

struct Trace {
    board: Arc<Board>,
    dir: PathBuf,
    counts: Counts,
    /// Of the interval that runs; none where it is dropped, or all are done.
    table: Option<(Table, Interval)>,
    columns: Columns,
    sites: Vec<Site>,
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

    fn define(&mut self, [pc, what, number]: Record) -> Result<()> {
        let site = Site {
            pc: pc as i64,
            size: (what as i32) & 0xff,
            flags: if what >> 32 == 0 { 0 } else { WRITE },
        };
        if (number >> 32) as usize != self.sites.len() || self.sites.len() >= SITES_MAX {
            return Err(senseless("sites are not numbered one after the other"));
        }
        self.sites.push(site);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if let Some((table, _)) = &mut self.table {
            self.columns.swap(&mut table.values);
            table.flush()?;
            self.columns.swap(&mut table.values);
        }
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
        let Some(&site) = self.sites.get(last as u32 as usize) else {
            return Err(senseless("an access of a site that it has not defined"));
        };
        let device = if physical & DEVICE == 0 { site.flags } else { site.flags | DEVICE_FLAG };
        let (page, flags) = match u32::try_from((physical & !DEVICE) >> 12) {
            Ok(page) if physical != UNKNOWN => (page, device),
            _ => (0, site.flags | UNKNOWN_FLAG),
        };
        let icount = self.counts.icount(self.count);
        self.columns.icount.push(icount as i64);
        self.columns.pc.push(site.pc);
        self.columns.vaddr.push(vaddr as i64);
        self.columns.page.push(page as i32);
        self.columns.size.push(site.size);
        self.columns.flags.push(flags);
        if self.columns.icount.len() == table::GROUP_ROWS { self.flush() } else { Ok(()) }
    }

    fn cut(&mut self) -> Result<()> {
        self.flush()?;
        if let Some((table, _)) = self.table.take() {
            table.finish()?;
        }
        self.next_interval()
    }
}
