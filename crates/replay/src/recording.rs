//! A recording on disk.
//!
//! ```text
//!   REC/recording.json   what a replay needs to know (docs/formats/recording.md)
//!   REC/replay.log       QEMU's log while QEMU writes it; then repaired and compressed to
//!   REC/replay.log.zst
//!   REC/times            when each part of the log was written
//!   REC/console.log      the guest's serial console, written by the first replay for it
//!   REC/store/           the checkpoints, unless another store was named
//!   REC/first/           the first checkpoint, while the recording is made and followed
//!   REC/lock             locked by the command that makes the recording
//! ```
//!
//! Invariants: `recording.json` is replaced as a whole. If it says `complete`, the log is complete.

mod meta;
#[cfg(test)]
mod tests;

pub use meta::{FORMAT, ImageMeta, OWN_STORE, RecordingEnding, RecordingMeta, VERSION, new_id};

use crate::log::{self, LogSummary};
use crate::{Error, Result, icount_warp};
use keyframe_scratch_directory::ScratchDirectory;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The compression level: logs are short, and each analysis reads them once.
const ZSTD_LEVEL: i32 = 9;
/// The file that the recording command locks.
const LOCK: &str = "lock";
/// The file of [`RecordingMeta`].
const META: &str = "recording.json";
/// The longest `recording.json` that is read, in bytes.
const META_BYTES_MAX: u64 = 16 << 20;

/// A recording, in its directory.
#[derive(Clone, Debug)]
pub struct Recording {
    path: PathBuf,
    /// Held while this process makes the recording.
    lock: Option<Arc<File>>,
    /// The contents of `recording.json`.
    pub meta: RecordingMeta,
}

/// A log that QEMU can replay. Dropping it removes the file if it was unpacked for this purpose.
#[derive(Debug)]
pub struct ReadableLog {
    path: PathBuf,
    _unpacked: Option<ScratchDirectory>,
}

