//! `keyframe record`: a VM's run, kept so that each of its instructions can be run again.

use super::{ReadyArg, exit_code, vmms};
use crate::failure::paths;
use crate::failure::{DONE, FAILED, Failure, Outcome, WARNED};
use crate::output;
use crate::words::StderrWords;
use keyframe_event_text::shell_word;
use keyframe_replay::log::LogSummary;
use keyframe_replay::recording::OWN_STORE;
use keyframe_replay::{LogTimeRecorder, Recording, RecordingEnding, RecordingMeta};
use keyframe_replay_driver::{
    FollowerProcess, adopt_first_checkpoint, checkpoints_in, jobs, new_recording, recorded_images,
};
use keyframe_session::control::OnExit;
use keyframe_session::{CommandLines, RecordingOptions, SessionOptions};
use keyframe_store::Store;
use keyframe_store_keys::KeyArg;
use keyframe_vmm::Ability;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, atomic::AtomicBool};
use std::time::{Duration, Instant};

/// The default interval of the checkpoints that a following replay takes.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);

/// Record a VM's run: every instruction of it can be run again
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Keyframe starts QEMU with the command line after --, under TCG with one virtual CPU. A log receives everything that reaches the
VM from outside: keys, packets, clocks, and the instants at which disks answer. Keyframe refuses what QEMU cannot record, and
says what to do instead.

REC/ holds the log and, unless --store names another place, the checkpoints. The first checkpoint is taken before the first
instruction. With --checkpoint-every more follow, and each interval between two can be replayed by itself (see verify and
analyze). There are two ways that do not slow the recording down: `keyframe segment` takes the checkpoints later from a
replay; with --follow a second QEMU replays the recording while it is made and takes them, on a core of its own.

The recording ends when the VM ends, at Ctrl-C, or by keyframe stop.

The guest's clock counts instructions, 8 ns each (-icount shift=3; you may give another shift). While the guest computes, its
seconds are longer or shorter than real ones. While it waits, they are equal. Its real-time clock begins with the host's time and
then follows the guest's clock. If it follows the host's (-rtc clock=host, or with a network), replays take twice as long.

