"""Tests of lists, details, differences, and refusals."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

import keyframe

from . import machines


def test_checkpoints_are_those_that_the_program_lists(store: keyframe.Store, program: str) -> None:
    listed = json.loads(machines.keyframe(program, "list", "--store", store.path, "--json"))
    known = store.checkpoints()
    assert [c.raw for c in known] == listed
    assert [c.id for c in known] == [1, 2, 3, 4, 5]
    assert [c.parent for c in known] == [None, 1, 2, 3, 4]
    assert [c.epoch for c in known] == [0, 1, 2, 3, 4]
    assert {c.vm for c in known} == {"web"} and len({c.run for c in known}) == 1
    assert all(c.taken_at.utcoffset() == timedelta(0) for c in known)
    for before, after in zip(known, known[1:]):
        assert after.taken_at - before.taken_at > timedelta(milliseconds=100)
    assert all(c.pause_ns > 0 and c.dirty_pages_written > 0 for c in known)


def test_some_of_them(store: keyframe.Store) -> None:
    assert [c.id for c in store.checkpoints(last=2)] == [4, 5]
    assert store.checkpoints(vm="other") == []


def test_one_of_them_by_number_tag_and_as_the_latest(store: keyframe.Store, program: str) -> None:
    machines.keyframe(program, "tag", "3", "good", "--store", store.path)
    assert [store.checkpoint(name).id for name in (2, "2", "good", "latest")] == [2, 2, 3, 5]
    assert store.checkpoint(3).tags == ("good",)
    with pytest.raises(keyframe.UnknownCheckpoint, match=r"no checkpoint 'bad'; the newest is 5"):
        store.checkpoint("bad")
    with pytest.raises(keyframe.UnknownCheckpoint):
        store.checkpoint(6)


def test_details_stats_and_differences(store: keyframe.Store) -> None:
    latest = store.checkpoint("latest")
    details = latest.details()
    assert details["id"] == 5 and details["machine"]["cpus"] == 1
    assert latest.members() == ()
    stats = store.stats(growth=True)
    assert stats["checkpoints"] == 5 and "growth" in stats
    diff = store.checkpoint(4).diff(latest)
    assert (diff.first, diff.second, diff.disks) == (4, 5, ())
    ram = {region.name: region for region in diff.ram}
    assert ram["pc.ram"].pages == 128 * 256
    assert 0 < ram["pc.ram"].changed_pages <= diff.changed_pages
    assert latest.diff("latest").changed_pages == 0


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    store = keyframe.Store(tmp_path / "none")
    with pytest.raises(keyframe.NoStore, match="no store here") as caught:
        store.checkpoints()
    assert caught.value.code == 10
    assert caught.value.fix is not None and "keyframe init" in caught.value.fix
    for via in ("auto", "mount"):
        with pytest.raises(keyframe.NoStore), keyframe.Store(tmp_path / "none", via=via):
            pass


def test_a_store_without_checkpoints(program: str, tmp_path: Path) -> None:
    machines.keyframe(program, "init", str(tmp_path / "empty"))
    store = keyframe.Store(tmp_path / "empty")
    assert store.checkpoints() == []
    with pytest.raises(keyframe.UnknownCheckpoint, match="the store has none"):
        store.checkpoint("latest")


def test_an_encrypted_store_wants_its_key(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key_file = tmp_path / "sealed", tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    machines.keyframe(program, "init", str(path), "--encrypt", "--key-file", str(key_file))
    assert keyframe.Store(path, key_file=key_file).checkpoints() == []
    with pytest.raises(keyframe.CommandFailed):
        keyframe.Store(path).checkpoints()
    other = tmp_path / "other"
    machines.keyframe(
        program, "init", str(other), "--encrypt", environment={"KEYFRAME_PASSPHRASE": "open sesame"}
    )
    sealed = keyframe.Store(other, passphrase="open sesame")
    assert sealed.checkpoints() == []
    assert "sesame" not in repr(sealed) + repr(vars(sealed))
    with pytest.raises(keyframe.CommandFailed):
        keyframe.Store(other, passphrase="open barley").checkpoints()
    monkeypatch.setenv("KEYFRAME_PASSPHRASE", "open sesame")
    assert keyframe.Store(other).checkpoints() == []
    with pytest.raises(ValueError, match="either"):
        keyframe.Store(other, passphrase="a", key_file="b")
