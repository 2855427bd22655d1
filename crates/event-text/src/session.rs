//! The lines for the events of a session.

use crate::Importance::{self, Always, Detail, Usual};
use crate::shell_word;
use keyframe_disk_capture::DiskStep;
use keyframe_inspect::entry::Entry;
use keyframe_session::event::{Helper, SessionStart, Step};
use keyframe_session::{CheckpointError, Event, GuestEnd};
use keyframe_store::CheckpointId;
use keyframe_units::{error_chain, human_bytes, human_duration};
use keyframe_vm_disks::overlay_directory::LeftOverlay;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

/// The line for an event of a rehearsal.
fn rehearsal(event: &Event) -> Option<(Importance, String)> {
    Some(match event {
        Event::Rehearsed { vmm, took_ns } => {
            let took = human_duration(*took_ns);
            (
                Detail,
                format!("a restore was rehearsed in {took}: a second {vmm} loaded the checkpoint"),
            )
        }
        Event::NotRehearsed { reason } => {
            (Detail, format!("a restore was not rehearsed: {reason}"))
        }
        Event::RehearsalFailed { error } => {
            let text = format!(
                "warning: a rehearsal of a restore failed, perhaps for a reason of this host; try \
                 `keyframe restore latest --paused`: {}",
                error_chain(&**error)
            );
            (Always, text)
        }
        _ => return None,
    })
}

/// The line about writes of an earlier VM that a run does not use.
fn left_overlay(overlay: &LeftOverlay) -> String {
    let LeftOverlay { base, directory, vm, began } = overlay;
    let (overlay, image) = (shell_word(directory), shell_word(Path::new(base)));
    format!(
        "note: VM {vm} (started {began:.0}) has written to {base}, and this run begins with the image as it \
         is, without those writes. To go on from them, end this run and use keyframe restore. To write \
         them into the image, end this run and use: keyframe commit --overlay {overlay} --base {image} \
         --in-place. With --disk bitmap, or under attach, a guest writes into its image"
    )
}

const NEW_RUN: &str = "RAM was plugged in or out, or a disk was plugged, resized or given another file: a new run begins";
const PLACE_REGAINED: &str = "the checkpoint server had given this run's place away: a new run begins, with a complete checkpoint";

