"""The asynchronous classes do what the others do, and a cancelled task leaves nothing."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path

import pytest

import keyframe
from keyframe import aio

from .conftest import vms


def test_run_take_branch_roll_back(command: list[str], fresh: keyframe.Store) -> None:
    async def drive() -> None:
        async with aio.run(command, fresh, name="web") as vm:
            await vm.wait_for_console("KF READY")
            base = await vm.take(tag="base")
            clones = await vm.branch(base, 2)
            assert [clone.name for clone in clones] == ["web-1", "web-2"]
            await asyncio.gather(*(clone.wait_for_console("hash ") for clone in clones))
            await clones[0].stop()
            assert [clone.is_alive for clone in clones] == [False, True]
            async with await vm.restore(base) as restored:
                assert restored.is_alive
            assert (await vm.rollback(base, fast=True)).checkpoint == base.id
            async with aio.connect("web") as same:
                assert (await same.status()).pid == vm.pid
            assert [c.id for c in await vm.checkpoints(last=1)] == [
                vm.store.checkpoint("latest").id
            ]
            async with aio.attach(clones[1].pid, qmp=clones[1].sync.monitor, store=fresh) as other:
                await other.take()
            with pytest.raises(keyframe.UnknownCheckpoint):
                await vm.rollback("nothing")
        assert not vm.is_alive and not clones[1].is_alive
        with pytest.raises(RuntimeError, match="on purpose"):
            async with aio.run(command, fresh) as vm:
                raise RuntimeError("on purpose")
        assert not vm.is_alive

    asyncio.run(drive())


def test_programs_in_guests(agent_command: list[str]) -> None:
    async def drive() -> None:
        async with aio.run(agent_command) as vm:
            assert (await vm.exec(["echo", "a"], timeout=120)).text == "a\n"
            async with await vm.branch(await vm.take(), 3) as clones:
                began = time.monotonic()
                done = await asyncio.gather(*(c.exec(["sleep", "2"]) for c in clones for _ in "12"))
                assert [one.returncode for one in done] == 6 * [0]
                assert time.monotonic() - began < 11
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await vm.exec(["sleep", "1000"], timeout=5)

    asyncio.run(drive())


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0])
def test_a_cancelled_start_leaves_nothing(
    command: list[str], fresh: keyframe.Store, seconds: float
) -> None:
    async def drive() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                async with aio.run(command, fresh) as vm:
                    clones = await vm.branch(await vm.take(), 2)
                    await clones[0].wait(100)
        assert vms() == []

    asyncio.run(drive())


def test_threads_of_cancelled_tasks_undo_their_work() -> None:
    undone: list[int] = []

    def work() -> int:
        time.sleep(0.3)
        return 7

    async def drive() -> None:
        for undo, is_whole in ((undone.append, False), (None, True), (None, False)):
            began = time.monotonic()
            task = asyncio.create_task(aio.in_thread(work, undo=undo, is_whole=is_whole))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (time.monotonic() - began > 0.25) == (is_whole or undo is not None)
        assert undone == [7]
        with pytest.raises(ZeroDivisionError):
            await aio.in_thread(lambda: 1 // 0)
        assert await aio.in_thread(work, undo=undone.append) == 7
        assert undone == [7]

    asyncio.run(drive())
    # The loop does not wait for the thread that nothing waits for.
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == 1


@pytest.mark.parametrize(
    ("sync", "other"),
    [(keyframe.Vm, aio.AsyncVm), (keyframe.Clone, aio.AsyncClone)],
)
def test_both_have_the_same_methods(sync: type, other: type) -> None:
    # A connection to an agent is not asynchronous; `sync` has it.
    methods = {n for n in dir(sync) if not n.startswith("_") and n != "agent"}
    assert {name for name in methods if not hasattr(other, name)} <= {"store", "timeout"}
    for name in methods & set(dir(other)):
        mine, theirs = getattr(sync, name), getattr(other, name)
        if callable(mine):
            assert (
                str(inspect.signature(mine)).partition(" ->")[0]
                == str(inspect.signature(theirs)).partition(" ->")[0]
            )


def test_functions_have_the_same_arguments() -> None:
    for name in ("run", "attach", "connect"):
        mine, theirs = getattr(keyframe, name), getattr(aio, name)
        assert inspect.signature(mine).parameters == inspect.signature(theirs).parameters
    assert Path(aio.__file__).name == "aio.py"
