"""What the program tells about a VM under checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import BadAnswer
from .program import expect_object


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


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
