//! The reading end of the board: a thread that takes records as they come and cuts them where an
//! interval ends.
//!
//! ```text
//!   plugin in QEMU ── records ──▶ ring ──▶ thread ──▶ Sink::record
//!   orchestrator, the VM stands still ── cut ──▶ thread: all records up to the head, then Sink::cut, then the answer
//! ```
//!
//! Invariants:
//! 1. A cut takes exactly what was written until then: the VM stands still, so the head does.
//! 2. An error of the sink ends the thread, and is told by the next cut or the finish; meanwhile the ring is still emptied, so that
//!    QEMU does not wait.
//! 3. Every wait is bounded.

use crate::error::{Error, Result};
use keyframe_plugins::board::{Board, Record};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for the thread to take what is in the ring.
const CUT_MAX: Duration = Duration::from_secs(120);

/// A board in memory that no name leads to, for a plugin that is told `/proc/PID/fd/N`.
pub struct SharedBoard {
    /// The board.
    pub board: Arc<Board>,
    file: File,
}

impl SharedBoard {
    /// With a ring of so many records, 0 for none.
    pub fn create(records: u64) -> Result<Self> {
        let failed = |problem: std::io::Error| Error::Plugin {
            operation: "making its board",
            problem: problem.to_string(),
        };
        let file: File = rustix::fs::memfd_create("keyframe-board", MemfdFlags::CLOEXEC)
            .map_err(|errno| failed(errno.into()))?
            .into();
        let board = Board::create(&file, records).map_err(failed)?;
        Ok(Self { board: Arc::new(board), file })
    }

    /// The path by which QEMU opens it, as long as this process has it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// An error if the plugin gave up.
    pub fn check(&self) -> Result<()> {
        if self.board.refused() {
            return Err(Error::Plugin {
                operation: "running",
                problem: "it gave up and said why on QEMU's standard error".into(),
            });
        }
        Ok(())
    }
}

/// What becomes of records.
pub trait Sink: Send + 'static {
    /// Takes one.
    fn record(&mut self, record: Record) -> Result<()>;
    /// The interval ends; all its records have been taken.
    fn cut(&mut self) -> Result<()>;
}

enum Command {
    Cut { head: u64 },
    Finish,
}

/// The thread and how to talk to it.
pub struct Reader {
    shared: SharedBoard,
    commands: Sender<Command>,
    answers: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts it.
    pub fn start<S: Sink>(shared: SharedBoard, sink: S) -> Result<Self> {
        let (commands, inbox) = channel();
        let (outbox, answers) = channel();
        let board = Arc::clone(&shared.board);
        let run = move || Loop { board, sink, inbox, outbox, failed: None }.run();
        let thread =
            std::thread::Builder::new().name("ring reader".into()).spawn(run).map_err(|error| {
                Error::Plugin {
                    operation: "starting a thread for its records",
                    problem: error.to_string(),
                }
            })?;
        Ok(Self { shared, commands, answers, thread: Some(thread) })
    }

    /// Ends an interval. The VM stands still.
    pub fn cut(&mut self) -> Result<()> {
        self.shared.check()?;
        self.shared.board.cut();
        self.ask(Command::Cut { head: self.shared.board.head() })
    }

    /// Ends the thread. What was written since the last cut is dropped.
    pub fn finish(mut self) -> Result<()> {
        let answer = self.ask(Command::Finish);
        self.join();
        self.shared.check()?;
        answer
    }

    fn ask(&mut self, command: Command) -> Result<()> {
        let gone = |problem: &str| Error::Plugin {
            operation: "taking its records",
            problem: problem.into(),
        };
        self.commands.send(command).map_err(|_| gone("the thread has ended"))?;
        self.shared.board.wake_reader();
        match self.answers.recv_timeout(CUT_MAX) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(gone("the thread does not answer")),
            Err(RecvTimeoutError::Disconnected) => Err(gone("the thread has ended")),
        }
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It ends when asked or when nobody can ask any more; a panic there has been told by
            // the missing answer.
            let _ = thread.join();
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The thread looks for it at least once a nap.
        let _ = self.commands.send(Command::Finish);
        self.shared.board.wake_reader();
        self.join();
    }
}

struct Loop<S> {
    board: Arc<Board>,
    sink: S,
    inbox: Receiver<Command>,
    outbox: Sender<Result<()>>,
    failed: Option<Error>,
}

