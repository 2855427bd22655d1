//! The reading end of the board: a thread that reads the plugin's records and cuts them at the end
//! of each interval.
//!
//! ```text
//!   plugin in QEMU ── records ──▶ ring ──▶ thread ──▶ RecordSink::record
//!   orchestrator, VM stopped ── cut ──▶ thread: all records up to the head, then RecordSink::cut
//! ```
//!
//! Invariants:
//! 1. A cut takes exactly the records that were written until then: the VM is stopped, so the
//!    ring's head does not move.
//! 2. An error of the sink is returned by the next cut or by the finish. Until then the thread
//!    still empties the ring, so that QEMU does not wait.
//! 3. Every wait is bounded.

use crate::context::IcountInterval;
use crate::error::{Error, Result};
use keyframe_plugins::board::{Board, Record};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest wait for the thread's answer.
const CUT_MAX: Duration = Duration::from_secs(120);

/// A board in an unnamed memory file, which the plugin opens as `/proc/PID/fd/N`.
pub struct SharedBoard {
    /// The board.
    pub board: Arc<Board>,
    file: File,
}

impl SharedBoard {
    /// Creates a board with a ring of `records` records; 0 for no ring.
    ///
    /// Error: [`Error::Plugin`] if the memory of the board cannot be created.
    pub fn create(records: u64) -> Result<Self> {
        let failed = |problem: std::io::Error| Error::Plugin {
            operation: "creating its board",
            problem: problem.to_string(),
        };
        let file: File = rustix::fs::memfd_create("keyframe-board", MemfdFlags::CLOEXEC)
            .map_err(|errno| failed(errno.into()))?
            .into();
        let board = Board::create(&file, records).map_err(failed)?;
        Ok(Self { board: Arc::new(board), file })
    }

    /// Returns the path by which QEMU opens the board, as long as this process lives.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Checks that the plugin works. Error: [`Error::Plugin`] if it has given up.
    pub fn check(&self) -> Result<()> {
        if self.board.refused() {
            return Err(Error::Plugin {
                operation: "running",
                problem: "it gave up; QEMU's standard error says why".into(),
            });
        }
        Ok(())
    }
}

/// Receives the records of a ring.
pub trait RecordSink: Send + 'static {
    /// Takes one record. An error ends the reading.
    fn record(&mut self, record: Record) -> Result<()>;
    /// Ends the interval and begins `next`; `None` after the last one. Called after all records of
    /// the interval. An error ends the reading.
    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()>;
}

enum ReaderCommand {
    Cut { head: u64, next: Option<IcountInterval> },
    Finish,
}

/// Reads a ring on a thread of its own.
pub struct RingReader {
    shared: SharedBoard,
    commands: Sender<ReaderCommand>,
    answers: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RingReader {
    /// Starts the thread, which gives each record to `sink`. Error: [`Error::Plugin`] if the thread
    /// cannot be started.
    pub fn start<S: RecordSink>(shared: SharedBoard, sink: S) -> Result<Self> {
        let (commands, inbox) = channel();
        let (outbox, answers) = channel();
        let board = Arc::clone(&shared.board);
        let run = move || ReaderThread { board, sink, inbox, outbox, failed: None }.run();
        let thread =
            std::thread::Builder::new().name("ring reader".into()).spawn(run).map_err(|error| {
                Error::Plugin {
                    operation: "starting a thread that reads its records",
                    problem: error.to_string(),
                }
            })?;
        Ok(Self { shared, commands, answers, thread: Some(thread) })
    }

    /// Ends an interval and begins `next`: waits until the sink has taken all records of the ended
    /// one. The VM must be stopped.
    ///
    /// Errors: [`Error::Plugin`] if the plugin has given up, or the thread has ended or does not
    /// answer in 120 s; those of the sink.
    pub fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.shared.check()?;
        self.shared.board.cut();
        self.ask(ReaderCommand::Cut { head: self.shared.board.head(), next })
    }

    /// Ends the thread. Records since the last cut are dropped.
    ///
    /// Errors: [`Error::Plugin`] if the plugin has given up, or the thread has ended or does not
    /// answer in 120 s; those of the sink.
    pub fn finish(mut self) -> Result<()> {
        let answer = self.ask(ReaderCommand::Finish);
        self.join();
        self.shared.check()?;
        answer
    }

