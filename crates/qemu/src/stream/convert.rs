//! Device state of one accelerator, made into that of the other.
//!
//! QEMU writes the same sections under both, but part of what they say means something else, and
//! part is only kept by one:
//!
//! ```text
//!                        kvm -> tcg                            tcg -> kvm
//!   kvmclock section     left out                              (absent: no guest under TCG uses it)
//!   timer, cpu.tsc       counter of the VM = processor's       processor's = counter of the VM
//!   cpu_common, apic     woken if an interrupt waits;          mp_state = halted, or waiting to be started
//!                        not started yet: waits for that
//!   cpu.interrupt_       taken back to the controller
//!     injected
//!   cpu.xstate_bv                                              all of XCR0: KVM drops what is not named there
//!   i8254                next edge no earlier than now
//! ```
//!
//! Invariant: what the other accelerator cannot go on with is refused with its reason; nothing is
//! dropped in silence.
//!
//! Left out: whether the processors have the same features (`accel` compares those), and the inside
//! of other devices: they are QEMU's own under both.

use super::registers::{
    APIC, Body, CPU, CPU_COMMON, Layout, PIC, PIT, TIMER, apic, cpu, cpu_common, pic, pit, timer,
};
use super::sections::{Section, sections};
use crate::accel::Accelerator;
use crate::{Error, Result};
use std::ops::Range;

const KVMCLOCK: &str = "kvmclock";
/// In `interrupt_request`: a controller has an interrupt for this processor.
const REQUEST_HARD: u32 = 2;
/// KVM's states of a processor.
const MP_INIT_RECEIVED: u32 = 2;
const MP_HALTED: u32 = 3;
const MP_SIPI_RECEIVED: u32 = 4;
const NONE: u32 = u32::MAX;
/// The local APIC waits to be started: an optional part as it stands in the stream.
const WAITS_FOR_SIPI: &[u8] = b"\x05\x09apic_sipi\0\0\0\x01\0\0\0\0\0\0\0\x01";

/// A few seconds before or after, this would not stand in the way.
const ANOTHER: &str = "restore the checkpoint before or after this one";
const PARAVIRTUAL: &str = "restore it under KVM; a VM that is to move to TCG must be started with kvm=off behind its -cpu model \
                           (-cpu qemu64,kvm=off), so that its guest does not use what only KVM has";
const NESTED: &str =
    "restore it under the accelerator that it ran under, or end the guest's own VMs first";

/// Optional parts of a processor that stand in the way: the beginning of the name, what the guest
/// does, the way out.
const IN_THE_WAY: &[(&str, &str, &str)] = &[
    ("cpu/steal_time_msr", "the guest uses KVM's steal time", PARAVIRTUAL),
    ("cpu/async_pf", "the guest uses KVM's asynchronous page faults", PARAVIRTUAL),
    ("cpu/async_pv_eoi", "the guest uses KVM's paravirtual end of interrupt", PARAVIRTUAL),
    ("cpu/msr_hyperv", "the guest uses KVM's Hyper-V interfaces", PARAVIRTUAL),
    ("cpu/xen_vcpu", "the guest uses KVM's Xen interfaces", PARAVIRTUAL),
    ("cpu/kvm_nested_state", "the guest runs VMs of its own", NESTED),
    ("cpu/svm_guest", "the guest runs VMs of its own", NESTED),
    ("cpu/svn_npt", "the guest runs VMs of its own", NESTED),
    ("cpu/nested_state", "the guest runs VMs of its own", NESTED),
    ("cpu/exception_info", "an exception was on its way to the guest at that instant", ANOTHER),
    ("cpu/triple_fault", "the guest was about to reset at that instant", ANOTHER),
];

/// What is put in place of what.
pub(super) struct Edit {
    pub range: Range<usize>,
    pub bytes: Vec<u8>,
}

/// Which accelerator wrote `state`, where it tells.
pub(crate) fn written_by(state: &[u8]) -> Result<Option<Accelerator>> {
    super::check(state)?;
    let all = sections(state)?;
    if all.iter().any(|s| s.name == KVMCLOCK) {
        return Ok(Some(Accelerator::Kvm));
    }
    let Some(first) = all.iter().find(|s| s.name == CPU.name) else { return Ok(None) };
    let body = Body::new(state, first, &CPU)?;
    // KVM sets it to 1 at reset, and where it is 1 it is not written; TCG leaves it at 0.
    let polls = body.part("cpu/poll_control_msr") == Some(&[0; 8]);
    Ok((polls && body.part("cpu/tsc_khz").is_none()).then_some(Accelerator::Tcg))
}