impl<S: Sink> Loop<S> {
    fn run(mut self) {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => Some(command),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => return,
            };
            match command {
                Some(Command::Cut { head }) => {
                    while self.take(head) > 0 {}
                    let answer = self.failed.take().map_or_else(|| self.sink.cut(), Err);
                    if self.outbox.send(answer).is_err() {
                        return;
                    }
                }
                Some(Command::Finish) => {
                    // Whoever is dropped without an interest in the answer does not wait for it.
                    let _ = self.outbox.send(self.failed.take().map_or(Ok(()), Err));
                    return;
                }
                None if self.board.is_worth_reading() && self.take(self.board.head()) > 0 => {}
                None => self.board.sleep(),
            }
        }
    }

    /// Takes some records below `head`; 0 when there are none, or no sense in them.
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
            let problem = format!("its ring is torn: {torn:?}");
            failed.get_or_insert(Error::Plugin { operation: "taking its records", problem });
            0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_plugins::board::Writer;
    use std::sync::Mutex;

    /// What a test's sink has taken: one list for each interval, the running one last.
    type Taken = Arc<Mutex<Vec<Vec<Record>>>>;

    struct Keep {
        taken: Taken,
        /// The record at which it fails.
        fails_at: Option<u64>,
    }

    impl Sink for Keep {
        fn record(&mut self, record: Record) -> Result<()> {
            if self.fails_at == Some(record[0]) {
                return Err(Error::Plugin { operation: "testing", problem: "asked to".into() });
            }
            self.taken.lock().unwrap().last_mut().unwrap().push(record);
            Ok(())
        }

        fn cut(&mut self) -> Result<()> {
            self.taken.lock().unwrap().push(Vec::new());
            Ok(())
        }
    }

    /// A reader, and the plugin's end of its board, opened by the path that QEMU gets.
    fn ring(records: u64, fails_at: Option<u64>) -> (Reader, Writer, Taken) {
        let shared = SharedBoard::create(records).unwrap();
        let file = File::options().read(true).write(true).open(shared.path()).unwrap();
        let board = Board::open(&file).unwrap().unwrap();
        let taken = Taken::new(Mutex::new(vec![Vec::new()]));
        let sink = Keep { taken: Arc::clone(&taken), fails_at };
        (Reader::start(shared, sink).unwrap(), Writer::new(Box::leak(Box::new(board))), taken)
    }

    #[test]
    fn cuts_are_exact_and_nothing_is_lost_in_a_ring_that_is_too_small() {
        let (mut reader, mut writer, taken) = ring(64, None);
        let lengths = [0, 1, 63, 64, 65, 5000, 0, 17];
        let mut number = 0;
        for length in lengths {
            for _ in 0..length {
                writer.push([number, !number]).unwrap();
                number += 1;
            }
            reader.cut().unwrap();
        }
        // Behind the last cut: dropped or not, it is in no interval.
        writer.push([u64::MAX; 2]).unwrap();
        reader.finish().unwrap();
        let taken = taken.lock().unwrap();
        assert_eq!(taken[..lengths.len()].iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        let all: Vec<Record> = taken[..lengths.len()].concat();
        assert!(all.iter().zip(0..).all(|(record, n)| *record == [n, !n]));
    }

    #[test]
    fn an_error_of_the_sink_is_told_at_the_cut_and_the_writer_does_not_wait_for_ever() {
        let (mut reader, mut writer, _) = ring(64, Some(10));
        for number in 0..1000 {
            writer.push([number; 2]).unwrap();
        }
        assert!(reader.cut().unwrap_err().to_string().contains("asked to"));
        reader.finish().unwrap();
    }

    #[test]
    fn a_torn_head_is_an_error() {
        let shared = SharedBoard::create(64).unwrap();
        let at = |word: usize| {
            File::options().write(true).open(shared.path()).map(|file| (file, word as u64 * 8))
        };
        let (file, head) = at(1024).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &u64::MAX.to_le_bytes(), head).unwrap();
        let sink = Keep { taken: Taken::default(), fails_at: None };
        let mut reader = Reader::start(shared, sink).unwrap();
        assert!(reader.cut().unwrap_err().to_string().contains("torn"));
    }

    #[test]
    fn what_is_no_board_is_refused() {
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
