//! What `run` and `attach` have in common: when checkpoints are taken, and how.

use crate::words::StderrWords;
use keyframe_disk_capture::{DiskMethod, ExcludedDisks};
use keyframe_session::control::{OnExit, Strategy, TrackerKind};
use keyframe_session::{LanChoice, SessionOptions};
use keyframe_store::Durability;
use std::path::PathBuf;
use std::time::Duration;

/// When and how checkpoints are taken.
#[derive(clap::Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub struct Checkpoints {
    /// Time between checkpoints (500ms, 1s, 2m), or `none`: only when asked by `keyframe take`
    #[arg(long, default_value = "1s", value_parser = parse_interval, allow_hyphen_values = true)]
    interval: Interval,
    /// End after N checkpoints
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// The VM's name in the store [default: QEMU's -name, or `vm`]
    #[arg(long)]
    name: Option<String>,
    /// How dirty pages are copied
    #[arg(long, value_enum, default_value = "precopy")]
    strategy: Strategy,
    /// How dirty pages are found
    #[arg(long, value_enum, default_value = "auto")]
    tracker: TrackerKind,
    /// Keep pauses below this: fewer pages are left to the pause, or checkpoints are taken more
    /// often
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    max_pause: Option<Duration>,
    /// Keep what checkpoints cost the guest below this part of its time (3%, 0.03): they are taken
    /// less often than --interval
    #[arg(long, value_name = "PART", value_parser = parse_part)]
    max_overhead: Option<f64>,
    /// Threads that copy pages [default: as many as turn out to be fastest]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    copy_threads: Option<u64>,
    /// Memory for pages between the copy and the store, in MiB
    /// [default: the RAM's size, at most a quarter of the free memory]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..))]
    staging: Option<u64>,
    /// Threads that hash, compare and compress pages after the pause
    /// [default: a quarter of the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    encode_threads: Option<u64>,
    /// Memory for the pages that changes are stored against, in MiB: a page written again and again
    /// costs its changed words only
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = clap::value_parser!(u64).range(0..=1 << 20))]
    encode_memory: u64,
    /// Memory for the index of deduplication, in MiB: with 256 what is in 200 GiB of distinct pages
    /// is known. What is beyond its table lies in files; what is beyond all is forgotten, oldest
    /// first, and stored again when it comes again
    #[arg(long, value_name = "MIB", default_value = "256", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    index_memory: u64,
    /// When checkpoints survive power loss: `checkpoint`, each before it is listed; a time (10s),
    /// all with a sync so often; `never`, when the kernel writes them. They survive the death of
    /// Keyframe in any case. In object storage it is always `checkpoint`, as is said when a run
    /// starts
    #[arg(long, value_name = "WHEN", default_value = "checkpoint", value_parser = parse_durability)]
    durability: Durability,
    /// Longest pause; a VM that stands still for longer is resumed by the watchdog, and that
    /// checkpoint is dropped
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pause_limit: Duration,
    /// How disks that the guest can write to get into checkpoints
    #[arg(long, value_enum, default_value = "auto", value_name = "WAY")]
    disk: DiskMethod,
    /// Leave a disk out of the checkpoints, by the name of its drive, node, device or libvirt
    /// target, or `all`: QEMU opens it as the command line says, and `restore` says what it lacks
    #[arg(long, value_name = "NAME")]
    leave_out_disk: Vec<String>,
    /// Say a line about each checkpoint on standard error
    #[arg(long, short)]
    verbose: bool,
    /// Report errors only
    #[arg(long, short, conflicts_with = "verbose")]
    quiet: bool,
    /// Prove exactness: copy all RAM in each pause (which grows by that), write it to DIR, and
    /// compare the sealed checkpoint with it; the newest 8 copies are kept
    #[arg(long, value_name = "DIR")]
    audit: Option<PathBuf>,
    /// Flight recorder: forget this run's checkpoints that are so much older than its newest, and
    /// give their space back, as it goes. Tagged and pinned ones stay (keyframe tag, keyframe pin),
    /// and all that was in the store before
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_within: Option<Duration>,
    /// Whether the run recompresses packs that it does not write to any more, at the lowest
    /// priority; never with --keep-within or on another host
    #[arg(long, value_enum, default_value = "never", value_name = "WHEN")]
    recompress: keyframe_session::Recompress,
    /// Do not load the first checkpoint into a second QEMU, which never runs, to find out whether
    /// it can be restored. That costs one start of QEMU, some tenths of a second, beside the VM
    #[arg(long)]
    no_rehearsal: bool,
    /// Count the guest's instructions by the host's processor, for a VM under KVM: its intervals
    /// then have a length (keyframe analyze --approximate). The guest's own counters may lack one
    /// meanwhile
    #[arg(long)]
    count_instructions: bool,
    /// Break on purpose, for tests: `kill|stall|pause:PHASE[:N]` at the Nth time
    #[arg(long, hide = true, value_name = "FAULT")]
    fault: Option<keyframe_session::Fault>,
}

