//! `keyframe stop`: ends a running engine.

use crate::control::{OnExit, Request, client};
use crate::failure::{DONE, Outcome};
use crate::{output, rundir};
use std::time::Duration;

/// End a running `keyframe run`, after what is in progress is sealed
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe stop
  keyframe stop --name web --on-exit keep")]
pub struct Stop {
    /// Which VM, where several run
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// What becomes of the VM, instead of what `run` was started with
    #[arg(long, value_enum)]
    on_exit: Option<OnExit>,
}

impl Stop {
    /// Asks the engine to end.
    pub fn run(&self) -> Outcome {
        let engine = rundir::find(self.name.as_deref())?;
        client::ask(&engine, &Request::Stop { on_exit: self.on_exit }, Duration::from_secs(600))?;
        output::print_line("stopping")?;
        Ok(DONE)
    }
}
