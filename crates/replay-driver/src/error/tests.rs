use super::*;
use keyframe_testing::{assert_golden, error_text};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

fn out() -> PathBuf {
    PathBuf::from("OUT")
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

fn of_recordings() -> Vec<Error> {
    vec![
        Error::store(Path::new("S"), keyframe_store::Error::NoStore { object: "S".into() }),
        Error::file("write", Path::new("R/console.part"), not_found()),
        Error::InInterval { index: 3, source: Box::new(Error::NoInterval) },
        Error::Interrupted,
        Error::StillRecording("R".into()),
        Error::UnknownLog { qemu: "/q".into(), found: LogVersion(0x00e0_200f) },
        Error::NoStoreYet("R".into()),
        Error::NoCheckpoint { store: "S".into(), recording: "5f1c".into() },
        Error::NoInterval,
        Error::NoInstruction { icount: 70, last_stop: 60 },
        Error::NotComparable("the replay has no RAM block pc.ram".into()),
    ]
}

fn of_replays() -> Vec<Error> {
    let exit = ExitStatus::from_raw(9);
    let registers = vec!["RAX=0".to_owned(), "RIP=8".to_owned()];
    let errors = [
        ReplayError::Diverged {
            icount: 40,
            missing_instructions: Some(20),
            log_bytes: Some(512),
            registers,
        },
        ReplayError::Diverged {
            icount: 40,
            missing_instructions: None,
            log_bytes: None,
            registers: Vec::new(),
        },
        ReplayError::MissedHold { icount: 40 },
        ReplayError::StoppedElsewhere { icount: 40, target: 60 },
        ReplayError::StoppedBeforeLogEnd { icount: 40 },
        ReplayError::LogTooShort(60),
        ReplayError::EndedBeforeTarget { exit, target: 60 },
        ReplayError::EndedBeforeLogEnd { exit },
        ReplayError::MonitorClosed,
        ReplayError::EndedUnderDebugger,
        ReplayError::EndedInStub,
        ReplayError::StubSilent { seconds: 60 },
        ReplayError::NoStub,
        ReplayError::Listen { port: 1234, source: io::ErrorKind::AddrInUse.into() },
        ReplayError::SimulationEnded,
        ReplayError::SimulationStalled { icount: 40 },
        ReplayError::NoCpuTime,
        ReplayError::NoCpuThread,
    ];
    errors.into_iter().map(Error::from).collect()
}

fn of_analyses() -> Vec<Error> {
    let json = serde_json::from_str::<u32>("").unwrap_err();
    let (path, version) = (PathBuf::from("OUT/analysis.json"), "none".to_owned());
    let errors = [
        AnalysisError::Interrupted,
        AnalysisError::Json { path: path.clone(), source: json },
        AnalysisError::OtherRecording { out: out(), found: "5f1c".into(), subject: "R".into() },
        AnalysisError::AnotherRecording(out()),
        AnalysisError::NoIntervalDone(out()),
        AnalysisError::OtherAnalysis(out()),
        AnalysisError::NotEmpty(out()),
        AnalysisError::Processor {
            tool: "syscalls".into(),
            processor: "riscv64".into(),
            known: "x86_64, aarch64".into(),
        },
        AnalysisError::Busy(out()),
        AnalysisError::FormatVersion { path: path.clone(), version: "2".into(), supported: 1 },
        AnalysisError::PreRelease { path: path.clone(), version },
        AnalysisError::NotAnAnalysis(Box::new(Error::file("read", &path, not_found()))),
        AnalysisError::EmptyRange { from: 10, to: 20, instructions: 5 },
        AnalysisError::NoInterval(7),
        AnalysisError::NoPart(7),
        AnalysisError::NoRecordedTime(7),
        AnalysisError::NoIntervals,
        AnalysisError::CheckpointsChanged,
        AnalysisError::IntervalsFailed {
            failed: 2,
            count: 9,
            index: 4,
            reason: "QEMU has ended".into(),
        },
        AnalysisError::RamBackends { count: 9, max: 8 },
        AnalysisError::MemoryModules,
        AnalysisError::RamBackendOrder,
        AnalysisError::NoSuchCheckpoint("S".into()),
        AnalysisError::GroupNotSimulated,
        AnalysisError::NoConsecutiveCheckpoints("S".into()),
        AnalysisError::GuestSymbols {
            checkpoint: keyframe_units::CheckpointId(7),
            problem: "no Linux kernel".into(),
        },
        AnalysisError::SimulatedByInterval,
    ];
    errors.into_iter().map(Error::from).collect()
}

#[test]
fn error_texts_are_golden() {
    let errors = [of_recordings(), of_replays(), of_analyses()];
    let errors: Vec<_> = errors.into_iter().flatten().collect();
    let texts: Vec<_> = errors.iter().map(|error| error_text(error, error.fix())).collect();
    assert_golden("tests/golden/errors.txt", &texts.concat());
}
