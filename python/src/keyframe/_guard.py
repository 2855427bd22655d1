"""Runs ``keyframe mount`` and ends it when Python closes the mount or ends, even if Python is
killed.

Run as a program: ``python -I -S _guard.py DIRECTORY keep|remove COMMAND...``. Standard input is a
pipe without data. When its other end closes, the guard sends SIGTERM to the command, and SIGKILL
after a while. Then it unmounts the directory if it is still mounted, and removes it if asked to and
empty. The exit code is the command's. It imports nothing else of the package, so that it starts at
once.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from types import FrameType

_GRACE_SECONDS = 8.0
_CLEAR_SECONDS = 5.0
#: Seconds in which the guard ends after its standard input has closed.
END_SECONDS_MAX = _GRACE_SECONDS + 2 * _CLEAR_SECONDS + 5.0


def main(directory: str, remove: bool, command: list[str]) -> int:
    """Runs `command` until it or standard input ends; leaves no process and no mount."""

    def asked_to_end(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, asked_to_end)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        ended = os.pidfd_open(child.pid)
        select.select([sys.stdin.fileno(), ended], [], [])
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
        code = child.wait()
        _clear(directory)
        if remove:
            # `rmdir` removes only an empty directory.
            with contextlib.suppress(OSError):
                os.rmdir(directory)
    return code


def _clear(directory: str) -> None:
    """Unmounts the directory if a killed program has left its mount, which then only returns
    errors.
    """
    for command in (["umount", "-l"], ["fusermount3", "-u", "-z"]):
        if not _is_dead(directory) or shutil.which(command[0]) is None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*command, directory],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_CLEAR_SECONDS,
                check=False,
            )


def _is_dead(directory: str) -> bool:
    """True if a mount is there that no process serves."""
    try:
        os.stat(directory)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2] == "remove", sys.argv[3:]))
