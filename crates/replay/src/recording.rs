//! A recording on disk.
//!
//! ```text
//!   REC/recording.json   what a replay needs to know (docs/formats/recording.md)
//!   REC/replay.log       QEMU's log, while it is recorded; mended and compressed to
//!   REC/replay.log.zst   when it has ended
//!   REC/times            when what is in the log was written (`times`)
//!   REC/console.log      what the guest wrote to its serial console, once a replay has told
//!   REC/store/           its checkpoints, where no other store was named
//!   REC/first/           its first checkpoint, while it is recorded and followed
//! ```
//!
//! Invariant: `recording.json` is replaced whole. One that says `complete` has its log whole beside
//! it.

use crate::log::{self, Summary};
use crate::{Error, Result, warps};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The format that is written.
pub const VERSION: u32 = 1;
/// Level of compression: logs are short, and read once for each analysis.
const ZSTD_LEVEL: i32 = 9;
/// Held by whoever makes the recording.
const LOCK: &str = "lock";
/// No recording.json is longer.
const META_BYTES_MAX: u64 = 16 << 20;

/// The store that a recording has within itself, as `recording.json` names it.
pub const OWN_STORE: &str = ".";

/// How a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// It has not: it is being made, or whoever made it was killed.
    Recording,
    /// The guest shut down, or the recording was ended in good order.
    Complete,
    /// QEMU was killed: what it had written of its log is there.
    Cut,
}

/// What `recording.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingMeta {
    /// The format.
    pub version: u32,
    /// The recording's id: 32 hexadecimal digits.
    pub id: String,
    /// The VM's name.
    pub vm: String,
    /// When it began.
    pub began_at: Timestamp,
    /// How long it took, in nanoseconds.
    pub duration_ns: u64,
    /// How it ended.
    pub ending: Ending,
    /// Instructions in all; 0 while it is recorded.
    pub instructions: u64,
    /// Bytes of the log, as QEMU wrote it.
    pub log_bytes: u64,
    /// The QEMU binary.
    pub qemu_path: String,
    /// Its version.
    pub qemu_version: String,
    /// BLAKE3 of the binary, hexadecimal.
    pub qemu_blake3: String,
    /// Where it was started.
    pub working_directory: String,
    /// The command line as the user gave it, the binary first.
    pub user_command: Vec<String>,
    /// The images that the guest could write to, as they were when it began.
    pub images: Vec<ImageMeta>,
    /// Those that it could only read. Recordings made before this was kept have none.
    #[serde(default)]
    pub media: Vec<ImageMeta>,
    /// The store that has its checkpoints: the path, or `.` for `store` in the recording itself.
    pub store: String,
}

/// A fresh id.
pub fn new_id() -> Result<String> {
    let source = Path::new("/dev/urandom");
    let mut bytes = [0; 16];
    let mut file = File::open(source).map_err(Error::io("open", source))?;
    std::io::Read::read_exact(&mut file, &mut bytes).map_err(Error::io("read", source))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// What every version says.
#[derive(Deserialize)]
struct Head {
    version: u32,
}

/// An image that a replay begins with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageMeta {
    /// The disk's name in the line.
    pub disk: String,
    /// The image.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// When it was last written, in nanoseconds since 1970.
    pub modified_ns: i64,
}

impl ImageMeta {
    /// That of the file at `path`.
    pub fn of(disk: &str, path: &Path) -> Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(path).map_err(Error::io("look at the image", path))?;
        Ok(Self {
            disk: disk.into(),
            path: path.to_string_lossy().into_owned(),
            bytes: found.len(),
            modified_ns: found
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(found.mtime_nsec()),
        })
    }

    /// Refuses an image that has another length or time of change now, or is gone: the guest would
    /// read something else.
    pub fn require_unchanged(&self) -> Result<()> {
        let now = Self::of(&self.disk, Path::new(&self.path))?;
        if now == *self {
            return Ok(());
        }
        let how = if now.bytes == self.bytes {
            "its time of change is another".into()
        } else {
            format!("it had {} bytes and has {}", self.bytes, now.bytes)
        };
        Err(Error::Changed { path: self.path.clone().into(), how, modified_ns: self.modified_ns })
    }
}

