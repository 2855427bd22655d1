"""Runs a command that runs VMs, and ends the command and its VMs when Python closes it or ends,
even if Python is killed.

Run as a program: ``python -I -S _vm_guard.py PYTHON_PID DIRECTORY READY_FD COMMAND...``. The
command inherits the descriptor READY_FD. The guard closes its own copy. Standard input is a pipe. The
guard ends the command when it can read from the pipe, when the pipe's other end closes, or when the
process PYTHON_PID ends, whichever comes first:

    SIGTERM to the command ─▶ it seals its checkpoint and ends its VMs
                           ─▶ SIGKILL after a while; then its helper processes end by themselves
                           ─▶ SIGTERM, then SIGKILL to each process that the command left
                           ─▶ DIRECTORY is removed

If the command dies by itself and leaves a VM, the VM runs on until the guard is asked to end. The
exit code is the command's. The guard imports nothing else of the package, so that it starts at
once.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

#: Seconds in which a command seals what is in progress, and ends its VMs.
_GRACE_SECONDS = 60.0
#: Seconds in which the helper processes of a killed command end by themselves.
_HELPERS_SECONDS = 3.0
#: Seconds in which what is left ends after SIGTERM.
_LEFT_SECONDS = 5.0
#: Seconds in which the guard ends after it was asked to.
END_SECONDS_MAX = _GRACE_SECONDS + _HELPERS_SECONDS + 2 * _LEFT_SECONDS + 5.0
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.2
#: From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(python_pid: int, directory: str, ready_fd: int, command: list[str]) -> int:
    """Runs `command` until it has ended with its VMs, or until the guard is asked to end them."""

    def asked_to_end(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, asked_to_end)
    # QEMU outlives a Keyframe that is killed. It is then a child of the guard.
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *4 * [ctypes.c_ulong]]
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    code = 1
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[ready_fd],
            # If the guard itself is killed. This process has one thread, as `preexec_fn` demands.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        os.close(ready_fd)
        try:
            _wait(python_pid, child)
        finally:
            code = _end(child)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _wait(python_pid: int, child: "subprocess.Popen[bytes]") -> None:
    """Waits until the command has ended with all its processes, or until it is to be ended."""
    try:
        python = os.pidfd_open(python_pid)
    except ProcessLookupError:
        return
    if os.getppid() != python_pid:
        # It ended before it could be watched.
        return
    reasons = [sys.stdin.fileno(), python]
    ended = os.pidfd_open(child.pid)
    if select.select([*reasons, ended], [], [])[0] != [ended]:
        return
    child.wait()
    while _descendants() and not select.select(reasons, [], [], _LOOK_SECONDS)[0]:
        _reap()


def _end(child: "subprocess.Popen[bytes]") -> int:
    """Ends the command and the processes that it left. Returns the command's exit code."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _all_ended_within(_HELPERS_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = _descendants()
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        if left:
            _all_ended_within(_LEFT_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _all_ended_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        _reap()
        if not _descendants():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)


def _reap() -> None:
    """Collects the children that have ended; the command itself has been waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _descendants() -> list[int]:
    """The processes below this one, by rising distance. Ended processes are not among them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The program's name may hold spaces and parentheses.
                state, parent = file.read(4096).rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
