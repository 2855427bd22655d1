//! `keyframe goto`: a recorded VM as it was at an instruction.

use super::recorded::RecordedArgs;
use super::warn_unlisted;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::progress::instructions_bar;
use crate::words::replay::ReplayWords;
use keyframe_machine::VmmKind;
use keyframe_qemu::Processor;
use keyframe_replay::cut_points::instruction_at_time;
use keyframe_replay_driver::{
    Debugger, PauseOptions, PausedReplay, Replay, ReplayRoute, ReplayableRecording, jobs,
};
use keyframe_session::run_dir::{Origin, ReplayedPoint, RunDir, RunKind, VmmProcess};
use keyframe_store::CheckpointId;
use serde::Serialize;
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time between two checks whether QEMU has ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Bring up a recorded VM as it was at an instruction, for gdb or to run
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Keyframe replays the VM from the nearest checkpoint before the instruction and pauses it there, in the foreground, until Ctrl-C.
The EXTRA arguments can give its QEMU a monitor or a display. The VM does not write to its images, and its packets go nowhere.

With --gdb a debugger can attach and move in both directions: continue, stepi, reverse-continue and reverse-stepi, breakpoints and
watchpoints. A step backwards is another replay from the nearest checkpoint, so it takes about as long as half an interval. More
checkpoints make it faster (keyframe segment --every 200ms). A recorded run cannot be changed: Keyframe refuses a debugger's
writes to registers and memory.

--time counts the host's time during the recording. --marker stops after the first line of the console that contains the text (to
see all lines: keyframe log). Both stop at the next instruction at which the VM's state is unambiguous.

Examples:
  keyframe goto R --icount 1500000000 -- -monitor stdio
  keyframe goto R --marker 'Kernel panic' --gdb 1234
  gdb vmlinux -ex 'target remote :1234' -ex 'reverse-continue'
  keyframe goto R --time 12s --json"
)]
pub struct Goto {
    #[command(flatten)]
    recorded: RecordedArgs,
    #[command(flatten)]
    to: To,
    /// Wait for a debugger at this port of the loopback device; 0 takes a free one and says which
    #[arg(long, value_name = "PORT")]
    gdb: Option<u16>,
    /// Print the position as JSON once it is reached
    #[arg(long)]
    json: bool,
    /// Report errors only
    #[arg(long, short)]
    quiet: bool,
    /// Arguments for QEMU, after those that the recording kept
    #[arg(last = true, value_name = "EXTRA QEMU ARGS")]
    extra: Vec<OsString>,
}

/// The target of the replay.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct To {
    /// Before this instruction, counted from the recording's beginning
    #[arg(long, value_name = "N")]
    icount: Option<u64>,
    /// So long after the recording's beginning (12s, 1m30s)
    #[arg(long, value_name = "TIME", value_parser = super::checkpoints::parse_duration)]
    time: Option<Duration>,
    /// After the first line of the console that holds this text
    #[arg(long, value_name = "TEXT")]
    marker: Option<String>,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    recording: String,
    icount: u64,
    /// The log has something at this instruction (at the recording's end: an interrupt): a VM has
    /// several states there, one before and one behind it.
    is_ambiguous: bool,
    /// The checkpoint that it was replayed from.
    checkpoint: u64,
    replayed_instructions: u64,
    wall_ns: u64,
    qemu_pid: u32,
    /// The debugger's port.
    gdb: Option<u16>,
    #[serde(skip)]
    processor: Processor,
    /// The processor's registers, as QEMU prints them.
    registers: String,
}

