//! The abilities of a VMM, and the reason and the fix for each one that it lacks.

use keyframe_machine::VmmKind;
use std::collections::BTreeMap;
use std::fmt;

/// Something that Keyframe can do with a VM if its VMM supports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ability {
    /// Take checkpoints of a VM that another program started.
    Attach,
    /// Take checkpoints of several VMs at one instant.
    Groups,
    /// Record the VM's inputs so that its execution can be replayed.
    Record,
    /// Replay a recording.
    Replay,
    /// Replicate the VM to a standby that takes over when the host fails.
    Protect,
    /// Serve the VM's writable disks from Keyframe's own process.
    ServedDisks,
    /// Put the running VM back to a checkpoint, in its own process or in one that takes its place.
    Rollback,
    /// Let a restored VM run before all of its RAM is loaded.
    LazyRestore,
    /// Start several VMs from one checkpoint that share their unwritten RAM.
    Clones,
    /// Restore a checkpoint under another accelerator than it was taken under.
    AcceleratorChange,
    /// Capture the disks that the VM can write to.
    CapturedDisks,
    /// Capture disks by dirty bitmaps.
    DirtyBitmaps,
    /// Leave disks that the VM can write to out of its checkpoints.
    LeftOutDisks,
    /// Copy RAM from a fork of the VMM.
    Fork,
    /// Count the guest's instructions by the host's processor.
    InstructionCount,
    /// Restore a checkpoint with other tap devices than its VM had.
    ChosenTaps,
}

impl Ability {
    /// All abilities, in the order of their declaration.
    pub const ALL: [Self; 16] = [
        Self::Attach,
        Self::Groups,
        Self::Record,
        Self::Replay,
        Self::Protect,
        Self::ServedDisks,
        Self::Rollback,
        Self::LazyRestore,
        Self::Clones,
        Self::AcceleratorChange,
        Self::CapturedDisks,
        Self::DirtyBitmaps,
        Self::LeftOutDisks,
        Self::Fork,
        Self::InstructionCount,
        Self::ChosenTaps,
    ];
}

impl fmt::Display for Ability {
    /// Writes the ability as the end of a sentence that begins with "X cannot".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Attach => "be attached to while it runs",
            Self::Groups => "be checkpointed as part of a group",
            Self::Record => "be recorded",
            Self::Replay => "be replayed",
            Self::Protect => "be protected by a standby",
            Self::ServedDisks => "use disks that Keyframe serves",
            Self::Rollback => "be rolled back",
            Self::LazyRestore => "run before its RAM is loaded",
            Self::Clones => "be cloned with shared RAM",
            Self::AcceleratorChange => "change its accelerator",
            Self::CapturedDisks => "have its disks captured",
            Self::DirtyBitmaps => "have its disks captured by dirty bitmaps",
            Self::LeftOutDisks => "have disks that its checkpoints leave out",
            Self::Fork => "be captured by a fork",
            Self::InstructionCount => "have its instructions counted",
            Self::ChosenTaps => "be given other tap devices by --tap",
        })
    }
}

/// Whether a VMM has an ability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// The VMM has the ability.
    Supported,
    /// The VMM does not have the ability.
    Unsupported {
        /// The reason why not.
        reason: String,
        /// What the user can do instead.
        fix: String,
    },
}

/// An ability that a VM needs and its VMM lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a VM of {vmm} cannot {ability}: {reason}")]
pub struct Unsupported {
    /// The VMM.
    pub vmm: VmmKind,
    /// The missing ability.
    pub ability: Ability,
    /// The reason why the VMM lacks it.
    pub reason: String,
    /// What the user can do instead.
    pub fix: String,
}

/// The abilities of a VMM, or of one VM if some depend on how the VM was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    vmm: VmmKind,
    /// Reason and fix of each missing ability.
    missing: BTreeMap<Ability, (String, String)>,
}

impl Capabilities {
    /// Returns the capabilities of a VMM that has all abilities.
    pub fn all(vmm: VmmKind) -> Self {
        Self { vmm, missing: BTreeMap::new() }
    }

    /// Returns the same capabilities without `ability`: `reason` says why the VMM lacks it, and
    /// `fix` what the user can do instead.
    #[must_use]
    pub fn without(
        mut self,
        ability: Ability,
        reason: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        self.missing.insert(ability, (reason.into(), fix.into()));
        self
    }

    /// Returns the kind of the VMM.
    pub fn vmm(&self) -> VmmKind {
        self.vmm
    }

    /// Returns whether the VMM has `ability`, and if not, the reason and the fix.
    pub fn support(&self, ability: Ability) -> Support {
        match self.missing.get(&ability) {
            Some((reason, fix)) => {
                Support::Unsupported { reason: reason.clone(), fix: fix.clone() }
            }
            None => Support::Supported,
        }
    }

    /// Checks that the VMM has `ability`. Error: [`Unsupported`] with the reason and the fix if it
    /// is missing.
    pub fn require(&self, ability: Ability) -> Result<(), Unsupported> {
        match self.support(ability) {
            Support::Supported => Ok(()),
            Support::Unsupported { reason, fix } => {
                Err(Unsupported { vmm: self.vmm, ability, reason, fix })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_ability_is_refused_with_reason_and_fix() {
        let qemu = Capabilities::all(VmmKind::Qemu);
        assert!(Ability::ALL.iter().all(|ability| qemu.require(*ability).is_ok()));
        let without = Capabilities::all(VmmKind::Firecracker).without(
            Ability::Record,
            "it does not count instructions",
            "run the guest under QEMU",
        );
        let refusal = without.require(Ability::Record).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "a VM of Firecracker cannot be recorded: it does not count instructions"
        );
        assert_eq!(refusal.fix, "run the guest under QEMU");
        assert_eq!(without.support(Ability::Groups), Support::Supported);
    }
}
