//! `keyframe bench`: measures against peers, in one run.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use std::path::PathBuf;

/// Measure Keyframe against its peers on this machine
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Every benchmark runs Keyframe and its peers side by side on the same guest and prints ratios; absolute times are
this machine's. The JSON is one object: name, figures, ratios; keys carry their units.

Benchmarks:
  pause     pause of pre-copy, stop-and-copy, savevm, stop + migrate at 20,000 dirty pages a second
  overhead  work that a computing guest loses to checkpoints every second

Examples:
  keyframe bench pause
  keyframe bench pause --json > pause.json"
)]
pub struct Bench {
    /// Which one
    #[arg(value_parser = keyframe_bench::names())]
    name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Fewer repetitions: a look, not a measurement
    #[arg(long)]
    quick: bool,
    /// The guest's files [default: built by guests/build small]
    #[arg(long, value_name = "DIR", env = "KEYFRAME_GUEST")]
    guest: Option<PathBuf>,
}

impl Bench {
    /// Measures and prints.
    pub fn run(&self) -> Outcome {
        let keyframe = std::env::current_exe()
            .map_err(|e| Failure::new(format!("find the path of this program: {e}")))?;
        let options = keyframe_bench::Options { keyframe, quick: self.quick, guest: self.guest.clone() };
        let result = keyframe_bench::run(&self.name, &options).map_err(|e| {
            let failure = Failure::new(crate::failure::chain(&e));
            match e.fix() {
                Some(fix) => failure.fix(fix),
                None => failure,
            }
        })?;
        if self.json {
            output::json(&result)?;
        } else {
            output::print_line(&result.text())?;
        }
        Ok(DONE)
    }
}
