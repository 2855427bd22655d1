//! What Firecracker's VMs are able to do.

use keyframe_machine::VmmKind;
use keyframe_vmm::{Ability, Capabilities};

/// Returns the abilities of Firecracker's VMs.
pub fn capabilities() -> Capabilities {
    let only_qemu = "run the guest under QEMU";
    Capabilities::all(VmmKind::Firecracker)
        .without(
            Ability::Record,
            "Firecracker does not log the inputs of a guest, nor count its instructions",
            only_qemu,
        )
        .without(Ability::Replay, "Firecracker cannot repeat a guest's execution", only_qemu)
        .without(
            Ability::Groups,
            "Keyframe does not hold the packets between Firecracker's VMs",
            only_qemu,
        )
        .without(
            Ability::Protect,
            "Keyframe does not hold the packets that Firecracker sends until a standby has the state \
             behind them",
            only_qemu,
        )
        .without(
            Ability::ServedDisks,
            "Firecracker opens the files of its drives itself",
            "leave out --disk",
        )
        .without(
            Ability::DirtyBitmaps,
            "Firecracker does not tell which blocks its guest has written",
            "leave out --disk",
        )
        .without(
            Ability::LeftOutDisks,
            "a restored VM would write to the file of the first one",
            "leave out the option: the files of all drives are captured",
        )
        .without(
            Ability::AcceleratorChange,
            "Firecracker runs guests under KVM alone",
            "leave out --accel",
        )
        .without(
            Ability::Fork,
            "its seccomp filter would end it for the system call that forks it",
            "choose another --strategy, for example precopy",
        )
        .without(
            Ability::InstructionCount,
            "the counters are attached through QEMU's monitor",
            "leave out --count-instructions",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_ability_has_a_reason_and_a_fix() {
        let all = capabilities();
        for ability in Ability::ALL {
            if let Err(missing) = all.require(ability) {
                assert!(!missing.reason.is_empty() && !missing.fix.is_empty(), "{ability:?}");
            }
        }
        assert!(all.require(Ability::Attach).is_ok() && all.require(Ability::Clones).is_ok());
        assert!(all.require(Ability::Record).is_err());
    }
}
