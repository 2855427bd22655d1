//! The methods of running a guest: plain, counting, recorded, and recorded with checkpoints.

use super::workload::{BEGIN, END, PreparedWorkload};
use crate::running_guest::RunningGuest;
use crate::vcpu_clock::{TimeSpent, VcpuClock};
use crate::{Error, Options};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest time to boot and to begin the work, in seconds.
const BEGIN_S: u64 = 120;
/// Longest time of the work, in seconds.
const END_S: u64 = 300;
/// Longest time to close a recording, in seconds.
const CLOSE_S: u64 = 60;

/// A method of running a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunMethod {
    /// QEMU alone.
    Plain,
    /// QEMU that counts instructions, which a recording needs.
    Icount,
    /// QEMU that records into a log that is discarded.
    Unlogged,
    /// `keyframe record`.
    Record,
    /// `keyframe record` with checkpoints at this interval.
    Every(&'static str),
    /// `keyframe record --follow`: a second QEMU replays and takes a checkpoint each second.
    Live,
}

impl RunMethod {
    /// Returns its name in keys.
    pub fn key(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Icount => "icount",
            Self::Unlogged => "unlogged",
            Self::Record => "record",
            Self::Every(time) => time,
            Self::Live => "three_stage",
        }
    }

    /// Returns the command line; a recording goes to `out`.
    fn line(self, options: &Options, command: &[String], out: &Path) -> Vec<String> {
        let icount = |value: &str| [command, &["-icount".into(), value.into()]].concat();
        let every: &[&str] = match self {
            Self::Plain => return command.to_vec(),
            Self::Icount => return icount("shift=3"),
            Self::Unlogged => return icount("shift=3,rr=record,rrfile=/dev/null"),
            Self::Record => &[],
            Self::Every(time) => &["--checkpoint-every", time],
            Self::Live => &["--follow", "--checkpoint-every", "1s"],
        };
        let keyframe = options.keyframe.display().to_string();
        let out = out.display().to_string();
        let words = [&[&keyframe, "record", "--quiet", "--out", &out], every, &["--"]].concat();
        words.into_iter().map(str::to_owned).chain(command.iter().cloned()).collect()
    }
}

/// The times of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunTimes {
    /// From the beginning to the end of the work.
    pub work: TimeSpent,
    /// From the start to the end of QEMU.
    pub whole: TimeSpent,
    /// From the end of QEMU until the recording was complete.
    pub closing: Duration,
}

/// Runs the guest once from boot to power-off. A recording stays at `out`.
pub fn run(
    options: &Options,
    workload: &PreparedWorkload,
    method: RunMethod,
    out: &Path,
) -> Result<RunTimes, Error> {
    let key = workload.workload.key;
    options.say(format!("{key}, {}", method.key()));
    let mut guest = RunningGuest::start(&method.line(options, &workload.command, out))?;
    let clock = VcpuClock::watch(guest.pid());
    if let Some(start_command) = &workload.start_command {
        guest.wait_for("KF READY", BEGIN_S)?;
        guest.say(start_command)?;
    }
    guest.wait_for(BEGIN, BEGIN_S)?;
    guest.wait_for(END, END_S)?;
    guest.say(workload.off_command)?;
    guest.end(CLOSE_S);
    let closed = Instant::now();
    let unseen = || {
        Error::failed(format!("measure {key}, {}", method.key()), "no QEMU was found while it ran")
    };
    let span = guest.at(BEGIN).zip(guest.at(END));
    let work = span.and_then(|(from, to)| clock.between(from, to)).ok_or_else(unseen)?;
    let last = clock.last().ok_or_else(unseen)?;
    Ok(RunTimes {
        work,
        whole: clock.life().ok_or_else(unseen)?,
        closing: closed.saturating_duration_since(last),
    })
}

/// Returns whether `keyframe record` has the option `--follow`.
pub fn can_follow(options: &Options) -> Result<bool, Error> {
    let help = Command::new(&options.keyframe).args(["record", "--help"]).output();
    let help = help.map_err(Error::io("run keyframe record --help"))?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--follow"))
}
