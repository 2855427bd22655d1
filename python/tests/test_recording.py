"""Tests of a real recording: its properties, intervals, console and memory trace."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import keyframe


def test_what_it_is(recording_path: Path) -> None:
    recording = keyframe.Recording(recording_path)
    assert (recording.vm, recording.ending) == ("rec", "complete")
    assert re.fullmatch(r"[0-9a-f]{32}", recording.id)
    assert (
        recording.instructions > 100_000 and recording.duration_ns > 0 and recording.log_bytes > 0
    )
    assert "payload.bin" in " ".join(recording.user_command)
    assert recording.store.path == str(recording_path / "store")


def test_intervals_are_those_that_are_analysed(recording_path: Path, trace_path: Path) -> None:
    intervals = keyframe.Recording(recording_path).intervals()
    assert len(intervals) >= 3
    assert intervals[0].first_icount == 0
    for before, after in zip(intervals, intervals[1:]):
        assert before.end_icount == after.first_icount and before.end == after.begin
    analysed = json.loads((trace_path / "analysis.json").read_text())["intervals"]
    assert {one["begin"]["checkpoint"]: one["begin"]["icount"] for one in analysed}.items() <= {
        interval.begin: interval.first_icount for interval in intervals
    }.items()
    assert intervals[-1].end_icount == keyframe.Recording(recording_path).instructions


def test_console(recording_path: Path) -> None:
    recording = keyframe.Recording(recording_path)
    lines = recording.console()
    assert lines[0].text == "KF READY payload pages=64 dirty=64"
    assert [line.text.split()[1] for line in lines[1:4]] == ["1", "2", "3"]
    assert all(line.first_icount <= line.last_icount for line in lines)
    assert all(a.last_icount < b.first_icount for a, b in zip(lines, lines[1:]))
    assert recording.console("pass 3 ") == [line for line in lines if "pass 3 " in line.text]
    assert recording.console("--nothing has this") == []


def test_its_checkpoints_have_ram(recording_path: Path) -> None:
    recording = keyframe.Recording(recording_path)
    found = recording.checkpoints()
    assert found == sorted(found, key=lambda one: one[0]) and found[0][0] == 0
    with recording.store:
        assert found[-1][1].dirty_mask().any()


def test_memtrace(trace_path: Path) -> None:
    rows = keyframe.scan_memtrace(trace_path).collect()
    assert rows.columns == ["icount", "pc", "vaddr", "page", "size", "flags"]
    assert rows.dtypes == [pl.UInt64, pl.UInt64, pl.UInt64, pl.UInt32, pl.UInt8, pl.UInt8]
    assert rows.height > 10_000 and rows["icount"].is_sorted()
    assert set(rows["size"].unique()) <= {1, 2, 4, 8, 16, 32}
    assert rows["flags"].max() <= keyframe.WRITE + keyframe.DEVICE + keyframe.PHYSICAL_UNKNOWN  # type: ignore[operator]
    same = keyframe.read_memtrace(trace_path / "memtrace.parquet")
    assert list(same.dtypes.astype(str)) == [
        "uint64",
        "uint64",
        "uint64",
        "uint32",
        "uint8",
        "uint8",
    ]
    for name in rows.columns:
        assert (same[name].to_numpy() == rows[name].to_numpy()).all()
    # Both have rows, the one that counts and the one that does not.
    first, end = (int(rows["icount"][rows.height * n // 4]) for n in (1, 2))
    part: dict[str, Any] = {"first_icount": first, "end_icount": end}
    some = rows.filter((pl.col("icount") >= first) & (pl.col("icount") < end)).select("pc", "page")
    assert 0 < some.height < rows.height
    assert keyframe.scan_memtrace(trace_path, **part, columns=["pc", "page"]).collect().equals(some)
    frame = keyframe.read_memtrace(trace_path, **part, columns=["pc", "page"])
    assert (frame["pc"].to_numpy() == some["pc"].to_numpy()).all() and len(frame) == some.height


def test_what_the_trace_writes_is_dirty(recording_path: Path, trace_path: Path) -> None:
    """Two sources that know nothing of each other: pages that instructions wrote, and pages that
    differ between checkpoints.
    """
    recording = keyframe.Recording(recording_path)
    by_id = {checkpoint.id: checkpoint for _, checkpoint in recording.checkpoints()}
    ram_pages = (16 << 20) // keyframe.PAGE_BYTES
    with recording.store:
        # After the first interval, in which the firmware starts.
        intervals = [interval for interval in recording.intervals()[1:] if interval.end is not None]
        assert len(intervals) >= 2
        for interval in intervals:
            assert interval.end is not None
            written = (
                keyframe.scan_memtrace(
                    trace_path,
                    first_icount=interval.first_icount,
                    end_icount=interval.end_icount + 1,
                )
                .filter(pl.col("flags") == keyframe.WRITE, pl.col("page") < ram_pages)
                .select(pl.col("page").unique())
                .collect()["page"]
                .to_list()
            )
            dirty = (
                by_id[interval.end].dirty_mask(against=by_id[interval.begin]).nonzero()[0].tolist()
            )
            assert dirty and set(dirty) <= set(written)


def test_what_is_no_recording(tmp_path: Path, recording_path: Path) -> None:
    with pytest.raises(keyframe.KeyframeError, match="is no recording"):
        keyframe.Recording(tmp_path)
    known = json.loads((recording_path / "recording.json").read_text())
    for text in (
        "[",
        "[]",
        json.dumps({**known, "version": 2}),
        json.dumps({k: v for k, v in known.items() if k != "format"}),
        json.dumps({**known, "began_at": 7}),
        '{"version": 1}',
    ):
        (tmp_path / "recording.json").write_text(text)
        with pytest.raises(keyframe.BadAnswer):
            keyframe.Recording(tmp_path)


def test_what_is_no_memtrace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="keyframe analyze REC --tool memtrace"):
        keyframe.scan_memtrace(tmp_path)
    file = tmp_path / "memtrace.parquet"
    file.write_bytes(b"PAR1 and no more")
    for read in (keyframe.scan_memtrace, keyframe.read_memtrace):
        with pytest.raises(keyframe.BadAnswer):
            read(file)
    pl.DataFrame({"icount": [1]}).write_parquet(file)
    for read in (keyframe.scan_memtrace, keyframe.read_memtrace):
        with pytest.raises(keyframe.BadAnswer, match="no column pc, vaddr"):
            read(file)


def test_a_column_that_there_is_not(trace_path: Path) -> None:
    with pytest.raises(ValueError, match="has no column paddr; it has icount"):
        keyframe.scan_memtrace(trace_path, columns=["paddr"])


@pytest.mark.parametrize("library", ["polars", "pandas", "pyarrow"])
def test_a_library_that_is_missing(
    trace_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for module in [m for m in sys.modules if m == library or m.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    read = keyframe.scan_memtrace if library == "polars" else keyframe.read_memtrace
    with pytest.raises(
        keyframe.MissingExtra, match=rf"{library} is not installed; pip install {library}"
    ):
        read(trace_path)
