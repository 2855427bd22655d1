//! Asks QEMU what the audit of a machine has to know ([`keyframe_qemu_audit`]).

use crate::{Error, Qmp, Result};
use keyframe_machine::Processor;
use keyframe_qemu_audit::{
    Disks, MachineAnswers, PLUGGED, blocked_reasons, blocker, direct_files, findings,
    is_discarding, machine_finding, name_and_kind, unsavable, unsaved,
};
use keyframe_vmm::AuditFinding;
use serde_json::{Value, json};

/// Returns all findings about the machine behind `qmp`, with its processor and its type.
///
/// The disks behind the nodes `minded` are captured already: they cause no finding.
pub(crate) fn audit(
    qmp: &mut Qmp,
    (processor, machine_type): (Processor, &str),
    (disks, minded): (Disks<'_>, &[String]),
) -> Result<Vec<AuditFinding>> {
    let mut found: Vec<_> = machine_finding(processor, machine_type).into_iter().collect();
    let needs_version = processor.timers_saved_since().is_some();
    let version = needs_version.then(|| qmp.execute("query-version", None)).transpose()?;
    found.extend(unsaved(processor, version.as_ref()));
    let blocks = qmp.execute("query-block", None)?;
    let Some(blocks) = blocks.as_array() else {
        return Err(qmp.unexpected("query-block", &blocks));
    };
    let nodes = block_nodes(qmp)?;
    let memory_backends = &qmp.execute("query-memdev", None)?;
    let devices = &devices(qmp)?;
    let network = &qmp.hmp("info network")?;
    let answers = MachineAnswers { blocks, nodes: &nodes, memory_backends, devices, network };
    found.extend(findings(answers, (disks, minded)));
    Ok(found)
}

/// Returns a finding for each part of a running machine whose state QEMU cannot save.
pub(crate) fn blockers(qmp: &mut Qmp) -> Result<Vec<AuditFinding>> {
    let answer = qmp.execute("query-migrate", None)?;
    Ok(blocked_reasons(&answer).map(blocker).collect())
}

/// Whether the machine has a device that discards guest RAM. One can still be plugged in later.
pub(crate) fn discards(qmp: &mut Qmp) -> Result<bool> {
    Ok(devices(qmp)?.iter().any(is_discarding))
}

/// The machine's devices, as `qom-list` lists them.
fn devices(qmp: &mut Qmp) -> Result<Vec<Value>> {
    let [with_id, without_id] = PLUGGED.map(children_of);
    let answers = qmp.ask_all([with_id, without_id, children_of("/machine/unattached")])?;
    children(qmp, answers)
}

fn children_of(path: &str) -> (&'static str, Value) {
    ("qom-list", json!({ "path": path }))
}

fn children<const N: usize>(qmp: &Qmp, answers: [Value; N]) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for answer in answers {
        match answer {
            Value::Array(children) => all.extend(children),
            other => return Err(qmp.unexpected("qom-list", &other)),
        }
    }
    Ok(all)
}

/// Returns QEMU's answer to `question`, and whether a device that discards guest RAM is among those
/// that can be plugged in.
pub(crate) fn ask_with_plugged(
    qmp: &mut Qmp,
    question: (&'static str, Value),
) -> Result<(Value, bool)> {
    let [with_id, without_id] = PLUGGED.map(children_of);
    let [answer, with_id, without_id] = qmp.ask_all([question, with_id, without_id])?;
    let discards = children(qmp, [with_id, without_id])?.iter().any(is_discarding);
    Ok((answer, discards))
}

/// All nodes of the block layer.
fn block_nodes(qmp: &mut Qmp) -> Result<Vec<Value>> {
    match qmp.execute("query-named-block-nodes", Some(json!({ "flat": true })))? {
        Value::Array(nodes) => Ok(nodes),
        other => Err(qmp.unexpected("query-named-block-nodes", &other)),
    }
}

/// Whether QEMU reads an image by direct I/O.
pub(crate) fn reads_directly(qmp: &mut Qmp) -> Result<bool> {
    Ok(!direct_files(&block_nodes(qmp)?).is_empty())
}

/// Refuses a device that was plugged in and with which QEMU ends when it saves its state.
///
/// Error: [`Error::Unsavable`].
pub(crate) fn require_savable(qmp: &mut Qmp) -> Result<()> {
    let answers = qmp.ask_all(PLUGGED.map(children_of))?;
    let plugged = children(qmp, answers)?;
    let unsavable = |(name, kind): (&str, &'_ str)| {
        let how = unsavable::how_qemu_ends(kind)?;
        Some(Error::Unsavable { name: name.into(), kind: kind.into(), how: how.into() })
    };
    plugged.iter().filter_map(name_and_kind).find_map(unsavable).map_or(Ok(()), Err)
}
