//! Guests of other processors than x86, on QEMU's machine `virt`.

use crate::Boot;
use keyframe_testing::{Scope, build_guest, has_program, qemu_11, record_skip};
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

/// Returns a guest for each processor for which there is a QEMU. The others are recorded as
/// skipped parts of the running test.
pub fn virt_guests() -> Vec<VirtGuest> {
    ["aarch64", "riscv64"].into_iter().filter_map(virt_guest).collect()
}

/// Returns the guest of `processor`; `None` if there is no QEMU for it, which is recorded as a
/// skipped part of the running test.
pub fn virt_guest(processor: &'static str) -> Option<VirtGuest> {
    let name = format!("qemu-system-{processor}");
    // QEMU 11 saves what earlier ones leave out of riscv64 (docs/guests.md).
    let newer = qemu_11().map(|qemu| Path::new(&qemu.path).with_file_name(&name));
    let newer = newer.filter(|path| path.is_file()).map(|path| path.display().to_string());
    let installed = (processor != "riscv64" && has_program(&name)).then_some(name);
    let Some(qemu) = newer.or(installed) else {
        let needed = match processor {
            "riscv64" => "QEMU 10.2 or later: KEYFRAME_QEMU11 names none (guests/build qemu11)",
            _ => "qemu-system-aarch64 (Debian package qemu-system-arm)",
        };
        record_skip(Scope::Part, format!("{processor}: no {needed}"));
        return None;
    };
    Some(VirtGuest { processor, qemu, pc: 32 })
}

impl VirtGuest {
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
