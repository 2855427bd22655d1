//! `keyframe take`: a checkpoint now.

use super::running_vm::RunningVm;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use keyframe_inspect::entry::Entry;
use keyframe_session::control::{EngineRequest, EngineResponse, Strategy, client};
use serde::Serialize;
use std::time::Duration;

/// Take a checkpoint of a running VM now, and wait until it is sealed
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe take --tag before-upgrade
  keyframe take --store S
  keyframe take --name web --json | jq .pause_ns")]
pub struct Take {
    #[command(flatten)]
    vm: RunningVm,
    /// Give it a name, usable wherever a checkpoint is asked for
    #[arg(long)]
    tag: Option<String>,
    /// How its pages are copied, instead of what `run` was started with
    #[arg(long, value_enum)]
    strategy: Option<Strategy>,
    /// Print JSON, as an entry of `list --json`. `parent` is null if it follows no other checkpoint
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Taken {
    /// Its `parent` is taken out.
    #[serde(flatten)]
    entry: Entry,
    /// The number of the checkpoint that it follows, or null.
    parent: Option<u64>,
}

impl Take {
    /// Asks the engine for one.
    pub fn run(&self) -> Outcome {
        let engine = self.vm.engine()?;
        let request = EngineRequest::Take { tag: self.tag.clone(), strategy: self.strategy };
        match client::ask(&engine, &request, Duration::from_secs(600))? {
            EngineResponse::Taken(mut entry) if self.json => {
                let parent = entry.parent.take();
                output::json(&Taken { entry: *entry, parent })?;
            }
            EngineResponse::Taken(entry) => output::print_line(&format!(
                "checkpoint {}: pause {}, {} dirty pages, {} stored",
                entry.id,
                output::duration(entry.pause_ns),
                entry.dirty_pages,
                output::bytes(entry.stored_bytes)
            ))?,
            other => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
        }
        Ok(DONE)
    }
}
