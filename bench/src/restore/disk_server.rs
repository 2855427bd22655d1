//! The disk server against `qemu-nbd`. QEMU's block layer is the client, so that no slow guest hides
//! the speed of the servers.
//!
//! ```text
//!   qemu-img bench, 16 requests at once ──unix socket──┬──▶ keyframe __disks   overlay over a raw base
//!                                                      └──▶ qemu-nbd           a raw image
//! ```
//!
//! The servers alternate. Each round has new files: 64 KiB requests write and read the disk in order;
//! a checkpoint is cut; 4 KiB requests write and read it in a scattered order. Flushes come between
//! the writes, as from guests. All files are in the page cache.

use crate::sample::Sample;
use crate::{Error, Options, Report};
use keyframe_disk::{DiskSpec, Disks, ImageFormat};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = 256 << 20;
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A load of `qemu-img bench`.
struct IoLoad {
    key: &'static str,
    options: &'static [&'static str],
    request_bytes: u64,
    /// The distance between two requests; the position wraps at the end of the disk.
    step_bytes: u64,
    requests: u64,
}

/// The distance of scattered requests. 40503 is odd, so that every block comes once before one is
/// repeated, and consecutive requests are far apart.
const SCATTERED_STEP_BYTES: u64 = 40_503 * 4096;
const SEQ_READ: IoLoad = IoLoad {
    key: "seq_read",
    options: &[],
    request_bytes: 65_536,
    step_bytes: 65_536,
    requests: DISK_BYTES / 65_536,
};
const RAND_READ: IoLoad = IoLoad {
    key: "rand_read",
    options: &[],
    request_bytes: 4096,
    step_bytes: SCATTERED_STEP_BYTES,
    requests: 32_768,
};
const LOADS: [IoLoad; 4] = [
    IoLoad { key: "seq_write", options: &["-w", "--flush-interval=1024"], ..SEQ_READ },
    SEQ_READ,
    IoLoad { key: "rand_write", options: &["-w", "--flush-interval=8192"], ..RAND_READ },
    RAND_READ,
];

/// The rates of each load in bytes a second, with a value for each round.
#[derive(Default)]
pub struct DiskRates {
    ours: [Sample; LOADS.len()],
    peer: [Sample; LOADS.len()],
}

/// Measures both servers `rounds` times.
pub fn measure(options: &Options, dir: &Path, rounds: u32) -> Result<DiskRates, Error> {
    let mut rates = DiskRates::default();
    for round in 0..rounds {
        options.say(format!("disks, round {} of {rounds}", round + 1));
        let round_dir = dir.join(format!("disks-{round}"));
        std::fs::create_dir(&round_dir).map_err(Error::io("make a directory for disks"))?;
        // The order alternates, so that a busy disk does not always slow the same server.
        if round % 2 == 0 {
            measure_keyframe(options, &round_dir, &mut rates.ours)?;
            measure_qemu_nbd(&round_dir, &mut rates.peer)?;
        } else {
            measure_qemu_nbd(&round_dir, &mut rates.peer)?;
            measure_keyframe(options, &round_dir, &mut rates.ours)?;
        }
        std::fs::remove_dir_all(&round_dir).map_err(Error::io("remove the disks of a round"))?;
    }
    Ok(rates)
}

impl DiskRates {
    /// Adds the figures and ratios to `report`.
    pub fn add_to(&self, report: &mut Report) {
        let key = |who: &str, load: &IoLoad| format!("disk_{who}_{}_bytes_per_s", load.key);
        for ((load, ours), peer) in LOADS.iter().zip(&self.ours).zip(&self.peer) {
            report.figure(key("keyframe", load), ours.median());
            report.figure(key("qemu_nbd", load), peer.median());
            let (ours, peer) = (key("keyframe", load), key("qemu_nbd", load));
            report.ratio_of(format!("disk_{}_over_qemu_nbd", load.key), &ours, &peer);
        }
        // The ratio of a kind is that of its slower direction.
        for kind in ["seq", "rand"] {
            let of = |what: &str| {
                report.ratios.get(&format!("disk_{kind}_{what}_over_qemu_nbd")).copied()
            };
            if let (Some(write), Some(read)) = (of("write"), of("read")) {
                report.ratio(format!("disk_{kind}_over_qemu_nbd"), write.min(read));
            }
        }
    }
}

fn image(path: &Path) -> Result<(), Error> {
    let made = std::fs::File::create(path).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(Error::io("make an image"))
}

