//! `keyframe analysis`: the results of an analysis, as tables and as pictures.

use crate::failure::{DONE, Failure, Outcome, chain};
use crate::output;
use keyframe_plot::FigureFormat;
use keyframe_replay_driver::AnalysisHeader;
use keyframe_results::{AnalysedInterval, AnalysisResults, ResultTable};
use serde::Serialize;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Show the results of an analysis as tables and as a picture
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  keyframe analysis show A
  keyframe analysis show A --plot hot.svg")]
pub struct Analysis {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand, Debug)]
enum Action {
    Show(ShowResults),
}

/// Print tables of the results, and draw them
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The tables summarize the result files of keyframe analyze, which hold the complete results. For a third party's tool, the first rows of
its CSV files are shown.

The picture shows what the tool found in each interval:
  hot          the share of each of the hottest functions (with --tool-arg symbols=guest, or a file)
  icount       the shares of user programs and of the kernel; the number of instructions
  cache        misses per 1,000 instructions, miss rates
  working-set  memory touched, read and written in the interval, and touched so far
  syscalls     the most frequent system calls
  watch        the instructions that write most

coverage and memtrace have no picture. No tool of Keyframe records call stacks, so there is no flame graph.

Examples:
  keyframe analyze R --tool hot --tool-arg symbols=guest --out A
  keyframe analysis show A
  keyframe analysis show A --top 5 --plot hot.png
  keyframe analysis show A --json"
)]
struct ShowResults {
    /// The directory of the analysis
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Draw the results into this file: .svg or .png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..))]
    top: u32,
    /// Print the tables as JSON, with sizes in bytes
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    tool: String,
    arguments: Vec<String>,
    is_approximate: bool,
    tables: Vec<ResultTable>,
}

impl Analysis {
    /// Shows them.
    pub fn run(&self) -> Outcome {
        let Action::Show(show) = &self.action;
        show.run()
    }
}

impl ShowResults {
    fn run(&self) -> Outcome {
        if let Some(path) = &self.plot {
            FigureFormat::of(path).map_err(|e| Failure::new(e.to_string()))?;
        }
        let header = keyframe_replay_driver::previous_timings(&self.out)?.0;
        let AnalysisHeader { recording, tool, arguments, is_approximate, .. } = header;
        let interval = |one: &keyframe_replay::interval::Interval| AnalysedInterval {
            index: one.index,
            start: one.from_icount,
            end: one.end_icount,
        };
        let intervals = header.intervals.iter().map(interval).collect();
        let results = AnalysisResults { dir: self.out.clone(), tool, is_approximate, intervals };
        let tables = results.tables(self.top as usize)?;
        if let Some(path) = &self.plot {
            let timeline = results.timeline()?;
            timeline.write(path).map_err(|e| Failure::new(chain(&e)))?;
        }
        if self.json {
            let tool = results.tool;
            output::json(&Report { recording, tool, arguments, is_approximate, tables })?;
        } else {
            let texts: Vec<String> =
                tables.iter().map(|table| table.text(terminal_width())).collect();
            output::print_line(&texts.join("\n\n"))?;
            if tables.iter().any(|table| table.left_out > 0) {
                eprintln!("keyframe: --top N shows more rows");
            }
        }
        Ok(DONE)
    }
}

/// The width of the terminal; none for a file or a pipe, which gets all of each line.
fn terminal_width() -> Option<usize> {
    let stdout = std::io::stdout();
    let size = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout));
    size?.ok().map(|size| usize::from(size.ws_col)).filter(|width| *width > 0)
}
