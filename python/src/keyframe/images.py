"""The files that RAM is read from: a mount of the store, or exported files.

::

    Images ─┬─ Mount     ``keyframe mount``: the files' content is made when it is read
            └─ Exports   ``keyframe export``: a sparse file for each checkpoint that is read

Invariant: a file stays readable for as long as an array is mapped from it, because a read of a
mapping whose mount is gone ends the process. A mount that is closed while such arrays exist is
unmounted after the last of them is gone, or when Python ends.
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
    """Provides the RAM of checkpoints as files."""

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """The raw image of a checkpoint's RAM, readable until `close`.

        Raises `NoRam`, `UnreadablePages`.
        """

    def keep_for(self, owner: object) -> None:
        """Keeps the files readable until `owner` is gone, also after `close`."""

    def messages(self) -> str:
        """The error texts of the program that provides the files."""

    def close(self) -> None:
        """Releases the files."""


class Mount:
    """A store's checkpoints as files under `path`, provided by a child process ``keyframe mount``.

    `path` is an empty directory; if it is `None`, a temporary one. The constructor waits until the
    files are there.

    A context manager. `close` unmounts, and so does the end of Python, even if Python is killed.
    The mount stays while there are arrays that `Ram` has mapped from its files.

    Raises `MountFailed` (also after `timeout_seconds`) and `NoStore`.
    """

    def __init__(
        self,
        program: Program,
        store: str,
        path: str | os.PathLike[str] | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        self._lock = threading.RLock()
        self._owners = 0
        self._closed = False
        self._ended = False
        self._process = os.getpid()
        own = path is None
        if path is not None and os.path.ismount(path):
            raise MountFailed(f"{path} is mounted already; name an empty directory")
        self.path = Path(
            tempfile.mkdtemp(prefix="keyframe-mount-") if path is None else path
        ).absolute()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self._command = [program.path, "mount", str(self.path), "--store", store, "--quiet"]
        guard = [
            sys.executable,
            "-I",
            "-S",
            _guard.__file__,
            str(self.path),
            "remove" if own else "keep",
        ]
        try:
            self._guard = subprocess.Popen(
                [*guard, *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env=program.key.environment(),
                start_new_session=True,
            )
        except BaseException:
            self._stderr.close()
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
        """Waits until the files are there."""
        deadline = time.monotonic() + timeout_seconds
        while not os.path.ismount(self.path):
            code = self._guard.poll()
            if code is not None:
                text = self.messages()
                if code == _NO_STORE:
                    raise command_failed(self._command, code, text)
                raise MountFailed(str(command_failed(self._command, code or _FAILED, text)))
            if time.monotonic() > deadline:
                raise MountFailed(
                    f"{' '.join(self._command)}: nothing was mounted within {timeout_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """See `Images`. Raises `MountFailed` if the mount is gone."""
        if self._ended or not os.path.ismount(self.path):
            raise MountFailed(f"{self.path} is no longer mounted\n{self.messages()}".strip())
        file = (
            self.path
            / str(checkpoint)
            / (member_directory(member) if member is not None else "")
            / _RAM
        )
        try:
            file.stat()
        except FileNotFoundError:
            raise NoRam(
                f"{file} is not there: checkpoint {checkpoint} was forgotten, or has no RAM map\n"
                f"{self.messages()}".strip()
            ) from None
        except OSError as error:
            raise UnreadablePages(f"{file}: {error}\n{self.messages()}".strip()) from error
        return file

    def keep_for(self, owner: object) -> None:
        """See `Images`."""
        with self._lock:
            self._owners += 1
        # When Python ends, `_end` releases all owners at once.
        weakref.finalize(owner, self._release_owner).atexit = False

    def _release_owner(self) -> None:
        with self._lock:
            self._owners -= 1
            last = self._owners == 0 and self._closed
        if last:
            self._end()

    def messages(self) -> str:
        """The error texts of ``keyframe mount``, such as that a page is damaged."""
        if self._stderr.closed:
            return ""
        return os.pread(self._stderr.fileno(), 1 << 16, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Unmounts, at once or after the last array that is mapped from the files is gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unused = self._owners == 0
        if unused:
            self._end()

    def _end(self) -> None:
        """Unmounts now."""
        with self._lock:
            # A fork of this process does not own the mount.
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
            warnings.warn(
                f"{self.path} could not be unmounted; try: umount -l {self.path}", stacklevel=2
            )
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Exports:
    """RAM as files that ``keyframe export --format raw`` writes, for machines that cannot mount.

    The files are in a temporary directory in ``TMPDIR``; each occupies the size of the checkpoint's
    pages that are not zero. `close` removes them; arrays that are mapped from them stay valid.
    """

    def __init__(self, program: Program, store: str) -> None:
        self._program = program
        self._store = store
        self._directory = tempfile.TemporaryDirectory(prefix="keyframe-export-")
        self._files: dict[tuple[int, str | None], Path] = {}
        self._lock = threading.Lock()

    def ram_file(self, checkpoint: int, member: str | None) -> Path:
        """See `Images`.

        Raises `CommandFailed` if the export fails, for example for lack of space.
        """
        with self._lock:
            known = self._files.get((checkpoint, member))
            if known is not None:
                return known
            file = Path(self._directory.name) / f"{len(self._files)}.raw"
            export_ram(self._program, self._store, checkpoint, member, file)
            self._files[checkpoint, member] = file
            return file

    def keep_for(self, owner: object) -> None:
        """See `Images`: a removed file stays readable through its mappings."""

    def messages(self) -> str:
        """See `Images`."""
        return ""

    def close(self) -> None:
        """Removes the files."""
        self._directory.cleanup()


def export_ram(
    program: Program, store: str, checkpoint: int, member: str | None, file: Path
) -> None:
    """Writes a checkpoint's RAM to `file`, which must not exist: byte n is guest-physical address
    n.
    """
    of_member = [] if member is None else ["--member", member]
    program.run(
        [
            "export",
            str(checkpoint),
            "--store",
            store,
            "--format",
            "raw",
            "--quiet",
            "-o",
            str(file),
            *of_member,
        ]
    )


def member_directory(member: str) -> str:
    """The name of a member's directory in a mount (docs/formats/images.md)."""
    taken = member.startswith(".") or member in {_RAM, "ram.elf", "device.state", "info.json"}
    escaped = {"/", "%"} | ({"."} if taken else set())
    return "".join(f"%{ord(c):02X}" if c in escaped else c for c in member)


def open_images(program: Program, store: str, via: str, timeout_seconds: float) -> Images:
    """A `Mount` (`via` is ``mount``) or `Exports` (``export``); ``auto`` exports if it cannot
    mount.
    """
    if via == "export":
        return Exports(program, store)
    try:
        return Mount(program, store, timeout_seconds=timeout_seconds)
    except MountFailed as error:
        if via == "mount":
            raise
        warnings.warn(
            f"checkpoints are exported, because they cannot be mounted: {error}", stacklevel=4
        )
        return Exports(program, store)
