//! What is measured in one process, and what comes of it; both travel as JSON.

use crate::stream::Stream;
use crate::{Error, Result};
use keyframe_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The largest image: the stream and what is compared with it are in memory, some four times as
/// much.
pub const IMAGE_MIB_MAX: u64 = 16 << 10;
const SECONDS_MAX: usize = 600;

/// How much of a page changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Words {
    /// 1 to 12 of its 512 words.
    Few,
    /// 32 to 256.
    Many,
}

impl Words {
    /// The least and the most.
    pub fn range(self) -> (u64, u64) {
        match self {
            Self::Few => (1, 12),
            Self::Many => (32, 256),
        }
    }
}

/// Where a stream comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Made in memory, from a fixed seed.
    Made {
        /// The guest's RAM.
        image_mib: u64,
        /// Seconds after the first image.
        seconds: usize,
        /// How much of a page changes.
        words: Words,
    },
    /// What was recorded of a VM, in the file that [`Stream::write`] has written.
    Recorded(PathBuf),
}

impl Source {
    /// The stream.
    pub fn stream(&self) -> Result<Stream> {
        match self {
            Self::Made { image_mib, seconds, words } => {
                Ok(Stream::new((image_mib << 20) / PAGE_BYTES as u64, *seconds, *words))
            }
            Self::Recorded(path) => Stream::read(path),
        }
    }
}

/// One store, one stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The store.
    pub store: String,
    /// An empty directory for its files.
    pub dir: PathBuf,
    /// What is fed.
    pub source: Source,
    /// Whether pages that are all known, and pages that are all new, are measured too.
    pub pure: bool,
    /// The core that everything runs on.
    pub cpu: usize,
}

impl Job {
    /// Reads one, and refuses what no memory holds.
    pub fn parse(text: &str) -> Result<Self> {
        let job: Self = serde_json::from_str(text).map_err(|e| Error::failed("read the job", e))?;
        match job.source {
            Source::Made { image_mib, seconds, .. }
                if image_mib == 0 || image_mib > IMAGE_MIB_MAX || seconds > SECONDS_MAX =>
            {
                let problem =
                    format!("at most {IMAGE_MIB_MAX} MiB and {SECONDS_MAX} seconds are possible");
                Err(Error::failed("read the job", problem))
            }
            _ => Ok(job),
        }
    }

    /// As one line.
    pub fn line(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::failed("write the job", e))
    }
}

/// Pages fed, and how long that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fed {
    /// Bytes of the pages.
    pub bytes: u64,
    /// Until the last of them was durable.
    pub ns: u64,
}

impl std::ops::AddAssign for Fed {
    fn add_assign(&mut self, more: Self) {
        self.bytes += more.bytes;
        self.ns += more.ns;
    }
}

/// Until an image was in memory; medians.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rebuilt {
    /// By one core.
    pub ns: u64,
    /// By all, for a store that has threads for it.
    pub all_cores_ns: Option<u64>,
}

/// What one store did with the stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// All ten checkpoints, from creating the store to closing it.
    pub whole: Fed,
    /// CPU time of that.
    pub cpu_ns: u64,
    /// The first image.
    pub image: Fed,
    /// The seconds after.
    pub steady: Fed,
    /// Pages that all deduplicate.
    pub dup: Option<Fed>,
    /// Pages that are all new.
    pub unique: Option<Fed>,
    /// What its files take on disk after the first image.
    pub image_stored_bytes: u64,
    /// After all ten checkpoints.
    pub ingested_bytes: u64,
    /// And in the end: once the store has done what it does when it is idle, for a store that does.
    pub stored_bytes: u64,
    /// CPU time of that.
    pub settle_cpu_ns: Option<u64>,
    /// The bytes of the stream's distinct pages.
    pub distinct_bytes: u64,
    /// The most memory that it took beside the stream.
    pub peak_bytes: u64,
    /// The last image, of the store as it is when the last checkpoint is durable.
    pub rebuilt: Rebuilt,
    /// The same in the end, for a store that does something when it is idle.
    #[serde(default)]
    pub rebuilt_settled: Option<Rebuilt>,
    /// Copying that image, zeros among it; median.
    pub memcpy_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_no_memory_holds_is_refused() {
        let of = |image_mib| Job {
            store: "x".into(),
            dir: "/d".into(),
            source: Source::Made { image_mib, seconds: 9, words: Words::Many },
            pure: true,
            cpu: 0,
        };
        let job = of(64);
        assert_eq!(Job::parse(&job.line().unwrap()).unwrap().source, job.source);
        for wrong in [1 << 40, 0] {
            Job::parse(&of(wrong).line().unwrap()).unwrap_err();
        }
        Job::parse("{").unwrap_err();
    }
}
