//! `keyframe segment`: checkpoints of a recording that was made without, from a replay of it.

use super::exit_code;
use crate::failure::{DONE, Failure, Outcome};
use crate::progress::instructions_bar;
use crate::words::StderrWords;
use crate::words::replay::ReplayWords;
use keyframe_replay::cut_points::{CutSpacing, find_cut_points};
use keyframe_replay::{GrowingLog, Recording};
use keyframe_replay_driver::missing_cuts::{
    RecordingWait, first_checkpoint, follower_name, missing_cuts,
};
use keyframe_replay_driver::{
    CompleteLogCuts, GrowingLogCuts, ReplayableRecording, checkpoints_in, copy_checkpoints, jobs,
};
use keyframe_session::SessionOptions;
use keyframe_session::control::OnExit;
use keyframe_store_keys::KeyArg;
use std::path::PathBuf;
use std::time::Duration;

/// Nice value of one that follows a recording.
const NICE: i32 = 5;

/// Take a recording's checkpoints from a replay of it
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command takes the checkpoints of a recording that was made without --checkpoint-every. It replays the recording and pauses
at each of them. A checkpoint needs an instruction at which the log has no event and no disk request is under way, so
some checkpoints come a little later than asked for.

--every counts the host's time during the recording. Time in which the guest slept has no cuts. You may interrupt the command
and call it again: it does not take existing checkpoints a second time.

With --follow the recording may still be in progress. Another QEMU follows it at a lower priority and takes the checkpoints into
a store that the recording itself does not write to. keyframe record --follow does all of this by itself.

Examples:
  keyframe segment R --every 1s
  keyframe segment R --store S --every-instructions 500000000
  keyframe verify R --store S"
)]
pub struct Segment {
    /// The recording
    #[arg(value_name = "REC")]
    recording: PathBuf,
    /// The store for the checkpoints [default: the one that the recording names]
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    #[command(flatten)]
    key: KeyArg,
    /// A checkpoint each so much time of the recording (500ms, 1s)
    #[arg(long, value_name = "TIME", value_parser = super::checkpoints::parse_duration,
          required_unless_present = "every_instructions", conflicts_with = "every_instructions")]
    every: Option<Duration>,
    /// A checkpoint each N instructions, a million at least
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1_000_000..))]
    every_instructions: Option<u64>,
    /// The QEMU binary for the replay, of the release that recorded [default: that binary, at its
    /// path or in PATH]
    #[arg(long, value_name = "PATH", conflicts_with = "follow")]
    qemu: Option<PathBuf>,
    /// Follow a recording that is still being made
    #[arg(long)]
    follow: bool,
    /// Say a line about each checkpoint on standard error
    #[arg(long, short)]
    verbose: bool,
    /// Report errors only
    #[arg(long, short, conflicts_with = "verbose")]
    quiet: bool,
}

impl Segment {
    /// Replays it once, to its last cut.
    pub fn run(&self) -> Outcome {
        if self.follow {
            return self.follow();
        }
        let source = self.source()?;
        let there = source.checkpoints()?;
        let first = first_checkpoint(&there, &source)?;
        let asked = self.cuts(&source)?;
        let cuts = missing_cuts(&there, &asked);
        if cuts.is_empty() {
            self.say(&if asked.is_empty() {
                "the recording is shorter than that: its one interval is all of it".into()
            } else {
                format!("all {} checkpoints are there", asked.len())
            });
            return Ok(DONE);
        }
        // From the last checkpoint before what is missing.
        let before =
            there.iter().rev().find(|place| cuts.first().is_some_and(|cut| place.icount < *cut));
        let begin = before.copied().unwrap_or(first);
        let instructions = source.last_stop()?;
        let bar = instructions_bar("replaying", instructions, !self.quiet && !self.verbose);
        let mut cut_source =
            CompleteLogCuts { cuts: &cuts, log_index: source.log_index()?, checkpoints: &there };
        let mut tell = |icount| bar.set_position(icount);
        let verdict = keyframe_replay_driver::segment::segment(
            &source,
            begin,
            &mut cut_source,
            self.options(),
            &mut tell,
        )?;
        bar.finish_and_clear();
        let taken = source.checkpoints()?.len().saturating_sub(there.len());
        let place =
            self.store.as_ref().map_or_else(String::new, |s| format!(" --store {}", s.display()));
        let recording = self.recording.display();
        self.say(&match taken {
            0 => format!("all {} checkpoints are there", there.len()),
            taken => format!("{taken} checkpoints in {}", source.store.path().display()),
        });
        self.say(&format!("see that it replays exactly: keyframe verify {recording}{place}"));
        Ok(exit_code(verdict))
    }

