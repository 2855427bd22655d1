//! The engine's handle to the process that serves the disks.

use super::connection::{Connection, OPEN_TIMEOUT, is_done, unexpected};
use super::supervisor::{ServerObserver, Shared, State, Supervisor};
use super::{DiskRequest, DiskResponse, DiskSpec, ServerStats};
use crate::{DiskBlock, DiskEpoch, Error, Extent, Result, SlotFile};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
/// If the server ends without an order, it is started again on a thread of this handle. Until then
/// requests fail with [`Error::ServerEnded`], and the guest's requests wait. The epochs of the old
/// server are void: the next cut covers all blocks of the overlays.
///
/// A request that the server refuses fails with [`Error::Server`], or with [`Error::ServerFull`] if
/// no space is left. A server that does not answer within 10 s (2 min if it opens or syncs) is
/// killed, and the request fails with [`Error::ServerEnded`].
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
    shared: Arc<Shared>,
    socket: PathBuf,
    specs: Vec<DiskSpec>,
    disk_bytes: Vec<u64>,
    /// The other end of the supervisor's `until`, and its thread.
    supervisor: Option<(UnixStream, JoinHandle<()>)>,
}

/// The epochs of all disks, and whether all acknowledged data is durable.
pub(super) type CutAnswers = (Result<Vec<DiskEpoch>>, Result<()>);

impl Disks {
    /// Starts the server as `command`, which must call [`serve`](super::serve) with its standard
    /// input. Starts it again whenever it ends without an order. Returns when the server listens on
    /// `socket`.
    ///
    /// Errors: [`Error::Io`] if a file exists at `socket`, or if the socket, the process or a
    /// thread cannot be created; [`Error::Server`] if a disk of `specs` cannot be opened;
    /// [`Error::ServerEnded`].
    pub fn spawn(mut command: Command, socket: &Path, specs: &[DiskSpec]) -> Result<Self> {
        let name = socket.display().to_string();
        let listener = UnixListener::bind(socket).map_err(Error::io(&name, "listen on"))?;
        let place = (socket, &listener);
        let started = Connection::start(&mut command, place, specs, DiskEpoch(0));
        let (connection, disk_bytes) = started.inspect_err(|_| {
            let _ = std::fs::remove_file(socket);
        })?;
        let shared = Arc::new(Shared::new(connection, specs.to_vec()));
        let (ours, until) = UnixStream::pair().map_err(Error::io(&name, "watch the server of"))?;
        let (socket, for_thread) = (socket.to_owned(), Arc::clone(&shared));
        let supervisor =
            Supervisor { shared: for_thread, command, socket: socket.clone(), listener, until };
        let thread = std::thread::Builder::new()
            .name("disk-supervisor".into())
            .spawn(move || supervisor.run())
            .map_err(Error::io(name, "watch the server of"))?;
        let (specs, supervisor) = (specs.to_vec(), Some((ours, thread)));
        Ok(Self { shared, socket, specs, disk_bytes, supervisor })
    }

    /// Registers the function `observer` in place of an earlier one. When the server has ended
    /// without an order, a thread of the handle calls it: before each wait for the next attempt to
    /// start a server, and once a new server serves the disks.
    pub fn observe(&self, observer: ServerObserver) {
        self.shared.lock().observer = Some(observer);
    }

    /// Returns the process id of the server. A server that was started again has another one.
    pub fn pid(&self) -> u32 {
        self.shared.lock().pid
    }

    /// Returns the specs of the disks. Lists with one entry for each disk are in this order.
    pub fn specs(&self) -> &[DiskSpec] {
        &self.specs
    }

    /// Returns the socket on which the disks are served.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the specs of the staged disks; none if no disks are staged.
    pub fn staged_specs(&self) -> Vec<DiskSpec> {
        self.shared.lock().staged.clone()
    }

    /// Returns the size of each disk in bytes, in the order of [`Self::specs`].
    pub fn disk_bytes(&self) -> &[u64] {
        &self.disk_bytes
    }

    /// Makes written data durable while the guest runs, so that the pause has little to sync.
    /// Errors: [`Error::Server`] or [`Error::ServerFull`] if a sync failed; the server has ended or
    /// does not answer.
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

    /// Cuts all disks. Returns the epoch of each disk, in the order of [`Self::specs`]. The caller
    /// has stopped the VM before, if the cut is for a checkpoint. Errors: [`Error::Server`] if too
    /// many epochs are in flight or a sync failed earlier; the server has ended or does not answer.
    pub fn cut(&mut self) -> Result<Vec<DiskEpoch>> {
        let mut state = self.shared.lock();
        let connection = state.connection()?;
        let response = connection.ask(&DiskRequest::Cut, ANSWER_TIMEOUT)?;
        connection.epochs(response)
    }

