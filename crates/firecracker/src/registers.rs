//! The registers of the processors in a device state that Firecracker has saved.
//!
//! ```text
//!   state          magic u64 │ version, text │ VM │ KVM │ memory, PIT, clock, PICs, I/O APIC │
//!                  processors │ devices │ CRC64
//!   a processor    cpuid │ MSRs │ debug registers │ local APIC │ mp state │ regs │ sregs │ events │
//!                  xcrs │ xsave │ TSC kHz
//!   regs (144)     rax rbx rcx rdx rsi rdi rsp rbp r8 ... r15 rip rflags, u64 each
//!   sregs (312)    cs ds es fs gs ss tr ldt, 24 each │ gdt idt, 16 each │ cr0 cr2 cr3 cr4 cr8, ...
//! ```
//!
//! The state is `MicrovmState` of Firecracker's `persist.rs`, written by bincode: numbers are
//! little-endian and of fixed size, a text or a list begins with its length (u64), an optional value
//! with a byte. KVM's structures are byte strings, and a structure with a list of entries is a byte
//! string of its head and then the list.
//!
//! The format has no lengths that lead past a field, so all fields before the registers are read.
//! Each version of it is another one. Only the one of Firecracker 1.12 is read.
//!
//! Left out: the devices, which follow the processors, and the sum, which Firecracker checks.

use crate::state_file;
use crate::{Error, Result};
use keyframe_bytes::{ByteReader, ReadError};
use keyframe_machine::{CpuRegisters, RegisterValues, SegmentRegister, X86Registers};

/// The version of the format that is read, and the Firecracker that writes it.
const VERSION: &[u8] = b"6.0.0";
const VERSION_OF: &str = "1.12";
const MAGIC_BYTES: usize = 8;
/// A longer version than this is not shown in an error.
const VERSION_BYTES_MAX: usize = 32;
/// The MSR that holds the GS base that `swapgs` exchanges.
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// Returns the registers of all virtual CPUs in the device state `state`, ordered by index.
///
/// Error: [`Error::DeviceState`] for a malformed state, one of another version of the format, and
/// one without a processor.
pub fn read(state: &[u8]) -> Result<Vec<CpuRegisters>> {
    state_file::check(state)?;
    let fail = |problem| Error::DeviceState { problem };
    let mut reader = Reader(ByteReader::new(state.get(MAGIC_BYTES..).unwrap_or_default()));
    let version = reader.bytes().map_err(|error| fail(error.into()))?;
    if version != VERSION {
        return Err(fail(other_version(version)));
    }
    reader.processors().map_err(fail)
}

fn other_version(version: &[u8]) -> String {
    let version = std::str::from_utf8(version).ok().filter(|v| v.len() <= VERSION_BYTES_MAX);
    let version = version.map_or_else(|| "an unknown version".into(), |v| format!("version {v:?}"));
    format!(
        "its format has {version}; Keyframe reads registers in that of Firecracker {VERSION_OF} alone"
    )
}

/// Reads values as bincode writes them. No length makes it allocate: each entry of a list takes
/// bytes of the state.
pub(crate) struct Reader<'a>(pub(crate) ByteReader<'a>);

impl<'a> Reader<'a> {
    /// Reads from after the version to the end of the processors.
    fn processors(&mut self) -> Result<Vec<CpuRegisters>, String> {
        self.vm()?;
        self.kvm_vm()?;
        let count = self.0.u64_le()?;
        let mut found = Vec::new();
        for index in 0..count {
            let index = u32::try_from(index).map_err(|_| "it has too many processors")?;
            let values = RegisterValues::X86_64(self.processor()?);
            found.push(CpuRegisters { index, values });
        }
        if found.is_empty() {
            return Err("it has no processor".into());
        }
        Ok(found)
    }

    /// `VmInfo`, and the changes of KVM's capabilities.
    fn vm(&mut self) -> Result<(), ReadError> {
        let _mem_size_mib = self.0.u64_le()?;
        let _smt = self.0.u8()?;
        let _cpu_template = self.0.u32_le()?;
        let _kernel = self.bytes()?;
        self.optional(|reader| reader.bytes().map(drop))?;
        self.optional(|reader| reader.bytes().map(drop))?;
        let _huge_pages = self.0.u32_le()?;
        self.list(|reader| reader.bytes().map(drop))
    }

    /// `VmState`: the regions of RAM, PIT, clock, both PICs, I/O APIC.
    fn kvm_vm(&mut self) -> Result<(), ReadError> {
        self.list(|reader| reader.0.take(16).map(drop))?;
        for _ in 0..5 {
            self.bytes()?;
        }
        Ok(())
    }

