"""A checkpoint of ``keyframe list --json``, with its RAM and its differences from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import html, pages
from .errors import BadAnswer, NoRam
from .pages import DirtyPage
from .program import expect_list, expect_object
from .ram import Ram, RamRange, ranges_of

if TYPE_CHECKING:
    from .diffs import Diff
    from .store import Store


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint. `_ns` are nanoseconds, `_bytes` bytes, pages have 4096 bytes.

    `id` is its number in the store, `vm` the name of the VM or group, `run` the run that took it
    and `epoch` its number in that run, from 0. `taken_at` is the time of its pause (UTC, truncated
    to microseconds). `parent` is the checkpoint before it in its run, or the one that the VM was
    restored from or rolled back to; `None` if there is none in the store. `dirty_pages_written` is
    the number of pages written since the checkpoint before, `stored_bytes` the size of its new
    pages in the store. `raw` is its entry of ``list --json``.
    """

    id: int
    vm: str
    run: str
    taken_at: datetime
    reason: str
    epoch: int
    parent: int | None
    tags: tuple[str, ...]
    pinned: bool
    pause_ns: int
    interval_ns: int
    dirty_pages_written: int
    stored_bytes: int
    ram_bytes: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    _store: Store = field(repr=False, compare=False)

    @classmethod
    def of(cls, entry: Any, store: Store) -> Checkpoint:
        """Parses an entry of ``list --json``. Raises `BadAnswer`."""
        raw = expect_object(entry, "list --json")
        try:
            return cls(
                id=int(raw["id"]),
                vm=str(raw["vm"]),
                run=str(raw["run"]),
                taken_at=datetime.fromisoformat(raw["taken_at"]),
                reason=str(raw["reason"]),
                epoch=int(raw["epoch"]),
                parent=None if raw.get("parent") is None else int(raw["parent"]),
                tags=tuple(raw["tags"]),
                pinned=bool(raw.get("pinned", False)),
                pause_ns=int(raw["pause_ns"]),
                interval_ns=int(raw["interval_ns"]),
                dirty_pages_written=int(raw["dirty_pages"]),
                stored_bytes=int(raw["stored_bytes"]),
                ram_bytes=int(raw["ram_bytes"]),
                raw=raw,
                _store=store,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"list --json: a checkpoint of another form: {error!r}") from error

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return html.checkpoint_html(self)

    def details(self) -> Mapping[str, Any]:
        """The output of ``keyframe show --json``: RAM blocks, machine, members of a group, disks."""
        return self._store.details(self.id)

    def members(self) -> tuple[str, ...]:
        """The names of a group's VMs; empty if the checkpoint is of one VM."""
        what = f"checkpoint {self.id}: members"
        return tuple(
            str(expect_object(m, what).get("name")) for m in _members(self.details(), what)
        )

    def ram(self, member: str | None = None) -> Ram:
        """The RAM, for use in a ``with``; for a group, `member` is the name of the VM.

        In ``with store:`` all `Ram` share one mount; otherwise each has its own.

        Raises `NoRam`, `MountFailed`.
        """
        ranges = self._ranges(member)
        stack = ExitStack()
        images = stack.enter_context(self._store.images())
        return Ram(images, self.id, member, ranges, stack.close)

    def dirty_pages(
        self, against: Checkpoint | int | str | None = None, *, member: str | None = None
    ) -> Iterator[DirtyPage]:
        """The pages of RAM whose content differs from the parent's, or from `against`, by rising
        address.

        Writing each `content` at its `address` into the other RAM gives this RAM exactly. Without a
        parent, pages are compared with zeros. This reads and compares the RAM of both checkpoints,
        because no interface lists the written pages: a page that was written with the same content
        is not among them, nor is memory that is in no image (video RAM, ROMs of cards).

        Raises as `ram` does, and `UnreadablePages`, `LayoutDiffers`, `UnknownCheckpoint`.
        """
        with self._pair(against, member) as (before, after):
            yield from pages.dirty_pages(before, after)

    def dirty_mask(
        self, against: Checkpoint | int | str | None = None, *, member: str | None = None
    ) -> NDArray[np.bool_]:
        """As `dirty_pages`, as an array of bool, shape (pages,), by guest-physical page."""
        with self._pair(against, member) as (before, after):
            return pages.dirty_mask(before, after)

    def diff(self, other: Checkpoint | int | str) -> Diff:
        """The differences between this checkpoint, the first, and `other`, counted by ``keyframe
        diff``.
        """
        return self._store.diff(self, other)

    def _pair(self, against: Checkpoint | int | str | None, member: str | None) -> _Pair:
        other = self.parent if against is None else against
        return _Pair(None if other is None else self._store.resolve(other), self, member)

    def _ranges(self, member: str | None) -> list[RamRange]:
        """The address ranges of the VM's RAM blocks."""
        what = f"checkpoint {self.id}: guest_map"
        details = self.details()
        members = [expect_object(m, what) for m in _members(details, what)]
        if not members:
            if member is not None:
                raise NoRam(
                    f"checkpoint {self.id} is of one VM, {self.vm}: it has no member {member}"
                )
            machine = expect_object(details.get("machine"), what)
            found = ranges_of(machine.get("guest_map"), what)
            return found if found else _only_block(details)
        names = ", ".join(str(m.get("name")) for m in members)
        for of in members:
            if member is not None and of.get("name") == member:
                return ranges_of(expect_object(of.get("machine"), what).get("guest_map"), what)
        asked = "name one with member=" if member is None else f"none has the name {member}"
        raise NoRam(f"checkpoint {self.id} is of a group, {self.vm}, of the VMs {names}: {asked}")


class History(list[Checkpoint]):
    """Checkpoints from old to new. A notebook shows them as a table."""

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return html.history_html(self)


class _Pair:
    """The RAM of two checkpoints, open during a comparison."""

    def __init__(self, before: Checkpoint | None, after: Checkpoint, member: str | None) -> None:
        self._before, self._after, self._member = before, after, member
        self._stack = ExitStack()

    def __enter__(self) -> tuple[Ram | None, Ram]:
        with ExitStack() as stack:
            # One mount for both.
            stack.enter_context(self._after._store.images())
            after = stack.enter_context(self._after.ram(self._member))
            before = (
                None
                if self._before is None
                else stack.enter_context(self._before.ram(self._member))
            )
            self._stack = stack.pop_all()
        return before, after

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _members(details: Mapping[str, Any], what: str) -> list[Any]:
    return list(expect_list(details.get("members", []), what))


def _only_block(details: Mapping[str, Any]) -> list[RamRange]:
    """The main RAM of a checkpoint without a map, which has an image only if it is one block from 0
    on.
    """
    for block in expect_list(details.get("ram"), "show --json: ram"):
        known = expect_object(block, "show --json: ram")
        if known.get("kind") == "backend":
            return [RamRange(str(known.get("name")), 0, int(known.get("used_bytes", 0)), 0)]
    return []
