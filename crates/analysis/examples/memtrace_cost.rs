//! Compares the cost of `memtrace` with an empty callback and with a trace as text, on one interval
//! of a recorded guest.
//!
//! ```text
//! KEYFRAME_GUEST=... KEYFRAME_QEMU10=... \
//!   cargo run --release -p keyframe-analysis --example memtrace_cost [WORK [TURNS]]
//! ```
//!
//! Measures the CPU time of QEMU from the checkpoint to the interval's end, and for `memtrace` also
//! that of the reading process until the part is complete. Each turn runs all variants one after
//! the other; the result is the best of the turns. All times include the cost of the guest itself.

#[path = "../tests/support/mod.rs"]
mod support;

use keyframe_analysis::tools::{Baseline, Tool, ToolRun, by_name};
use keyframe_analysis::{MergeContext, RunContext};
use std::time::Duration;
use support::{Recording, qemus};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Callback,
    Memtrace,
    Text,
}

const WAYS: [Way; 4] = [Way::Plain, Way::Callback, Way::Memtrace, Way::Text];

/// CPU time of this process.
fn own_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn once(recording: &Recording, way: Way, context: &RunContext) -> (Duration, Duration) {
    let end = context.first.end;
    if way == Way::Plain {
        let mut vm = recording.restored(0, &context.dir, None);
        let before = vm.cpu();
        recording.run_to(&mut vm, end);
        return (vm.cpu().saturating_sub(before), Duration::ZERO);
    }
    let running: Box<dyn ToolRun> = match way {
        Way::Memtrace => by_name("memtrace", &[]).unwrap().begin(context).unwrap(),
        Way::Text => Baseline::Text.begin(context).unwrap(),
        Way::Plain | Way::Callback => Baseline::Callback.begin(context).unwrap(),
    };
    let before = own_cpu();
    let (_, qemu) = recording.replay(context, &[context.first], running);
    (qemu, if way == Way::Memtrace { own_cpu().saturating_sub(before) } else { Duration::ZERO })
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let work = arguments.next().unwrap_or_else(|| "hash+dirty kf.mib=16 kf.hash.pause_ms=0".into());
    let turns: usize = arguments.next().and_then(|turns| turns.parse().ok()).unwrap_or(3);
    for qemu in qemus() {
        let recording = Recording::make(&qemu, &work, 2, Duration::from_millis(1500));
        println!("{} ({}), {:?}", qemu.path, qemu.interface, recording.intervals());
        let mut best = [(Duration::MAX, Duration::ZERO); 4];
        let context = |way: usize| {
            recording.context(&recording.file(&format!("way-{way}")), 0, recording.intervals()[0])
        };
        for _ in 0..turns {
            for (number, way) in WAYS.into_iter().enumerate() {
                let took = once(&recording, way, &context(number));
                if took.0 + took.1 < best[number].0 + best[number].1.min(Duration::from_secs(3600))
                {
                    best[number] = took;
                }
            }
        }
        let parts = recording
            .intervals()
            .into_iter()
            .map(|interval| keyframe_analysis::Part { interval, dir: context(2).dir });
        let out = recording.file("out");
        std::fs::create_dir_all(&out).unwrap();
        let merge =
            MergeContext { parts: parts.collect(), out, guest_symbols: std::sync::Arc::default() };
        let summary = by_name("memtrace", &[]).unwrap().merge(&merge).unwrap();
        println!("{}", summary.lines.join("; "));
        let [plain, callback, memtrace, text] =
            best.map(|(qemu, reader)| (qemu + reader).as_secs_f64());
        println!(
            "s of CPU: plain {plain:.2}, callback {callback:.2}, memtrace {memtrace:.2} (QEMU {:.2}, reader {:.2}), text {text:.2}",
            best[2].0.as_secs_f64(),
            best[2].1.as_secs_f64()
        );
        println!(
            "memtrace over callback {:.2}; text over memtrace {:.2}",
            memtrace / callback,
            text / memtrace
        );
        if let Some(keep) = std::env::var_os("KEEP") {
            let to = std::path::Path::new(&keep)
                .join(format!("{}-memtrace.parquet", qemu.interface.number()));
            std::fs::copy(&summary.files[0], to).unwrap();
        }
    }
}
