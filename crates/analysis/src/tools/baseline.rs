//! What benchmarks compare `memtrace` with. No tools: they have no results.

use super::{Running, option};
use crate::context::{Part, RunContext};
use crate::error::Result;
use crate::ring::SharedBoard;

/// What the plugin does with each access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Nothing: what any tool with a callback for each access costs at least.
    Callback,
    /// A line of text, into `trace.txt` in the run's directory.
    Text,
}

/// A run with it.
pub fn baseline(baseline: Baseline, run: &RunContext) -> Result<Box<dyn Running>> {
    let run = Run { baseline, context: run.clone(), shared: SharedBoard::create(0)? };
    Ok(Box::new(run))
}

struct Run {
    baseline: Baseline,
    context: RunContext,
    shared: SharedBoard,
}

impl Running for Run {
    fn option(&self) -> String {
        let (plugin, board) = (&self.context.plugin, self.shared.path());
        let (ram, out) =
            (self.context.ram.argument(), self.context.dir.join("trace.txt").display().to_string());
        match self.baseline {
            Baseline::Callback => option(plugin, &[("tool", "callback"), ("board", &board)]),
            Baseline::Text => {
                option(plugin, &[("tool", "text"), ("board", &board), ("ram", &ram), ("out", &out)])
            }
        }
    }

    fn cut(&mut self) -> Result<()> {
        self.shared.check()
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        self.shared.check()?;
        Ok(Vec::new())
    }
}
