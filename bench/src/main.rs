//! `keyframe-bench`: benchmarks of Keyframe against its peers.
//!
//! Each benchmark runs the product and its peers as a user would, on the same guest, in one run.
//! Each has one file and a directory for its parts; the other files are shared. A figure is always
//! measured in the run that prints it, and a ratio is computed from two figures of the same run. A
//! part that cannot be measured has no key. A benchmark does not judge its figures: it succeeds if
//! it could measure.
//!
//! ```text
//!   pause ───────┬─▶ vm::Protected ─▶ keyframe run -- qemu ...   pause as `keyframe take` reports it
//!                └─▶ peer::Peer ────▶ qemu ... + monitor         pause by QEMU's STOP and RESUME
//!   overhead ────┬─▶ vm::Protected ─┐
//!                └─▶ vm::Guest ─────┴▶ the guest's counter of its work, against the host's clock
//!   restore ─────┬─▶ keyframe restore, eager and lazy            from the command until the VM runs
//!                └─▶ qemu -loadvm, and memcpy
//!   memtrace-columns ▶ keyframe record, analyze --tool memtrace   its rows, by its own encoders and the
//!                                                               parquet library's
//!   replay ──────┬─▶ qemu, plain and counting; keyframe record   the same work, by the guest's lines
//!                └─▶ keyframe verify, segment, analyze           its recordings
//!   speedup ───────▶ keyframe record, analyze                     jobs against one replay
//!   replication ─┬─▶ keyframe protect, standby, witness on hosts of network namespaces
//!                ├─▶ keyframe profile there                      both against plain QEMU there
//!                └─▶ a host that loses power                     until a client's next answer
//!   evaluation ────▶ keyframe record, list, stats, analyze, plan chapter 6 of the checkpoint paper
//!   fleet ─────────▶ keyframe run, many at once                   one store against a store for each
//!   vmm ─────────┬─▶ keyframe attach, restore, branch             Firecracker; against its own Full, Diff
//!                │                                               and load
//!                └─▶ keyframe run, restore                       QEMU under TCG and KVM, by size of RAM
//!   store ───────┬─▶ keyframe-bench store --job                  one process for each store
//!                └─▶ keyframe-bench-peers, borg, restic
//! ```

mod benchmark;
mod cli;
mod error;
mod evaluation;
mod fleet;
mod guest_files;
mod interrupt;
mod keyframe_json;
mod memtrace_columns;
mod overhead;
mod part_selection;
mod pause;
mod pause_events;
mod qemu_peer;
mod replay;
mod replication;
mod report;
mod restore;
mod running_guest;
mod running_process;
mod sample;
mod script_initrd;
mod speedup;
mod store;
mod vcpu_clock;
mod vmm;

use benchmark::Options;
use clap::Parser;
use error::Error;
use report::Report;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::ExitCode;

fn main() -> ExitCode {
    raise_open_files();
    match cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("keyframe-bench: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

/// Raises the limit of open files: a store with many packs needs as many.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // If the kernel refuses, the open that exceeds the limit reports it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
