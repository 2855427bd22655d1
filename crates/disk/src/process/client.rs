//! The engine's handle to the process that serves the disks.

use super::{DiskRequest, DiskResponse, DiskSpec, ServerStats, frame};
use crate::{DiskBlock, DiskEpoch, Error, Extent, Result, SlotFile};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time limit of opening: a long journal is read as a whole.
const OPEN_TIMEOUT: Duration = Duration::from_mins(2);
/// The time limit of responses that wait for the medium.
const SYNC_TIMEOUT: Duration = Duration::from_mins(2);
/// The time limit of all other responses.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of the process's end after its last response.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The engine's handle to the process that serves its disks. If it is dropped without
/// [`Self::end`], the guest keeps its disks: the server goes on until its last client has
/// disconnected.
///
/// The order of a checkpoint:
///
/// ```text
///   prepare()                  the guest runs: dirty data is synced
///   pause(limit)               from here on flushes are acknowledged before their sync
///   QMP stop                   drains and flushes
///   begin_cut()                constant time: the server cuts, and makes the acknowledged data
///   ...                        durable, while device state and RAM are read
///   finish_cut()               both are done; if the second failed, the VM must not run
///   QMP cont, resumed()
///   pages(), SlotFile          the content is read while the guest runs
///   release() or give_back()   the checkpoint is sealed, or has failed
/// ```
pub struct Disks {
    child: Child,
    control: UnixStream,
    specs: Vec<DiskSpec>,
    /// The disks that are open but not served.
    staged: Vec<DiskSpec>,
    disk_bytes: Vec<u64>,
    begun: CutRequest,
}

/// The state of a cut that was requested without waiting for it.
enum CutRequest {
    Nothing,
    Sent,
    /// Another request had to wait for the responses first.
    Answered(CutAnswers),
}

/// The epochs of all disks, and whether all acknowledged data is durable.
type CutAnswers = (Result<Vec<DiskEpoch>>, Result<()>);

