//! What a worker on another node needs to know to make parts of an analysis: `OUT/order.json`.

use crate::error::{AnalysisError, Error, Result};
use crate::event::SharedReplayEventSink;
use crate::{
    Analysis, AnalysisHeader, AnalysisSubject, LiveRecording, ReplayableRecording, UnrecordedRun,
};
use keyframe_analysis::{ThirdPartyTool, Tool, tools};
use keyframe_store_keys::KeyArg;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The longest file that is read here, in bytes: some million intervals.
const BYTES_MAX: u64 = 1 << 30;

/// The description of an analysis for its workers. All paths are absolute, and the same on each
/// node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The recording, or the store of a run that was not recorded.
    pub subject: PathBuf,
    /// The part of the run if the subject is a run that was not recorded; `None` for a recording.
    pub captured: Option<RunSelection>,
    /// The store of the recording's checkpoints, if it is not the one that the recording names.
    pub store: Option<PathBuf>,
    /// The key file of the store; `None` if the store is not encrypted.
    pub key_file: Option<PathBuf>,
    /// The QEMU binary for the replays; `None` for the one that recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu: Option<PathBuf>,
    /// True if the recording or the run may still be in progress.
    pub follow: bool,
    /// The number of times that an interval is tried.
    pub tries: u32,
}

/// Selects a part of a run that was not recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSelection {
    /// The VM; `None` for the VM of the newest checkpoint.
    pub vm: Option<String>,
    /// The id of the first checkpoint.
    pub from: Option<u64>,
    /// The id of the last checkpoint.
    pub to: Option<u64>,
}

/// An opened subject of an analysis.
pub enum OpenedSubject {
    /// A complete recording.
    Recorded(Box<ReplayableRecording>),
    /// A recording that is still being made.
    Live(Box<LiveRecording>),
    /// A run that was not recorded.
    Unrecorded(Box<UnrecordedRun>),
}

impl OpenedSubject {
    /// Borrows the subject for an analysis.
    pub fn subject(&self) -> AnalysisSubject<'_> {
        match self {
            Self::Recorded(recording) => AnalysisSubject::Recorded(recording),
            Self::Live(live) => AnalysisSubject::Live(live),
            Self::Unrecorded(run) => AnalysisSubject::Unrecorded(run),
        }
    }
}

/// Returns the tool with this name. A name that ends with `.toml` is the path of the manifest of a
/// third party's tool. `is_approximate` tells that the intervals to analyse are simulated
/// ([`AnalysisSubject::is_approximate`]), so that none goes on where the one before ends. Errors:
/// there is no such tool; it does not take the arguments; the manifest cannot be read.
pub fn tool(name: &str, arguments: &[String], is_approximate: bool) -> Result<Box<dyn Tool>> {
    let is_manifest = Path::new(name).extension().is_some_and(|extension| extension == "toml");
    let tool = if is_manifest {
        ThirdPartyTool::read(Path::new(name), arguments).map(|tool| Box::new(tool) as Box<dyn Tool>)
    } else {
        tools::by_name(name, arguments)
    };
    let mut tool = tool.map_err(Error::from)?;
    if is_approximate {
        tool.expect_separate_intervals();
    }
    Ok(tool)
}

impl JobSpec {
    /// Opens the subject of the analysis.
    ///
    /// # Errors
    ///
    /// A recording that is not followed must have ended. One that is followed must have begun:
    /// [`Error::NoStoreYet`] otherwise.
    pub fn open(&self, key: &KeyArg, events: SharedReplayEventSink) -> Result<OpenedSubject> {
        if let Some(selection) = &self.captured {
            let store = key.open(&self.subject).map_err(|e| Error::store(&self.subject, e))?;
            let run = UnrecordedRun::open(store, selection.clone(), self.follow)?;
            return Ok(OpenedSubject::Unrecorded(Box::new(run)));
        }
        if self.follow {
            let live = LiveRecording::open(&self.subject, self.store.as_deref(), key, events)?;
            let live = live.ok_or_else(|| Error::NoStoreYet(self.subject.clone()))?;
            return Ok(OpenedSubject::Live(Box::new(live)));
        }
        let mut recording =
            ReplayableRecording::open(&self.subject, self.store.as_deref(), key, &*events)?;
        recording.find_qemu(self.qemu.as_deref())?;
        Ok(OpenedSubject::Recorded(Box::new(recording)))
    }

    /// Writes the description into `out`, the directory of its analysis. Error: the file cannot be
    /// written.
    pub fn write(&self, out: &Path) -> Result<()> {
        let path = out.join("order.json");
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        std::fs::write(&path, text).map_err(|e| Error::file("write", &path, e))
    }

    /// Reads the description in `out`, the directory of an analysis. Error: the file cannot be
    /// read, or is not a job specification.
    pub fn read(out: &Path) -> Result<Self> {
        read_json(&out.join("order.json"))
    }

    /// Joins the analysis in `out`, whose header is `head`, as a worker.
    ///
    /// # Errors
    ///
    /// [`AnalysisError::OtherRecording`] if `opened` is not the subject of that analysis.
    pub fn join<'a>(
        &self,
        opened: &'a OpenedSubject,
        head: AnalysisHeader,
        tool: &'a dyn Tool,
        out: &Path,
    ) -> Result<Analysis<'a>> {
        let subject = opened.subject();
        if subject.id() != head.recording {
            return Err(AnalysisError::OtherRecording {
                out: out.to_owned(),
                found: head.recording,
                subject: self.subject.clone(),
            }
            .into());
        }
        Analysis::join(subject, tool, head, out)
    }
}

/// Reads a JSON file.
pub(crate) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(BYTES_MAX).read_to_string(&mut text))
        .map_err(|e| Error::file("read", path, e))?;
    serde_json::from_str(&text)
        .map_err(|source| AnalysisError::Json { path: path.to_owned(), source }.into())
}
