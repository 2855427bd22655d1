"""Runs the program ``keyframe``: finds it, limits its time, turns its exit codes into exceptions."""

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

#: Seconds that a command has to end after SIGTERM.
_GRACE_SECONDS = 10.0
_DONE, _WARNED = 0, 3


class KeyframeWarning(UserWarning):
    """A warning of a command that has otherwise succeeded (exit code 3)."""


def find_program(program: str | os.PathLike[str] | None = None) -> str:
    """The path of the program: `program`, or ``KEYFRAME`` of the environment, or ``keyframe`` in
    ``PATH``.

    Raises `ProgramNotFound`.
    """
    named = os.fspath(program) if program is not None else os.environ.get("KEYFRAME") or None
    found = shutil.which(named if named is not None else "keyframe")
    if found is not None:
        return str(Path(found).absolute())
    how = (
        "build target/release/keyframe with `make build` in Keyframe's source, and set "
        "KEYFRAME=/path/to/keyframe or add its directory to PATH"
    )
    if named is None:
        raise ProgramNotFound(f"there is no program `keyframe` in PATH; {how}")
    raise ProgramNotFound(f"{named} is no program that can be run; {how}")


@dataclass(frozen=True)
class Key:
    """The key of an encrypted store.

    The program gets it in its environment, never on a command line.
    """

    key_file: str | None = None
    passphrase: str | None = field(default=None, repr=False)

    def environment(self) -> dict[str, str]:
        """The environment of a command: this process's, with the key if there is one."""
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
    """How to run commands: the program's path, the store's key, and the time limit of a command."""

    path: str
    key: Key = Key()
    timeout_seconds: float = 120.0

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        also_done: Sequence[int] = (),
    ) -> bytes:
        """Runs a command until it ends and returns its standard output.

        Exit codes in `also_done` count as success. A warning becomes a `KeyframeWarning`. The
        command has no terminal, so it cannot ask for a passphrase. It is ended after
        `timeout_seconds` (if `None`, the limit of this `Program`), and if an exception such as
        Ctrl-C ends the wait.

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
                f"{' '.join(command)}: ended after {limit:g} s; timeout= sets another limit"
            ) from error
        finally:
            if child.poll() is None:
                _end(child)
        stderr = err.decode(errors="replace")
        if child.returncode == _WARNED:
            warnings.warn(stderr.strip(), KeyframeWarning, stacklevel=3)
        elif child.returncode != _DONE and child.returncode not in also_done:
            raise command_failed(command, child.returncode, stderr)
        return out

    def json(
        self,
        arguments: Sequence[str],
        *,
        timeout_seconds: float | None = None,
        also_done: Sequence[int] = (),
    ) -> Any:
        """As `run`, for a command that prints JSON.

        Raises `BadAnswer` if it prints something else.
        """
        out = self.run(arguments, timeout_seconds=timeout_seconds, also_done=also_done)
        try:
            return json.loads(out)
        except ValueError as error:
            raise BadAnswer(
                f"{self.path} {' '.join(arguments)}: printed no JSON: {error}"
            ) from error


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a command with SIGTERM, then with SIGKILL. Waits for it, and closes its pipes."""
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
    """`value` as a JSON object. Raises `BadAnswer`, naming `what`, if it is something else."""
    if isinstance(value, dict):
        return value
    raise BadAnswer(f"{what}: an object was expected, not {type(value).__name__}")


def expect_list(value: Any, what: str) -> Sequence[Any]:
    """`value` as a JSON array. Raises `BadAnswer`, naming `what`, if it is something else."""
    if isinstance(value, list):
        return value
    raise BadAnswer(f"{what}: an array was expected, not {type(value).__name__}")
