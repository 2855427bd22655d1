//! What is said and refused before a restore if files that the VM only reads have changed.

use crate::failure::Failure;
use keyframe_store::Meta;
use keyframe_vm_disks::{Error, read_files};

/// Refuses a checkpoint whose read-only disks or CDs have changed, unless `as_now` is true, and tells
/// about other changed files.
pub fn check(meta: &Meta, as_now: bool) -> Result<(), Failure> {
    let members = meta.members.iter().map(|member| &member.machine);
    for machine in members.chain([&meta.machine]) {
        for changed in read_files::changed(machine.read_files.as_deref().unwrap_or_default()) {
            if !changed.file.is_medium {
                eprintln!(
                    "keyframe: note: {changed}; the VM goes on from its RAM, and a reset of the \
                     guest uses the file as it is now"
                );
            } else if as_now {
                eprintln!("keyframe: warning: {changed}; the guest reads it as it is now");
            } else {
                return Err(Error::MediumChanged(Box::new(changed)).into());
            }
        }
    }
    Ok(())
}
