//! The files in the directory of an analysis.

use crate::error::{AnalysisError, Error, Result};
use crate::job_spec::read_json;
use crate::{AnalysisSubject, StartTimes};
use keyframe_analysis::Part;
use keyframe_replay::interval::Interval;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The file that says what is analysed, and how.
const HEADER: &str = "analysis.json";
/// The file with QEMU's messages during a part.
pub(super) const QEMU_LOG: &str = "qemu.log";
/// The file that marks a complete part.
pub(super) const DONE: &str = "done";
/// The file that says why a part failed.
pub(super) const FAILED: &str = "failed";
/// The file that says how long each interval took.
pub(super) const TIMES: &str = "intervals.json";
/// How much of QEMU's messages is kept for an interval, in bytes.
const MESSAGES_BYTES_MAX: u64 = 64 << 10;
/// How many lines of QEMU's messages the error of an interval has.
pub(super) const MESSAGE_LINES: usize = 4;

/// Returns the beginning of QEMU's messages.
pub(super) fn qemu_messages(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(MESSAGES_BYTES_MAX).read_to_end(&mut bytes));
    // A QEMU that was not started has written no file.
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of `format` in `analysis.json`.
const FORMAT: &str = "keyframe-analysis";
/// The version of `analysis.json` and of what lies beside it that is written and read.
const VERSION: u32 = 1;

/// The contents of `analysis.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnalysisHeader {
    /// [`FORMAT`].
    pub(super) format: String,
    /// [`VERSION`].
    pub(super) version: u32,
    /// The id of the recording, or of the run that was not recorded.
    pub recording: String,
    /// True for a run that was not recorded: the results are what may have happened.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_approximate: bool,
    /// The tool's name, or the path of its manifest.
    pub tool: String,
    /// The tool's arguments.
    pub arguments: Vec<String>,
    /// The intervals to analyse.
    pub intervals: Vec<Interval>,
}

impl AnalysisHeader {
    /// Reads the header of the analysis in `out`.
    ///
    /// # Errors
    ///
    /// [`AnalysisError::FormatVersion`] or [`AnalysisError::PreRelease`] if it has another format;
    /// other errors if it cannot be read.
    pub fn read(out: &Path) -> Result<Self> {
        let path = out.join(HEADER);
        require_format(&path, &read_json(&path)?)?;
        read_json(&path)
    }

    /// Makes the header of a new analysis, without intervals.
    pub fn of(subject: AnalysisSubject<'_>, tool: &str, arguments: &[String]) -> Self {
        let is_approximate = subject.is_approximate();
        let (recording, tool) = (subject.id().to_owned(), tool.to_owned());
        Self {
            format: FORMAT.into(),
            version: VERSION,
            recording,
            is_approximate,
            tool,
            arguments: arguments.into(),
            intervals: Vec::new(),
        }
    }

    /// Writes it into `out` by a rename, because workers read it at any time.
    pub(super) fn save(&self, out: &Path) -> Result<()> {
        let (new, path) = (out.join("analysis.new"), out.join(HEADER));
        write(&new, serde_json::to_string_pretty(self).unwrap_or_default().as_bytes())?;
        std::fs::rename(&new, &path).map_err(|e| Error::file("rename", &new, e))
    }

    /// Returns true if this is `other`, with further intervals or none.
    pub(super) fn continues(&self, other: &Self) -> bool {
        let but_intervals = |head: &Self| Self { intervals: Vec::new(), ..head.clone() };
        self.intervals.starts_with(&other.intervals) && but_intervals(self) == but_intervals(other)
    }
}

/// The keys of `analysis.json` that tell its format.
#[derive(Deserialize)]
struct FormatHead {
    format: Option<String>,
    version: Option<u32>,
}

