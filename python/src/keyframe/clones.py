"""VMs that come from a checkpoint and have no engine: clones, and restored VMs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from .agent import Completed
from .checkpoints import Checkpoint
from .errors import BadAnswer, CommandFailed, VmEnded
from .machine import Console, LogFile, Machine
from .processes import Deadline, GuardedCommand, directory_for_command
from .program import expect_list, expect_object
from .store import Store

_POLL_SECONDS = 0.02
_THREADS_MAX = 64


class Clone(Machine):
    """A VM that came from a checkpoint: of `branch`, or of `restore`. A ``with`` ends it.

    No checkpoints are taken of it; `attach` with its `pid` and `monitor` begins that. `monitor` is
    the socket of its monitor (QMP), or of Firecracker's API. `consoles` are the sockets of its
    consoles by what they are for: ``serial``, ``agent``, or the name of a port. `directory` holds
    its sockets. A clone ends by `stop`, by itself, and with its `Clones` or the `Vm` whose `branch`
    made it.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        command: GuardedCommand,
        store: Store,
        *,
        console: Console | None,
        directory: Path | None,
        monitor: Path | None,
        consoles: Mapping[str, Path],
        is_alone: bool,
    ) -> None:
        super().__init__(name, pid, console=console)
        self.directory = directory
        self.monitor = monitor
        self.consoles = consoles
        #: The command runs this VM alone.
        self._is_alone = is_alone
        self._command = command
        self._store = store

    def __repr__(self) -> str:
        return f"Clone({self.name!r}, pid={self.pid})"

    def stop(self, *, timeout: float = 60.0) -> None:
        """Ends the clone. Other clones of the same `branch` run on.

        Raises `CommandFailed`, `TimedOut`.
        """
        if self._is_alone:
            self._command.end()
            return
        deadline = Deadline(timeout, f"VM {self.name} did not end")
        if self.is_alive:
            # An engine of the same name, which has attached to the clone, ends with it.
            words = ["stop", "--name", self.name, "--on-exit", "kill"]
            try:
                self._store._program.run(words, timeout_seconds=deadline.left())
            except CommandFailed:
                # It may be about to end by itself.
                deadline.sleep(_POLL_SECONDS)
                if self.is_alive:
                    raise
        self.wait(deadline.left())

    def wait(self, timeout: float) -> None:
        """Waits until the clone has ended by itself. Raises `TimedOut`."""
        deadline = Deadline(timeout, f"VM {self.name} did not end")
        while self.is_alive:
            deadline.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _ended(self) -> VmEnded:
        return VmEnded(f"VM {self.name} has ended\n{self._command.messages()}".strip())