    /// `VcpuState`.
    fn processor(&mut self) -> Result<X86Registers, String> {
        let _cpuid = self.bytes()?;
        self.list(|reader| reader.bytes().map(drop))?;
        let mut kernel_gs_base = None;
        self.list(|reader| {
            let _head = reader.bytes()?;
            reader.list(|reader| {
                let (index, value) = msr(reader.bytes()?)?;
                if index == KERNEL_GS_BASE {
                    kernel_gs_base = Some(value);
                }
                Ok(())
            })
        })?;
        let _debug_registers = self.bytes()?;
        let _local_apic = self.bytes()?;
        let _mp_state = self.bytes()?;
        let (regs, sregs) = (self.bytes()?, self.bytes()?);
        let _events = self.bytes()?;
        let _xcrs = self.bytes()?;
        let _xsave = self.bytes()?;
        self.list(|reader| reader.0.take(4).map(drop))?;
        self.optional(|reader| reader.0.u32_le().map(drop))?;
        let kernel_gs_base =
            kernel_gs_base.ok_or("a processor has no MSR of its kernel's GS base")?;
        Ok(registers(regs, sregs, kernel_gs_base)?)
    }

    /// A byte string or a text.
    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], ReadError> {
        let at = self.0.position();
        let len = self.0.u64_le()?;
        let len =
            usize::try_from(len).map_err(|_| ReadError::Truncated { at, wanted: usize::MAX })?;
        self.0.take(len)
    }

    /// A list; `entry` reads one entry.
    fn list(
        &mut self,
        mut entry: impl FnMut(&mut Self) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        let count = self.0.u64_le()?;
        (0..count).try_for_each(|_| entry(self))
    }

    /// An optional value; `value` reads it.
    fn optional(
        &mut self,
        value: impl FnOnce(&mut Self) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        if self.0.u8()? == 0 { Ok(()) } else { value(self) }
    }
}

/// Reads a `kvm_msr_entry`: the MSR's index and its value.
fn msr(entry: &[u8]) -> Result<(u32, u64), ReadError> {
    let mut reader = ByteReader::new(entry);
    let (index, _reserved) = (reader.u32_le()?, reader.u32_le()?);
    Ok((index, reader.u64_le()?))
}

/// Returns the registers of a `kvm_regs` and a `kvm_sregs`.
fn registers(regs: &[u8], sregs: &[u8], kernel_gs_base: u64) -> Result<X86Registers, ReadError> {
    let mut reader = ByteReader::new(regs);
    let [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp, r8, r9, r10, r11, r12, r13, r14, r15] =
        words(&mut reader)?;
    let [rip, rflags] = words(&mut reader)?;
    let mut reader = ByteReader::new(sregs);
    let mut segments = [SegmentRegister::default(); 8];
    for segment in &mut segments {
        *segment = read_segment(&mut reader)?;
    }
    let [cs, ds, es, fs, gs, ss, tr, ldt] = segments;
    let (gdt, idt) = (descriptor_table(&mut reader)?, descriptor_table(&mut reader)?);
    let [cr0, cr2, cr3, cr4] = words(&mut reader)?;
    Ok(X86Registers {
        general: [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15],
        rip,
        rflags,
        segments: [es, cs, ss, ds, fs, gs],
        ldt,
        tr,
        gdt,
        idt,
        control: [cr0, 0, cr2, cr3, cr4],
        kernel_gs_base,
    })
}

fn words<const N: usize>(reader: &mut ByteReader<'_>) -> Result<[u64; N], ReadError> {
    let mut words = [0; N];
    for word in &mut words {
        *word = reader.u64_le()?;
    }
    Ok(words)
}

/// Reads a `kvm_segment`. The flags become those of a descriptor's upper half, as QEMU has them.
fn read_segment(reader: &mut ByteReader<'_>) -> Result<SegmentRegister, ReadError> {
    let (base, limit, selector) = (reader.u64_le()?, reader.u32_le()?, reader.u16_le()?);
    let [kind, present, dpl, db, s, l, g, avl, unusable, _padding] =
        reader.array()?.map(|byte: u8| u32::from(byte));
    let is_present = u32::from(present != 0 && unusable == 0);
    let flags =
        [(kind, 8), (s, 12), (dpl, 13), (is_present, 15), (avl, 20), (l, 21), (db, 22), (g, 23)];
    let flags = flags.iter().fold(0, |all, (value, shift)| all | value << shift);
    Ok(SegmentRegister { selector: selector.into(), base, limit, flags })
}

/// Reads a `kvm_dtable`.
fn descriptor_table(reader: &mut ByteReader<'_>) -> Result<SegmentRegister, ReadError> {
    let (base, limit) = (reader.u64_le()?, reader.u16_le()?);
    reader.take(6)?;
    Ok(SegmentRegister { base, limit: limit.into(), ..SegmentRegister::default() })
}

#[cfg(test)]
mod tests;
