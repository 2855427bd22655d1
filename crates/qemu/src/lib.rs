//! QEMU from outside: its command line, its monitor, its RAM blocks, the state of its devices;
//! launch, attach, restore.
//!
//! ```text
//!   Invocation ──launch──▶ Vm ──audit──▶ refusals
//!   (user's line)           │
//!   pid, monitor ──attach───┤
//!                           ├─ qmp ───────▶ stop, cont, events           Watchdog (another process) ─▶ cont
//!                           ├─ ram_blocks ▶ name, size, host address
//!                           └─ save ──────▶ device state ──▶ [store] ──▶ stream::splice_ram
//!                                                                              │
//!   RestoreSource ──Plan──▶ restore::start: fresh QEMU, RAM in memfds, -incoming ◀┘
//! ```
//!
//! Invariants:
//! 1. The user's line is the VM's definition. What is added to it changes neither the machine nor
//!    what the user sees of it.
//! 2. Nothing that QEMU, a guest or a file says is trusted: text and streams are parsed with
//!    bounds, each wait ends.
//! 3. A VM that could not be checkpointed exactly is refused before its first instruction
//!    ([`Vm::audit`]), or, where it runs already, before anything is asked of it but what it is.
//! 4. A VM that was attached to is left as it was found.
//!
//! Left out: tracking and reading RAM (the kernel crate), when to checkpoint (capture), where it is
//! kept (store). QEMU 7.2 to 11; guests of the processors of `keyframe_machine::Processor`.

mod accelerator_check;
mod attach;
mod audit;
mod binary;
mod binary_cache;
mod blocknodes;
mod changed_line;
mod console_sockets;
mod deletions;
mod error;
mod eventfd_coalesce;
pub mod fleece;
#[doc(hidden)]
pub mod fuzzing;
mod guest_end;
mod guestmap;
mod hotplug;
mod invocation;
mod libvirt_disks;
mod lifetime;
mod machine_shape;
pub mod probe;
mod process;
pub mod qmp;
mod ramblock;
mod ramblock_scan;
pub mod restore;
pub mod rollback;
mod spawn;
mod sse_flags;
mod standstill;
mod state_pipe;
mod statefile;
mod thread_affinity;
mod virtio_queues;
mod vm;
mod vmm;
pub mod watchdog;

pub use attach::{AttachOptions, Monitor};
pub use binary::QemuIdentity;
pub use blocknodes::{LineDisk, WritableNode};
pub use changed_line::MachineLines;
pub use error::{Error, Result};
pub use guest_end::EndHold;
pub use invocation::Invocation;
pub use keyframe_machine::ReadFile;
pub use keyframe_machine::{Accelerator, HostBlock, Processor};
pub use keyframe_qemu_cmdline::{
    self as cmdline, Backing, BackingImage, DiskNames, DiskServer, Drive, LineDifference,
    LineDrive, Medium, NicSockets, line_difference, media_of, net_gate, recording,
};
pub use keyframe_qemu_cmdline::{NamedFile, named_files};
pub use keyframe_qemu_stream as stream;
pub use keyframe_vmm::{AuditFinding, Severity, VmExit};
pub use libvirt_disks::LibvirtDisk;
pub use machine_shape::{MachineChange, MachineShape};
pub use qmp::{Qmp, QmpEvent, RunStatus, Stopped};
pub use ramblock::find_ram_blocks;
pub use virtio_queues::VirtioQueues;
pub use vm::{LaunchOptions, Vm};
pub use vmm::{QemuRestorer, capabilities};
