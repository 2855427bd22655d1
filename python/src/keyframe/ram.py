"""A checkpoint's RAM as the guest sees it: mapped as an array, or read piece by piece.

::

    guest-physical    0        640K   768K      1M                                        the end of main RAM
    pages             │ pc.ram        │ ROM or RAM │ pc.ram                                      │
    parts             └─ parts[0] ────┴─ ... ──────┴─ parts[n] ──────────────────────────────────┘

Page n is at guest-physical address ``4096 * n``. Where there is no RAM, below 4 GiB say, pages are zeros and belong to no part.
From 768 KiB to 1 MiB a page holds what the guest read there at that instant, RAM or ROM, and is named by the part that the map of
the checkpoint has there.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .errors import BadAnswer, KeyframeError, UnreadablePages
from .images import Images
from .program import expect_object

#: Bytes of a page.
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Place:
    """Where a part of a RAM block lies. All numbers are bytes, and multiples of `PAGE_BYTES`.

    `block` is QEMU's name of the RAM block (``pc.ram``), `start` the guest-physical address, `offset_bytes` where in the block
    the part begins.
    """

    block: str
    start: int
    len_bytes: int
    offset_bytes: int

    @property
    def page_range(self) -> range:
        """Its pages, as numbers of guest-physical pages."""
        return range(self.start // PAGE_BYTES, (self.start + self.len_bytes) // PAGE_BYTES)


@dataclass(frozen=True, eq=False)
class RamPart(Place):
    """A part of a RAM block with its content: `pages` is a read-only array of uint8, shape (pages, 4096)."""

    pages: NDArray[np.uint8]


class Ram:
    """The RAM of a checkpoint. A context manager; made by `Checkpoint.ram`.

    Arrays may be used for as long as one likes, also behind the ``with``: the store stays mounted until the last of them is gone, at the
    latest until Python ends. They are mapped: nothing is read before it is looked at. A page that
    the store cannot give any more, as it is damaged, ends the process by SIGBUS where it is looked at in `pages` or `parts`, as with any
    file that is mapped; `read` raises `UnreadablePages` instead.
    """

    def __init__(
        self,
        images: Images,
        checkpoint: int,
        member: str | None,
        places: Sequence[Place],
        release: Callable[[], None],
    ) -> None:
        self._images = images
        # What `close` looks at comes first.
        self._release: Callable[[], None] | None = release
        self._mapped: NDArray[np.uint8] | None = None
        self._descriptor: int | None = None
        self.checkpoint = checkpoint
        self.member = member
        try:
            file = images.ram_file(checkpoint, member)
            try:
                self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise UnreadablePages(f"{file}: {error}\n{images.messages()}".strip()) from error
            #: Bytes from guest-physical address 0 to the end of main RAM.
            self.len_bytes = os.fstat(self._descriptor).st_size
            if self.len_bytes == 0 or self.len_bytes % PAGE_BYTES != 0:
                raise BadAnswer(f"{file}: {self.len_bytes} bytes are no whole pages")
            #: Where RAM blocks lie in it, rising.
            self.places = _inside(places, self.len_bytes)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Pages."""
        return self.len_bytes // PAGE_BYTES

    @property
    def pages(self) -> NDArray[np.uint8]:
        """All of it: a read-only mapped array of uint8, shape (pages, 4096); row n is guest-physical page n."""
        if self._mapped is None:
            mapping = mmap.mmap(self._file(), self.len_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._images.keep_for(mapping)
            self._mapped = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, PAGE_BYTES)
        return self._mapped

    @property
    def parts(self) -> tuple[RamPart, ...]:
        """The parts of RAM blocks with their pages, by rising guest-physical address; views of `pages`."""
        pages = self.pages
        return tuple(
            RamPart(p.block, p.start, p.len_bytes, p.offset_bytes, pages[p.page_range.start : p.page_range.stop])
            for p in self.places
        )

    def read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Copies `count` guest-physical pages from number `first` on: a read-only array of uint8, shape (count, 4096).

        Raises `IndexError` beyond the end, and `UnreadablePages` where the store cannot give them.
        """
        if first < 0 or count < 0 or first + count > len(self):
            raise IndexError(f"pages {first} to {first + count} of checkpoint {self.checkpoint}: it has {len(self)}")
        pages = np.empty((count, PAGE_BYTES), dtype=np.uint8)
        left = pages.data.cast("B")
        while len(left) > 0:
            begin = (first + count) * PAGE_BYTES - len(left)
            try:
                got = os.preadv(self._file(), [left], begin)
            except OSError as error:
                said = f"\n{self._images.messages()}".rstrip()
                raise UnreadablePages(
                    f"checkpoint {self.checkpoint}: read from guest-physical page {begin // PAGE_BYTES} on: {error}{said}"
                ) from error
            if got == 0:
                raise UnreadablePages(f"checkpoint {self.checkpoint}: its RAM ends early")
            left = left[got:]
        pages.flags.writeable = False
        return pages

    def bytes_at(self, address: int, len_bytes: int) -> bytes:
        """Copies `len_bytes` bytes from guest-physical `address` on. Raises as `read` does."""
        first = address // PAGE_BYTES
        count = -(-(address + len_bytes) // PAGE_BYTES) - first
        begin = address - first * PAGE_BYTES
        return self.read(first, count).tobytes()[begin : begin + len_bytes]

    def place_of(self, page: int) -> tuple[str, int]:
        """The RAM block of a guest-physical page, and the page's number in the block; ``("", page)`` where no RAM is."""
        at = bisect.bisect_right(self.places, page * PAGE_BYTES, key=lambda place: place.start) - 1
        if at >= 0 and page in self.places[at].page_range:
            place = self.places[at]
            return place.block, page - place.start // PAGE_BYTES + place.offset_bytes // PAGE_BYTES
        return "", page

    def close(self) -> None:
        """Gives back what it holds, but arrays that are in use."""
        self._mapped = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def _file(self) -> int:
        if self._descriptor is None:
            raise KeyframeError(f"the RAM of checkpoint {self.checkpoint} is closed; use it within its `with`")
        return self._descriptor

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def places_of(guest_map: Any, what: str) -> list[Place]:
    """The places that ``machine.guest_map`` of ``show --json`` names. Raises `BadAnswer`, naming `what`."""
    places = []
    for region in guest_map or []:
        entry = expect_object(region, what)
        try:
            numbers = [entry[key] for key in ("start", "len_bytes", "offset_bytes")]
            block = entry["block"]
        except KeyError as error:
            raise BadAnswer(f"{what}: a part of it has no {error}") from error
        if not isinstance(block, str) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise BadAnswer(f"{what}: {entry} is no part of a RAM block")
        if any(n % PAGE_BYTES for n in numbers):
            raise BadAnswer(f"{what}: {entry} is not of whole pages")
        places.append(Place(block, numbers[0], numbers[1], numbers[2]))
    places.sort(key=lambda place: place.start)
    for before, after in zip(places, places[1:]):
        if before.start + before.len_bytes > after.start:
            raise BadAnswer(f"{what}: {before.block} and {after.block} are at one address, {after.start:#x}")
    return places


def _inside(places: Sequence[Place], len_bytes: int) -> tuple[Place, ...]:
    """The places that lie below `len_bytes`, cut there. Without any, all of it is one without a name."""
    cut = tuple(
        Place(p.block, p.start, min(p.len_bytes, len_bytes - p.start), p.offset_bytes)
        for p in places
        if p.start < len_bytes and p.len_bytes > 0
    )
    return cut or (Place("", 0, len_bytes, 0),)


def covered(places: Sequence[Place], chunk_pages: int) -> Iterator[range]:
    """Ranges of guest-physical pages, at most `chunk_pages` each, that together are all pages of `places`, each once, rising."""
    begun = 0
    for place in sorted(places, key=lambda p: p.start):
        first, end = max(place.page_range.start, begun), place.page_range.stop
        while first < end:
            last = min(first + chunk_pages, end)
            yield range(first, last)
            first = last
        begun = max(begun, end)
