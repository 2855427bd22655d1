//! Runs whose plugin sends a few records for each event: `watch` and `syscalls`.
//!
//! An event is a fixed number of words in records. The plugin's first word is the number of
//! instructions begun; the part has the instruction's count in the recording in its place
//! ([`IcountMapper`]).

use super::ToolRun;
use super::ring_run::{IcountMapper, RingRun};
use crate::context::{IcountInterval, RunContext, RunningInterval, part_file};
use crate::error::{Error, Result, file};
use crate::ring_reader::{RecordSink, RingReader, SharedBoard};
use keyframe_plugins::board::{Board, Record};
use std::path::PathBuf;
use std::sync::Arc;

/// Records in the ring: events are rare.
const RING_RECORDS: u64 = 1 << 14;
/// The most words of events in an interval, which are held in memory: 1 GiB.
const WORDS_MAX: usize = 1 << 27;

/// Begins a run with the plugin's tool `kind`, whose events have `columns` words, and further
/// arguments for the plugin.
pub(super) fn begin(
    run: &RunContext,
    kind: &'static str,
    columns: usize,
    arguments: Vec<(&'static str, String)>,
) -> Result<Box<dyn ToolRun>> {
    let shared = SharedBoard::create(RING_RECORDS)?;
    shared.board.start_count(run.first_running().interval.start.0);
    let mut sink = EventCollector {
        board: Arc::clone(&shared.board),
        dir: run.dir.clone(),
        kind,
        columns,
        icounts: IcountMapper::default(),
        running: None,
        words: Vec::new(),
    };
    sink.begin(Some(run.first_running()));
    let mut all =
        vec![("tool", kind.to_owned()), ("board", shared.path()), ("ram", run.ram.argument())];
    all.extend(run.ram.file_arguments());
    all.extend(arguments);
    Ok(Box::new(RingRun::new(run, RingReader::start(shared, sink)?, all)))
}

/// Collects the events of an interval and writes them as its part.
struct EventCollector {
    board: Arc<Board>,
    dir: PathBuf,
    kind: &'static str,
    columns: usize,
    icounts: IcountMapper,
    running: Option<RunningInterval>,
    words: Vec<u64>,
}

impl EventCollector {
    fn begin(&mut self, running: Option<RunningInterval>) {
        self.running = running;
        if let Some(running) = running {
            self.icounts.begin(running.interval, &self.board);
        }
    }

    fn kept_interval(&self) -> Option<u32> {
        self.running.filter(|running| running.is_kept).map(|running| running.interval.index)
    }
}

impl RecordSink for EventCollector {
    fn record(&mut self, mut record: Record) -> Result<()> {
        let Some(index) = self.kept_interval() else { return Ok(()) };
        if self.words.len() >= WORDS_MAX {
            let problem = format!(
                "more than {} events in interval {index}; watch less, or use shorter intervals",
                WORDS_MAX / self.columns,
            );
            return Err(Error::Plugin { operation: "reading its records", problem });
        }
        if self.words.len().is_multiple_of(self.columns) {
            record[0] = self.icounts.icount(record[0]);
        }
        self.words.extend(record);
        Ok(())
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        if let Some(index) = self.kept_interval() {
            let path = part_file(&self.dir, index, self.kind, "part");
            let written = keyframe_plugins::write_part(&path, self.kind, self.columns, &self.words);
            written.map_err(file("writing", &path))?;
            self.words.clear();
        }
        self.begin(next.map(RunningInterval::kept));
        Ok(())
    }
}
