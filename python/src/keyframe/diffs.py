"""The differences between two checkpoints, as ``keyframe diff --json`` counts them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from . import html
from .errors import BadAnswer
from .program import expect_list, expect_object


@dataclass(frozen=True)
class RegionDiff:
    """The differences of a RAM block or a disk. A page has 4096 bytes, also of a disk; a sector has
    512.

    `pages` were compared; `changed_pages` differ. Of these, `from_zero_pages` are zeros in the
    first checkpoint and `to_zero_pages` in the second. `only_first_pages` and `only_second_pages`
    exist in one of the two. `unknown_pages` are blocks of a disk that one of the two leaves to its
    base image; `other_image` is true if the base images differ.
    """

    name: str
    pages: int
    changed_pages: int
    from_zero_pages: int
    to_zero_pages: int
    changed_sectors: int
    changed_bytes: int
    only_first_pages: int
    only_second_pages: int
    unknown_pages: int
    other_image: bool = False


@dataclass(frozen=True)
class Diff:
    """The differences between the checkpoints `first` and `second`, by RAM block and by disk."""

    first: int
    second: int
    ram: tuple[RegionDiff, ...]
    disks: tuple[RegionDiff, ...]
    same_devices: bool

    @property
    def changed_pages(self) -> int:
        """The number of RAM pages that differ."""
        return sum(region.changed_pages for region in self.ram)

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return html.diff_html(self)

    @classmethod
    def of(cls, answer: Any) -> Diff:
        """Parses the output of ``diff --json``. Raises `BadAnswer`."""
        raw = expect_object(answer, "diff --json")
        try:
            return cls(
                first=int(raw["first"]),
                second=int(raw["second"]),
                ram=_regions(raw["ram"]),
                disks=_regions(raw["disks"]),
                same_devices=bool(raw["same_devices"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"diff --json: of another form: {error!r}") from error


def _regions(answer: Any) -> tuple[RegionDiff, ...]:
    known = {f.name for f in fields(RegionDiff)}
    regions = (
        expect_object(region, "diff --json") for region in expect_list(answer, "diff --json")
    )
    return tuple(
        RegionDiff(**{key: value for key, value in r.items() if key in known}) for r in regions
    )
