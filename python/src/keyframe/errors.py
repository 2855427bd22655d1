"""The exceptions of this package.

::

    KeyframeError
    ├─ ProgramNotFound        there is no program `keyframe`
    ├─ CommandFailed          it failed, with an exit code: `code`, `kind`, `message`, `fix`
    │  ├─ NoVm                1   no such VM runs
    │  ├─ NameTaken           1   another VM has the name
    │  ├─ UsageError          2   it does not know an argument; its version may be another one
    │  ├─ GuestPanicked       4   the guest panicked
    │  ├─ WatchdogExpired     5   the guest's watchdog expired
    │  ├─ NoStore             10  there is no store
    │  ├─ StoreLocked         11  another process writes to the store
    │  └─ StoreFull           12  the store is full: the newest checkpoints are missing
    ├─ VmEnded                the VM has ended
    ├─ AgentError             the guest agent of a VM cannot be used
    │  ├─ NoAgent             the VM has none, or its socket is not known or not there
    │  ├─ AgentLost           the connection to it ended
    │  └─ AgentRefused        it answered with an error: `kind`, `text`
    ├─ MountFailed            checkpoints could not be mounted
    ├─ TimedOut               a command, a VM or a guest agent took too long
    ├─ BadAnswer              an output, a file or an agent's answer has another form
    ├─ UnknownCheckpoint      no checkpoint has that id or tag
    ├─ NoRam                  the checkpoint's RAM is not available as an image
    ├─ LayoutDiffers          the RAM of two checkpoints differs in size
    ├─ UnreadablePages        the store is damaged: some pages cannot be read
    └─ MissingExtra           an optional library is not installed

If a fix is known, the message names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class KeyframeError(Exception):
    """The base of all errors of this package."""


class ProgramNotFound(KeyframeError):
    """The program ``keyframe`` was not found, or cannot be run."""


class CommandFailed(KeyframeError):
    """The program ended with an exit code other than 0.

    `code` is the exit code, and `kind` the kind of the error, which ``keyframe help scripting``
    lists (or `None`, if the program did not tell). `message` is the error text without the
    program's name, `fix` the fix that the text names (or `None`), and `command` the command line.
    """

    def __init__(self, command: Sequence[str], code: int, stderr: str) -> None:
        self.command = tuple(command)
        self.code = code
        self.kind, self.message, self.fix = _parts(stderr)
        text = (
            self.message or f"{' '.join(self.command)}: ended with exit code {code} and no message"
        )
        super().__init__(text if self.fix is None else f"{text}\n  fix: {self.fix}")


class NoVm(CommandFailed):
    """No such VM runs under checkpoints."""


class NameTaken(CommandFailed):
    """Another VM that runs has the name."""


class UsageError(CommandFailed):
    """Exit code 2: the program does not know an argument."""


class GuestPanicked(CommandFailed):
    """Exit code 4: the guest panicked, which ended the VM."""


class WatchdogExpired(CommandFailed):
    """Exit code 5: the guest's watchdog expired, which ended the VM."""


class NoStore(CommandFailed):
    """Exit code 10: there is no store at this path or URL."""


class StoreLocked(CommandFailed):
    """Exit code 11: another process writes to the store."""


class StoreFull(CommandFailed):
    """Exit code 12: the store is full. The newest checkpoints of the run are missing."""


class VmEnded(KeyframeError):
    """The VM has ended: its guest has shut down, it was stopped, or it has failed."""


class AgentError(KeyframeError):
    """The guest agent of a VM cannot be used."""


class NoAgent(AgentError):
    """The VM has no guest agent, or the agent's socket is not known or not there."""


class AgentLost(AgentError):
    """The connection to the guest agent ended: the VM has ended, or the agent's device is gone."""


class AgentRefused(AgentError):
    """The guest agent answered with an error, for example that there is no such program.

    `kind` is the class of the error and `text` its description, as the agent sent them.
    """

    def __init__(self, command: str, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text
        super().__init__(f"the guest agent refused {command}: {text} ({kind})")


class MountFailed(KeyframeError):
    """The store's checkpoints could not be mounted, or the mount ended by itself."""


class TimedOut(KeyframeError):
    """A command took too long and was ended, or a VM or its agent did not answer in time."""


class BadAnswer(KeyframeError):
    """The program's output, a file, or a guest agent's answer does not have the documented form."""


class UnknownCheckpoint(KeyframeError):
    """The store has no such checkpoint."""


class NoRam(KeyframeError):
    """The checkpoint's RAM is not available as an image, or the group's member is not named."""


class LayoutDiffers(KeyframeError):
    """The RAM of two checkpoints differs in size, so that their pages cannot be compared."""


class UnreadablePages(KeyframeError):
    """The store cannot provide these pages: it is damaged, or no longer reachable."""


class MissingExtra(KeyframeError, ImportError):
    """An optional library is not installed; the message names the command that installs it."""


_BY_CODE: dict[int, type[CommandFailed]] = {
    2: UsageError,
    4: GuestPanicked,
    5: WatchdogExpired,
    10: NoStore,
    11: StoreLocked,
    12: StoreFull,
}


#: The exit code of these is 1.
_BY_KIND: dict[str | None, type[CommandFailed]] = {"no_vm": NoVm, "name_taken": NameTaken}


def command_failed(command: Sequence[str], code: int, stderr: str) -> CommandFailed:
    """The exception for an exit code and the text on standard error."""
    kind, _, _ = _parts(stderr)
    return _BY_CODE.get(code, _BY_KIND.get(kind, CommandFailed))(command, code, stderr)


def _parts(stderr: str) -> tuple[str | None, str, str | None]:
    """Kind, message and fix of the error text: of a command with ``--json`` or ``--ready-fd``, the
    line ``{"error": {...}}``; of others, `keyframe: MESSAGE\\n  fix: FIX`, without a kind. Other
    lines stay in the message.
    """
    message: list[str] = []
    kind: str | None = None
    fix: str | None = None
    for line in stderr.strip().splitlines():
        error = _error(line)
        if error is not None:
            kind, fix = _text(error.get("kind")), _text(error.get("fix"))
            message.append(str(error.get("message")))
        elif line.startswith("  fix: "):
            fix = line.removeprefix("  fix: ")
        else:
            message.append(line.removeprefix("keyframe: "))
    return kind, "\n".join(message), fix


def _error(line: str) -> Mapping[str, Any] | None:
    """The error that a command with ``--json`` has printed as a line; `None` if it is none."""
    if not line.startswith('{"error":'):
        return None
    try:
        error = json.loads(line)["error"]
    except ValueError:
        return None
    return error if isinstance(error, dict) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
