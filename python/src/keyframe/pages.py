"""Finds the pages in which the RAM of two checkpoints differs: reads both in chunks and compares
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import LayoutDiffers
from .ram import PAGE_BYTES, Ram, covered

#: Pages of a chunk: 1 MiB.
_CHUNK_PAGES = 256


class DirtyPage(NamedTuple):
    """A page whose content changed.

    `block` is the RAM block and `page` the page's number in it; `address` is its guest-physical
    address in bytes; `content` is its new content, a read-only array of uint8, shape (4096,).
    """

    block: str
    page: int
    address: int
    content: NDArray[np.uint8]


def dirty_pages(before: Ram | None, after: Ram) -> Iterator[DirtyPage]:
    """The pages of `after` that differ from `before` (if `None`, from zeros), by rising address."""
    for first, differs, content in _compared(before, after):
        for row in np.flatnonzero(differs).tolist():
            block, page = after.block_of(first + row)
            own = content[row].copy()
            own.flags.writeable = False
            yield DirtyPage(block, page, (first + row) * PAGE_BYTES, own)


def dirty_mask(before: Ram | None, after: Ram) -> NDArray[np.bool_]:
    """As `dirty_pages`, as an array of bool, shape (pages of `after`,), by guest-physical page."""
    mask = np.zeros(len(after), dtype=np.bool_)
    for first, differs, _ in _compared(before, after):
        mask[first : first + len(differs)] = differs
    return mask


def _compared(
    before: Ram | None, after: Ram
) -> Iterator[tuple[int, NDArray[np.bool_], NDArray[np.uint8]]]:
    """Chunks: the number of the first page, a mask of the pages that differ, and the pages of
    `after`.
    """
    if before is not None and before.len_bytes != after.len_bytes:
        raise LayoutDiffers(
            f"checkpoint {before.checkpoint} has {before.len_bytes} bytes of RAM, checkpoint "
            f"{after.checkpoint} has {after.len_bytes}: their pages cannot be compared"
        )
    ranges = [*after.ranges, *(before.ranges if before is not None else ())]
    for pages in covered(ranges, _CHUNK_PAGES):
        new = after.read(pages.start, len(pages))
        old = None if before is None else before.read(pages.start, len(pages))
        other = _words(new) != (0 if old is None else _words(old))
        differs: NDArray[np.bool_] = np.any(other, axis=1)
        yield pages.start, differs, new


def _words(pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The same bytes as words, which compare faster."""
    return pages.view(np.uint64)
