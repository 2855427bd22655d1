//! What benchmarks compare tools with. They run as tools do, and have no results.

use super::{Running, Tool, check_cuts, option};
use crate::context::{MergeContext, Part, RunContext, Summary};
use crate::error::Result;
use crate::ring::SharedBoard;

/// What the plugin does with each access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// It is loaded and asks for nothing: what a replay costs by itself.
    Nothing,
    /// It is called, and does nothing: what any tool with a callback for each access costs at
    /// least.
    Callback,
    /// A line of text, into `trace.txt` in the run's directory.
    Text,
}

impl Baseline {
    /// The one that benchmarks call so.
    pub fn by_name(name: &str) -> Option<Self> {
        [Self::Nothing, Self::Callback, Self::Text].into_iter().find(|one| one.name() == name)
    }
}

impl Tool for Baseline {
    fn name(&self) -> &str {
        match self {
            Self::Nothing => "baseline-nothing",
            Self::Callback => "baseline-callback",
            Self::Text => "baseline-text",
        }
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        baseline(*self, run)
    }

    fn merge(&self, _merge: &MergeContext) -> Result<Summary> {
        Ok(Summary { lines: Vec::new(), files: Vec::new() })
    }
}

/// A run with it.
pub fn baseline(baseline: Baseline, run: &RunContext) -> Result<Box<dyn Running>> {
    let run = Run { baseline, context: run.clone(), shared: SharedBoard::create(0)?, cuts: 0 };
    Ok(Box::new(run))
}

struct Run {
    baseline: Baseline,
    context: RunContext,
    shared: SharedBoard,
    cuts: usize,
}

impl Running for Run {
    fn option(&self) -> String {
        let (plugin, board) = (&self.context.plugin, self.shared.path());
        let (ram, out) =
            (self.context.ram.argument(), self.context.dir.join("trace.txt").display().to_string());
        match self.baseline {
            Baseline::Nothing => option(plugin, &[("tool", "nothing"), ("board", &board)]),
            Baseline::Callback => option(plugin, &[("tool", "callback"), ("board", &board)]),
            Baseline::Text => {
                option(plugin, &[("tool", "text"), ("board", &board), ("ram", &ram), ("out", &out)])
            }
        }
    }

    fn cut(&mut self) -> Result<()> {
        self.cuts += 1;
        self.shared.check()
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        self.shared.check()?;
        check_cuts(&self.context, self.cuts)?;
        Ok(self.context.parts())
    }
}
