"""What can go wrong, as exceptions.

::

    KeyframeError
    ├─ ProgramNotFound        the program `keyframe` is not installed where it is looked for
    ├─ CommandFailed          it ended with an exit code that is not 0: `code`, `message`, `fix`
    │  ├─ UsageError          2   it does not know an argument: another version of the program?
    │  ├─ NoStore             10  there is no store
    │  └─ StoreLocked         11  somebody else writes to it
    ├─ MountFailed            checkpoints could not be mounted
    ├─ TimedOut               it did not answer in time, and was ended
    ├─ BadAnswer              what it answered, or a file, is not what its documentation says
    ├─ UnknownCheckpoint      no checkpoint has that number or tag
    ├─ NoRam                  the checkpoint's RAM cannot be shown
    ├─ LayoutDiffers          two checkpoints' RAM is not of the same size
    ├─ UnreadablePages        the store cannot give pages, as it is damaged
    └─ MissingExtra           an optional library is not installed

Each message says what to do about it where that is known.
"""

from __future__ import annotations

from collections.abc import Sequence


class KeyframeError(Exception):
    """What all errors of this package are."""


class ProgramNotFound(KeyframeError):
    """The program ``keyframe`` was not found, or cannot be run."""


class CommandFailed(KeyframeError):
    """The program said no.

    `code` is its exit code, `message` what it said, without its name before it, `fix` what it says to do about it, and
    `command` the command line.
    """

    def __init__(self, command: Sequence[str], code: int, said: str) -> None:
        self.command = tuple(command)
        self.code = code
        self.message, self.fix = _parts(said)
        text = self.message or f"{' '.join(self.command)}: ended with exit code {code} and no message"
        super().__init__(text if self.fix is None else f"{text}\n  fix: {self.fix}")


class UsageError(CommandFailed):
    """Exit code 2: the program does not know what it was asked."""


class NoStore(CommandFailed):
    """Exit code 10: there is no store at that place."""


class StoreLocked(CommandFailed):
    """Exit code 11: somebody else writes to the store."""


class MountFailed(KeyframeError):
    """The store's checkpoints could not be mounted, or the mount ended by itself."""


class TimedOut(KeyframeError):
    """The program did not answer within the time that it was given, and was ended."""


class BadAnswer(KeyframeError):
    """What the program printed, or a file holds, is not what its documentation says."""


class UnknownCheckpoint(KeyframeError):
    """The store has no such checkpoint."""


class NoRam(KeyframeError):
    """The checkpoint's RAM cannot be shown as an image, or it is not said whose."""


class LayoutDiffers(KeyframeError):
    """The RAM of two checkpoints is not of the same size, so that their pages are not each other's."""


class UnreadablePages(KeyframeError):
    """The store cannot give these pages: it is damaged, or was taken away."""


class MissingExtra(KeyframeError, ImportError):
    """An optional library is not installed; the message says how to get it."""


_BY_CODE: dict[int, type[CommandFailed]] = {2: UsageError, 10: NoStore, 11: StoreLocked}


def command_failed(command: Sequence[str], code: int, said: str) -> CommandFailed:
    """The exception for an exit code, with what the program wrote to standard error."""
    return _BY_CODE.get(code, CommandFailed)(command, code, said)


def _parts(said: str) -> tuple[str, str | None]:
    """Message and fix of `keyframe: MESSAGE\\n  fix: FIX`; what else was said stays in the message."""
    message: list[str] = []
    fix: str | None = None
    for line in said.strip().splitlines():
        if line.startswith("  fix: "):
            fix = line.removeprefix("  fix: ")
        else:
            message.append(line.removeprefix("keyframe: "))
    return "\n".join(message), fix
