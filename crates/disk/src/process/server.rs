//! The process that serves the disks: it handles the engine's requests.

use super::heir::HeirSocket;
use super::{
    DISKS_MAX, DiskRequest, DiskResponse, DiskSpec, DiskStats, EXTENTS_MAX, ServerStats, frame,
};
use crate::disk::Stack;
use crate::lock::ImageLock;
use crate::nbd::{NbdExport, NbdServer};
use crate::{BLOCK, Base, Disk, DiskEpoch, Error, Layer, Result};
use keyframe_kernel::priority;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The time that a server without an engine waits for a first client: QEMU may be starting.
const FIRST_CLIENT: Duration = Duration::from_secs(10);
/// The interval at which such a server checks whether its last client has disconnected.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Opens the layer that a spec names.
type OpenLayer<'a> = &'a dyn Fn(&str) -> Result<Box<dyn Layer>>;

/// Serves disks on the calling thread, for the engine at the other end of `control`. Returns when
/// the engine requests the end. If the engine has gone, returns when the last client has
/// disconnected.
///
/// `open_layer` opens the layer that a [`DiskSpec`] names. If a disk cannot be opened, the function
/// tells the engine so and returns without an error. Errors: the last sync failed;
/// [`Error::Protocol`] if the engine's first message is malformed; [`Error::Io`] if that message
/// cannot be read, or if the response to it or to the request for the end cannot be sent.
pub fn serve(
    control: &UnixStream,
    open_layer: impl Fn(&str) -> Result<Box<dyn Layer>>,
) -> Result<()> {
    let Some(request) = frame::receive(control)? else { return Ok(()) };
    let opened = match request {
        DiskRequest::Open { socket, specs, epochs_after } => frame::receive_listener(control)
            .and_then(|listener| {
                let (exports, locks) = open(&specs, &open_layer)?;
                let number = |disk: &Disk| disk.stack().overlay.number_epochs_after(epochs_after);
                for export in &exports {
                    number(&export.disk);
                }
                let server = NbdServer::serve(&socket, listener, exports.clone())?;
                sync_recovered(&exports)?;
                Ok((server, exports, locks, socket, overlays(&specs)))
            }),
        _ => Err(Error::protocol("the engine", "its first request does not open the disks")),
    };
    match opened {
        Ok((server, exports, locks, socket, overlays)) => {
            let (staged, open_layer) = (None, &open_layer as OpenLayer<'_>);
            let serving = Serving { server, exports, overlays, socket, staged, open_layer };
            let served = serving.run(control);
            drop(locks);
            served
        }
        Err(error) => frame::send(control, &failed(&error)),
    }
}

/// Makes durable what the process before has acknowledged, on a thread, because the guest waits for
/// its disks. Only a flush that was acknowledged in a pause may not be durable yet. Error: the
/// thread cannot be started.
fn sync_recovered(exports: &[NbdExport]) -> Result<()> {
    let exports = exports.to_vec();
    let sync = move || {
        for export in exports {
            // If this fails, the guest's next flush fails too.
            let _ = export.disk.sync();
        }
    };
    let thread = std::thread::Builder::new().name("disk-sync".into()).spawn(sync);
    thread.map(drop).map_err(Error::io("the recovered disks", "start the syncing thread of"))
}

fn open(
    specs: &[DiskSpec],
    open_layer: OpenLayer<'_>,
) -> Result<(Vec<NbdExport>, Vec<Option<ImageLock>>)> {
    let unique: BTreeSet<&str> = specs.iter().map(|spec| spec.export.as_str()).collect();
    if unique.len() != specs.len() || specs.len() > DISKS_MAX || unique.contains("") {
        let problem = format!(
            "{} disks: names must differ, and there may be at most {DISKS_MAX}",
            specs.len()
        );
        return Err(Error::protocol("the engine", problem));
    }
    let open = |spec: &DiskSpec| {
        let (base, lock) = if let Some(bytes) = spec.blank_bytes {
            (Base::blank(bytes)?, None)
        } else {
            let lock = ImageLock::take(&spec.base, spec.format)?;
            (Base::open(&spec.base, spec.format)?, Some(lock))
        };
        let layer = spec.layer.as_deref().map(open_layer).transpose()?;
        let disk = Arc::new(Disk::create(&spec.overlay, base, layer, spec.lasting())?);
        Ok((NbdExport { name: spec.export.clone(), disk }, lock))
    };
    let opened = specs.iter().map(open).collect::<Result<Vec<_>>>()?;
    Ok(opened.into_iter().unzip())
}

pub(super) fn failed(error: &Error) -> DiskResponse {
    DiskResponse::Failed {
        problem: error.to_string(),
        fix: error.fix(),
        disk_full: error.is_disk_full(),
    }
}

pub(super) struct Serving<'a> {
    server: NbdServer,
    exports: Vec<NbdExport>,
    /// The overlays of the disks.
    overlays: Vec<PathBuf>,
    /// The socket of the NBD server.
    socket: PathBuf,
    staged: Option<StagedDisks>,
    open_layer: OpenLayer<'a>,
}