impl Disks {
    /// Starts the server as `command`, which must call [`serve`](super::serve) with its standard
    /// input. Waits until it listens on `socket`.
    ///
    /// Errors: the process cannot be started; a disk cannot be opened.
    pub fn spawn(command: &mut Command, socket: &Path, specs: &[DiskSpec]) -> Result<Self> {
        let name = || command_name(command);
        let (control, theirs) =
            UnixStream::pair().map_err(Error::io(name(), "make a connection to"))?;
        let failed = Error::io(name(), "start");
        // Ctrl-C must not end the server together with the engine.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(failed)?;
        // `command` holds a copy of the server's end. It must be closed, so that the engine sees
        // the server end.
        command.stdin(Stdio::null());
        let (staged, disk_bytes, begun) = (Vec::new(), Vec::new(), CutRequest::Nothing);
        let mut disks = Self { child, control, specs: specs.to_vec(), staged, disk_bytes, begun };
        let request = DiskRequest::Open { socket: socket.into(), specs: specs.to_vec() };
        match disks.ask(&request, OPEN_TIMEOUT) {
            Ok(DiskResponse::Opened { disk_bytes }) if disk_bytes.len() == specs.len() => {
                disks.disk_bytes = disk_bytes;
                Ok(disks)
            }
            other => {
                let error = other.map_or_else(|error| error, |response| unexpected(&response));
                let _ = disks.child.kill();
                let _ = disks.child.wait();
                Err(error)
            }
        }
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The disks, in the order of all epochs.
    pub fn specs(&self) -> &[DiskSpec] {
        &self.specs
    }

    /// The size of each disk in bytes.
    pub fn disk_bytes(&self) -> &[u64] {
        &self.disk_bytes
    }

    /// True if the process has not ended.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Syncs dirty data while the guest runs, so that the pause has little to sync. Errors: a sync
    /// failed; the server has ended or does not answer.
    pub fn prepare(&mut self) -> Result<()> {
        self.done(&DiskRequest::Prepare, SYNC_TIMEOUT)
    }

    /// Has the server acknowledge flushes before their sync, for at most `limit` from now on.
    /// `limit` must not exceed the watchdog's limit.
    ///
    /// Errors: the server has ended or does not answer.
    pub fn pause(&mut self, limit: Duration) -> Result<()> {
        self.done(&DiskRequest::Pause { limit_ms: limit.as_millis() as u64 }, ANSWER_TIMEOUT)
    }

    /// Cuts all disks. To be called after `stop`. Returns the epoch of each disk, in the order of
    /// the specs. Errors: too many epochs are in flight; the server has ended or does not answer.
    pub fn cut(&mut self) -> Result<Vec<DiskEpoch>> {
        let response = self.ask(&DiskRequest::Cut, ANSWER_TIMEOUT)?;
        self.epochs(response)
    }

    fn epochs(&self, response: DiskResponse) -> Result<Vec<DiskEpoch>> {
        match response {
            DiskResponse::Cut { epochs } if epochs.len() == self.specs.len() => Ok(epochs),
            other => Err(unexpected(&other)),
        }
    }

    /// Requests [`Self::cut`] and [`Self::settled`] without waiting for them. The server is done
    /// before the rest of the pause is. Errors: the server has ended.
    pub fn begin_cut(&mut self) -> Result<()> {
        if let Some((Ok(epochs), _)) = self.finish_cut() {
            // The caller did not take these epochs, so the new cut covers their blocks.
            self.give_back(&epochs)?;
        }
        self.send(&DiskRequest::Cut, ANSWER_TIMEOUT)?;
        self.begun = CutRequest::Sent;
        self.send(&DiskRequest::Settled, SYNC_TIMEOUT)
    }

    /// The results of [`Self::begin_cut`]: the epochs, and whether the VM may run. `None` if it was
    /// not called.
    pub fn finish_cut(&mut self) -> Option<CutAnswers> {
        self.wait_for_cut();
        match std::mem::replace(&mut self.begun, CutRequest::Nothing) {
            CutRequest::Answered(answers) => Some(answers),
            CutRequest::Nothing | CutRequest::Sent => None,
        }
    }

    fn wait_for_cut(&mut self) {
        if matches!(self.begun, CutRequest::Sent) {
            let epochs = self.receive().and_then(|response| self.epochs(response));
            let settled = self.receive().and_then(is_done);
            self.begun = CutRequest::Answered((epochs, settled));
        }
    }

    /// Waits until all data that was acknowledged since [`Self::pause`] is durable, and ends the
    /// pause. To be called before `cont`, also after a failed checkpoint. Error: the sync failed,
    /// and the VM must not run; the caller may try again after there is space.
    pub fn settled(&mut self) -> Result<()> {
        self.done(&DiskRequest::Settled, SYNC_TIMEOUT)
    }

    /// Tells the server that the VM runs, or was not stopped: its threads get their ordinary
    /// priority back. Errors: the server has ended or does not answer.
    pub fn resumed(&mut self) -> Result<()> {
        self.done(&DiskRequest::Resumed, ANSWER_TIMEOUT)
    }

    /// Requests that are answered on `core`, where the guest's threads run, before the guest runs
    /// on. See the server's module `affinity`. Errors: the server has ended or does not answer.
    pub fn answer_on(&mut self, core: u32) -> Result<()> {
        self.done(&DiskRequest::AnswerOn { core }, ANSWER_TIMEOUT)
    }

    /// All blocks that `epoch` of the disk at `index` covers, rising: the blocks written since the
    /// previous cut, and those of epochs that were given back.
    pub fn pages(&mut self, index: usize, epoch: DiskEpoch) -> Pages<'_> {
        Pages { disks: self, index, epoch, next: Some(DiskBlock(0)), ready: Vec::new().into_iter() }
    }

