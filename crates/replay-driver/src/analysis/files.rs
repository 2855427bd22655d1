//! What lies in an analysis' directory.

use crate::Subject;
use crate::error::{AnalysisError, Error, Result};
use crate::order::read;
use keyframe_analysis::Part;
use keyframe_replay::interval::Interval;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};

/// What is analysed, and how.
const HEAD: &str = "analysis.json";
/// What QEMU says while it makes a part.
pub(super) const QEMU_LOG: &str = "qemu.log";
/// In the directory of a part that is whole.
pub(super) const DONE: &str = "done";
/// In that of one that could not be made: why.
pub(super) const FAILED: &str = "failed";
/// How long each interval took.
pub(super) const TIMES: &str = "intervals.json";
/// Of that, what an interval's log has.
const SAID_BYTES_MAX: u64 = 64 << 10;
/// And what the error has.
pub(super) const SAID_LINES: usize = 4;

/// What QEMU said, as far as it is told.
pub(super) fn said(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(SAID_BYTES_MAX).read_to_end(&mut bytes));
    // A QEMU that was not started said nothing.
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// The value of `format` in `analysis.json`.
const FORMAT: &str = "keyframe-analysis";
/// The version of `analysis.json` and of what lies beside it that is written and read.
const VERSION: u32 = 1;

/// The contents of `analysis.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`FORMAT`].
    pub(super) format: String,
    /// [`VERSION`].
    pub(super) version: u32,
    /// The recording's id, or that of a run that was not recorded.
    pub recording: String,
    /// That of a run: nobody can say that what is seen was so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_approximate: bool,
    /// The tool, as it was asked for.
    pub tool: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The intervals.
    pub intervals: Vec<Interval>,
}

impl Head {
    /// Reads that of the analysis in `out`, and refuses other formats.
    pub fn read(out: &Path) -> Result<Self> {
        let path = out.join(HEAD);
        require_format(&path, &read(&path)?)?;
        read(&path)
    }

    /// Without its intervals.
    pub fn of(subject: Subject<'_>, tool: &str, arguments: &[String]) -> Self {
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

    /// Leaves it in `out`, as a whole: workers read it meanwhile.
    pub(super) fn save(&self, out: &Path) -> Result<()> {
        let (new, path) = (out.join("analysis.new"), out.join(HEAD));
        write(&new, serde_json::to_string_pretty(self).unwrap_or_default().as_bytes())?;
        std::fs::rename(&new, &path).map_err(|e| Error::file("rename", &new, e))
    }

    /// Whether this one goes on with `other`: it is the same, but for intervals that have come
    /// about since.
    pub(super) fn goes_on_with(&self, other: &Self) -> bool {
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

/// A part that is there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Done {
    /// The interval.
    pub index: u32,
    /// Tries that it took.
    pub tries: u32,
    /// From QEMU's start to its end.
    pub wall_ns: u64,
    /// When its first try began, in nanoseconds since 1970.
    pub began_at_ns: u64,
    /// The worker that made it.
    pub worker: String,
    /// It was there from an earlier run.
    #[serde(skip)]
    pub is_old: bool,
    pub(super) parts: Vec<Part>,
}

/// Writes a file of its own.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|e| Error::file("write", path, e))
}

/// An empty directory.
pub(super) fn fresh(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::file("empty", dir, e));
        }
        _ => {}
    }
    std::fs::create_dir_all(dir).map_err(|e| Error::file("make", dir, e))
}

/// How long an interval took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Took {
    /// The interval.
    pub index: u32,
    /// Tries that it took.
    pub tries: u32,
    /// From QEMU's start to its end.
    pub wall_ns: u64,
    /// When its first try began, in nanoseconds since 1970.
    pub began_at_ns: u64,
}

impl From<&Done> for Took {
    fn from(&Done { index, tries, wall_ns, began_at_ns, .. }: &Done) -> Self {
        Self { index, tries, wall_ns, began_at_ns }
    }
}

