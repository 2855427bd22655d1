//! States made by hand, with the fields that a conversion touches; the real ones are in the
//! end-to-end tests.

use super::{convert, written_by};
use crate::StreamError;
use crate::count_instructions;
use crate::section_bodies::{apic, cpu, cpu_common, pit, timer};
use crate::sections::sections;
use keyframe_machine::Accelerator::{Kvm, Tcg};
use keyframe_machine::Processor;
use proptest::prelude::*;

/// Sections under way: name, version, body.
#[derive(Clone)]
struct State(Vec<(&'static str, u32, Vec<u8>)>);

impl State {
    /// One processor at rest, as TCG writes it; with `kvmclock` as KVM does.
    fn new(kvmclock: bool) -> Self {
        let mut all = vec![
            ("timer", 2, vec![0; 24]),
            ("cpu_common", 1, vec![0; 8]),
            ("cpu", 12, vec![0; 1817]),
            ("apic", 3, vec![0; 181]),
        ];
        if kvmclock {
            all.push(("kvmclock", 1, vec![9; 8]));
        }
        all.extend([
            ("i8259", 1, vec![0; 16]),
            ("i8254", 3, vec![0; 108]),
            ("disk", 1, vec![7; 300]),
        ]);
        let state = Self(all);
        let state = state.with("cpu", cpu::INTERRUPT_INJECTED, &[0xff; 4]).with(
            "cpu",
            cpu::EXCEPTION_NR,
            &[0xff; 4],
        );
        state.with("apic", apic::BASE, &0xfee0_0900_u32.to_be_bytes()).with(
            "apic",
            apic::SPURIOUS,
            &[0, 0, 1, 0xff],
        )
    }

    fn body(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.0.iter_mut().find(|s| s.0 == name).unwrap().2
    }

    fn with(mut self, name: &str, offset: usize, bytes: &[u8]) -> Self {
        self.body(name)[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn with_part(mut self, section: &str, name: &str, fields: &[u8]) -> Self {
        let body = self.body(section);
        body.extend([5, name.len() as u8]);
        body.extend(name.as_bytes());
        body.extend([0, 0, 0, 1]);
        body.extend(fields);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"QEVM\0\0\0\x03".to_vec();
        for (id, (name, version, body)) in self.0.iter().enumerate() {
            let id = (id as u32 * 3 + 1).to_be_bytes();
            out.push(4);
            out.extend(id);
            out.push(name.len() as u8);
            out.extend(name.as_bytes());
            out.extend([0; 4]);
            out.extend(version.to_be_bytes());
            out.extend(body);
            out.push(0x7e);
            out.extend(id);
        }
        out.push(0);
        out
    }
}

/// The body of the first section of that name.
fn body<'a>(state: &'a [u8], name: &str) -> &'a [u8] {
    let all = sections(state).unwrap();
    &state[all.iter().find(|s| s.name == name).unwrap().body.clone()]
}

fn u32_of(state: &[u8], name: &str, offset: usize) -> u32 {
    u32::from_be_bytes(body(state, name)[offset..offset + 4].try_into().unwrap())
}

fn u64_of(state: &[u8], name: &str, offset: usize) -> u64 {
    u64::from_be_bytes(body(state, name)[offset..offset + 8].try_into().unwrap())
}

fn names(state: &[u8]) -> Vec<String> {
    sections(state).unwrap().into_iter().map(|s| s.name).collect()
}

fn reason(state: &State, to: keyframe_machine::Accelerator) -> String {
    let error = convert(&state.bytes(), to).unwrap_err();
    assert!(matches!(error, StreamError::Conversion { .. }) && error.fix().is_some(), "{error}");
    error.to_string()
}

#[test]
fn to_tcg_the_clock_section_goes_and_the_counter_moves() {
    let state = State::new(true).with("cpu", cpu::TSC, &77u64.to_be_bytes());
    let state = state.with("timer", timer::CLOCK, &1000u64.to_be_bytes());
    let state = state.with("i8254", pit::NEXT_TRANSITION, &(-5i64).to_be_bytes());
    let out = convert(&state.bytes(), Tcg).unwrap();
    assert_eq!(names(&out), ["timer", "cpu_common", "cpu", "apic", "i8259", "i8254", "disk"]);
    assert_eq!(u64_of(&out, "timer", timer::TICKS), 77);
    assert_eq!(u64_of(&out, "i8254", pit::NEXT_TRANSITION), 1000);
    assert_eq!(body(&out, "disk"), [7; 300]);
    // An edge that will never come, or is still to come, stays.
    for next in [-1i64, 1001] {
        let state = state.clone().with("i8254", pit::NEXT_TRANSITION, &next.to_be_bytes());
        assert_eq!(
            u64_of(&convert(&state.bytes(), Tcg).unwrap(), "i8254", pit::NEXT_TRANSITION),
            next as u64
        );
    }
}

#[test]
fn a_clock_that_comes_to_count_goes_on_where_it_stood() {
    let state = State::new(false)
        .with("timer", timer::CLOCK, &5000u64.to_be_bytes())
        .with("timer", timer::TICKS, &90_000u64.to_be_bytes())
        .with("cpu", cpu::TSC_OFFSET, &7u64.to_be_bytes());
    let made = count_instructions(&state.bytes(), Processor::X86_64).unwrap();
    let part = [&b"\x05\x0ctimer/icount\0\0\0\x01"[..], &5000u64.to_be_bytes(), &[0; 8]].concat();
    assert_eq!(body(&made, "timer")[24..], part);
    assert_eq!(u64_of(&made, "cpu", cpu::TSC_OFFSET), 7 + 90_000 - 5000);
    // Everything else is as it was.
    assert_eq!(body(&made, "disk"), body(&state.bytes(), "disk"));
    let Err(StreamError::Conversion { reason, .. }) = count_instructions(&made, Processor::X86_64)
    else {
        panic!("it counts already")
    };
    assert!(reason.contains("already"), "{reason}");
}

#[test]
fn to_kvm_the_floating_point_state_is_named_and_the_halt_kept() {
    let state = State::new(false).with("timer", timer::TICKS, &55u64.to_be_bytes());
    let state = state.with("cpu", cpu::XCR0, &7u64.to_be_bytes());
    let out = convert(&state.bytes(), Kvm).unwrap();
    assert_eq!((u64_of(&out, "cpu", cpu::TSC), u64_of(&out, "cpu", cpu::XSTATE_BV)), (55, 7));
    assert_eq!(u32_of(&out, "cpu", cpu::MP_STATE), 0);
    let halted = state.clone().with("cpu_common", cpu_common::HALTED, &[0, 0, 0, 1]);
    assert_eq!(u32_of(&convert(&halted.bytes(), Kvm).unwrap(), "cpu", cpu::MP_STATE), 3);
    let waiting = halted.with_part("apic", "apic_sipi", &[0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(u32_of(&convert(&waiting.bytes(), Kvm).unwrap(), "cpu", cpu::MP_STATE), 2);
}

#[test]
fn an_interrupt_that_waits_wakes_tcg_and_no_other_does() {
    let asked = |state: &State| {
        u32_of(&convert(&state.bytes(), Tcg).unwrap(), "cpu_common", cpu_common::INTERRUPT_REQUEST)
    };
    let idle = State::new(true);
    assert_eq!(asked(&idle), 0);
    // A request left over from before is none.
    assert_eq!(
        asked(&idle.clone().with("cpu_common", cpu_common::INTERRUPT_REQUEST, &[0, 0, 0, 2])),
        0
    );
    // Vector 0x30 of the local APIC, then masked by the task's priority, then after one in
    // service.
    let local = idle.clone().with("apic", apic::IRR + 4, &0x1_0000u32.to_be_bytes());
    assert_eq!(asked(&local), 2);
    assert_eq!(asked(&local.clone().with("apic", apic::TPR, &[0x40])), 0);
    assert_eq!(asked(&local.clone().with("apic", apic::ISR + 4, &0x2_0000u32.to_be_bytes())), 0);
    assert_eq!(asked(&local.with("apic", apic::SPURIOUS, &[0, 0, 0, 0xff])), 0);
    // Line 0 of the older controller, then masked, then in service.
    let line = idle.with("i8259", 1, &[1]);
    assert_eq!(asked(&line), 2);
    assert_eq!(asked(&line.clone().with("i8259", 2, &[1])), 0);
    assert_eq!(asked(&line.clone().with("i8259", 3, &[1])), 0);
    assert_eq!(asked(&line.with("apic", apic::LINT0, &0x1_0000u32.to_be_bytes())), 0);
}

#[test]
fn an_interrupt_on_its_way_is_given_back() {
    let on_its_way = State::new(true).with("cpu", cpu::INTERRUPT_INJECTED, &0x31u32.to_be_bytes());
    assert!(reason(&on_its_way, Tcg).contains("0x31"), "no controller knows of it");
    let known = on_its_way.with("apic", apic::ISR + 4, &0x2_0000u32.to_be_bytes());
    let out = convert(&known.bytes(), Tcg).unwrap();
    assert_eq!(
        (u32_of(&out, "apic", apic::ISR + 4), u32_of(&out, "apic", apic::IRR + 4)),
        (0, 0x2_0000)
    );
    assert_eq!(u32_of(&out, "cpu", cpu::INTERRUPT_INJECTED), u32::MAX);
    assert_eq!(u32_of(&out, "cpu_common", cpu_common::INTERRUPT_REQUEST), 2);
}

#[test]
fn a_processor_that_was_not_started_waits_for_that() {
    let state = State::new(true).with("cpu", cpu::MP_STATE, &1u32.to_be_bytes());
    let out = convert(&state.bytes(), Tcg).unwrap();
    assert_eq!(u32_of(&out, "cpu_common", cpu_common::HALTED), 1);
    assert_eq!(body(&out, "apic")[181..], *b"\x05\x09apic_sipi\0\0\0\x01\0\0\0\0\0\0\0\x01");
    assert!(
        reason(&state.with("cpu", cpu::MP_STATE, &4u32.to_be_bytes()), Tcg).contains("started")
    );
}

#[test]
fn what_only_one_accelerator_has_is_refused_by_name() {
    let plain = State::new(true);
    let cases = [
        (plain.clone().with("cpu", cpu::SYSTEM_TIME, &0x8001u64.to_be_bytes()), Tcg, "kvmclock"),
        (plain.clone().with("apic", apic::BASE, &0xfee0_0d00_u32.to_be_bytes()), Tcg, "x2APIC"),
        (plain.clone().with("cpu", cpu::EVENTS[1], &[1]), Tcg, "NMI"),
        (plain.clone().with("cpu", cpu::EFER, &0x1500u64.to_be_bytes()), Kvm, "VMs of its own"),
        (plain.clone().with("cpu", cpu::CR4, &0x2000u64.to_be_bytes()), Tcg, "VMs of its own"),
        (plain.clone().with_part("cpu", "cpu/steal_time_msr", &[0; 8]), Tcg, "steal time"),
        (plain.clone().with_part("cpu", "cpu/async_pf_msr", &[0; 8]), Tcg, "page faults"),
        (plain.clone().with_part("cpu", "cpu/async_pv_eoi_msr", &[0; 8]), Tcg, "end of interrupt"),
        (plain.clone().with_part("cpu", "cpu/msr_hyperv_time", &[0; 16]), Tcg, "Hyper-V"),
        (plain.clone().with_part("cpu", "cpu/kvm_nested_state", &[0; 9]), Tcg, "VMs of its own"),
        (plain.clone().with_part("cpu", "cpu/svm_guest", &[0; 9]), Kvm, "VMs of its own"),
        (
            plain.clone().with_part("cpu", "cpu/what_comes_next", &[0; 9]),
            Kvm,
            "cpu/what_comes_next",
        ),
        (plain.with_part("timer", "timer/icount", &[0; 16]), Kvm, "counts instructions"),
    ];
    for (state, to, word) in cases {
        let text = reason(&state, to);
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn the_state_tells_who_wrote_it() {
    assert_eq!(written_by(&State::new(true).bytes(), Processor::X86_64).unwrap(), Some(Kvm));
    assert_eq!(written_by(&State::new(false).bytes(), Processor::X86_64).unwrap(), None);
    let tcg = State::new(false).with_part("cpu", "cpu/poll_control_msr", &[0; 8]);
    assert_eq!(written_by(&tcg.bytes(), Processor::X86_64).unwrap(), Some(Tcg));
}

#[test]
fn a_forged_end_of_a_section_is_not_believed() {
    let mut state = State::new(true);
    // The disk's number is 3 * 7 + 1; after its forged end comes a forged section.
    state.body("disk")[100..122]
        .copy_from_slice(b"\x7e\0\0\0\x16\x04\0\0\0\x63\x04fake\0\0\0\0\0\0\0");
    let error = convert(&state.bytes(), Tcg).unwrap_err().to_string();
    assert!(error.contains("could end at"), "{error}");
}

#[test]
fn formats_that_are_not_known_are_refused() {
    for name in ["timer", "cpu_common", "cpu", "apic", "i8259", "i8254"] {
        let mut other = State::new(true);
        other.0.iter_mut().find(|s| s.0 == name).unwrap().1 += 1;
        assert!(
            convert(&other.bytes(), Tcg).unwrap_err().to_string().contains("version"),
            "{name}"
        );
        let mut short = State::new(true);
        short.body(name).pop();
        assert!(
            matches!(convert(&short.bytes(), Tcg), Err(StreamError::DeviceState { .. })),
            "{name}"
        );
    }
    let mut without = State::new(true);
    without.0.retain(|s| s.0 != "cpu_common");
    assert!(convert(&without.bytes(), Tcg).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    /// Any state is refused or converted. A converted state can be read again, and has the expected
    /// length.
    #[test]
    fn no_state_panics(hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut in 0usize..40) {
        let good = State::new(true).with_part("cpu", "cpu/tsc_khz", &[0; 8]).bytes();
        let mut bad = good.clone();
        for (at, value) in hits {
            let at = at.index(bad.len());
            bad[at] = value;
        }
        bad.truncate(good.len().saturating_sub(cut.saturating_sub(20)));
        for to in [Kvm, Tcg] {
            if let Ok(out) = convert(&bad, to) {
                let section = sections(&bad).unwrap();
                prop_assert!(sections(&out).unwrap().len() + 1 >= section.len());
            }
        }
        let _ = written_by(&bad, Processor::X86_64);
    }

    #[test]
    fn no_bytes_panic(tail in prop::collection::vec(prop::sample::select(vec![0u8, 1, 4, 5, 0x7e, b'a', 3, 2]), 0..200)) {
        let mut state = b"QEVM\0\0\0\x03".to_vec();
        state.extend(tail);
        let _ = (convert(&state, Tcg), written_by(&state, Processor::X86_64), sections(&state));
    }
}