    /// Returns some thousand extents of [`Self::pages`] from block `from` on, and the block at
    /// which to continue. It is for a caller that shares this handle with others.
    ///
    /// Errors: no such epoch; the server has ended or does not answer.
    pub fn pages_from(
        &mut self,
        index: usize,
        epoch: DiskEpoch,
        from: DiskBlock,
    ) -> Result<(Vec<Extent>, Option<DiskBlock>)> {
        match self.ask(&DiskRequest::Pages { disk: index, epoch, from }, ANSWER_TIMEOUT)? {
            // A server that goes backwards would never end.
            DiskResponse::Pages { extents, next } if next.is_none_or(|next| next > from) => {
                Ok((extents, next))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Opens the data file of the disk at `index`, to read slots without a request to the server.
    /// Errors: no such disk; the file cannot be opened.
    pub fn slot_file(&self, index: usize) -> Result<SlotFile> {
        let spec = self
            .specs
            .get(index)
            .ok_or_else(|| Error::protocol("the engine", format!("no disk {index}")))?;
        SlotFile::open(&spec.overlay)
    }

    /// Releases the epochs (one of each disk) of a sealed checkpoint. Errors: no such epochs; the
    /// server has ended or does not answer.
    pub fn release(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.done(&DiskRequest::Release { epochs: epochs.into() }, ANSWER_TIMEOUT)
    }

    /// Gives back the epochs (one of each disk) of a failed checkpoint: the next cut covers their
    /// blocks too. Errors: no such epochs; the server has ended or does not answer.
    pub fn give_back(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.done(&DiskRequest::GiveBack { epochs: epochs.into() }, ANSWER_TIMEOUT)
    }

    /// Opens `specs`, which must have the same exports and sizes, without serving them. Errors: a
    /// disk cannot be opened; the server has ended or does not answer.
    pub fn stage(&mut self, specs: &[DiskSpec]) -> Result<()> {
        self.done(&DiskRequest::Stage { specs: specs.to_vec() }, OPEN_TIMEOUT)?;
        self.staged = specs.to_vec();
        Ok(())
    }

    /// Serves the staged disks, and stages those that were served. Clients notice only the changed
    /// content. To be called while the VM is paused and no epoch is in flight. After an error no
    /// disk is exchanged.
    pub fn exchange(&mut self) -> Result<()> {
        self.done(&DiskRequest::Exchange, ANSWER_TIMEOUT)?;
        std::mem::swap(&mut self.specs, &mut self.staged);
        Ok(())
    }

    /// Closes the staged disks and returns their specs. Their overlays are unlocked. Errors: the
    /// server has ended or does not answer.
    pub fn dismiss(&mut self) -> Result<Vec<DiskSpec>> {
        self.done(&DiskRequest::Dismiss, ANSWER_TIMEOUT)?;
        Ok(std::mem::take(&mut self.staged))
    }

    /// The state of the server. Errors: the server has ended or does not answer.
    pub fn stats(&mut self) -> Result<ServerStats> {
        match self.ask(&DiskRequest::Stats, ANSWER_TIMEOUT)? {
            DiskResponse::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the server: disconnects the remaining clients and syncs all data. Then the overlays are
    /// unlocked. Errors: a sync failed; the server does not answer.
    pub fn end(mut self) -> Result<()> {
        let ended = self.done(&DiskRequest::End, SYNC_TIMEOUT);
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < deadline {
            if !self.is_alive() {
                return ended;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        // The server has synced, or failed to. Killing it loses no data.
        let _ = self.child.kill();
        let _ = self.child.wait();
        ended
    }

    fn done(&mut self, request: &DiskRequest, timeout: Duration) -> Result<()> {
        self.ask(request, timeout).and_then(is_done)
    }

    fn ask(&mut self, request: &DiskRequest, timeout: Duration) -> Result<DiskResponse> {
        self.wait_for_cut();
        self.send(request, timeout)?;
        self.receive()
    }

    /// Sends a request and sets the time limit of its response.
    fn send(&mut self, request: &DiskRequest, timeout: Duration) -> Result<()> {
        let limit = |e| Error::io("the process that serves the disks", "bound the wait for")(e);
        self.control.set_read_timeout(Some(timeout)).map_err(limit)?;
        self.control.set_write_timeout(Some(timeout)).map_err(limit)?;
        frame::send(&self.control, request).map_err(|error| self.lost(error))
    }

    fn receive(&mut self) -> Result<DiskResponse> {
        match frame::receive(&self.control) {
            Ok(Some(DiskResponse::Failed { problem, disk_full: true, .. })) => {
                Err(Error::ServerFull { problem })
            }
            Ok(Some(DiskResponse::Failed { problem, fix, disk_full: false })) => {
                Err(Error::Server { problem, fix })
            }
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(Error::Server { problem: "it has ended".into(), fix: None }),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// A late response would be taken for the response to the next request, so the connection ends.
    fn lost(&self, error: Error) -> Error {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        error
    }
}

fn is_done(response: DiskResponse) -> Result<()> {
    match response {
        DiskResponse::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn command_name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn unexpected(response: &DiskResponse) -> Error {
    let mut response = format!("{response:?}");
    response.truncate(response.floor_char_boundary(100));
    Error::protocol("the process that serves the disks", format!("it answered {response}"))
}

/// The extents of an epoch, fetched some thousand at a time.
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
