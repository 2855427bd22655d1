//! The tools, one file each, and the traits by which a caller runs them.
//!
//! ```text
//!   by_name ─▶ Tool ── begin(run) ──▶ ToolRun ── option() ──▶ QEMU's -plugin
//!                                       │  VM stopped at an interval's end: cut(next)
//!                                       │                                   completed() ──▶ Part ...
//!                                       └─ QEMU has exited: finish() ──▶ the other parts
//!                └──── merge(all parts in order) ──▶ result files, ToolSummary
//! ```

mod baseline;
mod cache;
mod coverage;
mod event_run;
mod hot;
mod icount;
mod memtrace;
mod ring_run;
mod syscall_names;
mod syscalls;
mod table_run;
mod wait;
mod watch;
mod working_set;

use crate::code_symbols::{CodeSymbols, GUEST};
use crate::context::{IcountInterval, MergeContext, Part, RunContext, ToolSummary};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

pub use baseline::Baseline;
pub use memtrace::COLUMNS as MEMTRACE_COLUMNS;

/// What `keyframe analyze --help` says about a tool.
#[derive(Clone, Copy, Debug)]
pub struct ToolDescription {
    /// The tool's name on the command line.
    pub name: &'static str,
    /// One line about the tool.
    pub about: &'static str,
    /// Each of its `--tool-arg`s: the name, and one line about it.
    pub arguments: &'static [(&'static str, &'static str)],
    /// Each of its result files: the name, and one line about its columns.
    pub results: &'static [(&'static str, &'static str)],
}

/// An analysis tool.
pub trait Tool: Send + Sync {
    /// Returns the tool's name, which labels parts and logs.
    fn name(&self) -> &str;

    /// Returns the number of earlier intervals that a run replays first, so that the tool knows the
    /// state at the beginning of its interval. The parts of these warm-up intervals are dropped.
    fn warm_up_intervals(&self) -> usize {
        0
    }

    /// Tells the tool, before its first run, that no interval ends in the state in which the next
    /// one begins: they are simulations of a run that was not recorded. A tool whose state goes on
    /// from one interval to the next then finds what it can in each interval alone.
    fn expect_separate_intervals(&mut self) {}

    /// Returns whether the tool reads the guest's RAM, which must then be complete before the VM
    /// runs.
    fn reads_ram(&self) -> bool {
        false
    }

    /// Returns the names of the guest's processors that the tool knows; `None` if it does not look
    /// at the processor.
    fn processors(&self) -> Option<&'static [&'static str]> {
        None
    }

    /// Returns whether the merge needs the symbols of the guest's kernel
    /// ([`MergeContext::guest_symbols`]), which the caller finds in a checkpoint's RAM.
    fn needs_guest_symbols(&self) -> bool {
        false
    }

    /// Returns whether a run may have more than one interval.
    fn can_cut(&self) -> bool {
        true
    }

    /// Returns a factor if each interval must take at least so many times its recorded time. The
    /// caller waits for the rest before it ends an interval. This is for measurements only.
    fn waits(&self) -> Option<u64> {
        None
    }

    /// Prepares a run: makes what the tool's plugin needs, before the run's QEMU starts. Errors:
    /// [`Error::File`] and [`Error::Plugin`] if what the plugin needs cannot be made.
    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>>;

    /// Merges the parts of all intervals into result files and returns a summary of them. Errors:
    /// [`Error::File`]; [`Error::Damaged`] for an invalid part; [`Error::Parquet`];
    /// [`Error::MergeCommand`].
    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary>;
}

/// One run of a tool: from before its QEMU starts until after that QEMU has exited.
pub trait ToolRun: Send {
    /// Returns the value of QEMU's option `-plugin`.
    fn option(&self) -> String;

    /// Ends the present interval (at first the warm-up, if there is one) and begins `next`, which
    /// starts where the present one ends: the first interval after the warm-up, `None` after the
    /// last interval. Called while the VM is stopped. Errors: [`Error::Plugin`] if the plugin has
    /// given up; [`Error::File`].
    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()>;

    /// Returns the parts that are complete, in their order, each once. Called while the VM is
    /// stopped, after a cut. A tool may hold parts back until [`ToolRun::finish`]. Errors:
    /// [`Error::File`].
    fn completed(&mut self) -> Result<Vec<Part>> {
        Ok(Vec::new())
    }

    /// Returns the parts of all other intervals, in their order. Called after the last cut, when
    /// QEMU has exited regularly. Errors: [`Error::Plugin`]; [`Error::Cuts`] if an interval was not
    /// cut; [`Error::File`].
    fn finish(self: Box<Self>) -> Result<Vec<Part>>;
}

/// The arguments of a tool, as given with `--tool-arg NAME=VALUE`.
pub struct ToolArguments {
    tool: &'static str,
    given: BTreeMap<String, String>,
}

