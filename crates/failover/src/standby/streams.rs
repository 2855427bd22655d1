//! The data streams of a standby: batches in, whole epochs out.
//!
//! ```text
//!   channel s ─▶ thread: Batch ─▶ building ──Mark──▶ done ──taken, all streams at once──▶ applied ─▶ next batch
//! ```
//!
//! Invariants: an epoch is decoded after the epoch before it is applied, since its patches are
//! against that one. Data of a session that arrives before the session's start waits for it.

use super::super::frames::{FrameKind, unmarked};
use super::image::StandbyImage;
use keyframe_link::{Channel, FrameBuffer};
use keyframe_locks::IgnorePoison;
use keyframe_transfer::{EpochBuffer, EpochDecoder};
use keyframe_units::{Epoch, error_chain};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

const READ_WAIT: Duration = Duration::from_millis(200);
/// The longest time until the previous epoch is applied.
const APPLY_WAIT: Duration = Duration::from_secs(60);
/// The longest time until a session's start arrives: it comes by another connection than its data.
const SESSION_WAIT: Duration = Duration::from_secs(10);
/// Sessions whose data may still be on its way.
const PAST_MAX: usize = 64;

/// An event of one of the streams that carry pages.
pub enum StreamEvent {
    /// The stream with this number has received its part of this epoch.
    Marked { stream: usize, session: u64, epoch: Epoch },
    /// The stream has received malformed data; the text is the reason.
    Failed(String),
}

/// The pages of an epoch that one stream has received whole.
struct CompleteBuffer {
    session: u64,
    epoch: Epoch,
    buffer: EpochBuffer,
}

#[derive(Default)]
struct State {
    /// The session whose data is accepted.
    session: Option<u64>,
    /// The sessions before it.
    past: VecDeque<u64>,
    /// The number of the current connections.
    connection: u64,
    /// The number of times that received data was dropped.
    dropped: u64,
    building: Vec<EpochBuffer>,
    done: Vec<Option<CompleteBuffer>>,
}

/// The streams that carry a primary's pages. The pages of one epoch are kept until all streams have
/// received their part.
pub struct Streams {
    state: Mutex<State>,
    applied: Condvar,
    image: Arc<StandbyImage>,
}

