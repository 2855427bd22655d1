//! What is loaded before a QEMU that replays, and leaves out its needless wake-ups (`wakeups/`).
//!
//! By `LD_PRELOAD`, from a file in memory that it inherits, so that nothing has to be put on a disk
//! and taken away again. A QEMU without a dynamic linker ignores it; one whose linker cannot map it
//! says so and goes on without.

use crate::Result;
use crate::vm::{inherited_path, memfd};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::Command;

const PRELOAD: &str = "LD_PRELOAD";

/// Prepares the start of a QEMU by `command`, which is to inherit the descriptor. What the user has
/// loaded before QEMU still is.
pub(crate) fn prepare(command: &mut Command) -> Result<OwnedFd> {
    let library = memfd("wakeups", keyframe_carried::WAKEUPS)?;
    let mut all = OsString::from(inherited_path(&library));
    if let Some(users) = std::env::var_os(PRELOAD).filter(|users| !users.is_empty()) {
        all.push(":");
        all.push(users);
    }
    command.env(PRELOAD, all);
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn;
    use std::process::Stdio;

    #[test]
    fn a_program_has_it_loaded_and_works() {
        let mut command = Command::new("cat");
        command.arg("/proc/self/maps").stdout(Stdio::piped()).stderr(Stdio::piped());
        let library = prepare(&mut command).unwrap();
        let child = spawn::start(&mut command, &[&library]).unwrap();
        let output = child.wait_with_output().unwrap();
        let (maps, said) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        let code = maps
            .lines()
            .filter(|line| line.contains(" r-xp ") && line.contains("/memfd:keyframe-wakeups"));
        assert_eq!((code.count(), said.as_str(), output.status.success()), (1, "", true), "{maps}");
    }
}
