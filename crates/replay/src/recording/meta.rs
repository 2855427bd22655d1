//! The contents of `recording.json`.

use crate::log::LogVersion;
use crate::{Error, Result};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The value of the field `format` in `recording.json`.
pub const FORMAT: &str = "keyframe-recording";
/// The version of the format that is written and read.
pub const VERSION: u32 = 1;
/// The value of the field `store` for the store in the recording's own directory.
pub const OWN_STORE: &str = ".";

/// How a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordingEnding {
    /// The recording has not ended: it is being made, or its recorder was killed.
    Recording,
    /// The guest shut down, or the recording was stopped in good order.
    Complete,
    /// QEMU was killed, or could not write all of the log. The log holds what QEMU had written by
    /// then.
    Cut,
}

/// The contents of `recording.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingMeta {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// The recording's id: 32 hexadecimal digits.
    pub id: String,
    /// The VM's name.
    pub vm: String,
    /// The time at which the recording began.
    pub began_at: Timestamp,
    /// The recording's duration, in nanoseconds; 0 while it is made.
    pub duration_ns: u64,
    /// How it ended.
    pub ending: RecordingEnding,
    /// The number of instructions of the whole recording; 0 while it is made.
    pub instructions: u64,
    /// The length of the log as QEMU wrote it, in bytes.
    pub log_bytes: u64,
    /// The path of the QEMU binary.
    pub qemu_path: String,
    /// The version of QEMU.
    pub qemu_version: String,
    /// The BLAKE3 hash of the QEMU binary, in hexadecimal digits.
    pub qemu_blake3: String,
    /// The version of the log that this QEMU writes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub log_version: LogVersion,
    /// The directory in which QEMU was started.
    pub working_directory: String,
    /// The command line as the user gave it, the binary first.
    pub user_command: Vec<String>,
    /// The images that the guest could write to, as they were when the recording began.
    pub images: Vec<ImageMeta>,
    /// The images that the guest could only read.
    pub media: Vec<ImageMeta>,
    /// The path of the store with the checkpoints, or [`OWN_STORE`].
    pub store: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default(version: &LogVersion) -> bool {
    *version == LogVersion::default()
}

/// The keys that tell the format.
#[derive(Deserialize)]
struct FormatHead {
    format: Option<String>,
    version: u32,
}

impl RecordingMeta {
    /// Parses `text`, the contents of the file at `path`.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self> {
        let damaged = |e: serde_json::Error| Error::Damaged {
            path: path.to_owned(),
            offset: e.column() as u64,
            problem: e.to_string(),
        };
        let head: FormatHead = serde_json::from_str(text).map_err(damaged)?;
        let found = head.version;
        match head.format.as_deref() {
            None => return Err(Error::PreRelease { path: path.into(), found }),
            Some(FORMAT) if found == VERSION => {}
            Some(FORMAT) => {
                let path = path.into();
                return Err(Error::UnsupportedVersion { path, found, known: VERSION });
            }
            Some(other) => {
                let problem = format!("its format is {other:?}, not {FORMAT:?}");
                return Err(Error::Damaged { path: path.into(), offset: 0, problem });
            }
        }
        serde_json::from_str(text).map_err(damaged)
    }
}

/// Returns a random id of 32 hexadecimal digits for a new recording.
///
/// Error: [`Error::Io`].
pub fn new_id() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| Error::Io {
        operation: "read",
        path: "the kernel's random number generator".into(),
        source: error.into(),
    })?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// An image that the recorded guest read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageMeta {
    /// The disk's name on QEMU's command line.
    pub disk: String,
    /// The path of the image.
    pub path: String,
    /// The image's length, in bytes.
    pub bytes: u64,
    /// The time at which the image was last modified, in nanoseconds since 1970.
    pub modified_ns: i64,
}

impl ImageMeta {
    /// Describes the image at `path`, as it is now. `disk` is its disk's name on QEMU's command
    /// line.
    ///
    /// Error: [`Error::Io`].
    pub fn of(disk: &str, path: &Path) -> Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).map_err(Error::io("look at the image", path))?;
        Ok(Self {
            disk: disk.into(),
            path: path.to_string_lossy().into_owned(),
            bytes: metadata.len(),
            modified_ns: metadata
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(metadata.mtime_nsec()),
        })
    }

    /// Checks that the image still has the same length and modification time: otherwise a replayed
    /// guest would read other data.
    ///
    /// Errors: [`Error::Changed`]; [`Error::Io`] if the image is missing.
    pub fn require_unchanged(&self) -> Result<()> {
        let now = Self::of(&self.disk, Path::new(&self.path))?;
        if now == *self {
            return Ok(());
        }
        let how = if now.bytes == self.bytes {
            "its modification time differs".into()
        } else {
            format!("it had {} bytes and now has {}", self.bytes, now.bytes)
        };
        Err(Error::Changed { path: self.path.clone().into(), how, modified_ns: self.modified_ns })
    }
}
