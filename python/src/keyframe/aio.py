"""`run`, `attach` and `connect` for asyncio.

::

    async with keyframe.aio.run(command, store="S") as vm:
        base = await vm.take()
        clones = await vm.branch(base, 20)
        results = await asyncio.gather(*(clone.exec(["pytest"]) for clone in clones))

The classes have the methods of those without `Async`, which run in threads. If a task is cancelled
that waits for a method, the method goes on in its thread until it has ended, or until its time
limit; clones and VMs that come from it are ended. `sync` is the object that does the work.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar, overload

from . import starting
from .agent import Completed
from .checkpoints import Checkpoint, History
from .clones import Clone, Clones
from .machine import Machine
from .starting import Disk, Period
from .status import RolledBack, Status
from .store import Store
from .vm import Vm

T = TypeVar("T")


async def in_thread(
    function: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
    is_whole: bool = False,
) -> T:
    """Runs `function` in a thread of its own, and waits for it.

    If the waiting task is cancelled, `undo` is called with the result. The task waits for that, and
    if `is_whole` is true for the function's end in any case.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        # The loop is closed if its caller has ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name=f"keyframe {function}").start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if undo is not None or is_whole:
            await _finished(done)
        if undo is not None and done.exception() is None:
            await in_thread(partial(undo, done.result()), is_whole=True)
        raise


async def _finished(done: asyncio.Future[T]) -> None:
    """Waits for the end of a thread's work, also if the waiting task is cancelled again."""
    while not done.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([done])


class AsyncMachine:
    """What `AsyncVm` and `AsyncClone` have in common; see `keyframe.machine.Machine`."""

    def __init__(self, sync: Machine) -> None:
        self._machine = sync

    @property
    def name(self) -> str:
        """The name of the VM."""
        return self._machine.name

    @property
    def pid(self) -> int:
        """The process id of QEMU or Firecracker."""
        return self._machine.pid

    @property
    def is_alive(self) -> bool:
        """True if the process of the VM has not ended."""
        return self._machine.is_alive

    @property
    def console_path(self) -> Path:
        """The file with the output of the serial console."""
        return self._machine.console_path

    def console(self, *, bytes_max: int = 1 << 20) -> str:
        """The end of the serial console's output."""
        return self._machine.console(bytes_max=bytes_max)

    async def wait_for_console(self, text: str, *, timeout: float = 60.0) -> str:
        """Waits until `text` is in the output of the serial console."""
        return await in_thread(partial(self._machine.wait_for_console, text, timeout=timeout))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> Completed:
        """Runs a program in the guest until it ends."""
        return await in_thread(
            partial(self._machine.exec, argv, input=input, env=env, timeout=timeout, check=check)
        )


