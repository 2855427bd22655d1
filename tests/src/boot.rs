//! The QEMU command lines that tests boot.

use keyframe_testing::{build_guest, small_guest};
use std::path::PathBuf;
use std::process::Command;

/// Kernel parameters of a microvm; guests/run-lib.sh has the same, with the reasons.
fn microvm_parameters() -> String {
    let measured =
        Command::new(small_guest().join("tsc-khz")).output().expect("run the guest's tsc-khz");
    let khz: u64 =
        String::from_utf8_lossy(&measured.stdout).trim().parse().expect("a number of kHz");
    format!("reboot=t tsc_early_khz={khz} lpj={}", khz * 4)
}

/// The firmware payload's image, in `KEYFRAME_PAYLOAD` or the directory that `guests/build payload`
/// makes.
fn payload_image() -> PathBuf {
    let dir =
        std::env::var_os("KEYFRAME_PAYLOAD").map_or_else(|| build_guest("payload"), PathBuf::from);
    dir.join("payload.bin")
}

/// A guest to boot: its machine, its workload and QEMU's options.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The QEMU binary.
    pub qemu: String,
    /// `pc`, `q35`, `microvm`.
    pub machine: String,
    /// RAM in MiB.
    pub mem_mib: u64,
    /// vCPUs.
    pub cpus: u32,
    /// Kernel parameters beyond the console.
    pub append: String,
    /// The accelerator of a guest that boots the firmware payload; `None` for one with a kernel.
    pub payload_under: Option<&'static str>,
    /// The options that load the software of a guest of another processor; `None` for x86.
    pub software: Option<Vec<String>>,
    /// QEMU's `-serial`: the console.
    pub serial: String,
    /// Further QEMU arguments.
    pub extra: Vec<String>,
}

impl Boot {
    /// A `pc` with 128 MiB, one vCPU and workload `work` (with its parameters).
    pub fn new(work: &str) -> Self {
        Self {
            qemu: "qemu-system-x86_64".into(),
            machine: "pc".into(),
            mem_mib: 128,
            cpus: 1,
            append: format!("kf.work={work}"),
            payload_under: None,
            software: None,
            serial: "stdio".into(),
            extra: Vec::new(),
        }
    }

    /// A `pc` with 64 MiB that boots the firmware payload under `accelerator`. In each pass the
    /// payload writes `dirty` of its 1024 pages.
    pub fn payload(accelerator: &'static str, dirty: u64) -> Self {
        let parameter = format!("name=opt/keyframe/dirty,string={dirty}");
        let payload = Self { mem_mib: 64, payload_under: Some(accelerator), ..Self::new("") };
        payload.with(&["-fw_cfg", &parameter])
    }

    /// Adds QEMU arguments.
    #[must_use]
    pub fn with(mut self, args: &[&str]) -> Self {
        self.extra.extend(args.iter().map(|a| (*a).to_owned()));
        self
    }

    /// QEMU's command line.
    pub fn command(&self) -> Vec<String> {
        let mut line: Vec<String> = vec![
            self.qemu.clone(),
            "-machine".into(),
            self.machine.clone(),
            "-m".into(),
            format!("{}M", self.mem_mib),
            "-smp".into(),
            self.cpus.to_string(),
        ];
        line.extend(
            ["-nodefaults", "-no-user-config", "-display", "none", "-serial", &self.serial]
                .map(str::to_owned),
        );
        match (&self.software, self.payload_under) {
            (Some(software), _) => line.extend(software.iter().cloned()),
            (None, Some(accelerator)) => {
                let image = payload_image().display().to_string();
                line.extend(["-accel".into(), accelerator.into(), "-bios".into(), image]);
            }
            (None, None) => line.extend(self.kernel()),
        }
        line.extend(self.extra.iter().cloned());
        line
    }

    /// The options of a guest with a kernel.
    fn kernel(&self) -> Vec<String> {
        let dir = small_guest();
        let file = |name: &str| dir.join(name).display().to_string();
        // guests/small/run.sh has the same, with the reasons.
        let machine = if self.machine.starts_with("microvm") {
            microvm_parameters()
        } else {
            "tsc=unstable".into()
        };
        let parameters =
            format!("console=ttyS0 quiet panic=-1 {machine} {SHORT_BOOT} {}", self.append);
        let [kernel, initrd, append] = ["-kernel", "-initrd", "-append"].map(String::from);
        vec![kernel, file("vmlinux"), initrd, file("initramfs.cpio.gz"), append, parameters]
    }
}

/// Kernel parameters that skip the parts of the boot that no workload needs, an eighth of it.
const SHORT_BOOT: &str = "mitigations=off cryptomgr.notests initcall_blacklist=load_system_certificate_list,\
crypto_kdf108_init,init_encrypted,cubictcp_register,init_kprobe_trace";