/// Refuses `analysis.json` at `path` unless it has the format and version of this program.
fn require_format(path: &Path, head: &FormatHead) -> Result<()> {
    let path = path.to_owned();
    let version = head.version.map_or_else(|| "none".into(), |version| version.to_string());
    Err(match head.format.as_deref() {
        Some(FORMAT) if head.version == Some(VERSION) => return Ok(()),
        Some(FORMAT) => AnalysisError::FormatVersion { path, version, supported: VERSION },
        _ => AnalysisError::PreRelease { path, version },
    }
    .into())
}

/// The complete part of an interval.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FinishedPart {
    /// The interval's index.
    pub index: u32,
    /// The number of tries that it took.
    pub tries: u32,
    /// The time from the first try to the end of the last, in nanoseconds.
    pub wall_ns: u64,
    /// The time at which its first try began, in nanoseconds since 1970.
    pub began_at_ns: u64,
    /// The name of the worker that made it.
    pub worker: String,
    /// How long the start of its QEMU took, as part of its time; `None` if the QEMU had replayed
    /// the interval before.
    pub start: Option<StartTimes>,
    /// True if an earlier run made it.
    #[serde(skip)]
    pub is_old: bool,
    pub(super) parts: Vec<Part>,
}

/// Writes a file.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|e| Error::file("write", path, e))
}

/// Makes a directory, or empties it.
pub(super) fn empty_dir(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::file("empty", dir, e));
        }
        _ => {}
    }
    std::fs::create_dir_all(dir).map_err(|e| Error::file("make", dir, e))
}

/// The duration of an interval's analysis.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct IntervalTiming {
    /// The interval's index.
    pub index: u32,
    /// The number of tries that it took.
    pub tries: u32,
    /// The time from the first try to the end of the last, in nanoseconds.
    pub wall_ns: u64,
    /// The time at which its first try began, in nanoseconds since 1970.
    pub began_at_ns: u64,
}

impl From<&FinishedPart> for IntervalTiming {
    fn from(&FinishedPart { index, tries, wall_ns, began_at_ns, .. }: &FinishedPart) -> Self {
        Self { index, tries, wall_ns, began_at_ns }
    }
}

/// Returns the median time between the end of a range and the begin of the next one on the same
/// worker, in nanoseconds; `None` if no worker made two ranges.
pub fn median_dispatch_ns(done: &[FinishedPart]) -> Option<u64> {
    let mut all: Vec<&FinishedPart> = done.iter().collect();
    all.sort_by_key(|one| (&one.worker, one.began_at_ns));
    let between = |pair: &[&FinishedPart]| {
        let is_one = pair[0].worker == pair[1].worker && pair[1].start.is_some();
        is_one.then(|| {
            pair[1].began_at_ns.saturating_sub(pair[0].began_at_ns.saturating_add(pair[0].wall_ns))
        })
    };
    let mut gaps: Vec<u64> = all.windows(2).filter_map(between).collect();
    gaps.sort_unstable();
    gaps.get(gaps.len() / 2).copied()
}

/// Returns the header of the analysis in `out`, and how long its finished intervals took.
///
/// # Errors
///
/// [`AnalysisError::NotAnAnalysis`] if `out` does not hold an analysis.
pub fn previous_timings(out: &Path) -> Result<(AnalysisHeader, Vec<IntervalTiming>)> {
    let head = AnalysisHeader::read(out).map_err(|e| AnalysisError::NotAnAnalysis(Box::new(e)))?;
    let all = std::fs::read_to_string(out.join(TIMES)).ok();
    let all: Option<Vec<IntervalTiming>> = all.and_then(|text| serde_json::from_str(&text).ok());
    let so_far = || {
        head.intervals
            .iter()
            .filter_map(|one| finished_part(out, one))
            .map(|done| IntervalTiming::from(&done))
    };
    let took = all.unwrap_or_else(|| so_far().collect());
    Ok((head, took))
}

/// The progress of an interval of an analysis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntervalState {
    /// The interval's part is complete.
    Done,
    /// The interval's part failed in all tries.
    Failed,
    /// The interval waits, or is being replayed.
    Waiting,
}

