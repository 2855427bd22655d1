//! How an analysis fails.

use std::path::PathBuf;

/// An analysis cannot be made, or its directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AnalysisError {
    /// Intervals are left, because the user asked for an end.
    #[error("interrupted")]
    Interrupted,
    /// A file of the analysis is not what this program writes.
    #[error("{}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The error of the JSON library.
        source: serde_json::Error,
    },
    /// The directory holds the analysis of another recording.
    #[error("{} is of recording {found}, and {} is not that one", out.display(), subject.display())]
    OtherRecording {
        /// The analysis' directory.
        out: PathBuf,
        /// The id of its recording.
        found: String,
        /// What was to be analysed.
        subject: PathBuf,
    },
    /// The directory holds an analysis of another recording than the one to measure.
    #[error("{} is an analysis of another recording", .0.display())]
    AnotherRecording(PathBuf),
    /// An analysis from which times are to be measured has no interval that is done.
    #[error("{} has no interval that is done", .0.display())]
    NoIntervalDone(PathBuf),
    /// The directory holds another analysis.
    #[error("{} holds another analysis", .0.display())]
    OtherAnalysis(PathBuf),
    /// The tool does not know the guest's processor.
    #[error("tool {tool} does not know guests of {processor}")]
    Processor {
        /// The tool's name.
        tool: String,
        /// The processor's name.
        processor: String,
        /// The processors that it knows.
        known: String,
    },
    /// The directory holds something else.
    #[error("{} exists and is not empty", .0.display())]
    NotEmpty(PathBuf),
    /// Another process works on the analysis.
    #[error("{} is being worked on by another keyframe analyze", .0.display())]
    Busy(PathBuf),
    /// The analysis has another version of the format.
    #[error(
        "{} has format version {version}; this Keyframe reads version {supported}",
        path.display()
    )]
    FormatVersion {
        /// Its `analysis.json`.
        path: PathBuf,
        /// The version, or `none`.
        version: String,
        /// The version that this program reads.
        supported: u32,
    },
    /// The analysis is of a Keyframe before the first release.
    #[error(
        "{} is of a pre-release Keyframe (format version {version}), which this Keyframe does not \
         read",
        path.display()
    )]
    PreRelease {
        /// Its `analysis.json`.
        path: PathBuf,
        /// The version, or `none`.
        version: String,
    },
    /// A directory that was named does not hold an analysis that can be read.
    #[error("{0}")]
    NotAnAnalysis(#[source] Box<crate::Error>),
    /// No interval lies in the range that was asked for.
    #[error("no interval of the recording lies between {from} and {to}")]
    EmptyRange {
        /// The first instruction of the range.
        from: u64,
        /// The first instruction after the range.
        to: u64,
        /// The number of instructions of the recording.
        instructions: u64,
    },
    /// The recording has no such interval.
    #[error("the recording has no interval {0}")]
    NoInterval(u32),
    /// The tool made no part of this interval, although it had ended.
    #[error("the tool has made no part of interval {0}")]
    NoPart(u32),
    /// The tool waits for a multiple of the recorded time, which is not known yet.
    #[error("how long interval {0} was recorded is known only after the end of the recording")]
    NoRecordedTime(u32),
    /// There is nothing to analyse.
    #[error("there is no interval to analyse")]
    NoIntervals,
    /// Checkpoints were added or removed during the analysis.
    #[error("the recording's checkpoints have changed while it was analysed")]
    CheckpointsChanged,
    /// Parts could not be made.
    #[error("{failed} of {count} intervals failed; interval {index}: {reason}")]
    IntervalsFailed {
        /// The number of intervals without a part.
        failed: usize,
        /// The number of all intervals.
        count: usize,
        /// The first of those without a part.
        index: u32,
        /// The reason why it has none.
        reason: String,
    },
    /// The VM has too few or too many RAM backends for tools.
    #[error("the recorded VM has {count} RAM backends; tools see from 1 to {max}")]
    RamBackends {
        /// The number of the VM's RAM backends.
        count: usize,
        /// The largest number that a tool can see.
        max: usize,
    },
    /// QEMU 7.2 does not tell plugins where memory modules are.
    #[error("plugins of QEMU 7.2 are not told where memory modules (-device pc-dimm) are")]
    MemoryModules,
    /// Under QEMU 7.2 addresses in two RAM backends are the same for plugins.
    #[error(
        "under QEMU 7.2 plugins cannot tell this VM's RAM backends apart, as they are made in \
         another order than its NUMA nodes"
    )]
    RamBackendOrder,
    /// The store has no checkpoint of the run that was asked for.
    #[error("{} has no such checkpoint", .0.display())]
    NoSuchCheckpoint(PathBuf),
    /// Checkpoints of a group cannot be simulated.
    #[error("a group of VMs cannot be simulated")]
    GroupNotSimulated,
    /// The run has no two checkpoints with an interval between them.
    #[error("{} has no two checkpoints of one run that follow each other", .0.display())]
    NoConsecutiveCheckpoints(PathBuf),
    /// A checkpoint's RAM has no symbols of a Linux kernel.
    #[error("checkpoint {checkpoint}: {problem}")]
    GuestSymbols {
        /// The checkpoint.
        checkpoint: keyframe_units::CheckpointId,
        /// Why none were found.
        problem: String,
    },
    /// Several intervals of a run that was not recorded were to be simulated by one QEMU.
    #[error("a run that was not recorded is simulated interval by interval")]
    SimulatedByInterval,
}

