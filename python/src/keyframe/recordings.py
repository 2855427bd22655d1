"""A recording: its properties, its intervals, the guest's console, and analyses."""

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
#: The size limit of recording.json, far above any real one.
_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Interval:
    """An interval that can be replayed by itself: instructions `first_icount` to before
    `end_icount`.

    `begin` and `end` are the ids of the checkpoints at its ends; `end` is `None` for the last
    interval.
    """

    index: int
    first_icount: int
    end_icount: int
    begin: int
    end: int | None


@dataclass(frozen=True)
class ConsoleLine:
    """A line of the guest's console.

    The VM executed `first_icount` instructions before the first byte, `last_icount` before the last
    one.
    """

    first_icount: int
    last_icount: int
    text: str


class Recording:
    """The recording that ``keyframe record`` made in the directory `path`
    (docs/formats/recording.md).

    Attributes: `id`; `vm`, the VM's name; `began_at`; `duration_ns`; `ending`, one of ``complete``,
    ``cut`` (QEMU was killed) and ``recording``; `instructions` of the whole log; `log_bytes`;
    `qemu_version`; `user_command`, QEMU's command line; `images`, the disks that the guest could
    write to; `raw`, the content of ``recording.json``.

    The other arguments are those of `Store`. `timeout` limits commands that only read; methods that
    replay have their own.

    Raises `KeyframeError` if there is no recording, `BadAnswer` if its form is unknown,
    `ProgramNotFound`.
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
        #: The store with its checkpoints.
        self.store = Store(
            where,
            key_file=key_file,
            passphrase=passphrase,
            program=program,
            timeout=timeout,
            via=via,
        )
        key = Key(None if key_file is None else os.fspath(key_file), passphrase)
        self._program = Program(find_program(program), key, timeout)

    def __repr__(self) -> str:
        return f"Recording({os.fspath(self.path)!r})"

    def checkpoints(self) -> list[tuple[int, Checkpoint]]:
        """The checkpoints, each with the number of instructions that the VM executed before it,
        rising.

        This runs a command for each checkpoint of the store, which takes some 20 ms.
        """
        found = []
        for checkpoint in self.store.checkpoints():
            recorded = expect_object(
                checkpoint.details().get("machine"), "show --json: machine"
            ).get("recorded")
            if recorded is None:
                continue
            position = expect_object(recorded, "show --json: machine.recorded")
            if position.get("recording") == self.id:
                found.append((int(position["icount"]), checkpoint))
        return sorted(found, key=lambda one: (one[0], one[1].id))

    def intervals(self) -> list[Interval]:
        """The intervals in order: from each checkpoint to the next, and from the last one to the
        end.

        The last interval is missing if the log is incomplete. During the recording, the intervals
        are those between the checkpoints so far.
        """
        end = None if self.ending == "recording" else self.instructions
        begins: list[tuple[int, int]] = []
        for icount, checkpoint in self.checkpoints():
            if (end is None or icount <= end) and (not begins or begins[-1][0] != icount):
                begins.append((icount, checkpoint.id))
        ends: list[tuple[int, int | None]] = list(begins[1:])
        if self.ending == "complete":
            ends.append((self.instructions, None))
        pairs = [(begin, end) for begin, end in zip(begins, ends) if end[0] > begin[0]]
        return [
            Interval(index, begin[0], end[0], begin[1], end[1])
            for index, (begin, end) in enumerate(pairs)
        ]

    def console(self, marker: str | None = None, *, timeout: float = 3600.0) -> list[ConsoleLine]:
        """The lines of the guest's first serial console, or only those that contain `marker`.

        The first call replays the recording, which takes about as long as recording it; later calls
        read the result. Raises `TimedOut`, `CommandFailed`.
        """
        arguments = ["log", str(self.path), "--store", self.store.path, "--json", "--quiet"]
        also_done = []
        if marker is not None:
            # With `=`, because the marker may begin with a dash.
            arguments += [f"--marker={marker}"]
            also_done = [_NO_SUCH_LINE]
        out = self._program.run(arguments, timeout_seconds=timeout, also_done=also_done)
        if not out.strip():
            raise KeyframeError(
                f"{self.path}: its console is not available; see: keyframe log {self.path}"
            )
        try:
            lines = expect_list(json.loads(out)["lines"], "log --json")
            return [
                ConsoleLine(int(line["first"]), int(line["last"]), str(line["text"]))
                for line in lines
            ]
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
        """Runs an analysis tool (``memtrace``, ``hot``, ``cache``, ...) over the intervals.

        Returns the directory of the results, `out`, which must be new, or belong to the same
        analysis, which is then continued. Only intervals that end after instruction `first_icount`
        and begin before `end_icount` are analysed, as a whole. `arguments` are the tool's
        (``keyframe analyze --list-tools``), `jobs` the number of parallel replays. Raises
        `TimedOut`, `CommandFailed`.
        """
        line: list[str] = ["analyze", str(self.path), "--store", self.store.path]
        line += ["--tool", tool, "--out", os.fspath(out), "--quiet"]
        line += [] if first_icount is None else ["--from", str(first_icount)]
        line += [] if end_icount is None else ["--to", str(end_icount)]
        line += [] if jobs is None else ["--jobs", str(jobs)]
        line += _flat(
            ("--tool-arg", f"{name}={value}") for name, value in (arguments or {}).items()
        )
        self._program.run(line, timeout_seconds=timeout)
        return Path(out)


def _flat(pairs: Any) -> Sequence[str]:
    return [word for pair in pairs for word in pair]


def _read(file: Path) -> Mapping[str, Any]:
    """The content of ``recording.json``. Raises `BadAnswer` for an unknown version."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_BYTES_MAX + 1)
    except OSError as error:
        raise KeyframeError(
            f"{file.parent} is no recording: {error}\n"
            "  fix: make one with: keyframe record --out REC -- qemu-system-x86_64 ..."
        ) from error
    if len(text) > _BYTES_MAX:
        raise BadAnswer(f"{file}: larger than 16 MiB")
    try:
        raw = expect_object(json.loads(text), str(file))
    except ValueError as error:
        raise BadAnswer(f"{file}: no JSON: {error}") from error
    if raw.get("format") != _FORMAT:
        raise BadAnswer(
            f"{file}: version {raw.get('version')} of a pre-release Keyframe, which this package "
            "does not read; record the VM again"
        )
    if raw.get("version") != _VERSION:
        raise BadAnswer(
            f"{file}: version {raw.get('version')}, this package reads version {_VERSION}; "
            "install a later one"
        )
    return raw