/// Returns the header of the analysis in `out`, and the state of each of its intervals.
///
/// # Errors
///
/// [`AnalysisError::NotAnAnalysis`] if `out` does not hold an analysis.
pub fn interval_states(out: &Path) -> Result<(AnalysisHeader, Vec<IntervalState>)> {
    let head = AnalysisHeader::read(out).map_err(|e| AnalysisError::NotAnAnalysis(Box::new(e)))?;
    let state = |interval: &Interval| {
        let place = part_dir(out, interval);
        let has = |file: &str| place.join(file).exists();
        match () {
            () if has(DONE) => IntervalState::Done,
            () if has(FAILED) => IntervalState::Failed,
            () => IntervalState::Waiting,
        }
    };
    // The parts are removed after the merge; the timings stay.
    let is_merged = out.join(TIMES).exists() && !out.join("parts").exists();
    let states = head
        .intervals
        .iter()
        .map(|one| if is_merged { IntervalState::Done } else { state(one) })
        .collect();
    Ok((head, states))
}

/// Returns the directory of the interval's part.
pub(super) fn part_dir(out: &Path, interval: &Interval) -> PathBuf {
    out.join("parts").join(format!("{:06}", interval.index))
}

/// Reads the part of `interval`; `None` if it is not complete.
pub(super) fn finished_part(out: &Path, interval: &Interval) -> Option<FinishedPart> {
    let place = part_dir(out, interval);
    let text = std::fs::read_to_string(place.join(DONE)).ok()?;
    let mut done: FinishedPart = serde_json::from_str(&text).ok()?;
    // Its directory had another name when this was written.
    done.parts.iter_mut().for_each(|part| part.dir.clone_from(&place));
    (done.index == interval.index).then_some(done)
}

/// Makes `out` the directory of the analysis with header `head`, and locks it for the caller. The
/// lock ends with the returned file.
pub(super) fn claim(out: &Path, head: &AnalysisHeader) -> Result<std::fs::File> {
    let file = out.join(HEADER);
    match std::fs::read_to_string(&file) {
        Ok(there) => {
            if let Ok(format) = serde_json::from_str::<FormatHead>(&there) {
                require_format(&file, &format)?;
            }
            let is_same = serde_json::from_str::<AnalysisHeader>(&there)
                .is_ok_and(|there| head.continues(&there));
            if !is_same {
                return Err(AnalysisError::OtherAnalysis(out.to_owned()).into());
            }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => make_empty(out)?,
        Err(e) => return Err(Error::file("read", &file, e)),
    }
    let lock = lock(out)?;
    head.save(out)?;
    Ok(lock)
}

/// Makes `out`, or checks that it is empty.
fn make_empty(out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).map_err(|e| Error::file("make", out, e))?;
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::file("read", out, e))?;
    if entries.next().is_some() {
        return Err(AnalysisError::NotEmpty(out.to_owned()).into());
    }
    Ok(())
}

/// Locks the directory. The kernel ends the lock with the process.
fn lock(out: &Path) -> Result<std::fs::File> {
    let path = out.join("lock");
    let file = std::fs::File::options().create(true).append(true).open(&path);
    let file = file.map_err(|e| Error::file("open", &path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(AnalysisError::Busy(out.to_owned()).into()),
        Err(std::fs::TryLockError::Error(e)) => Err(Error::file("lock", &path, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn analyses_of_other_formats_are_refused() {
        let check = |text: &str| {
            let head: FormatHead = serde_json::from_str(text).unwrap();
            require_format(Path::new("analysis.json"), &head).map_err(|refused| refused.to_string())
        };
        assert!(check(r#"{"format": "keyframe-analysis", "version": 1}"#).is_ok());
        let later = check(r#"{"format": "keyframe-analysis", "version": 2}"#).unwrap_err();
        assert!(later.contains("version 2; this Keyframe reads version 1"), "{later}");
        let old = check(r#"{"recording": "0", "tool": "icount"}"#).unwrap_err();
        assert!(old.contains("pre-release Keyframe (format version none)"), "{old}");
    }
}
