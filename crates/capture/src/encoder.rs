//! The other end of the capture: takes parcels of pages, hands them to the sink, seals.
//!
//! ```text
//!   capture ──Pages, Pages, Seal 7, Pages, Seal 8──▶ encoder ──put*, seal──▶ sink
//!      ▲                                                │
//!      └──────────── Report 7, Report 8 ◀───────────────┘
//! ```
//!
//! A checkpoint is a difference to the one before it. So where one fails, everything behind it in
//! the queue is dropped too, until the capture has learnt of it and begins a new *generation*, in
//! which those pages come again.
//!
//! Invariants: each Seal is answered by one report; a failure before the seal by one report of its
//! own, before that; after a failure nothing of the same generation reaches the sink.

use crate::cycle::{Captured, Phase};
use crate::parcel::Parcel;
use crate::ports::{BoxError, Sink};
use keyframe_units::PageSet;
use std::time::Instant;

/// Pages handed to the sink at a time: enough for several threads.
const PUT_PAGES: usize = 8192;

/// What the capture sends.
pub enum Message<L> {
    /// Pages of the checkpoint in progress.
    Pages {
        /// Messages of a generation that has failed are dropped.
        generation: u64,
        /// The pages.
        parcel: Parcel,
    },
    /// All its pages have been sent.
    Seal {
        /// As above.
        generation: u64,
        /// The number of the capture.
        seq: u64,
        /// What it is.
        captured: Box<Captured>,
        /// What the caller says of it.
        label: L,
    },
    /// The checkpoint in progress was aborted after pages of it had been sent.
    Abandon {
        /// As above.
        generation: u64,
    },
}

/// Why a checkpoint that was captured is not in the store.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The sink failed.
    #[error("{operation}: {source}")]
    Sink {
        /// What it was to do.
        operation: &'static str,
        /// Why it did not.
        source: BoxError,
    },
    /// One before it failed.
    #[error("the checkpoint before it failed")]
    Behind,
}

/// What became of a checkpoint.
#[derive(Debug)]
pub struct Report<T> {
    /// The generation it belonged to.
    pub generation: u64,
    /// The number of its capture; none where it failed before all its pages had been sent.
    pub seq: Option<u64>,
    /// Sealed, or why not.
    pub outcome: Result<T, EncodeError>,
}

/// Where the capture sends to.
pub trait Outlet<L> {
    /// Hands a message over. An error where nobody is there to take it.
    fn send(&mut self, message: Message<L>) -> Result<(), BoxError>;
}

impl<L: Send + 'static> Outlet<L> for std::sync::mpsc::Sender<Message<L>> {
    fn send(&mut self, message: Message<L>) -> Result<(), BoxError> {
        std::sync::mpsc::Sender::send(self, message).map_err(|_| "the encoder has ended".into())
    }
}

/// Feeds a sink.
pub struct Encoder<S> {
    sink: S,
    watch: Box<dyn FnMut(Phase) + Send>,
    seen: PageSet,
    failed_generation: Option<u64>,
    encode_ns: u64,
}

impl<S: Sink> Encoder<S> {
    /// An encoder for a VM of `space_pages` pages; `watch` is told of the phases that it reaches.
    pub fn new(sink: S, space_pages: u64, watch: Box<dyn FnMut(Phase) + Send>) -> Self {
        Self { sink, watch, seen: PageSet::new(space_pages), failed_generation: None, encode_ns: 0 }
    }

    /// Does what a message asks for.
    pub fn handle(&mut self, message: Message<S::Label>) -> Option<Report<S::Sealed>> {
        match message {
            Message::Pages { generation, .. } | Message::Abandon { generation }
                if self.is_lost(generation) =>
            {
                None
            }
            Message::Pages { generation, parcel } => {
                let error = self.put(&parcel).err()?;
                Some(self.fail(generation, None, error))
            }
            Message::Abandon { .. } => {
                self.sink.abandon();
                self.encode_ns = 0;
                None
            }
            Message::Seal { generation, seq, .. } if self.is_lost(generation) => {
                Some(Report { generation, seq: Some(seq), outcome: Err(EncodeError::Behind) })
            }
            Message::Seal { generation, seq, mut captured, label } => {
                captured.timeline.encode_ns = std::mem::take(&mut self.encode_ns);
                (self.watch)(Phase::Sealing);
                let sealed = self.sink.seal(&captured, label);
                Some(match sealed {
                    Ok(sealed) => {
                        (self.watch)(Phase::Sealed);
                        Report { generation, seq: Some(seq), outcome: Ok(sealed) }
                    }
                    Err(source) => {
                        let error = EncodeError::Sink { operation: "seal the checkpoint", source };
                        self.fail(generation, Some(seq), error)
                    }
                })
            }
        }
    }

    /// The sink, to look at.
    #[cfg(test)]
    pub(crate) fn image(&self) -> &S {
        &self.sink
    }

    /// The sink, at the end.
    pub fn into_sink(self) -> S {
        self.sink
    }

    fn is_lost(&self, generation: u64) -> bool {
        self.failed_generation.is_some_and(|failed| generation <= failed)
    }

    fn put(&mut self, parcel: &Parcel) -> Result<(), EncodeError> {
        (self.watch)(Phase::Encoding);
        let started = Instant::now();
        let mut pages = parcel.pages(&mut self.seen);
        loop {
            let some: Vec<_> = pages.by_ref().take(PUT_PAGES).collect();
            if some.is_empty() {
                break;
            }
            self.sink
                .put(&some)
                .map_err(|source| EncodeError::Sink { operation: "store pages", source })?;
        }
        self.encode_ns += u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Ok(())
    }

    fn fail(&mut self, generation: u64, seq: Option<u64>, error: EncodeError) -> Report<S::Sealed> {
        self.sink.abandon();
        self.failed_generation = Some(generation);
        self.encode_ns = 0;
        Report { generation, seq, outcome: Err(error) }
    }
}
