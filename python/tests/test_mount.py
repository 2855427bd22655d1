"""Mounts come within their time and go whatever ends those who use them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import keyframe

from keyframe.images import member_directory

from .conftest import left, mounts


def test_checkpoints_are_files(store: keyframe.Store, tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    with store.mounted(directory) as mount:
        assert mount.path == directory
        assert sorted(entry.name for entry in (directory / "latest").iterdir()) == [
            "device.state",
            "info.json",
            "ram.elf",
            "ram.raw",
        ]
        assert (directory / "5" / "ram.elf").read_bytes()[:4] == b"\x7fELF"
    assert list(directory.iterdir()) == []


def test_a_directory_of_its_own_is_gone_afterwards(store: keyframe.Store) -> None:
    with store.mounted() as mount:
        assert (mount.path / "1").is_dir()
        assert mounts() == {str(mount.path)}
    assert not mount.path.exists()
    mount.close()


def test_members_are_where_the_mount_has_them() -> None:
    """The names that the program's own test of its mounts has."""
    names = ["web", "a/b", "a%2Fb", ".", "..", "info.json", "db.1"]
    assert [member_directory(name) for name in names] == [
        "web",
        "a%2Fb",
        "a%252Fb",
        "%2E",
        "%2E%2E",
        "info%2Ejson",
        "db.1",
    ]


def test_an_exception_unmounts(store: keyframe.Store) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), store, store.checkpoint(1).ram():
        assert len(mounts()) == 1
        raise RuntimeError("on purpose")
    assert mounts() == set()


def test_all_share_one_mount_within_the_store(store: keyframe.Store) -> None:
    with store, store:
        with store.checkpoint(1).ram(), store.checkpoint(2).ram():
            assert len(mounts()) == 1
        assert len(mounts()) == 1
    assert mounts() == set()


def test_arrays_outlive_the_mount_that_they_are_of(store: keyframe.Store) -> None:
    with store.checkpoint(3).ram() as ram:
        row = ram.parts[-1].pages[17:5000]
        copy = ram.read(256 + 17, 5000 - 17)
    assert len(mounts()) == 1
    with pytest.raises(keyframe.KeyframeError, match="is closed"):
        ram.read(0, 1)
    assert np.array_equal(row, copy)
    del row
    gc.collect()
    assert mounts() == set()


def test_what_cannot_be_mounted_on(store: keyframe.Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(keyframe.MountFailed, match="is not empty"):
        store.mounted(tmp_path)
    with pytest.raises(keyframe.MountFailed, match="there is no directory"):
        store.mounted(tmp_path / "none")
    directory = tmp_path / "m"
    directory.mkdir()
    with store.mounted(directory), pytest.raises(keyframe.MountFailed, match="mounted already"):
        store.mounted(directory)
    with pytest.raises(keyframe.MountFailed, match=r"within 0 s"):
        store.mounted(directory, timeout=0.0)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("how", ["unmounted", "killed"])
def test_a_mount_that_ended_by_itself_is_told(store: keyframe.Store, how: str) -> None:
    with store.mounted() as mount:
        assert mount.ram_file(1, None).stat().st_size == 128 << 20
        if how == "unmounted":
            subprocess.run(["umount", str(mount.path)], check=True, timeout=20)
        else:
            os.kill(server_of(mount.path), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(keyframe.MountFailed, match="no longer mounted"):
            mount.ram_file(1, None)


def server_of(path: Path) -> int:
    """The process that serves a mount."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:3] == [b"mount", bytes(path)]:
            return int(process.name)
    raise AssertionError(f"no process serves {path}")


_USER = """
import sys, time, keyframe
store = keyframe.Store(sys.argv[1])
ram = store.checkpoint(1).ram()
array = ram.pages
print(array.sum(), flush=True)
if sys.argv[2] == "wait":
    time.sleep(100)
"""


@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGKILL"])
def test_it_goes_with_the_process_that_uses_it(store_path: Path, how: str) -> None:
    what = "end" if how == "end" else "wait"
    child = subprocess.Popen(
        [sys.executable, "-c", _USER, str(store_path), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        assert child.stdout is not None and int(child.stdout.readline()) > 0
        if how != "end":
            assert len(mounts()) == 1
            child.send_signal(signal.Signals[how])
        child.wait(60)
        child.stdout.close()
        deadline = time.monotonic() + 30
        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left() == [] and mounts() == set()
    finally:
        child.kill()
        child.wait()
