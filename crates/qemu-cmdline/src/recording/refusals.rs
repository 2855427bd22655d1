//! Refuses machines that a replay could not repeat.
//!
//! | refused | reason |
//! |---|---|
//! | more than one virtual CPU | QEMU records one |
//! | NVMe under 7.2 | QEMU crashes at the first checkpoint |
//! | virtio-net under 7.2 | some replays never end |
//! | disks not on virtio-blk or virtio-scsi | their pending requests are not visible |
//! | a console on `-chardev` with input | QEMU records input of `-serial` only |
//! | `-nic`, `-net` | they create network and device together, without a recording filter |
//! | `-rtc clock=rt` | QEMU does not record this clock |
//! | a random number device that reads a file | QEMU does not record what it reads |
//! | `-cpu host` | TCG does not have this processor |
//! | passed-through and host devices | QEMU does not record them |

use crate::options::{Argument, Object, is_on, keys, properties, value_of};
use crate::{CommandLineError, Result};

/// Backends of character devices without input.
const SILENT: &[&str] = &["null", "file", "ringbuf", "memory", "vc"];

/// Devices whose input QEMU does not record: prefix of the name, reason.
const UNRECORDED: &[(&str, &str)] = &[
    ("usb-host", "devices of the host are not recorded"),
    ("usb-redir", "devices of another host are not recorded"),
    ("ccid-card-passthru", "devices of the host are not recorded"),
    ("virtio-9p", "reads of the host's files are not recorded"),
    ("vhost-", "devices in the kernel or in another process are not recorded"),
    ("virtio-gpu", "its rendering is not recorded"),
    ("tpm-", "answers of the TPM are not recorded"),
    ("ivshmem", "writes of other processes are not recorded"),
    ("vfio", "devices of the host are not recorded"),
];

/// Disk devices whose pending requests are not visible in a pause.
const OPAQUE_DISKS: &[&str] = &[
    "ide-hd",
    "floppy",
    "sd-card",
    "usb-storage",
    "usb-uas",
    "lsi53c",
    "megasas",
    "mptsas",
    "pvscsi",
    "am53c974",
    "dc390",
];

/// Refuses a machine that a QEMU of `version` cannot record exactly.
///
/// Error: [`CommandLineError::Argument`].
pub(crate) fn check(arguments: &[Argument], version: &str) -> Result<()> {
    arguments.iter().try_for_each(|argument| match argument.name() {
        "smp" => smp(argument),
        "cpu" => cpu(argument),
        "icount" => icount(argument),
        "accel" => accelerator(argument),
        "rtc" if value_of(&keys(argument.value(), "base"), "clock") == Some("rt") => Err(refused(
            argument,
            "QEMU does not record this clock",
            "remove clock=rt: the clock then follows the guest's time",
        )),
        "device" => device(argument, version),
        "nic" | "net" if argument.value() != "none" => Err(refused(
            argument,
            "it creates device and network together, but packets must pass a filter that records \
             them",
            "write `-netdev user,id=n0 -device e1000,netdev=n0` instead",
        )),
        "chardev" => chardev(argument, arguments),
        "object" => object(argument),
        "drive" => drive(argument),
        "hda" | "hdb" | "hdc" | "hdd" | "" => Err(opaque(argument)),
        "audiodev" if !argument.value().starts_with("none") => {
            let reason = "the log does not record how much sound came in";
            Err(refused(argument, reason, "use -audiodev none,id=..."))
        }
        "fsdev" | "virtfs" => Err(refused(
            argument,
            "reads of the host's files are not recorded",
            "put the files on a disk image",
        )),
        _ => Ok(()),
    })
}

fn refused(argument: &Argument, reason: &str, fix: &str) -> CommandLineError {
    CommandLineError::Argument {
        argument: argument.display(),
        reason: reason.into(),
        fix: fix.into(),
    }
}

fn opaque(argument: &Argument) -> CommandLineError {
    refused(
        argument,
        "a checkpoint of a recording must not fall between a disk's request and its answer, and \
         pending requests of this kind of disk are not visible",
        "use virtio: -drive file=...,format=...,if=virtio",
    )
}

fn smp(argument: &Argument) -> Result<()> {
    let keys = keys(argument.value(), "cpus");
    let number = |key: &str| value_of(&keys, key).and_then(|v| v.parse::<u64>().ok());
    let product: u64 = ["sockets", "dies", "clusters", "cores", "threads"]
        .iter()
        .map(|key| number(key).unwrap_or(1))
        .fold(1, u64::saturating_mul);
    if number("cpus").unwrap_or(product) > 1 || number("maxcpus").unwrap_or(1) > 1 {
        return Err(refused(
            argument,
            "QEMU records machines with one virtual CPU only",
            "use -smp 1",
        ));
    }
    Ok(())
}

fn cpu(argument: &Argument) -> Result<()> {
    if keys(argument.value(), "model").first().is_some_and(|(_, model)| model == "host") {
        return Err(refused(
            argument,
            "a recording runs under TCG, which does not have this processor",
            "use -cpu max",
        ));
    }
    Ok(())
}

fn icount(argument: &Argument) -> Result<()> {
    let keys = keys(argument.value(), "shift");
    if ["rr", "rrfile", "rrsnapshot"].iter().any(|key| value_of(&keys, key).is_some()) {
        return Err(refused(
            argument,
            "Keyframe sets these keys itself",
            "remove rr, rrfile and rrsnapshot",
        ));
    }
    if value_of(&keys, "shift").is_none_or(|shift| shift == "auto") {
        return Err(refused(
            argument,
            "a guest that halts does not replay if QEMU chooses the shift",
            "remove -icount, or name the shift: -icount shift=3",
        ));
    }
    if is_on(&keys, "align") {
        return Err(refused(
            argument,
            "a guest whose clock follows the host's cannot be replayed",
            "remove align=on",
        ));
    }
    Ok(())
}

