//! A generator of QEMU command lines: machines, devices, disks, networks, consoles and options as
//! people combine them. All of them boot the firmware payload, which works within milliseconds.
//!
//! The same seed gives the same line. Options that QEMU refuses by themselves can occur: the caller
//! draws another line then.

use crate::{Boot, Qemu};
use std::fmt::Write as _;
use std::path::Path;

/// A seeded sequence of choices.
pub struct Choices(u64);

impl Choices {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        let mut choices = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x6B66);
        choices.below(1);
        choices
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// One of `options`.
    pub fn one<'a>(&mut self, options: &[&'a str]) -> &'a str {
        options[self.below(options.len() as u64) as usize]
    }

    /// True in one of `times` cases.
    pub fn happens(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// A generated VM.
pub struct MachineLine {
    /// The VM.
    pub boot: Boot,
    /// Whether PCI devices can be plugged in.
    pub has_pci: bool,
    /// The node names of its disks.
    pub disks: Vec<String>,
    /// The pages that the payload writes in a pass.
    pub dirty: u64,
}

/// Devices on PCI that need nothing else.
const PCI_DEVICES: &[&str] = &[
    "virtio-rng-pci",
    "virtio-balloon-pci",
    "virtio-balloon-pci,free-page-reporting=on",
    "virtio-keyboard-pci",
    "virtio-tablet-pci",
    "virtio-gpu-pci",
    "VGA",
    "cirrus-vga",
    "bochs-display",
    "qemu-xhci",
    "nec-usb-xhci,p2=8,p3=8",
    "ich9-usb-ehci1",
    "piix3-usb-uhci",
    "virtio-serial-pci",
    "virtio-scsi-pci,num_queues=2",
    "lsi53c895a",
    "megasas",
    "pvpanic-pci",
    "i6300esb",
    "pci-bridge,chassis_nr=7",
    "pci-serial",
    "AC97",
    "intel-hda",
    "sdhci-pci",
];

/// Network cards.
const CARDS: &[&str] =
    &["virtio-net-pci", "e1000", "e1000e", "rtl8139", "pcnet", "ne2k_pci", "vmxnet3"];

/// Devices on the ISA bus.
const ISA_DEVICES: &[&str] =
    &["pvpanic", "isa-debugcon,chardev=null0", "vmcoreinfo", "isa-debug-exit"];

/// Options without consequence for the machine's devices.
const OPTIONS: &[&[&str]] = &[
    &["-name", "a name with spaces,process=vm"],
    &["-uuid", "6b657966-7261-6d65-0000-000000000001"],
    &["-rtc", "base=localtime,driftfix=slew"],
    &["-rtc", "base=2020-01-01,clock=vm"],
    &["-boot", "menu=on,strict=off"],
    &["-no-shutdown"],
    &["-no-reboot"],
    &["-msg", "timestamp=on"],
    &["-overcommit", "cpu-pm=on"],
    &["-watchdog-action", "pause"],
    &["-smbios", "type=1,manufacturer=Keyframe"],
    &["-sandbox", "on,spawn=deny"],
    &["-global", "PIIX4_PM.disable_s3=1"],
    &["-parallel", "null"],
    &["-serial", "null"],
    &["-vnc", "none"],
];

impl MachineLine {
    /// The line of `seed` for `qemu`. Its images and sockets are in `dir`.
    pub fn generate(seed: u64, qemu: &Qemu, dir: &Path) -> Self {
        let mut choices = Choices::new(seed);
        let dirty = 1 + choices.below(300);
        let mut boot = Boot { qemu: qemu.path.clone(), ..Boot::payload("tcg", dirty) };
        boot.machine = choices.one(&["pc", "pc", "q35", "q35", "microvm,rtc=on"]).into();
        let has_pci = !boot.machine.starts_with("microvm");
        if has_pci {
            boot.machine +=
                choices.one(&["", "", ",usb=on", ",vmport=off", ",hpet=off", ",smm=off"]);
        }
        boot.mem_mib = [48, 64, 128, 200][choices.below(4) as usize];
        boot.cpus = 1 + choices.below(3) as u32;
        let mut line = MachineLine { boot, has_pci, disks: Vec::new(), dirty };
        line.add_memory(&mut choices);
        line.add(&["-chardev", "null,id=null0"]);
        for number in 0..choices.below(3) {
            line.add_disk(&mut choices, number, dir);
        }
        if has_pci {
            line.add_pci_devices(&mut choices);
        }
        if choices.happens(3) {
            let socket = dir.join("extra").display().to_string();
            line.add(&["-chardev", &format!("socket,id=extra,path={socket},server=on,wait=off")]);
            line.add(&["-mon", "chardev=extra,mode=readline"]);
        }
        for _ in 0..choices.below(4) {
            let options = OPTIONS[choices.below(OPTIONS.len() as u64) as usize];
            line.add(options);
        }
        line
    }

    /// The line as a user would type it.
    pub fn text(&self) -> String {
        self.boot.command().iter().fold(String::new(), |mut text, word| {
            let _ = write!(text, "{word:?} ");
            text
        })
    }

    fn add(&mut self, arguments: &[&str]) {
        self.boot.extra.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    }

    fn add_memory(&mut self, choices: &mut Choices) {
        let bytes = format!("{}M", self.boot.mem_mib);
        match choices.below(5) {
            0 => {
                self.boot.machine += ",memory-backend=mem0";
                self.add(&["-object", &format!("memory-backend-ram,id=mem0,size={bytes}")]);
            }
            1 => {
                self.boot.machine += ",memory-backend=mem0";
                let share = choices.one(&["on", "off"]);
                let backend = format!("memory-backend-memfd,id=mem0,size={bytes},share={share}");
                self.add(&["-object", &backend]);
            }
            _ => {}
        }
    }

    fn add_disk(&mut self, choices: &mut Choices, number: u64, dir: &Path) {
        let format = choices.one(&["raw", "qcow2"]);
        let path = dir.join(format!("disk{number}")).display().to_string();
        let bytes = format!("{}M", 1 + choices.below(8));
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", format, &path, &bytes])
            .status()
            .expect("run qemu-img");
        assert!(made.success(), "qemu-img create {path}");
        let (drive, node) = (format!("drive{number}"), format!("node{number}"));
        let cache = choices.one(&["writeback", "writeback", "unsafe", "writethrough"]);
        if choices.happens(2) {
            let file = format!("driver=file,filename={path}");
            let file: String = file.split(',').fold(String::new(), |mut text, part| {
                let _ = write!(text, ",file.{part}");
                text
            });
            self.add(&["-blockdev", &format!("driver={format},node-name={node}{file}")]);
        } else {
            let drive = format!("file={path},if=none,id={node},format={format},cache={cache}");
            self.add(&["-drive", &drive]);
        }
        let device = self.disk_device(choices, number);
        self.add(&["-device", &format!("{device},drive={node},id={drive}")]);
        self.disks.push(node);
    }

    /// A disk device, with the controller that it needs on the line.
    fn disk_device(&mut self, choices: &mut Choices, number: u64) -> String {
        if !self.has_pci {
            return "virtio-blk-device".into();
        }
        match choices.below(8) {
            0 => {
                self.add(&["-object", &format!("iothread,id=io{number}")]);
                format!("virtio-blk-pci,iothread=io{number}")
            }
            1 | 2 => "virtio-blk-pci".into(),
            3 => {
                self.add(&["-device", &format!("virtio-scsi-pci,id=scsi{number}")]);
                format!("scsi-hd,bus=scsi{number}.0")
            }
            4 => {
                self.add(&["-device", &format!("ich9-ahci,id=ahci{number}")]);
                format!("ide-hd,bus=ahci{number}.0")
            }
            5 => format!("nvme,serial=kf{number}"),
            6 => {
                self.add(&["-device", &format!("qemu-xhci,id=xhci{number}")]);
                format!("usb-storage,bus=xhci{number}.0")
            }
            _ => format!("ide-hd,bus=ide.{number}"),
        }
    }

    fn add_pci_devices(&mut self, choices: &mut Choices) {
        for number in 0..choices.below(5) {
            let device = choices.one(PCI_DEVICES);
            let id = if choices.happens(2) { format!(",id=device{number}") } else { String::new() };
            self.add(&["-device", &format!("{device}{id}")]);
        }
        if choices.happens(2) {
            let card = choices.one(CARDS);
            let backend = choices.one(&["user", "user,restrict=on", "hubport,hubid=3"]);
            self.add(&["-netdev", &format!("{backend},id=net0")]);
            self.add(&["-device", &format!("{card},netdev=net0")]);
        }
        if choices.happens(4) {
            let device = choices.one(ISA_DEVICES);
            self.add(&["-device", device]);
        }
        if choices.happens(5) {
            self.add(&["-device", "virtio-serial-pci,id=ports"]);
            self.add(&["-device", "virtserialport,bus=ports.0,chardev=null0,name=agent"]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distribution_qemu;

    #[test]
    fn a_seed_gives_the_same_line_and_seeds_give_different_ones() {
        let dir = tempfile::tempdir().unwrap();
        let line = |seed| MachineLine::generate(seed, &distribution_qemu(), dir.path()).text();
        assert_eq!(line(7), line(7));
        let all: std::collections::BTreeSet<String> = (0..20).map(line).collect();
        assert_eq!(all.len(), 20);
    }
}
