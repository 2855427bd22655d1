//! `keyframe failover`: lets a protected VM run on the other host.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use keyframe_session::control::{EngineRequest, EngineResponse, client};
use keyframe_session::run_dir;
use std::time::Duration;

/// Let a protected VM run on the other host
#[derive(clap::Args, Debug)]
#[command(
    after_help = "If both hosts live, the VM moves without loss: it stops, its last epoch goes to the standby, and the standby continues it. On a
standby whose primary is silent, the command asks the witness or runs the fence command. --force asks neither: use it only if the
other host is off for sure, or both hosts will run the VM.

Examples:
  keyframe failover                   # on either host: a planned switch-over
  keyframe failover --name standby --force"
)]
pub struct Failover {
    /// Which VM or standby, if several run here
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The other host is off: take over without asking anybody
    #[arg(long)]
    force: bool,
}

impl Failover {
    /// Asks the engine.
    pub fn run(&self) -> Outcome {
        let engine = run_dir::find(self.name.as_deref())?;
        let request = EngineRequest::FailOver { force: self.force };
        match client::ask(&engine, &request, Duration::from_secs(30))? {
            EngineResponse::Done(text) => {
                output::print_line(&text)?;
                Ok(DONE)
            }
            _ => {
                Err(Failure::new("this is no protected VM and no standby")
                    .fix("see keyframe status"))
            }
        }
    }
}
