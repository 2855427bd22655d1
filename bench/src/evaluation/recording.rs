//! A recorded run of a workload, and the commands that read it.

use super::workload::{BEGIN, PASS, PreparedGuest};
use crate::Error;
use crate::interrupt::Interrupt;
use crate::keyframe_json::{KeyframeJson, RunningCommand};
use crate::running_guest::RunningGuest;
use jiff::Timestamp;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Longest time for a guest to boot and to begin its work, in seconds.
const BEGIN_S: f64 = 180.0;
/// Longest time to close a recording, in seconds.
const CLOSE_S: u64 = 120;
/// Longest time until a recording that has begun can be followed, in seconds.
const FOLLOW_S: f64 = 60.0;

/// The times of a recording.
#[derive(Clone, Copy, Debug)]
pub struct RecordingPlan {
    /// The time between two checkpoints.
    pub every_ms: u64,
    /// The time after which the guest is switched off, from the beginning of its work.
    pub work_ms: u64,
}

/// A recording of a workload.
pub struct Recording<'a> {
    keyframe: KeyframeJson<'a>,
    dir: PathBuf,
    /// The time at which the work began.
    pub work_began: Timestamp,
    /// The time at which the first pass of the work ended; `None` if it did not.
    pub first_pass_ended: Option<Timestamp>,
}

/// An analysis beside a recording.
pub struct FollowedAnalysis {
    /// The time from the begin of the recording to the end of the analysis.
    pub run_time_s: f64,
    /// Its report.
    pub report: Value,
}

impl<'a> Recording<'a> {
    /// Boots and records `guest` into `dir`.
    pub fn make(
        keyframe: KeyframeJson<'a>,
        guest: &PreparedGuest,
        plan: RecordingPlan,
        dir: PathBuf,
    ) -> Result<Self, Error> {
        Self::make_beside(keyframe, guest, plan, dir, &mut |_, _| Ok(()))
    }

    /// Boots and records `guest` into `dir`, and analyses the recording with `jobs` jobs while it is
    /// made.
    pub fn make_followed(
        keyframe: KeyframeJson<'a>,
        guest: &PreparedGuest,
        plan: RecordingPlan,
        dir: PathBuf,
        jobs: u64,
    ) -> Result<(Self, FollowedAnalysis), Error> {
        let out = dir.with_extension("followed").display().to_string();
        let began = Instant::now();
        let mut analysis = None::<RunningCommand>;
        let recording = Self::make_beside(keyframe, guest, plan, dir, &mut |running, dir| {
            let checkpoints = dir.join("store/checkpoints");
            let is_sealed = || {
                // Fails if the recorder has ended.
                running.poll_for(BEGIN)?;
                let mut listed = std::fs::read_dir(&checkpoints).into_iter().flatten();
                Ok(listed.next().map(drop))
            };
            keyframe.interrupt.wait("its first checkpoint is sealed", FOLLOW_S, is_sealed)?;
            let jobs = jobs.to_string();
            let arguments = [
                "--tool", "icount", "--follow", "--jobs", &jobs, "--out", &out, "--quiet", "--json",
            ];
            analysis = Some(keyframe.start(&["analyze"], dir, &arguments)?);
            Ok(())
        })?;
        let Some(analysis) = analysis else {
            return Err(Error::failed("follow the recording", "the analysis was not started"));
        };
        let report = analysis.wait(keyframe.interrupt)?;
        let followed = FollowedAnalysis { run_time_s: began.elapsed().as_secs_f64(), report };
        Ok((recording, followed))
    }