impl ReadableLog {
    /// Returns the path of the log.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Recording {
    /// Creates the directory of a new recording at `path` and locks it. QEMU's log goes to
    /// [`Recording::log_path`].
    ///
    /// Errors: [`Error::Exists`] if the directory is not empty; [`Error::Io`].
    pub fn create(path: &Path, meta: RecordingMeta) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(Error::io("create the directory", path))?;
        let is_empty = std::fs::read_dir(path).map_err(Error::io("read", path))?.next().is_none();
        if !is_empty {
            return Err(Error::Exists { path: path.into() });
        }
        let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
        let lock_path = path.join(LOCK);
        let lock = File::create(&lock_path).map_err(Error::io("create", &lock_path))?;
        lock.lock().map_err(Error::io("lock", &lock_path))?;
        let recording = Self { path, lock: Some(Arc::new(lock)), meta };
        recording.save()?;
        Ok(recording)
    }

    /// Opens the recording at `path`.
    ///
    /// Errors: [`Error::NoRecording`]; [`Error::PreRelease`] and [`Error::UnsupportedVersion`] for
    /// another format; [`Error::Damaged`]; [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.join(META);
        let opened = File::open(&file).map_err(|e| match e.kind() {
            ErrorKind::NotFound => Error::NoRecording { path: path.into() },
            _ => Error::io("open", &file)(e),
        })?;
        let mut text = String::new();
        opened.take(META_BYTES_MAX).read_to_string(&mut text).map_err(Error::io("read", &file))?;
        let meta = RecordingMeta::parse(&text, &file)?;
        let path = std::path::absolute(path).map_err(Error::io("resolve", path))?;
        Ok(Self { path, lock: None, meta })
    }

    /// Returns the recording's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the recording is still being made: by the command that records it, or by a
    /// QEMU that has outlived that command.
    ///
    /// Error: [`Error::Io`].
    pub fn is_in_progress(&self) -> Result<bool> {
        Ok(self.is_recorder_running()? || is_open_in_any_process(&self.log_path()))
    }

    /// Returns whether the command that makes the recording still runs.
    ///
    /// Error: [`Error::Io`].
    pub fn is_recorder_running(&self) -> Result<bool> {
        let path = self.path.join(LOCK);
        match File::open(&path) {
            Ok(file) => Ok(file.try_lock().is_err()),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(Error::io("open", &path)(e)),
        }
    }

    /// Returns whether the log no longer grows. Reads `recording.json` anew.
    ///
    /// Errors: those of [`Recording::open`].
    pub fn has_ended(&self) -> Result<bool> {
        let has_ending = Self::open(&self.path)?.meta.ending != RecordingEnding::Recording;
        Ok(has_ending || !self.is_recorder_running()?)
    }

    /// Returns the path of the log while QEMU writes it.
    pub fn log_path(&self) -> PathBuf {
        self.path.join("replay.log")
    }

    /// Returns the path of the file with the log's times.
    pub fn times_path(&self) -> PathBuf {
        self.path.join("times")
    }

    /// Returns the path of the file with the console's output.
    pub fn console_path(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// Returns the path of the store with the recording's checkpoints.
    pub fn store_path(&self) -> PathBuf {
        match &*self.meta.store {
            OWN_STORE => self.path.join("store"),
            path => path.into(),
        }
    }

    /// Returns the path of the store that holds the first checkpoint while a second QEMU follows
    /// the recording. The second QEMU's checkpoints go to [`Recording::store_path`].
    pub fn first_store_path(&self) -> PathBuf {
        self.path.join("first")
    }

    fn packed_path(&self) -> PathBuf {
        self.path.join("replay.log.zst")
    }

    /// Writes [`Recording::meta`] to `recording.json`.
    ///
    /// Error: [`Error::Io`].
    pub fn save(&self) -> Result<()> {
        let file = self.path.join(META);
        let mut new = tempfile::NamedTempFile::new_in(&self.path)
            .map_err(Error::io("create a file in", &self.path))?;
        let text = serde_json::to_string_pretty(&self.meta).unwrap_or_default();
        new.write_all(text.as_bytes())
            .and_then(|()| new.as_file().sync_all())
            .map_err(Error::io("write", &file))?;
        new.persist(&file).map_err(|e| Error::io("write", &file)(e.error))?;
        Ok(())
    }

    /// Truncates the log to `bytes` bytes, because QEMU has lost parts of it after them. Call it
    /// before [`Recording::end`].
    ///
    /// Error: [`Error::Io`].
    pub fn cut_log(&self, bytes: u64) -> Result<()> {
        let log = self.log_path();
        let file = File::options().write(true).open(&log).map_err(Error::io("open", &log))?;
        let len = file.metadata().map_err(Error::io("look at", &log))?.len();
        file.set_len(bytes.min(len)).map_err(Error::io("truncate", &log))
    }

    /// Completes the recording after QEMU has ended: repairs the log if QEMU was killed, and stores
    /// the log's totals and how it ended. The recording can be replayed from then on.
    ///
    /// `qemu_failed` says that QEMU exited with an error. It does so within an instruction
    /// (`isa-debug-exit`), so the recording ends before that instruction, where a replay's QEMU
    /// ends, too. A killed QEMU did not end within an instruction. Returns the totals of the log.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`].
    pub fn end(&mut self, duration_ns: u64, qemu_failed: bool) -> Result<LogSummary> {
        let log = self.log_path();
        let was_cut = log::repair(&log, self.meta.log_version)?;
        let mut summary = log::summarize(&log)?;
        self.meta.ending = if was_cut || !summary.is_complete {
            RecordingEnding::Cut
        } else {
            RecordingEnding::Complete
        };
        if qemu_failed && self.meta.ending == RecordingEnding::Complete {
            summary.instructions = summary.instructions.saturating_sub(1);
        }
        self.meta.instructions = summary.instructions;
        self.meta.log_bytes = summary.bytes;
        self.meta.duration_ns = duration_ns;
        self.save()?;
        Ok(summary)
    }

    /// Compresses the log and releases the lock. Call it when no process reads the uncompressed
    /// log any more.
    ///
    /// Error: [`Error::Io`].
    pub fn pack(&mut self) -> Result<()> {
        let (log, packed) = (self.log_path(), self.packed_path());
        let mut new = tempfile::NamedTempFile::new_in(&self.path)
            .map_err(Error::io("create a file in", &self.path))?;
        let input = BufReader::new(File::open(&log).map_err(Error::io("open", &log))?);
        zstd::stream::copy_encode(input, BufWriter::new(&mut new), ZSTD_LEVEL)
            .map_err(Error::io("compress", &log))?;
        new.as_file().sync_all().map_err(Error::io("sync", &packed))?;
        new.persist(&packed).map_err(|e| Error::io("write", &packed)(e.error))?;
        std::fs::remove_file(&log).map_err(Error::io("remove", &log))?;
        self.lock = None;
        // An unlocked lock file does no harm.
        let _ = std::fs::remove_file(self.path.join(LOCK));
        Ok(())
    }

    /// Calls [`Recording::end`] for a QEMU that did not fail, then [`Recording::pack`].
    /// `duration_ns` is the recording's duration in nanoseconds. Returns the totals of the log.
    ///
    /// Errors: those of both.
    pub fn finish(&mut self, duration_ns: u64) -> Result<LogSummary> {
        let summary = self.end(duration_ns, false)?;
        self.pack()?;
        Ok(summary)
    }

    /// Returns the size of the log on disk, in bytes; 0 if there is none.
    pub fn stored_log_bytes(&self) -> u64 {
        let len = |path: PathBuf| std::fs::metadata(path).map(|metadata| metadata.len());
        len(self.packed_path()).or_else(|_| len(self.log_path())).unwrap_or(0)
    }

    /// Returns the log as QEMU writes it, for a reader that follows it.
    pub fn live_log(&self) -> ReadableLog {
        ReadableLog { path: self.log_path(), _unpacked: None }
    }

    /// Returns the complete log for a replay: unpacked into a temporary directory, and with its
    /// clock readings corrected ([`icount_warp`]). The packed log stays as QEMU wrote it.
    ///
    /// Errors: [`Error::Io`]; [`Error::Damaged`].
    pub fn readable_log(&self) -> Result<ReadableLog> {
        let readable = self.unpacked_log()?;
        icount_warp::correct_log(&readable.path)?;
        Ok(readable)
    }

    fn unpacked_log(&self) -> Result<ReadableLog> {
        let packed = self.packed_path();
        if !packed.exists() {
            return Ok(self.live_log());
        }
        let folder = ScratchDirectory::new("log");
        let folder = folder.map_err(Error::io("create a directory in", &std::env::temp_dir()))?;
        let path = folder.path().join("replay.log");
        let input = File::open(&packed).map_err(Error::io("open", &packed))?;
        let output = File::create(&path).map_err(Error::io("create", &path))?;
        let decoder =
            zstd::stream::read::Decoder::new(input).map_err(Error::io("unpack", &packed))?;
        // recording.json says how long the log is.
        let mut bounded = decoder.take(self.meta.log_bytes.saturating_add(1));
        let unpacked = std::io::copy(&mut bounded, &mut BufWriter::new(output))
            .map_err(Error::io("unpack", &packed))?;
        if unpacked != self.meta.log_bytes {
            let problem =
                format!("the log is not {} bytes long, as {META} says", self.meta.log_bytes);
            return Err(Error::Damaged { path: packed, offset: unpacked, problem });
        }
        Ok(ReadableLog { path, _unpacked: Some(folder) })
    }
}

/// Whether any process that this one may inspect has the file at `path` open.
fn is_open_in_any_process(path: &Path) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let descriptors = |process: std::fs::DirEntry| {
        std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten()
    };
    processes
        .flat_map(descriptors)
        .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == path))
}