/// Makes `state`, written under the other accelerator, into one for `to`.
///
/// Errors: [`Error::Conversion`] where it cannot be right; [`Error::DeviceStream`] for a state that
/// is not understood.
pub(crate) fn convert(state: &[u8], to: Accelerator) -> Result<Vec<u8>> {
    super::check(state)?;
    let all = sections(state)?;
    let parts = Parts::find(state, &all)?;
    let mut edits = Vec::new();
    match to {
        Accelerator::Tcg => {
            edits.extend(
                all.iter()
                    .filter(|s| s.name == KVMCLOCK)
                    .map(|s| Edit { range: s.whole.clone(), bytes: Vec::new() }),
            );
            parts.to_tcg(&mut edits)?;
        }
        Accelerator::Kvm => parts.to_kvm(&mut edits)?,
    }
    Ok(apply(state, edits))
}

pub(super) fn apply(state: &[u8], mut edits: Vec<Edit>) -> Vec<u8> {
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

pub(super) fn refused(reason: impl Into<String>, fix: &str) -> Error {
    Error::Conversion { reason: reason.into(), fix: fix.into() }
}

/// One virtual processor's sections.
struct Processor<'a> {
    number: u32,
    common: Body<'a>,
    cpu: Body<'a>,
    apic: Option<Body<'a>>,
}

/// The sections that a conversion looks at.
struct Parts<'a> {
    timer: Body<'a>,
    processors: Vec<Processor<'a>>,
    pics: Vec<Body<'a>>,
    pits: Vec<Body<'a>>,
}

