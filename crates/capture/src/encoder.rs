//! The encoder: hands staged pages to the sink and seals checkpoints, on a thread of the caller.
//!
//! ```text
//!   capture ──Pages, Pages, Seal 7, Pages, Seal 8──▶ encoder ──put*, seal──▶ sink
//!      ▲                                                │
//!      └──────────── report 7, report 8 ◀───────────────┘
//! ```
//!
//! A checkpoint is a difference to the previous one. So if one fails, the encoder drops every later
//! message of the same *generation*. The capture begins a new generation once it has read the
//! report, and sends those pages again.
//!
//! Invariants: each `Seal` gets one report; a failure before the `Seal` gets one more report,
//! before that one; after a failure the sink receives nothing of the same generation.

use crate::checkpoint::{CapturePhase, CapturedCheckpoint};
use crate::ports::{BoxError, CheckpointSink};
use crate::staged_pages::StagedPages;
use keyframe_units::{PageSet, elapsed_ns};
use std::time::Instant;

/// Pages per call of the sink: enough work for several threads.
const PUT_PAGES: usize = 8192;

/// A message of the capture to the encoder.
pub enum EncoderMessage<L> {
    /// Pages of the checkpoint in progress.
    Pages {
        /// The capture's generation; messages of a failed generation are dropped.
        generation: u64,
        /// The pages.
        pages: StagedPages,
    },
    /// All pages of the checkpoint have been sent; seal it.
    Seal {
        /// The capture's generation.
        generation: u64,
        /// The number of the capture.
        seq: u64,
        /// The checkpoint.
        captured: Box<CapturedCheckpoint>,
        /// The caller's data for the sink.
        label: L,
    },
    /// The checkpoint in progress failed after pages of it had been sent.
    Abandon {
        /// The capture's generation.
        generation: u64,
    },
}

/// The reason why the encoder did not seal a captured checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The sink failed.
    #[error("{operation}: {source}")]
    Sink {
        /// The operation, such as "seal the checkpoint".
        operation: &'static str,
        /// The sink's error.
        source: BoxError,
    },
    /// An earlier checkpoint, on which this one builds, failed.
    #[error("the checkpoint before it failed")]
    Behind,
}

/// The report of the encoder about one checkpoint.
#[derive(Debug)]
pub struct EncodeReport<T> {
    /// The generation of the checkpoint.
    pub generation: u64,
    /// The number of the capture; `None` if it failed before its `Seal` arrived.
    pub seq: Option<u64>,
    /// The sink's result, or why the checkpoint was not sealed.
    pub outcome: Result<T, EncodeError>,
}

/// The queue through which a capture sends messages to its encoder.
pub trait EncoderQueue<L> {
    /// Sends a message. Error: the encoder has ended.
    fn send(&mut self, message: EncoderMessage<L>) -> Result<(), BoxError>;
}

impl<L: Send + 'static> EncoderQueue<L> for std::sync::mpsc::Sender<EncoderMessage<L>> {
    fn send(&mut self, message: EncoderMessage<L>) -> Result<(), BoxError> {
        std::sync::mpsc::Sender::send(self, message).map_err(|_| "the encoder has ended".into())
    }
}

/// Hands the pages of captured checkpoints to a sink and has it seal the checkpoints, as the
/// messages of a capture ask.
pub struct CheckpointEncoder<S> {
    sink: S,
    watch: Box<dyn FnMut(CapturePhase) + Send>,
    seen: PageSet,
    failed_generation: Option<u64>,
    encode_ns: u64,
}

impl<S: CheckpointSink> CheckpointEncoder<S> {
    /// Creates an encoder into `sink` for a VM with a page space of `space_pages` pages. It calls
    /// `watch` with each phase that it reaches.
    pub fn new(sink: S, space_pages: u64, watch: Box<dyn FnMut(CapturePhase) + Send>) -> Self {
        Self { sink, watch, seen: PageSet::new(space_pages), failed_generation: None, encode_ns: 0 }
    }

    /// Carries out one message. Returns a report if it sealed a checkpoint or if the checkpoint
    /// failed.
    pub fn handle(&mut self, message: EncoderMessage<S::Label>) -> Option<EncodeReport<S::Sealed>> {
        match message {
            EncoderMessage::Pages { generation, .. } | EncoderMessage::Abandon { generation }
                if self.has_failed(generation) =>
            {
                None
            }
            EncoderMessage::Pages { generation, pages } => {
                let error = self.put(&pages).err()?;
                Some(self.fail(generation, None, error))
            }
            EncoderMessage::Abandon { .. } => {
                self.sink.abandon();
                self.encode_ns = 0;
                None
            }
            EncoderMessage::Seal { generation, seq, .. } if self.has_failed(generation) => {
                Some(EncodeReport { generation, seq: Some(seq), outcome: Err(EncodeError::Behind) })
            }
            EncoderMessage::Seal { generation, seq, captured, label } => {
                Some(match self.seal(captured, label) {
                    Ok(sealed) => EncodeReport { generation, seq: Some(seq), outcome: Ok(sealed) },
                    Err(error) => self.fail(generation, Some(seq), error),
                })
            }
        }
    }

    /// Gives the sink time for work of its own ([`CheckpointSink::idle`]). The caller calls this
    /// while there are no messages.
    pub fn idle(&mut self) {
        self.sink.idle();
    }

    /// The sink, for tests.
    #[cfg(test)]
    pub(crate) fn sink(&self) -> &S {
        &self.sink
    }

    /// Ends the encoder and returns its sink.
    pub fn into_sink(self) -> S {
        self.sink
    }

    fn has_failed(&self, generation: u64) -> bool {
        self.failed_generation.is_some_and(|failed| generation <= failed)
    }

    fn put(&mut self, staged: &StagedPages) -> Result<(), EncodeError> {
        (self.watch)(CapturePhase::Encoding);
        let started = Instant::now();
        let mut pages = staged.pages(&mut self.seen);
        loop {
            let batch: Vec<_> = pages.by_ref().take(PUT_PAGES).collect();
            if batch.is_empty() {
                break;
            }
            self.sink
                .put(&batch)
                .map_err(|source| EncodeError::Sink { operation: "store pages", source })?;
        }
        self.encode_ns += elapsed_ns(started);
        Ok(())
    }

    fn seal(
        &mut self,
        mut captured: Box<CapturedCheckpoint>,
        label: S::Label,
    ) -> Result<S::Sealed, EncodeError> {
        captured.timeline.encode_ns = std::mem::take(&mut self.encode_ns);
        (self.watch)(CapturePhase::Sealing);
        let sealed = self
            .sink
            .seal(&captured, label)
            .map_err(|source| EncodeError::Sink { operation: "seal the checkpoint", source })?;
        (self.watch)(CapturePhase::Sealed);
        Ok(sealed)
    }

    fn fail(
        &mut self,
        generation: u64,
        seq: Option<u64>,
        error: EncodeError,
    ) -> EncodeReport<S::Sealed> {
        self.sink.abandon();
        self.failed_generation = Some(generation);
        self.encode_ns = 0;
        EncodeReport { generation, seq, outcome: Err(error) }
    }
}
