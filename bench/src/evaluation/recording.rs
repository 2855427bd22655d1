//! A recorded run of a workload, and the commands that look at it.

use super::workload::{BEGIN, PASS, Workload};
use crate::vm::Guest;
use crate::{Error, Options};
use jiff::Timestamp;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// How long a guest may take to boot and to begin.
const BEGIN_S: u64 = 180;
/// How long a recording may take to be closed.
const CLOSE_S: u64 = 120;

/// A recording.
pub struct Recording<'a> {
    options: &'a Options,
    /// Its directory.
    pub dir: PathBuf,
    /// When the work began.
    pub work_began: Timestamp,
    /// When its first pass ended, if it did.
    pub first_pass_ended: Option<Timestamp>,
}

impl<'a> Recording<'a> {
    /// Records `workload` until it has worked for `work_ms`, with a checkpoint every `every_ms`.
    pub fn make(
        options: &'a Options,
        workload: &Workload,
        (every_ms, work_ms): (u64, u64),
        dir: PathBuf,
    ) -> Result<Self, Error> {
        let keyframe = options.keyframe.display().to_string();
        let (out, every) = (dir.display().to_string(), format!("{every_ms}ms"));
        let words =
            [&keyframe, "record", "--quiet", "--checkpoint-every", &every, "--out", &out, "--"];
        let line: Vec<String> =
            words.into_iter().map(str::to_owned).chain(workload.command.iter().cloned()).collect();
        let mut guest = Guest::start(&line)?;
        let zero = (SystemTime::now(), Instant::now());
        if let Some(typed) = &workload.typed {
            guest.wait_for("KF READY", BEGIN_S)?;
            guest.say(typed)?;
        }
        guest.wait_for(BEGIN, BEGIN_S)?;
        std::thread::sleep(Duration::from_millis(work_ms));
        guest.say(workload.off)?;
        guest.end(CLOSE_S);
        let at = |text: &str| {
            let later = guest.at(text)?.saturating_duration_since(zero.1);
            Timestamp::try_from(zero.0 + later).ok()
        };
        let work_began = at(BEGIN).ok_or_else(|| {
            Error::failed("measure the recording", "the beginning of the work has no time")
        })?;
        Ok(Self { options, first_pass_ended: at(PASS), work_began, dir })
    }

    /// Its store.
    pub fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Its checkpoints, as `list --json` has them.
    pub fn list(&self) -> Result<Vec<Value>, Error> {
        let value = self.json(&["list", "--json", "--store"], &self.store(), &[])?;
        value
            .as_array()
            .cloned()
            .ok_or_else(|| Error::failed("read keyframe list --json", "no list"))
    }

    /// Its store, as `stats --json` has it.
    pub fn stats(&self) -> Result<Value, Error> {
        self.json(&["stats", "--json", "--store"], &self.store(), &[])
    }

    /// `recording.json`.
    pub fn meta(&self) -> Result<Value, Error> {
        read_json(&self.dir.join("recording.json"))
    }

    /// Analyses it from instruction `from` on with `jobs` into `out`; the report. `in_sequence`: by
    /// one replay through all, too; the report says whether it found the same.
    pub fn analyze(
        &self,
        (jobs, in_sequence): (u64, bool),
        from: u64,
        out: &Path,
    ) -> Result<Value, Error> {
        let (out, jobs, from) = (out.display().to_string(), jobs.to_string(), from.to_string());
        let more = [
            "--tool", "icount", "--jobs", &jobs, "--from", &from, "--out", &out, "--quiet",
            "--json",
        ];
        let once_more: &[&str] = if in_sequence { &["--check-sequential"] } else { &[] };
        self.json(&["analyze"], &self.dir, &[&more, once_more].concat())
    }

    /// What `plan --simulate` says of it, after the analysis in `analysis`.
    pub fn plan(&self, analysis: &Path, more: &[&str]) -> Result<Value, Error> {
        let analysis = analysis.display().to_string();
        let fixed = ["--analysis", &analysis, "--simulate", "--json"];
        self.json(&["plan", "--from"], &self.dir, &[&fixed, more].concat())
    }

    fn json(&self, before: &[&str], path: &Path, behind: &[&str]) -> Result<Value, Error> {
        let name = format!("keyframe {}", before.first().unwrap_or(&""));
        let output = Command::new(&self.options.keyframe)
            .args(before)
            .arg(path)
            .args(behind)
            .stdin(Stdio::null())
            .output()
            .map_err(Error::io(format!("run {name}")))?;
        let said = serde_json::from_slice(&output.stdout);
        // An analysis that found two results fails with its report; all that it measured is in
        // there, and the caller tells of it.
        let differs = said.as_ref().is_ok_and(|said: &Value| said["equals_sequential"] == false);
        if !output.status.success() && !differs {
            return Err(Error::failed(name, String::from_utf8_lossy(&output.stderr).trim()));
        }
        said.map_err(|e| Error::failed(format!("read {name} --json"), e))
    }
}

/// A JSON file.
pub fn read_json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path).map_err(Error::io(format!("read {}", path.display())))?;
    serde_json::from_slice(&text).map_err(|e| Error::failed(format!("read {}", path.display()), e))
}
