//! The encoder's thread: everything after the capture, at low priority, in the order of the
//! captures.
//!
//! Invariant: the thread ends when its queue is closed and worked off; what was captured before
//! that is sealed, or its failure reported.

use crate::error::{Error, Result};
use keyframe_capture::{
    CapturePhase, CheckpointEncoder, CheckpointSink, EncodeReport, EncoderMessage,
};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The time without messages after which the sink may do other work.
const IDLE: Duration = Duration::from_secs(2);

/// An encoder on a thread of its own.
pub struct EncoderThread<S: CheckpointSink> {
    queue: Sender<EncoderMessage<S::Label>>,
    thread: JoinHandle<S>,
}

impl<S: CheckpointSink + 'static> EncoderThread<S> {
    /// Starts an encoder that feeds `sink`, for a page space of `space_pages` pages. It calls
    /// `watch` at each phase, and `report` with the outcome of each capture. Error: the thread
    /// cannot be started.
    pub fn start(
        sink: S,
        space_pages: u64,
        watch: Box<dyn FnMut(CapturePhase) + Send>,
        report: impl FnMut(EncodeReport<S::Sealed>) + Send + 'static,
    ) -> Result<Self> {
        let encoder = CheckpointEncoder::new(sink, space_pages, watch);
        let (queue, messages) = channel();
        let work = move || work(encoder, &messages, report);
        let thread = std::thread::Builder::new()
            .name("encoder".into())
            .spawn(work)
            .map_err(|e| Error::io("start the encoder's thread", e))?;
        Ok(Self { queue, thread })
    }

    /// Returns the queue through which captures reach the encoder.
    pub fn queue(&mut self) -> &mut Sender<EncoderMessage<S::Label>> {
        &mut self.queue
    }

    /// Closes the queue, waits until the encoder has worked it off, and returns the sink. All
    /// reports have been given by then. Error: the thread has panicked.
    pub fn finish(self) -> Result<S> {
        drop(self.queue);
        self.thread.join().map_err(|_| Error::EncoderPanicked)
    }
}

fn work<S: CheckpointSink>(
    mut encoder: CheckpointEncoder<S>,
    messages: &Receiver<EncoderMessage<S::Label>>,
    mut report: impl FnMut(EncodeReport<S::Sealed>),
) -> S {
    keyframe_kernel::priority::lower_current_thread();
    loop {
        match messages.recv_timeout(IDLE) {
            Ok(message) => {
                if let Some(said) = encoder.handle(message) {
                    report(said);
                }
            }
            Err(RecvTimeoutError::Timeout) => encoder.idle(),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    encoder.into_sink()
}
