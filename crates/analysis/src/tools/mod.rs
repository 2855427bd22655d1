//! The tools, one file each, and what all of them are to whoever runs them.
//!
//! ```text
//!   by_name ▶ Tool ── begin(run) ──▶ Running ── option() ──▶ QEMU's -plugin
//!                                      │  VM stands still at an interval's end: cut()
//!                                      └─ QEMU has ended: finish() ──▶ Part, Part ...
//!               └──── merge(all parts in order) ──▶ result files, Summary
//! ```

mod baseline;
mod cache;
mod coverage;
mod events;
mod hot;
mod icount;
mod memtrace;
mod reduced;
mod ringed;
mod syscall_names;
mod syscalls;
mod watch;
mod working_set;

use crate::context::{MergeContext, Part, RunContext, Summary};
use crate::error::{Error, Result};
use crate::symbols::Symbols;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

pub use baseline::{Baseline, baseline};
pub use memtrace::COLUMNS as MEMTRACE_COLUMNS;

/// What a tool says of itself.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// As it is asked for.
    pub name: &'static str,
    /// One line.
    pub about: &'static str,
    /// Its `--tool-arg`s: name, and one line.
    pub arguments: &'static [(&'static str, &'static str)],
    /// Its result files: name, and one line.
    pub results: &'static [(&'static str, &'static str)],
}

/// An analysis.
pub trait Tool: Send + Sync {
    /// Its name, as parts and logs are labelled.
    fn name(&self) -> &str;

    /// How many intervals before one it wants to see, to know the state in which that begins: a run
    /// then has them as its first intervals, and their parts, which know less, are dropped.
    fn warm_up_intervals(&self) -> usize {
        0
    }

    /// Whether it looks into the guest's RAM, which then has to be there before the VM runs.
    fn reads_ram(&self) -> bool {
        false
    }

    /// Whether a run can have more than one interval.
    fn can_cut(&self) -> bool {
        true
    }

    /// Prepares a run: before its QEMU is started.
    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>>;

    /// Makes the results of all parts.
    fn merge(&self, merge: &MergeContext) -> Result<Summary>;
}

/// A run, from before its QEMU starts until after it has ended.
pub trait Running: Send {
    /// The value of QEMU's option `-plugin`.
    fn option(&self) -> String;

    /// An interval (first the warm-up, if there is one) ends; the VM stands still. Also for the
    /// last one, before QEMU quits.
    fn cut(&mut self) -> Result<()>;

    /// QEMU has ended by itself (asked to by its monitor), after the last cut. Returns a part for
    /// each interval.
    fn finish(self: Box<Self>) -> Result<Vec<Part>>;
}

/// Arguments of a tool, as given with `--tool-arg NAME=VALUE`.
pub struct Arguments {
    tool: &'static str,
    given: BTreeMap<String, String>,
}

impl Arguments {
    fn new(description: &Description, given: &[String]) -> Result<Self> {
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

    /// A text.
    fn text(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(String::as_str)
    }

    /// A number, decimal or with 0x, with K, M or G behind it for powers of 1024.
    fn number(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match number(text).filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, format!("no number from {least} to {most}"))),
        }
    }

    /// What [`SYMBOLS`] say; none where no file is named.
    fn symbols(&self) -> Result<Symbols> {
        let slide = self.slide()?;
        self.text("symbols")
            .map_or_else(|| Ok(Symbols::default()), |path| Symbols::read(Path::new(path), slide))
    }

    fn slide(&self) -> Result<u64> {
        Ok(self.number("slide", 0, u64::MAX)?.unwrap_or(0))
    }

    fn missing(&self, name: &str, what: &str) -> Error {
        let problem = format!("it must be given: {what}");
        Error::Argument { tool: self.tool.into(), argument: name.into(), problem }
    }

    fn wrong(&self, name: &str, problem: String) -> Error {
        let argument = format!("{name}={}", self.text(name).unwrap_or_default());
        Error::Argument { tool: self.tool.into(), argument, problem }
    }
}

fn number(text: &str) -> Option<u64> {
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

type Make = fn(&Arguments) -> Result<Box<dyn Tool>>;

/// All tools of this program.
const TOOLS: &[(Description, Make)] = &[
    (icount::DESCRIPTION, icount::make),
    (hot::DESCRIPTION, hot::make),
    (memtrace::DESCRIPTION, memtrace::make),
    (coverage::DESCRIPTION, coverage::make),
    (working_set::DESCRIPTION, working_set::make),
    (watch::DESCRIPTION, watch::make),
    (syscalls::DESCRIPTION, syscalls::make),
    (cache::DESCRIPTION, cache::make),
];

/// Arguments of the tools that name code.
const SYMBOLS: [(&str, &str); 2] = [
    ("symbols", "file that names code: vmlinux, System.map or a copy of /proc/kallsyms"),
    (
        "slide",
        "added to each of its addresses, where the kernel placed itself elsewhere (default 0)",
    ),
];

/// What each says of itself, in the order of help.
pub fn descriptions() -> impl Iterator<Item = &'static Description> {
    TOOLS.iter().map(|(description, _)| description)
}

/// The tool of this name, with its arguments; also one of those that tools are compared with
/// ([`Baseline`]), which no help lists.
pub fn by_name(name: &str, arguments: &[String]) -> Result<Box<dyn Tool>> {
    if let (Some(baseline), []) = (Baseline::by_name(name), arguments) {
        return Ok(Box::new(baseline));
    }
    let Some((description, make)) = TOOLS.iter().find(|(description, _)| description.name == name)
    else {
        let known: Vec<_> = descriptions().map(|one| one.name).collect();
        return Err(Error::UnknownTool { name: name.into(), known: known.join(", ") });
    };
    make(&Arguments::new(description, arguments)?)
}

/// The value of `-plugin`: QEMU wants each comma of a value twice.
pub(crate) fn option(plugin: &Path, arguments: &[(&str, &str)]) -> String {
    let mut option = format!("file={}", plugin.display().to_string().replace(',', ",,"));
    for (name, value) in arguments {
        let _ = write!(option, ",{name}={}", value.replace(',', ",,"));
    }
    option
}

/// Refuses another number of cuts than the run has intervals.
pub(crate) fn check_cuts(run: &RunContext, cuts: usize) -> Result<()> {
    if cuts == run.cuts() { Ok(()) } else { Err(Error::Cuts { intervals: run.cuts(), cuts }) }
}
