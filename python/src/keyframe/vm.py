"""Runs VMs under checkpoints, and drives them.

::

    run      starts a VM; the VM ends with the ``with``, also if that ends by an exception
    attach   takes checkpoints of a VM that runs already; the VM runs on after the ``with``
    connect  drives a VM that another process runs under checkpoints; nothing ends with the ``with``

Clones end with the `Vm` that made them. If Python is killed, VMs that it started and their clones
end, too; sealed checkpoints stay.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from . import clones
from .checkpoints import Checkpoint, History
from .clones import Clone, Clones, number_of, started, text_of
from .errors import BadAnswer, CommandFailed, KeyframeError, VmEnded
from .machine import Console, Machine
from .processes import Deadline, GuardedCommand, Process, directory_for_command
from .program import KeyframeWarning, Program, expect_list, expect_object, find_program
from .store import Store

#: A time in seconds, or as the program reads it: ``"500ms"``, ``"1s"``, ``"2m"``.
Period = float | str
Disk = Literal["auto", "served", "bitmap", "reflink"]
_DONE, _WARNED = 0, 3
#: QEMU may be there for a moment after a command has noticed that it ends.
_END_SECONDS = 0.2
_POLL_SECONDS = 0.02
#: As many checkpoints may be sealed between a `take` and a list.
_NEWEST = 16


@dataclass(frozen=True)
class Status:
    """How the checkpoints of a VM go: an entry of ``keyframe status --json``.

    `state` is the state of the VM (``running``, ``paused``, ...). `phase` is what the engine does.
    `sealed` and `failed` are the numbers of checkpoints in this run. `failing` is the reason why
    the newest checkpoint is not sealed, `last_error` the error of the newest one that failed; both
    are `None` if all is well. `interval_ns` is `None` if checkpoints are taken by `Vm.take` alone.
    `raw` is the entry.
    """

    vm: str
    state: str
    phase: str
    pid: int
    engine_pid: int
    store: str
    interval_ns: int | None
    sealed: int
    failed: int
    failing: str | None
    last_error: str | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, entry: Any) -> Status:
        """Parses an entry of ``status --json``. Raises `BadAnswer`."""
        raw = expect_object(entry, "status --json")
        try:
            interval = raw.get("interval_ns")
            return cls(
                vm=str(raw["vm"]),
                state=str(raw["state"]),
                phase=str(raw["phase"]),
                pid=int(raw["qemu_pid"]),
                engine_pid=int(raw["engine_pid"]),
                store=str(raw["store"]),
                interval_ns=None if interval is None else int(interval),
                sealed=int(raw["sealed"]),
                failed=int(raw["failed"]),
                failing=_text_or_none(raw.get("failing")),
                last_error=_text_or_none(raw.get("last_error")),
                raw=raw,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"status --json: of another form: {error!r}") from error


@dataclass(frozen=True)
class RolledBack:
    """The result of `Vm.rollback`.

    The VM is as it was at `checkpoint`. `before` is the checkpoint of the state that it left, and
    `now` the first one after the rollback; both are `None` after a fast one. `pages` were written
    back. The VM was paused for `paused_ns` nanoseconds, and `runs` is false if it still is. `raw`
    is the output of ``keyframe rollback --json``.
    """

    checkpoint: int
    before: int | None
    now: int | None
    pages: int
    paused_ns: int
    runs: bool
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, answer: Any) -> RolledBack:
        """Parses the output of ``rollback --json``. Raises `BadAnswer`."""
        raw = expect_object(answer, "rollback --json")
        try:
            before, now = raw.get("before"), raw.get("now")
            return cls(
                checkpoint=int(raw["checkpoint"]),
                before=None if before is None else int(before),
                now=None if now is None else int(now),
                pages=int(raw["pages"]),
                paused_ns=int(raw["stood_ns"]),
                runs=bool(raw["runs"]),
                raw=raw,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"rollback --json: of another form: {error!r}") from error


class Vm(Machine):
    """A VM under checkpoints, made by `run`, `attach` or `connect`. A context manager.

    >>> with keyframe.run(command, store, name="web") as vm:
    ...     base = vm.take(tag="base")
    ...     clones = vm.branch(base, 2)
    ...     back = vm.rollback(base)
    >>> base.tags, [clone.is_alive for clone in clones], back.checkpoint == base.id
    (('base',), [False, False], True)

    `store` is the store of its checkpoints. `timeout` limits each command of its methods, in
    seconds. Threads can share a `Vm`.
    """

    def __init__(
        self,
        status: Status,
        store: Store,
        *,
        command: GuardedCommand | None,
        console: Console | None,
        timeout: float,
        agent_path: Path | None,
    ) -> None:
        super().__init__(status.vm, status.pid, console=console, agent_path=agent_path)
        self.store = store
        self.timeout = timeout
        self._command = command
        self._lock = threading.Lock()
        self._clones: list[Clones | Clone] = []
        self._is_stopped = False

    def __repr__(self) -> str:
        return f"Vm({self.name!r}, pid={self.pid}, store={self.store.path!r})"

    def status(self) -> Status:
        """How the VM and its checkpoints go. Raises `VmEnded`, `CommandFailed`."""
        answer = self._json(["status", "--name", self.name, "--json"], self.timeout)
        for entry in expect_list(answer, "status --json"):
            if "engine_pid" in expect_object(entry, "status --json"):
                return Status.of(entry)
        raise self._ended_or(KeyframeError(f"no checkpoints are taken of VM {self.name} any more"))

    def take(
        self, *, tag: str | None = None, strategy: str | None = None, timeout: float | None = None
    ) -> Checkpoint:
        """Takes a checkpoint now, and waits until it is sealed.

        `tag` is a name for it. `strategy` is one of ``keyframe take``. After `timeout` seconds the
        call gives up; the checkpoint may be sealed all the same.

        Raises `VmEnded`, `CommandFailed`, `TimedOut`.
        """
        words = ["take", "--name", self.name, "--json"]
        # With `=`, because a tag may begin with a dash.
        words += [] if tag is None else [f"--tag={tag}"]
        words += [] if strategy is None else [f"--strategy={strategy}"]
        taken = Checkpoint.of(self._json(words, timeout), self.store)
        # The answer lacks the parent, which the list has.
        listed = self.store.checkpoints(last=_NEWEST)
        return next((one for one in listed if one.id == taken.id), taken)

    def checkpoints(self, *, last: int | None = None) -> History:
        """The sealed checkpoints of the VM, from old to new: all in the store, or the newest
        `last`.

        A notebook shows them as a table.
        """
        return History(self.store.checkpoints(vm=self.name, last=last))

    def branch(
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
    ) -> Clones:
        """Starts `count` clones of a checkpoint; see `keyframe.branch`. They end with this `Vm`, or
        before, by a ``with`` of their own or by `Clones.stop`.

        Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
        """
        made = clones.branch(
            self.store,
            checkpoint,
            count,
            name=name,
            exact=exact,
            paused=paused,
            extra=extra,
            options=options,
            timeout=self.timeout if timeout is None else timeout,
        )
        self._adopt(made)
        return made

    def restore(
        self,
        checkpoint: Checkpoint | int | str,
        *,
        lazy: bool = False,
        paused: bool = False,
        extra: Sequence[str] = (),
        options: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Clone:
        """Brings a checkpoint to life beside this VM; see `keyframe.restore`. It ends with this
        `Vm`, or before, by a ``with`` of its own or by `Clone.stop`.

        A network port of the host that this VM uses is an error: use `branch`, whose clones have no
        ports, or replace the network with `extra`.

        Raises `UnknownCheckpoint`, `CommandFailed`, `TimedOut`.
        """
        made = clones.restore(
            self.store,
            checkpoint,
            lazy=lazy,
            paused=paused,
            extra=extra,
            options=options,
            timeout=self.timeout if timeout is None else timeout,
        )
        self._adopt(made)
        return made

    def rollback(
        self,
        checkpoint: Checkpoint | int | str,
        *,
        fast: bool = False,
        timeout: float | None = None,
    ) -> RolledBack:
        """Puts this VM back to a checkpoint: RAM, processors, devices and disks.

        It first takes a checkpoint of the present state, and afterwards one of the state that it
        has put back. `fast` takes neither; it is for tests and fuzzers, which go back many times.
        A known limit: the guest agent of the VM does not answer any more in some cases.

        Raises `UnknownCheckpoint`, `VmEnded`, `CommandFailed`, `TimedOut`.
        """
        known = self.store.resolve(checkpoint)
        words = ["rollback", str(known.id), "--name", self.name, "--json", *["--fast"] * fast]
        try:
            done = RolledBack.of(self._json(words, timeout))
        except CommandFailed as error:
            raise self.store.explained(error, known) from error
        # Firecracker goes back in another process.
        successor = done.raw.get("successor_pid")
        if isinstance(successor, int):
            self._process = Process(successor)
        return done

    def messages(self) -> str:
        """The warnings and errors of the program and of QEMU so far, at most 64 KiB; empty for a VM
        of `connect`.
        """
        return "" if self._command is None else self._command.messages()

    def wait(self, timeout: float) -> None:
        """Waits until the VM has ended by itself, and its last checkpoint is sealed.

        Raises `TimedOut`, and `CommandFailed` (`GuestPanicked`, `WatchdogExpired`, `StoreFull`) if
        it did not end well.
        """
        deadline = Deadline(timeout, f"VM {self.name} did not end")
        if self._command is None:
            while self.is_alive:
                deadline.sleep(_POLL_SECONDS)
        else:
            self._raise_failure(self._command.wait(deadline))

    def stop(self) -> None:
        """Ends what this `Vm` began: its clones; the checkpoints, after what is in progress is
        sealed; and the VM, if `run` started it.

        A second call does nothing. Raises `CommandFailed` if the run has failed, for example
        `StoreFull`.
        """
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            made, self._clones = self._clones, []
        with ExitStack() as ends:
            if self._command is not None:
                ends.callback(self._command.end)
            for one in made:
                ends.callback(one.stop)
        if self._command is not None:
            self._raise_failure(self._command.end())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except KeyframeError as failed:
            if error is None:
                raise
            # The first error counts.
            error.add_note(f"VM {self.name}, when it was stopped: {failed}")

    def _adopt(self, made: Clones | Clone) -> None:
        with self._lock:
            self._clones.append(made)
            is_late = self._is_stopped
        if is_late:
            made.stop()
            raise VmEnded(f"VM {self.name} was stopped meanwhile, and its clones with it")

    def _json(self, words: Sequence[str], timeout: float | None) -> Any:
        limit = self.timeout if timeout is None else timeout
        try:
            return self.store._program.json(words, timeout_seconds=limit)
        except CommandFailed as error:
            raise self._ended_or(error) from error

    def _ended_or(self, error: KeyframeError) -> KeyframeError:
        """`error`, or `VmEnded` if the VM has ended."""
        if self._is_stopped:
            return self._ended()
        deadline = time.monotonic() + _END_SECONDS
        while self.is_alive:
            if time.monotonic() > deadline:
                messages = self.messages()
                if messages:
                    error.add_note(f"the messages of VM {self.name}: {messages}")
                return error
            time.sleep(_POLL_SECONDS)
        return self._ended()

    def _ended(self) -> VmEnded:
        if self._is_stopped and self.is_alive:
            return VmEnded(f"VM {self.name} runs on, but its checkpoints were stopped")
        return VmEnded(f"VM {self.name} has ended\n{self.messages()}".strip())

    def _raise_failure(self, code: int) -> None:
        if self._command is None or code == _DONE:
            return
        error = self._command.failure(code)
        if code != _WARNED:
            raise error
        warnings.warn(str(error), KeyframeWarning, stacklevel=3)


def run(
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
) -> Vm:
    """Starts a VM under checkpoints, as ``keyframe run`` does, and returns when it runs.

    `command` is the command line of QEMU or Firecracker: a list of words, or a text that is split
    as a shell splits it. `store` exists already (`Store.create` makes one). If it is `None`, the
    store is that of ``KEYFRAME_STORE``; without that, a temporary one in ``TMPDIR``, which is
    removed with the VM: do not read arrays of its RAM (`Checkpoint.ram`) after that. `name` is the VM's name; if it is `None`, that of QEMU's ``-name``, or
    ``vm``. `interval` is the time between checkpoints; if it is `None`, only `Vm.take` takes them.
    `disk` and `leave_out_disks` are ``--disk`` and ``--leave-out-disk``, and `options` are further
    options of ``keyframe run``. `agent` is the guest agent's socket, if QEMU's command line does
    not tell.

    The VM and its clones end with the ``with``, by `Vm.stop`, and when Python ends or is killed. To
    let a VM outlive Python, start it with the program, and use `connect`. QEMU reads nothing from
    its standard input; what it writes to its standard output is `Vm.console`.

    >>> with keyframe.run(command, store, interval=0.5) as vm:
    ...     vm.status().state
    'running'

    Raises `CommandFailed` (`NoStore`, ...), `VmEnded` if the VM ends at once, `TimedOut`,
    `ProgramNotFound`.
    """
    line = shlex.split(command) if isinstance(command, str) else [os.fspath(w) for w in command]
    if not line:
        raise ValueError("command is empty")
    with ExitStack() as undo:
        directory = directory_for_command()
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        of = _store(store, directory, program, timeout)
        words = ["run", "--store", of.path, "--quiet"]
        words += _options(name, interval, disk, leave_out_disks, options)
        guarded = started(of, [*words, "--", *line], directory)
        undo.callback(guarded.end)
        vm = _engine(guarded, of, guarded.output, timeout, agent)
        undo.pop_all()
    return vm


def attach(
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
) -> Vm:
    """Takes checkpoints of a VM that runs already, as ``keyframe attach`` does.

    `pid` is the process id of QEMU or Firecracker. `qmp` is QEMU's QMP socket, which no other
    program uses; or name the VM's domain in `libvirt`; or, for Firecracker, the socket of its API
    in `api`. The other arguments are those of `run`, except that `store` must be named, here or by
    ``KEYFRAME_STORE``. The VM runs on when the ``with`` ends.

    >>> with keyframe.attach(clone.pid, qmp=clone.monitor, store=store, name="attached") as vm:
    ...     checkpoint = vm.take()
    >>> clone.is_alive
    True

    Raises as `run` does.
    """
    monitors = {"--qmp": qmp, "--libvirt": libvirt, "--api": api}
    named = [(option, os.fspath(v)) for option, v in monitors.items() if v is not None]
    if len(named) != 1:
        raise ValueError("attach needs one of qmp=, libvirt= and api=")
    if store is None and not os.environ.get("KEYFRAME_STORE"):
        raise ValueError("attach needs store=, or KEYFRAME_STORE in the environment")
    with ExitStack() as undo:
        directory = directory_for_command()
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        of = _store(store, directory, program, timeout)
        words = ["attach", str(pid), *named[0], "--store", of.path, "--quiet"]
        words += _options(name, interval, disk, leave_out_disks, options)
        guarded = started(of, words, directory)
        undo.callback(guarded.end)
        vm = _engine(guarded, of, None, timeout, agent)
        undo.pop_all()
    return vm


def connect(
    name: str | None = None,
    *,
    store: Store | str | os.PathLike[str] | None = None,
    agent: str | os.PathLike[str] | None = None,
    program: str | os.PathLike[str] | None = None,
    timeout: float = 120.0,
) -> Vm:
    """Drives a VM that another process has under checkpoints: ``keyframe run`` or ``keyframe
    attach``.

    `name` is its name, which may be `None` if there is one such VM. `store` is its store; if it is
    `None`, the one that the VM's engine names. The VM runs on when the ``with`` ends, but clones
    that this `Vm` made end.

    >>> with keyframe.connect("web") as vm:
    ...     vm.take().vm
    'web'

    Raises `CommandFailed` if there is no such VM, `TimedOut`, `ProgramNotFound`.
    """
    asked = (
        store._program
        if isinstance(store, Store)
        else Program(find_program(program), timeout_seconds=timeout)
    )
    words = ["status", "--json", *([] if name is None else ["--name", name])]
    answer = expect_list(asked.json(words), "status --json")
    engines = [Status.of(e) for e in answer if "engine_pid" in expect_object(e, "status --json")]
    if len(engines) != 1:
        names = ", ".join(status.vm for status in engines) or "none"
        raise KeyframeError(
            f"name= names the VM to connect to; those under checkpoints are: {names}"
        )
    return Vm(
        engines[0],
        _opened(engines[0].store if store is None else store, program, timeout),
        command=None,
        console=None,
        timeout=timeout,
        agent_path=None if agent is None else Path(agent),
    )


def _engine(
    command: GuardedCommand,
    store: Store,
    console: Console | None,
    timeout: float,
    agent: str | os.PathLike[str] | None,
) -> Vm:
    """Waits until the engine of a command takes checkpoints."""

    def look() -> Status | None:
        entry = clones.find(store, command, "engine_pid", None)
        return None if entry is None else Status.of(entry)

    status = command.await_answer(look, "the VM", timeout)
    return Vm(
        status,
        store,
        command=command,
        console=console,
        timeout=timeout,
        agent_path=None if agent is None else Path(agent),
    )


def _store(
    store: Store | str | os.PathLike[str] | None,
    directory: Path,
    program: str | os.PathLike[str] | None,
    timeout: float,
) -> Store:
    """The store of a run: `store`, or the environment's, or a new one in `directory`."""
    named = store if store is not None else os.environ.get("KEYFRAME_STORE") or None
    if named is None:
        return Store.create(directory / "store", program=program, timeout=timeout)
    return _opened(named, program, timeout)


def _opened(
    store: Store | str | os.PathLike[str], program: str | os.PathLike[str] | None, timeout: float
) -> Store:
    if isinstance(store, Store):
        return store
    return Store(store, program=program, timeout=timeout)


def _options(
    name: str | None,
    interval: Period | None,
    disk: Disk,
    leave_out_disks: Sequence[str],
    options: Sequence[str],
) -> list[str]:
    words = ["--interval", _interval(interval), "--disk", disk]
    words += [] if name is None else ["--name", name]
    for left_out in leave_out_disks:
        words += ["--leave-out-disk", left_out]
    return [*words, *options]


def _interval(interval: Period | None) -> str:
    """
    >>> _interval(None), _interval(0.5), _interval(2), _interval("1m")
    ('none', '500ms', '2000ms', '1m')
    """
    if interval is None or isinstance(interval, str):
        return "none" if interval is None else interval
    milliseconds = round(interval * 1000)
    if milliseconds < 1:
        raise ValueError(f"interval={interval!r}: it is at least 0.001 s")
    return f"{milliseconds}ms"


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
