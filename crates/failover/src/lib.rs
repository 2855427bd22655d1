//! A VM with a standby on another host: every epoch is there before what it sent leaves.
//!
//! ```text
//!   keyframe protect                                             keyframe standby
//!   ┌ QEMU ─ gate ─▶ network   guard ┐                           ┌ QEMU that waits, its RAM, disks ┐
//!   │ vm: policy, capture ─▶ sending ├── data streams (TLS) ────▶│ standby/streams ─▶ standby/image │
//!   │ primary: core, outputs         ├── control, beat (TLS) ───▶│ standby: core, outputs           │
//!   └───────────────┬────────────────┘                           └──────────────┬──────────────────┘
//!                   └───────────────▶ keyframe witness ◀────────────────────────┘
//! ```
//!
//! Who may do what, and when, is `keyframe_replication`'s, which does no I/O; here it is done. When
//! an epoch is taken is a policy's (`keyframe_scheduling::replication`), how its pages travel
//! `keyframe_transfer`'s.

mod arbitration;
mod busy;
mod frames;
mod gated;
pub mod guard;
mod having;
pub mod launch;
pub mod links;
pub mod primary;
mod sending;
pub mod settings;
pub mod standby;
mod verify;
mod vm;
pub mod witnessing;

use keyframe_replication::{Notice, PeerRefusal};

/// A note that both roles have in common, for users.
pub fn said(note: &Notice) -> String {
    match note {
        Notice::WitnessUnreachable => "the witness does not answer".into(),
        Notice::WitnessRefused => "the witness knows nothing of this VM, or has no room for it".into(),
        Notice::FenceFailed(times) => format!("the fence hook has failed ({times}); it is tried again"),
        Notice::Deposed(term) => format!("another host runs the VM, in term {}", term.0),
        Notice::CannotSwitchOver => "the VM cannot go over now: it is not protected".into(),
        Notice::SwitchOverFailed => "the VM could not go over; it goes on here where it may".into(),
        Notice::Refused(refusal) => format!("the other host does not take this one: {}", refused(*refusal)),
        Notice::PrimaryLost { held, complete } => format!(
            "the primary is silent; this standby holds {}{}",
            held.map_or_else(|| "nothing".into(), |epoch| format!("epoch {}", epoch.0)),
            if *complete { ", and all that clients have seen is in it" } else { "; clients may have seen more" }
        ),
        Notice::TakeOverRefused => "this standby may not take over: the other side has the right".into(),
        Notice::NeedsForce => {
            "nobody decides who takes over (no --witness, no --fence-with): where the other host is off for sure, say: keyframe failover --force"
                .into()
        }
        Notice::NothingHeld => "there is nothing to take over with: no epoch has come whole".into(),
        Notice::ApplyFailed(reason) => format!("an epoch could not be applied: {reason}"),
        Notice::VmEnded => "the VM has ended".into(),
        Notice::Joined(_)
        | Notice::Protected
        | Notice::Unprotected(_)
        | Notice::StandbyLost(_)
        | Notice::Stopped
        | Notice::Resumed => format!("{note:?}"),
    }
}

fn refused(refusal: PeerRefusal) -> String {
    match refusal {
        PeerRefusal::WrongGroup => "it protects another VM".into(),
        PeerRefusal::WrongConfig => {
            "their settings differ (--detection, --witness, --fence-with have to be alike)".into()
        }
        PeerRefusal::Busy => "it has a standby, or has to find out what became of it".into(),
        PeerRefusal::StaleTerm(term) => format!("the VM runs in term {} by now", term.0),
        PeerRefusal::SameRole => "both have the same role".into(),
    }
}
