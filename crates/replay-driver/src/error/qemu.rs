//! How a replay or a simulation fails in its QEMU.

use std::process::ExitStatus;

/// A replay, or a simulation of a run that was not recorded, did not do what was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The replay has diverged from its log: QEMU waits for an event that does not come.
    #[error(
        "the replay has come off its log: it stands still at instruction {icount}{}{}{}",
        missing(*.missing_instructions), read(*.log_bytes), listed(.registers)
    )]
    Diverged {
        /// The instruction before which it has stopped.
        icount: u64,
        /// The number of instructions to its target; `None` if the target is the log's end.
        missing_instructions: Option<u64>,
        /// The number of bytes of the log that QEMU has read; `None` if that is unknown.
        log_bytes: Option<u64>,
        /// The first lines of the processor's registers, as QEMU prints them.
        registers: Vec<String>,
    },
    /// The replay came too late to a stop at a hold ([`keyframe_replay::log::LogIndex::holds`]), and
    /// hangs there.
    #[error(
        "the replay hangs at instruction {icount}: it stopped too late, while the network card was \
         about to send"
    )]
    MissedHold {
        /// The instruction of the hold.
        icount: u64,
    },
    /// The replay stopped at an instruction that was not its target.
    #[error("the replay stopped at instruction {icount}, not at {target}")]
    StoppedElsewhere {
        /// The instruction at which it stopped.
        icount: u64,
        /// The instruction at which it should have stopped.
        target: u64,
    },
    /// The replay stopped before the log's end.
    #[error("the replay stopped at instruction {icount}")]
    StoppedBeforeLogEnd {
        /// The instruction at which it stopped.
        icount: u64,
    },
    /// The log ends before the instruction that was asked for.
    #[error("the log ends before instruction {0}")]
    LogTooShort(u64),
    /// QEMU ended before the target.
    #[error("QEMU ended ({exit}) before instruction {target}")]
    EndedBeforeTarget {
        /// The exit status.
        exit: ExitStatus,
        /// The target.
        target: u64,
    },
    /// QEMU ended with a failure before the log's end.
    #[error("QEMU ended with {exit} before the log's end")]
    EndedBeforeLogEnd {
        /// The exit status.
        exit: ExitStatus,
    },
    /// QEMU has closed its monitor and does not end.
    #[error("QEMU has closed its monitor, but does not end")]
    MonitorClosed,
    /// QEMU ended while a debugger ran the VM.
    #[error("QEMU has ended before its log did")]
    EndedUnderDebugger,
    /// QEMU ended while its gdbstub was asked.
    #[error("QEMU has ended")]
    EndedInStub,
    /// QEMU's gdbstub does not answer.
    #[error("QEMU's stub has not answered for {seconds} s")]
    StubSilent {
        /// The time for which it was waited for, in seconds.
        seconds: u64,
    },
    /// The replay was started without a gdbstub.
    #[error("its QEMU has no stub for debuggers")]
    NoStub,
    /// The port for debuggers cannot be listened at.
    #[error("listen at port {port} of the loopback device")]
    Listen {
        /// The port.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
    /// QEMU ended during a simulation.
    #[error("QEMU ended within the interval")]
    SimulationEnded,
    /// The simulation does not execute instructions.
    #[error("the simulation gets no further than {icount} instructions")]
    SimulationStalled {
        /// The number of instructions that it has executed.
        icount: u64,
    },
    /// The kernel does not tell the CPU time of the virtual processor's thread.
    #[error("Linux does not tell how long QEMU's processor ran")]
    NoCpuTime,
    /// QEMU does not tell the thread of its virtual processor.
    #[error("QEMU does not tell the thread of its processor")]
    NoCpuThread,
}

impl ReplayError {
    /// Returns what the user can do about the error; `None` if that is not known.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Listen { .. } => Some("name another port, or 0 for a free one".into()),
            Self::MissedHold { .. } => {
                Some("run the same command again: another try is likely to succeed".into())
            }
            _ => None,
        }
    }
}

fn missing(instructions: Option<u64>) -> String {
    instructions.map_or_else(String::new, |count| format!(", {count} before its end"))
}

fn read(log_bytes: Option<u64>) -> String {
    log_bytes.map_or_else(String::new, |bytes| format!(", with {bytes} bytes of its log read"))
}

fn listed(registers: &[String]) -> String {
    registers.iter().fold(String::new(), |all, line| all + "\n  " + line)
}
