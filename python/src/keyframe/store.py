"""A store: its checkpoints, what they share, and their RAM."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .checkpoints import Checkpoint
from .diffs import Diff
from .errors import UnknownCheckpoint
from .images import Images, Mount, export_ram, open_images
from .program import Key, Program, expect_list, expect_object, find_program

#: How files of RAM are had: `auto` mounts the store, and exports where that is not possible.
Via = Literal["auto", "mount", "export"]
_MOUNT_SECONDS_MAX = 30.0


class Store:
    """A store of checkpoints, to read.

    `path` is its directory, or ``s3://BUCKET/PREFIX`` or ``kf://HOST:PORT``; nothing is looked at before it is asked for, so that a store
    which is not there is an error (`NoStore`) of the first call. `key_file` or `passphrase` open an encrypted one; without them
    ``KEYFRAME_KEY_FILE`` and ``KEYFRAME_PASSPHRASE`` in the environment do. `program` is the program ``keyframe``
    (`find_program`). `timeout` bounds each command, in seconds. `via` says how RAM is had.

    In a ``with`` the store is mounted once, at its beginning, and not with each look at RAM.

    Raises `ProgramNotFound`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key_file: str | os.PathLike[str] | None = None,
        passphrase: str | None = None,
        program: str | os.PathLike[str] | None = None,
        timeout: float = 120.0,
        via: Via = "auto",
    ) -> None:
        if via not in ("auto", "mount", "export"):
            raise ValueError(f"via={via!r}: it is 'auto', 'mount' or 'export'")
        if key_file is not None and passphrase is not None:
            raise ValueError("a store has either a key file or a passphrase")
        self.path = os.fspath(path)
        self._program = Program(
            find_program(program), Key(None if key_file is None else os.fspath(key_file), passphrase), timeout
        )
        self._via: Via = via
        self._lock = threading.RLock()
        self._users = 0
        self._images: Images | None = None
        self._held: list[ExitStack] = []

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    def checkpoints(self, *, vm: str | None = None, last: int | None = None) -> list[Checkpoint]:
        """Its sealed checkpoints, from old to new: of all VMs or of `vm`, all or the newest `last`.

        Checkpoints that cannot be read are left out, with a `KeyframeWarning`. Raises `CommandFailed` (`NoStore`).
        """
        arguments = ["list", "--store", self.path, "--json"]
        arguments += [] if vm is None else ["--vm", vm]
        arguments += [] if last is None else ["--last", str(last)]
        return [Checkpoint.of(entry, self) for entry in expect_list(self._program.json(arguments), "list --json")]

    def checkpoint(self, name: int | str) -> Checkpoint:
        """A checkpoint by its number, a tag, or ``latest``. Raises `UnknownCheckpoint`, `CommandFailed`."""
        known = self.checkpoints()
        if name == "latest" and known:
            return known[-1]
        for checkpoint in known:
            if str(name) == str(checkpoint.id) or name in checkpoint.tags:
                return checkpoint
        newest = f"the newest is {known[-1].id}" if known else "the store has none"
        raise UnknownCheckpoint(f"{self.path}: no checkpoint {name!r}; {newest}")

    def resolve(self, checkpoint: Checkpoint | int | str) -> Checkpoint:
        """The checkpoint itself, or the one of that name."""
        return checkpoint if isinstance(checkpoint, Checkpoint) else self.checkpoint(checkpoint)

    def details(self, checkpoint: int | str) -> Mapping[str, Any]:
        """What ``keyframe show --json`` prints of a checkpoint."""
        arguments = ["show", str(checkpoint), "--store", self.path, "--json"]
        return expect_object(self._program.json(arguments), "show --json")

    def diff(self, first: Checkpoint | int | str, second: Checkpoint | int | str) -> Diff:
        """What differs between two checkpoints, counted by RAM block and disk."""
        names = [str(c.id if isinstance(c, Checkpoint) else c) for c in (first, second)]
        return Diff.of(self._program.json(["diff", *names, "--store", self.path, "--json", "--quiet"]))

    def stats(self, *, sharing: bool = False, growth: bool = False) -> Mapping[str, Any]:
        """What ``keyframe stats --json`` prints: sizes in bytes, ratios, pauses in nanoseconds.

        With `sharing` also who shares what, which reads every page map; with `growth` also what each hour and checkpoint added.
        """
        arguments = ["stats", "--store", self.path, "--json"]
        arguments += ["--sharing"] * sharing + ["--growth"] * growth
        return expect_object(self._program.json(arguments), "stats --json")

    def export_ram(
        self, checkpoint: Checkpoint | int | str, file: str | os.PathLike[str], *, member: str | None = None
    ) -> None:
        """Writes a checkpoint's RAM to `file`, which must not exist: byte n is guest-physical address n; zeros are holes."""
        export_ram(self._program, self.path, self.resolve(checkpoint).id, member, Path(file))

    def mounted(
        self, directory: str | os.PathLike[str] | None = None, *, timeout: float = _MOUNT_SECONDS_MAX
    ) -> Mount:
        """Mounts the store: a context manager with every checkpoint as files under its `path` (``keyframe mount --help``).

        `directory` is an empty one, or a temporary one where `None`. Raises `MountFailed`, within `timeout` seconds; `NoStore`.
        """
        return Mount(self._program, self.path, directory, timeout)

    @contextmanager
    def images(self) -> Iterator[Images]:
        """What RAM is read from, shared by all who use it at a time and closed behind the last of them."""
        with self._lock:
            if self._images is None:
                self._images = open_images(self._program, self.path, self._via, _MOUNT_SECONDS_MAX)
            images = self._images
            self._users += 1
        try:
            yield images
        finally:
            with self._lock:
                self._users -= 1
                last = self._users == 0
                if last:
                    self._images = None
            if last:
                images.close()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.images())
            self._held.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.pop().close()
