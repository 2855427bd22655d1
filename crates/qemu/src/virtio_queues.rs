//! Requests under way: of disks, and packets that the guest sends. Record/replay does not wait for
//! them when the VM stops, and a checkpoint between a request and its answer makes a replay that
//! hangs.
//!
//! ```text
//!   guest puts it into the ring, kicks ─▶ QEMU's main loop takes it ─▶ in use ─▶ answered
//!   └ avail.idx in guest RAM ─────────┘   └ last-avail-idx ────────┘
//! ```
//!
//! Both stretches count: a kick that the device has not seen yet is not in its state. A card that
//! has seen one sends what there is in a bottom half, which the log orders: one that the recording
//! had scheduled before it was stopped is one too many for a replay that begins there.

use crate::{Error, Qmp, Result};
use serde_json::{Value, json};

/// Virtio devices all of whose queues have requests.
const DISKS: &[&str] = &["virtio-blk", "virtio-scsi"];
/// Virtio devices with pairs of queues: of one the device takes buffers for packets to come, as
/// long as there are none; the other one has packets to be sent. A last one, without a partner, has
/// commands.
const CARDS: &[&str] = &["virtio-net"];
/// More queues than any device has.
const QUEUES_MAX: u64 = 1024;

/// The queues of a machine's virtio devices that carry requests.
#[derive(Clone, Debug, Default)]
pub struct VirtioQueues(Vec<(String, u64)>);

impl VirtioQueues {
    /// Asks QEMU for the queues of the VM's virtio disks and network cards that carry requests of
    /// the guest. Error: the monitor fails, or its answer has an unknown form.
    pub fn find(qmp: &mut Qmp) -> Result<Self> {
        let devices = match qmp.execute("x-query-virtio", None) {
            Ok(devices) => devices,
            // QEMU 10's way of saying that there is none.
            Err(Error::Refused { reason, .. }) if reason.contains("No virtio devices") => {
                Value::Null
            }
            Err(other) => return Err(other),
        };
        let mut queues = Vec::new();
        for device in devices.as_array().into_iter().flatten() {
            let text = |key: &str| device.get(key).and_then(Value::as_str).unwrap_or_default();
            let is_card = CARDS.contains(&text("name"));
            if !is_card && !DISKS.contains(&text("name")) {
                continue;
            }
            let count = count(qmp, text("path"))?;
            let requests =
                (0..count).filter(|queue| !is_card || queue % 2 == 1 || queue + 1 == count);
            queues.extend(requests.map(|queue| (text("path").to_owned(), queue)));
        }
        Ok(Self(queues))
    }

    /// Returns whether a request is under way in one of the queues. If the VM runs, the answer
    /// tells whether one was a moment ago. Error: QEMU does not answer.
    pub fn are_busy(&self, qmp: &mut Qmp) -> Result<bool> {
        for (path, queue) in &self.0 {
            let status = queue_status(qmp, path, *queue)?;
            let number = |key: &str| status.get(key).and_then(Value::as_u64);
            let (Some(in_use), Some(taken), Some(ring)) =
                (number("inuse"), number("last-avail-idx"), number("vring-avail"))
            else {
                return Err(qmp.unexpected("x-query-virtio-queue-status", &status));
            };
            // A ring that the guest has not set up is nowhere.
            if in_use > 0 || (ring != 0 && half_word(qmp, ring.saturating_add(2))? != taken) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns the number of queues of the virtio device at `path`: that of the first queue that it does
/// not have. QEMU 11.1 aborts when it is asked for a device's status (`x-query-virtio-status`), which
/// has the number, too.
///
/// Error: the monitor fails.
fn count(qmp: &mut Qmp, path: &str) -> Result<u64> {
    for queue in 0..QUEUES_MAX {
        match queue_status(qmp, path, queue) {
            Ok(_) => {}
            Err(Error::Refused { reason, .. }) if reason.contains("Invalid virtqueue number") => {
                return Ok(queue);
            }
            Err(other) => return Err(other),
        }
    }
    Ok(QUEUES_MAX)
}

fn queue_status(qmp: &mut Qmp, path: &str, queue: u64) -> Result<Value> {
    let arguments = json!({ "path": path, "queue": queue });
    qmp.execute("x-query-virtio-queue-status", Some(arguments))
}

/// 16 bits of guest memory, little-endian.
fn half_word(qmp: &mut Qmp, address: u64) -> Result<u64> {
    let text = qmp.hmp(&format!("xp /1hx {address:#x}"))?;
    let word = text.rsplit(':').next().and_then(|word| word.trim().strip_prefix("0x"));
    match word.and_then(|word| u64::from_str_radix(word, 16).ok()) {
        Some(word) => Ok(word),
        None => Err(qmp.unexpected("xp", &Value::String(text))),
    }
}
