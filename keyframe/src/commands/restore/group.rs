//! A group's checkpoint comes to life: all members are loaded, the packets between them wait again,
//! then all run.

use super::{Beside, Place, Restore, RestoredDisks, RestoredRam};
use crate::commands::shown_vm::{self, ShownMember, ShownVm};
use crate::failure::paths;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use crate::rights;
use keyframe_machine::VmmKind;
use keyframe_net::InFlight;
use keyframe_qemu::restore::lazy::SharedSource;
use keyframe_qemu::restore::{Lineage, Plan, Restored};
use keyframe_session::group_restore::{
    FailedMember, GroupMember, MovedLans, end_members, members, start_members,
};
use keyframe_session::lans::Lans;
use keyframe_store::{MachineMeta, Meta};
use keyframe_units::CheckpointId;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A group's checkpoint.
pub struct Kept<'a> {
    /// What its VMs are told of it.
    pub lineage: &'a Lineage,
    /// Its number.
    pub id: CheckpointId,
    /// What it tells about itself.
    pub meta: &'a Meta,
    /// The members' device states, and the network's.
    pub device_state: &'a [u8],
    /// The members' RAM.
    pub ram: &'a RestoredRam,
    /// The members' disks.
    pub disks: &'a RestoredDisks,
    /// Where they are found.
    pub place: &'a Place,
    /// When the command began.
    pub began: Instant,
}

/// Restores all members of `group` and waits for their ends.
pub fn restore(command: &Restore, group: &Kept<'_>, interrupted: &AtomicBool) -> Outcome {
    let ram: SharedSource = Arc::clone(&group.ram.source) as _;
    let (members, in_flight) = members(group.id, group.meta, group.device_state, &ram)?;
    let extra = extra_of_each(command, members.len())?;
    let moves = moved_lans(command)?;
    let plans = members
        .iter()
        .zip(extra)
        .map(|(member, extra)| plan(command, group, member, extra, &moves))
        .collect::<Result<Vec<_>, _>>()?;
    // Before the VMs: they connect as they start.
    let mut lans = network(&in_flight, &moves)?;
    let started = start_members(&members, plans, command.lazy);
    let mut restored = started.map_err(|FailedMember { name, source }| {
        command.failure(&source, &group.ram.source, false).about(&name)
    })?;
    rights::trace_only();
    let pids: Vec<_> =
        members.iter().zip(&restored).map(|(m, fresh)| (m.meta.pid, fresh.pid())).collect();
    let runs = lans
        .as_mut()
        .map_or(Ok(()), |lans| lans.restore(&in_flight, &pids, |lan| moves.now(lan)))
        .map_err(Failure::from)
        .and_then(|()| if command.paused { Ok(()) } else { run_all(&mut restored) });
    if let Err(failure) = runs {
        end_members(&mut restored);
        return Err(failure);
    }
    if let Some(lans) = &mut lans {
        // Of VMs that are paused, QEMU keeps them until they run.
        lans.release();
    }
    group.ram.bar.finish_and_clear();
    if let Some(first) = restored.first() {
        let member = |(member, fresh): (&GroupMember<'_>, &Restored)| ShownMember {
            name: member.meta.name.clone(),
            qemu_pid: fresh.pid(),
        };
        let shown = ShownVm {
            disks: group.disks.directory().map(shown_vm::text),
            members: members.iter().zip(&restored).map(member).collect(),
            ..group.place.shown(group.id, first.pid())
        };
        if let Err(failure) =
            group.place.tell(command, group.id, VmmKind::Qemu, &shown.paused(command.paused))
        {
            end_members(&mut restored);
            return Err(failure);
        }
    }
    command.say(|| {
        let state = if command.paused { "paused" } else { "running" };
        let after = output::duration(keyframe_units::elapsed_ns(group.began));
        let named =
            members.iter().zip(&restored).map(|(k, m)| format!("QEMU {} {}", k.meta.name, m.pid()));
        let named = named.collect::<Vec<_>>().join(", ");
        format!(
            "checkpoint {} of group {} is {state} after {after} ({named})",
            group.id, group.meta.vm
        )
    });
    let ended = wait(&mut restored, interrupted);
    if let Some(lans) = lans {
        lans.end();
    }
    ended
}

