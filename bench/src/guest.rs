//! The guests, as benchmarks boot them: one vCPU, the console on standard streams.

use crate::{Error, Options};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The small guest's files.
pub struct Guest {
    dir: PathBuf,
}

/// The real guest's files.
pub struct Real {
    dir: PathBuf,
}

impl Guest {
    /// The guest in `--guest`, or the one that `guests/build small` builds.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let dir = find("small", options.guest.as_deref(), &["vmlinux", "initramfs.cpio.gz"])?;
        Ok(Self { dir })
    }

    /// The same by a path that holds in every directory.
    pub fn absolute(self) -> Result<Self, Error> {
        let dir =
            std::path::absolute(&self.dir).map_err(Error::io("find the guest's directory"))?;
        Ok(Self { dir })
    }

    /// QEMU's command line for it; `append` is for the kernel.
    pub fn command(&self, mem: &str, append: &str) -> Vec<String> {
        command(&self.dir, mem, append)
    }
}

impl Real {
    /// The guest in `--real-guest`, or the one that `guests/build real` builds.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let files = ["vmlinux", "initramfs.cpio.gz", "root.raw"];
        Ok(Self { dir: find("real", options.real_guest.as_deref(), &files)? })
    }

    /// QEMU's command line for it, with the script `job`. What it writes stays in its RAM.
    pub fn command(&self, mem: &str, job: &Path) -> Vec<String> {
        let mut command = command(&self.dir, mem, "kf.ro=1");
        for (id, file) in [("kfroot", self.dir.join("root.raw").as_path()), ("kfjob", job)] {
            command.extend([
                "-drive".into(),
                format!("file={},if=none,id={id},format=raw,readonly=on", file.display()),
                "-device".into(),
                format!("virtio-blk-pci,drive={id}"),
            ]);
        }
        command
    }
}

fn command(dir: &Path, mem: &str, append: &str) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
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

/// The directory of `guest`, which must have `files`.
fn find(guest: &'static str, given: Option<&Path>, files: &[&str]) -> Result<PathBuf, Error> {
    let dir = match given {
        Some(dir) => dir.to_owned(),
        None => build(guest)?,
    };
    match files.iter().map(|file| dir.join(file)).find(|file| !file.is_file()) {
        Some(missing) => {
            Err(Error::NoGuest { guest, problem: format!("no {}", missing.display()) })
        }
        None => Ok(dir),
    }
}

fn build(guest: &'static str) -> Result<PathBuf, Error> {
    let script = Path::new("guests/build");
    if !script.is_file() {
        return Err(Error::NoGuest {
            guest,
            problem: "this is not the project's directory".into(),
        });
    }
    let output = Command::new(script)
        .arg(guest)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(Error::io(format!("run guests/build {guest}")))?;
    if !output.status.success() {
        return Err(Error::NoGuest {
            guest,
            problem: format!("guests/build {guest} ended with {}", output.status),
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    Ok(PathBuf::from(last))
}
