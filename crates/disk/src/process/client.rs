//! The engine's handle of the process that serves the disks.

use super::{Answer, Order, ServerStats, Spec, frame};
use crate::{DiskBlock, DiskEpoch, Error, Extent, Result, SlotFile};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long opening may take: a long journal is read whole.
const OPEN_TIMEOUT: Duration = Duration::from_mins(2);
/// How long an answer may take that waits for the medium.
const SYNC_TIMEOUT: Duration = Duration::from_mins(2);
/// How long any other answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the process may take to be gone after its last answer.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The engine's hold of the process that serves its disks. Dropped without [`Self::end`], it leaves
/// the guest its disks: the server goes on until its last client is gone.
///
/// A checkpoint, in this order:
///
/// ```text
///   prepare()                  the guest runs: what is dirty is synced
///   pause(limit)               flushes are acknowledged before their sync from here on
///   QMP stop                   drains and flushes
///   begin_cut()                constant time: the server cuts, and makes durable what was acknowledged,
///   ...                        device state, RAM                                    while this goes on
///   finish_cut()               both are done; where the second fails the VM must not run
///   QMP cont, resumed()
///   pages(), SlotFile          the content, while the guest runs
///   release() or give_back()   sealed, or failed
/// ```
pub struct Disks {
    child: Child,
    control: UnixStream,
    specs: Vec<Spec>,
    /// What is open beside those.
    staged: Vec<Spec>,
    disk_bytes: Vec<u64>,
    begun: Begun,
}

/// A cut that was asked for and not waited for.
enum Begun {
    Nothing,
    Asked,
    /// Somebody else had to wait for the answers.
    Answered(CutAnswers),
}

/// Epochs of all disks; and whether all that was acknowledged is durable.
type CutAnswers = (Result<Vec<DiskEpoch>>, Result<()>);

