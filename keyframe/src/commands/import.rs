//! `keyframe import`: a migration stream that QEMU wrote becomes a checkpoint.
//!
//! ```text
//!   stream: machine, blocks ──▶ QEMU of the line, never run: same machine? which blocks, where? ──▶ ended
//!           pages ────────────▶ store
//!           devices ──────────▶ sealed with them
//! ```

use super::StoreArg;
use crate::failure::{DONE, Failure, Outcome};
use crate::output;
use crate::words::StderrWords;
use keyframe_inspect::entry::Entry;
use keyframe_qemu::stream::{MigrationBlock, MigrationReader, cpu_registers};
use keyframe_qemu::{Invocation, LaunchOptions, Vm};
use keyframe_session::run_dir;
use keyframe_session::{machine_meta, refuse};
use keyframe_store::{MachineMeta, Run, SealRequest, Sealed, Timing};
use keyframe_units::{PAGE_BYTES, PageIndex, RamBlock, RamLayout};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bytes of the stream that are read at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Make a checkpoint of a migration stream that QEMU wrote to a file
#[derive(clap::Args, Debug)]
#[command(
    after_help = "The command line behind -- is that of the QEMU that wrote the stream, without -incoming. Keyframe starts a QEMU with it for a
moment, to ask for the layout of its RAM. The guest does not run. The checkpoint is then like any other.

Keyframe refuses streams made with multifd, compress, xbzrle, postcopy-ram, mapped-ram or x-ignore-shared.

Examples:
  (qemu) migrate \"exec:cat > vm.mig\"
  keyframe import --store S vm.mig -- qemu-system-x86_64 -m 1G ...
  zstdcat vm.mig.zst | keyframe import --store S - --tag golden -- qemu-system-x86_64 -m 1G ..."
)]
pub struct Import {
    #[command(flatten)]
    store: StoreArg,
    /// The stream, or - for standard input
    file: PathBuf,
    /// The VM's name in the store [default: QEMU's -name, or `vm`]
    #[arg(long)]
    name: Option<String>,
    /// A name for the checkpoint
    #[arg(long)]
    tag: Option<String>,
    /// Print JSON: the entry of `list`
    #[arg(long)]
    json: bool,
    /// QEMU's command line
    #[arg(last = true, required = true, value_name = "QEMU COMMAND")]
    command: Vec<OsString>,
}

impl Import {
    /// Reads the stream into the store.
    pub fn run(self) -> Outcome {
        let store = self.store.open()?;
        if let Some(tag) = &self.tag {
            keyframe_store::check_tag(tag).map_err(|e| self.store.failure(&e))?;
        }
        let invocation = Invocation::parse(self.command.clone()).map_err(|e| Failure::qemu(&e))?;
        let name = self.name.clone();
        let name = name.unwrap_or_else(|| run_dir::name_from(invocation.vm_name().unwrap_or("vm")));
        let incoming =
            MigrationReader::begin(self.input()?).map_err(|e| Failure::qemu(&e.into()))?;
        let mut writer = store
            .lock_writer(&format!("keyframe import, VM {name}"))
            .map_err(|e| self.store.failure(&e))?;
        let (machine, layout) = ask(&invocation)?;
        let ram = same_machine(&incoming, &machine, &layout)?;
        let run = writer.begin_run(&name, &ram).map_err(|e| self.store.failure(&e))?;
        let sealed = self.store_stream(run, incoming, machine, ram)?;
        if self.json {
            output::json(&Entry::of(&sealed))?;
        } else {
            eprintln!("keyframe: {} is checkpoint {} of VM {name}", self.file.display(), sealed.id);
        }
        Ok(DONE)
    }

    fn input(&self) -> Result<BufReader<Box<dyn Read>>, Failure> {
        let input: Box<dyn Read> = if self.file == Path::new("-") {
            Box::new(io::stdin())
        } else {
            let fail = |e: io::Error| Failure::new(format!("open {}: {e}", self.file.display()));
            Box::new(File::open(&self.file).map_err(fail)?)
        };
        Ok(BufReader::with_capacity(BUFFER_BYTES, input))
    }

    fn store_stream<R: Read>(
        &self,
        mut run: Run,
        incoming: MigrationReader<R>,
        machine: MachineMeta,
        ram: RamLayout,
    ) -> Result<Sealed, Failure> {
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
            Some(error) => self.store.failure(&error),
            None => Failure::qemu(&e.into()),
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
            tag: self.tag.as_deref(),
        };
        let sealed = run.seal(request).map_err(|e| self.store.failure(&e))?;
        run.finish().map_err(|e| self.store.failure(&e))?;
        Ok(sealed)
    }
}

/// Starts the machine, never runs it, and asks what it is.
fn ask(invocation: &Invocation) -> Result<(MachineMeta, RamLayout), Failure> {
    let directory = std::env::current_dir()
        .map_err(|e| Failure::new(format!("find the working directory: {e}")))?;
    let identity = invocation.identity().map_err(|e| Failure::qemu(&e))?;
    let sockets = tempfile::Builder::new()
        .prefix("keyframe-import-")
        .tempdir()
        .map_err(|e| Failure::new(format!("make a directory for QEMU's monitor: {e}")))?;
    let options = LaunchOptions { run_dir: sockets.path().into() };
    let mut vm = Vm::launch(invocation, &options).map_err(|e| Failure::qemu(&e))?;
    let asked = refuse(&mut vm, &StderrWords::default()).and_then(|()| {
        let meta = machine_meta(&mut vm, &identity, &directory)?;
        Ok((meta, vm.ram_layout()?))
    });
    let ended = vm.kill();
    let asked = asked?;
    ended.map_err(|e| Failure::qemu(&e))?;
    Ok(asked)
}

/// The machine's RAM blocks with the bytes that the stream uses of each, if stream and machine fit
/// together.
fn same_machine<R: Read>(
    incoming: &MigrationReader<R>,
    machine: &MachineMeta,
    layout: &RamLayout,
) -> Result<RamLayout, Failure> {
    if let Some(found) = incoming.machine_type().filter(|found| *found != machine.machine_type) {
        return Err(another("machine type", found, &machine.machine_type));
    }
    let here = |name: &str| layout.blocks().iter().find(|b| b.name == name);
    if let Some(extra) = incoming.blocks().iter().find(|l| here(&l.name).is_none()) {
        let what = format!("RAM block {}", extra.name);
        return Err(another(&what, &format!("{} bytes", extra.used_bytes), "absent"));
    }
    let in_use = |block: &RamBlock| -> Result<RamBlock, Failure> {
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
    let blocks = layout.blocks().iter().map(in_use).collect::<Result<Vec<_>, _>>()?;
    RamLayout::new(blocks).map_err(|e| Failure::new(format!("the stream's RAM blocks: {e}")))
}

fn another(what: &str, stream: &str, here: &str) -> Failure {
    Failure::new(format!(
        "the stream is another machine's: {what} is {stream} there, {here} by the command line"
    ))
    .fix("give the command line of the QEMU that wrote the stream, and that QEMU binary")
}

/// Returns the first page in the layout of each block of the stream.
fn first_pages(ram: &RamLayout, listed: &[MigrationBlock]) -> Result<Vec<u64>, Failure> {
    let first = |l: &MigrationBlock| {
        let number = ram.blocks().iter().position(|b| b.name == l.name);
        number.map(|n| ram.pages_of(n).first.0).ok_or_else(|| another("RAM", &l.name, "without it"))
    };
    listed.iter().map(first).collect()
}
