//! The status of an engine before its first checkpoint.

use crate::SessionOptions;
use crate::control::{CaptureState, EncoderState, EngineStatus, MemberStatus, VmState};
use crate::launch::PreparedSession;
use crate::machines::Member;
use crate::run_dir::path_of;
use keyframe_store::Store;
use keyframe_units::duration_ns;

/// Returns the status of an engine that has not begun.
pub(super) fn first_status(
    store: &Store,
    parts: &PreparedSession,
    options: &SessionOptions,
) -> EngineStatus {
    let members: Vec<_> = parts
        .machines
        .members()
        .iter()
        .enumerate()
        .map(|member| member_status(member, parts))
        .collect();
    EngineStatus {
        vm: parts.name.clone(),
        state: if parts.machines.run() { VmState::Running } else { VmState::Paused },
        vmm: parts.machines.vmm(),
        qemu_pid: members.first().map_or(0, |m| m.qemu_pid),
        engine_pid: std::process::id(),
        store: path_of(store).display().to_string(),
        interval_ns: options.interval.map(duration_ns),
        tuned: None,
        sealed: 0,
        failed: 0,
        last_error: None,
        failing: None,
        store_free_bytes: store.free_bytes(),
        backlog_ns: 0,
        phase: CaptureState::Idle,
        encoder: EncoderState::Sealed,
        queued: 0,
        last: None,
        last_age_ns: None,
        qmp: members.first().map_or_else(String::new, |m| m.qmp.clone()),
        members: if parts.machines.is_group() { members } else { Vec::new() },
        recorder: None,
        recompressor: None,
        replication: None,
    }
}

/// A member and the monitor that its engine uses.
fn member_status((number, member): (usize, &Member), parts: &PreparedSession) -> MemberStatus {
    let path = if member.vm.is_attached() {
        member.vm.monitor().cloned()
    } else if parts.machines.is_group() {
        Some(parts.run_dir.path().join(number.to_string()).join("qmp.sock"))
    } else {
        Some(parts.run_dir.path().join("qmp.sock"))
    };
    MemberStatus {
        name: member.name.clone(),
        qemu_pid: member.vm.pid(),
        qmp: path.map_or_else(String::new, |path| path.display().to_string()),
    }
}
