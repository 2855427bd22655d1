//! The texts of the notices of the protocol's core (`keyframe_replication`). The status of a
//! protected VM holds the newest one.

use keyframe_replication::{Notice, PeerRefusal, StandbyLossReason};
use keyframe_session::control::ReplicationRole;

/// Returns the text that tells users of `notice` on a host whose role is `role`.
pub fn notice_text(role: ReplicationRole, notice: &Notice) -> String {
    match notice {
        Notice::Joined(_) if role == ReplicationRole::Standby => "joined".into(),
        Notice::Joined(node) => format!("standby {node} has joined and gets the whole VM"),
        Notice::Protected => "protected: a failure of this host loses nothing".into(),
        Notice::Unprotected(reason @ StandbyLossReason::NotCapturable(_)) => {
            format!("not protected: {}", loss(reason))
        }
        Notice::Unprotected(reason) => format!("the VM runs unprotected: {}", loss(reason)),
        Notice::StandbyLost(reason @ StandbyLossReason::NotCapturable(_)) => {
            format!("not protected: {}; may the VM run without its standby?", loss(reason))
        }
        Notice::StandbyLost(reason) => {
            format!("the standby is lost ({}); may the VM run without?", loss(reason))
        }
        Notice::Stopped => {
            "the VM is paused until the standby, the witness or the fence hook answers".into()
        }
        Notice::Resumed => "the VM runs again, protected as before".into(),
        Notice::WitnessUnreachable => "the witness does not answer".into(),
        Notice::WitnessRefused => "the witness does not know this VM, or has no room for it".into(),
        Notice::FenceFailed(times) => {
            format!("the fence hook has failed ({times}); it is tried again")
        }
        Notice::Deposed(term) => format!("another host runs the VM, in term {}", term.0),
        Notice::CannotSwitchOver => "the VM cannot go over now: it is not protected".into(),
        Notice::SwitchOverFailed => {
            "the VM could not go over; it goes on here if this host may run it".into()
        }
        Notice::Refused(reason) => {
            format!("the other host refuses this one: {}", refusal(*reason))
        }
        Notice::PrimaryLost { held, complete } => format!(
            "the primary is silent; this standby holds {}{}",
            held.map_or_else(|| "nothing".into(), |epoch| format!("epoch {}", epoch.0)),
            if *complete {
                ", and all that clients have seen is in it"
            } else {
                "; clients may have seen more"
            }
        ),
        Notice::TakeOverRefused => {
            "this standby may not take over: the other host has the right to run the VM".into()
        }
        Notice::NeedsForce => "this standby has no arbiter (--witness, --fence-with) that could \
                               let it take over; if the other host is off for sure, run: \
                               keyframe failover --force"
            .into(),
        Notice::NothingHeld => {
            "there is nothing to take over with: no whole epoch has arrived".into()
        }
        Notice::ApplyFailed(reason) => format!("an epoch could not be applied: {reason}"),
        Notice::VmEnded => "the VM has ended".into(),
    }
}

fn refusal(reason: PeerRefusal) -> String {
    match reason {
        PeerRefusal::WrongGroup => "it protects another VM".into(),
        PeerRefusal::WrongConfig => {
            "their settings differ (--detection, --witness, --fence-with have to be alike)".into()
        }
        PeerRefusal::Busy => {
            "it has a standby, or does not know yet whether that one took over".into()
        }
        PeerRefusal::StaleTerm(term) => format!("the VM runs in term {} by now", term.0),
        PeerRefusal::SameRole => "both have the same role".into(),
    }
}

fn loss(reason: &StandbyLossReason) -> String {
    match reason {
        StandbyLossReason::Silence => "it is silent".into(),
        StandbyLossReason::NoData => "data does not get through".into(),
        StandbyLossReason::Sick(reason) => format!("it says: {reason}"),
        StandbyLossReason::Restarted => "it was started again".into(),
        StandbyLossReason::HandOver => "it was to take over, and is silent".into(),
        StandbyLossReason::NotCapturable(reason) => reason.clone(),
        StandbyLossReason::FailedEpochs => "epochs fail".into(),
        StandbyLossReason::Command => "as was asked for".into(),
    }
}
