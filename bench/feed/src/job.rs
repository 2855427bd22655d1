//! The job of one process and its result. Both are exchanged as JSON.

use crate::stream::Stream;
use crate::{Error, Result};
use keyframe_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The largest image. The stream and the images for comparison take about four times as much memory.
pub const IMAGE_MIB_MAX: u64 = 16 << 10;
/// The largest number of seconds.
const SECONDS_MAX: usize = 600;

/// How many words of a page change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedWords {
    /// 1 to 12 of 512 words.
    Few,
    /// 32 to 256 of 512 words.
    Many,
}

impl ChangedWords {
    /// Returns the smallest and the largest number of words.
    pub fn range(self) -> RangeInclusive<u64> {
        match self {
            Self::Few => 1..=12,
            Self::Many => 32..=256,
        }
    }
}

/// The source of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamSource {
    /// Made in memory, from a fixed seed.
    Made {
        /// The guest's RAM.
        image_mib: u64,
        /// The number of seconds after the first image.
        seconds: usize,
        /// How many words of a page change.
        words: ChangedWords,
    },
    /// Recorded from a VM, in a file of [`Stream::write`].
    Recorded(PathBuf),
}

impl StreamSource {
    /// Makes or reads the stream.
    pub fn stream(&self) -> Result<Stream> {
        match self {
            Self::Made { image_mib, seconds, words } => {
                Ok(Stream::new((image_mib << 20) / PAGE_BYTES as u64, *seconds, *words))
            }
            Self::Recorded(path) => Stream::read(path),
        }
    }
}

/// The measurement of one store with one stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The name of the store.
    pub store: String,
    /// An empty directory for its files.
    pub dir: PathBuf,
    /// The stream to feed.
    pub source: StreamSource,
    /// Whether streams of only known pages and of only new pages are measured too.
    pub pure: bool,
    /// The core on which the job runs.
    pub cpu: usize,
}

impl Job {
    /// Parses a job. Refuses streams that are too large.
    pub fn parse(text: &str) -> Result<Self> {
        let job: Self = serde_json::from_str(text).map_err(|e| Error::failed("read the job", e))?;
        match job.source {
            StreamSource::Made { image_mib, seconds, .. }
                if image_mib == 0 || image_mib > IMAGE_MIB_MAX || seconds > SECONDS_MAX =>
            {
                let problem =
                    format!("at most {IMAGE_MIB_MAX} MiB and {SECONDS_MAX} seconds are allowed");
                Err(Error::failed("read the job", problem))
            }
            _ => Ok(job),
        }
    }

    /// Returns the job as one line of JSON.
    pub fn line(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| Error::failed("write the job", e))
    }
}

/// The size and the time of fed pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FeedTime {
    /// The bytes of the pages.
    pub bytes: u64,
    /// The time until the last page was durable.
    pub ns: u64,
}

impl std::ops::AddAssign for FeedTime {
    fn add_assign(&mut self, more: Self) {
        self.bytes += more.bytes;
        self.ns += more.ns;
    }
}

/// The median times to read an image into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RebuildTimes {
    /// With one core.
    pub ns: u64,
    /// With all cores, for a store that reads with several threads.
    pub all_cores_ns: Option<u64>,
}

/// The measurements of one store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StoreMeasurement {
    /// All checkpoints, from creating the store to closing it.
    pub whole: FeedTime,
    /// The CPU time of `whole`.
    pub cpu_ns: u64,
    /// The first image.
    pub image: FeedTime,
    /// The seconds after the first image.
    pub steady: FeedTime,
    /// Only known pages.
    pub dup: Option<FeedTime>,
    /// Only new pages.
    pub unique: Option<FeedTime>,
    /// The size of its files after the first image.
    pub image_stored_bytes: u64,
    /// The size of its files after all checkpoints.
    pub ingested_bytes: u64,
    /// The size of its files at the end, after the work that a store does when idle.
    pub stored_bytes: u64,
    /// The CPU time of that work.
    pub settle_cpu_ns: Option<u64>,
    /// The bytes of the distinct pages of the stream.
    pub distinct_bytes: u64,
    /// The peak memory, without the stream.
    pub peak_bytes: u64,
    /// Reading the last image, after the last checkpoint is durable.
    pub rebuilt: RebuildTimes,
    /// Reading the last image at the end, for a store that works when idle.
    #[serde(default)]
    pub rebuilt_settled: Option<RebuildTimes>,
    /// Copying that image with its zeros; median.
    pub memcpy_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_is_too_large_is_refused() {
        let of = |image_mib| Job {
            store: "x".into(),
            dir: "/d".into(),
            source: StreamSource::Made { image_mib, seconds: 9, words: ChangedWords::Many },
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
