//! The SSE exception flags of TCG's virtual CPUs (MXCSR bits 0 to 5), which QEMU does not save.
//!
//! TCG collects the flags in a field of its own beside MXCSR. QEMU merges the field into MXCSR when
//! the guest reads the register, and forgets to do so when it saves the CPU. A VM that was loaded
//! from such a state, also by QEMU's own migration, finds the flags cleared.
//!
//! ```text
//!   trial (once for each binary)   a CPU that raises known flags ─▶ CpuLayout, in a file
//!   start                          the CPUs in QEMU's memory, by the names of their model
//!   pause                          copy registers, MXCSR and flags of each   ┐
//!   after the pause                the same CPU of the device state, found   ├─▶ MXCSR with its flags
//!                                  by the values of its registers            ┘
//! ```
//!
//! Invariant: flags are added to a CPU of the device state only if all its general registers, its
//! instruction pointer and its MXCSR equal those beside which the flags were found.
//!
//! KVM needs none of this: the processor holds the flags in MXCSR.

mod firmware;
mod layout;
mod search;
mod trial;

use crate::binary::hash_of;
use crate::stream::{SavedCpu, add_sse_flags};
use crate::{Error, Result, Vm};
use keyframe_kernel::{Process, read_memory};
use keyframe_machine::HostBlock;
use keyframe_units::{HostRange, HostVirt};
use layout::CpuLayout;
use search::CpuNames;
use serde_json::Value;
use std::path::Path;

/// The most searches after CPUs that were not found.
const SEARCHES_MAX: u32 = 4;
/// The most places for each virtual CPU: those of CPUs that were unplugged count, too.
const PLACES_MAX: usize = 4;
/// The most places in all.
const CPUS_MAX: usize = 4096;

/// Returns the layout of virtual CPUs in the binary of process `pid`: from the directory `cache`,
/// or by a trial, whose result is then stored there.
///
/// Errors: those of the trial; the binary cannot be read.
fn layout_of(pid: u32, cache: Option<&Path>) -> Result<CpuLayout> {
    // Not the identity that the VM was given: that may be the one of a script, or of another host.
    let path = format!("/proc/{pid}/exe");
    let binary = hash_of(Path::new(&path)).map_err(Error::io(format!("read {path}")))?;
    if let Some(layout) = cache.and_then(|cache| CpuLayout::load(cache, &binary)) {
        return Ok(layout);
    }
    let layout = trial::run(pid, &binary)?;
    if let Some(cache) = cache {
        layout.store(cache, &binary);
    }
    Ok(layout)
}

/// The CPUs of a QEMU in its memory.
pub(crate) struct SseFlags {
    process: Process,
    layout: CpuLayout,
    names: CpuNames,
    /// The guest's RAM, in which no CPU is searched for.
    ram: Vec<HostRange>,
    /// The addresses of the CPUs' registers. Some may be those of CPUs that were unplugged.
    cpus: Vec<HostVirt>,
    /// The number of virtual CPUs at the last search.
    searched_for: usize,
    /// How often a CPU that is not found may cause another search.
    searches_left: u32,
    /// The CPUs as they were in the last pause.
    noted: Vec<CpuMemory>,
}

/// The part of a CPU in QEMU's memory that says what its flags are.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CpuMemory {
    general: [u64; 16],
    rip: u64,
    mxcsr: u32,
    /// The flags that are not in MXCSR yet, as bits of MXCSR.
    flags: u32,
}

impl CpuMemory {
    fn is(&self, saved: &SavedCpu) -> bool {
        (self.general, self.rip, self.mxcsr) == (saved.general, saved.rip, saved.mxcsr)
    }
}

impl Vm {
    /// Makes later device states hold the SSE exception flags, which QEMU leaves out of them under
    /// TCG. A trial finds out where QEMU keeps them; the directory `cache`, if there is one, holds
    /// its result. The trial starts a second QEMU for half a second. Under KVM, and for a guest whose
    /// processor has no SSE, this method does nothing.
    ///
    /// Error: the flags cannot be found in this QEMU.
    pub fn follow_sse_flags(&mut self, cache: Option<&Path>) -> Result<()> {
        self.sse_flags = None;
        if !self.processor()?.has_sse() || self.has_hardware_cpus()? {
            return Ok(());
        }
        let pid = self.pid();
        let layout = layout_of(pid, cache)?;
        let names = CpuNames::of(self.qmp())?;
        let process = Process::open(pid).map_err(|error| trial::unreadable(&error))?;
        let cpus = self.cpus()? as usize;
        let range =
            |block: &HostBlock| HostRange { start: block.host, len_bytes: block.block.total_bytes };
        let ram = self.ram_blocks()?.iter().map(range).collect();
        let mut known = SseFlags {
            process,
            layout,
            names,
            ram,
            cpus: Vec::new(),
            searched_for: cpus,
            searches_left: SEARCHES_MAX,
            noted: Vec::new(),
        };
        known.cpus = known.found()?;
        // A guest that writes such names into other memory than RAM makes too many.
        if !(cpus..=cpus * PLACES_MAX).contains(&known.cpus.len()) {
            let problem = format!("{} of {cpus} virtual CPUs were found", known.cpus.len());
            return Err(trial::unknown(&problem));
        }
        self.sse_flags = Some(known);
        Ok(())
    }

