"""Processes that outlive a call: commands of the program that run VMs, and the VMs themselves."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from . import _vm_guard
from .errors import BadAnswer, CommandFailed, TimedOut, VmEnded, command_failed
from .program import KeyframeWarning, Program

#: The most bytes of a command's error texts that are read.
_MESSAGES_BYTES_MAX = 64 << 10
#: The bytes of a log that stay readable after it is removed.
_KEPT_BYTES = 1 << 20
#: The most bytes that a command tells about its VMs.
_READY_BYTES_MAX = 4 << 20
_DONE, _WARNED = 0, 3


class Deadline:
    """The end of a wait.

    >>> Deadline(0.0, "the VM did not answer").left()
    Traceback (most recent call last):
    ...
    keyframe.errors.TimedOut: the VM did not answer within 0 s; timeout= sets another limit
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._what = what

    def is_over(self) -> bool:
        """True if no time is left."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """The seconds that are left. Raises `TimedOut` if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise self.error()
        return seconds

    def error(self) -> TimedOut:
        """The exception for the end of the wait."""
        return TimedOut(f"{self._what} within {self._seconds:g} s; timeout= sets another limit")

    def sleep(self, seconds: float) -> None:
        """Sleeps, but not beyond the end. Raises `TimedOut` if no time is left."""
        time.sleep(min(seconds, self.left()))


class Process:
    """A process that this Python did not start. A later one with its number is another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _stat(pid)

    def is_alive(self) -> bool:
        """True if the process has not ended."""
        now = _stat(self.pid)
        return now is not None and self._started is not None and now[1:] == self._started[1:]


def _stat(pid: int) -> tuple[int, int] | None:
    """The parent and the start time of a process; `None` if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The program's name may hold spaces and parentheses.
            words = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    if len(words) < 20 or words[0] in (b"Z", b"X"):
        return None
    return int(words[1]), int(words[19])


class Log:
    """A file to which processes write. Its end stays readable after the file is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("w+b")
        self._lock = threading.Lock()
        self._kept = b""

    def tail(self, bytes_max: int) -> str:
        """The last `bytes_max` bytes as text; after `close`, of the last MiB."""
        with self._lock:
            known = self._kept if self.file.closed else _tail(self.file, bytes_max)
        return known[max(0, len(known) - bytes_max) :].decode(errors="replace")

    def close(self) -> None:
        """Keeps the last MiB in memory, and closes the file."""
        with self._lock:
            if not self.file.closed:
                self._kept = _tail(self.file, _KEPT_BYTES)
                self.file.close()


def _tail(file: IO[bytes], bytes_max: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    begin = max(0, size - bytes_max)
    return os.pread(file.fileno(), size - begin, begin)


class GuardedCommand:
    """A command of the program that runs VMs, such as ``keyframe run``, in the background.

    The command ends with `end`, and when Python ends, even if Python is killed: a guard process
    ends it then, and all that it has started. The command's standard output goes to the file
    `output`, its error texts to another file. `directory` is a temporary directory for both files,
    and is removed at the end. `arguments` are those of the command, which has the option
    ``--ready-fd``.
    """

    def __init__(self, program: Program, arguments: Sequence[str], directory: Path) -> None:
        ready, told = os.pipe()
        # Inserted after the command's name, before QEMU's command line.
        words = [*arguments[:1], "--ready-fd", str(told), *arguments[1:]]
        self._command = [program.path, *words]
        self._ready: IO[bytes] = os.fdopen(ready, "rb", buffering=0)
        self._lock = threading.Lock()
        self._python = os.getpid()
        self._code: int | None = None
        self.output = Log(directory / "console.log")
        self._messages = Log(directory / "messages.log")
        guard = [sys.executable, "-I", "-S", _vm_guard.__file__, str(os.getpid()), str(directory)]
        guard.append(str(told))
        try:
            self._guard = subprocess.Popen(
                [*guard, *self._command],
                stdin=subprocess.PIPE,
                stdout=self.output.file,
                stderr=self._messages.file,
                env=program.key.environment(),
                pass_fds=[told],
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(told)
        atexit.register(self.end)

    def poll(self) -> int | None:
        """The exit code; `None` while the command or a VM that it left is there."""
        return self._code if self._code is not None else self._guard.poll()

    def wait(self, deadline: Deadline) -> int:
        """Waits until the command has ended by itself, and its VMs. Returns the exit code.

        Raises `TimedOut`.
        """
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(deadline.left())
        code = self.poll()
        if code is None:
            raise deadline.error()
        return code

    def await_ready(self, what: str, timeout: float) -> Any:
        """Waits until the command says that its VMs are ready. Returns what it tells about them.

        Raises `TimedOut`, `BadAnswer`, and `CommandFailed` or `VmEnded` if the command ends before.
        """
        deadline = Deadline(timeout, f"{what} was not there")
        line = b""
        # `select` knows no descriptor above 1023.
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        while not line.endswith(b"\n"):
            readable = poll.poll(1000 * deadline.left())
            chunk = self._ready.read(_READY_BYTES_MAX - len(line)) if readable else b""
            line += chunk
            if readable and not chunk:
                # The command closed the descriptor, or wrote more than it may.
                code = self.wait(deadline)
                if code in (_DONE, _WARNED):
                    raise VmEnded(f"{what} has ended at once\n{self.messages()}".strip())
                raise self.failure(code)
        try:
            return json.loads(line)
        except ValueError as error:
            raise BadAnswer(f"{' '.join(self._command)}: told no JSON: {error}") from error

    def failure(self, code: int) -> CommandFailed:
        """The exception for the command's end with an exit code."""
        return command_failed(self._command, code, self.messages())

    def messages(self) -> str:
        """The error texts of the command and of its VMs so far: the newest 64 KiB."""
        return self._messages.tail(_MESSAGES_BYTES_MAX).strip()

    def end(self) -> int:
        """Ends the command with its VMs, after what is in progress is sealed, and removes the
        directory. Returns the exit code. A second call returns it again.
        """
        # A fork of this process does not own the command.
        if os.getpid() != self._python:
            return 0
        with self._lock:
            if self._code is None:
                self._code = self._end()
            return self._code

    def _end(self) -> int:
        atexit.unregister(self.end)
        if self._guard.stdin is not None:
            # Not only the end of the file: a fork of this process may hold the pipe, too.
            with suppress(OSError):
                self._guard.stdin.write(b"\n")
                self._guard.stdin.flush()
            with suppress(OSError):
                self._guard.stdin.close()
        try:
            code = self._guard.wait(_vm_guard.END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
            warnings.warn(
                f"{' '.join(self._command)}: did not end; see: keyframe status",
                KeyframeWarning,
                stacklevel=3,
            )
        self._close()
        return code

    def _close(self) -> None:
        self._ready.close()
        self.output.close()
        self._messages.close()


def directory_for_command() -> Path:
    """A new temporary directory for the files of a command."""
    return Path(tempfile.mkdtemp(prefix="keyframe-vm-"))
