//! Requests of clients at the control socket.

use super::{
    CheckpointError, CheckpointReason, End, Engine, EngineRequest, EngineResponse, NO_STANDBY,
    NotCaptured, Pending, Result, Strategy, Taker, with_fix,
};

impl Engine<'_> {
    /// Answers a request of a client, at once or when its checkpoint is sealed. Returns the end of the run
    /// if the request decides it.
    pub(super) fn answer(&mut self, pending: Pending) -> Option<End> {
        let (response, end) = match pending.request {
            EngineRequest::Take { tag, strategy } => match self.take(tag.as_deref(), strategy) {
                Ok(seq) => {
                    self.takers.insert(seq, Taker::Client(pending.answer));
                    return None;
                }
                Err(error) => (EngineResponse::Failed(with_fix(&error.into())), None),
            },
            EngineRequest::Stop { on_exit } => (
                EngineResponse::Stopping,
                Some(End::Asked(on_exit.unwrap_or(self.options.on_exit))),
            ),
            EngineRequest::Rollback { checkpoint, fast } => self.answer_rollback(&checkpoint, fast),
            EngineRequest::FailOver { .. } => (EngineResponse::Failed(NO_STANDBY.into()), None),
            EngineRequest::Status => (EngineResponse::Failed("answered elsewhere".into()), None),
        };
        // The client may have gone.
        let _ = pending.answer.send(response);
        end
    }

    fn take(&mut self, tag: Option<&str>, strategy: Option<Strategy>) -> Result<u64, NotCaptured> {
        if let Some(tag) = tag {
            keyframe_store::check_tag(tag).map_err(CheckpointError::Tag)?;
        }
        if self.given_up {
            return Err(CheckpointError::GivenUp.into());
        }
        if self.has_lost_log() {
            return Err(CheckpointError::LogLost.into());
        }
        self.capture(CheckpointReason::Take, tag, strategy)
    }
}
