//! Runs a VM under checkpoints without the `keyframe` binary.
//!
//! ```text
//! checkpoint_vm STORE COUNT QEMU-COMMAND...
//! checkpoint_vm /tmp/store 3 qemu-system-x86_64 -m 256M -nographic -kernel vmlinuz
//! ```
//!
//! Makes the store if it is missing, takes COUNT checkpoints, one each 500 ms, and ends the VM.
//! Prints `checkpoint N` for each, and `sealed N, failed M` at the end. Exits with 0 if all
//! checkpoints were sealed.

use keyframe_session::control::OnExit;
use keyframe_session::{
    CommandLines, Event, EventSink, SessionOptions, Verdict, error_chain, helper_process,
};
use keyframe_store::Store;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Prints the checkpoints.
struct Printer;

impl EventSink<Event> for Printer {
    fn event(&self, event: &Event) {
        match event {
            Event::Sealed(entry) => println!("checkpoint {}", entry.id),
            Event::Failed { failure, .. } => eprintln!("{failure}"),
            _ => {}
        }
    }
}

fn checkpoint_vm() -> Result<Verdict, Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let store = arguments.next().ok_or("usage: checkpoint_vm STORE COUNT QEMU-COMMAND...")?;
    let count = arguments.next().ok_or("COUNT is missing")?.to_string_lossy().parse()?;
    let store = Path::new(&store);
    let store = if store.exists() { Store::open(store)? } else { Store::init(store)? };
    let interval = Some(Duration::from_millis(500));
    let mut options = SessionOptions::every(interval, OnExit::Kill);
    (options.count, options.events) = (Some(count), Arc::new(Printer));
    let report = keyframe_session::run(&store, CommandLines::One(arguments.collect()), options)?;
    println!("sealed {}, failed {}", report.sealed, report.failed);
    Ok(report.verdict())
}

fn main() -> ExitCode {
    helper_process::run_if_asked();
    match checkpoint_vm() {
        Ok(Verdict::Complete) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("checkpoint_vm: {}", error_chain(&*error));
            ExitCode::FAILURE
        }
    }
}