/// The disks that are open and not served.
struct StagedDisks {
    /// One for each export.
    stacks: Vec<Arc<Stack>>,
    /// Their overlays.
    overlays: Vec<PathBuf>,
    /// Where the heir of a dead engine asks.
    heir: HeirSocket,
}

impl Serving<'_> {
    fn run(mut self, control: &UnixStream) -> Result<()> {
        let disk_bytes = self.exports.iter().map(|export| export.disk.disk_bytes()).collect();
        let mut sent = frame::send(control, &DiskResponse::Opened { disk_bytes });
        while sent.is_ok() {
            match frame::receive(control) {
                Ok(Some(DiskRequest::End)) => return self.end(Some(control)),
                Ok(Some(request)) => {
                    sent = frame::send(
                        control,
                        &self.handle_request(&request).unwrap_or_else(|e| failed(&e)),
                    );
                }
                // The engine has gone, or breaks the protocol. The server goes on for the guest.
                Ok(None) | Err(_) => break,
            }
        }
        self.without_engine()
    }

    fn end(self, control: Option<&UnixStream>) -> Result<()> {
        self.server.end();
        let synced = each(&self.exports, Disk::sync);
        // The overlays are unlocked before the response, because the engine may open them next.
        drop((self.exports, self.staged));
        if let Some(control) = control {
            frame::send(control, &synced.as_ref().map_or_else(failed, |()| DiskResponse::Done))?;
        }
        synced
    }

    fn without_engine(mut self) -> Result<()> {
        priority::restore_all_threads();
        for export in &self.exports {
            // If this sync fails, the guest's next flush fails too.
            let _ = export.disk.settled();
            export.disk.stack().overlay.release_all();
        }
        let began = Instant::now();
        loop {
            let traffic = self.server.traffic();
            let begun =
                traffic.served.load(Ordering::Acquire) > 0 || began.elapsed() >= FIRST_CLIENT;
            if begun && traffic.clients.load(Ordering::Acquire) == 0 {
                return self.end(None);
            }
            let heir = self.staged.as_ref().and_then(|staged| staged.heir.accept());
            if let Some(heir) = heir {
                self.answer_heir(&heir);
                continue;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub(super) fn handle_request(&mut self, request: &DiskRequest) -> Result<DiskResponse> {
        match request {
            DiskRequest::Prepare => each(&self.exports, Disk::sync)?,
            DiskRequest::Pause { limit_ms } => {
                // The pause waits for QEMU's flushes. If a thread is not scheduled at once, the
                // pause grows by milliseconds.
                priority::raise_all_threads();
                self.exports
                    .iter()
                    .for_each(|export| export.disk.pause(Duration::from_millis(*limit_ms)));
            }
            DiskRequest::Settled => each(&self.exports, Disk::settled)?,
            DiskRequest::Resumed => {
                priority::restore_all_threads();
                self.server.affinity().renew();
            }
            DiskRequest::AnswerOn { core } => self.server.affinity().set(*core),
            DiskRequest::Cut => return self.cut(),
            DiskRequest::Pages { disk, epoch, from } => {
                let export = self.exports.get(*disk);
                let export = export
                    .ok_or_else(|| Error::protocol("the engine", format!("no disk {disk}")))?;
                let (extents, next) =
                    export.disk.stack().overlay.pages(*epoch, *from, EXTENTS_MAX)?;
                return Ok(DiskResponse::Pages { extents, next });
            }
            DiskRequest::Release { epochs } => {
                self.of_each(epochs, |disk, epoch| disk.stack().overlay.release(epoch))?;
            }
            DiskRequest::GiveBack { epochs } => {
                self.of_each(epochs, |disk, epoch| disk.stack().overlay.give_back(epoch))?;
            }
            DiskRequest::Stage { specs } => {
                let (stacks, overlays) = (self.stage(specs)?, overlays(specs));
                self.staged = None;
                let heir = HeirSocket::beside(&self.socket)?;
                self.staged = Some(StagedDisks { stacks, overlays, heir });
            }
            DiskRequest::Exchange => self.exchange()?,
            DiskRequest::Dismiss => self.staged = None,
            DiskRequest::Staging => return Ok(self.staging()),
            DiskRequest::Stats => return Ok(DiskResponse::Stats(self.stats())),
            DiskRequest::Open { .. } | DiskRequest::End => {
                return Err(Error::protocol("the engine", "the disks are open already"));
            }
        }
        Ok(DiskResponse::Done)
    }

    fn stage(&self, specs: &[DiskSpec]) -> Result<Vec<Arc<Stack>>> {
        let names = |of: &mut dyn Iterator<Item = &str>| of.map(str::to_owned).collect::<Vec<_>>();
        let served = names(&mut self.exports.iter().map(|export| export.name.as_str()));
        if names(&mut specs.iter().map(|spec| spec.export.as_str())) != served {
            return Err(Error::protocol(
                "the engine",
                "the staged disks have other exports than those that are served",
            ));
        }
        let open = |(spec, export): (&DiskSpec, &NbdExport)| {
            let base = match spec.blank_bytes {
                Some(bytes) => Base::blank(bytes)?,
                None => Base::open(&spec.base, spec.format)?,
            };
            let (is, wanted) = (base.disk_bytes(), export.disk.disk_bytes());
            if is != wanted {
                let problem =
                    format!("{} has {is} bytes, but the disk has {wanted}", spec.base.display());
                return Err(Error::protocol("the engine", problem));
            }
            let layer = spec.layer.as_deref().map(self.open_layer).transpose()?;
            Stack::create(&spec.overlay, base, layer, spec.lasting()).map(Arc::new)
        };
        specs.iter().zip(&self.exports).map(open).collect()
    }

    /// Exchanges all disks, or none. Error: [`Error::Protocol`] if an epoch is in flight, or if no
    /// disks are staged.
    fn exchange(&mut self) -> Result<()> {
        let in_flight = self.exports.iter().any(|export| export.disk.size().in_flight > 0);
        let Some(staged) = self.staged.as_mut().filter(|_| !in_flight) else {
            let problem =
                if in_flight { "epochs of the disks are in flight" } else { "no disks are staged" };
            return Err(Error::protocol("the engine", problem));
        };
        for (export, stack) in self.exports.iter().zip(&mut staged.stacks) {
            export.disk.exchange(stack);
        }
        std::mem::swap(&mut self.overlays, &mut staged.overlays);
        Ok(())
    }

    fn staging(&self) -> DiskResponse {
        let dirty_blocks = self.exports.iter().map(|export| export.disk.size().dirty_blocks);
        DiskResponse::Staging {
            is_staged: self.staged.is_some(),
            served: self.overlays.clone(),
            written_bytes: dirty_blocks.sum::<u64>() * BLOCK,
        }
    }

    /// Cuts all disks. If a cut fails, the epochs of the others are given back. Errors: those of
    /// [`Overlay::cut`](crate::Overlay::cut).
    fn cut(&self) -> Result<DiskResponse> {
        let mut epochs = Vec::with_capacity(self.exports.len());
        for export in &self.exports {
            match export.disk.stack().overlay.cut() {
                Ok(epoch) => epochs.push(epoch),
                Err(error) => {
                    for (export, epoch) in self.exports.iter().zip(epochs) {
                        export.disk.stack().overlay.give_back(epoch)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(DiskResponse::Cut { epochs })
    }

    fn of_each(
        &self,
        epochs: &[DiskEpoch],
        mut action: impl FnMut(&Disk, DiskEpoch) -> Result<()>,
    ) -> Result<()> {
        if epochs.len() != self.exports.len() {
            let problem = format!("{} epochs for {} disks", epochs.len(), self.exports.len());
            return Err(Error::protocol("the engine", problem));
        }
        // A failure of one disk must not keep the others from being handled.
        let mut result = Ok(());
        for (export, epoch) in self.exports.iter().zip(epochs) {
            result = result.and(action(&export.disk, *epoch));
        }
        result
    }

    fn stats(&self) -> ServerStats {
        let traffic = self.server.traffic();
        let disks = self.exports.iter().map(|export| {
            let size = export.disk.size();
            DiskStats {
                export: export.name.clone(),
                disk_bytes: export.disk.disk_bytes(),
                data_bytes: size.data_bytes,
                free_bytes: size.free_bytes,
                extents: size.entries as u64,
                dirty_blocks: size.dirty_blocks,
                in_flight: size.in_flight as u64,
                syncs: size.syncs,
            }
        });
        ServerStats {
            disks: disks.collect(),
            clients: traffic.clients.load(Ordering::Relaxed) as u64,
            requests: traffic.requests.load(Ordering::Relaxed),
            read_bytes: traffic.read_bytes.load(Ordering::Relaxed),
            written_bytes: traffic.written_bytes.load(Ordering::Relaxed),
            zeroed_bytes: traffic.zeroed_bytes.load(Ordering::Relaxed),
            discarded_bytes: traffic.discarded_bytes.load(Ordering::Relaxed),
            flushes: traffic.flushes.load(Ordering::Relaxed),
        }
    }
}

fn overlays(specs: &[DiskSpec]) -> Vec<PathBuf> {
    specs.iter().map(|spec| spec.overlay.clone()).collect()
}

/// Performs `action` on every disk, and returns the first error.
fn each(exports: &[NbdExport], action: impl Fn(&Disk) -> Result<()>) -> Result<()> {
    exports.iter().map(|export| action(&export.disk)).fold(Ok(()), Result::and)
}
