//! Runs whose plugin sends a few records for each event: `watch` and `syscalls`.
//!
//! An event is a fixed number of records, of which the first word counts the instructions begun. In the part that word is the
//! recording's own count of the instruction (`memtrace` says how it is found).

use super::{Running, check_cuts, option};
use crate::context::{Interval, Part, RunContext, part_file};
use crate::error::{Error, Result, file};
use crate::ring::{Reader, SharedBoard, Sink};
use keyframe_plugins::board::{Board, RECORD_WORDS, Record};
use std::path::PathBuf;
use std::sync::Arc;

/// Records in the ring: events are rare.
const RING_RECORDS: u64 = 1 << 14;
/// Most words of events in an interval, which are held in memory: 1 GiB.
const WORDS_MAX: usize = 1 << 27;

/// Such a run.
pub(super) struct Events {
    context: RunContext,
    reader: Reader,
    arguments: Vec<(&'static str, String)>,
    cuts: usize,
}

impl Events {
    /// With the plugin's tool `kind`, whose events have so many records, and its arguments.
    pub fn begin(
        run: &RunContext,
        kind: &'static str,
        records: usize,
        arguments: Vec<(&'static str, String)>,
    ) -> Result<Box<dyn Running>> {
        let shared = SharedBoard::create(RING_RECORDS)?;
        let mut pending: Vec<_> = run.warm_up.into_iter().map(|interval| (interval, false)).collect();
        pending.extend(run.intervals.iter().map(|&interval| (interval, true)));
        let sink = Gather {
            board: Arc::clone(&shared.board),
            dir: run.dir.clone(),
            kind,
            columns: records * RECORD_WORDS,
            pending: pending.into_iter(),
            running: None,
            words: Vec::new(),
            base: 0,
        };
        let mut all = vec![
            ("tool", kind.to_owned()),
            ("board", shared.path()),
            ("ram", run.ram.argument()),
            ("ramfile", run.ram.file.display().to_string()),
        ];
        all.extend(arguments);
        let reader = Reader::start(shared, sink.ready())?;
        Ok(Box::new(Self { context: run.clone(), reader, arguments: all, cuts: 0 }))
    }
}

impl Running for Events {
    fn option(&self) -> String {
        let arguments: Vec<_> = self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        option(&self.context.plugin, &arguments)
    }

    fn cut(&mut self) -> Result<()> {
        self.cuts += 1;
        self.reader.cut()
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        self.reader.finish()?;
        check_cuts(&self.context, self.cuts)?;
        let part = |&interval| Part { interval, dir: self.context.dir.clone() };
        Ok(self.context.intervals.iter().map(part).collect())
    }
}

struct Gather {
    board: Arc<Board>,
    dir: PathBuf,
    kind: &'static str,
    columns: usize,
    pending: std::vec::IntoIter<(Interval, bool)>,
    running: Option<(Interval, bool)>,
    words: Vec<u64>,
    base: u64,
}

impl Gather {
    fn ready(mut self) -> Self {
        self.next_interval();
        self
    }

    fn next_interval(&mut self) {
        self.running = self.pending.next();
        let begun = self.board.counted(0);
        let start = self.running.map_or(0, |(interval, _)| interval.start.0);
        self.base = start.wrapping_sub(begun).wrapping_sub(1);
    }
}

impl Sink for Gather {
    fn record(&mut self, mut record: Record) -> Result<()> {
        let Some((interval, true)) = self.running else { return Ok(()) };
        if self.words.len() >= WORDS_MAX {
            let problem = format!(
                "more than {} events in interval {}; ask for less, or for shorter intervals",
                WORDS_MAX / self.columns,
                interval.index
            );
            return Err(Error::Plugin { operation: "taking its records", problem });
        }
        if self.words.len().is_multiple_of(self.columns) {
            let last = interval.end.0.saturating_sub(1).max(interval.start.0);
            record[0] = self.base.wrapping_add(record[0]).min(last);
        }
        self.words.extend(record);
        Ok(())
    }

    fn cut(&mut self) -> Result<()> {
        if let Some((interval, true)) = self.running {
            let path = part_file(&self.dir, interval.index, self.kind, "part");
            let written = keyframe_plugins::write_part(&path, self.kind, self.columns, &self.words);
            written.map_err(file("writing", &path))?;
            self.words.clear();
        }
        self.next_interval();
        Ok(())
    }
}
