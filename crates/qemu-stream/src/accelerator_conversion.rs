//! Converts a device state between KVM and TCG.
//!
//! QEMU writes the same sections under both accelerators. Some fields have another meaning, and
//! some are kept by one accelerator only:
//!
//! ```text
//!                            KVM to TCG                           TCG to KVM
//!   kvmclock section         removed                              absent: TCG guests do not use it
//!   timer, cpu.tsc           VM's counter := processor's          processor's := VM's counter
//!   cpu_common, apic         woken if an interrupt is pending;    mp_state := halted, or waiting
//!                            waits for SIPI if not started        for SIPI
//!   cpu.interrupt_injected   given back to the local APIC
//!   cpu.xstate_bv                                                 := XCR0; KVM drops other parts
//!   i8254                    next edge not before the clock
//! ```
//!
//! Invariant: a state that the other accelerator cannot continue is refused with the reason.
//! Nothing is dropped silently.
//!
//! Not handled here: whether the processors have the same features (the driver compares them), and
//! the contents of other devices, which are the same under both.

use crate::section_bodies::{
    APIC, Body, CPU, CPU_COMMON, Layout, PIC, PIT, TIMER, apic, cpu, cpu_common, pic, pit, timer,
};
use crate::sections::{Section, sections};
use crate::{Result, StreamError};
use keyframe_machine::{Accelerator, Processor};
use std::ops::Range;

const KVMCLOCK: &str = "kvmclock";
/// Bit of `interrupt_request`: a controller has an interrupt for this processor.
const REQUEST_HARD: u32 = 2;
// KVM's values of `mp_state`.
const MP_INIT_RECEIVED: u32 = 2;
const MP_HALTED: u32 = 3;
const MP_SIPI_RECEIVED: u32 = 4;
/// No interrupt, no exception.
const NONE: u32 = u32::MAX;
/// Optional part of `apic`, as bytes of the stream: the processor waits for SIPI.
const WAITS_FOR_SIPI: &[u8] = b"\x05\x09apic_sipi\0\0\0\x01\0\0\0\0\0\0\0\x01";

/// Fix for a condition that lasts a moment.
const OTHER_CHECKPOINT: &str = "restore the checkpoint before or after this one";
const PARAVIRTUAL: &str = "restore it under KVM; to move a VM to TCG, start it with kvm=off after \
                           its -cpu model (-cpu qemu64,kvm=off), so that its guest does not use \
                           features that only KVM has";
const NESTED: &str =
    "restore it under the accelerator that it ran under, or end the guest's own VMs first";

/// Optional parts of `cpu` that prevent a conversion: start of the name, reason, fix.
const REFUSED_PARTS: &[(&str, &str, &str)] = &[
    ("cpu/steal_time_msr", "the guest uses KVM's steal time", PARAVIRTUAL),
    ("cpu/async_pf", "the guest uses KVM's asynchronous page faults", PARAVIRTUAL),
    ("cpu/async_pv_eoi", "the guest uses KVM's paravirtual end of interrupt", PARAVIRTUAL),
    ("cpu/msr_hyperv", "the guest uses KVM's Hyper-V interfaces", PARAVIRTUAL),
    ("cpu/xen_vcpu", "the guest uses KVM's Xen interfaces", PARAVIRTUAL),
    ("cpu/kvm_nested_state", "the guest runs VMs of its own", NESTED),
    ("cpu/svm_guest", "the guest runs VMs of its own", NESTED),
    ("cpu/svn_npt", "the guest runs VMs of its own", NESTED),
    ("cpu/nested_state", "the guest runs VMs of its own", NESTED),
    (
        "cpu/exception_info",
        "an exception was being delivered to the guest at that instant",
        OTHER_CHECKPOINT,
    ),
    ("cpu/triple_fault", "the guest was about to reset at that instant", OTHER_CHECKPOINT),
];

/// A replacement of bytes of a state.
pub(crate) struct Edit {
    /// The bytes to replace; empty for an insertion.
    pub range: Range<usize>,
    /// The new bytes.
    pub bytes: Vec<u8>,
}

/// Returns the accelerator that wrote the device state `state` of a guest with the processor
/// `processor`. `None` if the state does not tell.
///
/// Error: [`StreamError::DeviceState`] for a malformed state.
pub fn written_by(state: &[u8], processor: Processor) -> Result<Option<Accelerator>> {
    crate::check(state)?;
    if !processor.has_kvm() {
        return Ok(Some(Accelerator::Tcg));
    }
    let all = sections(state)?;
    if all.iter().any(|s| s.name == KVMCLOCK) {
        return Ok(Some(Accelerator::Kvm));
    }
    let Some(first) = all.iter().find(|s| s.name == CPU.name) else { return Ok(None) };
    let body = Body::new(state, first, &CPU)?;
    // KVM sets it to 1 at reset, and QEMU does not write it then; TCG leaves it at 0.
    let polls = body.part("cpu/poll_control_msr") == Some(&[0; 8]);
    Ok((polls && body.part("cpu/tsc_khz").is_none()).then_some(Accelerator::Tcg))
}

