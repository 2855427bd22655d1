//! Events and run states of QEMU's monitor.

use serde_json::Value;

/// An event that QEMU reports on its monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QmpEvent {
    /// The VM was paused.
    Stop,
    /// The VM was resumed.
    Resume,
    /// The machine was reset.
    Reset,
    /// The machine shuts down (or resets, under `-no-reboot`).
    Shutdown {
        /// True if the guest asked for it.
        guest: bool,
        /// QEMU's reason (`guest-shutdown`, `host-qmp-quit`, ...).
        reason: String,
    },
    /// The guest was asked to power down.
    Powerdown,
    /// The guest reported a panic of its kernel.
    GuestPanicked,
    /// A disk failed.
    DiskError {
        /// True if there was no space for a write.
        no_space: bool,
        /// True if the VM was stopped for it.
        stops: bool,
        /// The names of its block backend and its topmost node that are known.
        names: Vec<String>,
    },
    /// The guest's watchdog expired.
    Watchdog {
        /// What QEMU does then (`reset`, `poweroff`, `pause`, ...).
        action: String,
    },
    /// Another event, with its name.
    Other(String),
}

impl QmpEvent {
    /// The event in `message`; `None` if it has none.
    pub(crate) fn parse(message: &Value) -> Option<Self> {
        let name = message.get("event")?.as_str()?;
        let data = message.get("data");
        Some(match name {
            "STOP" => Self::Stop,
            "RESUME" => Self::Resume,
            "RESET" => Self::Reset,
            "SHUTDOWN" => Self::Shutdown {
                guest: data.and_then(|d| d.get("guest")).and_then(Value::as_bool).unwrap_or(false),
                reason: data
                    .and_then(|d| d.get("reason"))
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .into(),
            },
            "POWERDOWN" => Self::Powerdown,
            "GUEST_PANICKED" => Self::GuestPanicked,
            "BLOCK_IO_ERROR" => Self::DiskError {
                no_space: data
                    .and_then(|d| d.get("nospace"))
                    .and_then(Value::as_bool)
                    .unwrap_or(false),
                stops: data.and_then(|d| d.get("action")).and_then(Value::as_str) == Some("stop"),
                names: ["device", "node-name"]
                    .into_iter()
                    .filter_map(|key| data?.get(key)?.as_str())
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned)
                    .collect(),
            },
            "WATCHDOG" => Self::Watchdog {
                action: data
                    .and_then(|d| d.get("action"))
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .into(),
            },
            other => Self::Other(other.into()),
        })
    }
}

/// The time stamp of an event, in microseconds since 1970 by QEMU's wall clock; `None` if it has
/// none.
pub(super) fn timestamp_us(message: &Value) -> Option<u64> {
    let stamp = message.get("timestamp")?;
    let part = |key: &str| stamp.get(key)?.as_i64().and_then(|v| u64::try_from(v).ok());
    part("seconds")?.checked_mul(1_000_000)?.checked_add(part("microseconds")?)
}

/// The run state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// The virtual CPUs run.
    Running,
    /// A monitor command has stopped the VM.
    Paused,
    /// The VM was started with `-S` and has not been continued yet.
    Prelaunch,
    /// QEMU waits for the VM's state, or loads it.
    InMigrate,
    /// The guest has shut down, and `-no-shutdown` keeps QEMU alive.
    Shutdown,
    /// Another state without running CPUs, with QEMU's name (`io-error`, `guest-panicked`,
    /// `suspended`, ...).
    Other(String),
}

impl RunStatus {
    pub(super) fn parse(word: &str) -> Self {
        match word {
            "running" => Self::Running,
            "paused" => Self::Paused,
            "prelaunch" => Self::Prelaunch,
            "inmigrate" => Self::InMigrate,
            "shutdown" => Self::Shutdown,
            other => Self::Other(other.into()),
        }
    }

    /// Returns true if the virtual CPUs run.
    pub fn is_running(&self) -> bool {
        *self == Self::Running
    }
}
