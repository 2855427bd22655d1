"""Fixtures: a store of a VM, a store of a group and a recording, each made once."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyframe

from . import machines


@pytest.fixture(scope="session", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of these tests are not in the way of others, and no store or key of the environment is
    theirs.
    """
    with pytest.MonkeyPatch.context() as patch:
        # A short path: a longer one would not be used.
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        # It is asked for anew.
        patch.setattr(tempfile, "tempdir", None)
        for name in ("KEYFRAME_STORE", "KEYFRAME_KEY_FILE", "KEYFRAME_PASSPHRASE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Asserts that no test leaves a mount, a temporary directory, or a command that runs a VM."""
    assert mounts() == set()
    yield
    assert mounts() == set()
    assert left() == []
    assert vms() == []


@pytest.fixture(scope="session")
def program() -> str:
    return keyframe.find_program()


@pytest.fixture(scope="session")
def store_path(program: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints of a small Linux that boots, and then hashes its way through a table."""
    path = tmp_path_factory.mktemp("vm") / "store"
    command = machines.line("small", "--mem", "128M", "--append", "kf.work=hash kf.mib=16")
    machines.take(program, path, 5, command, name="web")
    return path


@pytest.fixture()
def store(store_path: Path) -> keyframe.Store:
    return keyframe.Store(store_path, via="mount")


@pytest.fixture(scope="session")
def command() -> list[str]:
    """The command line of the small Linux, which hashes its way through a table."""
    return machines.line("small", "--mem", "96M", "--append", "kf.work=hash kf.mib=16")


@pytest.fixture(scope="session")
def agent_command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a small Linux with QEMU's guest agent."""
    socket = tmp_path_factory.mktemp("agent") / "agent.sock"
    return machines.line("agent", "--mem", "96M", "--agent", str(socket))


@pytest.fixture()
def fresh(tmp_path: Path) -> keyframe.Store:
    """An empty store."""
    return keyframe.Store.create(tmp_path / "fresh")


@pytest.fixture(scope="session")
def group_path(program: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two VMs at one instant."""
    path = tmp_path_factory.mktemp("group") / "store"
    one = machines.line("payload", "--mem", "16M", "--pages", "64")
    other = machines.line("payload", "--mem", "8M", "--pages", "32", "--serial", "null")
    machines.take(program, path, 2, [*one, "-name", "db"], [*other, "-name", "web"])
    return path


@pytest.fixture(scope="session")
def recording_path(program: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred thousand instructions of a guest that checks its memory in passes."""
    directory = tmp_path_factory.mktemp("recording")
    command = machines.line("payload", "--mem", "16M", "--pages", "64")
    machines.record(program, directory / "rec", directory / "console", command, b"pass 12 ")
    return directory / "rec"


@pytest.fixture(scope="session")
def trace_path(recording_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The memory trace of all of it."""
    return keyframe.Recording(recording_path).analyze(
        "memtrace", tmp_path_factory.mktemp("trace") / "out"
    )


def mounts() -> set[str]:
    """The package's mounts on temporary directories in these tests."""
    with open("/proc/self/mounts", encoding="utf-8") as table:
        mounted = {line.split()[1] for line in table}
    return {path for path in mounted if path.startswith(os.environ["TMPDIR"])}


def left() -> list[str]:
    """The temporary directories that the package has made and not removed."""
    return [
        path.name
        for path in Path(os.environ["TMPDIR"]).glob("keyframe-*")
        if path.name[9:].startswith(("mount-", "export-", "vm-"))
    ]


def vms() -> list[str]:
    """The run directories of engines, clones and restored VMs whose commands have not ended."""
    top = Path(os.environ["XDG_RUNTIME_DIR"]) / "keyframe"
    locks = [*top.glob("*/engine.pid"), *top.glob(".*/*/engine.pid")]
    return [str(lock.parent.relative_to(top)) for lock in locks if is_locked(lock)]


def is_locked(file: Path) -> bool:
    """True if a process holds the file's lock."""
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
