"""HTML of checkpoints, histories and differences, for notebooks.

All functions are pure: they use what they are given, and run no command. All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints import Checkpoint
    from .diffs import Diff, RegionDiff

#: A longer table shows the first row, and the newest others.
_ROWS_MAX = 100


def checkpoint_html(checkpoint: Checkpoint) -> str:
    """A table with the properties of a checkpoint."""
    c = checkpoint
    rows = [
        ("VM", c.vm),
        ("taken at", _time(c.taken_at)),
        ("tags", ", ".join(c.tags) or "none"),
        ("parent", "none" if c.parent is None else str(c.parent)),
        ("reason", c.reason),
        ("epoch", str(c.epoch)),
        ("pause", duration(c.pause_ns)),
        ("pages written", f"{c.dirty_pages_written:,}"),
        ("stored", size(c.stored_bytes)),
        ("RAM", size(c.ram_bytes)),
    ]
    return _captioned(
        f"checkpoint {c.id}", "".join(_row([name, value], "td") for name, value in rows)
    )


def history_html(checkpoints: Sequence[Checkpoint]) -> str:
    """A table with a row for each checkpoint, from old to new."""
    names = ["id", "tags", "VM", "taken at", "parent", "pause", "pages written", "stored"]
    shown: list[Checkpoint] = list(checkpoints)
    left_out = max(0, len(shown) - _ROWS_MAX)
    if left_out:
        shown = [shown[0], *shown[len(shown) - _ROWS_MAX + 1 :]]
    rows = [
        _row(
            [
                str(c.id),
                ", ".join(c.tags),
                c.vm,
                _time(c.taken_at),
                "" if c.parent is None else str(c.parent),
                duration(c.pause_ns),
                f"{c.dirty_pages_written:,}",
                size(c.stored_bytes),
            ],
            "td",
        )
        for c in shown
    ]
    if left_out:
        rows.insert(1, f'<tr><td colspan="{len(names)}">{left_out} more</td></tr>')
    count = f"{len(checkpoints)} checkpoint{'' if len(checkpoints) == 1 else 's'}"
    return _captioned(count, _row(names, "th") + "".join(rows))


def diff_html(diff: Diff) -> str:
    """A table with a row for each RAM block and disk of two checkpoints."""
    names = ["", "pages", "changed", "of these zero before", "zero after", "changed bytes"]
    rows = [_region("RAM", region) for region in diff.ram]
    rows += [_region("disk", region) for region in diff.disks]
    devices = "" if diff.same_devices else ", the states of the devices differ"
    caption = f"checkpoints {diff.first} and {diff.second}{devices}"
    return _captioned(caption, _row(names, "th") + "".join(rows))


def _region(kind: str, region: RegionDiff) -> str:
    texts = [f"{kind} {region.name}", f"{region.pages:,}", f"{region.changed_pages:,}"]
    texts += [f"{region.from_zero_pages:,}", f"{region.to_zero_pages:,}"]
    return _row([*texts, size(region.changed_bytes)], "td")


def _captioned(caption: str, rows: str) -> str:
    return f"<table><caption>{escape(caption)}</caption>{rows}</table>"


def _row(texts: Iterable[str], cell: str) -> str:
    """
    >>> _row(["a<b", "2"], "td")
    '<tr><td>a&lt;b</td><td>2</td></tr>'
    """
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"


def _time(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def duration(ns: int) -> str:
    """
    >>> duration(950), duration(4_200_000), duration(61_000_000_000)
    ('0.001 ms', '4.200 ms', '61.0 s')
    """
    return f"{ns / 1e6:.3f} ms" if ns < 10_000_000_000 else f"{ns / 1e9:.1f} s"


def size(count: int) -> str:
    """
    >>> size(0), size(1536), size(3 << 20), size(5 << 40)
    ('0 B', '1.5 KiB', '3.0 MiB', '5120.0 GiB')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
