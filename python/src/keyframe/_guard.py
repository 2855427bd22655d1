"""Stands between this package and ``keyframe mount``: ends it when Python lets go of it, however Python ends.

Run as a program: ``python -I -S _guard.py COMMAND...``. Standard input is a pipe that nobody writes to; when its other end is
closed, by this package or because Python was killed, the command is asked to end, and made to after a while. The exit code is
the command's. It imports nothing else of the package, so that it starts at once.
"""

import os
import select
import signal
import subprocess
import sys
from types import FrameType

_GRACE_SECONDS = 8.0


def main(command: list[str]) -> int:
    """Runs `command` until it ends or standard input does."""

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
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