impl ToolArguments {
    fn new(description: &ToolDescription, given: &[String]) -> Result<Self> {
        let tool = description.name;
        let refuse = |argument: &str, problem: String| {
            Err(Error::Argument { tool: tool.into(), argument: argument.into(), problem })
        };
        let mut all = BTreeMap::new();
        for text in given {
            let Some((name, value)) = text.split_once('=') else {
                return refuse(text, "write NAME=VALUE".into());
            };
            if !description.arguments.iter().any(|(known, _)| *known == name) {
                let known: Vec<_> = description.arguments.iter().map(|(known, _)| *known).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return refuse(text, format!("unknown; the tool takes {known}"));
            }
            if all.insert(name.to_owned(), value.to_owned()).is_some() {
                return refuse(text, "given twice".into());
            }
        }
        Ok(Self { tool, given: all })
    }

    /// The value of an argument, if it is given.
    fn text(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(String::as_str)
    }

    /// A number from `least` to `most`: decimal or with 0x, with a suffix K, M or G for powers of
    /// 1024.
    fn number(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match parse_number(text).filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, format!("not a number from {least} to {most}"))),
        }
    }

    /// The symbols that the argument `symbols` names; empty if there is none.
    fn symbols(&self) -> Result<CodeSymbols> {
        CodeSymbols::of_argument(self.text("symbols"), self.slide()?)
    }

    /// What is added to each address of a symbol file.
    fn slide(&self) -> Result<u64> {
        let slide = self.number("slide", 0, u64::MAX)?;
        if slide.is_some() && self.text("symbols") == Some(GUEST) {
            return Err(self.wrong("slide", "the guest's own symbols need none".into()));
        }
        Ok(slide.unwrap_or(0))
    }

    fn missing(&self, name: &str, meaning: &str) -> Error {
        let problem = format!("required: {meaning}");
        Error::Argument { tool: self.tool.into(), argument: name.into(), problem }
    }

    fn wrong(&self, name: &str, problem: String) -> Error {
        let argument = format!("{name}={}", self.text(name).unwrap_or_default());
        Error::Argument { tool: self.tool.into(), argument, problem }
    }
}

fn parse_number(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let number: u64 = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    number.checked_mul(unit)
}

type MakeTool = fn(&ToolArguments) -> Result<Box<dyn Tool>>;

/// All tools of this program, in the order of the help.
const TOOLS: &[(ToolDescription, MakeTool)] = &[
    (icount::DESCRIPTION, icount::make),
    (hot::DESCRIPTION, hot::make),
    (memtrace::DESCRIPTION, memtrace::make),
    (coverage::DESCRIPTION, coverage::make),
    (working_set::DESCRIPTION, working_set::make),
    (watch::DESCRIPTION, watch::make),
    (syscalls::DESCRIPTION, syscalls::make),
    (cache::DESCRIPTION, cache::make),
    (wait::DESCRIPTION, wait::make),
];

/// The arguments of tools that name code.
const SYMBOLS: [(&str, &str); 2] = [
    (
        "symbols",
        "file with symbols: vmlinux, System.map or a copy of /proc/kallsyms; or guest: those that \
         the guest's Linux kernel has in its RAM, even if it is stripped",
    ),
    (
        "slide",
        "added to each address of the symbols, for a kernel with a randomized base (default 0)",
    ),
];

/// Returns the help of each tool, in the order of the help.
pub fn descriptions() -> impl Iterator<Item = &'static ToolDescription> {
    TOOLS.iter().map(|(description, _)| description)
}

/// Makes the tool `name` with its arguments, each a text `NAME=VALUE`. The help does not list the
/// names of [`Baseline`], which this function knows too.
///
/// Errors: [`Error::UnknownTool`] if there is no such tool; [`Error::Argument`] if it does not
/// accept an argument; errors of reading symbols.
pub fn by_name(name: &str, arguments: &[String]) -> Result<Box<dyn Tool>> {
    if let (Some(baseline), []) = (Baseline::by_name(name), arguments) {
        return Ok(Box::new(baseline));
    }
    let Some((description, make)) = TOOLS.iter().find(|(description, _)| description.name == name)
    else {
        let known: Vec<_> = descriptions().map(|one| one.name).collect();
        return Err(Error::UnknownTool { name: name.into(), known: known.join(", ") });
    };
    make(&ToolArguments::new(description, arguments)?)
}

/// The value of `-plugin`. QEMU requires each comma of a value twice.
pub(crate) fn plugin_option(plugin: &Path, arguments: &[(&str, &str)]) -> String {
    let mut option = format!("file={}", plugin.display().to_string().replace(',', ",,"));
    for (name, value) in arguments {
        let _ = write!(option, ",{name}={}", value.replace(',', ",,"));
    }
    option
}
