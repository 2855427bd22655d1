"""Puts VMs under checkpoints.

::

    run      starts a VM; the VM ends when the ``with`` block ends, also by an exception
    attach   takes checkpoints of a VM that runs already; the VM runs on after the ``with``
    connect  drives a VM that another process runs under checkpoints; nothing ends with the ``with``

Clones end with the `Vm` that made them. If Python is killed, VMs that it started and their clones
end, too; sealed checkpoints stay.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from .clones import started
from .errors import KeyframeError
from .machine import Console
from .processes import GuardedCommand, directory_for_command
from .program import Program, expect_list, expect_object, find_program
from .status import Status
from .store import Store
from .vm import Vm

#: A time in seconds, or as the program reads it: ``"500ms"``, ``"1s"``, ``"2m"``.
Period = float | str
Disk = Literal["auto", "served", "bitmap", "reflink"]


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
    """Starts a VM under checkpoints, as ``keyframe run`` does, and returns when it is ready: the VM
    runs, and its first checkpoint is sealed if there is an `interval`.

    `command` is the command line of QEMU or Firecracker: a list of words, or a text that is split
    as a shell splits it. `store` exists already (`Store.create` makes one). If it is `None`, the
    store is that of ``KEYFRAME_STORE``; without that, a temporary one in ``TMPDIR``, which is
    removed when the VM ends; arrays of its RAM (`Checkpoint.ram`) are invalid then. `name` is the
    VM's name; if it is `None`, that of QEMU's ``-name``, or ``vm``. `interval` is the time between
    checkpoints; if it is `None`, only `Vm.take` takes them. `disk` and `leave_out_disks` are
    ``--disk`` and ``--leave-out-disk``, and `options` are further options of ``keyframe run``.
    `agent` is the guest agent's socket, if QEMU's command line does not tell.

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
    options = _options(name, interval, disk, leave_out_disks, options)
    return _under_checkpoints(
        ["run"], [*options, "--", *line], store, program, timeout, agent, has_console=True
    )


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
    options = _options(name, interval, disk, leave_out_disks, options)
    words = ["attach", str(pid), *named[0]]
    return _under_checkpoints(words, options, store, program, timeout, agent, has_console=False)


def _under_checkpoints(
    words: Sequence[str],
    options: Sequence[str],
    store: Store | str | os.PathLike[str] | None,
    program: str | os.PathLike[str] | None,
    timeout: float,
    agent: str | os.PathLike[str] | None,
    *,
    has_console: bool,
) -> Vm:
    """The VM of a command that begins with `words` and takes `options`, once it is ready. If that
    fails, nothing of it is left.
    """
    with ExitStack() as undo:
        directory = directory_for_command()
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        of = _store(store, directory, program, timeout)
        guarded = started(of, [*words, "--store", of.path, "--quiet", *options], directory)
        undo.callback(guarded.end)
        vm = _engine(guarded, of, guarded.output if has_console else None, timeout, agent)
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
    """Waits until the VM of a command is ready."""
    status = Status.of(command.await_ready("the VM", timeout))
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
