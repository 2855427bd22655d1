//! `keyframe find`: at which instructions a recorded guest wrote to an address.

use super::recorded::RecordedArgs;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::progress::instructions_bar;
use crate::words::replay::ReplayWords;
use keyframe_analysis::tools;
use keyframe_replay::interval::Interval;
use keyframe_replay_driver::{
    Analysis, AnalysisHeader, AnalysisSubject, FoundWrite, WatchedMemory, found_writes, jobs,
};
use serde::Serialize;

/// The number of attempts at an interval.
const TRIES: u32 = 3;

/// Find the instructions of a recording that wrote to an address
#[derive(clap::Args, Debug)]
#[command(
    after_help = "All intervals are replayed side by side. Each write to the address, or to one of the LEN bytes from it on, is printed with its
instruction, the code that wrote, and the value. To go to the instant before a write: keyframe goto REC --icount N, with a debugger:
--gdb. For whole ranges, as files: keyframe analyze --tool watch.

Exit codes: 0 a write was found, 1 there is none.

Examples:
  keyframe find R --writes 0xffffffff82a01234
  keyframe find R --writes 0x7fe1000 --physical --len 4096 --last
  keyframe find R --writes 0xffff888003a21f00 --to 1500000000 --tool-arg symbols=vmlinux --json"
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Find {
    #[command(flatten)]
    recorded: RecordedArgs,
    /// The address, virtual unless --physical is given (0x for hexadecimal)
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    writes: u64,
    /// How many bytes from there on
    #[arg(long, value_name = "BYTES", default_value = "8", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    len: u64,
    /// It is an address of the guest's physical memory
    #[arg(long)]
    physical: bool,
    /// Only in intervals that end after this instruction
    #[arg(long, value_name = "ICOUNT")]
    from: Option<u64>,
    /// Only in intervals that begin before this instruction
    #[arg(long, value_name = "ICOUNT")]
    to: Option<u64>,
    /// Print the last one only
    #[arg(long)]
    last: bool,
    /// symbols=FILE: a vmlinux or System.map that names the code that wrote
    #[arg(long, value_name = "NAME=VALUE")]
    tool_arg: Vec<String>,
    /// Print them as JSON
    #[arg(long)]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
}

fn parse_address(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let parsed = digits.map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    parsed.map_err(|_| "an address is a number: 0xffffffff81000000, or decimal".into())
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    address: String,
    len: u64,
    is_physical: bool,
    /// Instructions that were looked through.
    instructions: u64,
    wall_ns: u64,
    writes: Vec<FoundWrite>,
}

impl Find {
    /// Finds them.
    pub fn run(&self) -> Outcome {
        let source = self.recorded.open()?;
        let subject = AnalysisSubject::Recorded(&source);
        let watched =
            WatchedMemory { address: self.writes, len_bytes: self.len, is_physical: self.physical };
        let mut arguments = watched.tool_arguments();
        arguments.extend(self.tool_arg.iter().cloned());
        let tool = tools::by_name("watch", &arguments).map_err(|e| Failure::analysis(&e))?;
        let (head, range) = (
            AnalysisHeader::of(subject, "watch", &arguments),
            self.from.unwrap_or(0)..self.to.unwrap_or(u64::MAX),
        );
        let interrupted = jobs::interruption()?;
        let began = std::time::Instant::now();
        let folder = tempfile::Builder::new().prefix("keyframe-find-").tempdir();
        let folder =
            folder.map_err(|e| Failure::new(format!("make a directory for what is found: {e}")))?;
        let mut analysis =
            Analysis::new(subject, &*tool, head, range, &folder.path().join("watch"))?;
        let instructions = analysis.intervals().iter().map(Interval::len).sum();
        let bar = instructions_bar("looking", instructions, !self.quiet && !self.json);
        let words = ReplayWords::above(&bar);
        let made = analysis.make_here(self.recorded.jobs, TRIES, &interrupted, &words);
        bar.finish_and_clear();
        made?;
        let summary = analysis.merge(analysis.collect(&ReplayWords::default())?)?;
        let mut writes = found_writes(&summary.files)?;
        if self.last {
            writes = writes.pop().into_iter().collect();
        }
        let report = Report {
            recording: source.recording.meta.id.clone(),
            address: format!("{:#x}", self.writes),
            len: self.len,
            is_physical: self.physical,
            instructions,
            wall_ns: keyframe_units::elapsed_ns(began),
            writes,
        };
        self.tell(&report)
    }

    fn tell(&self, report: &Report) -> Outcome {
        if self.json {
            output::json(report)?;
        } else {
            for write in &report.writes {
                output::print_line(&format!(
                    "{:>14}  {} wrote {} ({} bytes at {}) {}",
                    write.icount, write.pc, write.value, write.bytes, write.vaddr, write.symbol
                ))?;
            }
        }
        if !self.quiet && !self.json {
            let (looked, after) = (report.instructions, output::duration(report.wall_ns));
            eprintln!(
                "keyframe: {} writes in {looked} instructions, looked through in {after}",
                report.writes.len()
            );
            if let Some(last) = report.writes.last() {
                let recording = self.recorded.recording.display();
                eprintln!(
                    "keyframe: stand before the last one: keyframe goto {recording} --icount {}",
                    last.icount
                );
            }
        }
        Ok(if report.writes.is_empty() { FAILED } else { DONE })
    }
}
