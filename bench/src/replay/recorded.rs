//! What is done with a recording: replayed, cut into intervals, analysed; each by the command that
//! users have.

use super::clock::{Clock, Spent};
use crate::{Error, Options};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// An analysis.
#[derive(Clone, Copy, Debug, Default)]
pub struct Analysed {
    /// All replays and the merge.
    pub wall_ns: f64,
    /// Of the intervals' replays alone, one after the other.
    pub intervals_ns: f64,
    /// Of all processes: QEMU, and keyframe, which reads what the plugin writes.
    pub cpu_ns: f64,
    /// Of `memtrace`: bytes of its result for each access.
    pub bytes_per_access: Option<f64>,
}

/// Which part of a recording an analysis is of.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// All.
    All,
    /// From the interval on that has this instruction.
    Behind(u64),
    /// The interval that has this instruction.
    Around(u64),
}

/// A recording.
pub struct Recorded<'a> {
    /// Runs keyframe.
    pub options: &'a Options,
    /// Where it is.
    pub dir: &'a Path,
}

impl Recorded<'_> {
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.options.keyframe);
        command.arg(name).arg(self.dir).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn watched(&self, name: &str, arguments: &[&str]) -> Result<Spent, Error> {
        let child = spawn(self.command(name, arguments), name)?;
        let clock = Clock::watch(child.id());
        ended(child, name)?;
        clock.life().ok_or_else(|| {
            Error::failed(format!("measure keyframe {name}"), "its QEMU was not seen")
        })
    }

    /// One replay through all, which must have no checkpoint but its first one.
    pub fn replay(&self) -> Result<Spent, Error> {
        self.watched("verify", &["--jobs", "1", "--quiet"])
    }

    /// One replay through all that takes checkpoints: the second of three stages.
    pub fn segment(&self, every: &str) -> Result<Spent, Error> {
        self.watched("segment", &["--every", every, "--quiet"])
    }

    /// How many instructions it has.
    pub fn instructions(&self) -> Result<u64, Error> {
        let path = self.dir.join("recording.json");
        let text = std::fs::read(&path).map_err(Error::io(format!("read {}", path.display())))?;
        let known = serde_json::from_slice::<Value>(&text)
            .ok()
            .and_then(|meta| meta["instructions"].as_u64());
        known.ok_or_else(|| {
            Error::failed(format!("read {}", path.display()), "it names no instructions")
        })
    }

    /// Analyses it `at_once` times side by side, each in a process of its own. Of several, the
    /// figures are of the last that ended, and CPU time that of all.
    pub fn analyse(
        &self,
        (tool, arguments): (&str, &[&str]),
        part: Part,
        jobs: &str,
        at_once: usize,
    ) -> Result<Analysed, Error> {
        let place = tempfile::tempdir_in(self.dir)
            .map_err(Error::io("make a directory for an analysis"))?;
        let range = match part {
            Part::All => Vec::new(),
            Part::Behind(at) => vec!["--from".into(), at.to_string()],
            Part::Around(at) => {
                vec!["--from".into(), at.to_string(), "--to".into(), (at + 1).to_string()]
            }
        };
        let before = cpu_ns();
        let began = std::time::Instant::now();
        let children = (0..at_once)
            .map(|number| {
                let out = place.path().join(number.to_string()).display().to_string();
                let fixed = ["--tool", tool, "--jobs", jobs, "--out", &out, "--json"];
                let mut command = self.command("analyze", &fixed);
                command.args(&range);
                for argument in arguments {
                    command.args(["--tool-arg", argument]);
                }
                spawn(command, "analyze")
            })
            .collect::<Result<Vec<Child>, Error>>()?;
        let reports = children
            .into_iter()
            .map(|child| ended(child, "analyze"))
            .collect::<Result<Vec<Output>, Error>>()?;
        let whole_ns = began.elapsed().as_nanos() as f64;
        let mut analysed =
            Analysed { wall_ns: whole_ns, cpu_ns: cpu_ns() - before, ..Analysed::default() };
        for output in reports {
            let report: Value = serde_json::from_slice(&output.stdout)
                .map_err(|e| Error::failed("read keyframe analyze --json", e))?;
            let ns = |value: &Value| value["wall_ns"].as_f64().unwrap_or(f64::NAN);
            analysed.intervals_ns =
                report["intervals"].as_array().into_iter().flatten().map(ns).sum();
            if at_once == 1 {
                analysed.wall_ns = ns(&report);
            }
            analysed.bytes_per_access = bytes_per_access(&report);
        }
        Ok(analysed)
    }
}

/// Of `memtrace`'s one line: `N accesses, N bytes, N each`.
fn bytes_per_access(report: &Value) -> Option<f64> {
    let line = report["summary"][0].as_str()?;
    let (bytes, accesses) = (line.split(", ").nth(1)?, line.split(", ").next()?);
    let number = |text: &str, unit| text.strip_suffix(unit)?.trim().parse::<f64>().ok();
    Some(number(bytes, "bytes")? / number(accesses, "accesses")?)
}

fn spawn(mut command: Command, name: &str) -> Result<Child, Error> {
    command.spawn().map_err(Error::io(format!("run keyframe {name}")))
}

fn ended(child: Child, name: &str) -> Result<Output, Error> {
    let output =
        child.wait_with_output().map_err(Error::io(format!("wait for keyframe {name}")))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(Error::failed(format!("keyframe {name}"), String::from_utf8_lossy(&output.stderr).trim()))
}

/// CPU time of all processes that this one has waited for.
fn cpu_ns() -> f64 {
    let ns = |time: TimeVal| time.tv_sec() as f64 * 1e9 + time.tv_usec() as f64 * 1e3;
    getrusage(UsageWho::RUSAGE_CHILDREN)
        .map_or(f64::NAN, |usage| ns(usage.user_time()) + ns(usage.system_time()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bytes_are_read_off_the_summary_or_not_at_all() {
        let report = |line: &str| json!({ "summary": [line] });
        let each = bytes_per_access(&report("200 accesses, 300 bytes, 1.50 each"));
        assert!(each.is_some_and(|each| (each - 1.5).abs() < 1e-9));
        for other in ["", "12 lines", "x accesses, 3 bytes, 1 each"] {
            assert_eq!(bytes_per_access(&report(other)), None, "{other}");
        }
        assert_eq!(bytes_per_access(&json!({})), None);
    }
}
