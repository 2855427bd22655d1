//! A switch that connects the virtual NICs of several VMs. Keyframe can hold it, so that it takes
//! checkpoints of a group of VMs at one instant without losing or duplicating a packet.
//!
//! ```text
//!   QEMU a ── -netdev stream ──┐                          ┌── control: hold, quiesce, collect,
//!   QEMU b ── -netdev stream ──┼─ Port ─ Fabric ─ Switch ─┤            release, restore
//!   QEMU c ── -netdev stream ──┘          (pure)          └── Remote, in the engine's process
//!
//!   hold ▶ quiesce ▶ [all VMs stop] ▶ collect ▶ [checkpoints] ▶ [all VMs resume] ▶ release
//!                                        │
//!                                     InFlight
//!                                        ▼
//!                       [new VMs, new switch] hold ▶ restore ▶ [VMs run] ▶ release
//! ```
//!
//! At the instant of the checkpoint a packet is in exactly one place: in the sender's NIC or
//! memory, in the switch's queue (and so in [`InFlight`]), or in the receiver's NIC or memory. It
//! is never in QEMU's own queues, which no checkpoint holds: `quiesce` empties those of the
//! receivers (the module `port` explains how), `collect` those of the senders.
//!
//! Invariants:
//! 1. The guests' network does not depend on the engine: the switch is a process of its own. A hold
//!    ends if its controller dies, or if it lasts too long.
//! 2. If a packet may be missing, `collect` returns an error, and the engine gives the checkpoint
//!    up.
//! 3. No input from a guest, a QEMU or a controller makes the switch panic or take memory without
//!    bound.
//!
//! The crate also holds the gate before a protected VM's network ([`GateRemote`]).
//!
//! Left out: stopping VMs; where [`InFlight`] is stored; any protocol above Ethernet.

mod error;
mod fabric;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod in_flight;
mod listener;
mod port;
mod remote;
mod server;
mod switch;
mod table;
mod wire;

pub use error::{Error, Result};
pub use fabric::SwitchLimits;
pub use frame::{FRAME_BYTES_MAX, Frame};
pub use gate::{GateNic, GateRemote, GateStatus, serve_gate};
pub use in_flight::{
    IN_FLIGHT_BYTES_MAX, IN_FLIGHT_VERSION, InFlight, PORTS_MAX, PortId, PortInFlight, StandInPort,
};
pub use remote::SwitchRemote;
pub use server::{serve, serve_until};
pub use switch::{ClosedPort, HOLD_MAX, LANS_MAX, PortStatus, Switch, SwitchPorts};
