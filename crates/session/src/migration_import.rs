//! A migration stream that QEMU wrote becomes a checkpoint.
//!
//! ```text
//!   stream: machine, blocks ──▶ QEMU of the line, never run: same machine? which blocks, where? ──▶ ended
//!           pages ────────────▶ store
//!           devices ──────────▶ sealed with them
//! ```

use crate::error::{Error, Result};
use crate::event::{Event, EventSink};
use crate::launch::{machine_meta, refuse};
use crate::run_dir;
use keyframe_qemu::stream::{MigrationBlock, MigrationReader, cpu_registers};
use keyframe_qemu::{Invocation, LaunchOptions, Vm};
use keyframe_store::{MachineMeta, Run, SealRequest, Sealed, Store, Timing};
use keyframe_units::{PAGE_BYTES, PageIndex, RamBlock, RamLayout};
use std::io::{self, Read};

/// What a stream is imported as.
pub struct MigrationImport<'a> {
    /// The store.
    pub store: &'a Store,
    /// The command line of the QEMU that wrote the stream, without `-incoming`.
    pub invocation: &'a Invocation,
    /// The VM's name in the store; `None` for QEMU's `-name`, or `vm`.
    pub name: Option<&'a str>,
    /// A tag for the checkpoint.
    pub tag: Option<&'a str>,
    /// Hears what the machine's audit finds.
    pub events: &'a dyn EventSink<Event>,
}

impl MigrationImport<'_> {
    /// Reads `stream` into the store as a checkpoint, and returns it.
    ///
    /// Errors: the stream cannot be read, or has a form that is not supported; QEMU refuses the
    /// command line; [`Error::OtherStream`] if the line makes another machine; the store cannot be
    /// written.
    pub fn read(&self, stream: impl Read) -> Result<Sealed> {
        let name = self.name.map(str::to_owned);
        let own = || run_dir::name_from(self.invocation.vm_name().unwrap_or("vm"));
        let name = name.unwrap_or_else(own);
        let incoming = MigrationReader::begin(stream).map_err(keyframe_qemu::Error::from)?;
        let mut writer = self
            .store
            .lock_writer(&format!("keyframe import, VM {name}"))
            .map_err(|e| Error::store(self.store.path(), e))?;
        let (machine, layout) = self.ask()?;
        let ram = same_machine(&incoming, &machine, &layout)?;
        let run = writer.begin_run(&name, &ram).map_err(|e| Error::store(self.store.path(), e))?;
        self.store_stream(run, incoming, machine, ram)
    }

    fn store_stream<R: Read>(
        &self,
        mut run: Run,
        incoming: MigrationReader<R>,
        machine: MachineMeta,
        ram: RamLayout,
    ) -> Result<Sealed> {
        let of_store = |e| Error::store(self.store.path(), e);
        let firsts = first_pages(&ram, incoming.blocks())?;
        let mut failed = None;
        let devices = incoming.finish(&mut |block, offset, page| {
            let first = firsts.get(block).copied().unwrap_or_default();
            run.put_page(PageIndex(first + offset / PAGE_BYTES as u64), page).map(drop).map_err(
                |e| {
                    failed = Some(e);
                    io::Error::other("the store does not take it")
                },
            )
        });
        let device_state = devices.map_err(|e| match failed {
            Some(error) => of_store(error),
            None => keyframe_qemu::Error::from(e).into(),
        })?;
        if let Ok(cpus) = cpu_registers(&device_state, machine.processor)
            && cpus.len() != machine.vcpus as usize
        {
            return Err(another("processors", &cpus.len().to_string(), &machine.vcpus.to_string()));
        }
        let request = SealRequest {
            taken_at: jiff::Timestamp::now(),
            since_boot: None,
            reason: "import".into(),
            parent: None,
            ram,
            machine,
            members: Vec::new(),
            timing: Timing { strategy: "import".into(), ..Timing::default() },
            device_state: &device_state,
            tag: self.tag,
        };
        let sealed = run.seal(request).map_err(of_store)?;
        run.finish().map_err(of_store)?;
        Ok(sealed)
    }

    /// Starts the machine, never runs it, and asks what it is.
    fn ask(&self) -> Result<(MachineMeta, RamLayout)> {
        let directory =
            std::env::current_dir().map_err(|e| Error::io("find the working directory", e))?;
        let identity = self.invocation.identity()?;
        let sockets = tempfile::Builder::new()
            .prefix("keyframe-import-")
            .tempdir()
            .map_err(|e| Error::io("make a directory for QEMU's monitor", e))?;
        let options = LaunchOptions { run_dir: sockets.path().into() };
        let mut vm = Vm::launch(self.invocation, &options)?;
        let asked = refuse(&mut vm, self.events).and_then(|()| {
            let meta = machine_meta(&mut vm, &identity, &directory)?;
            Ok((meta, vm.ram_layout()?))
        });
        let ended = vm.kill();
        let asked = asked?;
        ended?;
        Ok(asked)
    }
}

/// The machine's RAM blocks with the bytes that the stream uses of each, if stream and machine fit
/// together.
fn same_machine<R: Read>(
    incoming: &MigrationReader<R>,
    machine: &MachineMeta,
    layout: &RamLayout,
) -> Result<RamLayout> {
    if let Some(found) = incoming.machine_type().filter(|found| *found != machine.machine_type) {
        return Err(another("machine type", found, &machine.machine_type));
    }
    let here = |name: &str| layout.blocks().iter().find(|b| b.name == name);
    if let Some(extra) = incoming.blocks().iter().find(|l| here(&l.name).is_none()) {
        let what = format!("RAM block {}", extra.name);
        return Err(another(&what, &format!("{} bytes", extra.used_bytes), "absent"));
    }
    let in_use = |block: &RamBlock| -> Result<RamBlock> {
        let listed = incoming.blocks().iter().find(|l| l.name == block.name);
        // A block that can be resized uses less than it reserves; main RAM cannot.
        let resizable = block.used_bytes < block.total_bytes;
        let fits =
            |used: u64| used == block.total_bytes || (resizable && used <= block.total_bytes);
        let Some(listed) = listed.filter(|l| fits(l.used_bytes)) else {
            let what = format!("RAM block {}", block.name);
            let there = listed.map_or("absent".into(), |l| format!("{} bytes", l.used_bytes));
            return Err(another(&what, &there, &format!("{} bytes", block.total_bytes)));
        };
        Ok(RamBlock { used_bytes: listed.used_bytes, ..block.clone() })
    };
    let blocks = layout.blocks().iter().map(in_use).collect::<Result<Vec<_>>>()?;
    Ok(RamLayout::new(blocks)?)
}

fn another(what: &str, stream: &str, here: &str) -> Error {
    Error::OtherStream { what: what.into(), stream: stream.into(), here: here.into() }
}

/// Returns the first page in the layout of each block of the stream.
fn first_pages(ram: &RamLayout, listed: &[MigrationBlock]) -> Result<Vec<u64>> {
    let first = |l: &MigrationBlock| {
        let number = ram.blocks().iter().position(|b| b.name == l.name);
        number.map(|n| ram.pages_of(n).first.0).ok_or_else(|| another("RAM", &l.name, "without it"))
    };
    listed.iter().map(first).collect()
}
