//! The ways in which a guest does its work: plain, counted, recorded, recorded with checkpoints.

use super::clock::{Clock, Spent};
use super::workload::{BEGIN, END, Workload};
use crate::vm::Guest;
use crate::{Error, Options};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a guest may take to boot and to begin.
const BEGIN_S: u64 = 120;
/// How long it may take for its work.
const END_S: u64 = 300;
/// How long a recording may take to be closed.
const CLOSE_S: u64 = 60;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// QEMU alone.
    Plain,
    /// QEMU that counts instructions: what a recording stands on.
    Icount,
    /// QEMU that records, into a log that goes nowhere.
    Unlogged,
    /// `keyframe record`.
    Record,
    /// The same with checkpoints: so many ms apart.
    Every(&'static str),
    /// Three stages live: a second QEMU follows and takes a checkpoint each second.
    Live,
}

impl Way {
    /// As in keys.
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

    /// The command line; a recording goes to `out`.
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

/// What a run took.
#[derive(Clone, Copy, Debug)]
pub struct Ran {
    /// The work.
    pub work: Spent,
    /// From QEMU's start to its end.
    pub whole: Spent,
    /// From its end until all of the recording was there.
    pub behind: Duration,
}

/// Runs the guest once from boot to power-off. A recording is left at `out`.
pub fn run(options: &Options, workload: &Workload, way: Way, out: &Path) -> Result<Ran, Error> {
    let key = workload.kind.key;
    options.say(format!("{key}, {}", way.key()));
    let mut guest = Guest::start(&way.line(options, &workload.command, out))?;
    let clock = Clock::watch(guest.pid());
    if let Some(typed) = &workload.typed {
        guest.wait_for("KF READY", BEGIN_S)?;
        guest.say(typed)?;
    }
    guest.wait_for(BEGIN, BEGIN_S)?;
    guest.wait_for(END, END_S)?;
    guest.say(workload.off)?;
    guest.end(CLOSE_S);
    let closed = Instant::now();
    let unseen = || {
        Error::failed(format!("measure {key}, {}", way.key()), "its QEMU was not seen while it ran")
    };
    let span = guest.at(BEGIN).zip(guest.at(END));
    let work = span.and_then(|(from, to)| clock.between(from, to)).ok_or_else(unseen)?;
    let last = clock.last().ok_or_else(unseen)?;
    Ok(Ran {
        work,
        whole: clock.life().ok_or_else(unseen)?,
        behind: closed.saturating_duration_since(last),
    })
}

/// Whether this `keyframe record` can follow itself.
pub fn can_follow(options: &Options) -> Result<bool, Error> {
    let help = Command::new(&options.keyframe).args(["record", "--help"]).output();
    let help = help.map_err(Error::io("run keyframe record --help"))?;
    Ok(String::from_utf8_lossy(&help.stdout).contains("--follow"))
}
