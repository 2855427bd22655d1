"""Drives Keyframe's VMs, and reads its stores and recordings.

::

    with keyframe.run("qemu-system-x86_64 ...", store="S") as vm:
        base = vm.take()
        clones = vm.branch(base, 20)
        results = clones.exec(["pytest"])
        vm.rollback(base)

    with keyframe.Store("S") as store:
        for checkpoint in store.checkpoints():
            print(checkpoint.id, checkpoint.taken_at, checkpoint.pause_ns)
        latest = store.checkpoint("latest")
        with latest.ram() as ram:
            ram.pages           # uint8, (pages, 4096), mapped: row n is guest-physical page n
        for page in latest.dirty_pages():
            print(page.block, page.page, hex(page.address), page.content[:8])

    keyframe.Recording("R").console(marker="login:")
    keyframe.scan_memtrace("A").filter(polars.col("flags") & keyframe.WRITE != 0)

The package runs the program ``keyframe``, which `find_program` finds, and reads its documented
formats.
"""

from . import aio
from .agent import Completed, GuestAgent
from .checkpoints import Checkpoint, History
from .clones import Clone, Clones, branch, restore
from .diffs import Diff, RegionDiff
from .errors import (
    AgentError,
    AgentLost,
    AgentRefused,
    BadAnswer,
    CommandFailed,
    GuestPanicked,
    KeyframeError,
    LayoutDiffers,
    MissingExtra,
    MountFailed,
    NameTaken,
    NoAgent,
    NoRam,
    NoStore,
    NoVm,
    ProgramNotFound,
    StoreFull,
    StoreLocked,
    TimedOut,
    UnknownCheckpoint,
    UnreadablePages,
    UsageError,
    VmEnded,
    WatchdogExpired,
)
from .images import Mount
from .memtraces import DEVICE, PHYSICAL_UNKNOWN, WRITE, read_memtrace, scan_memtrace
from .pages import DirtyPage
from .program import KeyframeWarning, find_program
from .ram import PAGE_BYTES, Ram, RamPart, RamRange
from .recordings import ConsoleLine, Interval, Recording
from .starting import attach, connect, run
from .status import RolledBack, Status
from .store import Store
from .vm import Vm

__all__ = [
    "DEVICE",
    "PAGE_BYTES",
    "PHYSICAL_UNKNOWN",
    "WRITE",
    "AgentError",
    "AgentLost",
    "AgentRefused",
    "BadAnswer",
    "Checkpoint",
    "Clone",
    "Clones",
    "CommandFailed",
    "Completed",
    "ConsoleLine",
    "Diff",
    "DirtyPage",
    "GuestAgent",
    "GuestPanicked",
    "History",
    "Interval",
    "KeyframeError",
    "KeyframeWarning",
    "LayoutDiffers",
    "MissingExtra",
    "Mount",
    "MountFailed",
    "NameTaken",
    "NoAgent",
    "NoRam",
    "NoStore",
    "NoVm",
    "ProgramNotFound",
    "Ram",
    "RamPart",
    "RamRange",
    "Recording",
    "RegionDiff",
    "RolledBack",
    "Status",
    "Store",
    "StoreFull",
    "StoreLocked",
    "TimedOut",
    "UnknownCheckpoint",
    "UnreadablePages",
    "UsageError",
    "Vm",
    "VmEnded",
    "WatchdogExpired",
    "aio",
    "attach",
    "branch",
    "connect",
    "find_program",
    "read_memtrace",
    "restore",
    "run",
    "scan_memtrace",
]
