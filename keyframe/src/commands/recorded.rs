//! The options of commands that replay a recording's intervals.

use crate::failure::Failure;
use crate::progress::instructions_bar;
use crate::words::replay::ReplayWords;
use keyframe_replay::Console;
use keyframe_replay_driver::{ReplayableRecording, console};
use keyframe_store_keys::KeyArg;
use std::path::PathBuf;

/// The recording, and the number of replays at a time.
#[derive(clap::Args, Debug)]
pub struct RecordedArgs {
    /// The recording
    #[arg(value_name = "REC")]
    pub recording: PathBuf,
    /// The store that has its checkpoints [default: the one that the recording names]
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// The QEMU binary for the replays, of the release that recorded [default: that binary, at its
    /// path or in PATH]
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Replays at a time [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub jobs: Option<u64>,
}

impl RecordedArgs {
    /// Opens it.
    pub fn open(&self) -> Result<ReplayableRecording, Failure> {
        let words = ReplayWords::default();
        let store = self.store.as_deref();
        let mut opened = ReplayableRecording::open(&self.recording, store, &self.key, &words)?;
        opened.find_qemu(self.qemu.as_deref())?;
        Ok(opened)
    }

    /// Reads what the guest wrote to its console. The first call replays the recording for it, with
    /// a progress bar if `shows_progress`.
    pub fn console(
        &self,
        source: &ReplayableRecording,
        shows_progress: bool,
    ) -> Result<Console, Failure> {
        let bar = instructions_bar("replaying", 0, shows_progress);
        let read = console(source, self.jobs, &ReplayWords::above(&bar))?;
        bar.finish_and_clear();
        Ok(read)
    }
}
