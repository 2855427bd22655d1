//! The witness: a client that asks it, and the server.
//!
//! ```text
//!   node ──WitnessRequest, by TLS──▶ witness ──the state is unchanged──▶ WitnessReply
//!                                       │                                    ▲
//!                                       └──changed──▶ DIR/witness.state ─────┘
//! ```
//!
//! Invariants: an answer leaves after the state that it tells is durable: written to a new file,
//! synced, and renamed. One process at a time has the directory: two would forget each other's
//! answers, and two hosts could run one VM.

use super::frames::FrameKind;
use crate::directory_lock::lock_directory;
use crate::error::{Error, Result};
use crate::event::{FailoverEvent, SharedFailoverEventSink};
use keyframe_link::{Channel, FrameBuffer, Party};
use keyframe_locks::IgnorePoison;
use keyframe_replication::{Witness, WitnessReply, WitnessRequest};
use keyframe_units::error_chain;
use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The answer of the witness to a request. Without an answer the witness may still have granted the
/// request.
pub enum WitnessAnswer {
    /// The witness has answered.
    Answered(WitnessReply),
    /// No answer came; `sent` is true if the request may have arrived.
    Lost {
        /// True if the request may have arrived.
        sent: bool,
    },
}

/// The longest time of each step of a request.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Clients that are served at once.
const CLIENTS_MAX: usize = 64;
const LOOK_EVERY: Duration = Duration::from_millis(100);
const STATE: &str = "witness.state";
const STATE_BYTES_MAX: u64 = 16 << 20;

/// Sends `request` to the witness at `address`, waits for its answer, and returns it. Returns
/// [`WitnessAnswer::Lost`] if the connection cannot be made or breaks, or if no valid answer comes
/// within 2 s.
pub fn ask(party: &Party, address: SocketAddr, request: WitnessRequest) -> WitnessAnswer {
    let Ok(channel) = party.connect(address, TIMEOUT) else {
        return WitnessAnswer::Lost { sent: false };
    };
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    if channel.send(FrameKind::Core as u8, &[&bytes]).is_err() {
        return WitnessAnswer::Lost { sent: true };
    }
    let reply = channel.receive(&mut FrameBuffer::default(), TIMEOUT).ok().flatten();
    match reply.and_then(|frame| WitnessReply::decode(&frame.payload).ok()) {
        Some(reply) => WitnessAnswer::Answered(reply),
        None => WitnessAnswer::Lost { sent: true },
    }
}

/// A witness, which keeps its state in a directory.
pub struct WitnessServer {
    state: Mutex<Witness>,
    folder: PathBuf,
    party: Party,
    events: SharedFailoverEventSink,
    _lock: File,
}

impl WitnessServer {
    /// Opens a witness that keeps its state in the directory `folder`, locks the directory until
    /// the witness is dropped, and reads the state. `events` receives the errors of
    /// [`Self::serve`].
    ///
    /// Errors: [`Error::WitnessRuns`] if another witness has the directory; [`Error::Io`] if the
    /// directory cannot be created or locked; [`Error::WitnessState`] if the state cannot be read
    /// or is damaged.
    pub fn open(folder: &Path, party: Party, events: SharedFailoverEventSink) -> Result<Self> {
        let path = folder.join(STATE);
        let bad = |problem| Error::WitnessState { path: path.clone(), problem };
        let lock = lock_directory(folder)?;
        let lock = lock.ok_or_else(|| Error::WitnessRuns(folder.to_owned()))?;
        let state = match std::fs::metadata(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Witness::default(),
            Err(e) => return Err(bad(e.to_string())),
            Ok(known) if known.len() > STATE_BYTES_MAX => return Err(bad("it is too long".into())),
            Ok(_) => {
                let bytes = std::fs::read(&path).map_err(|e| bad(e.to_string()))?;
                Witness::decode(&bytes).map_err(|e| bad(error_chain(&e)))?
            }
        };
        let (state, folder) = (Mutex::new(state), folder.to_owned());
        Ok(Self { state, folder, party, events, _lock: lock })
    }

    /// Returns the number of protected VMs that the witness knows.
    pub fn groups(&self) -> usize {
        self.state.lock().ignore_poison().groups().count()
    }

    /// Answers the requests that arrive at `listener` until `stop` is set, of up to 64 clients at
    /// once. Error: [`Error::Io`] if `listener` cannot be used.
    pub fn serve(self: &Arc<Self>, listener: &TcpListener, stop: &AtomicBool) -> Result<()> {
        let clients = Arc::new(AtomicUsize::new(0));
        listener.set_nonblocking(true).map_err(|e| Error::io("listen", e))?;
        while !stop.load(Ordering::Relaxed) {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(LOOK_EVERY / 20);
                continue;
            };
            if clients.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
                clients.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (server, counted) = (Arc::clone(self), Arc::clone(&clients));
            let spawned =
                std::thread::Builder::new().name("witness-client".into()).spawn(move || {
                    let served = stream.set_nonblocking(false).ok().and_then(|()| {
                        let channel = server.party.accept(stream, TIMEOUT).ok()?;
                        server.answer(&channel)
                    });
                    // A client without an answer asks again.
                    let _ = served;
                    counted.fetch_sub(1, Ordering::Relaxed);
                });
            drop(spawned);
        }
        Ok(())
    }

    fn answer(&self, channel: &Channel) -> Option<()> {
        let frame = channel.receive(&mut FrameBuffer::default(), TIMEOUT).ok()??;
        let request = WitnessRequest::decode(&frame.payload).ok()?;
        let reply = {
            let mut state = self.state.lock().ignore_poison();
            let mut next = state.clone();
            let (reply, changed) = next.handle(request);
            if changed {
                if let Err(error) = self.keep(&next) {
                    self.events.failover_event(&FailoverEvent::WitnessSilent(error));
                    return None;
                }
                *state = next;
            }
            reply
        };
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        channel.send(FrameKind::Core as u8, &[&bytes]).ok()?;
        // The client closes the connection after it has read the answer.
        let _ = channel.receive(&mut FrameBuffer::default(), TIMEOUT);
        Some(())
    }

    fn keep(&self, state: &Witness) -> Result<()> {
        let (path, fresh) = (self.folder.join(STATE), self.folder.join("witness.state.new"));
        let mut bytes = Vec::new();
        state.encode(&mut bytes);
        let written = File::create(&fresh)
            .and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()))
            .and_then(|()| std::fs::rename(&fresh, &path))
            .and_then(|()| File::open(&self.folder)?.sync_all());
        written.map_err(|e| Error::file("write", &path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_link::SharedKey;
    use keyframe_units::NoEvents;

    #[test]
    fn a_directory_has_one_witness_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let party = Party::new(&SharedKey::of(&[7; 32]).unwrap()).unwrap();
        let open = || WitnessServer::open(dir.path(), party.clone(), Arc::new(NoEvents));
        let first = open().unwrap();
        assert!(matches!(open(), Err(Error::WitnessRuns(_))));
        drop(first);
        assert_eq!(open().unwrap().groups(), 0);
    }
}
