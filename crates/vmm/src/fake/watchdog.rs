//! The watchdog of the fake VM.

use super::{FakeWatchdog, OneCommand, Step, enter, lock};
use crate::{PauseWatchdog, RollbackPlan, RollbackStep, VmmError};
use std::time::Duration;

impl PauseWatchdog for FakeWatchdog {
    fn arm(&mut self, _: Duration) -> Result<(), VmmError> {
        let mut state = enter(&self.shared, Step::Arm);
        state.enter(Step::Arm)?;
        (state.watchdog.is_armed, state.watchdog.running_forbidden) = (true, false);
        Ok(())
    }

    fn arm_for_saved_pause(&mut self, limit: Duration) -> Result<(), VmmError> {
        self.arm(limit)
    }

    fn disarm(&mut self) -> Result<bool, VmmError> {
        let mut state = enter(&self.shared, Step::Disarm);
        state.enter(Step::Disarm)?;
        (state.watchdog.is_armed, state.watchdog.running_forbidden) = (false, false);
        Ok(std::mem::take(&mut state.watchdog.has_fired))
    }

    fn forbid_running(&mut self) -> Result<bool, VmmError> {
        let mut state = enter(&self.shared, Step::ForbidRunning);
        state.enter(Step::ForbidRunning)?;
        (state.watchdog.is_armed, state.watchdog.running_forbidden) = (false, true);
        Ok(std::mem::take(&mut state.watchdog.has_fired))
    }

    fn plan_rollback(&mut self, plan: Option<&RollbackPlan>) -> Result<(), VmmError> {
        let mut state = lock(&self.shared);
        state.watchdog.plan = plan.cloned();
        state.watchdog.steps.clear();
        Ok(())
    }

    fn note_step(&mut self, step: &RollbackStep) -> Result<(), VmmError> {
        lock(&self.shared).watchdog.steps.push(step.clone());
        Ok(())
    }

    fn resume_now(&mut self) {
        let mut state = enter(&self.shared, Step::ResumeNow);
        if state.enter(Step::ResumeNow).is_ok() {
            state.watchdog.has_fired |= !state.runs;
            if matches!(state.one_command, OneCommand::Holds { .. }) {
                state.end_saved_pause();
            } else {
                state.resume();
            }
        }
    }

    fn end(self: Box<Self>) {
        let mut state = enter(&self.shared, Step::EndWatchdog);
        let _ = state.enter(Step::EndWatchdog);
        state.watchdog.is_armed = false;
    }
}