/// A recording.
#[derive(Clone, Debug)]
pub struct Recording {
    path: PathBuf,
    /// Held while it is made.
    lock: Option<Arc<File>>,
    /// What is known of it.
    pub meta: RecordingMeta,
}

/// A log that QEMU can read, for as long as this lives.
#[derive(Debug)]
pub struct Readable {
    path: PathBuf,
    _unpacked: Option<tempfile::TempDir>,
}

impl Readable {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Recording {
    /// Makes the directory of one that is about to begin, in which QEMU's log will be at
    /// [`Recording::log_path`].
    ///
    /// Error: [`Error::Exists`] where something is there already.
    pub fn create(path: &Path, meta: RecordingMeta) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(Error::io("make the directory", path))?;
        let is_empty = std::fs::read_dir(path).map_err(Error::io("read", path))?.next().is_none();
        if !is_empty {
            return Err(Error::Exists { path: path.into() });
        }
        let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path).map_err(Error::io("make", &lock_path))?;
        lock.lock().map_err(Error::io("lock", &lock_path))?;
        let recording = Self { path, lock: Some(Arc::new(lock)), meta };
        recording.save()?;
        Ok(recording)
    }

    /// Opens the recording at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.join("recording.json");
        let text = match File::open(&file) {
            Ok(opened) => {
                let mut text = String::new();
                std::io::Read::read_to_string(
                    &mut std::io::Read::take(opened, META_BYTES_MAX),
                    &mut text,
                )
                .map_err(Error::io("read", &file))?;
                text
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NoRecording { path: path.into() });
            }
            Err(e) => return Err(Error::io("open", &file)(e)),
        };
        let damaged = |e: serde_json::Error| Error::Damaged {
            path: file.clone(),
            offset: e.column() as u64,
            problem: e.to_string(),
        };
        let head: Head = serde_json::from_str(&text).map_err(damaged)?;
        if head.version > VERSION {
            return Err(Error::LaterVersion { path: file, found: head.version, known: VERSION });
        }
        let meta = serde_json::from_str(&text).map_err(damaged)?;
        let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
        Ok(Self { path, lock: None, meta })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether somebody is making it: the command that records it, or a QEMU that has outlived
    /// that.
    pub fn is_being_made(&self) -> Result<bool> {
        Ok(self.has_maker()? || is_open_anywhere(&self.log_path()))
    }

    /// Whether the command that makes it is still at it.
    pub fn has_maker(&self) -> Result<bool> {
        let path = self.path.join(LOCK);
        match File::open(&path) {
            Ok(file) => Ok(file.try_lock().is_err()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(Error::io("open", &path)(e)),
        }
    }

    /// Whether its log, which somebody was writing, grows no more.
    pub fn has_ended(&self) -> Result<bool> {
        Ok(Self::open(&self.path)?.meta.ending != Ending::Recording || !self.has_maker()?)
    }

    /// Where QEMU writes its log.
    pub fn log_path(&self) -> PathBuf {
        self.path.join("replay.log")
    }

    /// Where the log's times are kept.
    pub fn times_path(&self) -> PathBuf {
        self.path.join("times")
    }

    /// Where the console's output is kept.
    pub fn console_path(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// Where the store is that has its checkpoints.
    pub fn store_path(&self) -> PathBuf {
        match &*self.meta.store {
            OWN_STORE => self.path.join("store"),
            path => path.into(),
        }
    }

    /// Where the store is that has the first checkpoint while another QEMU follows the recording:
    /// that one has the other store.
    pub fn first_store_path(&self) -> PathBuf {
        self.path.join("first")
    }

    fn packed_path(&self) -> PathBuf {
        self.path.join("replay.log.zst")
    }

    /// Writes `recording.json`.
    pub fn save(&self) -> Result<()> {
        let file = self.path.join("recording.json");
        let mut new = tempfile::NamedTempFile::new_in(&self.path)
            .map_err(Error::io("make a file in", &self.path))?;
        let text = serde_json::to_string_pretty(&self.meta).unwrap_or_default();
        new.write_all(text.as_bytes())
            .and_then(|()| new.as_file().sync_all())
            .map_err(Error::io("write", &file))?;
        new.persist(&file).map_err(|e| Error::io("write", &file)(e.error))?;
        Ok(())
    }

    /// After QEMU's end: mends the log, where QEMU was killed, and says how it ended. It can be
    /// replayed from now on.
    ///
    /// Where `qemu_failed`, QEMU ended with an error, within an instruction (`isa-debug-exit` does
    /// so when the guest asks for it): the recording ends before that, as a replay's QEMU ends
    /// there too. One that was killed has been ended from outside, within none.
    pub fn end(&mut self, duration_ns: u64, qemu_failed: bool) -> Result<Summary> {
        let plain = self.log_path();
        let was_cut = log::mend(&plain)?;
        let mut summary = log::summary(&plain)?;
        self.meta.ending =
            if was_cut || !summary.is_complete { Ending::Cut } else { Ending::Complete };
        if qemu_failed && self.meta.ending == Ending::Complete {
            summary.instructions = summary.instructions.saturating_sub(1);
        }
        self.meta.instructions = summary.instructions;
        self.meta.log_bytes = summary.bytes;
        self.meta.duration_ns = duration_ns;
        self.save()?;
        Ok(summary)
    }

    /// Compresses the log of one that has ended, which nobody reads as it is any more.
    pub fn pack(&mut self) -> Result<()> {
        let (plain, packed) = (self.log_path(), self.packed_path());
        let mut new = tempfile::NamedTempFile::new_in(&self.path)
            .map_err(Error::io("make a file in", &self.path))?;
        let input = BufReader::new(File::open(&plain).map_err(Error::io("open", &plain))?);
        zstd::stream::copy_encode(input, BufWriter::new(&mut new), ZSTD_LEVEL)
            .map_err(Error::io("compress", &plain))?;
        new.as_file().sync_all().map_err(Error::io("sync", &packed))?;
        new.persist(&packed).map_err(|e| Error::io("write", &packed)(e.error))?;
        std::fs::remove_file(&plain).map_err(Error::io("remove", &plain))?;
        self.lock = None;
        // Nobody needs it any more, and one that stays harms nobody.
        let _ = std::fs::remove_file(self.path.join(LOCK));
        Ok(())
    }

    /// Both.
    pub fn finish(&mut self, duration_ns: u64) -> Result<Summary> {
        let summary = self.end(duration_ns, false)?;
        self.pack()?;
        Ok(summary)
    }

    /// Bytes that the log takes on disk.
    pub fn stored_log_bytes(&self) -> u64 {
        let of = |path: PathBuf| std::fs::metadata(path).map(|m| m.len());
        of(self.packed_path()).or_else(|_| of(self.log_path())).unwrap_or(0)
    }

    /// The log while it is written.
    pub fn growing_log(&self) -> Readable {
        Readable { path: self.log_path(), _unpacked: None }
    }

    /// The log as QEMU reads it ([`warps`]).
    pub fn readable_log(&self) -> Result<Readable> {
        let readable = self.plain_log()?;
        warps::correct(&readable.path)?;
        Ok(readable)
    }

    fn plain_log(&self) -> Result<Readable> {
        let packed = self.packed_path();
        if !packed.exists() {
            return Ok(Readable { path: self.log_path(), _unpacked: None });
        }
        let folder = tempfile::Builder::new().prefix("keyframe-log-").tempdir();
        let folder = folder.map_err(Error::io("make a directory in", &std::env::temp_dir()))?;
        let path = folder.path().join("replay.log");
        let input = File::open(&packed).map_err(Error::io("open", &packed))?;
        let output = File::create(&path).map_err(Error::io("make", &path))?;
        // It says itself how long it is: no log of another size is taken.
        let mut decoder =
            zstd::stream::read::Decoder::new(input).map_err(Error::io("unpack", &packed))?;
        let mut bounded = std::io::Read::take(&mut decoder, self.meta.log_bytes.saturating_add(1));
        let unpacked = std::io::copy(&mut bounded, &mut BufWriter::new(output))
            .map_err(Error::io("unpack", &packed))?;
        if unpacked != self.meta.log_bytes {
            return Err(Error::Damaged {
                path: packed,
                offset: unpacked,
                problem: format!(
                    "the log has not the {} bytes that recording.json says",
                    self.meta.log_bytes
                ),
            });
        }
        Ok(Readable { path, _unpacked: Some(folder) })
    }
}

/// Whether a process that we may look into has the file at `path` open.
fn is_open_anywhere(path: &Path) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let descriptors = |process: std::fs::DirEntry| {
        std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten()
    };
    processes
        .flat_map(descriptors)
        .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::bytes;

    fn meta() -> RecordingMeta {
        RecordingMeta {
            version: VERSION,
            id: "0".repeat(32),
            vm: "vm".into(),
            began_at: Timestamp::UNIX_EPOCH,
            duration_ns: 0,
            ending: Ending::Recording,
            instructions: 0,
            log_bytes: 0,
            qemu_path: "/q".into(),
            qemu_version: "7.2.22".into(),
            qemu_blake3: String::new(),
            working_directory: "/".into(),
            user_command: vec!["q".into()],
            images: Vec::new(),
            media: Vec::new(),
            store: OWN_STORE.into(),
        }
    }

    #[test]
    fn a_recording_is_kept_and_its_log_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rec");
        let mut recording = Recording::create(&path, meta()).unwrap();
        let log = bytes(&[&[0, 0, 0, 0, 9], &[39]]);
        std::fs::write(recording.log_path(), &log).unwrap();
        assert_eq!(recording.finish(7).unwrap().instructions, 9);
        let opened = Recording::open(&path).unwrap();
        assert_eq!(
            (opened.meta.ending, opened.meta.instructions, opened.meta.duration_ns),
            (Ending::Complete, 9, 7)
        );
        assert_eq!(std::fs::read(opened.readable_log().unwrap().path()).unwrap(), log);
        assert!(!opened.log_path().exists());
        assert!(matches!(Recording::create(&path, meta()), Err(Error::Exists { .. })));
    }

    #[test]
    fn what_is_replayed_is_corrected_and_what_is_kept_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut recording = Recording::create(dir.path(), meta()).unwrap();
        let letters = |last: &str| warps::tests::log(&format!("N W 5 h 6 7 h {last} B A A I N"));
        std::fs::write(recording.log_path(), letters("20")).unwrap();
        recording.finish(7).unwrap();
        let replayed = recording.readable_log().unwrap();
        assert!(std::fs::read(replayed.path()).unwrap() == letters("5"));
        let kept = zstd::decode_all(File::open(recording.packed_path()).unwrap()).unwrap();
        assert!(kept == letters("20"));
    }

    #[test]
    fn one_whose_qemu_was_killed_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let mut recording = Recording::create(dir.path(), meta()).unwrap();
        let mut log = bytes(&[&[0, 0, 0, 0, 9], &[0, 0]]);
        log[..4].fill(0);
        std::fs::write(recording.log_path(), &log).unwrap();
        recording.finish(7).unwrap();
        assert_eq!((recording.meta.ending, recording.meta.log_bytes), (Ending::Cut, 17));
    }

    #[test]
    fn one_whose_qemu_failed_ends_before_that_and_one_whose_was_killed_does_not() {
        let instructions = |head: &[u8], tail: &[u8]| {
            let dir = tempfile::tempdir().unwrap();
            let mut recording = Recording::create(dir.path(), meta()).unwrap();
            let mut log = bytes(&[&[0, 0, 0, 0, 9], tail]);
            log[..4].copy_from_slice(head);
            std::fs::write(recording.log_path(), &log).unwrap();
            recording.end(7, true).unwrap();
            (recording.meta.ending, recording.meta.instructions)
        };
        assert_eq!(instructions(&log::HEADER, &[39]), (Ending::Complete, 8));
        assert_eq!(instructions(&[0; 4], &[0, 0]), (Ending::Cut, 9));
    }

    #[test]
    fn what_is_no_recording_is_told() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Recording::open(dir.path()), Err(Error::NoRecording { .. })));
        std::fs::write(dir.path().join("recording.json"), "{\"version\": 99}").unwrap();
        assert!(matches!(Recording::open(dir.path()), Err(Error::LaterVersion { found: 99, .. })));
        std::fs::write(dir.path().join("recording.json"), "{").unwrap();
        assert!(matches!(Recording::open(dir.path()), Err(Error::Damaged { .. })));
    }
}
