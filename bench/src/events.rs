//! How long a QEMU stood still, by the STOP and RESUME events of a monitor that is used for nothing
//! else.
//!
//! ```text
//!   STOP (t0) ── the virtual CPUs stand still ── RESUME (t1)      pause = t1 - t0, by QEMU's clock, in microseconds
//! ```
//!
//! It begins when the CPUs have stopped and ends before they run, so it is a little shorter than
//! what the guest sees. What `keyframe take` prints is longer: it begins before the request to
//! stop. Peers have the advantage.

use crate::Error;
use keyframe_locks::IgnorePoison;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest line that is read; events are far shorter.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// How long an event may be behind the answer of the command that caused it.
const LATE: Duration = Duration::from_secs(10);

/// A change between running and standing still.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Change {
    runs: bool,
    at_us: u64,
}

/// A monitor that is listened to, until QEMU ends.
pub struct Events {
    changes: Arc<Mutex<Vec<Change>>>,
}

impl Events {
    /// Listens at the monitor `socket`, which must exist.
    pub fn listen(socket: &Path) -> Result<Self, Error> {
        let mut stream =
            UnixStream::connect(socket).map_err(Error::io("connect to QEMU for its events"))?;
        let reader = stream.try_clone().map_err(Error::io("connect to QEMU for its events"))?;
        stream
            .write_all(b"{\"execute\":\"qmp_capabilities\"}\n")
            .map_err(Error::io("greet QEMU for its events"))?;
        let changes = Arc::<Mutex<Vec<Change>>>::default();
        let seen = Arc::clone(&changes);
        // It ends with QEMU, which closes the socket.
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

    /// Forgets what was. Call before what is to be measured.
    pub fn forget(&self) {
        self.changes.lock().ignore_poison().clear();
    }

    /// How long QEMU stood still since [`Events::forget`], in ns. It must run again.
    pub fn pause_ns(&self, operation: &str) -> Result<f64, Error> {
        let deadline = Instant::now() + LATE;
        loop {
            let changes = self.changes.lock().ignore_poison().clone();
            if let Some(us) = stood_us(&changes) {
                return Ok(us as f64 * 1e3);
            }
            if Instant::now() > deadline {
                return Err(Error::failed(operation, "QEMU told of no pause that ended"));
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

/// All pauses together; `None` before the first has ended, and while it stands still.
fn stood_us(changes: &[Change]) -> Option<u64> {
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
        assert_eq!(stood_us(&[]), None);
        assert_eq!(stood_us(&[change(true, 5)]), None);
        assert_eq!(stood_us(&[change(false, 5)]), None);
        assert_eq!(stood_us(&[change(false, 5), change(true, 12)]), Some(7));
        let twice = [change(false, 5), change(true, 12), change(false, 20), change(true, 21)];
        assert_eq!(stood_us(&twice), Some(8));
        assert_eq!(stood_us(&twice[..3]), None);
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
