//! Checks that a started QEMU has the checkpoint's machine.

use super::Plan;
use crate::vm::{machine_type, target};
use crate::{Error, Qmp, Result, ramblock};
use keyframe_units::{RamBlock, RamLayout};

/// Compares the new machine with the checkpoint's. Fails if they differ.
pub(super) fn check_machine(qmp: &mut Qmp, plan: &Plan) -> Result<()> {
    let source = &plan.source;
    let (expected, found) = (source.machine.processor, target(qmp, &plan.binary)?);
    if found != expected {
        let (what, expected) = ("processor".into(), expected.to_string());
        return Err(Error::DifferentMachine { what, expected, found: found.to_string() });
    }
    let found = machine_type(qmp)?;
    if found != source.machine.machine_type {
        let what = "machine type".into();
        return Err(Error::DifferentMachine {
            what,
            expected: source.machine.machine_type.clone(),
            found,
        });
    }
    let backends = ramblock::backend_ids(qmp)?;
    let found = ramblock::layout(qmp, &backends)?;
    same_blocks(&source.ram, &found)
}

/// Fails unless both have the same blocks with the same kinds and sizes, in any order.
pub(super) fn same_blocks(expected: &RamLayout, found: &RamLayout) -> Result<()> {
    let find =
        |layout: &RamLayout, name: &str| layout.blocks().iter().find(|b| b.name == name).cloned();
    let names = expected.blocks().iter().chain(found.blocks()).map(|b| b.name.as_str());
    for name in names {
        let (a, b) = (find(expected, name), find(found, name));
        let key = |block: &RamBlock| (block.kind, block.total_bytes);
        if a.as_ref().map(key) != b.as_ref().map(key) {
            let text = |block: Option<RamBlock>| {
                block.map_or("absent".into(), |b| format!("{} bytes", b.total_bytes))
            };
            let what = format!("RAM block {name}");
            return Err(Error::DifferentMachine { what, expected: text(a), found: text(b) });
        }
    }
    Ok(())
}
