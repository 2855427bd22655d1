//! Rights that a session gives up once it has started QEMU.

use keyframe_confine::{Error, Keep, capabilities_but, no_programs};
use std::path::PathBuf;

fn tell(confined: Result<(), Error>) {
    if let Err(error) = confined {
        let error = keyframe_failure::chain(&error);
        eprintln!("keyframe: warning: goes on with more rights than it needs: {error}");
    }
}

/// Gives up what is for starting QEMU alone. Before there are threads that could do more.
pub fn trace_only() {
    tell(capabilities_but(Keep::Tracing));
}

/// The same of a thread that reads what others may have written, while QEMU is not started yet: it
/// needs files alone.
pub fn files_only() {
    tell(capabilities_but(Keep::Files).and_then(|()| no_programs()));
}

/// Gives up changing files elsewhere than in `folders`; says so where the kernel cannot do that.
pub fn writes_beneath(folders: &[PathBuf]) {
    tell(keyframe_confine::writes_beneath(folders));
}
