//! The tools, one file each, and the plugin's entry point.

mod baseline;
mod cache;
mod cache_bounds;
mod counts;
mod icount;
mod memtrace;
mod pages;
mod syscalls;
mod watch;

pub use memtrace::layout as trace;
pub use syscalls::{GENERIC_NUMBERS, NO_DIRECT_MAP, NO_TASK, NOT_ASKED};

use crate::api::{self, Block, Info, PluginId, RawBlock};
use crate::arguments::Arguments;
use crate::board::Board;
use crate::cut::{PartTable, TableTool};
use crate::physical::{FILE_ARGUMENTS, Physical};
use crate::state::State;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;

/// A tool. `data` is the pointer to register with its callbacks.
pub trait Tool: 'static {
    /// The vCPU exists; nothing has been translated.
    fn vcpu_is_there(&mut self) {}

    /// A block is being translated: registers callbacks and counters of its instructions.
    fn translate(&mut self, block: &Block<'_>, data: *mut c_void);

    /// QEMU exits; the vCPU has stopped.
    fn exit(&mut self) {}
}

/// The inputs of a tool.
pub struct Setup {
    /// QEMU's arguments; each tool takes its own.
    pub arguments: Arguments,
    /// The board.
    pub board: &'static Board,
    /// The guest's processor, as QEMU names it.
    pub target: String,
}

impl Setup {
    /// The guest's memory; with its files if the tool needs the contents.
    pub fn physical(&mut self, with_file: bool) -> Result<Physical, String> {
        let ranges = self.arguments.text("ram")?;
        let mut files = Vec::new();
        if with_file {
            files.push(self.arguments.text(FILE_ARGUMENTS[0])?);
            files.extend(
                FILE_ARGUMENTS[1..].iter().map_while(|name| self.arguments.text(name).ok()),
            );
        }
        Physical::new(&ranges, &files)
    }

    /// A table tool for `table`. Arguments: `parts`, `cuts`.
    pub fn reduced<R: PartTable>(&mut self, table: R) -> Result<TableTool<R>, String> {
        let dir = PathBuf::from(self.arguments.text("parts")?);
        let many = match self.arguments.text("cuts")?.as_str() {
            "one" => false,
            "many" => true,
            other => return Err(format!("argument cuts={other} is neither one nor many")),
        };
        Ok(TableTool::new(table, self.board, dir, many))
    }
}

/// A tool without its type: QEMU's callbacks for translation and exit have no data.
struct Installed {
    data: *mut c_void,
    vcpu_is_there: unsafe fn(*mut c_void),
    translate: unsafe fn(*mut c_void, &Block<'_>),
    exit: unsafe fn(*mut c_void),
}

// SAFETY: only callbacks use the data, one at a time (`State::of`).
unsafe impl Send for Installed {}
// SAFETY: as above.
unsafe impl Sync for Installed {}

static INSTALLED: OnceLock<Vec<Installed>> = OnceLock::new();

/// Ends QEMU with a message. A callback cannot return an error.
pub fn fail(problem: &str) -> ! {
    eprintln!("keyframe plugin: {problem}");
    std::process::abort();
}

fn prepare<T: Tool>(tool: T) -> Installed {
    let data = State::leak(tool).data();
    Installed {
        data,
        // SAFETY: `data` is this type's, and QEMU calls one at a time.
        vcpu_is_there: |data| unsafe { State::<T>::of(data) }.vcpu_is_there(),
        // SAFETY: as above.
        translate: |data, block| unsafe { State::<T>::of(data) }.translate(block, data),
        // SAFETY: as above.
        exit: |data| unsafe { State::<T>::of(data) }.exit(),
    }
}

fn make(mut arguments: Arguments, target: String) -> Result<(), String> {
    let names = arguments.text("tool")?;
    let path = arguments.text("board")?;
    let file = File::options().read(true).write(true).open(&path);
    let board = file
        .and_then(|file| Board::open(&file))
        .map_err(|error| format!("board {path}: {error}"))?;
    let board = board.map_err(|_| format!("{path} is not a board"))?;
    let mut setup = Setup { arguments, board: Box::leak(Box::new(board)), target };
    let tools: Result<Vec<_>, String> =
        names.split('+').map(|name| by_name(name, &mut setup)).collect();
    let tools = tools?;
    setup.arguments.done()?;
    assert!(INSTALLED.set(tools).is_ok(), "installed once");
    Ok(())
}

fn by_name(name: &str, setup: &mut Setup) -> Result<Installed, String> {
    Ok(match name {
        "icount" => prepare(icount::Icount::new(setup)),
        "memtrace" => prepare(memtrace::Memtrace::new(setup)?),
        "counts" => prepare(counts::Counts::new(setup)?),
        "pages" => prepare(pages::Pages::of(setup)?),
        "watch" => prepare(watch::Watch::new(setup)?),
        "syscalls" => match setup.target.as_str() {
            "x86_64" => prepare(syscalls::SyscallsX86::new(setup)?),
            "aarch64" => prepare(syscalls::SyscallsAarch64::new(setup)?),
            other => return Err(format!("tool syscalls does not know the processor {other}")),
        },
        "cache" => prepare(cache::Cache::of(setup)?),
        "cache-bounds" => prepare(cache_bounds::CacheBounds::of(setup)?),
        "nothing" => prepare(baseline::Nothing),
        "callback" => prepare(baseline::Callback),
        "text" => prepare(baseline::Text::new(setup)?),
        other => return Err(format!("tool {other} is unknown")),
    })
}

/// The installed tools, at the events of the VM.
struct InstalledTools;

impl api::Events for InstalledTools {
    fn vcpu(vcpu: c_uint) {
        if vcpu != 0 {
            fail("a second vCPU was added; replays have one");
        }
        for tool in INSTALLED.get().into_iter().flatten() {
            // SAFETY: its own data, from a callback.
            unsafe { (tool.vcpu_is_there)(tool.data) };
        }
    }

    fn translated(raw: *mut RawBlock) {
        for tool in INSTALLED.get().into_iter().flatten() {
            // SAFETY: the block that QEMU hands to this callback.
            let block = unsafe { Block::new(raw) };
            // SAFETY: its own data, from a callback.
            unsafe { (tool.translate)(tool.data, &block) };
        }
    }

    fn exit() {
        for tool in INSTALLED.get().into_iter().flatten() {
            // SAFETY: its own data; the vCPU has stopped.
            unsafe { (tool.exit)(tool.data) };
        }
    }
}

/// The plugin's entry point. If it does not return 0, QEMU does not start.
///
/// # Safety
/// QEMU calls it, with a valid `info` and `count` strings.
#[cfg_attr(
    any(keyframe_interface = "1", keyframe_interface = "4", keyframe_interface = "7"),
    unsafe(no_mangle)
)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: PluginId,
    info: *const Info,
    count: c_int,
    values: *const *const c_char,
) -> c_int {
    // SAFETY: QEMU's promise.
    let info = unsafe { &*info };
    if !info.system || info.vcpus != 1 {
        eprintln!("keyframe plugin: the VM must have one vCPU, as replays have");
        return 1;
    }
    // SAFETY: QEMU's promise.
    let arguments = unsafe { Arguments::new(count, values) };
    // SAFETY: QEMU's promise.
    let target = unsafe { info.target() };
    let made = arguments.and_then(|arguments| make(arguments, target));
    if let Err(problem) = made {
        eprintln!("keyframe plugin: {problem}");
        return 1;
    }
    api::register::<InstalledTools>(id);
    0
}
