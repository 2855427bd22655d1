//! Layouts of the section bodies that Keyframe reads and edits: offsets of the fields, and the
//! known optional parts (QEMU's subsections).
//!
//! ```text
//!   cpu body:  1817 bytes of fields │ 05 len "cpu/tsc_khz" version, fields │ 05 ... │
//! ```
//!
//! The layouts are those of QEMU 7.2 and 10.0 (docs/formats/device-stream.md). A body of another
//! version or length is an error, and so is a malformed optional part. Nothing is read at an offset
//! that was not checked.

use super::format::SUBSECTION;
use super::sections::{Section, u32_at, u64_at};
use crate::{Result, StreamError};
use std::ops::RangeInclusive;

/// The layout of a body.
pub(crate) struct Layout {
    /// The section's name.
    pub name: &'static str,
    version: u32,
    fields_bytes: usize,
    /// The known optional parts: name, and length of its fields in bytes.
    optional: &'static [(&'static str, usize)],
}

pub(crate) const TIMER: Layout =
    Layout { name: "timer", version: 2, fields_bytes: 24, optional: &[] };
pub(crate) const CPU_COMMON: Layout = Layout {
    name: "cpu_common",
    version: 1,
    fields_bytes: 8,
    optional: &[("cpu_common/exception_index", 4), ("cpu_common/crash_occurred", 1)],
};
pub(crate) const APIC: Layout =
    Layout { name: "apic", version: 3, fields_bytes: 181, optional: &[("apic_sipi", 8)] };
pub(crate) const PIC: Layout =
    Layout { name: "i8259", version: 1, fields_bytes: 16, optional: &[("i8259/ltim", 1)] };
pub(crate) const PIT: Layout =
    Layout { name: "i8254", version: 3, fields_bytes: 108, optional: &[] };

/// The optional parts are those that both accelerators can load.
pub(crate) const CPU: Layout = Layout {
    name: "cpu",
    version: 12,
    fields_bytes: 1817,
    optional: &[
        ("cpu/tsc_khz", 8),
        ("cpu/poll_control_msr", 8),
        ("cpu/fpop_ip_dp", 18),
        ("cpu/msr_ia32_misc_enable", 8),
        ("cpu/msr_smi_count", 8),
        ("cpu/pkru", 4),
        ("cpu/pdptrs", 32),
    ],
};

/// Offsets in [`TIMER`].
pub(crate) mod timer {
    /// Value of the processors' time-stamp counter while the VM is paused.
    pub const TICKS: usize = 0;
    /// The VM's clock in nanoseconds.
    pub const CLOCK: usize = 16;
}

/// Offsets in [`CPU_COMMON`].
pub(crate) mod cpu_common {
    pub const HALTED: usize = 0;
    pub const INTERRUPT_REQUEST: usize = 4;
}

/// Offsets in [`CPU`].
pub(crate) mod cpu {
    pub const RIP: usize = 128;
    pub const CR4: usize = 480;
    /// The SSE control and status register.
    pub const MXCSR: usize = 556;
    pub const EFER: usize = 816;
    /// The number that is added to the VM's time-stamp counter for this processor.
    pub const TSC_OFFSET: usize = 896;
    pub const INTERRUPT_INJECTED: usize = 1149;
    pub const MP_STATE: usize = 1153;
    pub const TSC: usize = 1157;
    pub const EXCEPTION_NR: usize = 1165;
    /// Software interrupt, NMI injected, NMI pending: one byte each.
    pub const EVENTS: [usize; 3] = [1169, 1170, 1171];
    pub const SYSTEM_TIME: usize = 1529;
    pub const XCR0: usize = 1545;
    pub const XSTATE_BV: usize = 1553;
}

/// Offsets in [`APIC`].
pub(crate) mod apic {
    pub const BASE: usize = 0;
    pub const TPR: usize = 6;
    pub const SPURIOUS: usize = 7;
    pub const ISR: usize = 13;
    pub const IRR: usize = 77;
    pub const LINT0: usize = 109 + 3 * 4;
}

/// Offsets in [`PIC`], one byte each.
pub(crate) mod pic {
    pub const IRR: usize = 1;
    pub const IMR: usize = 2;
    pub const ISR: usize = 3;
    pub const PRIORITY_ADD: usize = 4;
    pub const SPECIAL_MASK: usize = 8;
    pub const SPECIAL_FULLY_NESTED: usize = 12;
}

/// Offsets in [`PIT`].
pub(crate) mod pit {
    /// Not 0 if the PIT raises no interrupts.
    pub const IRQ_DISABLED: usize = 0;
    /// Time of channel 0's next transition, by the VM's clock in ns; -1 if there is none.
    pub const NEXT_TRANSITION: usize = 100;
}