impl Disks {
    /// Starts the server as `command`, whose standard input is the connection, and waits until it
    /// listens on `socket`.
    ///
    /// Errors: what a spec names cannot be served.
    pub fn spawn(command: &mut Command, socket: &Path, specs: &[Spec]) -> Result<Self> {
        let name = || command_name(command);
        let (control, theirs) =
            UnixStream::pair().map_err(Error::io(name(), "make a connection to"))?;
        let failed = Error::io(name(), "start");
        // Ctrl-C is not to end it together with the engine.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(failed)?;
        // The command holds the other end, whose closing must be seen.
        command.stdin(Stdio::null());
        let (staged, disk_bytes, begun) = (Vec::new(), Vec::new(), Begun::Nothing);
        let mut disks = Self { child, control, specs: specs.to_vec(), staged, disk_bytes, begun };
        let order = Order::Open { socket: socket.into(), specs: specs.to_vec() };
        match disks.ask(&order, OPEN_TIMEOUT) {
            Ok(Answer::Opened { disk_bytes }) if disk_bytes.len() == specs.len() => {
                disks.disk_bytes = disk_bytes;
                Ok(disks)
            }
            other => {
                let error = other.map_or_else(|error| error, |answer| unexpected(&answer));
                let _ = disks.child.kill();
                let _ = disks.child.wait();
                Err(error)
            }
        }
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The disks, in the order of all epochs.
    pub fn specs(&self) -> &[Spec] {
        &self.specs
    }

    /// Bytes of each disk.
    pub fn disk_bytes(&self) -> &[u64] {
        &self.disk_bytes
    }

    /// True while the process is there.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Syncs what is dirty, while the guest runs, so that little is left to do for the pause.
    pub fn prepare(&mut self) -> Result<()> {
        self.done(&Order::Prepare, SYNC_TIMEOUT)
    }

    /// From now on, and for at most `limit`, flushes are acknowledged before their sync. `limit`
    /// must be no longer than the watchdog's.
    pub fn pause(&mut self, limit: Duration) -> Result<()> {
        self.done(&Order::Pause { limit_ms: limit.as_millis() as u64 }, ANSWER_TIMEOUT)
    }

    /// Cuts all disks, after `stop`; an epoch of each, in the order of the specs.
    pub fn cut(&mut self) -> Result<Vec<DiskEpoch>> {
        let answer = self.ask(&Order::Cut, ANSWER_TIMEOUT)?;
        self.epochs(answer)
    }

    fn epochs(&self, answer: Answer) -> Result<Vec<DiskEpoch>> {
        match answer {
            Answer::Cut { epochs } if epochs.len() == self.specs.len() => Ok(epochs),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks for [`Self::cut`] and [`Self::settled`], and waits for neither: the server is done
    /// before the rest of the pause is.
    pub fn begin_cut(&mut self) -> Result<()> {
        if let Some((Ok(epochs), _)) = self.finish_cut() {
            // Nobody took them: this cut has their blocks.
            self.give_back(&epochs)?;
        }
        self.send(&Order::Cut, ANSWER_TIMEOUT)?;
        self.begun = Begun::Asked;
        self.send(&Order::Settled, SYNC_TIMEOUT)
    }

    /// The answers to [`Self::begin_cut`]: the epochs, and whether the VM may run. `None` where it
    /// was not called.
    pub fn finish_cut(&mut self) -> Option<CutAnswers> {
        self.wait_for_cut();
        match std::mem::replace(&mut self.begun, Begun::Nothing) {
            Begun::Answered(answers) => Some(answers),
            Begun::Nothing | Begun::Asked => None,
        }
    }

    fn wait_for_cut(&mut self) {
        if matches!(self.begun, Begun::Asked) {
            let epochs = self.receive().and_then(|answer| self.epochs(answer));
            let settled = self.receive().and_then(is_done);
            self.begun = Begun::Answered((epochs, settled));
        }
    }

    /// Waits until what was acknowledged since [`Self::pause`] is durable, and ends the pause.
    /// Before `cont`, also after a checkpoint that failed. Where this fails the VM must not run; it
    /// can be tried again once there is space.
    pub fn settled(&mut self) -> Result<()> {
        self.done(&Order::Settled, SYNC_TIMEOUT)
    }

    /// The VM runs, or was not stopped after all: the server's threads are no more urgent than
    /// others.
    pub fn resumed(&mut self) -> Result<()> {
        self.done(&Order::Resumed, ANSWER_TIMEOUT)
    }

    /// Has requests answered on `core`, on which the guest runs alone, before it runs on: see the
    /// server's `affinity`.
    pub fn answer_on(&mut self, core: u32) -> Result<()> {
        self.done(&Order::AnswerOn { core }, ANSWER_TIMEOUT)
    }

    /// All blocks that `epoch` of the disk at `index` covers, rising: those written since the cut
    /// before, and those of epochs that were given back.
    pub fn pages(&mut self, index: usize, epoch: DiskEpoch) -> Pages<'_> {
        Pages { disks: self, index, epoch, next: Some(DiskBlock(0)), ready: Vec::new().into_iter() }
    }

    /// Some thousand extents of the same, from `from` on, and where to go on: for one who shares
    /// this hold with others.
    pub fn pages_from(
        &mut self,
        index: usize,
        epoch: DiskEpoch,
        from: DiskBlock,
    ) -> Result<(Vec<Extent>, Option<DiskBlock>)> {
        match self.ask(&Order::Pages { disk: index, epoch, from }, ANSWER_TIMEOUT)? {
            // One that goes backwards would never end.
            Answer::Pages { extents, next } if next.is_none_or(|next| next > from) => {
                Ok((extents, next))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Reads slots of the disk at `index`, without asking the server.
    pub fn slot_file(&self, index: usize) -> Result<SlotFile> {
        let spec = self
            .specs
            .get(index)
            .ok_or_else(|| Error::protocol("the engine", format!("no disk {index}")))?;
        SlotFile::open(&spec.overlay)
    }

    /// The checkpoint with these epochs (of each disk) is sealed.
    pub fn release(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.done(&Order::Release { epochs: epochs.into() }, ANSWER_TIMEOUT)
    }

    /// The checkpoint with these epochs (of each disk) failed: their blocks count as written again.
    pub fn give_back(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.done(&Order::GiveBack { epochs: epochs.into() }, ANSWER_TIMEOUT)
    }

    /// Opens `specs`, of the same exports and lengths, beside the disks that are served.
    pub fn stage(&mut self, specs: &[Spec]) -> Result<()> {
        self.done(&Order::Stage { specs: specs.to_vec() }, OPEN_TIMEOUT)?;
        self.staged = specs.to_vec();
        Ok(())
    }

    /// Serves what is open beside in place of what is served, which is then beside: clients notice
    /// nothing but the content. While the VM stands, and no epoch is in flight. All disks, or none.
    pub fn exchange(&mut self) -> Result<()> {
        self.done(&Order::Exchange, ANSWER_TIMEOUT)?;
        std::mem::swap(&mut self.specs, &mut self.staged);
        Ok(())
    }

    /// Closes what is open beside, and tells what that was: its overlays are free.
    pub fn dismiss(&mut self) -> Result<Vec<Spec>> {
        self.done(&Order::Dismiss, ANSWER_TIMEOUT)?;
        Ok(std::mem::take(&mut self.staged))
    }

    /// How it is doing.
    pub fn stats(&mut self) -> Result<ServerStats> {
        match self.ask(&Order::Stats, ANSWER_TIMEOUT)? {
            Answer::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the server: clients that are left are cut off, everything is synced. After it the
    /// overlays are free.
    pub fn end(mut self) -> Result<()> {
        let ended = self.done(&Order::End, SYNC_TIMEOUT);
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < deadline {
            if !self.is_alive() {
                return ended;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        // It has synced, or could not: nothing is lost with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        ended
    }

    fn done(&mut self, order: &Order, timeout: Duration) -> Result<()> {
        self.ask(order, timeout).and_then(is_done)
    }

    fn ask(&mut self, order: &Order, timeout: Duration) -> Result<Answer> {
        self.wait_for_cut();
        self.send(order, timeout)?;
        self.receive()
    }

    /// Sends an order whose answer may take so long.
    fn send(&mut self, order: &Order, timeout: Duration) -> Result<()> {
        let limit = |e| Error::io("the process that serves the disks", "bound the wait for")(e);
        self.control.set_read_timeout(Some(timeout)).map_err(limit)?;
        self.control.set_write_timeout(Some(timeout)).map_err(limit)?;
        frame::send(&self.control, order).map_err(|error| self.lost(error))
    }

    fn receive(&mut self) -> Result<Answer> {
        match frame::receive(&self.control) {
            Ok(Some(Answer::Failed { problem, disk_full: true })) => {
                Err(Error::ServerFull { problem })
            }
            Ok(Some(Answer::Failed { problem, disk_full: false })) => {
                Err(Error::Server { problem })
            }
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Error::Server { problem: "it has ended".into() }),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// A late answer would be taken for the next one's.
    fn lost(&self, error: Error) -> Error {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        error
    }
}

fn is_done(answer: Answer) -> Result<()> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn command_name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn unexpected(answer: &Answer) -> Error {
    let mut answer = format!("{answer:?}");
    answer.truncate(answer.floor_char_boundary(100));
    Error::protocol("the process that serves the disks", format!("it answered {answer}"))
}

/// The blocks of an epoch, fetched some thousand extents at a time.
pub struct Pages<'a> {
    disks: &'a mut Disks,
    index: usize,
    epoch: DiskEpoch,
    next: Option<DiskBlock>,
    ready: std::vec::IntoIter<Extent>,
}

impl Pages<'_> {
    fn fetch(&mut self, from: DiskBlock) -> Result<()> {
        let (extents, next) = self.disks.pages_from(self.index, self.epoch, from)?;
        self.ready = extents.into_iter();
        self.next = next;
        Ok(())
    }
}

impl Iterator for Pages<'_> {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(extent) = self.ready.next() {
                return Some(Ok(extent));
            }
            let from = self.next.take()?;
            if let Err(error) = self.fetch(from) {
                return Some(Err(error));
            }
        }
    }
}
