//! A checkpoint server in the process of its clients, over a simulated medium, with a clock that the
//! test sets.

use super::*;
use keyframe_serve::{Refusal, RemoteWriterOptions, RemoteWriters, Reply, ServedFiles};
use keyframe_store_backend::ServedBackend;
use keyframe_store_backend::served::DirectServer;
use keyframe_store_backend::served::wire::{Answer, RefusalCode, Request};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The lease of writers, by the clock of the test.
pub const LEASE_MS: u64 = 1000;

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It arrives, and so does its answer.
    Arrives,
    /// It arrives twice, as one does whose answer was late.
    ArrivesTwice,
    /// It arrives, and its answer does not.
    AnswerLost,
    /// It does not arrive.
    Lost,
}

/// Decides about the messages of one client.
pub trait Network: Send + Sync + fmt::Debug {
    /// Returns what happens to the next message.
    fn fate(&self, request: &Request) -> Fate {
        let _ = request;
        Fate::Arrives
    }

    /// Called after each message.
    fn after(&self, request: &Request) {
        let _ = request;
    }
}

/// A network without faults.
#[derive(Debug)]
pub struct Calm;

impl Network for Calm {}

/// The server of one medium.
#[derive(Debug)]
pub struct DirectWriters {
    files: ServedFiles,
    pub writers: Arc<RemoteWriters>,
    clock: Arc<AtomicU64>,
}

impl DirectWriters {
    /// Starts a server. `open` makes the medium as a new process uses it, for one writer.
    pub fn start(
        medium: &FaultyBackend,
        open: impl Fn() -> FaultyBackend + Send + Sync + 'static,
    ) -> Arc<Self> {
        let clock = Arc::new(AtomicU64::new(1));
        let now = Arc::clone(&clock);
        let files: Arc<dyn Backend> = Arc::new(medium.process());
        let id = crate::id_on(&*files, Path::new("memory")).unwrap();
        let writers = Arc::new(RemoteWriters::new(RemoteWriterOptions {
            lease: Duration::from_millis(LEASE_MS),
            open: Box::new(move || Ok(Arc::new(open()))),
            settle: Box::new(|files, slot| {
                let settled = crate::settle_for(files.clone(), Path::new("memory"), slot);
                let failed = |e: Error| {
                    Refusal(RefusalCode::Failed, format!("{e}; {}", e.fix().unwrap_or_default()))
                };
                let torn = settled.map_err(failed)?;
                Ok(torn.into_iter().map(|torn| (torn.id.0, torn.problem)).collect())
            }),
            clock: Box::new(move || now.load(Ordering::Relaxed)),
        }));
        let files = ServedFiles::new(files, id).with_writers(Arc::clone(&writers));
        Arc::new(Self { files, writers, clock })
    }

    /// Lets `ms` milliseconds pass, and ends the writers whose lease is over.
    pub fn pass(&self, ms: u64) {
        self.clock.fetch_add(ms, Ordering::Relaxed);
        self.writers.expire();
    }

    /// The store as a client of this server opens it.
    pub fn client(self: &Arc<Self>, network: Arc<dyn Network>) -> Result<Store> {
        let link = Arc::new(Link { server: Arc::clone(self), network });
        let served = Arc::new(ServedBackend::of_direct(link));
        Store::open_on_with(served, Path::new("kf://test"), &|_| Ok(Some(encrypted::secret())))
    }

    pub fn answer(&self, request: &Request) -> Answer {
        let reply = match request {
            // Without a thread: the same happens each time.
            Request::Join { writer, holder } => {
                self.writers.join_at_once(*writer, holder).map(|granted| {
                    let bytes = serde_json::to_vec(&granted).unwrap();
                    Reply::Data { bytes, is_packed: false, share: None }
                })
            }
            other => self.files.answer(other),
        };
        match reply {
            Ok(Reply::Data { bytes, .. }) => Answer::Data(bytes),
            Ok(Reply::Same) => Answer::Same,
            Err(Refusal(code, said)) => Answer::Refused(code, said),
        }
    }
}

/// The connection of one client.
struct Link {
    server: Arc<DirectWriters>,
    network: Arc<dyn Network>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}

impl DirectServer for Link {
    fn answer(&self, request: &Request) -> io::Result<Answer> {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let arrived = Request::decode(&bytes[4..]).expect("a request");
        assert_eq!(arrived, *request);
        let fate = self.network.fate(request);
        let mut answer = None;
        if fate != Fate::Lost {
            answer = Some(self.server.answer(&arrived));
        }
        if fate == Fate::ArrivesTwice {
            let again = self.server.answer(&arrived);
            if matches!(request, Request::Write { .. }) {
                assert_eq!(Some(&again), answer.as_ref(), "an act was carried out twice");
            }
        }
        self.network.after(request);
        match answer.filter(|_| fate != Fate::AnswerLost) {
            Some(answer) => Ok(answer),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}