/// A body whose version and length were checked.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    pub section: &'a Section,
    fields: &'a [u8],
    /// Each optional part's name and fields.
    pub optional: Vec<(&'static str, &'a [u8])>,
    /// Name of the first optional part that is not in the layout. Parts after it were not read.
    pub unknown: Option<String>,
}

impl<'a> Body<'a> {
    /// Creates a reader of the body of `section` of the device state `state`, after a check against
    /// `layout`. Error: [`StreamError::DeviceState`] for another version or length than the layout
    /// has.
    pub fn new(state: &'a [u8], section: &'a Section, layout: &Layout) -> Result<Self> {
        let fail = |problem: String| StreamError::DeviceState {
            offset: section.body.start as u64,
            problem: format!("section {} {}: {problem}", section.name, section.instance),
        };
        if section.version != layout.version {
            return Err(fail(format!(
                "version {}; only version {} is known",
                section.version, layout.version
            )));
        }
        let bytes = state.get(section.body.clone()).unwrap_or_default();
        let (fields, mut rest) = bytes.split_at_checked(layout.fields_bytes).ok_or_else(|| {
            fail(format!("{} bytes instead of {}", bytes.len(), layout.fields_bytes))
        })?;
        let mut body = Self { section, fields, optional: Vec::new(), unknown: None };
        while !rest.is_empty() {
            let (name, behind) = subsection(rest).ok_or_else(|| {
                fail(format!("the {} bytes after its fields are no optional part", rest.len()))
            })?;
            let Some((name, len)) =
                layout.optional.iter().find(|(known, _)| known.as_bytes() == name)
            else {
                body.unknown = Some(String::from_utf8_lossy(name).into_owned());
                return Ok(body);
            };
            let (fields, next) = behind
                .split_at_checked(*len)
                .ok_or_else(|| fail(format!("{name} is cut short")))?;
            body.optional.push((name, fields));
            rest = next;
        }
        Ok(body)
    }

    /// Returns the `u64` at `offset`; 0 outside the fields.
    pub fn u64(&self, offset: usize) -> u64 {
        u64_at(self.fields, offset).unwrap_or_default()
    }

    /// Returns the `u32` at `offset`; 0 outside the fields.
    pub fn u32(&self, offset: usize) -> u32 {
        u32_at(self.fields, offset).unwrap_or_default()
    }

    /// Returns the byte at `offset`; 0 outside the fields.
    pub fn u8(&self, offset: usize) -> u8 {
        self.fields.get(offset).copied().unwrap_or_default()
    }

    /// Returns the fields of the optional part `name`, if the body has it.
    pub fn part(&self, name: &str) -> Option<&'a [u8]> {
        self.optional.iter().find(|(n, _)| *n == name).map(|(_, fields)| *fields)
    }
}

/// The first fields of a body whose length varies.
#[derive(Debug)]
pub(crate) struct Start<'a>(&'a [u8]);

impl<'a> Start<'a> {
    /// Returns the first `bytes` bytes of the body of `section` of the device state `state`. Error:
    /// [`StreamError::DeviceState`] if its version is not one of `versions`, or if it is shorter.
    pub fn new(
        state: &'a [u8],
        section: &Section,
        versions: RangeInclusive<u32>,
        bytes: usize,
    ) -> Result<Self> {
        let fail = |problem: String| StreamError::DeviceState {
            offset: section.body.start as u64,
            problem: format!("section {} {}: {problem}", section.name, section.instance),
        };
        if !versions.contains(&section.version) {
            let (first, last) = (versions.start(), versions.end());
            let found = section.version;
            return Err(fail(format!("version {found}; versions {first} to {last} are known")));
        }
        let body = state.get(section.body.clone()).unwrap_or_default();
        let short = || fail(format!("{} bytes instead of {bytes} or more", body.len()));
        Ok(Self(body.get(..bytes).ok_or_else(short)?))
    }

    /// Returns the `u64` at `offset`; 0 outside the fields.
    pub fn u64(&self, offset: usize) -> u64 {
        u64_at(self.0, offset).unwrap_or_default()
    }

    /// Returns the `u32` at `offset`; 0 outside the fields.
    pub fn u32(&self, offset: usize) -> u32 {
        u32_at(self.0, offset).unwrap_or_default()
    }
}

/// Name of the optional part at the start of `bytes`, and the bytes after its head.
fn subsection(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&SUBSECTION, rest) = bytes.split_first()? else { return None };
    let (len, rest) = rest.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*len))?;
    let behind = rest.get(4..)?;
    (!name.is_empty() && name.iter().all(u8::is_ascii_graphic)).then_some((name, behind))
}
