//! Runs whose plugin keeps tables and writes the part files itself (`plugins/src/cut.rs`).

use super::{ToolRun, check_cuts, plugin_option};
use crate::context::{Part, RunContext};
use crate::error::{Result, file};
use crate::ring_reader::SharedBoard;

/// A run whose plugin writes tables.
pub(super) struct TableRun {
    context: RunContext,
    shared: SharedBoard,
    /// The tables that the plugin writes at each cut.
    kinds: &'static [&'static str],
    arguments: Vec<(&'static str, String)>,
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
        let cuts = if run.cuts() > 1 { "many" } else { "one" };
        let mut all = vec![
            ("tool", tools.to_owned()),
            ("board", shared.path()),
            ("parts", run.dir.display().to_string()),
            ("cuts", cuts.to_owned()),
        ];
        all.extend(arguments);
        Ok(Box::new(Self { context: run.clone(), shared, kinds, arguments: all, cuts: 0 }))
    }
}

impl ToolRun for TableRun {
    fn option(&self) -> String {
        let arguments: Vec<_> =
            self.arguments.iter().map(|(name, value)| (*name, value.as_str())).collect();
        plugin_option(&self.context.plugin, &arguments)
    }

    fn cut(&mut self) -> Result<()> {
        self.shared.check()?;
        self.shared.board.cut();
        self.cuts += 1;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        self.shared.check()?;
        check_cuts(&self.context, self.cuts)?;
        let dir = &self.context.dir;
        let written = |cut: usize, kind: &str| dir.join(format!("{cut}.{kind}.part"));
        let warm_ups = usize::from(self.context.warm_up.is_some());
        for kind in self.kinds {
            for cut in 0..warm_ups {
                let path = written(cut, kind);
                std::fs::remove_file(&path).map_err(file("removing the warm-up's part", &path))?;
            }
        }
        let mut parts = Vec::new();
        for (number, &interval) in self.context.intervals.iter().enumerate() {
            let part = Part { interval, dir: dir.clone() };
            for kind in self.kinds {
                let (from, to) = (written(warm_ups + number, kind), part.file(kind, "part"));
                std::fs::rename(&from, &to).map_err(file("renaming the plugin's part", &from))?;
            }
            parts.push(part);
        }
        Ok(parts)
    }
}
