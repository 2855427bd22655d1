//! The guest's instructions at each checkpoint of a VM under KVM, counted by the host's processor
//! (`keyframe_kernel::guest_instructions`).
//!
//! A recorded VM needs none of this: QEMU counts its instructions exactly.

use crate::error::{Error, Result};
use crate::recording::Position;
use keyframe_kernel::guest_instructions::GuestInstructions;
use keyframe_qemu::Vm;
use std::path::Path;

/// The reason why the instructions of a guest cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CountObstacle {
    /// QEMU emulates the guest's processor.
    #[error("QEMU emulates its processor (TCG)")]
    Emulated,
    /// QEMU's thread ids are those of another PID namespace.
    #[error("QEMU runs in a container with process ids of its own")]
    OtherNamespace,
    /// The VM is a member of a group.
    #[error("it is a member of a group")]
    Group,
}

impl CountObstacle {
    /// Returns what the user can do.
    pub fn fix(self) -> &'static str {
        match self {
            Self::Emulated => {
                "leave out --count-instructions, start QEMU with -accel kvm, or record the VM \
                 (keyframe record), which counts exactly"
            }
            Self::OtherNamespace => {
                "leave out --count-instructions, or run keyframe in that container"
            }
            Self::Group => "leave out --count-instructions, or run each VM by itself",
        }
    }
}

/// Virtual CPUs were plugged or unplugged while the instructions were counted.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("virtual CPUs were plugged or unplugged, and what these executed is not known")]
pub struct CpusChanged;

/// The counters of one VM.
pub struct InstructionCount {
    counters: GuestInstructions,
    /// The threads of the virtual CPUs, in rising order.
    threads: Vec<u32>,
    /// Receives the count of the next checkpoint.
    position: Option<Position>,
}

impl InstructionCount {
    /// Begins to count the instructions of the guest of `vm`. Errors: [`Error::NotCounted`] if QEMU
    /// emulates the guest's processor, or if its threads are not known on this host;
    /// [`Error::Kernel`] if the host's processor has no counter, or if this user may not use it;
    /// [`Error::Qemu`] if QEMU does not answer.
    pub fn begin(vm: &mut Vm) -> Result<Self> {
        if !vm.has_hardware_cpus()? {
            return Err(Error::NotCounted(CountObstacle::Emulated));
        }
        let (pid, threads) = (vm.pid(), vm.qmp().cpu_threads()?);
        let is_known = |thread: &u32| Path::new(&format!("/proc/{pid}/task/{thread}")).exists();
        if !threads.iter().all(is_known) {
            return Err(Error::NotCounted(CountObstacle::OtherNamespace));
        }
        GuestInstructions::probe()?;
        let counters = GuestInstructions::count(&threads)?;
        Ok(Self { counters, threads, position: None })
    }

    /// Returns whether the virtual CPUs with these threads, in rising order, are those that are
    /// counted.
    pub fn counts(&self, threads: &[u32]) -> bool {
        self.threads == threads
    }

    /// Returns a place that the next pause fills with the count.
    pub fn mark(&mut self) -> Position {
        let position = Position::default();
        self.position = Some(Position::clone(&position));
        position
    }

    /// Fills the place of the checkpoint whose pause has begun. Error: the count is lost.
    pub fn note(&mut self) -> keyframe_kernel::Result<()> {
        if let Some(position) = self.position.take() {
            let _ = position.set(self.counters.read()?);
        }
        Ok(())
    }
}