/// What lies between an interval and the next of the same worker, in the median; none where no
/// worker had two.
pub fn dispatch_ns(done: &[Done]) -> Option<u64> {
    let mut all: Vec<&Done> = done.iter().collect();
    all.sort_by_key(|one| (&one.worker, one.began_at_ns));
    let between = |pair: &[&Done]| {
        let is_one = pair[0].worker == pair[1].worker;
        is_one.then(|| {
            pair[1].began_at_ns.saturating_sub(pair[0].began_at_ns.saturating_add(pair[0].wall_ns))
        })
    };
    let mut gaps: Vec<u64> = all.windows(2).filter_map(between).collect();
    gaps.sort_unstable();
    gaps.get(gaps.len() / 2).copied()
}

/// What the analysis in `out` is, and how long its intervals took, as far as they are done.
pub fn made_before(out: &Path) -> Result<(Head, Vec<Took>)> {
    let head = Head::read(out).map_err(|e| AnalysisError::NotAnAnalysis(Box::new(e)))?;
    let all = std::fs::read_to_string(out.join(TIMES)).ok();
    let all: Option<Vec<Took>> = all.and_then(|text| serde_json::from_str(&text).ok());
    let so_far =
        || head.intervals.iter().filter_map(|one| done_in(out, one)).map(|done| Took::from(&done));
    let took = all.unwrap_or_else(|| so_far().collect());
    Ok((head, took))
}

/// What the analysis in `out` is, and of each interval whether it is `done`, has `failed` or
/// `waits`.
pub fn progress(out: &Path) -> Result<(Head, Vec<&'static str>)> {
    let head = Head::read(out).map_err(|e| AnalysisError::NotAnAnalysis(Box::new(e)))?;
    let state = |interval: &Interval| {
        let place = place_in(out, interval);
        let has = |file: &str| place.join(file).exists();
        match () {
            () if has(DONE) => "done",
            () if has(FAILED) => "failed",
            () => "waits",
        }
    };
    // Parts go once they are merged; how long they took stays.
    let is_merged = out.join(TIMES).exists() && !out.join("parts").exists();
    let states =
        head.intervals.iter().map(|one| if is_merged { "done" } else { state(one) }).collect();
    Ok((head, states))
}

/// Where the part of `interval` is.
pub(super) fn place_in(out: &Path, interval: &Interval) -> PathBuf {
    out.join("parts").join(format!("{:06}", interval.index))
}

/// The part of `interval` that is in `out`.
pub(super) fn done_in(out: &Path, interval: &Interval) -> Option<Done> {
    let place = place_in(out, interval);
    let text = std::fs::read_to_string(place.join(DONE)).ok()?;
    let mut done: Done = serde_json::from_str(&text).ok()?;
    // It was made under another name.
    done.parts.iter_mut().for_each(|part| part.dir.clone_from(&place));
    (done.index == interval.index).then_some(done)
}

/// Makes `out` the place of the analysis that `head` says, and its caller the one who wants it.
pub(super) fn claim(out: &Path, head: &Head) -> Result<std::fs::File> {
    let file = out.join(HEAD);
    match std::fs::read_to_string(&file) {
        Ok(there) => {
            if let Ok(format) = serde_json::from_str::<FormatHead>(&there) {
                require_format(&file, &format)?;
            }
            let is_same =
                serde_json::from_str::<Head>(&there).is_ok_and(|there| head.goes_on_with(&there));
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

/// Makes `out`, unless it is there and empty.
fn make_empty(out: &Path) -> Result<()> {
    std::fs::create_dir_all(out).map_err(|e| Error::file("make", out, e))?;
    let mut entries = std::fs::read_dir(out).map_err(|e| Error::file("read", out, e))?;
    if entries.next().is_some() {
        return Err(AnalysisError::NotEmpty(out.to_owned()).into());
    }
    Ok(())
}

/// The kernel drops it with its process.
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
