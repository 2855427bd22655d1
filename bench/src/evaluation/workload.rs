//! The workloads. The guest repeats a workload until it is switched off, and prints a line after
//! each pass.
//!
//! ```text
//!   boot ─▶ kf-begin ─ pass ─ kf-pass ─ pass ─ kf-pass ... ─ off
//! ```

use crate::guest_files::{RealGuest, SmallGuest};
use crate::overhead::compile_job;
use crate::script_initrd;
use crate::{Error, Options};
use std::path::Path;

/// The line that the guest prints before the work.
pub const BEGIN: &str = "kf-begin";
/// The line that the guest prints after each pass.
pub const PASS: &str = "kf-pass";

/// The size of the disk to which the guest writes. Its file is sparse.
const DISK_BYTES: u64 = 512 << 20;

/// A workload of the evaluation.
#[derive(Debug)]
pub struct Workload {
    /// Its name in keys.
    pub key: &'static str,
    /// Its description for a person.
    pub about: &'static str,
    /// The workload of the paper that it stands for.
    pub stands_for: &'static str,
    /// It runs in the small guest, not in the real one.
    is_small: bool,
    /// The shell commands of one pass.
    pass: &'static str,
}

/// All workloads.
pub static ALL: [Workload; 4] = [
    Workload {
        key: "compile",
        about: "gcc over this project's guest programs, objects on a disk",
        stands_for: "Kernel build",
        is_small: false,
        pass: "for source in *.c; do gcc -std=gnu11 -D_GNU_SOURCE -O2 -c \"$source\"; done; gcc -r -o program.o [!p]*.o; sync",
    },
    Workload {
        key: "bonnie",
        about: "bonnie++ on a disk",
        stands_for: "Bonnie++",
        is_small: false,
        pass: "bonnie++ -q -u root -d /mnt -r 16 -s 32 -n 1 -f >/dev/null 2>&1",
    },
    Workload {
        key: "stream",
        about: "stress-ng's STREAM: copy, scale, add, triad over arrays in RAM",
        stands_for: "STREAM",
        is_small: false,
        pass: "stress-ng --stream 1 --stream-l3-size 4M --stream-ops 20 --quiet >/dev/null 2>&1",
    },
    Workload {
        key: "small",
        about: "processes, pipes and a written disk in the small guest",
        stands_for: "none",
        is_small: true,
        pass: "/kfguest --compile-job $n 0 | md5sum >/dev/null; dd if=/tmp/some of=/dev/vda bs=64k count=4 seek=$((n%64*4)) conv=fsync 2>/dev/null",
    },
];

/// A guest that is ready to run a workload.
pub struct PreparedGuest {
    /// QEMU's command line.
    pub command: Vec<String>,
    /// The command to type once the guest is ready; `None` if the work begins by itself.
    pub start_command: Option<String>,
    /// The command that switches the guest off.
    pub off_command: &'static str,
}

impl Workload {
    /// Returns the workload of this name.
    pub fn named(key: &str) -> Option<&'static Self> {
        ALL.iter().find(|workload| workload.key == key)
    }

    /// Returns its place among all workloads.
    pub fn place(&self) -> Option<usize> {
        ALL.iter().position(|workload| workload.key == self.key)
    }

    /// Prepares the guest. Writes its scripts and the image of its disk into `dir`.
    pub fn prepare(&self, options: &Options, dir: &Path) -> Result<PreparedGuest, Error> {
        let repeated = format!("n=0\nwhile :; do {}; n=$((n+1)); echo {PASS}; done\n", self.pass);
        let mut made = if self.is_small {
            small(options, dir, &repeated)
        } else {
            self.real(options, dir, &repeated)
        }?;
        let disk = dir.join("disk.raw");
        std::fs::File::create(&disk)
            .and_then(|file| file.set_len(DISK_BYTES))
            .map_err(Error::io(format!("make {}", disk.display())))?;
        made.command.extend([
            "-drive".into(),
            format!("file={},if=none,id=kfdata,format=raw", disk.display()),
            "-device".into(),
            "virtio-blk-pci,drive=kfdata".into(),
        ]);
        if let Some(qemu) = &options.qemu {
            made.command[0] = qemu.display().to_string();
        }
        Ok(made)
    }

    fn real(&self, options: &Options, dir: &Path, repeated: &str) -> Result<PreparedGuest, Error> {
        let path = dir.join("job.sh");
        let sources = if self.key == "compile" { compile_job::sources() } else { String::new() };
        let before = "mkfs.ext4 -q -F /dev/vdc\nmount /dev/vdc /mnt\ncd /mnt\n[ ! -d /tmp/compile ] || cp /tmp/compile/* .";
        let script = format!("#!/bin/bash\nset -e\n{sources}{before}\necho {BEGIN}\n{repeated}");
        std::fs::write(&path, script).map_err(Error::io(format!("write {}", path.display())))?;
        let command = RealGuest::find(options)?.command("1G", &path);
        Ok(PreparedGuest { command, start_command: None, off_command: "poweroff" })
    }
}

fn small(options: &Options, dir: &Path, repeated: &str) -> Result<PreparedGuest, Error> {
    let mut command = SmallGuest::find(options)?.command("128M", "kf.work=shell");
    let path = dir.join("initrd.cpio");
    if let Some(word) =
        command.iter().position(|word| word == "-initrd").and_then(|at| command.get_mut(at + 1))
    {
        let before = "mkdir -p /tmp/kf\ndd if=/dev/urandom of=/tmp/some bs=64k count=4 2>/dev/null";
        let script = format!(
            "{before}\necho {BEGIN}\n{{ {repeated}}} </dev/null &\nread x\nbusybox poweroff -f\n"
        );
        script_initrd::write(Path::new(word), &script, &path)?;
        *word = path.display().to_string();
    }
    let start_command = Some(format!("sh /{}", script_initrd::NAME));
    Ok(PreparedGuest { command, start_command, off_command: "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pass_prints_the_line_of_a_pass() {
        for workload in &ALL {
            let (pass, key) = (workload.pass, workload.key);
            assert!(!pass.contains(PASS) && !pass.is_empty(), "{key}");
        }
    }
}
