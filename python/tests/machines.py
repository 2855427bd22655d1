"""Real stores and recordings, made by the program with the guests of this repository."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

_GUESTS = Path(__file__).resolve().parents[2] / "guests"
_SECONDS_MAX = 180.0
_NOT_OFFERED = 3


def line(guest: str, *options: str) -> list[str]:
    """The QEMU command line that boots a guest; builds the guest if necessary."""
    made = subprocess.run(
        [str(_GUESTS / guest / "run.sh"), "--print", "--accel", "tcg", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
        timeout=_SECONDS_MAX,
    )
    if made.returncode == _NOT_OFFERED:
        pytest.skip(f"the apt sources of this machine lack a package of the guest {guest}")
    made.check_returncode()
    # Spaces within a word are form feeds.
    return made.stdout.decode().strip(" \n").split(" ")


def keyframe(program: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Runs a command of the program to its end; it must be done, and says so within `_SECONDS_MAX`."""
    ran = subprocess.run(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, f"{' '.join(arguments)}: {ran.returncode}\n{ran.stderr.decode()}"
    return ran.stdout.decode(errors="replace")


def take(
    program: str, store: Path, count: int, *commands: list[str], name: str | None = None
) -> None:
    """Runs VMs into a new store for `count` checkpoints: one, or several as a group."""
    keyframe(program, "init", str(store))
    words = [word for command in commands for word in ["--", *command]]
    options = ["--group"] if len(commands) > 1 else []
    options += ["--name", name] if name is not None else []
    keyframe(
        program,
        "run",
        "--store",
        str(store),
        "--count",
        str(count),
        "--interval",
        "400ms",
        *options,
        "--quiet",
        *words,
    )


def record(program: str, recording: Path, console: Path, command: list[str], until: bytes) -> None:
    """Records a VM until its console holds `until` and there are four checkpoints, and ends it as
    Ctrl-C does.
    """
    arguments = [
        "record",
        "--out",
        str(recording),
        "--checkpoint-every",
        "250ms",
        "--name",
        "rec",
        "--quiet",
        "--",
    ]
    with console.open("wb") as out:
        child = subprocess.Popen(
            [program, *arguments, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    try:
        deadline = time.monotonic() + _SECONDS_MAX
        seals = recording / "store" / "checkpoints"
        while until not in console.read_bytes() or len(list(seals.glob("*.ckpt"))) < 4:
            assert child.poll() is None, f"it ended: {child.communicate()[1].decode()}"
            assert time.monotonic() < deadline, f"no {until!r} on its console, or no checkpoints"
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=_SECONDS_MAX)
        assert child.returncode == 0, stderr.decode()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(_SECONDS_MAX)
        if child.stderr is not None:
            child.stderr.close()
