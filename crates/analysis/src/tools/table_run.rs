//! Runs whose plugin keeps tables and writes the part files itself (`plugins/src/cut.rs`).

use super::{ToolRun, plugin_option};
use crate::context::{IcountInterval, Part, RunContext, RunIntervals};
use crate::error::{Result, file};
use crate::ring_reader::SharedBoard;
use std::collections::VecDeque;
use std::path::PathBuf;

/// A run whose plugin writes tables: `DIR/CUT.KIND.part`, when the first block after the cut runs,
/// or when QEMU exits.
pub(super) struct TableRun {
    plugin: PathBuf,
    dir: PathBuf,
    intervals: RunIntervals,
    shared: SharedBoard,
    /// The tables that the plugin writes at each cut.
    kinds: &'static [&'static str],
    arguments: Vec<(&'static str, String)>,
    /// The parts that the plugin writes when the VM goes on, each with the number of its cut.
    unwritten: VecDeque<(usize, Option<Part>)>,
    cuts: usize,
}

impl TableRun {
    /// Begins a run with the plugin's tools `tools` (joined by `+`), which write the tables
    /// `kinds`, and further arguments for the plugin. Error: the board cannot be created.
    pub fn begin(
        run: &RunContext,
        tools: &'static str,
        kinds: &'static [&'static str],
        arguments: Vec<(&'static str, String)>,
    ) -> Result<Box<dyn ToolRun>> {
        let shared = SharedBoard::create(0)?;
        let cuts = if run.has_many_cuts() { "many" } else { "one" };
        let mut all = vec![
            ("tool", tools.to_owned()),
            ("board", shared.path()),
            ("parts", run.dir.display().to_string()),
            ("cuts", cuts.to_owned()),
        ];
        all.extend(arguments);
        Ok(Box::new(Self {
            plugin: run.plugin.clone(),
            dir: run.dir.clone(),
            intervals: RunIntervals::new(run),
            shared,
            kinds,
            arguments: all,
            unwritten: VecDeque::new(),
            cuts: 0,
        }))
    }

    /// Gives the files that the plugin has written the names of their parts, but for the last
    /// `held_back` cuts. The warm-up's are removed.
    fn collect(&mut self, held_back: usize) -> Result<Vec<Part>> {
        let count = self.unwritten.len().saturating_sub(held_back);
        let mut parts = Vec::with_capacity(count);
        for (cut, part) in self.unwritten.drain(..count) {
            for kind in self.kinds {
                let from = self.dir.join(format!("{cut}.{kind}.part"));
                match &part {
                    Some(part) => std::fs::rename(&from, part.file(kind, "part"))
                        .map_err(file("renaming the plugin's part", &from))?,
                    None => std::fs::remove_file(&from)
                        .map_err(file("removing the warm-up's part", &from))?,
                }
            }
            parts.extend(part);
        }
        Ok(parts)
    }
}

impl ToolRun for TableRun {
    fn option(&self) -> String {
        let arguments: Vec<_> =
            self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        plugin_option(&self.plugin, &arguments)
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.shared.check()?;
        self.shared.board.cut();
        self.unwritten.push_back((self.cuts, self.intervals.cut(next)?));
        self.cuts += 1;
        Ok(())
    }

    /// The tables of the last cut are written when the VM goes on.
    fn completed(&mut self) -> Result<Vec<Part>> {
        self.collect(1)
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Part>> {
        self.shared.check()?;
        self.intervals.check_ended()?;
        self.collect(0)
    }
}
