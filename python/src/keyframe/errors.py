"""The exceptions of this package.

::

    KeyframeError
    ├─ ProgramNotFound        there is no program `keyframe`
    ├─ CommandFailed          it ended with an exit code other than 0: `code`, `message`, `fix`
    │  ├─ UsageError          2   it does not know an argument; its version may be another one
    │  ├─ NoStore             10  there is no store
    │  └─ StoreLocked         11  another process writes to the store
    ├─ MountFailed            checkpoints could not be mounted
    ├─ TimedOut               it took too long, and was ended
    ├─ BadAnswer              its output, or a file, does not have the documented form
    ├─ UnknownCheckpoint      no checkpoint has that id or tag
    ├─ NoRam                  the checkpoint's RAM is not available as an image
    ├─ LayoutDiffers          the RAM of two checkpoints differs in size
    ├─ UnreadablePages        the store is damaged: some pages cannot be read
    └─ MissingExtra           an optional library is not installed

If a fix is known, the message names it.
"""

from __future__ import annotations

from collections.abc import Sequence


class KeyframeError(Exception):
    """The base of all errors of this package."""


class ProgramNotFound(KeyframeError):
    """The program ``keyframe`` was not found, or cannot be run."""


class CommandFailed(KeyframeError):
    """The program ended with an exit code other than 0.

    `code` is the exit code, `message` the error text without the program's name, `fix` the fix that
    the text names (or `None`), and `command` the command line.
    """

    def __init__(self, command: Sequence[str], code: int, stderr: str) -> None:
        self.command = tuple(command)
        self.code = code
        self.message, self.fix = _parts(stderr)
        text = (
            self.message or f"{' '.join(self.command)}: ended with exit code {code} and no message"
        )
        super().__init__(text if self.fix is None else f"{text}\n  fix: {self.fix}")


class UsageError(CommandFailed):
    """Exit code 2: the program does not know an argument."""


class NoStore(CommandFailed):
    """Exit code 10: there is no store at this path or URL."""


class StoreLocked(CommandFailed):
    """Exit code 11: another process writes to the store."""


class MountFailed(KeyframeError):
    """The store's checkpoints could not be mounted, or the mount ended by itself."""


class TimedOut(KeyframeError):
    """The program exceeded its time limit, and was ended."""


class BadAnswer(KeyframeError):
    """The program's output, or a file, does not have the documented form."""


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


_BY_CODE: dict[int, type[CommandFailed]] = {2: UsageError, 10: NoStore, 11: StoreLocked}


def command_failed(command: Sequence[str], code: int, stderr: str) -> CommandFailed:
    """The exception for an exit code and the text on standard error."""
    return _BY_CODE.get(code, CommandFailed)(command, code, stderr)


def _parts(stderr: str) -> tuple[str, str | None]:
    """Message and fix of `keyframe: MESSAGE\\n  fix: FIX`; other lines stay in the message."""
    message: list[str] = []
    fix: str | None = None
    for line in stderr.strip().splitlines():
        if line.startswith("  fix: "):
            fix = line.removeprefix("  fix: ")
        else:
            message.append(line.removeprefix("keyframe: "))
    return "\n".join(message), fix
