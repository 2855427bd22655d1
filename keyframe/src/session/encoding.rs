//! The encoder's thread: everything after the capture, at low priority, in the order of the captures.
//!
//! Invariant: the thread ends when its queue is closed and worked off; what was captured before that is sealed, or its
//! failure reported.

use super::engine::Inbox;
use super::faults::Fault;
use super::sink::{Label, StoreSink};
use crate::control::server::SharedStatus;
use crate::failure::Failure;
use keyframe_capture::{Encoder, Message, Phase};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A running encoder.
pub struct Encoding {
    queue: Sender<Message<Label>>,
    thread: JoinHandle<StoreSink>,
}

impl Encoding {
    /// Starts one that feeds `sink` and reports to `inbox`.
    pub fn start(
        sink: StoreSink,
        space_pages: u64,
        inbox: Sender<Inbox>,
        status: SharedStatus,
        fault: Option<Fault>,
    ) -> Result<Self, Failure> {
        let watch = move |phase: Phase| {
            if let Ok(mut status) = status.lock() {
                phase.name().clone_into(&mut status.encoder);
            }
            if let Some(fault) = &fault {
                fault.reached(phase);
            }
        };
        let encoder = Encoder::new(sink, space_pages, Box::new(watch));
        let (queue, messages) = channel();
        let work = move || work(encoder, &messages, &inbox);
        let thread = std::thread::Builder::new()
            .name("encoder".into())
            .spawn(work)
            .map_err(|e| Failure::new(format!("start the encoder's thread: {e}")))?;
        Ok(Self { queue, thread })
    }

    /// Where captures are handed over.
    pub fn queue(&mut self) -> &mut Sender<Message<Label>> {
        &mut self.queue
    }

    /// Closes the queue, waits until it is worked off, and gives the sink back. Its reports are in the inbox.
    pub fn finish(self) -> Result<StoreSink, Failure> {
        drop(self.queue);
        self.thread.join().map_err(|_| Failure::new("the encoder's thread has failed"))
    }
}

fn work(
    mut encoder: Encoder<StoreSink>,
    messages: &Receiver<Message<Label>>,
    inbox: &Sender<Inbox>,
) -> StoreSink {
    keyframe_kernel::priority::lower();
    for message in messages {
        if let Some(report) = encoder.handle(message) {
            // The engine may have ended already; the checkpoint is sealed all the same.
            let _ = inbox.send(Inbox::Report(Box::new(report)));
        }
    }
    encoder.into_sink()
}