class AsyncClone(AsyncMachine):
    """A VM that came from a checkpoint; see `Clone`. ``async with`` ends it."""

    def __init__(self, sync: Clone) -> None:
        super().__init__(sync)
        self.sync = sync

    def __repr__(self) -> str:
        return f"Async{self.sync!r}"

    async def stop(self, *, timeout: float = 60.0) -> None:
        """Ends the clone."""
        await in_thread(partial(self.sync.stop, timeout=timeout), is_whole=True)

    async def wait(self, timeout: float) -> None:
        """Waits until the clone has ended by itself."""
        await in_thread(partial(self.sync.wait, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class AsyncClones(Sequence[AsyncClone]):
    """The clones that one `branch` started; see `Clones`. ``async with`` ends them."""

    def __init__(self, sync: Clones) -> None:
        self.sync = sync
        self._clones = [AsyncClone(clone) for clone in sync]

    @overload
    def __getitem__(self, index: int) -> AsyncClone: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncClone]: ...
    def __getitem__(self, index: int | slice) -> AsyncClone | list[AsyncClone]:
        return self._clones[index]

    def __len__(self) -> int:
        return len(self._clones)

    def __repr__(self) -> str:
        return repr(self._clones)

    async def stop(self) -> None:
        """Ends all of them."""
        await in_thread(self.sync.stop, is_whole=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class AsyncVm(AsyncMachine):
    """A VM under checkpoints; see `Vm`."""

    def __init__(self, sync: Vm) -> None:
        super().__init__(sync)
        self.sync = sync

    def __repr__(self) -> str:
        return f"Async{self.sync!r}"

    @property
    def store(self) -> Store:
        """The store of the VM's checkpoints; its methods are not asynchronous."""
        return self.sync.store

    async def status(self) -> Status:
        """How the VM and its checkpoints go."""
        return await in_thread(self.sync.status)

    async def take(
        self, *, tag: str | None = None, strategy: str | None = None, timeout: float | None = None
    ) -> Checkpoint:
        """Takes a checkpoint now, and waits until it is sealed."""
        return await in_thread(partial(self.sync.take, tag=tag, strategy=strategy, timeout=timeout))

    async def checkpoints(self, *, last: int | None = None) -> History:
        """The sealed checkpoints of the VM, from old to new."""
        return await in_thread(partial(self.sync.checkpoints, last=last))

    async def branch(
        self,
        checkpoint: Checkpoint | int | str,
        count: int = 1,
        *,
        name: str | None = None,
        exact: bool = False,
        paused: bool = False,
        extra: Sequence[str] = (),
        options: Sequence[str] = (),
        timeout: float | None = None,
    ) -> AsyncClones:
        """Starts `count` clones of a checkpoint, which end with this VM or before."""
        work = partial(
            self.sync.branch,
            checkpoint,
            count,
            name=name,
            exact=exact,
            paused=paused,
            extra=extra,
            options=options,
            timeout=timeout,
        )
        return AsyncClones(await in_thread(work, undo=Clones.stop))

    async def restore(
        self,
        checkpoint: Checkpoint | int | str,
        *,
        name: str | None = None,
        lazy: bool = False,
        paused: bool = False,
        extra: Sequence[str] = (),
        options: Sequence[str] = (),
        timeout: float | None = None,
    ) -> AsyncClone:
        """Brings a checkpoint to life beside this VM. It ends with this VM or before."""
        work = partial(
            self.sync.restore,
            checkpoint,
            name=name,
            lazy=lazy,
            paused=paused,
            extra=extra,
            options=options,
            timeout=timeout,
        )
        return AsyncClone(await in_thread(work, undo=Clone.stop))

    async def rollback(
        self,
        checkpoint: Checkpoint | int | str,
        *,
        fast: bool = False,
        timeout: float | None = None,
    ) -> RolledBack:
        """Puts this VM back to a checkpoint."""
        return await in_thread(partial(self.sync.rollback, checkpoint, fast=fast, timeout=timeout))

    def messages(self) -> str:
        """The warnings and errors of the program and of QEMU so far."""
        return self.sync.messages()

    async def wait(self, timeout: float) -> None:
        """Waits until the VM has ended by itself, and its last checkpoint is sealed."""
        await in_thread(partial(self.sync.wait, timeout))

    async def stop(self) -> None:
        """Ends what this VM began: its clones, the checkpoints, and the VM if `run` started it."""
        await in_thread(self.sync.stop, is_whole=True)


@asynccontextmanager
async def run(
    command: str | Sequence[str | os.PathLike[str]],
    store: Store | str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    interval: Period | None = None,
    disk: Disk = "auto",
    leave_out_disks: Sequence[str] = (),
    options: Sequence[str] = (),
    agent: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
) -> AsyncIterator[AsyncVm]:
    """Starts a VM under checkpoints, for an ``async with``; see `keyframe.run`."""
    work = partial(
        starting.run,
        command,
        store,
        name=name,
        interval=interval,
        disk=disk,
        leave_out_disks=leave_out_disks,
        options=options,
        agent=agent,
        program=program,
        timeout=timeout,
    )
    async with _within(work) as made:
        yield made


@asynccontextmanager
async def attach(
    pid: int,
    *,
    qmp: str | os.PathLike[str] | None = None,
    libvirt: str | None = None,
    api: str | os.PathLike[str] | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    name: str | None = None,
    interval: Period | None = None,
    disk: Disk = "auto",
    leave_out_disks: Sequence[str] = (),
    options: Sequence[str] = (),
    agent: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
) -> AsyncIterator[AsyncVm]:
    """Takes checkpoints of a VM that runs already, in an ``async with``; see `keyframe.attach`."""
    work = partial(
        starting.attach,
        pid,
        qmp=qmp,
        libvirt=libvirt,
        api=api,
        store=store,
        name=name,
        interval=interval,
        disk=disk,
        leave_out_disks=leave_out_disks,
        options=options,
        agent=agent,
        program=program,
        timeout=timeout,
    )
    async with _within(work) as made:
        yield made


@asynccontextmanager
async def connect(
    name: str | None = None,
    *,
    store: Store | str | os.PathLike[str] | None = None,
    agent: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
) -> AsyncIterator[AsyncVm]:
    """Drives a VM of another process, in an ``async with``; see `keyframe.connect`."""
    work = partial(
        starting.connect, name, store=store, agent=agent, program=program, timeout=timeout
    )
    async with _within(work) as made:
        yield made


@asynccontextmanager
async def _within(work: Callable[[], Vm]) -> AsyncIterator[AsyncVm]:
    """The VM that `work` makes; it is stopped at the end."""
    made = await in_thread(work, undo=Vm.stop)
    try:
        yield AsyncVm(made)
    except BaseException as error:
        # The first error counts; `Vm.__exit__` notes those of the stop.
        await in_thread(partial(made.__exit__, type(error), error, None), is_whole=True)
        raise
    await in_thread(made.stop, is_whole=True)