class Clones(Sequence[Clone]):
    """The clones that one `branch` started: a sequence, and a context manager that ends them.

    >>> with vm.branch(base, 2) as clones:
    ...     [clone.name for clone in clones]
    ['web-1', 'web-2']
    """

    def __init__(self, clones: Iterable[Clone], command: GuardedCommand) -> None:
        self._clones = list(clones)
        self._command = command

    @overload
    def __getitem__(self, index: int) -> Clone: ...
    @overload
    def __getitem__(self, index: slice) -> list[Clone]: ...
    def __getitem__(self, index: int | slice) -> Clone | list[Clone]:
        return self._clones[index]

    def __len__(self) -> int:
        return len(self._clones)

    def __repr__(self) -> str:
        return repr(self._clones)

    def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        check: bool = False,
    ) -> list[Completed]:
        """Runs a program in all clones at the same time, as `Machine.exec` does in one.

        Returns the results in the order of the clones. Raises the first error, after the program
        has ended in all of them.
        """

        def run(clone: Clone) -> Completed:
            return clone.exec(argv, input=input, env=env, timeout=timeout, check=check)

        with ThreadPoolExecutor(min(len(self), _THREADS_MAX)) as threads:
            return [future.result() for future in [threads.submit(run, c) for c in self]]

    def stop(self) -> None:
        """Ends all of them."""
        self._command.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def branch(
    store: Store | str | os.PathLike[str],
    checkpoint: Checkpoint | int | str,
    count: int = 1,
    *,
    name: str | None = None,
    exact: bool = False,
    paused: bool = False,
    extra: Sequence[str] = (),
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> Clones:
    """Starts `count` clones of a checkpoint, which share the RAM that none of them writes.

    The clones are named ``NAME-1``, ``NAME-2``, ...; if `name` is `None`, it is the VM's name, and
    numbers that other VMs have are left out. `exact` keeps the generation id, and `paused` leaves
    the clones paused. `extra` are arguments for each QEMU, in which ``{number}`` and ``{name}``
    stand for the clone's; `options` are further options of ``keyframe branch``. The call returns
    when all clones are there, and fails if one cannot be started.

    >>> with keyframe.branch(store, "base", 2, name="test") as clones:
    ...     clones[1].is_alive
    True

    Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
    """
    of = store if isinstance(store, Store) else Store(store)
    known = of.resolve(checkpoint)
    with ExitStack() as undo:
        words = ["branch", str(known.id), "--store", of.path, "--count", str(count), "--quiet"]
        words += [*["--exact"] * exact, *["--paused"] * paused]
        words += [] if name is None else ["--name", name]
        words += [*options, *(["--", *extra] if extra else [])]
        command = started(of, words)
        undo.callback(command.end)
        try:
            what = f"a clone of checkpoint {known.id}"
            listed = expect_list(command.await_ready(what, timeout), "branch --ready-fd")
        except CommandFailed as error:
            raise of.explained(error, known) from error
        clones = Clones([_clone(entry, command, of) for entry in listed], command)
        undo.pop_all()
    return clones


def restore(
    store: Store | str | os.PathLike[str],
    checkpoint: Checkpoint | int | str,
    *,
    name: str | None = None,
    lazy: bool = False,
    paused: bool = False,
    extra: Sequence[str] = (),
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> Clone:
    """Brings a checkpoint to life as one VM, with the networks and the identity of the first VM.

    `name` is the name by which ``keyframe status`` and ``keyframe stop`` find it; if it is `None`,
    the VM's name, with a number if another VM has it. `lazy` lets it run before its RAM is loaded.
    The other arguments are those of `branch`. Its console is the standard output of its QEMU, if
    the command line puts a console there.

    >>> with keyframe.restore(store, "base") as restored:
    ...     restored.is_alive
    True

    Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
    """
    of = store if isinstance(store, Store) else Store(store)
    known = of.resolve(checkpoint)
    words = ["restore", str(known.id), "--store", of.path, "--quiet"]
    words += [*["--lazy"] * lazy, *["--paused"] * paused]
    words += [] if name is None else ["--name", name]
    words += [*options, *(["--", *extra] if extra else [])]
    with ExitStack() as undo:
        command = started(of, words)
        undo.callback(command.end)
        try:
            what = f"the VM of checkpoint {known.id}"
            entry = command.await_ready(what, timeout)
        except CommandFailed as error:
            raise of.explained(error, known) from error
        clone = _clone(entry, command, of, is_alone=True)
        undo.pop_all()
    return clone


def started(store: Store, words: Sequence[str], directory: Path | None = None) -> GuardedCommand:
    """Starts a command of the program in the background, with the store's key.

    The command's files are in `directory`, or in a new one; they are removed if it does not start.
    """
    where = directory_for_command() if directory is None else directory
    try:
        return GuardedCommand(store._program, words, where)
    except BaseException:
        shutil.rmtree(where, ignore_errors=True)
        raise


def text_of(entry: Mapping[str, Any], key: str) -> str:
    """A text of an entry that the program printed. Raises `BadAnswer`."""
    value = entry.get(key)
    if not isinstance(value, str):
        raise BadAnswer(f"{key}: a text was expected, not {value!r}")
    return value


def number_of(entry: Mapping[str, Any], key: str) -> int:
    """A number of an entry that the program printed. Raises `BadAnswer`."""
    value = entry.get(key)
    if not isinstance(value, int):
        raise BadAnswer(f"{key}: a number was expected, not {value!r}")
    return value


def _clone(answer: Any, command: GuardedCommand, store: Store, *, is_alone: bool = False) -> Clone:
    """The VM that a command has told of. `is_alone` says that the command restores it."""
    entry = expect_object(answer, "--ready-fd")
    known = expect_object(entry.get("consoles"), "--ready-fd: consoles")
    consoles = {name: expect_object(one, "--ready-fd: consoles") for name, one in known.items()}
    console: Console | None = command.output if is_alone else None
    directory = _path(entry.get("directory"))
    if console is None and "serial" in consoles:
        console = LogFile(Path(text_of(consoles["serial"], "log")))
    return Clone(
        text_of(entry, "name"),
        number_of(entry, "qemu_pid"),
        command,
        store,
        console=console,
        directory=directory,
        monitor=_path(entry.get("monitor")),
        consoles={
            name: Path(text_of(one, "socket"))
            for name, one in consoles.items()
            if one.get("socket") is not None
        },
        is_alone=is_alone,
    )


def _path(value: Any) -> Path | None:
    return None if value is None else Path(str(value))
