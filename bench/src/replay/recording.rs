//! Replays, segments and analyses a recording with the commands of the product.

use crate::vcpu_clock::{TimeSpent, VcpuClock};
use crate::{Error, Options};
use jiff::Timestamp;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// The costs of an analysis.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnalysisCosts {
    /// The time of all replays and the merge.
    pub wall_ns: f64,
    /// The sum of the times of the intervals' replays.
    pub intervals_ns: f64,
    /// The CPU time of all processes: QEMU, and keyframe, which reads the plugin's output.
    pub cpu_ns: f64,
    /// The size of a result of `memtrace`, in bytes for each access; `None` for other tools.
    pub bytes_per_access: Option<f64>,
}

/// The part of a recording that is analysed.
#[derive(Clone, Copy, Debug)]
pub enum AnalysedPart {
    /// The whole recording.
    All,
    /// From the interval with this instruction to the end.
    From(u64),
    /// The interval with this instruction.
    Around(u64),
}

/// A recording of the benchmark.
pub struct Recording<'a> {
    /// The options with the path of keyframe.
    pub options: &'a Options,
    /// Its directory.
    pub dir: &'a Path,
}

impl Recording<'_> {
    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.options.keyframe);
        command.arg(name).arg(self.dir).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn watched(&self, name: &str, arguments: &[&str]) -> Result<TimeSpent, Error> {
        let child = spawn(self.command(name, arguments), name)?;
        let clock = VcpuClock::watch(child.id());
        wait_for(child, name)?;
        clock.life().ok_or_else(|| {
            Error::failed(format!("measure keyframe {name}"), "its QEMU was not seen")
        })
    }

    /// Replays the whole recording, which must have its first checkpoint only.
    pub fn replay(&self) -> Result<TimeSpent, Error> {
        self.watched("verify", &["--jobs", "1", "--quiet"])
    }

    /// Replays the whole recording and takes checkpoints: the second of three stages.
    pub fn segment(&self, every: &str) -> Result<TimeSpent, Error> {
        self.watched("segment", &["--every", every, "--quiet"])
    }

    /// Returns its number of instructions.
    pub fn instructions(&self) -> Result<u64, Error> {
        self.number("instructions")
    }

    /// Returns the time for which the VM was recorded, in nanoseconds.
    pub fn duration_ns(&self) -> Result<f64, Error> {
        self.number("duration_ns").map(|ns| ns as f64)
    }

    /// Returns the time at which it began.
    pub fn began_at(&self) -> Result<Timestamp, Error> {
        let meta = self.meta()?;
        let began = meta["began_at"].as_str().unwrap_or_default();
        began.parse().map_err(|e| Error::failed(format!("read the time {began:?}"), e))
    }

    /// Returns a number of `recording.json`.
    fn number(&self, name: &str) -> Result<u64, Error> {
        let path = self.dir.join("recording.json");
        let problem = || Error::failed(format!("read {}", path.display()), format!("no {name}"));
        self.meta()?[name].as_u64().ok_or_else(problem)
    }

    /// Returns the contents of `recording.json`.
    fn meta(&self) -> Result<Value, Error> {
        let path = self.dir.join("recording.json");
        let failed = || format!("read {}", path.display());
        let text = std::fs::read(&path).map_err(Error::io(failed()))?;
        serde_json::from_slice(&text).map_err(|e| Error::failed(failed(), e))
    }

    /// Analyses it in `at_once` concurrent processes. If there are several, the time is until the last
    /// one has ended, and the CPU time is the sum.
    pub fn analyse(
        &self,
        tool: &str,
        arguments: &[&str],
        part: AnalysedPart,
        jobs: &str,
        at_once: usize,
    ) -> Result<AnalysisCosts, Error> {
        let range = match part {
            AnalysedPart::All => Vec::new(),
            AnalysedPart::From(at) => vec!["--from".into(), at.to_string()],
            AnalysedPart::Around(at) => {
                vec!["--from".into(), at.to_string(), "--to".into(), (at + 1).to_string()]
            }
        };
        let mut all = vec!["--tool", tool, "--jobs", jobs];
        all.extend(range.iter().map(String::as_str));
        all.extend(arguments.iter().flat_map(|argument| ["--tool-arg", argument]));
        let before = cpu_ns();
        let (wall_ns, reports) = self.reports(&all, at_once)?;
        let mut analysed =
            AnalysisCosts { wall_ns, cpu_ns: cpu_ns() - before, ..AnalysisCosts::default() };
        for report in reports {
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

    /// Analyses it in `at_once` concurrent processes with these arguments of `analyze`. Returns the
    /// time until the last one has ended, in nanoseconds, and what each of them says with `--json`.
    pub fn reports(&self, arguments: &[&str], at_once: usize) -> Result<(f64, Vec<Value>), Error> {
        let dir = tempfile::tempdir_in(self.dir)
            .map_err(Error::io("make a directory for an analysis"))?;
        let began = std::time::Instant::now();
        let children = (0..at_once)
            .map(|number| {
                let out = dir.path().join(number.to_string()).display().to_string();
                let mut command = self.command("analyze", &["--out", &out, "--json"]);
                command.args(arguments);
                spawn(command, "analyze")
            })
            .collect::<Result<Vec<Child>, Error>>()?;
        let outputs = children
            .into_iter()
            .map(|child| wait_for(child, "analyze"))
            .collect::<Result<Vec<Output>, Error>>()?;
        let wall_ns = began.elapsed().as_nanos() as f64;
        let read = |output: &Output| {
            serde_json::from_slice(&output.stdout)
                .map_err(|e| Error::failed("read keyframe analyze --json", e))
        };
        Ok((wall_ns, outputs.iter().map(read).collect::<Result<_, Error>>()?))
    }
}

/// Returns the bytes of each access from the summary of `memtrace`: `N accesses, N bytes, N each`.
fn bytes_per_access(report: &Value) -> Option<f64> {
    let line = report["summary"][0].as_str()?;
    let (bytes, accesses) = (line.split(", ").nth(1)?, line.split(", ").next()?);
    let number = |text: &str, unit| text.strip_suffix(unit)?.trim().parse::<f64>().ok();
    Some(number(bytes, "bytes")? / number(accesses, "accesses")?)
}

fn spawn(mut command: Command, name: &str) -> Result<Child, Error> {
    command.spawn().map_err(Error::io(format!("run keyframe {name}")))
}

fn wait_for(child: Child, name: &str) -> Result<Output, Error> {
    let output =
        child.wait_with_output().map_err(Error::io(format!("wait for keyframe {name}")))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(Error::failed(format!("keyframe {name}"), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Returns the CPU time of all processes that this one has waited for.
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
    fn bytes_per_access_are_read_from_the_summary() {
        let report = |line: &str| json!({ "summary": [line] });
        let each = bytes_per_access(&report("200 accesses, 300 bytes, 1.50 each"));
        assert!(each.is_some_and(|each| (each - 1.5).abs() < 1e-9));
        for other in ["", "12 lines", "x accesses, 3 bytes, 1 each"] {
            assert_eq!(bytes_per_access(&report(other)), None, "{other}");
        }
        assert_eq!(bytes_per_access(&json!({})), None);
    }
}
