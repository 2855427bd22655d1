"""Runs the program ``keyframe``: finds it, bounds it in time, makes exceptions of its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BadAnswer, ProgramNotFound, TimedOut, command_failed

#: Seconds that a command has to end in good order once it was asked to.
_GRACE_SECONDS = 10.0
_DONE, _WARNED = 0, 3


class KeyframeWarning(UserWarning):
    """What the program warned of while it did what it was asked (exit code 3)."""


def find_program(program: str | os.PathLike[str] | None = None) -> str:
    """The path of the program: `program`, else what ``KEYFRAME`` in the environment says, else ``keyframe`` in ``PATH``.

    Raises `ProgramNotFound`.
    """
    named = os.fspath(program) if program is not None else os.environ.get("KEYFRAME") or None
    found = shutil.which(named if named is not None else "keyframe")
    if found is not None:
        return str(Path(found).absolute())
    how = (
        "build it with `make build` in Keyframe's source, which leaves it in target/release/keyframe, and set "
        "KEYFRAME=/path/to/keyframe or add its directory to PATH"
    )
    if named is None:
        raise ProgramNotFound(f"there is no program `keyframe` in PATH; {how}")
    raise ProgramNotFound(f"{named} is no program that can be run; {how}")


@dataclass(frozen=True)
class Key:
    """What opens an encrypted store. It goes to the program by its environment, never on a command line."""

    key_file: str | None = None
    passphrase: str | None = field(default=None, repr=False)

    def environment(self) -> dict[str, str]:
        """The environment of a command: this process's, with the key in it where one is given."""
        environment = dict(os.environ)
        if self.key_file is not None:
            environment["KEYFRAME_KEY_FILE"] = self.key_file
            environment.pop("KEYFRAME_PASSPHRASE", None)
        if self.passphrase is not None:
            environment["KEYFRAME_PASSPHRASE"] = self.passphrase
            environment.pop("KEYFRAME_KEY_FILE", None)
        return environment


@dataclass(frozen=True)
class Program:
    """A way to run commands: where the program is, what opens the store, and how long a command may take."""

    path: str
    key: Key = Key()
    timeout_seconds: float = 120.0

    def run(
        self, arguments: Sequence[str], *, timeout_seconds: float | None = None, also_done: Sequence[int] = ()
    ) -> bytes:
        """Runs a command to its end and returns what it wrote to standard output.

        Exit codes in `also_done` count as done. What is warned of becomes a `KeyframeWarning`. Nobody is asked for a
        passphrase: the command has no terminal. A command that takes longer than `timeout_seconds` (the program's own, where
        `None`) is ended; so it is when an exception, Ctrl-C say, ends the waiting.

        Raises `CommandFailed` (by exit code), `TimedOut`, `ProgramNotFound`.
        """
        command = [self.path, *arguments]
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.key.environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramNotFound(f"run {self.path}: {error}") from error
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            raise TimedOut(
                f"{' '.join(command)}: not done within {limit:g} s, and ended; give it more with timeout="
            ) from error
        finally:
            if child.poll() is None:
                _end(child)
        said = err.decode(errors="replace")
        if child.returncode == _WARNED:
            warnings.warn(said.strip(), KeyframeWarning, stacklevel=3)
        elif child.returncode != _DONE and child.returncode not in also_done:
            raise command_failed(command, child.returncode, said)
        return out

    def json(
        self, arguments: Sequence[str], *, timeout_seconds: float | None = None, also_done: Sequence[int] = ()
    ) -> Any:
        """The same for a command that prints JSON. Raises `BadAnswer` where it does not."""
        out = self.run(arguments, timeout_seconds=timeout_seconds, also_done=also_done)
        try:
            return json.loads(out)
        except ValueError as error:
            raise BadAnswer(f"{self.path} {' '.join(arguments)}: printed no JSON: {error}") from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a command: politely, then by force. Waits for it, and leaves no pipe open."""
    child.terminate()
    try:
        child.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def expect_object(value: Any, what: str) -> Mapping[str, Any]:
    """`value` as a JSON object. Raises `BadAnswer`, naming `what`, where it is something else."""
    if isinstance(value, dict):
        return value
    raise BadAnswer(f"{what}: an object was expected, not {type(value).__name__}")


def expect_list(value: Any, what: str) -> Sequence[Any]:
    """`value` as a JSON array. Raises `BadAnswer`, naming `what`, where it is something else."""
    if isinstance(value, list):
        return value
    raise BadAnswer(f"{what}: an array was expected, not {type(value).__name__}")
