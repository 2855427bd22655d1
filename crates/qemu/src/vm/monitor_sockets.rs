//! The monitors that a launch adds to QEMU: their sockets, and the configuration file that names
//! them.

use crate::{Error, Result};
use keyframe_qemu_cmdline::CommandLineError;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The longest path of a unix socket, without its terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A QMP monitor over the chardev with `properties`, in the form that `-readconfig` reads.
pub(crate) fn monitor_config(id: &str, properties: &[(&str, &str)]) -> String {
    let mut lines = vec![format!("[chardev \"{id}\"]"), "  backend = \"socket\"".into()];
    lines.extend(properties.iter().map(|(key, value)| format!("  {key} = \"{value}\"")));
    lines.extend([
        format!("[mon \"{id}\"]"),
        "  mode = \"control\"".into(),
        format!("  chardev = \"{id}\"\n"),
    ]);
    lines.join("\n")
}

/// Ids and sockets of the two monitors, in a directory of the engine's own, after old sockets there
/// were removed.
pub(super) fn prepare_sockets(run_dir: &Path) -> Result<[(&'static str, PathBuf); 2]> {
    let run_dir = std::path::absolute(run_dir)
        .map_err(Error::io(format!("resolve {}", run_dir.display())))?;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&run_dir)
        .map_err(Error::io(format!("make the run directory {}", run_dir.display())))?;
    let monitors = [
        ("keyframe-qmp", run_dir.join("qmp.sock")),
        ("keyframe-watchdog", run_dir.join("watchdog.sock")),
    ];
    for (_, path) in &monitors {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove the old socket {}", path.display()))(e));
            }
            _ => {}
        }
    }
    Ok(monitors)
}

/// QMP monitors over these sockets, each with the monitor's id, in the form that `-readconfig`
/// reads.
///
/// Error: a path cannot be that of a socket.
pub(crate) fn socket_config(monitors: &[(&str, PathBuf)]) -> Result<String> {
    let mut config = String::new();
    for (id, path) in monitors {
        let text =
            path.to_str().filter(|p| !p.contains(['"', '\n']) && p.len() <= SOCKET_PATH_BYTES_MAX);
        let Some(text) = text else {
            return Err(CommandLineError::Argument {
                argument: path.display().to_string(),
                reason: format!(
                    "no socket can be made there: paths of sockets are UTF-8, at most {SOCKET_PATH_BYTES_MAX} bytes long, and have no quotation mark"
                ),
                fix: "choose another run directory".into(),
            }
            .into());
        };
        config += &monitor_config(id, &[("path", text), ("server", "on"), ("wait", "off")]);
    }
    Ok(config)
}
