//! The small guest, as benchmarks boot it.

use crate::{Error, Options};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The guest's files.
pub struct Guest {
    dir: PathBuf,
}

impl Guest {
    /// The guest in `--guest`, or the one that `guests/build small` builds.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let dir = match &options.guest {
            Some(dir) => dir.clone(),
            None => build()?,
        };
        for file in ["vmlinux", "initramfs.cpio.gz"] {
            if !dir.join(file).is_file() {
                return Err(Error::NoGuest {
                    guest: "small",
                    problem: format!("no {}", dir.join(file).display()),
                });
            }
        }
        Ok(Self { dir })
    }

    /// QEMU's command line for it: one vCPU, the console on standard streams, `append` for the kernel.
    pub fn command(&self, mem: &str, append: &str) -> Vec<String> {
        let file = |name: &str| self.dir.join(name).display().to_string();
        [
            "qemu-system-x86_64",
            "-machine",
            "pc",
            "-m",
            mem,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-serial",
            "stdio",
            "-kernel",
            &file("vmlinux"),
            "-initrd",
            &file("initramfs.cpio.gz"),
            "-append",
            &format!("console=ttyS0 quiet panic=-1 tsc=unstable {append}"),
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

fn build() -> Result<PathBuf, Error> {
    let script = Path::new("guests/build");
    if !script.is_file() {
        return Err(Error::NoGuest { guest: "small", problem: "this is not the project's directory".into() });
    }
    let output = Command::new(script)
        .arg("small")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::io("run guests/build small"))?;
    if !output.status.success() {
        return Err(Error::NoGuest {
            guest: "small",
            problem: format!("guests/build small ended with {}", output.status),
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    Ok(PathBuf::from(last))
}
