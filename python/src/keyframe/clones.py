"""VMs that come from a checkpoint and have no engine: clones, and restored VMs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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

#: The most bytes that a command prints about its clones.
_ANSWER_BYTES_MAX = 4 << 20
_POLL_SECONDS = 0.02
_THREADS_MAX = 64


class Clone(Machine):
    """A VM that came from a checkpoint: of `branch`, or of `restore`. A ``with`` ends it.

    No checkpoints are taken of it; `attach` with its `pid` and `monitor` begins that. `directory`
    holds the sockets of a clone's consoles (``serial.sock``, ``agent.sock``), and `monitor` is the
    socket of its monitor (QMP); both are `None` for a restored VM. A clone ends by `stop`, by
    itself, and with its `Clones` or the `Vm` whose `branch` made it.
    """

    def __init__(
        self,
        name: str,
        pid: int,
        command: GuardedCommand,
        store: Store,
        *,
        console: Console,
        directory: Path | None = None,
        monitor: Path | None = None,
    ) -> None:
        super().__init__(name, pid, console=console)
        self.directory = directory
        self.monitor = monitor
        self._command = command
        self._store = store

    def __repr__(self) -> str:
        return f"Clone({self.name!r}, pid={self.pid})"

    def stop(self, *, timeout: float = 60.0) -> None:
        """Ends the clone. Other clones of the same `branch` run on.

        Raises `CommandFailed`, `TimedOut`.
        """
        if self.directory is None:
            # The command runs this VM alone.
            self._command.end()
            return
        deadline = Deadline(timeout, f"VM {self.name} did not end")
        # An engine of the same name, which has attached to the clone, ends before the clone does.
        while self.is_alive:
            words = ["stop", "--name", self.name]
            try:
                self._store._program.run(words, timeout_seconds=deadline.left())
            except CommandFailed:
                # It may be about to end by itself.
                deadline.sleep(_POLL_SECONDS)
                if self.is_alive:
                    raise

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

    def __init__(
        self, clones: Iterable[Clone], command: GuardedCommand, release: Callable[[], None]
    ) -> None:
        self._clones = list(clones)
        self._command = command
        self._release = release

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
        self._release()

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

    The clones are named ``NAME-1``, ``NAME-2``, ...; `name` is the VM's name if it is `None`.
    `exact` keeps the generation id, and `paused` leaves the clones paused. `extra` are arguments
    for each QEMU, in which ``{number}`` and ``{name}`` stand for the clone's; `options` are further
    options of ``keyframe branch``. The call returns when all clones are there, and fails if one
    cannot be started.

    >>> with keyframe.branch(store, "base", 2, name="test") as clones:
    ...     clones[1].is_alive
    True

    Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
    """
    of = store if isinstance(store, Store) else Store(store)
    known = of.resolve(checkpoint)
    with ExitStack() as undo:
        prefix, release = _claim(name, known.vm)
        undo.callback(release)
        words = ["branch", str(known.id), "--store", of.path, "--count", str(count), "--json"]
        words += ["--quiet", *["--exact"] * exact, *["--paused"] * paused]
        # Without a name of its own, the program shortens the VM's name if necessary.
        words += [] if prefix == known.vm else ["--name", prefix]
        words += [*options, *(["--", *extra] if extra else [])]
        command = started(of, words)
        undo.callback(command.end)
        try:
            what = f"a clone of checkpoint {known.id}"
            listed = command.await_answer(lambda: _listed(command), what, timeout)
        except CommandFailed as error:
            raise of.explained(error, known) from error
        clones = Clones([_clone(entry, command, of) for entry in listed], command, release)
        undo.pop_all()
    return clones


def restore(
    store: Store | str | os.PathLike[str],
    checkpoint: Checkpoint | int | str,
    *,
    lazy: bool = False,
    paused: bool = False,
    extra: Sequence[str] = (),
    options: Sequence[str] = (),
    timeout: float = 120.0,
) -> Clone:
    """Brings a checkpoint to life as one VM, with the networks and the identity of the first VM.

    `lazy` lets it run before its RAM is loaded. The other arguments are those of `branch`. Its
    console is the standard output of its QEMU, if the command line puts a console there.

    >>> with keyframe.restore(store, "base") as restored:
    ...     restored.is_alive
    True

    Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
    """
    of = store if isinstance(store, Store) else Store(store)
    known = of.resolve(checkpoint)
    words = ["restore", str(known.id), "--store", of.path, "--quiet"]
    words += [*["--lazy"] * lazy, *["--paused"] * paused, *options]
    words += ["--", *extra] if extra else []
    with ExitStack() as undo:
        command = started(of, words)
        undo.callback(command.end)
        try:
            what = f"the VM of checkpoint {known.id}"
            entry = command.await_answer(
                lambda: find(of, command, "keyframe_pid", "restored"), what, timeout
            )
        except CommandFailed as error:
            raise of.explained(error, known) from error
        name, pid = text_of(entry, "vm"), number_of(entry, "qemu_pid")
        clone = Clone(name, pid, command, of, console=command.output)
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


def find(
    store: Store, command: GuardedCommand, key: str, kind: str | None
) -> Mapping[str, Any] | None:
    """The entry of ``status --json`` of the VM whose process `key` is `command`; `None` if there is
    none yet.
    """
    for entry in expect_list(store._program.json(["status", "--json"]), "status --json"):
        known = expect_object(entry, "status --json")
        pid = known.get(key)
        if known.get("kind") == kind and isinstance(pid, int) and command.started(pid):
            return known
    return None


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


def _listed(command: GuardedCommand) -> list[Mapping[str, Any]] | None:
    """The clones that ``branch --json`` has printed; `None` if it has not printed all yet."""
    # A QEMU may have printed something before.
    printed = command.output.tail(_ANSWER_BYTES_MAX).partition("[")
    try:
        listed, _ = json.JSONDecoder().raw_decode("".join(printed[1:]))
    except ValueError:
        return None
    return [expect_object(e, "branch --json") for e in expect_list(listed, "branch --json")]


def _clone(entry: Mapping[str, Any], command: GuardedCommand, store: Store) -> Clone:
    directory = Path(text_of(entry, "directory"))
    # Links name the consoles: serial.sock is console.sock, or the socket of a later console.
    serial = (directory / "serial.sock").resolve().name
    log = "console.log" if serial == "serial.sock" else serial.removesuffix("sock") + "log"
    return Clone(
        text_of(entry, "name"),
        number_of(entry, "qemu_pid"),
        command,
        store,
        console=LogFile(directory / log),
        directory=directory,
        monitor=Path(text_of(entry, "monitor")),
    )


_names_lock = threading.Lock()
_names: set[str] = set()


def _claim(name: str | None, vm: str) -> tuple[str, Callable[[], None]]:
    """The prefix of the names of new clones, and how to give it back: `name`, or the VM's name,
    with a number if clones of this Python have it already.
    """
    if name is not None:
        return name, lambda: None
    with _names_lock:
        numbered = (f"{vm[:48]}.{number}" for number in itertools.count(2))
        prefix = next(p for p in itertools.chain([vm], numbered) if p not in _names)
        _names.add(prefix)

    def release() -> None:
        with _names_lock:
            _names.discard(prefix)

    return prefix, release
