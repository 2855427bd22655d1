//! Guests of other processors than x86, on QEMU's machine `virt`.

use crate::Boot;
use keyframe_testing::{Scope, build_guest, has_program, qemu_10, qemu_11, record_skip};
use std::path::Path;

/// A processor, and a QEMU that emulates it.
#[derive(Clone, Debug)]
pub struct VirtGuest {
    /// The processor, as QEMU names it.
    pub processor: &'static str,
    /// The QEMU's program.
    pub qemu: String,
    /// The number of the program counter among the registers that QEMU's gdbstub tells, after the
    /// general ones.
    pub pc: usize,
}

/// Returns the guests of all processors, on each QEMU that is there. A processor without a QEMU is
/// recorded as a skipped part of the running test.
pub fn virt_guests() -> Vec<VirtGuest> {
    let others = [qemu_10(), qemu_11()].into_iter().flatten();
    let others = others.filter_map(|qemu| VirtGuest::beside(&qemu.path, "aarch64"));
    virt_guest("aarch64").into_iter().chain(others).chain(virt_guest("riscv64")).collect()
}

/// Returns the guest of `processor` on the distribution's QEMU, or for riscv64 on QEMU 11, because
/// earlier ones leave out the alarms of its timers. `None` if there is none, which is recorded as a
/// skipped part of the running test.
pub fn virt_guest(processor: &'static str) -> Option<VirtGuest> {
    let (found, missing) = if processor == "riscv64" {
        let found = qemu_11().and_then(|qemu| VirtGuest::beside(&qemu.path, processor));
        (found, "QEMU 10.2 or later: KEYFRAME_QEMU11 names none (guests/build qemu11)".to_owned())
    } else {
        let name = format!("qemu-system-{processor}");
        let found = has_program(&name).then(|| VirtGuest::new(processor, name.clone()));
        (found, format!("{name} (Debian package qemu-system-arm)"))
    };
    if found.is_none() {
        record_skip(Scope::Part, format!("{processor}: no {missing}"));
    }
    found
}

impl VirtGuest {
    /// The guest of `processor` on the program `qemu`.
    pub fn new(processor: &'static str, qemu: String) -> Self {
        Self { processor, qemu, pc: 32 }
    }

    /// The guest of `processor` on the QEMU that lies beside the one at `path`, if there is one.
    fn beside(path: &str, processor: &'static str) -> Option<Self> {
        let path = Path::new(path).with_file_name(format!("qemu-system-{processor}"));
        path.is_file().then(|| Self::new(processor, path.display().to_string()))
    }

    /// The payload, with 64 MiB, which writes `dirty` of its 1024 pages in each pass.
    pub fn payload(&self, dirty: u64) -> Boot {
        let dir = build_guest("payload-virt");
        let file = dir.join(format!("payload-{}.elf", self.processor)).display().to_string();
        // guests/payload-virt/run.sh has the same.
        let (option, parameters) = match self.processor {
            "aarch64" => ("-kernel", 0x401f_f000_u64),
            _ => ("-bios", 0x801f_f000),
        };
        let loader = format!("loader,addr={parameters:#x},data={},data-len=8", dirty << 32);
        let software = [option, &file, "-device", &loader].map(str::to_owned);
        self.boot(64, software.to_vec())
    }

    /// Debian's kernel for arm64 with the workload `work` (with its parameters).
    pub fn linux(&self, work: &str) -> Boot {
        let dir = build_guest("small-arm64");
        let file = |name: &str| dir.join(name).display().to_string();
        let append = format!("console=ttyAMA0 quiet panic=-1 kf.work={work}");
        let (kernel, initrd) = (file("vmlinuz"), file("initramfs.cpio.gz"));
        let software = ["-kernel", &kernel, "-initrd", &initrd, "-append", &append];
        self.boot(192, software.map(str::to_owned).to_vec())
    }

    fn boot(&self, mem_mib: u64, mut software: Vec<String>) -> Boot {
        if self.processor == "aarch64" {
            software.extend(["-cpu", "cortex-a57"].map(str::to_owned));
        }
        let machine = "virt".to_owned();
        let qemu = self.qemu.clone();
        Boot { qemu, machine, mem_mib, software: Some(software), ..Boot::new("") }
    }
}