impl Goto {
    /// Goes there, and stays until the user has seen enough.
    pub fn run(&self) -> Outcome {
        let source = self.recorded.open()?;
        let interrupted = jobs::interruption()?;
        // A port that is taken is said before anything is replayed.
        let words = ReplayWords::default();
        let debugger =
            self.gdb.map(|port| Debugger::listen(&source, port, self.extra.clone(), &words));
        let debugger = debugger.transpose()?;
        let route = ReplayRoute::to(&source, &source.checkpoints()?, self.target(&source)?)?;
        let began = Instant::now();
        let is_shown = !self.quiet && !self.json;
        let bar = instructions_bar("replaying", route.icount - route.begin.icount, is_shown);
        let mut tell = |at: u64| bar.set_position(at.saturating_sub(route.begin.icount));
        let options = PauseOptions { extra: &self.extra, has_gdbstub: debugger.is_some() };
        let paused = PausedReplay::at(&source, route, options, &interrupted, &mut tell)?;
        bar.finish_and_clear();
        let Some(mut paused) = paused else { return Err(Failure::new("interrupted")) };
        let restored = paused.replay.restored();
        let registers = restored.vm().qmp().hmp("info registers").unwrap_or_default();
        let processor = restored.vm().processor().map_err(|e| Failure::qemu(&e))?;
        let log_index = source.log_index()?;
        let report = Report {
            recording: source.recording.meta.id.clone(),
            icount: route.icount,
            is_ambiguous: if route.icount == log_index.end() {
                log_index.end_is_ambiguous()
            } else {
                !log_index.is_unambiguous(route.icount)
            },
            checkpoint: route.begin.checkpoint.0,
            replayed_instructions: route.icount - route.begin.icount,
            wall_ns: keyframe_units::elapsed_ns(began),
            qemu_pid: restored.pid(),
            gdb: debugger.as_ref().map(Debugger::port),
            processor,
            registers: registers.replace('\r', ""),
        };
        self.tell(&report)?;
        // `keyframe status` and `stop` find the VM by it until this command ends.
        let _listed = listed(&source, &report);
        match debugger {
            Some(debugger) => debugger.serve(paused, &interrupted)?,
            None => stay(&mut paused.replay, &interrupted)?,
        }
        Ok(DONE)
    }

    /// The instruction that was asked for.
    fn target(&self, source: &ReplayableRecording) -> Result<u64, Failure> {
        let log_index = source.log_index()?;
        let end = log_index.end();
        let standing = |icount: u64| log_index.next_unambiguous(icount).unwrap_or(end);
        if let Some(icount) = self.to.icount {
            return Ok(icount);
        }
        if let Some(time) = self.to.time {
            let failed = |e| Failure::recording(&e);
            let found = instruction_at_time(source.log(), &source.recording.times_path(), time)
                .map_err(failed)?;
            return found.map(standing).ok_or_else(|| {
                let took = output::duration(source.recording.meta.duration_ns);
                Failure::new(format!("the recording is shorter than {time:?}"))
                    .fix(format!("it took {took}"))
            });
        }
        let marker = self.to.marker.as_deref().unwrap_or_default();
        let console = self.recorded.console(source, !self.quiet && !self.json)?;
        let line = console.find(marker).ok_or_else(|| {
            Failure::new(format!("no line of the console holds {marker:?}")).fix(format!(
                "see what it holds: keyframe log {}",
                self.recorded.recording.display()
            ))
        })?;
        Ok(standing(line.last))
    }

    fn tell(&self, report: &Report) -> Result<(), Failure> {
        if self.json {
            return output::json(report);
        }
        if self.quiet {
            return Ok(());
        }
        eprintln!(
            "keyframe: the VM stands before instruction {} after {} (QEMU {}; {} instructions replayed from checkpoint {})",
            report.icount,
            output::duration(report.wall_ns),
            report.qemu_pid,
            report.replayed_instructions,
            report.checkpoint
        );
        if report.is_ambiguous {
            eprintln!(
                "keyframe: note: the log has something at this very instruction (an interrupt, a clock): the VM stands before \
                 or after it"
            );
        }
        for line in
            report.registers.lines().filter(|line| report.processor.shows_instruction_pointer(line))
        {
            eprintln!("keyframe: {line}");
        }
        if let Some(port) = report.gdb {
            eprintln!(
                "keyframe: attach to it: gdb VMLINUX -ex 'target remote :{port}'; Ctrl-C ends it"
            );
        } else {
            eprintln!("keyframe: Ctrl-C ends it");
        }
        Ok(())
    }
}

/// Claims a run directory for the VM and describes it there. Without one the VM is only not listed.
fn listed(source: &ReplayableRecording, report: &Report) -> Option<RunDir> {
    let place = RunDir::claim_goto(&source.recording.meta.vm);
    let told = place.and_then(|place| {
        let checkpoint = CheckpointId(report.checkpoint);
        let recording = source.recording.path().to_owned();
        let origin = Origin {
            replayed: Some(ReplayedPoint { recording, instruction: report.icount }),
            ..Origin::new(RunKind::Goto, &source.store, checkpoint)
        };
        place.tell(origin, VmmProcess { vmm: VmmKind::Qemu, pid: report.qemu_pid })?;
        Ok(place)
    });
    told.inspect_err(warn_unlisted).ok()
}

/// Waits until the user presses Ctrl-C or a monitor's `quit` ends the VM.
fn stay(replay: &mut Replay, interrupted: &AtomicBool) -> Result<(), Failure> {
    while !interrupted.load(Ordering::Relaxed) {
        if replay.restored().try_wait().map_err(|e| Failure::qemu(&e))?.is_some() {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
