"""A VM under checkpoints: checkpoints, clones, rollbacks, and its end."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import clones
from .checkpoints import Checkpoint, History
from .clones import Clone, Clones
from .errors import CommandFailed, KeyframeError, VmEnded
from .machine import Console, Machine
from .processes import Deadline, GuardedCommand, Process
from .program import KeyframeWarning, expect_list, expect_object
from .status import RolledBack, Status
from .store import Store

_DONE, _WARNED = 0, 3
#: QEMU may be there for a moment after a command has noticed that it ends.
_END_SECONDS = 0.2
_POLL_SECONDS = 0.02


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
        return Checkpoint.of(self._json(words, timeout), self.store)

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
        name: str | None = None,
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
            name=name,
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
