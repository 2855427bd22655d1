//! The baselines that benchmarks compare tools with. They run like tools and have no results.

use super::{Tool, ToolRun, plugin_option};
use crate::context::{IcountInterval, MergeContext, Part, RunContext, RunIntervals, ToolSummary};
use crate::error::Result;
use crate::ring_reader::SharedBoard;

/// A tool without results, which measures what a plugin costs by what the plugin does at each
/// memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// Nothing: the plugin is loaded and registers no callback. This is the cost of the replay.
    Nothing,
    /// An empty callback: the least cost of any tool with a callback for each access.
    Callback,
    /// A line of text in `trace.txt` in the run's directory.
    Text,
}

impl Baseline {
    /// Returns the baseline with this tool name; `None` for any other name.
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

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let shared = SharedBoard::create(0)?;
        let (context, intervals) = (run.clone(), RunIntervals::new(run));
        Ok(Box::new(BaselineRun { baseline: *self, context, intervals, shared }))
    }

    fn merge(&self, _merge: &MergeContext) -> Result<ToolSummary> {
        Ok(ToolSummary::default())
    }
}

struct BaselineRun {
    baseline: Baseline,
    context: RunContext,
    intervals: RunIntervals,
    shared: SharedBoard,
}

impl ToolRun for BaselineRun {
    fn option(&self) -> String {
        let (plugin, board) = (&self.context.plugin, self.shared.path());
        let ram = self.context.ram.argument();
        let out = self.context.dir.join("trace.txt").display().to_string();
        match self.baseline {
            Baseline::Nothing => plugin_option(plugin, &[("tool", "nothing"), ("board", &board)]),
            Baseline::Callback => plugin_option(plugin, &[("tool", "callback"), ("board", &board)]),
            Baseline::Text => plugin_option(
                plugin,
                &[("tool", "text"), ("board", &board), ("ram", &ram), ("out", &out)],
            ),
        }
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.intervals.cut(next)?;
        self.shared.check()
    }

    fn completed(&mut self) -> Result<Vec<Part>> {
        Ok(self.intervals.take_ended())
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Part>> {
        self.shared.check()?;
        self.intervals.check_ended()?;
        Ok(self.intervals.take_ended())
    }
}
