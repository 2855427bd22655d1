"""What differs between two checkpoints, counted, as ``keyframe diff --json`` has it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .errors import BadAnswer
from .program import expect_list, expect_object


@dataclass(frozen=True)
class RegionDiff:
    """What differs of a RAM block or a disk. A page is 4096 bytes, of a disk too; a sector is 512.

    `pages` were compared, `changed_pages` have another content; of these, `from_zero_pages` were zeros in the first, `to_zero_pages` are
    zeros in the second. `only_first_pages` and `only_second_pages` are in one of the two alone. `unknown_pages` are blocks of a disk
    that one of the two leaves to the image beneath, `other_image` says that this is not the same one.
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
    """What differs between the checkpoints `first` and `second`, by RAM block and by disk."""

    first: int
    second: int
    ram: tuple[RegionDiff, ...]
    disks: tuple[RegionDiff, ...]
    same_devices: bool

    @property
    def changed_pages(self) -> int:
        """Pages of RAM with another content."""
        return sum(region.changed_pages for region in self.ram)

    @classmethod
    def of(cls, answer: Any) -> Diff:
        """From what ``diff --json`` prints. Raises `BadAnswer`."""
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
    regions = (expect_object(region, "diff --json") for region in expect_list(answer, "diff --json"))
    return tuple(RegionDiff(**{key: value for key, value in r.items() if key in known}) for r in regions)
