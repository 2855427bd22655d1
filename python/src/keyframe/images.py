"""Where the files are that RAM is read from: a mount of the store, or files exported one by one.

::

    Images ─┬─ Mount     ``keyframe mount``: files are made as they are read, nothing is copied in advance
            └─ Exports   ``keyframe export``: a sparse file in a temporary directory for each checkpoint that is looked at

Invariant: a file that an array is mapped from stays readable for as long as the array lives. A mount that is closed while arrays
live is taken away when the last of them is gone, at the latest when Python ends: memory that is read from behind a mount that is gone
would end the process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from . import _guard
from .errors import MountFailed, NoRam, UnreadablePages, command_failed
from .program import Program

_POLL_SECONDS = 0.01
_RAM = "ram.raw"
_FAILED, _NO_STORE = 1, 10


class Images(Protocol):
    """Gives the RAM of checkpoints as files."""

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """The raw image of a checkpoint's RAM, readable until the `Images` are closed. Raises `NoRam`, `UnreadablePages`."""

    def keep_for(self, owner: object) -> None:
        """Keeps its files readable until `owner` is gone, also when the `Images` were closed."""

    def messages(self) -> str:
        """What the program behind it has said."""

    def close(self) -> None:
        """Gives back what it holds."""


class Mount:
    """A store's checkpoints as files under `path`, by a ``keyframe mount`` that runs as a child.

    `path` is an empty directory, or a temporary one where `None`. Waits up to `timeout_seconds` until the files are there.

    A context manager. `close` takes the mount away, as does Python's end, be it by a signal that cannot be caught. While arrays live that
    `Ram` has mapped from its files, it stays.

    Raises `MountFailed` (also where it takes too long), `NoStore`.
    """

    def __init__(
        self, program: Program, store: str, path: str | os.PathLike[str] | None = None, timeout_seconds: float = 30.0
    ) -> None:
        self._lock = threading.RLock()
        self._owners = 0
        self._closed = False
        self._ended = False
        self._process = os.getpid()
        own = path is None
        if path is not None and os.path.ismount(path):
            raise MountFailed(f"{path} is mounted already; name an empty directory")
        self.path = Path(tempfile.mkdtemp(prefix="keyframe-mount-") if path is None else path).absolute()
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._command = [program.path, "mount", str(self.path), "--store", store, "--quiet"]
        guard = [sys.executable, "-I", "-S", _guard.__file__, str(self.path), "remove" if own else "keep"]
        try:
            self._guard = subprocess.Popen(
                [*guard, *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                env=program.key.environment(),
                start_new_session=True,
            )
        except BaseException:
            self._said.close()
            if own:
                self.path.rmdir()
            raise
        atexit.register(self._end)
        try:
            self._wait(timeout_seconds)
        except BaseException:
            self._end()
            raise

    def _wait(self, timeout_seconds: float) -> None:
        """Until the files are there."""
        deadline = time.monotonic() + timeout_seconds
        while not os.path.ismount(self.path):
            code = self._guard.poll()
            if code is not None:
                said = self.messages()
                if code == _NO_STORE:
                    raise command_failed(self._command, code, said)
                raise MountFailed(str(command_failed(self._command, code or _FAILED, said)))
            if time.monotonic() > deadline:
                raise MountFailed(f"{' '.join(self._command)}: nothing was mounted within {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """See `Images`. `MountFailed` where the mount is gone."""
        if self._ended or not os.path.ismount(self.path):
            raise MountFailed(f"{self.path} is not mounted any more\n{self.messages()}".strip())
        file = self.path / str(checkpoint) / (member_directory(member) if member is not None else "") / _RAM
        try:
            file.stat()
        except FileNotFoundError:
            raise NoRam(
                f"{file} is not there: checkpoint {checkpoint} was forgotten, or does not tell where its RAM lies\n"
                f"{self.messages()}".strip()
            ) from None
        except OSError as error:
            raise UnreadablePages(f"{file}: {error}\n{self.messages()}".strip()) from error
        return file

    def keep_for(self, owner: object) -> None:
        """See `Images`."""
        with self._lock:
            self._owners += 1
        # At Python's end it is for `_end` to do, for all owners at once.
        weakref.finalize(owner, self._let_go).atexit = False

    def _let_go(self) -> None:
        with self._lock:
            self._owners -= 1
            last = self._owners == 0 and self._closed
        if last:
            self._end()

    def messages(self) -> str:
        """What ``keyframe mount`` has said, such as that a page is damaged."""
        if self._said.closed:
            return ""
        return os.pread(self._said.fileno(), 1 << 16, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Takes the mount away, or leaves that to the last array that is mapped from its files."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unused = self._owners == 0
        if unused:
            self._end()

    def _end(self) -> None:
        """Takes the mount away now."""
        with self._lock:
            # A fork of this process has it only borrowed.
            if self._ended or os.getpid() != self._process:
                return
            self._ended = True
        atexit.unregister(self._end)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(_guard.END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
            warnings.warn(f"{self.path} could not be unmounted; try: umount -l {self.path}", stacklevel=2)
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Exports:
    """RAM as files that ``keyframe export --format raw`` writes to a temporary directory: for where nothing can be mounted.

    A file takes the room of the checkpoint's pages that are not zero, in ``TMPDIR``. Files are removed by `close`; arrays that are mapped
    from them stay as they are.
    """

    def __init__(self, program: Program, store: str) -> None:
        self._program = program
        self._store = store
        self._directory = tempfile.TemporaryDirectory(prefix="keyframe-export-")
        self._files: dict[tuple[int, str | None], Path] = {}
        self._lock = threading.Lock()

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """See `Images`. `CommandFailed` where it cannot be exported, for want of space say."""
        with self._lock:
            known = self._files.get((checkpoint, member))
            if known is not None:
                return known
            file = Path(self._directory.name) / f"{len(self._files)}.raw"
            export_ram(self._program, self._store, checkpoint, member, file)
            self._files[checkpoint, member] = file
            return file

    def keep_for(self, owner: object) -> None:
        """See `Images`: a file that was removed stays readable where it is mapped."""

    def messages(self) -> str:
        """See `Images`."""
        return ""

    def close(self) -> None:
        """Removes the files."""
        self._directory.cleanup()


def export_ram(program: Program, store: str, checkpoint: int, member: str | None, file: Path) -> None:
    """Writes a checkpoint's RAM to `file`, which must not exist: byte n is guest-physical address n."""
    of_member = [] if member is None else ["--member", member]
    program.run(
        ["export", str(checkpoint), "--store", store, "--format", "raw", "--quiet", "-o", str(file), *of_member]
    )


def member_directory(member: str) -> str:
    """The name of a member's directory in a mount (docs/formats/images.md)."""
    taken = member.startswith(".") or member in {_RAM, "ram.elf", "device.state", "info.json"}
    escaped = {"/", "%"} | ({"."} if taken else set())
    return "".join(f"%{ord(c):02X}" if c in escaped else c for c in member)


def open_images(program: Program, store: str, via: str, timeout_seconds: float) -> Images:
    """A `Mount`, or `Exports`, as `via` says: ``mount``, ``export``, or ``auto``, which exports where it cannot mount."""
    if via == "export":
        return Exports(program, store)
    try:
        return Mount(program, store, timeout_seconds=timeout_seconds)
    except MountFailed as error:
        if via == "mount":
            raise
        warnings.warn(f"checkpoints are exported, as they cannot be mounted: {error}", stacklevel=4)
        return Exports(program, store)