/// Converts the device state `state`, written under the other accelerator, for `to`.
///
/// Errors: [`StreamError::Conversion`] if `to` cannot continue the state exactly;
/// [`StreamError::DeviceState`] for a malformed state.
pub fn convert(state: &[u8], to: Accelerator) -> Result<Vec<u8>> {
    crate::check(state)?;
    let all = sections(state)?;
    let machine = ConvertedSections::find(state, &all)?;
    let mut edits = Vec::new();
    match to {
        Accelerator::Tcg => {
            edits.extend(
                all.iter()
                    .filter(|s| s.name == KVMCLOCK)
                    .map(|s| Edit { range: s.whole.clone(), bytes: Vec::new() }),
            );
            machine.to_tcg(&mut edits)?;
        }
        Accelerator::Kvm => machine.to_kvm(&mut edits)?,
    }
    Ok(apply(state, edits))
}

/// Applies `edits`, which must not overlap, to `state`.
pub(crate) fn apply(state: &[u8], mut edits: Vec<Edit>) -> Vec<u8> {
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let (mut out, mut done) = (Vec::with_capacity(state.len() + 64), 0);
    for edit in edits {
        out.extend_from_slice(state.get(done..edit.range.start).unwrap_or_default());
        out.extend_from_slice(&edit.bytes);
        done = edit.range.end;
    }
    out.extend_from_slice(state.get(done..).unwrap_or_default());
    out
}

/// [`StreamError::Conversion`] with this reason and fix.
pub(crate) fn refused(reason: impl Into<String>, fix: &str) -> StreamError {
    StreamError::Conversion { reason: reason.into(), fix: fix.into() }
}

/// The sections of one virtual processor.
struct CpuSections<'a> {
    number: u32,
    common: Body<'a>,
    cpu: Body<'a>,
    apic: Option<Body<'a>>,
}

/// The sections that a conversion reads and edits.
struct ConvertedSections<'a> {
    timer: Body<'a>,
    processors: Vec<CpuSections<'a>>,
    pics: Vec<Body<'a>>,
    pits: Vec<Body<'a>>,
}