impl<'a> Parts<'a> {
    fn find(state: &'a [u8], all: &'a [Section]) -> Result<Self> {
        let of = |layout: &'static Layout| {
            let found = all.iter().filter(|s| s.name == layout.name);
            found.map(|s| Body::new(state, s, layout)).collect::<Result<Vec<_>>>()
        };
        let lacks = |what: &str| Error::DeviceStream {
            offset: state.len() as u64,
            problem: format!("it has no section {what}"),
        };
        let timer = of(&TIMER)?.pop().ok_or_else(|| lacks("timer"))?;
        let (cpus, commons, apics) = (of(&CPU)?, of(&CPU_COMMON)?, of(&APIC)?);
        // Each processor's sections follow each other, but its APIC counts by another number.
        let is_complete =
            cpus.len() == commons.len() && (apics.is_empty() || apics.len() == cpus.len());
        if cpus.is_empty() || !is_complete {
            return Err(lacks("for every part of every processor"));
        }
        let apics = apics.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        let processors = cpus
            .into_iter()
            .zip(commons)
            .zip(apics)
            .map(|((cpu, common), apic)| Processor {
                number: cpu.section.instance,
                common,
                cpu,
                apic,
            })
            .collect();
        let parts = Self { timer, processors, pics: of(&PIC)?, pits: of(&PIT)? };
        parts.known()?;
        Ok(parts)
    }

    /// Every optional part is known.
    fn known(&self) -> Result<()> {
        if let Some(part) = &self.timer.unknown {
            let reason = format!("the VM's clock counts instructions ({part}), which only TCG can");
            return Err(refused(reason, "restore it under TCG"));
        }
        for processor in &self.processors {
            let parts = [Some(&processor.cpu), Some(&processor.common), processor.apic.as_ref()];
            if let Some(part) = parts.into_iter().flatten().find_map(|body| body.unknown.as_deref())
            {
                let known = IN_THE_WAY.iter().find(|(name, ..)| part.starts_with(name));
                let what =
                    known.map_or("its state holds what the other accelerator may lack", |k| k.1);
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
            processor.without_paravirtual()?;
            processor.without_nested()?;
            counter = counter.max(processor.cpu.u64(cpu::TSC));
            self.interrupts_to_tcg(processor, edits)?;
        }
        // Under TCG all processors read the VM's own counter.
        edits.push(set(&self.timer, timer::TICKS, &counter.to_be_bytes()));
        let now = self.timer.u64(timer::CLOCK);
        for body in &self.pits {
            let next = body.u64(pit::NEXT_TRANSITION) as i64;
            // KVM says when the current period began, which may be long ago; TCG would make up for
            // every edge since.
            if next != -1 && next < now as i64 {
                edits.push(set(body, pit::NEXT_TRANSITION, &now.to_be_bytes()));
            }
        }
        Ok(())
    }

    fn interrupts_to_tcg(&self, processor: &Processor<'a>, edits: &mut Vec<Edit>) -> Result<()> {
        let injected = processor.cpu.u32(cpu::INTERRUPT_INJECTED);
        let mut request = processor.common.u32(cpu_common::INTERRUPT_REQUEST) & !REQUEST_HARD;
        if injected != NONE {
            processor.take_back(injected, edits)?;
            request |= REQUEST_HARD;
        } else if self.interrupt_waits(processor) {
            request |= REQUEST_HARD;
        }
        edits.push(set(&processor.common, cpu_common::INTERRUPT_REQUEST, &request.to_be_bytes()));
        match processor.cpu.u32(cpu::MP_STATE) {
            MP_SIPI_RECEIVED => {
                let reason =
                    format!("processor {} was being started at that instant", processor.number);
                Err(refused(reason, ANOTHER))
            }
            1 | MP_INIT_RECEIVED => {
                edits.push(set(&processor.common, cpu_common::HALTED, &1u32.to_be_bytes()));
                edits.push(set(&processor.cpu, cpu::MP_STATE, &0u32.to_be_bytes()));
                let Some(apic) = processor.apic.as_ref().filter(|a| a.part("apic_sipi").is_none())
                else {
                    return Err(refused(
                        format!("processor {} cannot be started", processor.number),
                        ANOTHER,
                    ));
                };
                let end = apic.section.body.end;
                edits.push(Edit { range: end..end, bytes: WAITS_FOR_SIPI.to_vec() });
                Ok(())
            }
            _ => Ok(()),
        }
    }
    /// A controller has an interrupt that this processor takes once it permits any. KVM finds out
    /// by itself, TCG was told when it came in.
    fn interrupt_waits(&self, processor: &Processor<'_>) -> bool {
        let Some(local) = &processor.apic else { return self.pic_waits() };
        let base = local.u32(apic::BASE);
        let on = base & 0x800 != 0;
        let from_pic = !on || local.u32(apic::LINT0) & 0x1_0000 == 0;
        let bootstrap = base & 0x100 != 0;
        (on && local.u32(apic::SPURIOUS) & 0x100 != 0 && apic_waits(local))
            || (bootstrap && from_pic && self.pic_waits())
    }

    /// As QEMU's `pic_get_irq` of the first controller, to which the second one is a line.
    fn pic_waits(&self) -> bool {
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
            processor.without_nested()?;
            edits.push(set(&processor.cpu, cpu::TSC, &counter.to_be_bytes()));
            // TCG does not keep which parts of the floating-point state are in use; x87 and SSE
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

impl Processor<'_> {
    /// Nothing of KVM's own is in use that the guest would miss.
    fn without_paravirtual(&self) -> Result<()> {
        let number = self.number;
        if self.cpu.u64(cpu::SYSTEM_TIME) & 1 != 0 {
            return Err(refused(
                format!("processor {number}: the guest's clock is KVM's (kvmclock)"),
                PARAVIRTUAL,
            ));
        }
        if self.cpu.u64(cpu::CR4) & 3 != 0 {
            let fix =
                "restore it under KVM; for TCG, start the VM with vme=off behind its -cpu model";
            return Err(refused(
                format!("processor {number}: the guest uses virtual 8086 mode's extensions"),
                fix,
            ));
        }
        if self.apic.as_ref().is_some_and(|a| a.u32(apic::BASE) & 0x400 != 0) {
            let fix = "restore it under KVM; for TCG, start the VM with kvm=off,x2apic=off behind its -cpu model";
            return Err(refused(
                format!("processor {number}: the guest uses its local APIC as x2APIC"),
                fix,
            ));
        }
        let on_the_way = self.cpu.u32(cpu::EXCEPTION_NR) != NONE
            || cpu::EVENTS.iter().any(|offset| self.cpu.u8(*offset) != 0);
        if on_the_way {
            let reason = format!(
                "processor {number}: an exception or an NMI was on its way to the guest at that instant"
            );
            return Err(refused(reason, ANOTHER));
        }
        Ok(())
    }

    /// The guest runs no VMs of its own.
    fn without_nested(&self) -> Result<()> {
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

    /// Gives an interrupt that was acknowledged, but had not reached the guest, back to the local
    /// APIC.
    fn take_back(&self, vector: u32, edits: &mut Vec<Edit>) -> Result<()> {
        let reason = format!(
            "processor {}: interrupt {vector:#x} was on its way to the guest at that instant",
            self.number
        );
        let local = self
            .apic
            .as_ref()
            .filter(|_| vector < 256)
            .ok_or_else(|| refused(&*reason, ANOTHER))?;
        let (word, bit) = (vector as usize / 32 * 4, 1 << (vector % 32));
        let in_service = local.u32(apic::ISR + word);
        if in_service & bit == 0 {
            // The older controllers': whether they set their bit depends on their mode.
            return Err(refused(reason, ANOTHER));
        }
        let requested = local.u32(apic::IRR + word) | bit;
        edits.push(set(local, apic::ISR + word, &(in_service & !bit).to_be_bytes()));
        edits.push(set(local, apic::IRR + word, &requested.to_be_bytes()));
        edits.push(set(&self.cpu, cpu::INTERRUPT_INJECTED, &NONE.to_be_bytes()));
        Ok(())
    }
}

/// The local APIC holds an interrupt of a higher class than what the processor is at.
fn apic_waits(local: &Body<'_>) -> bool {
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

/// Other bytes for a field.
pub(super) fn set(body: &Body<'_>, offset: usize, bytes: &[u8]) -> Edit {
    let at = body.section.body.start + offset;
    Edit { range: at..at + bytes.len(), bytes: bytes.to_vec() }
}
