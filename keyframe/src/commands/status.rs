//! `keyframe status`: how running engines go.

use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use keyframe_machine::VmmKind;
use keyframe_session::control::{
    EngineRequest, EngineResponse, EngineStatus as Shown, ReplicationRole, ReplicationStatus,
    client,
};
use keyframe_session::run_dir;
use keyframe_session::run_dir::{About, Orphan, ReplayedPoint, RunKind};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Show how running VMs go
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The list also has VMs that were restored, branched, or brought up by goto. In JSON they follow the others, as
{vm, kind, store, checkpoint, qemu_pid, keyframe_pid} with the kind clone, restored or goto; vmm is there if it is not QEMU. Those of
goto also have {recording, instruction}. The others have no kind. If such a VM is under keyframe attach, the list has it twice.
FAILING says that the newest checkpoint is not sealed, and why; in JSON the field failing is there.

Examples:
  keyframe status
  keyframe status --store S
  keyframe status --name web --json"
)]
pub struct Status {
    /// Only this VM
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Only VMs whose checkpoints go into this store or come from it
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// One of the array.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Engine(&'a Shown),
    Other(&'a About),
    Orphan(&'a Orphan),
}

/// The text if there is nothing to show.
pub const NOTHING_RUNS: &str = "nothing runs; start with: keyframe run --store STORE -- qemu-system-x86_64 ... (or firecracker ...)";

impl Status {
    /// Asks each engine and prints the answers.
    pub fn run(&self) -> Outcome {
        let mut others = run_dir::without_engine()?;
        let is_named = |vm: &String| self.name.as_ref().is_none_or(|name| name == vm);
        others.retain(|(_, about)| is_named(&about.vm) && self.is_of_store(&about.store));
        let mut orphans = run_dir::orphans()?;
        // The store of a VM whose engine died is unknown.
        orphans.retain(|orphan| is_named(&orphan.vm) && self.store.is_none());
        let engines = match &self.name {
            Some(name) => match run_dir::find(Some(name)) {
                Err(_) if !others.is_empty() || !orphans.is_empty() => Vec::new(),
                found => vec![found?],
            },
            None => run_dir::all()?,
        };
        let mut all = Vec::new();
        for (_, answer) in
            client::ask_all(&engines, &EngineRequest::Status, Duration::from_secs(10))
        {
            match answer {
                Ok(EngineResponse::Status(status)) if self.is_of_store(&status.store) => {
                    all.push(*status);
                }
                Ok(EngineResponse::Status(_)) => {}
                Ok(other) => return Err(Failure::new(format!("unexpected answer: {other:?}"))),
                // It may have ended between the look and the question.
                Err(e) if self.name.is_some() => return Err(e.into()),
                Err(_) => {}
            }
        }
        if self.json {
            let others = others.iter().map(|(_, about)| Entry::Other(about));
            let orphans = orphans.iter().map(Entry::Orphan);
            output::json(
                &all.iter().map(Entry::Engine).chain(others).chain(orphans).collect::<Vec<_>>(),
            )?;
            return Ok(DONE);
        }
        for status in &all {
            output::print_line(&text(status))?;
        }
        for (place, about) in &others {
            let has_engine = all.iter().any(|status| status.qemu_pid == about.qemu_pid);
            output::print_line(&without_engine(about, place, has_engine))?;
        }
        for Orphan { vm, vmm, qemu_pid, qmp, .. } in &orphans {
            let option = if *vmm == VmmKind::Qemu { "--qmp" } else { "--api" };
            output::print_line(&format!(
                "{vm}: runs on without an engine ({vmm} {qemu_pid}): that has died, or was told to leave it; no checkpoints are taken\n  \
                 end it: keyframe stop --name {vm}; take it up again: keyframe attach --store STORE {option} {} {qemu_pid}",
                qmp.display()
            ))?;
        }
        if all.is_empty() && others.is_empty() && orphans.is_empty() {
            match &self.store {
                None => output::print_line(NOTHING_RUNS)?,
                Some(store) => output::print_line(&format!(
                    "no VM runs whose checkpoints are in {}; all VMs: keyframe status",
                    store.display()
                ))?,
            }
        }
        Ok(DONE)
    }

    fn is_of_store(&self, store: &str) -> bool {
        self.store.as_ref().is_none_or(|meant| client::is_same_store(store, meant))
    }
}

/// The line of a VM that `branch`, `restore` or `goto` started. `has_engine` says that `attach` takes
/// checkpoints of it.
fn without_engine(about: &About, place: &Path, has_engine: bool) -> String {
    let About { vm, checkpoint, store, vmm, qemu_pid, .. } = about;
    let checkpoints = if has_engine { "under keyframe attach" } else { "without checkpoints" };
    match (about.kind, &about.replayed) {
        (RunKind::Clone, _) => format!(
            "{vm}: a clone of checkpoint {checkpoint} of {store} ({vmm} {qemu_pid}), {checkpoints}; sockets and console in {}",
            place.display()
        ),
        (RunKind::Goto, Some(ReplayedPoint { recording, instruction })) => format!(
            "{vm}: brought up by goto before instruction {instruction} of {} ({vmm} {qemu_pid})",
            recording.display()
        ),
        (RunKind::Restored | RunKind::Goto, _) => {
            format!(
                "{vm}: restored from checkpoint {checkpoint} of {store} ({vmm} {qemu_pid}), {checkpoints}"
            )
        }
    }
}

/// Returns the lines about the replication of a protected VM or a standby.
fn replicated(s: &Shown, r: &ReplicationStatus) -> String {
    let of = r.protects.as_ref().map_or_else(String::new, |vm| format!(" of VM {vm}"));
    let peer = if r.connected { "connected" } else { "not connected" };
    let mut lines = vec![
        format!(
            "{}: {}{of}, {} (QEMU {}, engine {})",
            s.vm, r.role, r.state, s.qemu_pid, s.engine_pid
        ),
        format!("  other host  {peer}, term {}", r.term),
    ];
    if !r.note.is_empty() {
        lines.push(format!("  last news   {}", r.note));
    }
    let number =
        |epoch: Option<u64>| epoch.map_or_else(|| "none".into(), |epoch| epoch.to_string());
    if r.epochs > 0 {
        lines.push(format!(
            "  epochs      {}; newest {} ({}): {} pages, {} on the wire",
            r.epochs,
            number(r.epoch),
            r.reason,
            r.pages,
            output::bytes(r.wire_bytes)
        ));
        lines.push(format!(
            "  on the wire {} of {} dirty pages so far",
            output::bytes(r.all_wire_bytes),
            output::bytes(r.all_raw_bytes)
        ));
    }
    if r.role == ReplicationRole::Standby {
        lines.push(format!("  holds       epoch {}", number(r.acknowledged)));
        return lines.join("\n");
    }
    if !r.reasons.is_empty() {
        lines.push(format!("  taken for   {}", reasons(&r.reasons)));
    }
    if r.epochs > 0 {
        lines.push(format!(
            "  lag         epoch {} is on the standby; pause {}, then {} until it was; {} between epochs",
            number(r.acknowledged),
            output::duration(r.pause_ns),
            output::duration(r.transfer_ns),
            output::duration(r.epoch_ns)
        ));
    }
    lines.push(format!(
        "  packets     {} held ({}), {} passed, {} dropped",
        r.held_packets,
        output::bytes(r.held_bytes),
        r.passed_packets,
        r.dropped_packets
    ));
    if let Some(ns) = r.took_over_ns {
        lines.push(format!("  took over   after {}", output::duration(ns)));
    }
    lines.join("\n")
}

/// Why epochs were taken, what is most frequent first.
fn reasons(counts: &BTreeMap<String, u64>) -> String {
    let mut all: Vec<_> = counts.iter().collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let all: Vec<_> = all.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    all.join(", ")
}

/// Returns the status as lines for users.
pub fn text(s: &Shown) -> String {
    let every = s
        .interval_ns
        .map_or("by command only".into(), |ns| format!("every {}", output::duration(ns)));
    let qemu = if s.members.is_empty() {
        s.qemu_pid.to_string()
    } else {
        s.members
            .iter()
            .map(|m| format!("{} {}", m.name, m.qemu_pid))
            .collect::<Vec<_>>()
            .join(", ")
    };
    if let Some(replication) = &s.replication {
        return replicated(s, replication);
    }
    let failing = s.failing.map_or_else(String::new, |cause| format!(", FAILING: {cause}"));
    let free =
        s.store_free_bytes.map_or_else(String::new, |b| format!(" ({} free)", output::bytes(b)));
    let mut lines = vec![
        format!(
            "{}: {} ({} {qemu}, engine {}), {}{failing}",
            s.vm, s.state, s.vmm, s.engine_pid, s.phase
        ),
        format!("  store       {}{free}, checkpoints {every}", s.store),
        format!("  sealed      {}, failed {}", s.sealed, s.failed),
    ];
    if let (Some(last), Some(age)) = (&s.last, s.last_age_ns) {
        lines.push(format!(
            "  newest      {} ({} ago): pause {}, {} dirty pages, {} stored",
            last.id,
            output::duration(age),
            output::duration(last.pause_ns),
            last.dirty_pages,
            output::bytes(last.stored_bytes)
        ));
    }
    if let Some(why) = &s.tuned {
        lines.push(format!("  budget      {why}"));
    }
    if s.queued > 1 {
        lines.push(format!("  queued      {} checkpoints wait for the encoder", s.queued));
    }
    if s.backlog_ns > 0 {
        lines.push(format!("  backlog     {}", output::duration(s.backlog_ns)));
    }
    lines.extend(background_lines(s));
    if let Some(error) = &s.last_error {
        lines.push(format!("  last error  {error}"));
    }
    lines.join("\n")
}

/// The line about a failure of work that is tried again.
fn retried(error: &str) -> String {
    format!("              it failed: {error}; it is tried again")
}

/// The lines about the flight recorder and the recompressor, which work beside the checkpoints.
fn background_lines(s: &Shown) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(recorder) = &s.recorder {
        lines.push(format!(
            "  recorder    keeps {}: {} checkpoints kept, {} forgotten, {} packs given back",
            output::duration(recorder.keep_within_ns),
            recorder.kept,
            recorder.forgotten,
            recorder.freed_packs
        ));
        lines.extend(recorder.last_error.as_deref().map(retried));
    }
    if let Some(recompressor) = &s.recompressor {
        lines.push(match &recompressor.off {
            Some(why) => format!("  recompress  not: {why}"),
            None => format!(
                "  recompress  {}: {} packs recompressed, {} to go",
                if recompressor.at_work { "at work" } else { "rests" },
                recompressor.recompressed_packs,
                output::bytes(recompressor.cold_bytes)
            ),
        });
        lines.extend(recompressor.last_error.as_deref().map(retried));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_session::control::{RecompressorStatus, RecorderStatus};

    /// As an engine of a version that had neither answers.
    const PLAIN: &str = r#"{"vm":"web","state":"running","qemu_pid":1,"engine_pid":2,"store":"/s","interval_ns":1000000000,
        "tuned":null,"sealed":3,"failed":0,"last_error":null,"backlog_ns":0,"phase":"idle","encoder":"sealed","queued":0,
        "last":null,"last_age_ns":null,"qmp":""}"#;

    #[test]
    fn what_works_beside_a_run_is_shown_and_only_where_it_was_asked_for() {
        let mut status: Shown = serde_json::from_str(PLAIN).unwrap();
        let plain = (text(&status), serde_json::to_value(&status).unwrap());
        assert!(!plain.0.contains("recorder") && !plain.0.contains("recompress"), "{}", plain.0);
        assert!(plain.1.get("recorder").is_none() && plain.1.get("recompressor").is_none());
        status.recorder = Some(RecorderStatus {
            keep_within_ns: 600_000_000_000,
            kept: 41,
            forgotten: 17,
            freed_packs: 5,
            last_error: Some("no space left".into()),
        });
        status.recompressor = Some(RecompressorStatus {
            recompressed_packs: 7,
            cold_bytes: 3 << 30,
            ..Default::default()
        });
        let shown = text(&status);
        for word in [
            "41 checkpoints kept, 17 forgotten, 5 packs given back",
            "no space left; it is tried again",
        ] {
            assert!(shown.contains(word), "{shown}");
        }
        assert!(
            shown.contains("recompress  rests: 7 packs recompressed, 3.0 GiB to go"),
            "{shown}"
        );
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(
            (&json["recorder"]["forgotten"], &json["recompressor"]["cold_bytes"]),
            (&17.into(), &(3u64 << 30).into())
        );
        let back: Shown = serde_json::from_value(json).unwrap();
        assert_eq!(
            (back.recorder, back.recompressor),
            (status.recorder.clone(), status.recompressor.clone())
        );
        status.recompressor = Some(RecompressorStatus {
            off: Some("the store is on another host".into()),
            ..Default::default()
        });
        assert!(text(&status).contains("recompress  not: the store is on another host"));
    }
}
