//! One file per command. Each has its arguments, its help, and a `run` that returns the exit code.

pub mod analysis;
pub mod analyze;
pub mod attach;
pub mod branch;
pub mod bundle;
mod changed_files;
pub mod check;
pub mod checkpoints;
pub mod commit;
pub mod completions;
pub mod console;
pub mod copy;
pub mod diff;
pub mod disks;
pub mod doctor;
pub mod export;
pub mod failover;
pub mod find;
pub mod forget;
pub mod goto;
pub mod help;
pub mod import;
pub mod init;
pub mod list;
pub mod log;
pub mod man;
pub mod mount;
pub mod pin;
pub mod plan;
pub mod profile;
pub mod protect;
pub mod prune;
pub mod record;
pub mod recorded;
pub mod report;
pub mod restore;
pub mod rollback;
pub mod run;
mod running_vm;
pub mod segment;
pub mod serve;
pub mod show;
mod shown_vm;
pub mod standby;
pub mod stats;
pub mod status;
pub mod stop;
pub mod switch;
pub mod tag;
pub mod take;
pub mod top;
pub mod unlock;
pub mod verify;
pub mod vmms;
pub mod watchdog;
pub mod witness;
pub mod work;

use crate::failure::{
    DONE, FAILED, Failure, GUEST_PANICKED, STORE_FULL, WARNED, WATCHDOG_EXPIRED, chain,
};
use keyframe_session::Verdict;
use keyframe_session::error::RunDirError;
use keyframe_session::readiness::ReadyNotifier;
use keyframe_store::{Listing, Store, UnreadableCheckpoint};
use keyframe_store_keys::KeyArg;
use keyframe_vmm::{Ability, TapChoice};
use std::path::PathBuf;

/// The exit code for what a run has achieved.
pub fn exit_code(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Complete => DONE,
        Verdict::Incomplete => WARNED,
        Verdict::Failed => FAILED,
        Verdict::StoreFull => STORE_FULL,
        Verdict::GuestPanicked => GUEST_PANICKED,
        Verdict::WatchdogExpired => WATCHDOG_EXPIRED,
    }
}

/// Images and media that have moved.
#[derive(clap::Args, Debug)]
pub struct MovedArg {
    /// An image or a CD of the checkpoint, or a directory of them, has moved from OLD to NEW; may be
    /// given several times
    #[arg(long, value_name = "OLD=NEW")]
    image: Vec<keyframe_qemu::cmdline::MovedFile>,
}

/// Tap devices of a restored VM.
#[derive(clap::Args, Debug)]
pub struct TapArg {
    /// Of Firecracker: the network card CARD (its `iface_id`) gets the tap device TAP instead of the
    /// checkpoint's; may be given several times
    #[arg(long, value_name = "CARD=TAP")]
    tap: Vec<TapChoice>,
}

impl TapArg {
    /// Refuses the option for a VM of QEMU.
    fn refuse_for_qemu(&self) -> Result<(), Failure> {
        if !self.tap.is_empty() {
            keyframe_qemu::capabilities().require(Ability::ChosenTaps)?;
        }
        Ok(())
    }
}

/// The recipients of the message that a VM is ready.
#[derive(clap::Args, Debug)]
pub struct ReadyArg {
    /// Write one line of JSON to this open descriptor when the VM is ready, then close it (see:
    /// keyframe help scripting). If NOTIFY_SOCKET is set, Keyframe also sends READY=1 there
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(u32).range(3..))]
    ready_fd: Option<u32>,
}

impl ReadyArg {
    /// Takes the descriptor. To be called before the command opens anything.
    pub fn take(&self) -> Result<ReadyNotifier, Failure> {
        Ok(ReadyNotifier::take(self.ready_fd)?)
    }
}

/// The store: from the command line, or from `KEYFRAME_STORE`.
#[derive(clap::Args, Debug)]
pub struct StoreArg {
    /// The store's directory, s3://BUCKET/PREFIX, or kf://HOST:PORT where `keyframe serve` runs (to
    /// write: with --allow-write)
    #[arg(long, env = "KEYFRAME_STORE", value_name = "STORE")]
    store: PathBuf,
    #[command(flatten)]
    key: KeyArg,
}

impl StoreArg {
    /// Opens the store.
    pub fn open(&self) -> Result<Store, Failure> {
        self.key.open(&self.store).map_err(|e| Failure::store(&e, &self.store))
    }

    /// Turns a store's error into one for a person.
    pub fn failure(&self, error: &keyframe_store::Error) -> Failure {
        Failure::store(error, &self.store)
    }
}

/// Says that `keyframe status` does not list a VM that runs.
fn warn_unlisted(error: &RunDirError) {
    let error = chain(error);
    eprintln!("keyframe: warning: the VM is not among those of keyframe status: {error}");
}

/// Says that a program that waits for a VM could not be told that it is ready.
fn warn_untold(told: std::io::Result<()>) {
    if let Err(error) = told {
        eprintln!(
            "keyframe: warning: tell the program that waits for it that the VM is ready: {error}"
        );
    }
}

/// Names the checkpoints that a listing had to leave out, and says so in the exit code.
fn warn_of_unreadable(listing: &Listing) -> u8 {
    for UnreadableCheckpoint { id, error } in &listing.unreadable {
        eprintln!(
            "keyframe: checkpoint {id} is left out: {}; see what else is hurt: keyframe check",
            chain(error)
        );
    }
    if listing.unreadable.is_empty() { DONE } else { WARNED }
}
