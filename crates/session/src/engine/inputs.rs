//! The inputs of an engine from its process: signals, and the phases of the encoder.

use crate::SessionOptions;
use crate::error::Result;
use keyframe_capture::CapturePhase;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Called by the encoder's thread at each phase of a checkpoint.
pub(super) type EncoderObserver = Arc<dyn Fn(CapturePhase) + Send + Sync>;

/// The inputs of an engine from its process. Tests provide their own.
pub(super) struct EngineInputs {
    /// Set by the signals that ask for an end.
    pub interrupted: Arc<AtomicBool>,
    pub encoder_observer: EncoderObserver,
}

impl EngineInputs {
    /// Creates the inputs from the signals of this process and the fault of `options`. Error: the
    /// signal handlers cannot be installed.
    pub fn of_process(options: &SessionOptions) -> Result<Self> {
        let interrupted = crate::interrupt::interruption_or_hangup()?;
        let fault = options.fault.clone();
        let observer = move |phase| {
            if let Some(fault) = &fault {
                fault.reached(phase);
            }
        };
        Ok(Self { interrupted, encoder_observer: Arc::new(observer) })
    }
}