    /// Boots and records `guest` into `dir`. Calls `begun` after the recorder was started.
    fn make_beside(
        keyframe: KeyframeJson<'a>,
        guest: &PreparedGuest,
        plan: RecordingPlan,
        dir: PathBuf,
        begun: &mut dyn FnMut(&mut RunningGuest, &Path) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let KeyframeJson { options, interrupt } = keyframe;
        let program = options.keyframe.display().to_string();
        let (out, every) = (dir.display().to_string(), format!("{}ms", plan.every_ms));
        // Other benchmarks may run on this machine.
        let name = format!("bench-{}", std::process::id());
        let words = [
            &program,
            "record",
            "--quiet",
            "--name",
            &name,
            "--checkpoint-every",
            &every,
            "--out",
            &out,
            "--",
        ];
        let line: Vec<String> =
            words.into_iter().map(str::to_owned).chain(guest.command.iter().cloned()).collect();
        let mut running = RunningGuest::start(&line)?;
        let (started_at, started) = (SystemTime::now(), Instant::now());
        begun(&mut running, &dir)?;
        if let Some(start_command) = &guest.start_command {
            wait_for(&mut running, "KF READY", interrupt)?;
            running.say(start_command)?;
        }
        wait_for(&mut running, BEGIN, interrupt)?;
        interrupt.sleep(Duration::from_millis(plan.work_ms))?;
        running.say(guest.off_command)?;
        running.end(CLOSE_S);
        interrupt.check()?;
        let at = |text: &str| {
            let since_start = running.at(text)?.saturating_duration_since(started);
            Timestamp::try_from(started_at + since_start).ok()
        };
        let work_began = at(BEGIN).ok_or_else(|| {
            Error::failed("measure the recording", "the beginning of the work has no time")
        })?;
        Ok(Self { keyframe, first_pass_ended: at(PASS), work_began, dir })
    }

    /// Returns the directory of its store.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Returns its checkpoints, as in `keyframe list --json`.
    pub fn list(&self) -> Result<Vec<Value>, Error> {
        let value = self.keyframe.run(&["list", "--json", "--store"], &self.store(), &[])?;
        value
            .as_array()
            .cloned()
            .ok_or_else(|| Error::failed("read keyframe list --json", "it is no array"))
    }

    /// Returns the statistics of its store, as in `keyframe stats --json`.
    pub fn stats(&self) -> Result<Value, Error> {
        self.keyframe.run(&["stats", "--json", "--store"], &self.store(), &[])
    }

    /// Returns the contents of `recording.json`.
    pub fn meta(&self) -> Result<Value, Error> {
        read_json(&self.dir.join("recording.json"))
    }

    /// Analyses it from an instruction on, with `jobs` jobs into `out`, and returns the report. With
    /// `in_sequence`, one replay of the whole part runs too, and the report compares the results.
    pub fn analyze(
        &self,
        from_instruction: u64,
        jobs: u64,
        in_sequence: bool,
        out: &Path,
    ) -> Result<Value, Error> {
        let (out, jobs) = (out.display().to_string(), jobs.to_string());
        let from = from_instruction.to_string();
        let arguments = [
            "--tool", "icount", "--jobs", &jobs, "--from", &from, "--out", &out, "--quiet",
            "--json",
        ];
        let check: &[&str] = if in_sequence { &["--check-sequential"] } else { &[] };
        self.keyframe.run(&["analyze"], &self.dir, &[&arguments, check].concat())
    }

    /// Returns the result of `keyframe plan --simulate` with the analysis in `analysis`.
    pub fn plan(&self, analysis: &Path, more: &[&str]) -> Result<Value, Error> {
        let analysis = analysis.display().to_string();
        let fixed = ["--analysis", &analysis, "--simulate", "--json"];
        self.keyframe.run(&["plan", "--from"], &self.dir, &[&fixed, more].concat())
    }
}

/// Waits for a line with `text` at the guest's console. Fails if this program is interrupted, or the
/// guest reports an error or ends.
fn wait_for(running: &mut RunningGuest, text: &str, interrupt: &Interrupt) -> Result<(), Error> {
    interrupt.wait(&format!("the guest prints {text:?}"), BEGIN_S, || {
        Ok(running.poll_for(text)?.map(drop))
    })
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path).map_err(Error::io(format!("read {}", path.display())))?;
    serde_json::from_slice(&text).map_err(|e| Error::failed(format!("read {}", path.display()), e))
}
