//! The workloads: each is repeated until the guest is switched off, and says a line after each
//! pass.
//!
//! ```text
//!   boot ─▶ kf-begin ─ pass ─ kf-pass ─ pass ─ kf-pass ... ─ off
//! ```

use crate::guest::{Guest, Real};
use crate::overhead::compile;
use crate::replay::initrd;
use crate::{Error, Options};
use std::path::Path;

/// Said before the work.
pub const BEGIN: &str = "kf-begin";
/// Said behind each pass of it.
pub const PASS: &str = "kf-pass";

/// The guest's disk to write to, in bytes. Its file has holes.
const DISK_BYTES: u64 = 512 << 20;

/// A workload.
pub struct Kind {
    /// As in keys.
    pub key: &'static str,
    /// For people.
    pub about: &'static str,
    /// The paper's workload for which it stands.
    pub stands_for: &'static str,
    is_small: bool,
    /// One pass, in shell.
    pass: &'static str,
}

/// All of them.
pub const ALL: [Kind; 4] = [
    Kind {
        key: "compile",
        about: "gcc over this project's guest programs, objects on a disk",
        stands_for: "Kernel build",
        is_small: false,
        pass: "for source in *.c; do gcc -std=gnu11 -D_GNU_SOURCE -O2 -c \"$source\"; done; gcc -r -o program.o [!p]*.o; sync",
    },
    Kind {
        key: "bonnie",
        about: "bonnie++ on a disk",
        stands_for: "Bonnie++",
        is_small: false,
        pass: "bonnie++ -q -u root -d /mnt -r 16 -s 32 -n 1 -f >/dev/null 2>&1",
    },
    Kind {
        key: "stream",
        about: "stress-ng's STREAM: copy, scale, add, triad over arrays in RAM",
        stands_for: "STREAM",
        is_small: false,
        pass: "stress-ng --stream 1 --stream-l3-size 4M --stream-ops 20 --quiet >/dev/null 2>&1",
    },
    Kind {
        key: "small",
        about: "processes, pipes and a written disk in the small guest: a look",
        stands_for: "none",
        is_small: true,
        pass: "/kfguest --compile-job $n 0 | md5sum >/dev/null; dd if=/tmp/some of=/dev/vda bs=64k count=4 seek=$((n%64*4)) conv=fsync 2>/dev/null",
    },
];

/// A workload with its guest.
pub struct Workload {
    /// QEMU's command line.
    pub command: Vec<String>,
    /// What is typed once the guest is ready; none where it begins by itself.
    pub typed: Option<String>,
    /// What switches the guest off.
    pub off: &'static str,
}

impl Kind {
    /// With its guest; scripts and the disk's image are made in `dir`.
    pub fn prepare(&self, options: &Options, dir: &Path) -> Result<Workload, Error> {
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

    fn real(&self, options: &Options, dir: &Path, repeated: &str) -> Result<Workload, Error> {
        let path = dir.join("job.sh");
        let sources = if self.key == "compile" { compile::sources() } else { String::new() };
        let before = "mkfs.ext4 -q -F /dev/vdc\nmount /dev/vdc /mnt\ncd /mnt\n[ ! -d /tmp/compile ] || cp /tmp/compile/* .";
        let script = format!("#!/bin/bash\nset -e\n{sources}{before}\necho {BEGIN}\n{repeated}");
        std::fs::write(&path, script).map_err(Error::io(format!("write {}", path.display())))?;
        let command = Real::find(options)?.command("1G", &path);
        Ok(Workload { command, typed: None, off: "poweroff" })
    }
}

fn small(options: &Options, dir: &Path, repeated: &str) -> Result<Workload, Error> {
    let mut command = Guest::find(options)?.command("128M", "kf.work=shell");
    let path = dir.join("initrd.cpio");
    if let Some(word) =
        command.iter().position(|word| word == "-initrd").and_then(|at| command.get_mut(at + 1))
    {
        let before = "mkdir -p /tmp/kf\ndd if=/dev/urandom of=/tmp/some bs=64k count=4 2>/dev/null";
        let script = format!(
            "{before}\necho {BEGIN}\n{{ {repeated}}} </dev/null &\nread x\nbusybox poweroff -f\n"
        );
        initrd::write(Path::new(word), &script, &path)?;
        *word = path.display().to_string();
    }
    Ok(Workload { command, typed: Some(format!("sh /{}", initrd::NAME)), off: "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_says_nothing_of_its_own() {
        for kind in &ALL {
            assert!(!kind.pass.contains(PASS) && !kind.pass.is_empty(), "{}", kind.key);
        }
    }
}