    /// Sends the requests of [`Self::cut`] and [`Self::settled`] without waiting for the responses,
    /// so that the server works while the engine reads device state and RAM. [`Self::finish_cut`]
    /// returns the responses. Gives back the epochs of an earlier call whose responses were not
    /// taken. Errors: those of [`Self::give_back`]; the server has ended or does not take the
    /// requests.
    pub fn begin_cut(&mut self) -> Result<()> {
        if let Some((Ok(epochs), _)) = self.finish_cut() {
            // The caller did not take these epochs, so the new cut covers their blocks.
            self.give_back(&epochs)?;
        }
        let mut state = self.shared.lock();
        let connection = state.connection()?;
        connection.send(&DiskRequest::Cut, ANSWER_TIMEOUT)?;
        connection.set_cut_begun();
        connection.send(&DiskRequest::Settled, SYNC_TIMEOUT)
    }

    /// Waits for the responses to [`Self::begin_cut`] and returns both: the epochs of the disks
    /// with the errors of [`Self::cut`], and the result of [`Self::settled`]. If the sync failed,
    /// the VM must not run. Returns `None` if there was no [`Self::begin_cut`], or if the handle
    /// knows already that its server has ended.
    pub fn finish_cut(&mut self) -> Option<CutAnswers> {
        // A server that has ended meanwhile has no answers.
        self.shared.lock().connection().ok()?.take_cut()
    }

    /// Waits until all data that was acknowledged since [`Self::pause`] is durable, and ends the
    /// pause. The caller calls this before it resumes the VM, also after a failed checkpoint.
    ///
    /// Errors: [`Error::Server`] or [`Error::ServerFull`] if the sync failed, and the VM must not
    /// run (after [`Error::ServerFull`] the caller may try again once there is space); the server
    /// has ended or does not answer.
    pub fn settled(&mut self) -> Result<()> {
        self.done(&DiskRequest::Settled, SYNC_TIMEOUT)
    }

    /// Tells the server that the VM runs, or was not stopped after all. The server's threads get
    /// their ordinary priority back. Errors: the server has ended or does not answer.
    pub fn resumed(&mut self) -> Result<()> {
        self.done(&DiskRequest::Resumed, ANSWER_TIMEOUT)
    }

    /// Has the server answer the guest's requests on processor core `core`, on which all threads of
    /// QEMU run. The server's threads have a higher priority there, so an answer is complete before
    /// the guest runs again (see the module `nbd::affinity`). Errors: the server has ended or does
    /// not answer.
    pub fn answer_on(&mut self, core: u32) -> Result<()> {
        let request = DiskRequest::AnswerOn { core };
        self.done_and(&request, ANSWER_TIMEOUT, |state| state.core = Some(core))
    }

