//! Measures QEMU's pauses by the STOP and RESUME events of a monitor that is used for nothing else.
//!
//! ```text
//!   STOP (t0) ── vCPUs stopped ── RESUME (t1)     pause = t1 - t0, by QEMU's clock, in microseconds
//! ```
//!
//! The pause begins after the vCPUs have stopped and ends before they run, so it is a little shorter
//! than the pause that the guest sees. The pause that `keyframe take` reports is longer, because it
//! begins before the request to stop. Peers therefore have an advantage.

use crate::Error;
use keyframe_locks::IgnorePoison;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest line that is read, in bytes. Events are far shorter.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Longest time between the answer to a command and the event that it causes.
const LATE: Duration = Duration::from_secs(10);

/// A change of the VM's run state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    runs: bool,
    at_us: u64,
}

/// The pauses of a QEMU, collected until it ends.
pub struct PauseEvents {
    changes: Arc<Mutex<Vec<Change>>>,
}

impl PauseEvents {
    /// Connects to the monitor `socket`, which must exist, and collects events.
    pub fn listen(socket: &Path) -> Result<Self, Error> {
        let mut stream =
            UnixStream::connect(socket).map_err(Error::io("connect to QEMU for its events"))?;
        let reader = stream.try_clone().map_err(Error::io("connect to QEMU for its events"))?;
        stream
            .write_all(b"{\"execute\":\"qmp_capabilities\"}\n")
            .map_err(Error::io("greet QEMU for its events"))?;
        let changes = Arc::<Mutex<Vec<Change>>>::default();
        let seen = Arc::clone(&changes);
        // The thread ends when QEMU closes the socket.
        std::thread::spawn(move || {
            let _keeps_the_socket_open = stream;
            let mut reader = BufReader::new(reader);
            let mut line = Vec::new();
            loop {
                line.clear();
                match reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                if let Some(change) = serde_json::from_slice(&line).ok().as_ref().and_then(parse) {
                    seen.lock().ignore_poison().push(change);
                }
            }
        });
        Ok(Self { changes })
    }

    /// Discards all events so far. Call it before the operation to measure.
    pub fn clear(&self) {
        self.changes.lock().ignore_poison().clear();
    }

    /// Returns the sum of the pauses since [`PauseEvents::clear`], in ns. Fails if the VM does not run
    /// again within 10 s.
    pub fn pause_ns(&self, operation: &str) -> Result<f64, Error> {
        let deadline = Instant::now() + LATE;
        loop {
            let changes = self.changes.lock().ignore_poison().clone();
            if let Some(us) = paused_us(&changes) {
                return Ok(us as f64 * 1e3);
            }
            if Instant::now() > deadline {
                return Err(Error::failed(operation, "QEMU reported no pause that ended"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn parse(message: &Value) -> Option<Change> {
    let runs = match message.get("event")?.as_str()? {
        "STOP" => false,
        "RESUME" => true,
        _ => return None,
    };
    let stamp = message.get("timestamp")?;
    let part = |key: &str| stamp.get(key)?.as_u64();
    Some(Change {
        runs,
        at_us: part("seconds")?.checked_mul(1_000_000)?.checked_add(part("microseconds")?)?,
    })
}

/// Returns the sum of all pauses; `None` if none has ended, or during a pause.
fn paused_us(changes: &[Change]) -> Option<u64> {
    let (mut since, mut total) = (None, None);
    for change in changes {
        match (change.runs, since) {
            (false, _) => since = since.or(Some(change.at_us)),
            (true, Some(from)) => {
                total = Some(total.unwrap_or(0) + change.at_us.saturating_sub(from));
                since = None;
            }
            (true, None) => {}
        }
    }
    if since.is_some() { None } else { total }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn change(runs: bool, at_us: u64) -> Change {
        Change { runs, at_us }
    }

    #[test]
    fn a_pause_counts_once_it_has_ended() {
        assert_eq!(paused_us(&[]), None);
        assert_eq!(paused_us(&[change(true, 5)]), None);
        assert_eq!(paused_us(&[change(false, 5)]), None);
        assert_eq!(paused_us(&[change(false, 5), change(true, 12)]), Some(7));
        let twice = [change(false, 5), change(true, 12), change(false, 20), change(true, 21)];
        assert_eq!(paused_us(&twice), Some(8));
        assert_eq!(paused_us(&twice[..3]), None);
    }

    #[test]
    fn other_messages_are_no_pause() {
        let stamp = json!({ "seconds": 2, "microseconds": 7 });
        let stop = json!({ "event": "STOP", "timestamp": stamp });
        assert_eq!(parse(&stop), Some(change(false, 2_000_007)));
        for other in [
            json!({ "event": "RTC_CHANGE", "timestamp": stamp }),
            json!({ "return": {} }),
            json!({ "event": "RESUME" }),
            json!({ "event": "RESUME", "timestamp": { "seconds": -1, "microseconds": 0 } }),
            json!({ "event": "RESUME", "timestamp": { "seconds": u64::MAX, "microseconds": 0 } }),
            json!([]),
        ] {
            assert_eq!(parse(&other), None, "{other}");
        }
    }
}
