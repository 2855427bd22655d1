//! A group's checkpoint comes to life: all members are loaded, then all run.

use super::Restore;
use crate::failure::{DONE, FAILED, Failure, Outcome};
use crate::output;
use keyframe_capture::group::split_states;
use keyframe_qemu::restore::{self, Plan, RamSource, Restored};
use keyframe_store::{Loaded, MemberMeta};
use keyframe_units::{Page, PageIndex, PageRange, RamLayout};
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A member as it is in the checkpoint.
struct Kept<'a> {
    meta: &'a MemberMeta,
    ram: RamLayout,
    first: PageIndex,
    device_state: &'a [u8],
    extra: Vec<OsString>,
}

/// A member's RAM out of the group's.
struct MemberRam<'a> {
    group: &'a dyn RamSource,
    first: PageIndex,
}

impl RamSource for MemberRam<'_> {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let first = self.first.0;
        let of_group = PageRange::new(PageIndex(first + range.first.0), range.len_pages);
        self.group.read(of_group, &mut |page, content| sink(PageIndex(page.0 - first), content))
    }
}

/// Restores all members of `loaded`, whose pages `ram` gives, and waits for their ends.
pub fn restore(command: &Restore, loaded: &Loaded, ram: &dyn RamSource, interrupted: &AtomicBool) -> Outcome {
    let started = Instant::now();
    let kept = kept(command, loaded)?;
    let plans = kept.iter().map(|member| plan(command, member)).collect::<Result<Vec<_>, _>>()?;
    let results: Vec<Result<Restored, Failure>> = std::thread::scope(|scope| {
        let start = |(member, plan): (&Kept<'_>, Plan)| {
            let (first, state, name) = (member.first, member.device_state.to_vec(), member.meta.name.clone());
            scope.spawn(move || {
                let ram = MemberRam { group: ram, first };
                restore::start(plan, &ram, &state).map_err(|e| Failure::qemu(&e).about(&name))
            })
        };
        let threads: Vec<_> = kept.iter().zip(plans).map(start).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut members = all_or_none(results)?;
    if !command.paused {
        let ran = members.iter_mut().try_for_each(|m| m.vm().qmp().cont());
        if let Err(error) = ran {
            kill(&mut members);
            return Err(Failure::qemu(&error));
        }
    }
    if !command.quiet {
        let state = if command.paused { "paused" } else { "running" };
        let named = kept.iter().zip(&members).map(|(k, m)| format!("QEMU {} {}", k.meta.name, m.pid()));
        eprintln!(
            "keyframe: checkpoint {} of group {} is {state} after {} ({})",
            loaded.id,
            loaded.meta.vm,
            output::duration(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX)),
            named.collect::<Vec<_>>().join(", ")
        );
    }
    wait(&mut members, interrupted)
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

/// Half a group is none: where one failed, the others are ended.
fn all_or_none(results: Vec<Result<Restored, Failure>>) -> Result<Vec<Restored>, Failure> {
    let (mut members, mut failure) = (Vec::with_capacity(results.len()), None);
    for result in results {
        match result {
            Ok(member) => members.push(member),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    match failure {
        None => Ok(members),
        Some(failure) => {
            kill(&mut members);
            Err(failure)
        }
    }
}

fn kill(members: &mut [Restored]) {
    for member in members {
        // It is the first error that is told.
        let _ = member.kill();
    }
}

/// The members as they are in the checkpoint, each with its share of the extra arguments.
fn kept<'a>(command: &Restore, loaded: &'a Loaded) -> Result<Vec<Kept<'a>>, Failure> {
    let contradicts =
        || Failure::new(format!("checkpoint {}: what it says of its members contradicts itself", loaded.id));
    let members = &loaded.meta.members;
    let rams = loaded.meta.members_ram().ok_or_else(contradicts)?;
    let states = split_states(&loaded.device_state)
        .filter(|s| s.len() == members.len() + 1)
        .ok_or_else(contradicts)?;
    let mut extra: Vec<Vec<OsString>> = command.extra.split(|word| word == "--").map(<[_]>::to_vec).collect();
    if extra.len() > 1 && extra.len() != members.len() {
        return Err(Failure::new(format!(
            "extra arguments for {} VMs, where the group has {}",
            extra.len(),
            members.len()
        ))
        .fix("give them in the order of the members (keyframe show), separated by --"));
    }
    // Without a separator they are for all.
    let for_all = extra.first().cloned().unwrap_or_default();
    extra.resize(members.len(), for_all);
    let kept = members.iter().zip(rams).zip(states).zip(extra);
    Ok(kept
        .map(|(((meta, (ram, first)), device_state), extra)| Kept { meta, ram, first, device_state, extra })
        .collect())
}

fn plan(command: &Restore, member: &Kept<'_>) -> Result<Plan, Failure> {
    command
        .plan_of(&member.meta.machine, &member.ram, member.extra.clone(), true)
        .map_err(|failure| failure.about(&member.meta.name))
}
