//! The data streams of a standby: batches in, whole epochs out.
//!
//! ```text
//!   channel s ─▶ thread: Batch ─▶ building ──Mark──▶ done ──all streams are done──▶ taken
//!                  ▲                                                                  │
//!                  └─────────────────────── next Batch ◀────── applied ◀──────────────┘
//! ```
//!
//! Invariants: an epoch is decoded after the epoch before it is applied, since its patches are
//! against that one. This also holds if the connection breaks while an epoch is applied: what a new
//! connection brings waits. Data of a session that arrives before the session's start waits for it.

use super::super::frames::{FrameKind, unmarked};
use keyframe_link::{Channel, FrameBuffer};
use keyframe_locks::IgnorePoison;
use keyframe_transfer::{EpochBuffer, EpochDecoder, EpochImage};
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
    /// The epoch that [`Streams::take`] returned last is being applied: the image is between two
    /// epochs.
    is_applying: bool,
}

/// The streams that carry a primary's pages. The pages of one epoch are kept until all streams have
/// received their part.
pub struct Streams {
    state: Mutex<State>,
    applied: Condvar,
    /// The number of pages of `image`.
    pages: u64,
    image: Arc<dyn EpochImage + Send + Sync>,
}

impl Streams {
    /// Creates `streams` streams for the `pages` pages of `image`.
    pub fn new(streams: usize, pages: u64, image: Arc<dyn EpochImage + Send + Sync>) -> Self {
        let state = State {
            session: None,
            past: VecDeque::new(),
            connection: 0,
            dropped: 0,
            building: (0..streams).map(|_| EpochBuffer::default()).collect(),
            done: (0..streams).map(|_| None).collect(),
            is_applying: false,
        };
        Self { state: Mutex::new(state), applied: Condvar::new(), pages, image }
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

    /// Drops received data that [`Self::take`] has not returned. The streams still wait for
    /// [`Self::applied`] if it has returned an epoch.
    pub fn discard(&self) {
        let mut state = self.lock();
        state.dropped += 1;
        state.building.iter_mut().for_each(EpochBuffer::clear);
        state.done.iter_mut().for_each(|done| *done = None);
        self.applied.notify_all();
    }

    /// Returns the pages of an epoch that has arrived on all streams, one buffer for each stream.
    /// Until [`Self::applied`], the streams decode nothing. Returns `None` if the epoch has not
    /// arrived, or if another one is being applied.
    pub fn take(&self, session: u64, epoch: Epoch) -> Option<Vec<EpochBuffer>> {
        let mut state = self.lock();
        let is = |done: &Option<CompleteBuffer>| {
            done.as_ref().is_some_and(|d| (d.session, d.epoch) == (session, epoch))
        };
        if state.is_applying || !state.done.iter().all(is) {
            return None;
        }
        state.is_applying = true;
        let take = |done: &mut Option<CompleteBuffer>| {
            done.as_mut().map(|done| std::mem::take(&mut done.buffer)).unwrap_or_default()
        };
        Some(state.done.iter_mut().map(take).collect())
    }

    /// Records that the epoch of the last [`Self::take`] is applied, or will not be, so that the
    /// streams may decode the next one.
    pub fn applied(&self) {
        let mut state = self.lock();
        state.is_applying = false;
        state.done.iter_mut().for_each(|done| *done = None);
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
            let decoder = EpochDecoder::new(streams.pages);
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
            let is_taken = state.done.get(stream).is_some_and(Option::is_some);
            counts && (state.is_applying || is_taken)
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
                if state.dropped != dropped {
                    // The image may have changed meanwhile, so an error means nothing either.
                    return Ok(None);
                }
                if let Some(building) = state.building.get_mut(stream) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::marked;
    use keyframe_units::{Page, PageIndex, ZERO_PAGE};
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const SESSION: u64 = 7;
    const PAGES: u64 = 4;
    /// Long enough for a thread that does not wait.
    const BRIEFLY: Duration = Duration::from_millis(200);

    /// An image of zeros.
    struct BlankImage;

    impl EpochImage for BlankImage {
        fn read(&self, _: PageIndex, into: &mut Page) -> std::io::Result<()> {
            *into = ZERO_PAGE;
            Ok(())
        }
    }

    /// Has stream 0 of a connection receive the end of an epoch.
    fn mark(
        streams: &Streams,
        connection: u64,
        epoch: u64,
    ) -> Result<Option<(u64, Epoch)>, String> {
        let (payload, decoder) = (marked(SESSION, epoch), EpochDecoder::new(PAGES));
        streams.take_in((0, connection), FrameKind::Mark as u8, &payload, &decoder)
    }

    /// Patches of the next epoch are against the one that is being applied.
    #[test]
    fn a_link_that_breaks_while_an_epoch_is_applied_keeps_the_next_one_waiting() {
        let streams = Streams::new(1, PAGES, Arc::new(BlankImage));
        streams.receive(SESSION);
        streams.connected(1);
        assert_eq!(mark(&streams, 1, 5), Ok(Some((SESSION, Epoch(5)))));
        assert!(streams.take(SESSION, Epoch(5)).is_some());
        streams.connected(2);
        let (sender, marks) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| sender.send(mark(&streams, 2, 6)).unwrap());
            assert_eq!(marks.recv_timeout(BRIEFLY), Err(RecvTimeoutError::Timeout));
            streams.applied();
            assert_eq!(marks.recv().unwrap(), Ok(Some((SESSION, Epoch(6)))));
        });
        assert!(streams.take(SESSION, Epoch(6)).is_some());
        assert!(streams.take(SESSION, Epoch(6)).is_none(), "two epochs are applied at once");
    }
}
