//! Events and states, as QEMU's monitor words them.

use serde_json::Value;

/// Something that happened in QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The virtual CPUs stand still.
    Stop,
    /// The virtual CPUs run.
    Resume,
    /// The machine was reset.
    Reset,
    /// The machine shuts down (or resets, under `-no-reboot`).
    Shutdown {
        /// The guest asked for it.
        guest: bool,
        /// QEMU's word for why (`guest-shutdown`, `host-qmp-quit`, ...).
        reason: String,
    },
    /// The guest was asked to power down.
    Powerdown,
    /// The guest says that its kernel panicked.
    GuestPanicked,
    /// Another one, by its name.
    Other(String),
}

impl Event {
    /// The event that `message` tells of; `None` where it is none.
    pub(super) fn parse(message: &Value) -> Option<Self> {
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
            other => Self::Other(other.into()),
        })
    }
}

/// When an event happened by QEMU's wall clock, in microseconds since 1970; `None` where it says
/// none.
pub(super) fn timestamp_us(message: &Value) -> Option<u64> {
    let stamp = message.get("timestamp")?;
    let part = |key: &str| stamp.get(key)?.as_i64().and_then(|v| u64::try_from(v).ok());
    part("seconds")?.checked_mul(1_000_000)?.checked_add(part("microseconds")?)
}

/// What the VM is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunStatus {
    /// Its virtual CPUs run.
    Running,
    /// Stopped by a monitor.
    Paused,
    /// Started with `-S` and not continued yet.
    Prelaunch,
    /// It waits for, or reads, its state.
    InMigrate,
    /// Shut down, QEMU kept alive by `-no-shutdown`.
    Shutdown,
    /// Another state in which the CPUs stand still, in QEMU's word (`io-error`, `guest-panicked`,
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

    /// True where the virtual CPUs run.
    pub fn is_running(&self) -> bool {
        *self == Self::Running
    }
}
