//! An Ethernet switch between VMs that can be held, so that a group of them is checkpointed at one
//! instant without a packet lost or doubled.
//!
//! ```text
//!   QEMU a ── -netdev stream ──┐                       ┌── control: hold, quiesce, collect, release, restore
//!   QEMU b ── -netdev stream ──┼─ Port ─ Fabric ─ Switch ─┤
//!   QEMU c ── -netdev stream ──┘          (pure)       └── Remote, in the engine's process
//!
//!   hold ▶ quiesce ▶ [all VMs stop] ▶ collect ▶ [checkpoints of all VMs] ▶ [all VMs go on] ▶ release
//!                                        │
//!                                     InFlight ──▶ [fresh VMs on a fresh switch] hold ▶ restore ▶ [VMs run] ▶ release
//! ```
//!
//! A guest's packet is, at the instant of the checkpoint, in exactly one place: in the sender's NIC
//! or memory, in the switch's queue (and so in [`InFlight`]), or in the receiver's. It is never in
//! QEMU's own queues, which no checkpoint holds: `quiesce` sees to the receiving side (the module
//! `port` tells how), `collect` to the sending side.
//!
//! Invariants:
//! 1. The guests' network does not depend on the engine: the switch is a process of its own, and a hold whose controller
//!    dies, or that lasts too long, ends.
//! 2. Where a packet may be missing, `collect` says so and the checkpoint is given up. It never guesses.
//! 3. Nothing that a guest, a QEMU or a controller sends makes it panic or take memory without bound.
//!
//! Beside it the gate before a protected VM's network ([`GateRemote`]).
//!
//! Left out: stopping VMs, and where [`InFlight`] is kept (the binary's); any protocol above
//! Ethernet.

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
pub use fabric::Limits;
pub use frame::{FRAME_BYTES_MAX, Frame};
pub use gate::{GateLook, GateNic, GateRemote, serve_gate};
pub use in_flight::{
    IN_FLIGHT_BYTES_MAX, IN_FLIGHT_VERSION, InFlight, PORTS_MAX, PortId, PortInFlight,
};
pub use remote::Remote;
pub use server::{serve, serve_until};
pub use switch::{ClosedPort, HOLD_MAX, LANS_MAX, PortStatus, Ports, Switch};