impl AnalysisError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        let text = match self {
            Self::Interrupted => "call it again: it goes on with the intervals that are missing",
            Self::OtherRecording { .. } | Self::NotEmpty(_) => {
                "name a directory that does not exist yet"
            }
            Self::Processor { known, .. } => {
                return Some(format!("use another tool; it knows {known}"));
            }
            Self::AnotherRecording(_) => "name one that keyframe analyze has made of this one",
            Self::NoIntervalDone(_) => "let keyframe analyze do some first",
            Self::OtherAnalysis(_) => {
                "name a directory that does not exist yet, or the same recording, tool and \
                 arguments to go on"
            }
            Self::Busy(_) => "wait until that one ends, or end it; it can be called again",
            Self::FormatVersion { .. } | Self::PreRelease { .. } => {
                "analyze again, into a new directory: --out DIR"
            }
            Self::NotAnAnalysis(_) => "name a directory that keyframe analyze has made",
            Self::EmptyRange { instructions, .. } => {
                return Some(format!("it has {instructions} instructions"));
            }
            Self::CheckpointsChanged => {
                "begin again in another directory, and leave the store alone meanwhile"
            }
            Self::IntervalsFailed { .. } => {
                "call it again to try those once more; keyframe verify tells whether the \
                 recording replays"
            }
            Self::RamBackends { .. } => "record it with fewer NUMA nodes",
            Self::MemoryModules => "record with QEMU 10, or with all memory in -m",
            Self::RamBackendOrder => {
                "name the -object of each node in the nodes' order, or record with QEMU 10"
            }
            Self::NoSuchCheckpoint(store) => {
                return Some(format!(
                    "see what there is: keyframe list --store {}",
                    store.display()
                ));
            }
            Self::GroupNotSimulated => "name a VM that ran by itself: --vm",
            Self::NoConsecutiveCheckpoints(_) => {
                "take some: keyframe run --store S -- qemu-system-x86_64 ..."
            }
            Self::NoRecordedTime(_) => {
                "analyze when the recording has ended, or record without --follow"
            }
            Self::GuestSymbols { .. } => {
                "use a file of the guest's kernel: --tool-arg symbols=FILE, a vmlinux or a System.map"
            }
            Self::Json { .. }
            | Self::NoInterval(_)
            | Self::NoPart(_)
            | Self::NoIntervals
            | Self::SimulatedByInterval => return None,
        };
        Some(text.into())
    }
}
