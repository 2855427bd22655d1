//! Runs whose plugin sends a few records for each event: `watch` and `syscalls`.
//!
//! An event is a fixed number of words in records, of which the first word counts the instructions
//! begun. In the part that word is the recording's own count of the instruction (`memtrace` says
//! how it is found).

use super::Running;
use super::ringed::{Counts, Ringed};
use crate::context::{Interval, RunContext, part_file};
use crate::error::{Error, Result, file};
use crate::ring::{Reader, SharedBoard, Sink};
use keyframe_plugins::board::{Board, Record};
use std::path::PathBuf;
use std::sync::Arc;

/// Records in the ring: events are rare.
const RING_RECORDS: u64 = 1 << 14;
/// Most words of events in an interval, which are held in memory: 1 GiB.
const WORDS_MAX: usize = 1 << 27;

/// Begins one, with the plugin's tool `kind`, whose events have so many words, and its arguments.
pub(super) fn begin(
    run: &RunContext,
    kind: &'static str,
    columns: usize,
    arguments: Vec<(&'static str, String)>,
) -> Result<Box<dyn Running>> {
    let shared = SharedBoard::create(RING_RECORDS)?;
    let sink = Gather {
        board: Arc::clone(&shared.board),
        dir: run.dir.clone(),
        kind,
        columns,
        counts: Counts::of(run),
        running: None,
        words: Vec::new(),
    };
    let mut all =
        vec![("tool", kind.to_owned()), ("board", shared.path()), ("ram", run.ram.argument())];
    all.extend(run.ram.file_arguments());
    all.extend(arguments);
    Ok(Box::new(Ringed::new(run, Reader::start(shared, sink.ready())?, all)))
}

struct Gather {
    board: Arc<Board>,
    dir: PathBuf,
    kind: &'static str,
    columns: usize,
    counts: Counts,
    running: Option<(Interval, bool)>,
    words: Vec<u64>,
}

impl Gather {
    fn ready(mut self) -> Self {
        self.next_interval();
        self
    }

    fn next_interval(&mut self) {
        self.running = self.counts.next_interval(self.board.counted(0));
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
            record[0] = self.counts.icount(record[0]);
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