fn run_all(restored: &mut [Restored]) -> Result<(), Failure> {
    restored.iter_mut().try_for_each(|m| m.vm().qmp().start_loaded()).map_err(|e| Failure::qemu(&e))
}

/// The networks that were recorded, empty, at the places that `moves` has for them.
fn network(in_flight: &InFlight, moves: &MovedLans) -> Result<Option<Lans>, Failure> {
    let mut paths: Vec<PathBuf> =
        in_flight.ports.iter().map(|p| moves.now(&p.port.lan).into()).collect();
    paths.dedup();
    if paths.is_empty() {
        return Ok(None);
    }
    let started = Lans::start(&paths).map_err(|error| {
        Failure::from(error).fix(
            "where the network is in use, put it elsewhere: --lan OLD=NEW, for each of its sockets",
        )
    });
    started.map(Some)
}

/// Waits until all have ended.
fn wait(members: &mut [Restored], interrupted: &AtomicBool) -> Outcome {
    loop {
        let mut ends = Vec::with_capacity(members.len());
        for member in members.iter_mut() {
            ends.push(member.try_wait().map_err(|e| Failure::qemu(&e))?);
        }
        if let Some(ends) = ends.into_iter().collect::<Option<Vec<_>>>() {
            let Some(failed) = ends.iter().find(|end| !end.success()) else { return Ok(DONE) };
            eprintln!("keyframe: QEMU ended with {failed}");
            return Ok(FAILED);
        }
        if interrupted.load(Ordering::Relaxed) {
            let killed: Vec<_> = members.iter_mut().map(Restored::kill).collect();
            killed.into_iter().collect::<Result<(), _>>().map_err(|e| Failure::qemu(&e))?;
            return Ok(DONE);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The extra arguments of each of `count` members.
fn extra_of_each(command: &Restore, count: usize) -> Result<Vec<Vec<OsString>>, Failure> {
    let mut extra: Vec<Vec<OsString>> =
        command.extra.split(|word| word == "--").map(<[_]>::to_vec).collect();
    if extra.len() > 1 && extra.len() != count {
        let text = format!("extra arguments for {} VMs, where the group has {count}", extra.len());
        return Err(Failure::new(text)
            .fix("give them in the order of the members (keyframe show), separated by --"));
    }
    // Without a separator they are for all.
    let for_all = extra.first().cloned().unwrap_or_default();
    extra.resize(count, for_all);
    Ok(extra)
}

/// The networks that `--lan` names.
fn moved_lans(command: &Restore) -> Result<MovedLans, Failure> {
    let parse = |text: &String| {
        let (from, to) = text.split_once('=').ok_or_else(|| {
            Failure::new(format!("--lan {text}: no socket and its new place"))
                .fix("write --lan OLD=NEW")
        })?;
        Ok((paths::absolute(Path::new(from))?, paths::absolute(Path::new(to))?))
    };
    command.lan.iter().map(parse).collect::<Result<_, Failure>>().map(MovedLans::new)
}

fn plan(
    command: &Restore,
    group: &Kept<'_>,
    member: &GroupMember<'_>,
    extra: Vec<OsString>,
    moves: &MovedLans,
) -> Result<Plan, Failure> {
    let disks = group.disks.server(group.meta, &format!("{}/", member.meta.name))?;
    // Lazily, one thread starts them all.
    let spawned = (!command.lazy).then_some(rights::trace_only as fn());
    let beside = Beside { disks, lineage: group.lineage, spawned, monitor: None };
    let machine = &member.meta.machine;
    let machine = MachineMeta { user_command: moves.line(machine), ..machine.clone() };
    command
        .plan(&machine, &member.ram, extra, true, beside)
        .map_err(|failure| failure.about(&member.meta.name))
}
