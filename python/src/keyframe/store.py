"""A store: its checkpoints, its statistics, and its checkpoints' RAM."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .checkpoints import Checkpoint, History
from .diffs import Diff
from .errors import CommandFailed, KeyframeError, UnknownCheckpoint
from .images import Images, Mount, export_ram, open_images
from .program import Key, Program, expect_list, expect_object, find_program

#: How RAM is read: `auto` mounts the store, and exports if that fails.
Via = Literal["auto", "mount", "export"]
_MOUNT_SECONDS_MAX = 30.0


class Store:
    """A store of checkpoints, for reading.

    `path` is its directory, or ``s3://BUCKET/PREFIX`` or ``kf://HOST:PORT``. The constructor does
    not access it, so the first call raises `NoStore` if it does not exist. `key_file` or
    `passphrase` open an encrypted store; if both are `None`, ``KEYFRAME_KEY_FILE`` or
    ``KEYFRAME_PASSPHRASE`` of the environment do. `program` is the program ``keyframe`` (see
    `find_program`). `timeout` limits each command, in seconds. `via` is the way to read RAM.

    In a ``with`` the store is mounted once, and not for each `Ram`.

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
            find_program(program),
            Key(None if key_file is None else os.fspath(key_file), passphrase),
            timeout,
        )
        self._via: Via = via
        self._lock = threading.RLock()
        self._users = 0
        self._images: Images | None = None
        self._held: list[ExitStack] = []

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        encrypt: bool = False,
        key_file: str | os.PathLike[str] | None = None,
        passphrase: str | None = None,
        program: str | os.PathLike[str] | None = None,
        timeout: float = 120.0,
        via: Via = "auto",
    ) -> Self:
        """Makes an empty store, as ``keyframe init`` does.

        `encrypt` encrypts it with the key of `key_file` or with `passphrase`. The other arguments
        are those of `Store`. Raises `CommandFailed` if there is a store already, or if it cannot be
        written.
        """
        store = cls(
            path,
            key_file=key_file,
            passphrase=passphrase,
            program=program,
            timeout=timeout,
            via=via,
        )
        store._program.run(["init", store.path, *["--encrypt"] * encrypt])
        return store

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    def checkpoints(self, *, vm: str | None = None, last: int | None = None) -> list[Checkpoint]:
        """The sealed checkpoints, from old to new: of all VMs or of `vm`, all or the newest `last`.
        The list is a `History`, which a notebook shows as a table.

        Unreadable checkpoints are left out, with a `KeyframeWarning`. Raises `CommandFailed`
        (`NoStore`).
        """
        arguments = ["list", "--store", self.path, "--json"]
        arguments += [] if vm is None else ["--vm", vm]
        arguments += [] if last is None else ["--last", str(last)]
        listed = expect_list(self._program.json(arguments), "list --json")
        return History(Checkpoint.of(entry, self) for entry in listed)

    def checkpoint(self, name: int | str) -> Checkpoint:
        """A checkpoint by its id, by a tag, or ``latest``.

        Raises `UnknownCheckpoint`, `CommandFailed`.
        """
        known = self.checkpoints()
        if name == "latest" and known:
            return known[-1]
        for checkpoint in known:
            if str(name) == str(checkpoint.id) or name in checkpoint.tags:
                return checkpoint
        newest = f"the newest is {known[-1].id}" if known else "the store has none"
        raise UnknownCheckpoint(f"{self.path}: no checkpoint {name!r}; {newest}")

    def resolve(self, checkpoint: Checkpoint | int | str) -> Checkpoint:
        """`checkpoint` itself, or the checkpoint with this id or tag."""
        return checkpoint if isinstance(checkpoint, Checkpoint) else self.checkpoint(checkpoint)

    def explained(self, error: CommandFailed, checkpoint: Checkpoint) -> KeyframeError:
        """`error`, or `UnknownCheckpoint` if the store does not have `checkpoint`."""
        try:
            known = {one.id for one in self.checkpoints()}
        except KeyframeError:
            return error
        return error if checkpoint.id in known else UnknownCheckpoint(str(error))

    def details(self, checkpoint: int | str) -> Mapping[str, Any]:
        """The output of ``keyframe show --json`` for a checkpoint."""
        arguments = ["show", str(checkpoint), "--store", self.path, "--json"]
        return expect_object(self._program.json(arguments), "show --json")

    def diff(self, first: Checkpoint | int | str, second: Checkpoint | int | str) -> Diff:
        """The number of pages and bytes in which two checkpoints differ, by RAM block and disk."""
        names = [str(c.id if isinstance(c, Checkpoint) else c) for c in (first, second)]
        return Diff.of(
            self._program.json(["diff", *names, "--store", self.path, "--json", "--quiet"])
        )

    def stats(self, *, sharing: bool = False, growth: bool = False) -> Mapping[str, Any]:
        """The output of ``keyframe stats --json``: sizes in bytes, ratios, pauses in nanoseconds.

        `sharing` adds the pages that checkpoints share, which reads each page map; `growth` adds
        the bytes that each hour and each checkpoint added.
        """
        arguments = ["stats", "--store", self.path, "--json"]
        arguments += ["--sharing"] * sharing + ["--growth"] * growth
        return expect_object(self._program.json(arguments), "stats --json")

    def export_ram(
        self,
        checkpoint: Checkpoint | int | str,
        file: str | os.PathLike[str],
        *,
        member: str | None = None,
    ) -> None:
        """Writes a checkpoint's RAM to the new file `file`: byte n is guest-physical address n;
        zeros are holes.
        """
        export_ram(self._program, self.path, self.resolve(checkpoint).id, member, Path(file))

    def mounted(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        timeout: float = _MOUNT_SECONDS_MAX,
    ) -> Mount:
        """Mounts the store: a context manager with the files of each checkpoint under its `path`.

        ``keyframe mount --help`` lists the files. `directory` is empty; if it is `None`, a
        temporary one. Raises `MountFailed`, after at most `timeout` seconds, and `NoStore`.
        """
        return Mount(self._program, self.path, directory, timeout)

    @contextmanager
    def images(self) -> Iterator[Images]:
        """The files of RAM, which all users share at a time. They are closed after the last one."""
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.pop().close()
