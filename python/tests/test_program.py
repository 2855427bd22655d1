"""Tests of the program: how it is found, the exceptions for its exit codes, and its time limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import keyframe

Fake = Callable[[str], str]


@pytest.fixture()
def fake(tmp_path: Path) -> Fake:
    """Makes a program of a shell script."""

    def make(script: str) -> str:
        path = tmp_path / "fake"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_it_is_found_by_name_environment_and_path(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = fake("exit 0")
    assert keyframe.find_program(path) == path
    monkeypatch.setenv("KEYFRAME", path)
    assert keyframe.find_program() == path
    monkeypatch.delenv("KEYFRAME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(keyframe.ProgramNotFound, match=r"make build.*KEYFRAME="):
        keyframe.find_program()
    os.rename(path, tmp_path / "keyframe")
    assert keyframe.find_program() == str(tmp_path / "keyframe")
    with pytest.raises(keyframe.ProgramNotFound, match="is no program"):
        keyframe.Store("S", program=tmp_path / "none")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, keyframe.CommandFailed),
        (2, keyframe.UsageError),
        (10, keyframe.NoStore),
        (11, keyframe.StoreLocked),
        (77, keyframe.CommandFailed),
    ],
)
def test_exit_codes(fake: Fake, code: int, kind: type[keyframe.CommandFailed]) -> None:
    store = keyframe.Store(
        "S", program=fake(f"echo 'keyframe: it is so\n  fix: do that' >&2; exit {code}")
    )
    with pytest.raises(kind) as caught:
        store.checkpoints()
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.message, caught.value.fix) == (
        code,
        "it is so",
        "do that",
    )
    assert str(caught.value) == "it is so\n  fix: do that"
    assert caught.value.command[1:] == ("list", "--store", "S", "--json")


@pytest.mark.parametrize(
    ("code", "kind", "error"),
    [
        (1, "no_vm", keyframe.NoVm),
        (1, "name_taken", keyframe.NameTaken),
        (1, "a_later_kind", keyframe.CommandFailed),
        (10, "no_store", keyframe.NoStore),
    ],
)
def test_kinds_of_errors(
    fake: Fake, code: int, kind: str, error: type[keyframe.CommandFailed]
) -> None:
    told = f'{{"error":{{"kind":"{kind}","message":"it is so","fix":null}}}}'
    store = keyframe.Store("S", program=fake(f"echo a note >&2; echo '{told}' >&2; exit {code}"))
    with pytest.raises(error) as caught:
        store.checkpoints()
    assert type(caught.value) is error
    assert (caught.value.kind, caught.value.message, caught.value.fix) == (
        kind,
        "a note\nit is so",
        None,
    )


def test_warnings_are_warnings(fake: Fake) -> None:
    store = keyframe.Store(
        "S", program=fake("echo '[]'; echo 'keyframe: warning: 7 is damaged' >&2; exit 3")
    )
    with pytest.warns(keyframe.KeyframeWarning, match="7 is damaged"):
        assert store.checkpoints() == []


def test_answers_that_are_none(fake: Fake) -> None:
    for output in ("no json", "{}", "[1]", '[{"id": 1}]'):
        with pytest.raises(keyframe.BadAnswer):
            keyframe.Store("S", program=fake(f"echo '{output}'")).checkpoints()
    with pytest.raises(keyframe.BadAnswer):
        keyframe.Store("S", program=fake("echo '[]'")).diff(1, 2)


def test_a_command_that_hangs_is_ended(fake: Fake, tmp_path: Path) -> None:
    program = fake(f"echo $$ >{tmp_path}/pid; while :; do sleep 0.05; done")
    with pytest.raises(keyframe.TimedOut, match=r"ended after 0\.5 s"):
        keyframe.Store("S", program=program, timeout=0.5).checkpoints()
    assert_gone(tmp_path / "pid")


def test_a_mount_that_hangs_is_ended(fake: Fake, tmp_path: Path) -> None:
    program = fake(f"echo $$ >{tmp_path}/pid; while :; do sleep 0.05; done")
    with pytest.raises(keyframe.MountFailed, match=r"within 0\.5 s"):
        keyframe.Store("S", program=program).mounted(timeout=0.5)
    assert_gone(tmp_path / "pid")


def assert_gone(file: Path) -> None:
    """The process that wrote its number there, unless it was ended before, is no more."""
    if file.exists() and (pid := file.read_text().strip()):
        assert not Path(f"/proc/{pid}").exists()


def test_it_is_exported_where_it_cannot_be_mounted(
    fake: Fake, program: str, store_path: Path
) -> None:
    half = fake(
        f"""[ "$1" != mount ] || {{ echo 'keyframe: mount: no FUSE' >&2; exit 1; }}; exec {program} "$@" """
    )
    with pytest.warns(
        UserWarning, match="exported, because they cannot be mounted: mount: no FUSE"
    ):
        ram = keyframe.Store(store_path, program=half).checkpoint(2).ram()
    with ram, keyframe.Store(store_path, via="mount").checkpoint(2).ram() as mapped:
        assert np.array_equal(ram.read(0, len(ram)), mapped.read(0, len(mapped)))
    with pytest.raises(keyframe.MountFailed, match="no FUSE"):
        keyframe.Store(store_path, program=half, via="mount").checkpoint(2).ram()


def test_via_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="'auto', 'mount' or 'export'"):
        keyframe.Store("S", via="magic")  # type: ignore[arg-type]