/// Returns the line for `event`, and its importance; `None` if the event has no line.
pub fn line(event: &Event) -> Option<(Importance, String)> {
    let said = match event {
        Event::Started(start) => (Usual, greeting(start)),
        Event::Sealed(entry) => (Detail, sealed(entry)),
        Event::Late { id, backlog_ns } => {
            let late = human_duration(*backlog_ns);
            let text = format!(
                "checkpoint {id} began {late} late: the one before was still being encoded"
            );
            (Usual, text)
        }
        Event::Failed { failure, owed_pages } => {
            (Always, format!("{failure} ({owed_pages} pages)"))
        }
        Event::IntervalTuned { interval_ns, why } => {
            (Usual, format!("a checkpoint every {}: {why}", human_duration(*interval_ns)))
        }
        Event::Rehearsed { .. } | Event::NotRehearsed { .. } | Event::RehearsalFailed { .. } => {
            return rehearsal(event);
        }
        Event::NewRun => (Usual, NEW_RUN.into()),
        Event::PlaceRegained => (Usual, PLACE_REGAINED.into()),
        Event::MachineFollowed { changes } => {
            let changes: Vec<_> = changes.iter().map(ToString::to_string).collect();
            (Usual, format!("{}: a restore makes the changed machine", changes.join(", ")))
        }
        Event::HelperRestarted { helper, pid } => (
            Always,
            format!("{} had ended and was started again (pid {pid})", helper_name(*helper)),
        ),
        Event::HelperNotRestarted { helper, error } => {
            let text = format!(
                "{} has ended and cannot be started again; it is tried again: {}",
                helper_name(*helper),
                error_chain(&**error)
            );
            (Always, text)
        }
        Event::LeftPauseEnded => {
            let text = "the VM was still paused by a Keyframe that was killed together with its \
                        watchdog; it runs again";
            (Always, text.into())
        }
        Event::PausedForDisks => {
            let text = "no process serves the VM's disks: the VM is paused until one does, so that \
                        its guest gets no errors";
            (Always, text.into())
        }
        Event::StoppedForSpace { store } => {
            let text = format!(
                "{} has no space for the guest's writes: QEMU has stopped the VM, which runs on when \
                 there is space again",
                store.display()
            );
            (Always, text)
        }
        Event::ResumedWithSpace => (Always, "there is space again: the VM runs on".into()),
        Event::StoppedByLeftOutDisk { error } => (Always, error.to_string()),
        Event::ResumedWithDisks => (Always, "the VM's disks are served again: it runs on".into()),
        Event::MemberLost { vm } => {
            let text = format!(
                "VM {vm} has ended: no more checkpoints of the group are taken; the others run on"
            );
            (Always, text)
        }
        Event::GuestEnded { vm, end, last } => (Usual, guest_ended(vm, *end, last.as_ref())),
        Event::LogLost => (Always, format!("{}; the VM runs on", CheckpointError::LogLost)),
        Event::NoFinalCheckpoint { error } => {
            (Always, format!("no checkpoint at the recording's end: {}", error_chain(&**error)))
        }
        Event::AuditDiffers { id, pages, first } => {
            let text = format!(
                "AUDIT FAILED: checkpoint {id} differs from RAM in {pages} pages, first {}",
                first.0
            );
            (Always, text)
        }
        Event::AuditFailed { id, error } => {
            (Always, format!("audit of checkpoint {id}: {}", error_chain(&**error)))
        }
        Event::RolledBack { vm, checkpoint, fast } => {
            let importance = if *fast { Detail } else { Usual };
            (importance, format!("VM {vm} is back at checkpoint {checkpoint}"))
        }
        Event::MemoryShort(short) => {
            let whose = if short.is_limited { "of its memory cgroup's limit" } else { "of memory" };
            let (left, staging) = (short.left_bytes >> 20, short.staging_bytes >> 20);
            let text = format!(
                "warning: the VM leaves {left} MiB {whose}, so copied pages get {staging} MiB, \
                 and checkpoints may take longer; a larger limit helps"
            );
            (Always, text)
        }
        Event::RightsKept { error } => {
            (Always, format!("warning: keeps more rights than it needs: {}", error_chain(&**error)))
        }
        other => return preparation(other).or_else(|| store(other)).or_else(|| end(other)),
    };
    Some(said)
}

/// Events before the first checkpoint.
fn preparation(event: &Event) -> Option<(Importance, String)> {
    let said = match event {
        Event::AuditWarning(finding) => {
            (Always, format!("warning: {}: {}", finding.subject, finding.reason))
        }
        Event::HiddenOptions { error } => {
            let fix = error.fix().unwrap_or_default();
            (Always, format!("note: {}; {fix}", error_chain(&**error)))
        }
        Event::LeftoverOverlay(overlay) => (Always, left_overlay(overlay)),
        Event::UnguardedAttach { qemu_pid } => return unguarded(*qemu_pid),
        Event::LooseLink { vm, option } => {
            let text = format!(
                "warning: VM {vm}: {option}: packets on their way there at a checkpoint are lost \
                 at a restore; between members connect it to a --lan"
            );
            (Always, text)
        }
        Event::PacketBuffer { vm, option } => {
            let text = format!(
                "warning: VM {vm}: {option}: packets that wait in it at a checkpoint are lost at \
                 a restore; leave it out, or connect the NIC to a --lan without it"
            );
            (Always, text)
        }
        Event::MediaNotServed { error } => {
            let text = format!(
                "note: QEMU reads the guest's read-only media itself ({}), so the guest waits \
                 longer for them",
                error_chain(&**error)
            );
            (Usual, text)
        }
        Event::RecordingNote(note) => (Usual, format!("note: {note}")),
        _ => return None,
    };
    Some(said)
}