impl<'a> ConvertedSections<'a> {
    fn find(state: &'a [u8], all: &'a [Section]) -> Result<Self> {
        let of = |layout: &'static Layout| {
            let found = all.iter().filter(|s| s.name == layout.name);
            found.map(|s| Body::new(state, s, layout)).collect::<Result<Vec<_>>>()
        };
        let missing = |problem: &str| StreamError::DeviceState {
            offset: state.len() as u64,
            problem: problem.into(),
        };
        let timer = of(&TIMER)?.pop().ok_or_else(|| missing("it has no section timer"))?;
        let (cpus, commons, apics) = (of(&CPU)?, of(&CPU_COMMON)?, of(&APIC)?);
        // The sections of a processor follow each other, but its APIC has another instance number.
        let is_complete =
            cpus.len() == commons.len() && (apics.is_empty() || apics.len() == cpus.len());
        if cpus.is_empty() || !is_complete {
            return Err(missing("the sections of its processors are incomplete"));
        }
        let apics = apics.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let processors = cpus
            .into_iter()
            .zip(commons)
            .zip(apics)
            .map(|((cpu, common), apic)| CpuSections {
                number: cpu.section.instance,
                common,
                cpu,
                apic,
            })
            .collect();
        let found = Self { timer, processors, pics: of(&PIC)?, pits: of(&PIT)? };
        found.refuse_unknown_parts()?;
        Ok(found)
    }

    /// Refuses a state with an optional part that the other accelerator may not load.
    fn refuse_unknown_parts(&self) -> Result<()> {
        if let Some(part) = &self.timer.unknown {
            let reason = format!("the VM's clock counts instructions ({part}), which only TCG can");
            return Err(refused(reason, "restore it under TCG"));
        }
        for processor in &self.processors {
            let parts = [Some(&processor.cpu), Some(&processor.common), processor.apic.as_ref()];
            if let Some(part) = parts.into_iter().flatten().find_map(|body| body.unknown.as_deref())
            {
                let known = REFUSED_PARTS.iter().find(|(name, ..)| part.starts_with(name));
                let what = known
                    .map_or("its state has a part that the other accelerator may not load", |k| {
                        k.1
                    });
                let fix =
                    known.map_or("restore it under the accelerator that it ran under", |k| k.2);
                return Err(refused(
                    format!("processor {}: {what} ({part})", processor.number),
                    fix,
                ));
            }
        }
        match self.pics.iter().chain(&self.pits).find_map(|body| body.unknown.as_deref()) {
            Some(part) => Err(refused(
                format!("an interrupt controller's state holds {part}"),
                "restore it under the accelerator that it ran under",
            )),
            None => Ok(()),
        }
    }

    fn to_tcg(&self, edits: &mut Vec<Edit>) -> Result<()> {
        let mut counter = 0;
        for processor in &self.processors {
            processor.refuse_paravirtual()?;
            processor.refuse_nested()?;
            counter = counter.max(processor.cpu.u64(cpu::TSC));
            self.interrupts_to_tcg(processor, edits)?;
        }
        // Under TCG all processors read the VM's counter.
        edits.push(set(&self.timer, timer::TICKS, &counter.to_be_bytes()));
        let now = self.timer.u64(timer::CLOCK);
        for body in &self.pits {
            let next = body.u64(pit::NEXT_TRANSITION) as i64;
            // KVM writes when the current period began, which may be long ago; TCG would deliver
            // each edge since then.
            if next != -1 && next < now as i64 {
                edits.push(set(body, pit::NEXT_TRANSITION, &now.to_be_bytes()));
            }
        }
        Ok(())
    }

    fn interrupts_to_tcg(&self, processor: &CpuSections<'a>, edits: &mut Vec<Edit>) -> Result<()> {
        let injected = processor.cpu.u32(cpu::INTERRUPT_INJECTED);
        let mut request = processor.common.u32(cpu_common::INTERRUPT_REQUEST) & !REQUEST_HARD;
        if injected != NONE {
            processor.give_back_interrupt(injected, edits)?;
            request |= REQUEST_HARD;
        } else if self.is_interrupt_pending(processor) {
            request |= REQUEST_HARD;
        }
        edits.push(set(&processor.common, cpu_common::INTERRUPT_REQUEST, &request.to_be_bytes()));
        match processor.cpu.u32(cpu::MP_STATE) {
            MP_SIPI_RECEIVED => {
                let reason =
                    format!("processor {} was being started at that instant", processor.number);
                Err(refused(reason, OTHER_CHECKPOINT))
            }
            1 | MP_INIT_RECEIVED => {
                edits.push(set(&processor.common, cpu_common::HALTED, &1u32.to_be_bytes()));
                edits.push(set(&processor.cpu, cpu::MP_STATE, &0u32.to_be_bytes()));
                let Some(apic) = processor.apic.as_ref().filter(|a| a.part("apic_sipi").is_none())
                else {
                    return Err(refused(
                        format!("processor {} cannot be started", processor.number),
                        OTHER_CHECKPOINT,
                    ));
                };
                let end = apic.section.body.end;
                edits.push(Edit { range: end..end, bytes: WAITS_FOR_SIPI.to_vec() });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether a controller has an interrupt that `processor` takes as soon as it enables
    /// interrupts. KVM finds out by itself; TCG expects a request bit.
    fn is_interrupt_pending(&self, processor: &CpuSections<'_>) -> bool {
        let Some(local) = &processor.apic else { return self.is_pic_pending() };
        let base = local.u32(apic::BASE);
        let on = base & 0x800 != 0;
        let from_pic = !on || local.u32(apic::LINT0) & 0x1_0000 == 0;
        let bootstrap = base & 0x100 != 0;
        (on && local.u32(apic::SPURIOUS) & 0x100 != 0 && is_apic_pending(local))
            || (bootstrap && from_pic && self.is_pic_pending())
    }

    /// Whether the first controller has an interrupt, as in QEMU's `pic_get_irq`. The second one is
    /// a line of the first.
    fn is_pic_pending(&self) -> bool {
        let Some(body) = self.pics.iter().find(|b| b.section.instance == 0) else { return false };
        let add = u32::from(body.u8(pic::PRIORITY_ADD) & 7);
        let priority = |lines: u8| lines.rotate_right(add).trailing_zeros();
        let waiting = body.u8(pic::IRR) & !body.u8(pic::IMR);
        let mut in_service = body.u8(pic::ISR);
        if body.u8(pic::SPECIAL_MASK) != 0 {
            in_service &= !body.u8(pic::IMR);
        }
        if body.u8(pic::SPECIAL_FULLY_NESTED) != 0 {
            in_service &= !4;
        }
        priority(waiting) < priority(in_service)
    }

    fn to_kvm(&self, edits: &mut Vec<Edit>) -> Result<()> {
        let counter = self.timer.u64(timer::TICKS);
        for processor in &self.processors {
            processor.refuse_nested()?;
            edits.push(set(&processor.cpu, cpu::TSC, &counter.to_be_bytes()));
            // TCG does not keep which parts of the floating-point state are in use. x87 and SSE
            // need no bit in XCR0.
            let parts = processor.cpu.u64(cpu::XCR0) | 3;
            edits.push(set(&processor.cpu, cpu::XSTATE_BV, &parts.to_be_bytes()));
            let waits = processor
                .apic
                .as_ref()
                .and_then(|a| a.part("apic_sipi")?.last_chunk::<4>().copied());
            let state = if waits.is_some_and(|w| w != [0; 4]) {
                MP_INIT_RECEIVED
            } else if processor.common.u32(cpu_common::HALTED) != 0 {
                MP_HALTED
            } else {
                0
            };
            edits.push(set(&processor.cpu, cpu::MP_STATE, &state.to_be_bytes()));
        }
        Ok(())
    }
}

impl CpuSections<'_> {
    /// Refuses a guest that uses a feature that only KVM has.
    fn refuse_paravirtual(&self) -> Result<()> {
        let number = self.number;
        if self.cpu.u64(cpu::SYSTEM_TIME) & 1 != 0 {
            return Err(refused(
                format!("processor {number}: the guest's clock is KVM's (kvmclock)"),
                PARAVIRTUAL,
            ));
        }
        if self.cpu.u64(cpu::CR4) & 3 != 0 {
            let fix =
                "restore it under KVM; for TCG, start the VM with vme=off after its -cpu model";
            return Err(refused(
                format!("processor {number}: the guest uses virtual 8086 mode's extensions"),
                fix,
            ));
        }
        if self.apic.as_ref().is_some_and(|a| a.u32(apic::BASE) & 0x400 != 0) {
            let fix = "restore it under KVM; for TCG, start the VM with kvm=off,x2apic=off after \
                       its -cpu model";
            return Err(refused(
                format!("processor {number}: the guest uses its local APIC as x2APIC"),
                fix,
            ));
        }
        let is_delivering = self.cpu.u32(cpu::EXCEPTION_NR) != NONE
            || cpu::EVENTS.iter().any(|offset| self.cpu.u8(*offset) != 0);
        if is_delivering {
            let reason = format!(
                "processor {number}: an exception or an NMI was being delivered to the guest at \
                 that instant"
            );
            return Err(refused(reason, OTHER_CHECKPOINT));
        }
        Ok(())
    }

    /// Refuses a guest that runs VMs of its own.
    fn refuse_nested(&self) -> Result<()> {
        let vmx = self.cpu.u64(cpu::CR4) & 1 << 13 != 0;
        let svm = self.cpu.u64(cpu::EFER) & 1 << 12 != 0;
        if vmx || svm {
            return Err(refused(
                format!("processor {}: the guest runs VMs of its own", self.number),
                NESTED,
            ));
        }
        Ok(())
    }

    /// Gives an interrupt that was acknowledged and not yet delivered back to the local APIC.
    fn give_back_interrupt(&self, vector: u32, edits: &mut Vec<Edit>) -> Result<()> {
        let reason = format!(
            "processor {}: interrupt {vector:#x} was being delivered to the guest at that instant",
            self.number
        );
        let local = self
            .apic
            .as_ref()
            .filter(|_| vector < 256)
            .ok_or_else(|| refused(&*reason, OTHER_CHECKPOINT))?;
        let (word, bit) = (vector as usize / 32 * 4, 1 << (vector % 32));
        let in_service = local.u32(apic::ISR + word);
        if in_service & bit == 0 {
            // It came from an i8259, whose in-service bit depends on its mode.
            return Err(refused(reason, OTHER_CHECKPOINT));
        }
        let requested = local.u32(apic::IRR + word) | bit;
        edits.push(set(local, apic::ISR + word, &(in_service & !bit).to_be_bytes()));
        edits.push(set(local, apic::IRR + word, &requested.to_be_bytes()));
        edits.push(set(&self.cpu, cpu::INTERRUPT_INJECTED, &NONE.to_be_bytes()));
        Ok(())
    }
}

/// Whether the local APIC holds an interrupt of a higher class than the processor's priority.
fn is_apic_pending(local: &Body<'_>) -> bool {
    let highest = |offset: usize| {
        let words = (0..8).rev().map(|w| (w, local.u32(offset + w as usize * 4)));
        words
            .into_iter()
            .find(|(_, bits)| *bits != 0)
            .map(|(w, bits)| w * 32 + 31 - bits.leading_zeros())
    };
    let class = |vector: Option<u32>| vector.unwrap_or(0) >> 4;
    let at = class(highest(apic::ISR)).max(u32::from(local.u8(apic::TPR)) >> 4);
    class(highest(apic::IRR)) > at
}

/// An edit that sets the field at `offset` to `bytes`.
pub(crate) fn set(body: &Body<'_>, offset: usize, bytes: &[u8]) -> Edit {
    let at = body.section.body.start + offset;
    Edit { range: at..at + bytes.len(), bytes: bytes.to_vec() }
}

#[cfg(test)]
mod tests;
