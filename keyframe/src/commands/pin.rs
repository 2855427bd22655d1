//! `keyframe pin`: a checkpoint that no rule forgets.

use super::StoreArg;
use crate::failure::{DONE, Outcome, WARNED};
use crate::output;
use serde::Serialize;

/// Keep a checkpoint whatever the rules say, until it is unpinned
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Pin the moment of a flight recorder (`run --keep-within`) that you want to keep. Neither its rules nor those of `forget` remove a
pinned checkpoint. Only `forget CHECKPOINT --force` does. A run may use the store meanwhile.

Exit code 3: --remove found a checkpoint that was not pinned.

Examples:
  keyframe pin --store S latest
  keyframe pin --store S 12 13 before-upgrade
  keyframe pin --store S --remove 12
  keyframe list --store S --json | jq '.[] | select(.pinned) | .id'"
)]
pub struct Pin {
    #[command(flatten)]
    store: StoreArg,
    /// Which: numbers, tags, or `latest`
    #[arg(value_name = "CHECKPOINT", required = true)]
    checkpoints: Vec<String>,
    /// Take the pin away
    #[arg(long)]
    remove: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The output of `--json` for one checkpoint.
#[derive(Serialize)]
struct Done {
    id: u64,
    pinned: bool,
}

impl Pin {
    /// Pins, or unpins.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let failure = |e| self.store.failure(&e);
        // All names before the first deed.
        let ids: Result<Vec<_>, _> =
            self.checkpoints.iter().map(|name| store.resolve(name)).collect();
        let (mut code, mut done) = (DONE, Vec::new());
        for id in ids.map_err(failure)? {
            if !self.remove {
                store.pin(id).map_err(failure)?;
            } else if !store.unpin(id).map_err(failure)? {
                eprintln!("keyframe: checkpoint {id} was not pinned");
                code = WARNED;
            }
            done.push(Done { id: id.0, pinned: !self.remove });
        }
        if self.json {
            output::json(&done)?;
            return Ok(code);
        }
        let ids: Vec<_> = done.iter().map(|done| done.id.to_string()).collect();
        let state = if self.remove { "not pinned any more" } else { "pinned" };
        output::print_line(&format!("{state}: {}", ids.join(", ")))?;
        Ok(code)
    }
}