/// Events of the store, and of the threads that tend it.
fn store(event: &Event) -> Option<(Importance, String)> {
    let said = match event {
        Event::StoreGrows { store, free_bytes, keep_within } => {
            (Usual, growth(store, *free_bytes, *keep_within))
        }
        Event::SpaceShrinks { store, free_bytes, lasts } => {
            let text = format!(
                "warning: the disk of {} is full in about {} at this rate ({} free): bound the store \
                 with --keep-within TIME, forget checkpoints, or make room",
                store.display(),
                humantime::format_duration(Duration::from_secs(lasts.as_secs())),
                human_bytes(*free_bytes)
            );
            (Always, text)
        }
        Event::TornCheckpoint { torn, quarantine } => {
            let text = format!(
                "checkpoint {} was not durable when the machine went down, and was set aside \
                 ({}): {}",
                torn.id,
                quarantine.display(),
                torn.problem
            );
            (Always, text)
        }
        Event::SyncFailed { from } => {
            let text = format!(
                "a sync of checkpoints from {from} on has failed since the machine was started: \
                 they can be read now, and the next power loss may take them; keep what matters \
                 with: keyframe copy --to STORE2"
            );
            (Always, text)
        }
        Event::DurabilityIgnored { is_remote, .. } => (Usual, durability_ignored(*is_remote)),
        Event::CloneKept { clone, error } => {
            (Always, format!("flight recorder: remove {}: {error}", clone.display()))
        }
        Event::FlightRecorderFailed { store, error } => {
            let text = format!(
                "flight recorder: {}: {}; it is tried again",
                store.display(),
                error_chain(&**error)
            );
            (Always, text)
        }
        Event::RecompressionFailed { store, error } => {
            (Always, format!("warning: recompress: {}: {}", store.display(), error_chain(&**error)))
        }
        Event::NotRecompressed { bytes } => {
            let text = format!(
                "{} in packs are not recompressed yet: keyframe prune --recompress makes them \
                 smaller",
                human_bytes(*bytes)
            );
            (Usual, text)
        }
        _ => return None,
    };
    Some(said)
}

/// Events at the end, and steps that failed on the way.
fn end(event: &Event) -> Option<(Importance, String)> {
    let said = match event {
        Event::StepFailed { step, error } => {
            (Always, format!("warning: {}: {}", step_name(*step), error_chain(&**error)))
        }
        Event::CountNotReached { count, sealed } => {
            let text = format!(
                "the {count} checkpoints of --count cannot be reached: {sealed} are sealed"
            );
            (Always, text)
        }
        Event::VmEnded { vm } => (Usual, format!("VM {vm} has ended")),
        Event::QemuFailed { vmm, exit } => (Always, format!("{vmm} ended with {exit}")),
        Event::Detached { vm, vmm, qemu_pid } => {
            (Usual, format!("detached: VM {vm} runs on without checkpoints ({vmm} {qemu_pid})"))
        }
        Event::Kept { vm, vmm, qemu_pid, monitor } => {
            let text = format!(
                "VM {vm} runs on without checkpoints: {vmm} {qemu_pid}, monitor {}",
                monitor.display()
            );
            (Usual, text)
        }
        Event::WritesKept { directory } => {
            let text = format!(
                "what the guest has written to its disks is in {}; the images are as they were",
                directory.display()
            );
            (Usual, text)
        }
        Event::Finished { has_qemu_failed: true, .. } => return None,
        Event::Finished { sealed, failed, guest_end, .. } => {
            let end = match guest_end {
                Some(GuestEnd::PoweredOff) => "; the guest was powered off",
                Some(GuestEnd::Reset) => "; the guest was reset",
                Some(GuestEnd::Panicked) => "; the guest panicked",
                Some(GuestEnd::WatchdogExpired) => "; the guest's watchdog expired",
                None => "",
            };
            (Usual, format!("{sealed} checkpoints sealed, {failed} failed{end}"))
        }
        _ => return None,
    };
    Some(said)
}

fn guest_ended(vm: &str, end: GuestEnd, last: Option<&(CheckpointId, String)>) -> String {
    let what = match end {
        GuestEnd::PoweredOff => "was powered off",
        GuestEnd::Reset => "was reset",
        GuestEnd::Panicked => "panicked",
        GuestEnd::WatchdogExpired => "was stopped by its watchdog",
    };
    let last = match last {
        Some((id, tag)) => format!("its last state is checkpoint {id}, tagged {tag}"),
        None => "its last state could not be captured".into(),
    };
    format!("the guest of VM {vm} {what}: {last}")
}

fn helper_name(helper: Helper) -> &'static str {
    match helper {
        Helper::Watchdog => "the watchdog process",
        Helper::DiskServer => "the process that serves the disks",
        _ => "a helper process",
    }
}

