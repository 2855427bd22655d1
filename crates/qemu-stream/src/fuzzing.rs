//! Entry points for the fuzzers in `fuzz/`. They take any bytes and must neither panic nor allocate
//! memory out of proportion to their input. They are not part of the interface.

use crate::{
    MigrationReader, check, convert, count_instructions, cpu_registers, display, low_memory,
    with_due_timer, written_by,
};
use keyframe_machine::{Accelerator, Processor};
use keyframe_units::PAGE_BYTES;

/// Reads and converts `state` as a device state.
///
/// # Panics
///
/// If a conversion makes a malformed state from a well-formed one.
pub fn device_state(state: &[u8]) {
    let is_valid = check(state).is_ok();
    for to in [Accelerator::Kvm, Accelerator::Tcg] {
        if let (true, Ok(converted)) = (is_valid, convert(state, to)) {
            assert!(check(&converted).is_ok(), "the converted state is malformed");
        }
    }
    let _ = (low_memory(state), display(state));
    for processor in Processor::ALL {
        let _ = (written_by(state, processor), cpu_registers(state, processor));
        let _ = count_instructions(state, processor);
    }
    if let (true, Ok(prepared)) = (is_valid, with_due_timer(state, 3)) {
        assert!(check(&prepared).is_ok(), "the prepared state is malformed");
    }
}

/// Reads `bytes` as a migration stream.
///
/// # Panics
///
/// If the reader gives a page outside its block.
pub fn migration(bytes: &[u8]) {
    let Ok(reader) = MigrationReader::begin(bytes) else { return };
    let blocks: Vec<u64> = reader.blocks().iter().map(|block| block.used_bytes).collect();
    let found = reader.finish(&mut |block, offset, _| {
        assert!(offset + PAGE_BYTES as u64 <= blocks[block], "a page outside its block");
        Ok(())
    });
    if let Ok(state) = found {
        device_state(&state);
    }
}