    /// Returns all extents of `epoch` of the disk at `index` in [`Self::specs`], in rising order:
    /// the blocks written since the previous cut, and those of epochs that were given back. The
    /// iterator's errors are those of [`Self::pages_from`].
    pub fn pages(&mut self, index: usize, epoch: DiskEpoch) -> Pages<'_> {
        Pages { disks: self, index, epoch, next: Some(DiskBlock(0)), ready: Vec::new().into_iter() }
    }

    /// Returns some thousand extents of [`Self::pages`] from block `from` on, and the block at
    /// which to continue: `None` after the last one. It is for a caller that shares this handle
    /// with others.
    ///
    /// Errors: [`Error::Server`] if there is no such disk, or the epoch is not in flight;
    /// [`Error::CutLost`] if the server that cut it has ended; the server has ended or does not
    /// answer.
    pub fn pages_from(
        &mut self,
        index: usize,
        epoch: DiskEpoch,
        from: DiskBlock,
    ) -> Result<(Vec<Extent>, Option<DiskBlock>)> {
        self.require_current(&[epoch])?;
        match self.ask(&DiskRequest::Pages { disk: index, epoch, from }, ANSWER_TIMEOUT)? {
            // A server that goes backwards would never end.
            DiskResponse::Pages { extents, next } if next.is_none_or(|next| next > from) => {
                Ok((extents, next))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Opens the data file of the disk at `index` in [`Self::specs`], so that the caller reads
    /// slots without a request to the server. Errors: [`Error::Protocol`] if there is no such disk;
    /// [`Error::Io`] if the file cannot be opened.
    pub fn slot_file(&self, index: usize) -> Result<SlotFile> {
        let spec = self
            .specs
            .get(index)
            .ok_or_else(|| Error::protocol("the engine", format!("no disk {index}")))?;
        SlotFile::open(&spec.overlay)
    }

    /// Checks that no server was started after the one that cut `epochs`. The caller checks this
    /// after it has read the slots of an epoch, because a new server may have reused them. Error:
    /// [`Error::CutLost`] if the server that cut all of them is known to have ended.
    pub fn require_current(&self, epochs: &[DiskEpoch]) -> Result<()> {
        if self.shared.lock().are_void(epochs) { Err(Error::CutLost) } else { Ok(()) }
    }

    /// Releases the epochs of a sealed checkpoint, one of each disk. Does nothing if the server
    /// that cut them has ended. Error: [`Error::Server`] if one of them is not in flight.
    pub fn release(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.unless_void(epochs, &DiskRequest::Release { epochs: epochs.into() })
    }

    /// Gives back the epochs of a failed checkpoint, one of each disk: the next cut covers their
    /// blocks too. Does nothing if the server that cut them has ended, because the next cut then
    /// covers all blocks. Error: [`Error::Server`] if one of them is not in flight.
    pub fn give_back(&mut self, epochs: &[DiskEpoch]) -> Result<()> {
        self.unless_void(epochs, &DiskRequest::GiveBack { epochs: epochs.into() })
    }

    /// Sends `request` about `epochs`. Does nothing if the server that cut them has ended: then it
    /// has no epochs, and the next cut covers all blocks. Error: the server refuses the request.
    fn unless_void(&mut self, epochs: &[DiskEpoch], request: &DiskRequest) -> Result<()> {
        if self.shared.lock().are_void(epochs) {
            return Ok(());
        }
        match self.done(request, ANSWER_TIMEOUT) {
            Err(Error::ServerEnded) => Ok(()),
            other => other,
        }
    }

    /// Opens the disks of `specs` without serving them, for a later [`Self::exchange`]. Their
    /// exports and sizes must be those of the served disks, in the same order. Errors:
    /// [`Error::Server`] if they are not, or if a disk cannot be opened; the server has ended or
    /// does not answer.
    pub fn stage(&mut self, specs: &[DiskSpec]) -> Result<()> {
        let request = DiskRequest::Stage { specs: specs.to_vec() };
        self.done_and(&request, OPEN_TIMEOUT, |state| state.staged = specs.to_vec())
    }

    /// Serves the staged disks, and stages those that were served. Clients stay connected and see
    /// the new content. The VM must be paused. After an error no disk is exchanged. Errors:
    /// [`Error::Server`] if no disks are staged, or an epoch is in flight; the server has ended or
    /// does not answer.
    pub fn exchange(&mut self) -> Result<()> {
        self.specs = self.done_and(&DiskRequest::Exchange, ANSWER_TIMEOUT, |state| {
            std::mem::swap(&mut state.specs, &mut state.staged);
            state.specs.clone()
        })?;
        Ok(())
    }

    /// Closes the staged disks, unlocks their overlays, and returns their specs, which are empty if
    /// no disks were staged. Errors: the server has ended or does not answer.
    pub fn dismiss(&mut self) -> Result<Vec<DiskSpec>> {
        self.done_and(&DiskRequest::Dismiss, ANSWER_TIMEOUT, |state| {
            std::mem::take(&mut state.staged)
        })
    }

    /// Returns the counters of the server and its disks. Errors: the server has ended or does not
    /// answer.
    pub fn stats(&mut self) -> Result<ServerStats> {
        match self.ask(&DiskRequest::Stats, ANSWER_TIMEOUT)? {
            DiskResponse::Stats(stats) => Ok(stats),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends the server. The server disconnects the remaining clients, syncs all data, and unlocks
    /// the overlays. Errors: [`Error::Server`] or [`Error::ServerFull`] if a sync failed;
    /// [`Error::ServerEnded`] if the server has ended already or does not answer.
    pub fn end(mut self) -> Result<()> {
        self.end_supervision();
        let ended = self.done(&DiskRequest::End, SYNC_TIMEOUT);
        let mut state = self.shared.lock();
        let child = &mut state.connection()?.child;
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < deadline {
            if !matches!(child.try_wait(), Ok(None)) {
                return ended;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        // The server has synced, or failed to. Killing it loses no data.
        let _ = child.kill();
        let _ = child.wait();
        ended
    }

    fn end_supervision(&mut self) {
        if let Some((until, thread)) = self.supervisor.take() {
            drop(until);
            let _ = thread.join();
        }
    }

    fn done(&mut self, request: &DiskRequest, timeout: Duration) -> Result<()> {
        self.ask(request, timeout).and_then(is_done)
    }

    /// Sends a request that returns nothing, and calls `record` with the shared state once the
    /// server has answered. The state stays locked in between: if the server ends just then, the
    /// supervisor starts the next one by the changed state. Returns the result of `record`.
    fn done_and<T>(
        &mut self,
        request: &DiskRequest,
        timeout: Duration,
        record: impl FnOnce(&mut State) -> T,
    ) -> Result<T> {
        let mut state = self.shared.lock();
        state.connection()?.ask(request, timeout).and_then(is_done)?;
        Ok(record(&mut state))
    }

    fn ask(&mut self, request: &DiskRequest, timeout: Duration) -> Result<DiskResponse> {
        self.shared.lock().connection()?.ask(request, timeout)
    }
}

/// An iterator over the extents of an epoch. It requests some thousand at a time from the server.
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
