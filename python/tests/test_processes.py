"""The guard of a command that runs VMs: whatever happens to Python, nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import keyframe
from keyframe.processes import Deadline, GuardedCommand, Log, Process, directory_for_command
from keyframe.program import Program

#: A command that has a helper, which is in a session of its own; both tell their numbers.
_COMMAND = """
setsid sh -c 'echo $$ >{0}/helper; exec sleep 100' &
echo $$ >{0}/command
echo a message >&2
echo a line
trap 'echo sealed >&2; exit 3' TERM
while :; do sleep 0.05; done
"""


@pytest.fixture()
def program(tmp_path: Path) -> Program:
    """A program that runs the shell script that is its first argument."""
    path = tmp_path / "program"
    path.write_text('#!/bin/sh\neval "$1"\n')
    path.chmod(0o755)
    return Program(str(path))


Start = Callable[[str], GuardedCommand]


@pytest.fixture()
def start(program: Program) -> Iterator[Start]:
    commands: list[GuardedCommand] = []

    def start(script: str) -> GuardedCommand:
        commands.append(GuardedCommand(program, [script], directory_for_command()))
        return commands[-1]

    yield start
    for command in commands:
        command.end()
        assert not command.output.path.parent.exists()


def number_in(file: Path) -> int:
    deadline = Deadline(10, f"{file} was not there")
    while not file.exists() or not file.read_text().endswith("\n"):
        deadline.sleep(0.01)
    return int(file.read_text())


def assert_gone(*pids: int) -> None:
    deadline = Deadline(20, f"of {pids} some did not end")
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        deadline.sleep(0.02)


def test_it_ends_with_all_its_processes(start: Start, tmp_path: Path) -> None:
    command = start(_COMMAND.format(tmp_path))
    pids = number_in(tmp_path / "command"), number_in(tmp_path / "helper")
    assert command.poll() is None
    assert command.output.path.read_text() == "a line\n"
    assert command.end() == 3 and command.end() == 3 and command.poll() == 3
    assert_gone(*pids)
    assert command.messages() == "a message\nsealed"
    assert command.output.tail(100) == "a line\n" and command.output.tail(3) == "ne\n"
    assert not command.output.path.exists()


def test_a_vm_outlives_its_engine_until_the_end(start: Start, tmp_path: Path) -> None:
    command = start(_COMMAND.format(tmp_path))
    pids = number_in(tmp_path / "command"), number_in(tmp_path / "helper")
    helper = Process(pids[1])
    os.kill(pids[0], signal.SIGKILL)
    assert_gone(pids[0])
    time.sleep(0.5)
    assert helper.is_alive() and command.poll() is None
    with pytest.raises(keyframe.TimedOut, match="it did not end within 0.2 s"):
        command.wait(Deadline(0.2, "it did not end"))
    assert command.end() == 128 + signal.SIGKILL
    assert not helper.is_alive()


def test_its_end_is_waited_for(start: Start) -> None:
    command = start("sleep 0.3; exit 4")
    assert command.wait(Deadline(10, "")) == 4
    assert type(command.failure(4)) is keyframe.GuestPanicked


def test_a_fork_of_python_holds_nothing_up(start: Start, tmp_path: Path) -> None:
    command = start(_COMMAND.format(tmp_path))
    pids = number_in(tmp_path / "command"), number_in(tmp_path / "helper")
    child = os.fork()
    if child == 0:
        # It does not end the command of its parent.
        command.end()
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.3)
        assert command.poll() is None
        began = time.monotonic()
        assert command.end() == 3
        assert time.monotonic() - began < 10
        assert_gone(*pids)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


_USER = """
import sys, time
from keyframe.processes import GuardedCommand, directory_for_command
from keyframe.program import Program
command = GuardedCommand(Program(sys.argv[1]), [sys.argv[2]], directory_for_command())
print(command.output.path.parent, flush=True)
if sys.argv[3] == "raise":
    raise RuntimeError
if sys.argv[3] == "wait":
    time.sleep(100)
"""


@pytest.mark.parametrize("how", ["end", "raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_it_ends_with_python(program: Program, tmp_path: Path, how: str) -> None:
    what = how if how in ("end", "raise") else "wait"
    python = subprocess.Popen(
        [sys.executable, "-c", _USER, program.path, _COMMAND.format(tmp_path), what],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert python.stdout is not None
        directory = Path(python.stdout.readline().decode().strip())
        python.stdout.close()
        if what == "wait":
            pids = number_in(tmp_path / "command"), number_in(tmp_path / "helper")
            assert directory.is_dir()
            python.send_signal(signal.Signals[how])
            python.wait(60)
            assert_gone(*pids)
        else:
            python.wait(60)
        deadline = Deadline(20, f"{directory} was not removed")
        while directory.exists():
            deadline.sleep(0.02)
    finally:
        python.kill()
        python.wait()


def test_a_guard_that_is_killed_ends_the_command(start: Start, tmp_path: Path) -> None:
    command = start(_COMMAND.format(tmp_path))
    pids = number_in(tmp_path / "command"), number_in(tmp_path / "helper")
    os.kill(command._guard.pid, signal.SIGKILL)
    assert_gone(pids[0])
    os.kill(pids[1], signal.SIGKILL)
    assert command.end() == -signal.SIGKILL
    # Only the guard removes it.
    for file in command.output.path.parent.iterdir():
        file.unlink()
    command.output.path.parent.rmdir()


#: Tells something through the descriptor that the option `--ready-fd` names.
_TELL = "printf '%s' '{}' >/proc/self/fd/$3"


def test_readiness_is_awaited(start: Start) -> None:
    told = start(f"{_TELL.format('[1, ')}; sleep 0.2; {_TELL.format('7]')}; echo >/proc/self/fd/$3")
    assert told.await_ready("it", 5.0) == [1, 7]
    with pytest.raises(keyframe.BadAnswer, match="told no JSON"):
        start("echo nonsense >/proc/self/fd/$3; sleep 10").await_ready("it", 5.0)
    with pytest.raises(keyframe.TimedOut, match=r"it was not there within 0\.2 s"):
        start("sleep 10").await_ready("it", 0.2)
    with pytest.raises(keyframe.VmEnded, match="it has ended at once\nwhy"):
        start("echo why >&2").await_ready("it", 5.0)
    with pytest.raises(keyframe.StoreFull, match="no space") as caught:
        start("echo 'keyframe: no space' >&2; exit 12").await_ready("it", 5.0)
    assert caught.value.code == 12


def test_a_log_keeps_its_end(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.file.write(b"a" * (1 << 20) + "ä\n".encode())
    log.file.flush()
    assert log.tail(3) == "ä\n"
    log.close()
    log.close()
    log.path.unlink()
    assert log.tail(3) == "ä\n" and len(log.tail(1 << 30).encode()) == 1 << 20


def test_processes_are_told_apart() -> None:
    child = subprocess.Popen(["sleep", "100"])
    process = Process(child.pid)
    assert process.is_alive()
    child.kill()
    child.wait()
    assert not process.is_alive()
    assert not Process(child.pid).is_alive()
    assert Process(os.getpid()).is_alive()
