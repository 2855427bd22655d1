//! The states that a status shows. Their JSON names are part of the control protocol.

use keyframe_capture::CapturePhase as Phase;
use keyframe_vmm::RunState;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Defines an enum whose variants have one name in JSON and in print.
macro_rules! named_states {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $type {
            $($(#[$variant_doc])* #[serde(rename = $name)] $variant,)+
        }

        impl $type {
            /// Returns the name in JSON, and as users read it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

named_states! {
    /// Whether a VM runs.
    VmState {
        /// The VM runs, or a member of the group.
        Running = "running",
        /// The VM is paused.
        #[default]
        Paused = "paused",
        /// The guest has shut down, and QEMU is still there.
        Shutdown = "shutdown",
        /// A disk failed.
        IoError = "io-error",
        /// QEMU or KVM failed.
        InternalError = "internal-error",
        /// The guest's watchdog expired.
        Watchdog = "watchdog",
        /// The guest panicked.
        GuestPanicked = "guest-panicked",
        /// The guest sleeps.
        Suspended = "suspended",
        /// QEMU's monitor is lost.
        Unknown = "unknown",
    }
}

impl VmState {
    /// The state of a VM that stands still in `state`.
    pub(crate) fn of_standing(state: &RunState) -> Self {
        let named = [
            Self::IoError,
            Self::InternalError,
            Self::Watchdog,
            Self::GuestPanicked,
            Self::Suspended,
        ];
        match state {
            RunState::ShutDown => Self::Shutdown,
            RunState::Other(name) => {
                named.into_iter().find(|state| state.name() == name).unwrap_or(Self::Paused)
            }
            RunState::Running | RunState::Paused => Self::Paused,
        }
    }

    /// True if a VM in `state` stands still although no client paused it.
    pub(crate) fn stands_by_itself(state: &RunState) -> bool {
        Self::of_standing(state) != Self::Paused
    }
}

named_states! {
    /// The phase of the capture in progress.
    CaptureState {
        /// No capture is in progress.
        #[default]
        Idle = "idle",
        /// Pages are copied while the guest runs.
        Precopy = "precopy",
        /// The VM is about to be paused.
        Stopping = "stopping",
        /// The VM is paused.
        Paused = "paused",
        /// The device state is saved.
        DeviceState = "device-state",
        /// The last dirty pages are copied or frozen.
        Copied = "copied",
        /// The VM runs again.
        Resumed = "resumed",
    }
}

named_states! {
    /// The phase of the checkpoint that is being encoded.
    EncoderState {
        /// Pages go to the store.
        Encoding = "encoding",
        /// The store makes the checkpoint durable.
        Sealing = "sealing",
        /// The checkpoint is sealed.
        #[default]
        Sealed = "sealed",
    }
}

named_states! {
    /// The reason why no checkpoint is sealed at present.
    FailingCause {
        /// The store has no space.
        StoreFull = "store full",
        /// The last error tells.
        #[default]
        Other = "checkpoints fail",
    }
}

named_states! {
    /// The role of a host in a replication.
    ReplicationRole {
        /// The host runs the VM.
        #[default]
        Primary = "primary",
        /// The host holds the VM's epochs and can take over.
        Standby = "standby",
    }
}

named_states! {
    /// The state of a primary or a standby.
    ReplicationState {
        /// The engine has just been started.
        #[default]
        Starting = "starting",
        /// A primary without a standby.
        Unprotected = "unprotected",
        /// The standby receives all of RAM.
        Syncing = "syncing",
        /// A primary that ends the protection.
        Closing = "closing",
        /// A primary that agrees on the protection with its standby.
        Pairing = "pairing",
        /// A primary with a standby that could take over.
        Protected = "protected",
        /// A primary that has stopped its VM.
        Stopped = "stopped",
        /// A primary that hands its VM over.
        SwitchingOver = "switching over",
        /// A primary that has handed its VM over.
        HandedOver = "handed over",
        /// A primary whose VM has ended.
        Ended = "ended",
        /// A standby without a primary.
        Waiting = "waiting",
        /// A standby that receives epochs and may not take over yet.
        Following = "following",
        /// A standby that takes over if its primary fails.
        ReadyToTakeOver = "ready to take over",
        /// A standby that asks whether it may take over.
        Asking = "asking",
        /// A standby that has taken over.
        Active = "active",
    }
}

impl CaptureState {
    /// Returns the state of a capture in `phase`. Phases of the encoder count as idle.
    pub fn of(phase: Phase) -> Self {
        match phase {
            Phase::Precopy => Self::Precopy,
            Phase::Stopping => Self::Stopping,
            Phase::Paused => Self::Paused,
            Phase::DeviceState => Self::DeviceState,
            Phase::Copied => Self::Copied,
            Phase::Resumed => Self::Resumed,
            Phase::Encoding | Phase::Sealing | Phase::Sealed => Self::Idle,
        }
    }
}

impl EncoderState {
    /// Returns the state of an encoder in `phase`.
    pub fn of(phase: Phase) -> Self {
        match phase {
            Phase::Sealing => Self::Sealing,
            Phase::Sealed => Self::Sealed,
            _ => Self::Encoding,
        }
    }
}
