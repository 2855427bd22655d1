"""A checkpoint's RAM as the guest sees it, as a mapped array or in copies of pages.

::

    guest-physical    0        640K   768K      1M                                        the end of main RAM
    pages             │ pc.ram        │ ROM or RAM │ pc.ram                                      │
    parts             └─ parts[0] ────┴─ ... ──────┴─ parts[n] ──────────────────────────────────┘

Page n is at guest-physical address ``4096 * n``. Addresses without RAM, such as the hole below 4 GiB,
have pages of zeros that belong to no part. A page from 768 KiB to 1 MiB has the content that the
guest read there at that instant, RAM or ROM; its part is the one of the checkpoint's map.
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
class RamRange:
    """The address range of a part of a RAM block. All numbers are bytes, and multiples of
    `PAGE_BYTES`.

    `block` is QEMU's name of the RAM block (``pc.ram``), `start` the guest-physical address,
    `offset_bytes` the part's offset in the block.
    """

    block: str
    start: int
    len_bytes: int
    offset_bytes: int

    @property
    def page_range(self) -> range:
        """The numbers of its guest-physical pages."""
        return range(self.start // PAGE_BYTES, (self.start + self.len_bytes) // PAGE_BYTES)


@dataclass(frozen=True, eq=False)
class RamPart(RamRange):
    """A part of a RAM block with its content: `pages` is a read-only array of uint8, shape (pages,
    4096).
    """

    pages: NDArray[np.uint8]


class Ram:
    """The RAM of a checkpoint. A context manager; `Checkpoint.ram` makes it.

    Arrays stay valid after the ``with``: the store stays mounted until the last of them is gone, or
    until Python ends. They are mapped: a page is read when it is accessed. An access to a damaged
    page through `pages` or `parts` ends the process with SIGBUS, as with any mapped file; `read`
    raises `UnreadablePages` instead.
    """

    def __init__(
        self,
        images: Images,
        checkpoint: int,
        member: str | None,
        ranges: Sequence[RamRange],
        release: Callable[[], None],
    ) -> None:
        self._images = images
        # `close` uses these, also if the constructor raises.
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
            #: The ranges of RAM blocks, by rising address.
            self.ranges = _inside(ranges, self.len_bytes)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """The number of pages."""
        return self.len_bytes // PAGE_BYTES

    @property
    def pages(self) -> NDArray[np.uint8]:
        """All RAM: a read-only mapped array of uint8, shape (pages, 4096); row n is guest-physical
        page n.
        """
        if self._mapped is None:
            mapping = mmap.mmap(
                self._file(), self.len_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
            )
            self._images.keep_for(mapping)
            self._mapped = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, PAGE_BYTES)
        return self._mapped

    @property
    def parts(self) -> tuple[RamPart, ...]:
        """The parts of RAM blocks with their pages, by rising guest-physical address; views of
        `pages`.
        """
        pages = self.pages
        return tuple(
            RamPart(
                r.block,
                r.start,
                r.len_bytes,
                r.offset_bytes,
                pages[r.page_range.start : r.page_range.stop],
            )
            for r in self.ranges
        )

    def read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Copies `count` guest-physical pages from number `first` on: a read-only array of uint8,
        shape (count, 4096).

        Raises `IndexError` beyond the end, and `UnreadablePages` if the store cannot provide them.
        """
        if first < 0 or count < 0 or first + count > len(self):
            raise IndexError(
                f"pages {first} to {first + count} of checkpoint {self.checkpoint}, "
                f"which has {len(self)}"
            )
        pages = np.empty((count, PAGE_BYTES), dtype=np.uint8)
        left = pages.data.cast("B")
        while len(left) > 0:
            begin = (first + count) * PAGE_BYTES - len(left)
            try:
                got = os.preadv(self._file(), [left], begin)
            except OSError as error:
                messages = f"\n{self._images.messages()}".rstrip()
                raise UnreadablePages(
                    f"checkpoint {self.checkpoint}: read guest-physical page "
                    f"{begin // PAGE_BYTES}: {error}{messages}"
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

    def block_of(self, page: int) -> tuple[str, int]:
        """The RAM block of a guest-physical page and the page's number in it; ``("", page)``
        without RAM.
        """
        at = bisect.bisect_right(self.ranges, page * PAGE_BYTES, key=lambda known: known.start) - 1
        if at >= 0 and page in self.ranges[at].page_range:
            known = self.ranges[at]
            return known.block, page - known.start // PAGE_BYTES + known.offset_bytes // PAGE_BYTES
        return "", page

    def close(self) -> None:
        """Releases the RAM. Arrays in use stay valid."""
        self._mapped = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def _file(self) -> int:
        if self._descriptor is None:
            raise KeyframeError(
                f"the RAM of checkpoint {self.checkpoint} is closed; use it within its `with`"
            )
        return self._descriptor

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ranges_of(guest_map: Any, what: str) -> list[RamRange]:
    """The ranges in ``machine.guest_map`` of ``show --json``. Raises `BadAnswer`, naming `what`."""
    ranges = []
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
        ranges.append(RamRange(block, numbers[0], numbers[1], numbers[2]))
    ranges.sort(key=lambda known: known.start)
    for before, after in zip(ranges, ranges[1:]):
        if before.start + before.len_bytes > after.start:
            raise BadAnswer(
                f"{what}: {before.block} and {after.block} are at one address, {after.start:#x}"
            )
    return ranges


def _inside(ranges: Sequence[RamRange], len_bytes: int) -> tuple[RamRange, ...]:
    """The ranges below `len_bytes`, cut there.

    If there are none, one range without a name covers all.
    """
    cut = tuple(
        RamRange(r.block, r.start, min(r.len_bytes, len_bytes - r.start), r.offset_bytes)
        for r in ranges
        if r.start < len_bytes and r.len_bytes > 0
    )
    return cut or (RamRange("", 0, len_bytes, 0),)


def covered(ranges: Sequence[RamRange], chunk_pages: int) -> Iterator[range]:
    """All pages of `ranges`, each once, by rising address, in chunks of at most `chunk_pages`."""
    begun = 0
    for known in sorted(ranges, key=lambda r: r.start):
        first, end = max(known.page_range.start, begun), known.page_range.stop
        while first < end:
            last = min(first + chunk_pages, end)
            yield range(first, last)
            first = last
        begun = max(begun, end)
