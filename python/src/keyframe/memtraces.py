"""Memory traces: one row for each memory access of a recorded guest (docs/formats/memtrace.md).

| column | type | meaning |
|---|---|---|
| ``icount`` | uint64 | instructions that the VM executed before this one; never decreases |
| ``pc`` | uint64 | virtual address of the instruction |
| ``vaddr`` | uint64 | virtual address of the first byte |
| ``page`` | uint32 | guest-physical page of the first byte; 0 if ``flags`` has `PHYSICAL_UNKNOWN` |
| ``size`` | uint8 | bytes |
| ``flags`` | uint8 | sum of `WRITE`, `DEVICE`, `PHYSICAL_UNKNOWN` |

The guest-physical address of an access is ``page * 4096 + vaddr % 4096``. Files are large: rows
outside of a range of instructions are not read, and Polars reads lazily.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import BadAnswer, MissingExtra

if TYPE_CHECKING:
    import pandas
    import polars

#: In ``flags``: the access writes; without it, it reads.
WRITE = 1
#: In ``flags``: the access is to a device, not to memory.
DEVICE = 2
#: In ``flags``: the physical page is not known.
PHYSICAL_UNKNOWN = 4
#: The columns, in their order.
COLUMNS = ("icount", "pc", "vaddr", "page", "size", "flags")
_FILE = "memtrace.parquet"


def scan_memtrace(
    path: str | os.PathLike[str],
    *,
    first_icount: int | None = None,
    end_icount: int | None = None,
    columns: Sequence[str] | None = None,
) -> polars.LazyFrame:
    """A memory trace as a Polars LazyFrame: ``collect()`` reads it.

    `path` is the file, or the directory that ``keyframe analyze --tool memtrace --out`` made. The
    rows are those from instruction `first_icount` to before `end_icount`; the columns are those of
    the table above, or `columns`.

    Raises `MissingExtra` without Polars, `FileNotFoundError`, `BadAnswer` if the file is no memory
    trace.
    """
    _require("polars", "polars")
    import polars

    file = _file(path)
    try:
        frame = polars.scan_parquet(file)
        names = frame.collect_schema().names()
    except polars.exceptions.PolarsError as error:
        raise BadAnswer(f"{file}: no memory trace: {error}") from error
    _check(file, names, columns)
    if first_icount is not None:
        frame = frame.filter(polars.col("icount") >= first_icount)
    if end_icount is not None:
        frame = frame.filter(polars.col("icount") < end_icount)
    return frame.select(COLUMNS if columns is None else columns)


def read_memtrace(
    path: str | os.PathLike[str],
    *,
    first_icount: int | None = None,
    end_icount: int | None = None,
    columns: Sequence[str] | None = None,
) -> pandas.DataFrame:
    """As `scan_memtrace`, as a pandas DataFrame in memory, 26 bytes a row.

    Raises as `scan_memtrace` does, and `MissingExtra` without pandas or pyarrow.
    """
    _require("pandas", "pandas")
    parquet = _require("pyarrow.parquet", "pandas")
    import pandas

    file = _file(path)
    try:
        names = parquet.read_schema(file).names
    except (OSError, ValueError) as error:
        raise BadAnswer(f"{file}: no memory trace: {error}") from error
    _check(file, names, columns)
    wanted = []
    if first_icount is not None:
        wanted.append(("icount", ">=", first_icount))
    if end_icount is not None:
        wanted.append(("icount", "<", end_icount))
    return pandas.read_parquet(
        file,
        engine="pyarrow",
        columns=list(COLUMNS if columns is None else columns),
        filters=wanted or None,
    )


def _file(path: str | os.PathLike[str]) -> Path:
    """The file at `path`, or in the directory of results `path`."""
    file = Path(path)
    if file.is_dir():
        file = file / _FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there; make it with: "
            f"keyframe analyze REC --tool memtrace --out {file.parent}"
        )
    return file


def _check(file: Path, names: Sequence[str], columns: Sequence[str] | None) -> None:
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise BadAnswer(f"{file}: no memory trace: it has no column {', '.join(missing)}")
    unknown = [name for name in columns or () if name not in names]
    if unknown:
        raise ValueError(f"{file} has no column {', '.join(unknown)}; it has {', '.join(names)}")


def _require(module: str, extra: str) -> ModuleType:
    """Imports an optional library. Raises `MissingExtra` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtra(
            f"{name} is not installed; pip install {name}, or in Keyframe's source: "
            f"pip install './python[{extra}]'"
        ) from error
