//! What a worker on another node must know to make parts: `OUT/order.json`.

use super::{Analysis, Captured, Followed, Head, Source, Subject};
use crate::error::{AnalysisError, Error, Result};
use crate::event::SharedEventSink;
use keyframe_analysis::{ThirdPartyTool, Tool, tools};
use keyframe_store_keys::KeyArg;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// More no file has that is read here: some million intervals.
const BYTES_MAX: u64 = 1 << 30;

/// It. All paths are absolute, and the same on each node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The recording, or, of a run that was not recorded, its store.
    pub subject: PathBuf,
    /// That run; none of a recording.
    pub captured: Option<Stretch>,
    /// The store, where the recording's own is not meant.
    pub store: Option<PathBuf>,
    /// What opens it.
    pub key_file: Option<PathBuf>,
    /// It may still be recorded.
    pub follow: bool,
    /// How often an interval is tried.
    pub tries: u32,
}

/// Part of a run that was not recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// The VM.
    pub vm: Option<String>,
    /// The first checkpoint.
    pub from: Option<u64>,
    /// The last one.
    pub to: Option<u64>,
}

/// What is analysed, opened.
pub enum Opened {
    /// A recording.
    Recorded(Box<Source>),
    /// One that is still made.
    Followed(Box<Followed>),
    /// A run.
    Captured(Box<Captured>),
}

impl Opened {
    /// As an analysis has it.
    pub fn subject(&self) -> Subject<'_> {
        match self {
            Self::Recorded(source) => Subject::Recorded(source),
            Self::Followed(followed) => Subject::Followed(followed),
            Self::Captured(captured) => Subject::Captured(captured),
        }
    }
}

/// The tool called `name`, or that of the manifest there.
pub fn tool(name: &str, arguments: &[String]) -> Result<Box<dyn Tool>> {
    let is_manifest = Path::new(name).extension().is_some_and(|extension| extension == "toml");
    let tool = if is_manifest {
        ThirdPartyTool::read(Path::new(name), arguments).map(|tool| Box::new(tool) as Box<dyn Tool>)
    } else {
        tools::by_name(name, arguments)
    };
    tool.map_err(Error::from)
}

impl Order {
    /// Opens what it is about. A recording that is to be followed need not have ended, but must
    /// have begun.
    pub fn open(&self, key: &KeyArg, events: SharedEventSink) -> Result<Opened> {
        if self.follow {
            let followed = Followed::open(&self.subject, self.store.as_deref(), key, events)?;
            let followed = followed.ok_or_else(|| Error::NoStoreYet(self.subject.clone()))?;
            return Ok(Opened::Followed(Box::new(followed)));
        }
        match &self.captured {
            Some(Stretch { vm, from, to }) => {
                let store = key.open(&self.subject).map_err(|e| Error::store(&self.subject, e))?;
                Captured::open(store, vm.as_deref(), *from, *to)
                    .map(|run| Opened::Captured(Box::new(run)))
            }
            None => Source::open(&self.subject, self.store.as_deref(), key, &*events)
                .map(|source| Opened::Recorded(Box::new(source))),
        }
    }

    /// Leaves it in `out`.
    pub fn write(&self, out: &Path) -> Result<()> {
        let path = out.join("order.json");
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        std::fs::write(&path, text).map_err(|e| Error::file("write", &path, e))
    }

    /// The one in `out`.
    pub fn read(out: &Path) -> Result<Self> {
        read(&out.join("order.json"))
    }

    /// The analysis in `out` that it belongs to.
    pub fn join<'a>(
        &self,
        opened: &'a Opened,
        head: Head,
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

/// What a file says as JSON.
pub fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(BYTES_MAX).read_to_string(&mut text))
        .map_err(|e| Error::file("read", path, e))?;
    serde_json::from_str(&text)
        .map_err(|source| AnalysisError::Json { path: path.to_owned(), source }.into())
}
