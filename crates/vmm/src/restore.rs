//! Restoring a checkpoint: into a new VM, or into the running one.

use crate::{Ability, Capabilities, Unsupported, Vmm, VmmError};
use keyframe_machine::{Lineage, MachineSpec, RamSource};
use keyframe_units::{PageIndex, RamLayout};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The machine that a restore makes: its description and its RAM blocks.
#[derive(Clone, Debug)]
pub struct RestoreSource {
    /// The machine.
    pub machine: MachineSpec,
    /// The RAM blocks.
    pub ram: RamLayout,
}

/// A source that lives until a lazy restore has read all pages.
pub type SharedRamSource = Arc<dyn RamSource + Send>;

/// The source of a new VM's RAM, and the time at which it is loaded.
pub enum RestoreRam<'a> {
    /// All RAM is loaded before the VM runs.
    Eager(&'a dyn RamSource),
    /// The VM runs at once and waits for each page that it touches before the page is loaded.
    Lazy(SharedRamSource),
}

/// The tap device that a network card of a restored VM gets instead of the checkpoint's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapChoice {
    /// The id of the network card.
    pub card: String,
    /// The name of the tap device. In the tap of several clones, `%d` stands for the number of the
    /// clone, from 1.
    pub tap: String,
}

impl FromStr for TapChoice {
    type Err = String;

    /// Reads `CARD=TAP`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((card, tap)) if !card.is_empty() && !tap.is_empty() => {
                Ok(Self { card: card.into(), tap: tap.into() })
            }
            _ => Err("it must be CARD=TAP, for example eth0=tap1".into()),
        }
    }
}

/// The options of a restore that each VMM understands.
#[derive(Clone, Debug, Default)]
pub struct PlanOptions {
    /// The binary to use instead of the checkpoint's, which must be of the same version; `None` for
    /// the checkpoint's.
    pub binary: Option<PathBuf>,
    /// The arguments to add to the VMM's command line.
    pub arguments: Vec<OsString>,
    /// True to leave the VM paused at the checkpoint.
    pub paused: bool,
    /// The identity of the checkpoint, for the new VM's [`Vmm::lineage`]. `None` leaves it out.
    pub lineage: Option<Lineage>,
    /// The file to which the VMM's standard error is appended; `None` for this process's standard
    /// error.
    pub log: Option<PathBuf>,
    /// The tap devices to use instead of the checkpoint's.
    pub taps: Vec<TapChoice>,
    /// True to find out only whether the checkpoint can be restored: the VM never runs, and its VMM
    /// ends with the thread that starts it.
    pub is_rehearsal: bool,
    /// A file of its own for each drive to which the guest can write; none for a rehearsal.
    pub drives: Vec<DriveFile>,
}

/// The file of a new VM's drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveFile {
    /// The name of the drive.
    pub name: String,
    /// The absolute path of the file.
    pub path: PathBuf,
}

/// Starts VMs from checkpoints.
pub trait Restorer {
    /// Returns the abilities of the VMs that this restorer starts.
    fn capabilities(&self) -> Capabilities;

    /// Checks that `source` can be restored on this host, and plans the restore. Starts nothing.
    /// Error: the reason why it cannot be restored here.
    fn plan(
        &self,
        source: RestoreSource,
        options: PlanOptions,
    ) -> Result<Box<dyn RestorePlan>, VmmError>;

    /// Starts the clones of `request` from one checkpoint, all or none. They share the RAM that
    /// none of them has written, and are paused. Error: the reason why a clone cannot be started;
    /// no process is left then.
    fn start_clones(&self, request: CloneRequest<'_>) -> Result<Vec<RestoredVm>, VmmError> {
        let _ = request;
        Err(Unsupported {
            vmm: self.capabilities().vmm(),
            ability: Ability::Clones,
            reason: "its driver cannot start several VMs from the same RAM".into(),
            fix: "restore the checkpoint several times: keyframe restore".into(),
        }
        .into())
    }
}

