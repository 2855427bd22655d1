//! Preloads the library `eventfd-coalesce/` into a replaying QEMU, which skips needless wake-ups.
//!
//! `LD_PRELOAD` names a file in memory that QEMU inherits, so no file has to be written and
//! removed. A QEMU without a dynamic linker ignores it. A linker that cannot map it prints a
//! message and continues.

use crate::Result;
use crate::vm::{inherited_path, memfd};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::Command;

const PRELOAD: &str = "LD_PRELOAD";

/// Has the QEMU that `command` starts load the library, before the libraries that the user
/// preloads. Returns the descriptor that QEMU must inherit.
pub(crate) fn prepare(command: &mut Command) -> Result<OwnedFd> {
    let library = memfd("eventfd-coalesce", keyframe_embedded_plugins::EVENTFD_COALESCE)?;
    let mut libraries = OsString::from(inherited_path(&library));
    if let Some(users) = std::env::var_os(PRELOAD).filter(|users| !users.is_empty()) {
        libraries.push(":");
        libraries.push(users);
    }
    command.env(PRELOAD, libraries);
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spawn;
    use std::process::Stdio;

    #[test]
    fn a_program_loads_the_library_and_works() {
        let mut command = Command::new("cat");
        command.arg("/proc/self/maps").stdout(Stdio::piped()).stderr(Stdio::piped());
        let library = prepare(&mut command).unwrap();
        let child = spawn::start(&mut command, &[&library]).unwrap();
        let output = child.wait_with_output().unwrap();
        let (maps, said) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        let code = maps.lines().filter(|line| {
            line.contains(" r-xp ") && line.contains("/memfd:keyframe-eventfd-coalesce")
        });
        assert_eq!((code.count(), said.as_str(), output.status.success()), (1, "", true), "{maps}");
    }
}