    /// Searches for the virtual CPUs anew if their number is no longer that of the last search.
    pub(crate) fn find_new_cpus(&mut self, cpus: usize) {
        if let Some(known) = &mut self.sse_flags
            && cpus != known.searched_for
        {
            known.searched_for = cpus;
            known.searches_left = SEARCHES_MAX;
            known.search();
        }
    }

    /// Copies the flags of all virtual CPUs, which stand still.
    pub(crate) fn note_sse_flags(&mut self) {
        if let Some(known) = &mut self.sse_flags {
            known.noted.clear();
            for at in &known.cpus {
                known.noted.extend(known.layout.read(&known.process, *at));
            }
        }
    }

    /// Adds the flags that were noted in the last pause to `device_state`, which was saved in that
    /// pause.
    ///
    /// Error: [`Error::SseFlags`] if the flags of a virtual CPU are not known. `device_state` then
    /// holds those of the others.
    pub fn add_sse_flags(&mut self, device_state: &mut [u8]) -> Result<()> {
        let Some(known) = &mut self.sse_flags else { return Ok(()) };
        let mut missing = None;
        let cpus = add_sse_flags(device_state, &mut |saved| {
            let flags = known.flags_of(saved);
            if flags.is_none() {
                missing = Some(saved.index);
            }
            flags.unwrap_or_default()
        })?;
        // A CPU was plugged in or out just before the pause: no checkpoint of the former machine is
        // sealed, and the look at the machine after the pause finds the CPU.
        let Some(index) = missing.filter(|_| cpus == known.searched_for) else { return Ok(()) };
        known.search();
        Err(trial::unknown(&format!("virtual CPU {index} was not found in its memory")))
    }

    /// Returns true if KVM executes the guest's instructions, on a processor of the host. Error:
    /// QEMU refuses the command or does not answer.
    pub fn has_hardware_cpus(&mut self) -> Result<bool> {
        let answer = self.qmp().execute("query-kvm", None)?;
        Ok(answer.get("enabled").and_then(Value::as_bool).unwrap_or_default())
    }
}

impl SseFlags {
    /// Searches anew, if that was not in vain too often.
    fn search(&mut self) {
        let Some(left) = self.searches_left.checked_sub(1) else { return };
        self.searches_left = left;
        // What is not found is reported when a device state lacks it.
        self.cpus = self.found().unwrap_or_default();
        self.cpus.truncate(CPUS_MAX);
    }

    fn found(&self) -> Result<Vec<HostVirt>> {
        search::find(&self.process, &self.layout, &self.names, &self.ram)
    }

    /// The flags of a CPU of the device state; `None` if it is not known in which memory it lies.
    fn flags_of(&self, saved: &SavedCpu) -> Option<u32> {
        let mut flags = self.noted.iter().filter(|cpu| cpu.is(saved)).map(|cpu| cpu.flags);
        let first = flags.next()?;
        // CPUs with the same registers, such as those that have not been started, have the same
        // flags.
        flags.all(|other| other == first).then_some(first)
    }
}

impl CpuLayout {
    /// Reads a CPU whose registers are at `at`. `None` if there is no memory.
    fn read(&self, process: &Process, at: HostVirt) -> Option<CpuMemory> {
        let mut bytes = vec![0; self.len_bytes()];
        read_memory(process, at, &mut bytes).ok()?;
        let word = |k: usize| layout::u64_at(&bytes, k * 8);
        let mut general = [0; 16];
        for (k, register) in general.iter_mut().enumerate() {
            *register = word(k)?;
        }
        let flags = self.flags(&bytes)?;
        Some(CpuMemory {
            general,
            rip: layout::u64_at(&bytes, self.rip)?,
            mxcsr: self.mxcsr(&bytes)?,
            flags,
        })
    }
}

#[cfg(test)]
mod tests;
