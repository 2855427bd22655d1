//! A recorded run of a workload, and the commands that read it.

use super::workload::{BEGIN, PASS, PreparedGuest};
use crate::running_guest::RunningGuest;
use crate::{Error, Options};
use jiff::Timestamp;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// Longest time for a guest to boot and to begin its work, in seconds.
const BEGIN_S: u64 = 180;
/// Longest time to close a recording, in seconds.
const CLOSE_S: u64 = 120;

/// The times of a recording.
#[derive(Clone, Copy, Debug)]
pub struct RecordingPlan {
    /// The time between two checkpoints.
    pub every_ms: u64,
    /// The time after which the guest is switched off, from the beginning of its work.
    pub work_ms: u64,
}

/// The part of a recording that is analysed.
#[derive(Clone, Copy, Debug)]
pub struct AnalysisRequest {
    /// The duration of the whole recording.
    pub recorded_s: f64,
    /// The instruction at which the analysis begins.
    pub from_instruction: u64,
}

/// A recording of a workload.
pub struct Recording<'a> {
    options: &'a Options,
    dir: PathBuf,
    /// The time at which the work began.
    pub work_began: Timestamp,
    /// The time at which the first pass of the work ended; `None` if it did not.
    pub first_pass_ended: Option<Timestamp>,
}

impl<'a> Recording<'a> {
    /// Boots and records `guest` into `dir`.
    pub fn make(
        options: &'a Options,
        guest: &PreparedGuest,
        plan: RecordingPlan,
        dir: PathBuf,
    ) -> Result<Self, Error> {
        let keyframe = options.keyframe.display().to_string();
        let (out, every) = (dir.display().to_string(), format!("{}ms", plan.every_ms));
        let words =
            [&keyframe, "record", "--quiet", "--checkpoint-every", &every, "--out", &out, "--"];
        let line: Vec<String> =
            words.into_iter().map(str::to_owned).chain(guest.command.iter().cloned()).collect();
        let mut running = RunningGuest::start(&line)?;
        let (started_at, started) = (SystemTime::now(), Instant::now());
        if let Some(start_command) = &guest.start_command {
            running.wait_for("KF READY", BEGIN_S)?;
            running.say(start_command)?;
        }
        running.wait_for(BEGIN, BEGIN_S)?;
        std::thread::sleep(Duration::from_millis(plan.work_ms));
        running.say(guest.off_command)?;
        running.end(CLOSE_S);
        let at = |text: &str| {
            let since_start = running.at(text)?.saturating_duration_since(started);
            Timestamp::try_from(started_at + since_start).ok()
        };
        let work_began = at(BEGIN).ok_or_else(|| {
            Error::failed("measure the recording", "the beginning of the work has no time")
        })?;
        Ok(Self { options, first_pass_ended: at(PASS), work_began, dir })
    }

    /// Returns the directory of its store.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Returns its checkpoints, as in `keyframe list --json`.
    pub fn list(&self) -> Result<Vec<Value>, Error> {
        let value = self.json(&["list", "--json", "--store"], &self.store(), &[])?;
        value
            .as_array()
            .cloned()
            .ok_or_else(|| Error::failed("read keyframe list --json", "it is no array"))
    }

    /// Returns the statistics of its store, as in `keyframe stats --json`.
    pub fn stats(&self) -> Result<Value, Error> {
        self.json(&["stats", "--json", "--store"], &self.store(), &[])
    }

    /// Returns the contents of `recording.json`.
    pub fn meta(&self) -> Result<Value, Error> {
        read_json(&self.dir.join("recording.json"))
    }

    /// Analyses it with `jobs` jobs into `out` and returns the report. With `in_sequence`, one
    /// replay of the whole part runs too, and the report compares the results.
    pub fn analyze(
        &self,
        request: AnalysisRequest,
        jobs: u64,
        in_sequence: bool,
        out: &Path,
    ) -> Result<Value, Error> {
        let (out, jobs) = (out.display().to_string(), jobs.to_string());
        let from = request.from_instruction.to_string();
        let arguments = [
            "--tool", "icount", "--jobs", &jobs, "--from", &from, "--out", &out, "--quiet",
            "--json",
        ];
        let check: &[&str] = if in_sequence { &["--check-sequential"] } else { &[] };
        self.json(&["analyze"], &self.dir, &[&arguments, check].concat())
    }

    /// Returns the result of `keyframe plan --simulate` with the analysis in `analysis`.
    pub fn plan(&self, analysis: &Path, more: &[&str]) -> Result<Value, Error> {
        let analysis = analysis.display().to_string();
        let fixed = ["--analysis", &analysis, "--simulate", "--json"];
        self.json(&["plan", "--from"], &self.dir, &[&fixed, more].concat())
    }

    /// Runs `keyframe BEFORE PATH AFTER` and returns its output.
    fn json(&self, before: &[&str], path: &Path, after: &[&str]) -> Result<Value, Error> {
        let name = format!("keyframe {}", before.first().unwrap_or(&""));
        let output = Command::new(&self.options.keyframe)
            .args(before)
            .arg(path)
            .args(after)
            .stdin(Stdio::null())
            .output()
            .map_err(Error::io(format!("run {name}")))?;
        let parsed = serde_json::from_slice(&output.stdout);
        // An analysis whose two results differ fails with a complete report; the caller warns.
        let differs =
            parsed.as_ref().is_ok_and(|report: &Value| report["equals_sequential"] == false);
        if !output.status.success() && !differs {
            return Err(Error::failed(name, String::from_utf8_lossy(&output.stderr).trim()));
        }
        parsed.map_err(|e| Error::failed(format!("read {name} --json"), e))
    }
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path).map_err(Error::io(format!("read {}", path.display())))?;
    serde_json::from_slice(&text).map_err(|e| Error::failed(format!("read {}", path.display()), e))
}
