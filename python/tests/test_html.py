"""Tables for notebooks: escaped, from data alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

import keyframe
from keyframe import html
from keyframe.program import Program

HOSTILE = "<script>alert('&\"')</script>"


class Parsed(HTMLParser):
    """The texts of the cells; asserts that tags are those of a table, and that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.caption = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in {"table", "caption", "tr", "th", "td"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


@pytest.fixture()
def store(monkeypatch: pytest.MonkeyPatch) -> keyframe.Store:
    """A store in which nothing can be looked up: the tables are pure."""

    def run(*_: Any, **__: Any) -> bytes:
        raise AssertionError("a table runs a command")

    monkeypatch.setattr(Program, "run", run)
    return keyframe.Store("S", program="/bin/true")


def checkpoint(store: keyframe.Store, id: int, **changes: Any) -> keyframe.Checkpoint:
    entry = {
        "id": id,
        "vm": "web",
        "run": "r",
        "taken_at": "2026-01-02T03:04:05.678900Z",
        "reason": "command",
        "epoch": id - 1,
        "parent": id - 1 or None,
        "tags": [],
        "pause_ns": 1_234_567,
        "interval_ns": 10**9,
        "dirty_pages": 1234,
        "stored_bytes": 1536,
        "ram_bytes": 256 << 20,
    }
    return keyframe.Checkpoint.of({**entry, **changes}, store)


def test_a_checkpoint(store: keyframe.Store) -> None:
    parsed = Parsed(checkpoint(store, 2, tags=["base", "good"])._repr_html_())
    assert parsed.caption == "checkpoint 2"
    assert dict(parsed.rows) == {
        "VM": "web",
        "taken at": "2026-01-02 03:04:05.678",
        "tags": "base, good",
        "parent": "1",
        "reason": "command",
        "epoch": "1",
        "pause": "1.235 ms",
        "pages written": "1,234",
        "stored": "1.5 KiB",
        "RAM": "256.0 MiB",
    }


def test_texts_are_escaped(store: keyframe.Store) -> None:
    hostile = checkpoint(store, 1, vm=HOSTILE, tags=[HOSTILE], reason=HOSTILE)
    region = {"name": HOSTILE, "pages": 1, "changed_pages": 1, "from_zero_pages": 0}
    region |= {"to_zero_pages": 0, "changed_sectors": 1, "changed_bytes": 1}
    region |= {"only_first_pages": 0, "only_second_pages": 0, "unknown_pages": 0}
    diff = keyframe.Diff.of(
        {"first": 1, "second": 2, "ram": [region], "disks": [region], "same_devices": False}
    )
    for shown in (hostile, keyframe.History([hostile]), diff):
        text = shown._repr_html_()
        assert "<script" not in text and "alert(&#x27;&amp;&quot;&#x27;)" in text
        assert any(HOSTILE in cell for row in Parsed(text).rows for cell in row)


def test_a_history(store: keyframe.Store) -> None:
    history = keyframe.History(checkpoint(store, n) for n in range(1, 4))
    parsed = Parsed(history._repr_html_())
    assert parsed.caption == "3 checkpoints"
    assert [row[0] for row in parsed.rows] == ["id", "1", "2", "3"]
    assert [row[4] for row in parsed.rows] == ["parent", "", "1", "2"]
    assert Parsed(keyframe.History()._repr_html_()).caption == "0 checkpoints"


def test_a_long_history_is_cut(store: keyframe.Store) -> None:
    history = keyframe.History(checkpoint(store, n) for n in range(1, 1001))
    rows = Parsed(history._repr_html_()).rows
    assert len(rows) == html._ROWS_MAX + 2
    assert [row[0] for row in rows[1:4]] == ["1", "900 more", "902"]
    assert rows[-1][0] == "1000"


def test_a_difference() -> None:
    region = {"name": "pc.ram", "pages": 65536, "changed_pages": 2048, "from_zero_pages": 7}
    region |= {"to_zero_pages": 8, "changed_sectors": 9, "changed_bytes": 3 << 20}
    region |= {"only_first_pages": 0, "only_second_pages": 0, "unknown_pages": 0}
    diff = keyframe.Diff.of(
        {"first": 3, "second": 4, "ram": [region], "disks": [], "same_devices": False}
    )
    parsed = Parsed(diff._repr_html_())
    assert parsed.caption == "checkpoints 3 and 4, the states of the devices differ"
    assert parsed.rows[1] == ["RAM pc.ram", "65,536", "2,048", "7", "8", "3.0 MiB"]
    assert re.search(r"[\x00-\x1f]", diff._repr_html_()) is None
