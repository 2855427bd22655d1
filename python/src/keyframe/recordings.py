"""A recording: what it is, its intervals, what the guest wrote to its console, and analyses of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .checkpoints import Checkpoint
from .errors import BadAnswer, KeyframeError
from .program import Key, Program, expect_list, expect_object, find_program
from .store import Store, Via

_FORMAT = "keyframe-recording"
_VERSION = 1
_FILE = "recording.json"
_OWN_STORE = "."
_NO_SUCH_LINE = 1
#: More than any recording.json has.
_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Interval:
    """A stretch of a recording that can be replayed by itself: instructions `first_icount` to before `end_icount`.

    `begin` is the number of the checkpoint it begins with, `end` of the one it ends with, `None` where it ends with the recording.
    """

    index: int
    first_icount: int
    end_icount: int
    begin: int
    end: int | None


@dataclass(frozen=True)
class ConsoleLine:
    """A line of the guest's console. `first_icount` instructions were executed before its first byte, `last_icount` before its last."""

    first_icount: int
    last_icount: int
    text: str


class Recording:
    """A recording, which ``keyframe record`` left in the directory `path` (docs/formats/recording.md).

    Attributes: `id`; `vm`, the VM's name; `began_at`; `duration_ns`; `ending`, one of ``complete``, ``cut`` (QEMU was killed) and
    ``recording``; `instructions` of the whole log; `log_bytes`; `qemu_version`; `user_command`, the line that was run; `images`, the
    disks that the guest could write to; `raw`, all that ``recording.json`` says.

    The other arguments are those of `Store`. `timeout` bounds what only reads; what replays has a timeout of its own.

    Raises `KeyframeError` where there is no recording, `BadAnswer` where it cannot be understood, `ProgramNotFound`.
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
        self.path = Path(path)
        self.raw = _read(self.path / _FILE)
        try:
            self.id = str(self.raw["id"])
            self.vm = str(self.raw["vm"])
            self.began_at = datetime.fromisoformat(self.raw["began_at"])
            self.duration_ns = int(self.raw["duration_ns"])
            self.ending = str(self.raw["ending"])
            self.instructions = int(self.raw["instructions"])
            self.log_bytes = int(self.raw["log_bytes"])
            self.qemu_version = str(self.raw["qemu_version"])
            self.user_command = tuple(str(word) for word in self.raw["user_command"])
            self.images: tuple[Mapping[str, Any], ...] = tuple(self.raw["images"])
            store = str(self.raw["store"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.path / _FILE}: of another form: {error!r}") from error
        where = self.path / "store" if store == _OWN_STORE else Path(store)
        #: The store that has its checkpoints.
        self.store = Store(
            where, key_file=key_file, passphrase=passphrase, program=program, timeout=timeout, via=via
        )
        key = Key(None if key_file is None else os.fspath(key_file), passphrase)
        self._program = Program(find_program(program), key, timeout)

    def __repr__(self) -> str:
        return f"Recording({os.fspath(self.path)!r})"

    def checkpoints(self) -> list[tuple[int, Checkpoint]]:
        """Its checkpoints, each with the instructions that the VM had executed before it, rising.

        The store is asked for each of its checkpoints, some 20 ms each.
        """
        found = []
        for checkpoint in self.store.checkpoints():
            recorded = expect_object(checkpoint.details().get("machine"), "show --json: machine").get("recorded")
            if recorded is None:
                continue
            place = expect_object(recorded, "show --json: machine.recorded")
            if place.get("recording") == self.id:
                found.append((int(place["icount"]), checkpoint))
        return sorted(found, key=lambda one: (one[0], one[1].id))

    def intervals(self) -> list[Interval]:
        """Its intervals in their order: from each checkpoint to the next, and from the last to the end, where the log has all of it.

        Of one that is still recorded they are those between the checkpoints that there are.
        """
        end = None if self.ending == "recording" else self.instructions
        places: list[tuple[int, int]] = []
        for icount, checkpoint in self.checkpoints():
            if (end is None or icount <= end) and (not places or places[-1][0] != icount):
                places.append((icount, checkpoint.id))
        ends: list[tuple[int, int | None]] = list(places[1:])
        if self.ending == "complete":
            ends.append((self.instructions, None))
        pairs = [(begin, end) for begin, end in zip(places, ends) if end[0] > begin[0]]
        return [
            Interval(index, begin[0], end[0], begin[1], end[1]) for index, (begin, end) in enumerate(pairs)
        ]

    def console(self, marker: str | None = None, *, timeout: float = 3600.0) -> list[ConsoleLine]:
        """What the guest wrote to its first serial console, or only lines that hold `marker`.

        The first call replays the recording, which takes about as long as recording it; later ones read what that one kept. Raises
        `TimedOut`, `CommandFailed`.
        """
        arguments = ["log", str(self.path), "--store", self.store.path, "--json", "--quiet"]
        also_done = []
        if marker is not None:
            # `=`: it may begin with a dash.
            arguments += [f"--marker={marker}"]
            also_done = [_NO_SUCH_LINE]
        out = self._program.run(arguments, timeout_seconds=timeout, also_done=also_done)
        if not out.strip():
            raise KeyframeError(f"{self.path}: its console cannot be told; see: keyframe log {self.path}")
        try:
            lines = expect_list(json.loads(out)["lines"], "log --json")
            return [ConsoleLine(int(line["first"]), int(line["last"]), str(line["text"])) for line in lines]
        except (KeyError, TypeError, ValueError) as error:
            raise BadAnswer(f"log --json: of another form: {error!r}") from error

    def analyze(
        self,
        tool: str,
        out: str | os.PathLike[str],
        *,
        first_icount: int | None = None,
        end_icount: int | None = None,
        arguments: Mapping[str, str] | None = None,
        jobs: int | None = None,
        timeout: float = 3600.0,
    ) -> Path:
        """Runs an analysis tool (``memtrace``, ``hot``, ``cache``, ...) over its intervals and returns the directory of the results.

        `out` is that directory: one that does not exist, or that of the same analysis, to go on. Only intervals that end behind instruction
        `first_icount` and begin before `end_icount` are analysed, whole. `arguments` are the tool's
        (``keyframe analyze --list-tools``), `jobs` replays at a time. Raises `TimedOut`, `CommandFailed`.
        """
        line: list[str] = ["analyze", str(self.path), "--store", self.store.path]
        line += ["--tool", tool, "--out", os.fspath(out), "--quiet"]
        line += [] if first_icount is None else ["--from", str(first_icount)]
        line += [] if end_icount is None else ["--to", str(end_icount)]
        line += [] if jobs is None else ["--jobs", str(jobs)]
        line += _flat(("--tool-arg", f"{name}={value}") for name, value in (arguments or {}).items())
        self._program.run(line, timeout_seconds=timeout)
        return Path(out)


def _flat(pairs: Any) -> Sequence[str]:
    return [word for pair in pairs for word in pair]


def _read(file: Path) -> Mapping[str, Any]:
    """What ``recording.json`` says, of a version that is known."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_BYTES_MAX + 1)
    except OSError as error:
        raise KeyframeError(
            f"{file.parent} is no recording: {error}\n  fix: make one with: keyframe record --out REC -- qemu-system-x86_64 ..."
        ) from error
    if len(text) > _BYTES_MAX:
        raise BadAnswer(f"{file}: longer than any recording's")
    try:
        raw = expect_object(json.loads(text), str(file))
    except ValueError as error:
        raise BadAnswer(f"{file}: no JSON: {error}") from error
    if raw.get("format") != _FORMAT:
        raise BadAnswer(
            f"{file}: version {raw.get('version')} of a pre-release Keyframe, which this package does not read; record the VM again"
        )
    if raw.get("version") != _VERSION:
        raise BadAnswer(f"{file}: version {raw.get('version')}, this package reads version {_VERSION}; take a later one")
    return raw