fn greeting(start: &SessionStart) -> String {
    let every = match start.interval {
        _ if start.is_replay => "replaying its recording: checkpoints".into(),
        Some(interval) => format!("a checkpoint every {}", humantime::format_duration(interval)),
        None => "checkpoints by `keyframe take`".into(),
    };
    let attached = start.attach_stopped_ns.map_or_else(String::new, |ns| {
        format!(", whose main thread stood still for {}", human_duration(ns))
    });
    let qemu = |(name, pid): &(String, u32)| {
        let of = if start.is_group { format!(" {name}") } else { String::new() };
        format!("{}{of} {pid}", start.vmm)
    };
    let qemus: Vec<_> = start.vms.iter().map(qemu).collect();
    format!(
        "{} {}: {every} into {} ({}{attached})",
        if start.is_group { "group" } else { "VM" },
        start.name,
        start.store.display(),
        qemus.join(", ")
    )
}

fn growth(path: &Path, free_bytes: Option<u64>, keep_within: Option<Duration>) -> String {
    let free = free_bytes.map_or_else(String::new, |free| format!(" ({} free)", human_bytes(free)));
    let store = path.display();
    match keep_within {
        Some(within) => {
            let within = humantime::format_duration(within);
            format!("{store} grows to what the checkpoints of the last {within} hold{free}")
        }
        None if keyframe_store::backend::served::is_url(path) => format!(
            "{store} grows with each checkpoint until its disk is full{free}; forget and prune on its host"
        ),
        None => format!(
            "{store} grows with each checkpoint until its disk is full{free}; bound it with --keep-within TIME"
        ),
    }
}

fn sealed(entry: &Entry) -> String {
    format!(
        "checkpoint {}: pause {}, {} dirty pages, {} stored",
        entry.id,
        human_duration(entry.pause_ns),
        entry.dirty_pages,
        human_bytes(entry.stored_bytes)
    )
}

/// Returns the warning that QEMU is not guarded, once in the life of this process: an engine
/// attaches again when RAM is plugged in.
pub fn unguarded(qemu_pid: u32) -> Option<(Importance, String)> {
    static ONCE: Once = Once::new();
    let mut said = None;
    ONCE.call_once(|| {
        said = Some(format!(
            "warning: the VMM (pid {qemu_pid}) lacks the code by which its main thread gives itself back should Keyframe be \
             killed (SIGKILL, out of memory) in the moment of taking hold of it: that would end it. It went well this \
             time; RAM that is plugged in is taken hold of again"
        ));
    });
    said.map(|text| (Always, text))
}

fn durability_ignored(is_remote: bool) -> String {
    let why = if is_remote {
        "what goes to another host, or to object storage, is durable at once"
    } else {
        "the store's file system cannot hold writes back"
    };
    format!(
        "--durability has no effect here: {why}, so that each checkpoint is durable before it is \
         listed"
    )
}

fn step_name(step: Step) -> &'static str {
    match step {
        Step::Disks(step) => disk_step_name(step),
        Step::RepeatWrites => "resume the VM that was stopped for want of space",
        Step::FinishGuestEnd => "have QEMU do what its command line says for the guest's end",
        Step::CountInstructions => "count the guest's instructions",
        Step::TellReady => "tell the program that waits for it that the VM is ready",
        Step::VolunteerAsVictim => "have the kernel end keyframe first if memory runs out",
        Step::WithdrawAsVictim => {
            "have the kernel treat keyframe as any process if memory runs out"
        }
        Step::SaveSseFlags => {
            "add the SSE exception flags of the guest's processors to checkpoints"
        }
        Step::RemoveFormerDisks => "remove what was written to the disks before",
        Step::DescribeDisks => "describe which checkpoint the disks come from",
        Step::AllowRunning => "tell the watchdog that the VM may run",
        _ => "go on",
    }
}

fn disk_step_name(step: DiskStep) -> &'static str {
    match step {
        DiskStep::KeepImages => "an image must be put back, or no checkpoint of this run restores",
        DiskStep::GiveBackBlocks => "give the blocks of a failed checkpoint to the next one",
        DiskStep::ReleaseBlocks => "release the blocks of a checkpoint",
        DiskStep::RestartDisks => "begin a complete capture of the VM's disks",
        DiskStep::DropBitmap => "drop the bitmap of a sealed checkpoint",
        DiskStep::CloseExports => "remove the exports by which a disk was read",
        DiskStep::DetachDisks => "remove from QEMU what captured the VM's disks",
        DiskStep::RemoveFile => "remove a file",
        _ => "go on",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_durability_is_explained() {
        let text = durability_ignored(true);
        assert!(text.contains("--durability has no effect") && text.contains("object storage"));
        assert!(!durability_ignored(false).contains("object storage"));
    }
}