impl Checkpoints {
    /// True if the user wants to read errors only.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Converts the options to those of a session.
    pub fn options(self, on_exit: OnExit) -> SessionOptions {
        SessionOptions {
            interval: self.interval.0,
            count: self.count,
            name: self.name,
            on_exit,
            strategy: self.strategy,
            tracker: self.tracker,
            max_pause: self.max_pause,
            max_overhead: self.max_overhead,
            copy_threads: self.copy_threads.map(|n| n as usize),
            staging_mib: self.staging,
            encode_threads: self.encode_threads.map(|n| n as usize),
            encode_memory_mib: self.encode_memory,
            index_memory_mib: self.index_memory,
            durability: self.durability,
            pause_limit: self.pause_limit,
            events: StderrWords::shared(self.quiet, self.verbose),
            audit: self.audit,
            disk: self.disk,
            leave_out: ExcludedDisks(self.leave_out_disk),
            lans: LanChoice::None,
            keep_within: self.keep_within,
            recorded: None,
            recompress: self.recompress,
            rehearsal: !self.no_rehearsal,
            count_instructions: self.count_instructions,
            fault: self.fault,
        }
    }
}

fn parse_durability(text: &str) -> Result<Durability, String> {
    match text {
        "checkpoint" => Ok(Durability::Checkpoint),
        "never" => Ok(Durability::Never),
        time => parse_duration(time)
            .map(Durability::Every)
            .map_err(|_| "write checkpoint, never, or a time, as in 10s".into()),
    }
}

/// Between checkpoints: a time, or by command only.
#[derive(Clone, Copy, Debug)]
struct Interval(Option<Duration>);

/// A time as people write it, more than none.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let too_short = || "must be more than 0".to_owned();
    if text.starts_with('-') {
        return Err(too_short());
    }
    parse_wait(text).and_then(|time| if time.is_zero() { Err(too_short()) } else { Ok(time) })
}

/// A time as people write it; 0 for none.
pub fn parse_wait(text: &str) -> Result<Duration, String> {
    if text.starts_with('-') {
        return Err("must not be negative".into());
    }
    humantime::parse_duration(text)
        .map_err(|e| format!("{e}; write a number and a unit, as in 500ms, 1s, 2m"))
}

fn parse_part(text: &str) -> Result<f64, String> {
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| "write 3% or 0.03".to_owned());
    let part = match text.strip_suffix('%') {
        Some(percent) => number(percent)? / 100.0,
        None => number(text)?,
    };
    if part > 0.0 && part <= 1.0 {
        Ok(part)
    } else {
        Err("must be more than 0 and at most 100%".into())
    }
}

fn parse_interval(text: &str) -> Result<Interval, String> {
    if text == "none" {
        return Ok(Interval(None));
    }
    let interval = parse_duration(text)?;
    if interval < Duration::from_millis(10) {
        return Err("the shortest interval is 10ms".into());
    }
    Ok(Interval(Some(interval)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_read_as_people_write_them() {
        assert_eq!(parse_interval("1s").unwrap().0, Some(Duration::from_secs(1)));
        assert_eq!(parse_interval("250ms").unwrap().0, Some(Duration::from_millis(250)));
        assert_eq!(parse_interval("none").unwrap().0, None);
        assert!(parse_interval("0s").is_err());
        assert_eq!(parse_interval("-5s").unwrap_err(), "must be more than 0");
        assert_eq!((parse_part("3%"), parse_part("0.5")), (Ok(0.03), Ok(0.5)));
        assert!(["0", "-1%", "101%", "x", "NaN"].iter().all(|bad| parse_part(bad).is_err()));
        assert!(parse_interval("1ms").unwrap_err().contains("10ms"));
        assert!(parse_interval("fast").unwrap_err().contains("500ms"));
    }
}