    fn ask(&mut self, command: ReaderCommand) -> Result<()> {
        let gone = |problem: &str| Error::Plugin {
            operation: "reading its records",
            problem: problem.into(),
        };
        self.commands.send(command).map_err(|_| gone("the reading thread has ended"))?;
        self.shared.board.wake_reader();
        match self.answers.recv_timeout(CUT_MAX) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(gone("the reading thread does not answer")),
            Err(RecvTimeoutError::Disconnected) => Err(gone("the reading thread has ended")),
        }
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The missing answer has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

impl Drop for RingReader {
    fn drop(&mut self) {
        // The thread looks for commands whenever it wakes.
        let _ = self.commands.send(ReaderCommand::Finish);
        self.shared.board.wake_reader();
        self.join();
    }
}

struct ReaderThread<S> {
    board: Arc<Board>,
    sink: S,
    inbox: Receiver<ReaderCommand>,
    outbox: Sender<Result<()>>,
    failed: Option<Error>,
}

impl<S: RecordSink> ReaderThread<S> {
    fn run(mut self) {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => Some(command),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => return,
            };
            match command {
                Some(ReaderCommand::Cut { head, next }) => {
                    while self.take(head) > 0 {}
                    let answer = self.failed.take().map_or_else(|| self.sink.cut(next), Err);
                    if self.outbox.send(answer).is_err() {
                        return;
                    }
                }
                Some(ReaderCommand::Finish) => {
                    // A dropped reader does not wait for the answer.
                    let _ = self.outbox.send(self.failed.take().map_or(Ok(()), Err));
                    return;
                }
                None if self.board.is_worth_reading() && self.take(self.board.head()) > 0 => {}
                None => self.board.sleep(),
            }
        }
    }

    /// Passes some records below `head` to the sink. Returns their number: 0 if there are none, or
    /// the ring is corrupt.
    fn take(&mut self, head: u64) -> u64 {
        let (sink, failed) = (&mut self.sink, &mut self.failed);
        let taken = self.board.read(head, |record| {
            if failed.is_none()
                && let Err(error) = sink.record(record)
            {
                *failed = Some(error);
            }
        });
        taken.unwrap_or_else(|torn| {
            let problem = format!("its ring is corrupt: {torn:?}");
            failed.get_or_insert(Error::Plugin { operation: "reading its records", problem });
            0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_plugins::board::RingWriter;
    use std::sync::Mutex;

    /// The records that a test's sink took: a list for each interval, the running one last.
    type Taken = Arc<Mutex<Vec<Vec<Record>>>>;

    struct TestSink {
        taken: Taken,
        /// The first word of the record at which the sink fails.
        fails_at: Option<u64>,
    }

    impl RecordSink for TestSink {
        fn record(&mut self, record: Record) -> Result<()> {
            if self.fails_at == Some(record[0]) {
                return Err(Error::Plugin { operation: "testing", problem: "asked to".into() });
            }
            self.taken.lock().unwrap().last_mut().unwrap().push(record);
            Ok(())
        }

        fn cut(&mut self, _: Option<IcountInterval>) -> Result<()> {
            self.taken.lock().unwrap().push(Vec::new());
            Ok(())
        }
    }

    /// A reader and the plugin's end of its board, opened by the path that QEMU gets.
    fn ring(records: u64, fails_at: Option<u64>) -> (RingReader, RingWriter, Taken) {
        let shared = SharedBoard::create(records).unwrap();
        let file = File::options().read(true).write(true).open(shared.path()).unwrap();
        let board = Board::open(&file).unwrap().unwrap();
        let taken = Taken::new(Mutex::new(vec![Vec::new()]));
        let sink = TestSink { taken: Arc::clone(&taken), fails_at };
        (
            RingReader::start(shared, sink).unwrap(),
            RingWriter::new(Box::leak(Box::new(board))),
            taken,
        )
    }

    #[test]
    fn cuts_are_exact_and_a_small_ring_loses_nothing() {
        let (mut reader, mut writer, taken) = ring(64, None);
        let lengths = [0, 1, 63, 64, 65, 5000, 0, 17];
        let mut number = 0;
        for length in lengths {
            for _ in 0..length {
                writer.push([number, !number]).unwrap();
                number += 1;
            }
            reader.cut(None).unwrap();
        }
        // After the last cut: in no interval.
        writer.push([u64::MAX; 2]).unwrap();
        reader.finish().unwrap();
        let taken = taken.lock().unwrap();
        assert_eq!(taken[..lengths.len()].iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        let all: Vec<Record> = taken[..lengths.len()].concat();
        assert!(all.iter().zip(0..).all(|(record, n)| *record == [n, !n]));
    }

    #[test]
    fn the_cut_returns_an_error_of_the_sink_and_the_writer_is_not_blocked() {
        let (mut reader, mut writer, _) = ring(64, Some(10));
        for number in 0..1000 {
            writer.push([number; 2]).unwrap();
        }
        assert!(reader.cut(None).unwrap_err().to_string().contains("asked to"));
        reader.finish().unwrap();
    }

    #[test]
    fn a_corrupt_head_is_an_error() {
        let shared = SharedBoard::create(64).unwrap();
        let at = |word: usize| {
            File::options().write(true).open(shared.path()).map(|file| (file, word as u64 * 8))
        };
        let (file, head) = at(1024).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &u64::MAX.to_le_bytes(), head).unwrap();
        let sink = TestSink { taken: Taken::default(), fails_at: None };
        let mut reader = RingReader::start(shared, sink).unwrap();
        assert!(reader.cut(None).unwrap_err().to_string().contains("corrupt"));
    }

    #[test]
    fn other_files_are_refused_as_a_board() {
        let file = tempfile::tempfile().unwrap();
        assert!(Board::open(&file).unwrap().is_err(), "empty");
        file.set_len(Board::len_bytes(64)).unwrap();
        assert!(Board::open(&file).unwrap().is_err(), "without its magic");
        let board = Board::create(&file, 64).unwrap();
        assert_eq!(board.read(0, |record| panic!("{record:?}")), Ok(0));
        assert!(Board::open(&file).unwrap().is_ok());
        file.set_len(Board::len_bytes(32)).unwrap();
        assert!(Board::open(&file).unwrap().is_err(), "cut short");
    }
}