fn accelerator(argument: &Argument) -> Result<()> {
    if value_of(&keys(argument.value(), "accel"), "thread") == Some("multi") {
        return Err(refused(argument, "QEMU records with one thread only", "remove thread=multi"));
    }
    Ok(())
}

fn device(argument: &Argument, version: &str) -> Result<()> {
    let keys = properties(argument.value(), "driver").unwrap_or_default();
    let driver = value_of(&keys, "driver").unwrap_or_default();
    let old = version.starts_with("7.");
    if driver.starts_with("nvme") && old {
        return Err(refused(
            argument,
            "QEMU 7.2 crashes at a checkpoint of a recorded NVMe disk",
            "use virtio-blk-pci, or QEMU 10",
        ));
    }
    if driver.starts_with("nvme") || OPAQUE_DISKS.iter().any(|kind| driver.starts_with(kind)) {
        return Err(opaque(argument));
    }
    if driver.starts_with("virtio-net") && old {
        return Err(refused(
            argument,
            "under QEMU 7.2 some replays of virtio-net never end",
            "use another card (-device e1000,netdev=...), or QEMU 10",
        ));
    }
    match UNRECORDED.iter().find(|(prefix, _)| driver.starts_with(prefix)) {
        Some((_, reason)) => Err(refused(argument, reason, "record without this device")),
        None => Ok(()),
    }
}

fn chardev(argument: &Argument, all: &[Argument]) -> Result<()> {
    let keys = properties(argument.value(), "backend").unwrap_or_default();
    let id = value_of(&keys, "id").unwrap_or_default();
    let backend = value_of(&keys, "backend").unwrap_or_default();
    let is_monitors = all
        .iter()
        .filter(|a| a.name() == "mon")
        .any(|a| value_of(&super::keys(a.value(), "chardev"), "chardev") == Some(id));
    if is_monitors || SILENT.contains(&backend) {
        return Ok(());
    }
    Err(refused(
        argument,
        "QEMU records a console's input only if the console is given by -serial, not by -chardev",
        "use -serial (-serial stdio, -serial unix:PATH,server=on,wait=off), or a chardev without \
         input (file, null)",
    ))
}

fn object(argument: &Argument) -> Result<()> {
    let Some(object) = Object::parse(argument.value()) else { return Ok(()) };
    match object.qom_type.as_str() {
        "rng-random" | "rng-egd" => Err(refused(
            argument,
            "QEMU does not record what it reads",
            "use rng-builtin: -object rng-builtin,id=...",
        )),
        "filter-replay" => {
            Err(refused(argument, "Keyframe adds this filter to each network itself", "remove it"))
        }
        "iothread" => Err(refused(
            argument,
            "the log does not order the actions of a second thread",
            "remove it, and iothread= of the devices",
        )),
        _ => Ok(()),
    }
}

fn drive(argument: &Argument) -> Result<()> {
    let keys = keys(argument.value(), "file");
    let has_medium = ["file", "file.driver", "file.filename"]
        .iter()
        .any(|key| value_of(&keys, key).is_some_and(|v| !v.is_empty()));
    let on_bus = matches!(value_of(&keys, "if"), Some("none" | "virtio" | "pflash"));
    if !has_medium || on_bus || value_of(&keys, "media") == Some("cdrom") {
        return Ok(());
    }
    Err(opaque(argument))
}

#[cfg(test)]
mod tests {
    use crate::options;

    fn check(line: &str, version: &str) -> crate::Result<()> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        super::check(&options::parse(&words).unwrap(), version)
    }

    #[test]
    fn machines_that_no_replay_repeats_are_refused_with_a_fix() {
        for line in [
            "-smp 2",
            "-smp sockets=1,cores=2",
            "-smp 1,maxcpus=4",
            "-cpu host,x=on",
            "-icount shift=1,rr=record,rrfile=x",
            "-icount auto",
            "-icount sleep=off",
            "-icount shift=2,align=on",
            "-accel tcg,thread=multi",
            "-rtc base=utc,clock=rt",
            "-device nvme,drive=d,serial=1",
            "-device virtio-net-pci,netdev=n",
            "-device ide-hd,drive=d",
            "-device usb-host,hostbus=1",
            "-nic user",
            "-net nic",
            "-chardev socket,id=c,path=/x -serial chardev:c",
            "-object rng-random,id=r,filename=/dev/urandom",
            "-object iothread,id=t",
            "-drive file=a.img,format=raw",
            "-hda a.img",
            "a.img",
            "-virtfs local,path=/x",
        ] {
            let error = check(line, "7.2.22 (Debian)").unwrap_err();
            assert!(error.fix().is_some(), "{line}: {error}");
        }
    }

    #[test]
    fn machines_that_can_be_recorded_are_accepted() {
        for line in [
            "-smp 1 -cpu max -accel tcg -nic none",
            "-smp cpus=1,maxcpus=1 -icount shift=3 -rtc localtime -rtc clock=host",
            "-drive file=a.img,format=raw,if=virtio -drive file=b.iso,media=cdrom",
            "-drive file=a.img,format=raw,if=none,id=d -device virtio-blk-pci,drive=d",
            "-chardev socket,id=m,path=/x -mon chardev=m,mode=control -chardev file,id=f,path=/y -serial chardev:f",
            "-object rng-builtin,id=r -device virtio-rng-pci,rng=r -device e1000,netdev=n -netdev user,id=n",
        ] {
            check(line, "7.2.22").unwrap_or_else(|e| panic!("{line}: {e}"));
        }
        check("-device virtio-net-pci,netdev=n", "10.0.2").unwrap();
    }
}
