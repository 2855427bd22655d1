//! The files of the guests, and QEMU's command lines for them: one vCPU, the console on the standard
//! streams.

use crate::{Error, Options};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The files of the small guest.
pub struct SmallGuest {
    dir: PathBuf,
}

/// The files of the real guest, which has the programs of a distribution.
pub struct RealGuest {
    dir: PathBuf,
}

/// Firecracker, and the payload that it boots.
pub struct FirecrackerFiles {
    dir: PathBuf,
}

/// The firmware payload, for accelerators on which Linux takes hours to boot.
pub struct PayloadGuest {
    dir: PathBuf,
}

impl FirecrackerFiles {
    /// Finds those that `--firecracker-guest` names, or builds them with `guests/build firecracker`.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let files = ["bin/firecracker", "payload.elf"];
        let dir = find("firecracker", options.firecracker_guest.as_deref(), &files)?;
        // Firecracker runs in another directory.
        let dir = std::path::absolute(dir).map_err(Error::io("find Firecracker"))?;
        Ok(Self { dir })
    }

    /// Returns the path of the VMM.
    pub fn binary(&self) -> PathBuf {
        self.dir.join("bin/firecracker")
    }

    /// Returns the path of the payload.
    pub fn payload(&self) -> PathBuf {
        self.dir.join("payload.elf")
    }
}

impl PayloadGuest {
    /// Builds it with `guests/build payload`.
    pub fn find() -> Result<Self, Error> {
        Ok(Self { dir: find("payload", None, &["payload.bin"])? })
    }

    /// Returns QEMU's command line under KVM, with `mem` of RAM. The guest writes `dirty` of its 4096
    /// pages in each pass.
    pub fn command(&self, mem: &str, dirty: u64) -> Vec<String> {
        bare_command(
            mem,
            &[
                "-accel",
                "kvm",
                "-bios",
                &self.dir.join("payload.bin").display().to_string(),
                "-fw_cfg",
                "name=opt/keyframe/pages,string=4096",
                "-fw_cfg",
                &format!("name=opt/keyframe/dirty,string={dirty}"),
            ],
        )
    }
}

impl SmallGuest {
    /// Finds the guest that `--guest` names, or builds it with `guests/build small`.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let dir = find("small", options.guest.as_deref(), &["vmlinux", "initramfs.cpio.gz"])?;
        Ok(Self { dir })
    }

    /// Makes its path absolute, for processes with another working directory.
    pub fn absolute(self) -> Result<Self, Error> {
        let dir =
            std::path::absolute(&self.dir).map_err(Error::io("find the guest's directory"))?;
        Ok(Self { dir })
    }

    /// Returns QEMU's command line, with `mem` of RAM and the kernel parameters `append`.
    pub fn command(&self, mem: &str, append: &str) -> Vec<String> {
        command(&self.dir, mem, append)
    }

    /// Returns the command line of [`Self::command`] with the compressed kernel, as distributions
    /// boot it: QEMU writes an uncompressed one into RAM at each reset.
    pub fn compressed_kernel_command(&self, mem: &str, append: &str) -> Vec<String> {
        compressed_kernel(&self.dir, command(&self.dir, mem, append))
    }
}

impl RealGuest {
    /// Finds the guest that `--real-guest` names, or builds it with `guests/build real`.
    pub fn find(options: &Options) -> Result<Self, Error> {
        let files = ["vmlinux", "initramfs.cpio.gz", "root.raw"];
        Ok(Self { dir: find("real", options.real_guest.as_deref(), &files)? })
    }

    /// Returns QEMU's command line, with `mem` of RAM. The guest runs the script `job` and keeps its
    /// writes in RAM.
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

    /// Returns the command line of [`Self::command`] with the compressed kernel, as distributions
    /// boot it.
    pub fn compressed_kernel_command(&self, mem: &str, job: &Path) -> Vec<String> {
        compressed_kernel(&self.dir, self.command(mem, job))
    }
}

/// Returns `command` with the compressed kernel of the guest in `dir`.
fn compressed_kernel(dir: &Path, command: Vec<String>) -> Vec<String> {
    let whole = dir.join("vmlinux").display().to_string();
    let compressed = dir.join("vmlinuz").display().to_string();
    let words = command.into_iter();
    words.map(|word| if word == whole { compressed.clone() } else { word }).collect()
}

fn command(dir: &Path, mem: &str, append: &str) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    bare_command(
        mem,
        &[
            "-kernel",
            &file("vmlinux"),
            "-initrd",
            &file("initramfs.cpio.gz"),
            "-append",
            &format!("console=ttyS0 quiet panic=-1 tsc=unstable {append}"),
        ],
    )
}

/// Returns QEMU's command line of a machine with `mem` of RAM and a serial port, with `more` words.
fn bare_command(mem: &str, more: &[&str]) -> Vec<String> {
    let machine = ["qemu-system-x86_64", "-machine", "pc", "-m", mem];
    let devices = ["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"];
    [&machine[..], &devices, more].concat().into_iter().map(str::to_owned).collect()
}

/// Returns the directory of `guest`. Fails if one of `files` is missing in it.
fn find(guest: &'static str, dir: Option<&Path>, files: &[&str]) -> Result<PathBuf, Error> {
    let dir = match dir {
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
            problem: "the current directory is not the project's".into(),
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