impl Streams {
    /// Creates `streams` streams for the pages of `image`.
    pub fn new(streams: usize, image: Arc<StandbyImage>) -> Self {
        let state = State {
            session: None,
            past: VecDeque::new(),
            connection: 0,
            dropped: 0,
            building: (0..streams).map(|_| EpochBuffer::default()).collect(),
            done: (0..streams).map(|_| None).collect(),
        };
        Self { state: Mutex::new(state), applied: Condvar::new(), image }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    /// Returns the number of streams.
    pub fn len(&self) -> usize {
        self.lock().done.len()
    }

    /// Drops received data, and accepts only data of session number `session` from now on.
    pub fn receive(&self, session: u64) {
        self.discard();
        let mut state = self.lock();
        if let Some(old) = state.session.replace(session) {
            state.past.push_back(old);
            if state.past.len() > PAST_MAX {
                state.past.pop_front();
            }
        }
        // A stream may wait with its data.
        self.applied.notify_all();
    }

    /// Drops received data, and accepts only data from connections with the number `connection`
    /// from now on.
    pub fn connected(&self, connection: u64) {
        self.discard();
        self.lock().connection = connection;
        self.applied.notify_all();
    }

    /// Drops received data that [`Self::take`] has not returned.
    pub fn discard(&self) {
        let mut state = self.lock();
        state.dropped += 1;
        state.building.iter_mut().for_each(EpochBuffer::clear);
        state.done.iter_mut().for_each(|done| *done = None);
        self.applied.notify_all();
    }

    /// Returns the pages of an epoch that has arrived on all streams, one buffer for each stream.
    /// Returns `None` if it has not.
    pub fn take(&self, session: u64, epoch: Epoch) -> Option<Vec<EpochBuffer>> {
        let mut state = self.lock();
        let is = |done: &Option<CompleteBuffer>| {
            done.as_ref().is_some_and(|d| (d.session, d.epoch) == (session, epoch))
        };
        if !state.done.iter().all(is) {
            return None;
        }
        // The places stay taken until it is applied.
        let take = |done: &mut Option<CompleteBuffer>| {
            done.as_mut().map(|done| std::mem::take(&mut done.buffer)).unwrap_or_default()
        };
        Some(state.done.iter_mut().map(take).collect())
    }

    /// Records that the epoch of the last [`Self::take`] is applied, so that the streams may decode
    /// the next one.
    pub fn applied(&self) {
        self.lock().done.iter_mut().for_each(|done| *done = None);
        self.applied.notify_all();
    }

    /// Starts a thread that reads the stream with number `stream` from `channel`, until the
    /// connection breaks or `ends` is set. It passes events to `tell`. `connection` is the number
    /// of the connection.
    pub fn read(
        self: &Arc<Self>,
        (stream, connection): (usize, u64),
        channel: Channel,
        tell: impl Fn(StreamEvent) + Send + 'static,
        ends: Arc<AtomicBool>,
    ) {
        let streams = Arc::clone(self);
        let work = move || {
            let decoder = EpochDecoder::new(streams.image.len_pages());
            let mut input = FrameBuffer::default();
            while !ends.load(Ordering::Relaxed) {
                match channel.receive(&mut input, READ_WAIT) {
                    Ok(None) => {}
                    Ok(Some(frame)) => {
                        match streams.take_in(
                            (stream, connection),
                            frame.kind,
                            &frame.payload,
                            &decoder,
                        ) {
                            Ok(None) => {}
                            Ok(Some((session, epoch))) => {
                                tell(StreamEvent::Marked { stream, session, epoch });
                            }
                            Err(problem) => {
                                tell(StreamEvent::Failed(problem));
                                break;
                            }
                        }
                    }
                    Err(_) => break,
                }
            }
            channel.close();
        };
        // Without a thread the stream is never read, and the primary's epochs do not get through.
        let _ = std::thread::Builder::new().name("stream".into()).spawn(work);
    }

    fn take_in(
        &self,
        (stream, connection): (usize, u64),
        kind: u8,
        payload: &[u8],
        decoder: &EpochDecoder,
    ) -> Result<Option<(u64, Epoch)>, String> {
        let kind = FrameKind::of(kind).ok_or("a message that is none")?;
        let (session, epoch, rest) = unmarked(payload).ok_or("a message that is cut off")?;
        let epoch = Epoch(epoch);
        let unknown = |state: &mut State| {
            state.connection == connection
                && state.session != Some(session)
                && !state.past.contains(&session)
        };
        let waited = self.applied.wait_timeout_while(self.lock(), SESSION_WAIT, unknown);
        let (state, late) = waited.ignore_poison();
        if late.timed_out() {
            return Err(format!("data of session {session:016x}, which never began"));
        }
        let waits = |state: &mut State| {
            let counts = state.session == Some(session) && state.connection == connection;
            counts && state.done.get(stream).is_some_and(Option::is_some)
        };
        let waited = self.applied.wait_timeout_while(state, APPLY_WAIT, waits);
        let (mut state, late) = waited.ignore_poison();
        if late.timed_out() {
            return Err("the epoch before it was never applied".into());
        }
        if state.session != Some(session) || state.connection != connection {
            return Ok(None);
        }
        let dropped = state.dropped;
        let State { building, done, .. } = &mut *state;
        let (Some(building), Some(done)) = (building.get_mut(stream), done.get_mut(stream)) else {
            return Err(format!("there is no stream {stream}"));
        };
        match kind {
            FrameKind::Batch => {
                // Other streams need the lock meanwhile.
                let mut own = std::mem::take(building);
                drop(state);
                let decoded = decoder.decode(rest, &mut own, &*self.image);
                let mut state = self.lock();
                if state.dropped == dropped
                    && let Some(building) = state.building.get_mut(stream)
                {
                    *building = own;
                }
                decoded.map_err(|e| error_chain(&e))?;
                Ok(None)
            }
            FrameKind::Mark => {
                let buffer = std::mem::take(building);
                *done = Some(CompleteBuffer { session, epoch, buffer });
                Ok(Some((session, epoch)))
            }
            FrameKind::Discard => {
                building.clear();
                Ok(None)
            }
            _ => Err("a message that belongs elsewhere".into()),
        }
    }
}
