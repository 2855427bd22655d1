"""Reads Keyframe's stores and recordings.

::

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

from .checkpoints import Checkpoint
from .diffs import Diff, RegionDiff
from .errors import (
    BadAnswer,
    CommandFailed,
    KeyframeError,
    LayoutDiffers,
    MissingExtra,
    MountFailed,
    NoRam,
    NoStore,
    ProgramNotFound,
    StoreLocked,
    TimedOut,
    UnknownCheckpoint,
    UnreadablePages,
    UsageError,
)
from .images import Mount
from .memtraces import DEVICE, PHYSICAL_UNKNOWN, WRITE, read_memtrace, scan_memtrace
from .pages import DirtyPage
from .program import KeyframeWarning, find_program
from .ram import PAGE_BYTES, Ram, RamPart, RamRange
from .recordings import ConsoleLine, Interval, Recording
from .store import Store

__all__ = [
    "DEVICE",
    "PAGE_BYTES",
    "PHYSICAL_UNKNOWN",
    "WRITE",
    "BadAnswer",
    "Checkpoint",
    "CommandFailed",
    "ConsoleLine",
    "Diff",
    "DirtyPage",
    "Interval",
    "KeyframeError",
    "KeyframeWarning",
    "LayoutDiffers",
    "MissingExtra",
    "Mount",
    "MountFailed",
    "NoRam",
    "NoStore",
    "ProgramNotFound",
    "Ram",
    "RamPart",
    "RamRange",
    "Recording",
    "RegionDiff",
    "Store",
    "StoreLocked",
    "TimedOut",
    "UnknownCheckpoint",
    "UnreadablePages",
    "UsageError",
    "find_program",
    "read_memtrace",
    "scan_memtrace",
]