fn measure_keyframe(options: &Options, dir: &Path, rates: &mut [Sample]) -> Result<(), Error> {
    let failed = |e: keyframe_disk::Error| Error::failed("serve a disk", e);
    let (base, socket) = (dir.join("base.raw"), dir.join("keyframe.sock"));
    image(&base)?;
    let overlay = dir.join("overlay");
    let spec = DiskSpec {
        export: "d".into(),
        base,
        format: ImageFormat::Raw,
        overlay,
        blank_bytes: None,
        layer: None,
        temporary: false,
    };
    let mut command = Command::new(&options.keyframe);
    command.arg("__disks");
    let mut disks = Disks::spawn(command, &socket, &[spec]).map_err(failed)?;
    for (number, (load, rate)) in LOADS.iter().zip(rates).enumerate() {
        if number == 2 {
            // As in a run with checkpoints, the next writes need new blocks.
            let epochs = disks.cut().map_err(failed)?;
            disks.release(&epochs).map_err(failed)?;
        }
        rate.push(load.run(&socket)?);
    }
    disks.end().map_err(failed)
}

fn measure_qemu_nbd(dir: &Path, rates: &mut [Sample]) -> Result<(), Error> {
    let (file, socket) = (dir.join("peer.raw"), dir.join("qemu-nbd.sock"));
    image(&file)?;
    let _server = QemuNbd::start(&file, &socket)?;
    for (load, rate) in LOADS.iter().zip(rates) {
        rate.push(load.run(&socket)?);
    }
    Ok(())
}

/// A running `qemu-nbd`, which is killed when this is dropped.
struct QemuNbd(Child);

impl QemuNbd {
    fn start(file: &Path, socket: &PathBuf) -> Result<Self, Error> {
        let mut command = Command::new("qemu-nbd");
        command.args([
            "--persistent",
            "--shared=16",
            "--discard=unmap",
            "-f",
            "raw",
            "-x",
            "d",
            "-k",
        ]);
        command.arg(socket).arg(file).stdin(Stdio::null()).stdout(Stdio::null());
        let peer = Self(command.spawn().map_err(Error::io("start qemu-nbd"))?);
        let started = Instant::now();
        while !socket.exists() {
            if started.elapsed() > START_TIMEOUT {
                return Err(Error::failed("start qemu-nbd", "it opens no socket"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(peer)
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl IoLoad {
    /// Runs the load. Returns its rate in bytes a second, by the clock of `qemu-img`.
    fn run(&self, socket: &Path) -> Result<f64, Error> {
        let mut command = Command::new("timeout");
        command.args(["300", "qemu-img", "bench", "-f", "raw", "-t", "writeback", "-d", "16"]);
        command.args(["-s", &self.request_bytes.to_string(), "-S", &self.step_bytes.to_string()]);
        command.args(["-c", &self.requests.to_string()]).args(self.options);
        command.arg(format!("nbd+unix:///d?socket={}", socket.display()));
        let output = command.output().map_err(Error::io("run qemu-img bench"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        match seconds(&text).filter(|_| output.status.success()) {
            Some(seconds) => Ok((self.requests * self.request_bytes) as f64 / seconds),
            None => Err(Error::failed(
                format!("qemu-img bench, {}", self.key),
                format!("{}{text}", String::from_utf8_lossy(&output.stderr)),
            )),
        }
    }
}

fn seconds(text: &str) -> Option<f64> {
    let number = text.split("Run completed in ").nth(1)?.split(' ').next()?;
    number.parse().ok().filter(|seconds: &f64| *seconds > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_the_slower_direction() {
        let mut rates = DiskRates::default();
        for (place, (ours, peer)) in
            [(9.0, 10.0), (8.0, 4.0), (3.0, 6.0), (5.0, 5.0)].into_iter().enumerate()
        {
            rates.ours[place].push(ours);
            rates.peer[place].push(peer);
        }
        let mut report = Report::new("restore");
        rates.add_to(&mut report);
        let close =
            |key: &str, value: f64| assert!((report.ratios[key] - value).abs() < 1e-9, "{key}");
        close("disk_seq_over_qemu_nbd", 0.9);
        close("disk_rand_over_qemu_nbd", 0.5);
        close("disk_seq_read_over_qemu_nbd", 2.0);
    }

    #[test]
    fn the_time_is_read_from_qemu_img() {
        let text = "Sending 4096 read requests\nRun completed in 0.512 seconds.\n";
        assert_eq!(seconds(text), Some(0.512));
        assert_eq!(seconds("qemu-img: failed"), None);
    }
}
