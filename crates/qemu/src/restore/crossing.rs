//! A restore under another accelerator than the one of the checkpoint.

use super::Plan;
use crate::{Accelerator, Result, accelerator_check, stream};
use keyframe_qemu_cmdline::{check_accelerator_line, machine_defaults};

/// A change of accelerator.
pub(super) struct Crossing {
    pub to: Accelerator,
    pub device_state: Vec<u8>,
    /// The arguments that keep the machine as it was.
    pub words: Vec<String>,
}

impl Crossing {
    /// Prepares a VM with `device_state` for another accelerator. Returns `None` if the plan keeps
    /// its accelerator. Errors: the change would not be exact; `device_state` is malformed.
    pub fn of(plan: &Plan, device_state: &[u8]) -> Result<Option<Self>> {
        let Some(to) = plan.accelerator else { return Ok(None) };
        let processor = plan.source.machine.processor;
        accelerator_check::require_accelerated(processor, to)?;
        let from = accelerator_check::of_checkpoint(&plan.arguments, device_state, processor)?;
        if from == to {
            return Ok(None);
        }
        check_accelerator_line(&plan.arguments, to)?;
        let words = machine_defaults(&plan.arguments, &plan.source.machine.machine_type, from);
        Ok(Some(Self { to, device_state: stream::convert(device_state, to)?, words }))
    }
}