Examples:
  keyframe record --out R --checkpoint-every 1s -- qemu-system-x86_64 -m 1G -nographic -kernel vmlinuz -append console=ttyS0
  keyframe record --out R --follow --checkpoint-every 500ms -- qemu-system-x86_64 ...
  keyframe record --out R -- qemu-system-x86_64 -m 1G -drive file=a.img,format=raw,if=virtio ...
  keyframe verify R --jobs 2"
)]
pub struct Record {
    /// Directory to make, for the recording
    #[arg(long, value_name = "REC")]
    out: PathBuf,
    /// Take a checkpoint so often (500ms, 1s), while it is recorded
    #[arg(long, value_name = "TIME", value_parser = super::checkpoints::parse_duration)]
    checkpoint_every: Option<Duration>,
    /// Take the checkpoints from a second QEMU that follows live. They are 1s apart, unless
    /// --checkpoint-every gives another time
    #[arg(long)]
    follow: bool,
    /// The store for its checkpoints [default: one in REC]
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    ready: ReadyArg,
    /// The VM's name [default: QEMU's -name, or `vm`]
    #[arg(long)]
    name: Option<String>,
    /// Say a line about each checkpoint on standard error
    #[arg(long, short)]
    verbose: bool,
    /// Report errors only
    #[arg(long, short, conflicts_with = "verbose")]
    quiet: bool,
    /// QEMU's command line
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl Record {
    /// Records the VM to its end.
    pub fn run(mut self) -> Outcome {
        let ready = self.ready.take()?;
        vmms::require_of(&self.command, Ability::Record)?;
        let meta = self.meta()?;
        let command = std::mem::take(&mut self.command);
        let id = meta.id.clone();
        let mut recording =
            Recording::create(&self.out, meta).map_err(|e| Failure::recording(&e))?;
        let kept = self.store(&recording, &recording.store_path(), self.store.is_some())?;
        // With a follower, the follower writes to that store. The recording's own engine gets another
        // one, for the first checkpoint.
        let first =
            self.follow.then(|| self.store(&recording, &recording.first_store_path(), false));
        let first = first.transpose()?;
        let store = first.as_ref().unwrap_or(&kept);
        let times = LogTimeRecorder::start(recording.log_path(), &recording.times_path());
        let times = times.map_err(|e| Failure::recording(&e))?;
        let mut options = self.options(&recording, times.is_full());
        options.events = ready.telling(options.events);
        let follower = self.follow.then(|| {
            FollowerProcess::start(recording.path(), self.follow_every(), &recording.store_path())
        });
        let follower = follower.transpose()?;
        let began = Instant::now();
        let ran = keyframe_session::run(store, CommandLines::One(command), options)
            .map(|report| exit_code(report.verdict()))
            .map_err(Failure::from);
        let duration_ns = keyframe_units::elapsed_ns(began);
        let log_seen = times.end();
        if let Err(e) = log_seen.times {
            eprintln!("keyframe: note: {e}: times of the recording are estimates from there on");
        }
        // The first checkpoint is taken before the first instruction. A store that cannot be read does
        // not count as empty.
        let is_empty = || {
            ran.is_err() && checkpoints_in(store, &recording).is_ok_and(|places| places.is_empty())
        };
        if !recording.log_path().exists() || is_empty() {
            // There is nothing to keep.
            drop(follower);
            let _ = std::fs::remove_dir_all(recording.path());
            return ran.and(Err(Failure::new("QEMU ended before it wrote a log")));
        }
        recording.meta.images = recorded_images(store, &id)?;
        if let Some(bytes) = log_seen.full_at {
            recording.cut_log(bytes).map_err(|e| Failure::recording(&e))?;
            eprintln!(
                "keyframe: the recording ends early: QEMU has lost parts of its log, which had no space in {}",
                self.out.display()
            );
        }
        let summary = recording
            .end(duration_ns, matches!(ran, Ok(FAILED)))
            .map_err(|e| Failure::recording(&e))?;
        let has_followed =
            follower.map(|follower| self.wait_for(follower, &recording, &kept)).transpose()?;
        recording.pack().map_err(|e| Failure::recording(&e))?;
        let code = ran?;
        let cut = recording.meta.ending == RecordingEnding::Cut;
        if !self.quiet {
            self.print_summary(&recording, &summary, duration_ns, log_seen.full_at.is_some());
        }
        let warns = cut || has_followed == Some(false);
        Ok(if code == DONE && warns { WARNED } else { code })
    }

    /// The options of the recording's engine. With a follower it takes only the first checkpoint.
    fn options(&self, recording: &Recording, has_lost_log: Arc<AtomicBool>) -> SessionOptions {
        let recorded = RecordingOptions {
            recording: recording.meta.id.clone(),
            log: recording.log_path(),
            has_lost_log,
            machine: None,
            begin: None,
        };
        SessionOptions {
            name: self.name.clone(),
            events: StderrWords::shared(self.quiet, self.verbose),
            recorded: Some(recorded),
            ..SessionOptions::every(self.checkpoint_every.filter(|_| !self.follow), OnExit::Kill)
        }
    }

    /// Prints what was recorded, and how to verify it.
    fn print_summary(
        &self,
        recording: &Recording,
        summary: &LogSummary,
        duration_ns: u64,
        was_full: bool,
    ) {
        let out = self.out.display();
        eprintln!(
            "keyframe: recorded {} instructions in {}: a log of {}, {} compressed, in {out}",
            summary.instructions,
            output::duration(duration_ns),
            output::bytes(summary.bytes),
            output::bytes(recording.stored_log_bytes()),
        );
        if was_full {
            return;
        }
        if recording.meta.ending == RecordingEnding::Cut {
            eprintln!(
                "keyframe: QEMU was killed: the recording ends with what it wrote until then"
            );
        }
        let out = shell_word(&self.out);
        eprintln!("keyframe: see that it replays exactly: keyframe verify {out}");
    }

    fn follow_every(&self) -> Duration {
        self.checkpoint_every.unwrap_or(FOLLOW_EVERY)
    }

    /// Opens the store at `place` for the recording, or makes it unless it `is_there`.
    fn store(&self, recording: &Recording, place: &Path, is_there: bool) -> Result<Store, Failure> {
        let opened = match is_there {
            true => self.key.open(place),
            false if self.key.is_given() => self.key.init(place),
            false => Store::init(place),
        };
        opened.map_err(|e| {
            // Nothing has been recorded yet.
            let _ = std::fs::remove_dir_all(recording.path());
            Failure::store(&e, place)
        })
    }

    /// Waits for the one that follows, which has all checkpoints then. False where it has not come
    /// to the end.
    fn wait_for(
        &self,
        follower: FollowerProcess,
        recording: &Recording,
        kept: &Store,
    ) -> Result<bool, Failure> {
        let interrupted = jobs::interruption()?;
        let ended = Instant::now();
        let has_followed = follower.finish(&interrupted)?;
        adopt_first_checkpoint(recording, kept, &self.key)?;
        if !has_followed {
            let (out, every) =
                (shell_word(&self.out), humantime::format_duration(self.follow_every()));
            eprintln!(
                "keyframe: the one that followed has not come to the end: keyframe segment {out} --every {every}"
            );
        } else if !self.quiet {
            let count = checkpoints_in(kept, recording)?.len();
            let after = output::duration(keyframe_units::elapsed_ns(ended));
            eprintln!("keyframe: {count} checkpoints, the last {after} behind the recording's end");
        }
        Ok(has_followed)
    }

    fn meta(&self) -> Result<RecordingMeta, Failure> {
        let store = match &self.store {
            None => OWN_STORE.into(),
            Some(place) => paths::absolute_store(place)?.to_string_lossy().into_owned(),
        };
        Ok(new_recording(self.command.clone(), self.name.as_deref(), store)?)
    }
}