/// The clones that [`Restorer::start_clones`] starts.
pub struct CloneRequest<'a> {
    /// The machine of each clone, and its RAM blocks.
    pub source: RestoreSource,
    /// The options of each clone. `paused`, `log` and `drives` are not looked at.
    pub options: PlanOptions,
    /// The drives of each clone, as in [`PlanOptions::drives`].
    pub drives: &'a [Vec<DriveFile>],
    /// The number of each clone, which stands for `%d` in the names of taps.
    pub numbers: &'a [u32],
    /// An empty directory of each clone's own, for its sockets and its output.
    pub directories: &'a [PathBuf],
    /// The RAM of the checkpoint.
    pub ram: &'a dyn RamSource,
    /// The state of all devices.
    pub device_state: &'a [u8],
    /// Set if no more clones are to be started.
    pub interrupted: &'a AtomicBool,
}

/// A restore that is ready to start.
pub trait RestorePlan {
    /// Returns the path of the VMM's binary.
    fn binary(&self) -> &Path;

    /// Returns the differences between the restored VM and the checkpoint's that the user should
    /// know, a text each.
    fn notes(&self) -> &[String];

    /// Starts the VMM and loads RAM and devices. The VM runs afterwards, unless
    /// [`PlanOptions::paused`] was set.
    ///
    /// With [`RestoreRam::Lazy`] the calling thread must live until [`Residency::settled`]: if it
    /// ends before, the kernel ends the VM.
    ///
    /// Errors, after which no process is left: the VMM cannot be started; RAM cannot be read; the
    /// VMM refuses the device state.
    fn start(
        self: Box<Self>,
        ram: RestoreRam<'_>,
        device_state: &[u8],
    ) -> Result<RestoredVm, VmmError>;
}

/// A VM that was started from a checkpoint.
pub struct RestoredVm {
    /// The VM. It is declared first so that it is dropped before `loading`.
    pub vm: Box<dyn Vmm>,
    /// The loading of its RAM, if the restore is a lazy one.
    pub loading: Option<Box<dyn LazyLoading>>,
    /// The time from the start of the restore until the VM ran, or could run if it is paused, in
    /// nanoseconds.
    pub ready_ns: u64,
    /// The time that copying all RAM took, in nanoseconds; `None` for a lazy restore.
    pub filled_ns: Option<u64>,
}

/// The loading of RAM after the VM has started.
pub trait LazyLoading: Send {
    /// Returns the progress of the loading.
    fn residency(&self) -> Residency;

    /// Separates the VM from this process once all RAM is loaded. The caller repeats this call
    /// until [`Residency::settled`] is true. Error: the VM needed a page that could not be read.
    fn settle(&mut self) -> Result<(), VmmError>;
}

/// The progress with which a lazy restore loads RAM.
#[derive(Clone, Debug, Default)]
pub struct Residency {
    /// The time from the start of the restore until all pages were loaded, in nanoseconds; `None`
    /// before.
    pub resident_ns: Option<u64>,
    /// The number of pages that the VM waited for.
    pub served_pages: u64,
    /// The number of pages that were loaded before the VM touched them.
    pub prefetched_pages: u64,
    /// The number of pages that the VM was expected to touch soon, which were loaded first.
    pub expected_pages: u64,
    /// The number of pages that could not be read.
    pub unreadable_pages: u64,
    /// The first of the unreadable pages, each with the reason.
    pub unreadable: Vec<(PageIndex, String)>,
    /// True once each page was loaded or found unreadable.
    pub prefetched: bool,
    /// True once the VM no longer needs this process.
    pub settled: bool,
    /// The reason why the VM is not separated from this process although all pages are loaded;
    /// another attempt follows. `None` if there is no such reason.
    pub held_by: Option<String>,
}

/// The checkpoint that a running VM is put back to.
pub struct RollbackTarget<'a> {
    /// The machine type with aliases resolved (`pc-i440fx-7.2`).
    pub machine_type: &'a str,
    /// The RAM blocks, which the VM and the checkpoint have in common.
    pub layout: &'a RamLayout,
    /// The checkpoint's RAM.
    pub ram: &'a dyn RamSource,
    /// The pages to write, in ascending order.
    pub pages: &'a [PageIndex],
    /// The state of all devices.
    pub device_state: &'a [u8],
}