    /// The recording with the store for its checkpoints, which has its first one.
    fn source(&self) -> Result<ReplayableRecording, Failure> {
        let words = ReplayWords::default();
        let mut source = ReplayableRecording::open(&self.recording, None, &self.key, &words)?;
        source.find_qemu(self.qemu.as_deref())?;
        let Some(place) = &self.store else { return Ok(source) };
        let store = self.key.open(place).map_err(|e| Failure::store(&e, place))?;
        if store.id() != source.store.id() {
            copy_checkpoints(
                &source.store,
                &[first_checkpoint(&source.checkpoints()?, &source)?],
                &store,
            )?;
        }
        source.store = store;
        Ok(source)
    }

    /// Follows it to its end.
    fn follow(&self) -> Outcome {
        let failed = |e| Failure::recording(&e);
        let recording = Recording::open(&self.recording).map_err(failed)?;
        if recording.has_ended().map_err(failed)? {
            return Err(Failure::new(format!(
                "{} is not being recorded any more",
                self.recording.display()
            ))
            .fix("take its checkpoints without --follow"));
        }
        // The recording comes first.
        let _ = rustix::process::setpriority_process(None, NICE);
        let interrupted = jobs::interruption()?;
        let wait = RecordingWait { recording: &recording, interrupted: &interrupted };
        let place = Some(recording.first_store_path()).filter(|place| place.exists());
        let place = place.unwrap_or_else(|| recording.store_path());
        let own = wait.until("its store", || Ok(self.key.open(&place).ok()))?;
        let beginning = wait.until("its first checkpoint", || {
            Ok(checkpoints_in(&own, &recording)?.first().filter(|place| place.icount == 0).copied())
        })?;
        let place = self.store.clone().unwrap_or_else(|| recording.store_path());
        let store = self.key.open(&place).map_err(|e| Failure::store(&e, &place))?;
        if store.id() == own.id() {
            return Err(Failure::new(format!(
                "{} is written to by the recording itself",
                place.display()
            ))
            .fix("name another store: --store"));
        }
        copy_checkpoints(&own, &[beginning], &store)?;
        let every = self.every()?;
        let growing = wait.until("its log", || Ok(GrowingLog::of(&recording, every)?))?;
        let source = ReplayableRecording::growing(&recording, store);
        let options = SessionOptions { name: Some(follower_name(&recording)), ..self.options() };
        let mut cut_source = GrowingLogCuts::new(growing, recording.clone());
        let verdict = keyframe_replay_driver::segment::segment(
            &source,
            first_checkpoint(&source.checkpoints()?, &source)?,
            &mut cut_source,
            options,
            &mut |_| (),
        )?;
        let taken = source.checkpoints()?.len().saturating_sub(1);
        self.say(&format!("{taken} checkpoints in {}", source.store.path().display()));
        Ok(exit_code(verdict))
    }

    fn options(&self) -> SessionOptions {
        let events = StderrWords::shared(self.quiet, self.verbose);
        SessionOptions { events, ..SessionOptions::every(None, OnExit::Kill) }
    }

    fn every(&self) -> Result<CutSpacing, Failure> {
        match (self.every_instructions, self.every) {
            (Some(count), _) => Ok(CutSpacing::Instructions(count)),
            (None, Some(time)) => Ok(CutSpacing::Time(time)),
            (None, None) => Err(Failure::new("--every or --every-instructions is needed")),
        }
    }

    fn cuts(&self, source: &ReplayableRecording) -> Result<Vec<u64>, Failure> {
        let failed = |e| Failure::recording(&e);
        find_cut_points(
            source.log(),
            &source.recording.times_path(),
            self.every()?,
            source.log_index()?,
        )
        .map_err(failed)
    }

    fn say(&self, text: &str) {
        if !self.quiet {
            eprintln!("keyframe: {text}");
        }
    }
}
