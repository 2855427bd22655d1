//! `keyframe tag`: names for checkpoints.

use super::StoreArg;
use crate::failure::{DONE, Outcome};
use crate::output;
use serde::Serialize;

/// Give a checkpoint a name, or take one away
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A tag names one checkpoint. Given again, it moves to the other checkpoint. Every command takes a tag in place of a number. The
rules of `forget` and of `run --keep-within` keep tagged checkpoints, unless --keep-tag names other tags. A run may use the
store meanwhile.

Examples:
  keyframe tag --store S 12 before-upgrade
  keyframe tag --store S latest good
  keyframe tag --store S --remove before-upgrade
  keyframe list --store S"
)]
pub struct Tag {
    #[command(flatten)]
    store: StoreArg,
    /// The checkpoint: a number, another tag, or `latest`
    #[arg(required_unless_present = "remove")]
    checkpoint: Option<String>,
    /// Its new name
    #[arg(required_unless_present = "remove")]
    name: Option<String>,
    /// The name to take away; its checkpoint stays
    #[arg(long, value_name = "NAME", conflicts_with_all = ["checkpoint", "name"])]
    remove: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Done<'a> {
    tag: &'a str,
    /// Where it points now.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<u64>,
    /// Where it pointed before.
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<u64>,
}

impl Tag {
    /// Sets or removes it.
    pub fn run(&self) -> Outcome {
        let store = self.store.open()?;
        let failure = |e| self.store.failure(&e);
        let (tag, checkpoint, before) = match (&self.remove, &self.checkpoint, &self.name) {
            (Some(tag), ..) => (tag, None, store.remove_tag(tag).map_err(failure)?),
            (None, Some(checkpoint), Some(tag)) => {
                let id = store.resolve(checkpoint).map_err(failure)?;
                (tag, Some(id), store.set_tag(tag, id).map_err(failure)?)
            }
            // The parser lets nothing else pass.
            (None, ..) => return Ok(DONE),
        };
        if self.json {
            let (checkpoint, before) = (checkpoint.map(|id| id.0), before.map(|id| id.0));
            output::json(&Done { tag, checkpoint, before })?;
            return Ok(DONE);
        }
        let moved = before.filter(|before| Some(*before) != checkpoint);
        output::print_line(&match (checkpoint, moved) {
            (Some(id), Some(before)) => format!("{tag} is checkpoint {id} now; it was {before}"),
            (Some(id), None) => format!("{tag} is checkpoint {id}"),
            (None, Some(before)) => {
                format!("{tag} is no name any more; it was checkpoint {before}")
            }
            (None, None) => format!("{tag} is no name any more"),
        })?;
        Ok(DONE)
    }
}
