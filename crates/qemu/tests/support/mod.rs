//! QEMUs to test against, a guest for them, and looking at its RAM.

// Each test file uses its own part of this.
#![allow(dead_code)]

pub mod foreign;
pub mod libvirt;

use keyframe_machine::MachineSpec;
use keyframe_qemu::restore::{RamSource, RestoreSource};
use keyframe_qemu::{HostBlock, Invocation, LaunchOptions, Vm};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, PageRange, RamLayout, ZERO_PAGE};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a guest may take for anything; far more than it needs on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// The programs of the QEMUs to test with.
pub fn qemus() -> Vec<String> {
    keyframe_testing::qemus().into_iter().map(|qemu| qemu.path).collect()
}

/// Assembles the guest into `dir`.
pub fn payload(dir: &Path, pages: u32) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/payload.S");
    let (object, firmware) = (dir.join("payload.o"), dir.join("payload.bin"));
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program)
            .args(arguments)
            .output()
            .unwrap_or_else(|e| panic!("run {program}: {e}"));
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    run(
        "as",
        &["--32", "--defsym", &format!("NPAGES={pages}"), "-o", &text(&object), &text(&source)],
    );
    run("objcopy", &["-O", "binary", "-j", ".text", &text(&object), &text(&firmware)]);
    assert_eq!(std::fs::metadata(&firmware).unwrap().len(), 0x10000);
    firmware
}

/// A VM that is killed with its test.
pub struct Guest {
    pub vm: Vm,
    pub run_dir: PathBuf,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.vm.kill();
    }
}

/// Launches `line`, paused.
pub fn launch(qemu: &str, line: &[String], run_dir: &Path) -> keyframe_qemu::Result<Guest> {
    let words =
        std::iter::once(qemu.to_owned()).chain(line.iter().cloned()).map(OsString::from).collect();
    let options = LaunchOptions { run_dir: run_dir.into() };
    Ok(Guest { vm: Vm::launch(&Invocation::parse(words)?, &options)?, run_dir: run_dir.into() })
}

/// A line of words.
pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// The contents of each block, read from QEMU's memory.
pub fn read_blocks(pid: u32, blocks: &[HostBlock]) -> Vec<Vec<u8>> {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let read = |block: &HostBlock| {
        let mut bytes = vec![0; block.block.total_bytes as usize];
        memory.read_exact_at(&mut bytes, block.host.0).unwrap();
        bytes
    };
    blocks.iter().map(read).collect()
}

/// A checkpoint in memory.
pub struct Checkpoint {
    pub source: RestoreSource,
    pub device_state: Vec<u8>,
    pub ram: Vec<Vec<u8>>,
}

/// Takes one of a paused VM.
pub fn checkpoint(vm: &mut Vm) -> Checkpoint {
    let device_state = vm.save_devices().unwrap();
    let blocks = vm.ram_blocks().unwrap();
    let layout = RamLayout::new(blocks.iter().map(|b| b.block.clone()).collect()).unwrap();
    assert_eq!(layout, vm.ram_layout().unwrap());
    let ram = read_blocks(vm.pid(), &blocks);
    let command = vm.user_command().to_vec();
    let invocation = Invocation::parse(command.iter().map(OsString::from).collect()).unwrap();
    let identity = invocation.identity().unwrap();
    let machine = MachineSpec {
        user_command: command,
        binary_path: identity.path.to_str().unwrap().into(),
        vmm_version: identity.version,
        binary_blake3: identity.blake3,
        machine_type: vm.machine_type().unwrap(),
        working_directory: std::env::current_dir().unwrap().to_str().unwrap().into(),
        missing_cpu_features: Some(vm.cpu_lacks().unwrap()),
        read_files: None,
        ..MachineSpec::default()
    };
    let source = RestoreSource { machine, ram: layout };
    Checkpoint { source, device_state, ram }
}

impl RamSource for Checkpoint {
    /// In falling order: a source may give pages in any.
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        for page in range.iter().collect::<Vec<_>>().into_iter().rev() {
            let (block, at) = self.source.ram.locate(page).unwrap();
            let bytes: &Page = self.ram[block][at as usize * PAGE_BYTES..].first_chunk().unwrap();
            if *bytes != ZERO_PAGE {
                sink(page, bytes)?;
            }
        }
        Ok(())
    }
}

/// What the guest has said so far.
pub fn said(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// Waits until the guest has said what `done` waits for.
pub fn wait_for(path: &Path, what: &str, done: impl Fn(&str) -> bool) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let text = said(path);
        if done(&text) {
            return text;
        }
        let tail: String =
            text.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect();
        assert!(Instant::now() < deadline, "the guest never came to {what}; it said ...{tail:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The passes that `text` tells of, in order.
pub fn passes(text: &str) -> Vec<u32> {
    text.lines().filter(|l| l.len() == 8).map(|l| u32::from_str_radix(l, 16).unwrap()).collect()
}
