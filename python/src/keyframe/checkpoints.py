"""A checkpoint as ``keyframe list --json`` has it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import pages
from .errors import BadAnswer, NoRam
from .pages import DirtyPage
from .program import expect_list, expect_object
from .ram import Place, Ram, places_of

if TYPE_CHECKING:
    from .diffs import Diff
    from .store import Store


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint. Times with `_ns` are nanoseconds, sizes with `_bytes` bytes, pages are of 4096 bytes.

    `id` is its number in the store, `vm` the VM's (or group's) name, `run` the run that took it and `epoch` its place in that, from 0.
    `taken_at` is when the VM was paused for it (UTC, cut to microseconds). `parent` is the checkpoint that it grew from: the one before in
    its run, or the one that the VM had been brought back to; `None` where there is none, or none any more. `dirty_pages_written` counts
    pages that were written since the one before, `stored_bytes` what its new pages take in the store. `raw` is all that
    ``list --json`` says.
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
        """From an entry of ``list --json``. Raises `BadAnswer`."""
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

    def details(self) -> Mapping[str, Any]:
        """What ``keyframe show --json`` prints: RAM blocks (``ram``), the machine (``machine``), a group's VMs (``members``), disks."""
        return self._store.details(self.id)

    def members(self) -> tuple[str, ...]:
        """The names of a group's VMs; empty where the checkpoint is of one VM."""
        what = f"checkpoint {self.id}: members"
        return tuple(str(expect_object(m, what).get("name")) for m in _members(self.details(), what))

    def ram(self, member: str | None = None) -> Ram:
        """Its RAM, to be used in a ``with``; `member` is the VM where the checkpoint is a group's.

        Within ``with store:`` all share one mount; else each has its own.

        Raises `NoRam`, `MountFailed`.
        """
        places = self._places(member)
        stack = ExitStack()
        images = stack.enter_context(self._store.images())
        return Ram(images, self.id, member, places, stack.close)

    def dirty_pages(
        self, against: Checkpoint | int | str | None = None, *, member: str | None = None
    ) -> Iterator[DirtyPage]:
        """The pages of RAM whose content differs from the parent's, or from `against`, by rising address.

        Putting each one's `content` at its `address` into the other's RAM gives this one's, exactly. Without a parent, pages are
        compared with zeros. The RAM of both is read and compared, as no interface tells which pages were written: so a page that
        was written with what it held before is not among them, and neither is memory that is in no image (video RAM, ROMs of cards).

        Raises as `ram` does, and `UnreadablePages`, `LayoutDiffers`, `UnknownCheckpoint`.
        """
        with self._pair(against, member) as (before, after):
            yield from pages.dirty_pages(before, after)

    def dirty_mask(
        self, against: Checkpoint | int | str | None = None, *, member: str | None = None
    ) -> NDArray[np.bool_]:
        """The same as an array of bool, shape (pages,), by guest-physical page: true where a page differs."""
        with self._pair(against, member) as (before, after):
            return pages.dirty_mask(before, after)

    def diff(self, other: Checkpoint | int | str) -> Diff:
        """What differs between this one and `other`, counted by RAM block and disk (``keyframe diff``); this one is the first."""
        return self._store.diff(self, other)

    def _pair(self, against: Checkpoint | int | str | None, member: str | None) -> _Pair:
        other = self.parent if against is None else against
        return _Pair(None if other is None else self._store.resolve(other), self, member)

    def _places(self, member: str | None) -> list[Place]:
        """Where the RAM blocks of the VM lie."""
        what = f"checkpoint {self.id}: guest_map"
        details = self.details()
        members = [expect_object(m, what) for m in _members(details, what)]
        if not members:
            if member is not None:
                raise NoRam(f"checkpoint {self.id} is of one VM, {self.vm}: it has no member {member}")
            machine = expect_object(details.get("machine"), what)
            found = places_of(machine.get("guest_map"), what)
            return found if found else _only_block(details)
        names = ", ".join(str(m.get("name")) for m in members)
        for of in members:
            if member is not None and of.get("name") == member:
                return places_of(expect_object(of.get("machine"), what).get("guest_map"), what)
        asked = "say which one with member=" if member is None else f"none is called {member}"
        raise NoRam(f"checkpoint {self.id} is of a group, {self.vm}, of the VMs {names}: {asked}")


class _Pair:
    """The RAM of two checkpoints, open for as long as they are compared."""

    def __init__(self, before: Checkpoint | None, after: Checkpoint, member: str | None) -> None:
        self._before, self._after, self._member = before, after, member
        self._stack = ExitStack()

    def __enter__(self) -> tuple[Ram | None, Ram]:
        with ExitStack() as stack:
            # One mount for both.
            stack.enter_context(self._after._store.images())
            after = stack.enter_context(self._after.ram(self._member))
            before = None if self._before is None else stack.enter_context(self._before.ram(self._member))
            self._stack = stack.pop_all()
        return before, after

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _members(details: Mapping[str, Any], what: str) -> list[Any]:
    return list(expect_list(details.get("members", []), what))


def _only_block(details: Mapping[str, Any]) -> list[Place]:
    """The place of the main RAM of a checkpoint that has no map: it is shown only where it has one block, from address 0 on."""
    for block in expect_list(details.get("ram"), "show --json: ram"):
        known = expect_object(block, "show --json: ram")
        if known.get("kind") == "backend":
            return [Place(str(known.get("name")), 0, int(known.get("used_bytes", 0)), 0)]
    return []
