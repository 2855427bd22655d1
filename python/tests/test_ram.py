"""Tests that RAM equals the program's export, and that dirty pages turn one checkpoint into the
next.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest

import keyframe
from keyframe.ram import covered, ranges_of

from . import machines
from .conftest import mounts


def test_mapped_ram_is_the_exported_one(store: keyframe.Store, tmp_path: Path) -> None:
    with store:
        for checkpoint in store.checkpoints():
            file = tmp_path / f"{checkpoint.id}.raw"
            store.export_ram(checkpoint, file)
            expected = np.fromfile(file, dtype=np.uint8).reshape(-1, keyframe.PAGE_BYTES)
            with checkpoint.ram() as ram:
                assert ram.pages.shape == (128 * 256, 4096) and ram.pages.dtype == np.uint8
                assert np.array_equal(ram.pages, expected)
                assert np.array_equal(ram.read(250, 300), expected[250:550])
                assert ram.bytes_at(0x100FFE, 4) == expected.tobytes()[0x100FFE:0x101002]


def test_parts_are_the_blocks_where_the_guest_sees_them(store: keyframe.Store) -> None:
    with store.checkpoint("latest").ram() as ram:
        assert [(p.block, p.start, p.offset_bytes) for p in ram.parts if p.block == "pc.ram"] == [
            ("pc.ram", 0, 0),
            ("pc.ram", 1 << 20, 1 << 20),
        ]
        for part in ram.parts:
            begin = part.start // 4096
            assert part.pages.shape == (part.len_bytes // 4096, 4096)
            assert np.shares_memory(part.pages, ram.pages)
            assert np.array_equal(part.pages, ram.pages[begin : begin + len(part.pages)])
        assert sum(len(part.pages) for part in ram.parts) <= len(ram)
        assert ram.block_of(256) == ("pc.ram", 256)
        del part


def test_arrays_cannot_be_written(store: keyframe.Store) -> None:
    with store.checkpoint(1).ram() as ram:
        for array in (ram.pages, ram.parts[0].pages, ram.read(0, 1)):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1
        with pytest.raises(IndexError):
            ram.read(len(ram) - 1, 2)
        del array
        gc.collect()


def test_dirty_pages_lead_from_the_parent_to_the_child(store: keyframe.Store) -> None:
    with store:
        known = store.checkpoints()
        with known[0].ram() as ram:
            patched = np.zeros_like(ram.pages)
        for checkpoint in known:
            mask = checkpoint.dirty_mask()
            seen = []
            for block, page, address, content in checkpoint.dirty_pages():
                assert not np.array_equal(patched[address // 4096], content)
                patched[address // 4096] = content
                seen.append(address // 4096)
                if block == "pc.ram":
                    assert page == address // 4096
            with checkpoint.ram() as ram:
                assert np.array_equal(patched, ram.pages)
            assert seen == np.flatnonzero(mask).tolist()
            if checkpoint.parent is not None:
                # Below 1 MiB the guest also sees ROMs.
                counted = {
                    region.name: region for region in checkpoint.diff(checkpoint.parent).ram
                }["pc.ram"]
                assert 0 <= counted.changed_pages - int(mask.sum()) <= 96
                assert 0 < len(seen) <= checkpoint.dirty_pages_written


def test_dirty_pages_against_another(store: keyframe.Store) -> None:
    first, last = store.checkpoint(1), store.checkpoint("latest")
    with store:
        assert not last.dirty_mask(against="latest").any()
        across = last.dirty_mask(against=first)
        steps = np.logical_or.reduce([c.dirty_mask() for c in store.checkpoints()[1:]])
        # A page may get its old content again.
        assert across.any() and not (across & ~steps).any()
        assert np.array_equal(across, first.dirty_mask(against=last))


def test_an_iteration_that_is_left_early_unmounts(store: keyframe.Store) -> None:
    pages = store.checkpoint(2).dirty_pages()
    page = next(pages)
    assert len(mounts()) == 1
    pages.close()  # type: ignore[attr-defined]
    assert mounts() == set()
    assert page.content.shape == (4096,)


def test_exported_ram_where_nothing_can_be_mounted(store_path: Path, store: keyframe.Store) -> None:
    exported = keyframe.Store(store_path, via="export")
    with store, exported, store.checkpoint(4).ram() as mapped, exported.checkpoint(4).ram() as ram:
        assert np.array_equal(ram.pages, mapped.pages)
        mask = exported.checkpoint(4).dirty_mask()
        assert np.array_equal(mask, store.checkpoint(4).dirty_mask())
        kept = ram.pages[:300]
    # The file is gone, its content is not.
    with store.checkpoint(4).ram() as ram:
        assert np.array_equal(kept, ram.read(0, 300))
    assert mounts() == set()


def test_a_group_is_asked_whose_ram(group_path: Path) -> None:
    store = keyframe.Store(group_path, via="mount")
    exported = keyframe.Store(group_path, via="export")
    latest = store.checkpoint("latest")
    assert latest.members() == ("db", "web")
    with pytest.raises(keyframe.NoRam, match=r"of the VMs db, web: name one with member="):
        latest.ram()
    with pytest.raises(keyframe.NoRam, match="none has the name mail"):
        latest.ram("mail")
    with store, exported:
        for member, mib in (("db", 16), ("web", 8)):
            with latest.ram(member) as ram, exported.checkpoint("latest").ram(member) as other:
                assert ram.len_bytes == mib << 20
                assert np.array_equal(ram.pages, other.pages)
            assert latest.dirty_mask(member=member).any()


def test_one_vm_has_no_members(store: keyframe.Store) -> None:
    with pytest.raises(keyframe.NoRam, match="it has no member db"):
        store.checkpoint(1).ram("db")
    assert mounts() == set()


def test_ram_of_another_size_is_not_compared(store: keyframe.Store, recording_path: Path) -> None:
    other = keyframe.Recording(recording_path).store.checkpoint(1)
    with pytest.raises(keyframe.LayoutDiffers, match=f"has {16 << 20} bytes .* has {128 << 20}"):
        store.checkpoint(1).dirty_mask(against=other)


def test_a_checkpoint_that_was_forgotten(store_path: Path, program: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store_path, copy)
    store = keyframe.Store(copy, via="mount")
    third = store.checkpoint(3)
    machines.keyframe(program, "forget", "2", "--store", str(copy))
    # A list from before still names it; in a new list the parent is the one before.
    with pytest.raises(keyframe.UnknownCheckpoint):
        next(third.dirty_pages())
    assert store.checkpoint(3).parent == 1
    assert store.checkpoint(3).dirty_mask().any()


def test_damaged_pages_are_an_error(store_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store_path, copy)
    for pack in (copy / "packs").iterdir():
        content = bytearray(pack.read_bytes())
        for at in range(4096, len(content) - 4096, 256):
            content[at] ^= 0xFF
        pack.write_bytes(content)
    store = keyframe.Store(copy, via="mount")
    with store, store.checkpoint("latest").ram() as ram:
        with pytest.raises(keyframe.UnreadablePages, match="guest-physical page"):
            ram.read(0, len(ram))


def test_contradictory_ranges_are_refused() -> None:
    good = {"start": 0, "len_bytes": 8192, "block": "pc.ram", "offset_bytes": 0}
    assert [p.block for p in ranges_of([good], "it")] == ["pc.ram"]
    assert ranges_of(None, "it") == []
    bad: list[object] = [
        "text",
        {**good, "start": -4096},
        {**good, "len_bytes": 100},
        {**good, "block": 7},
        {"start": 0},
    ]
    for region in bad:
        with pytest.raises(keyframe.BadAnswer):
            ranges_of([region], "it")
    with pytest.raises(keyframe.BadAnswer, match="at one address"):
        ranges_of([good, {**good, "start": 4096}], "it")


def test_ranges_cover_each_page_once() -> None:
    random = np.random.default_rng(7)
    for _ in range(200):
        known, expected = [], set()
        for _ in range(int(random.integers(1, 5))):
            start, count = int(random.integers(0, 40)), int(random.integers(0, 20))
            known.append(keyframe.RamRange("b", start * 4096, count * 4096, 0))
            expected |= set(range(start, start + count))
        chunk = int(random.integers(1, 9))
        ranges = list(covered(known, chunk))
        pages = [page for pages in ranges for page in pages]
        assert pages == sorted(expected)
        assert all(0 < len(pages) <= chunk for pages in ranges)
