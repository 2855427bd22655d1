"""The example draws a heat map of any store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "heat_map.py"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("kind", ["store_path", "group_path"])
def test_heat_map(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: Path = request.getfixturevalue(kind)
    ran = _run("-o", str(tmp_path / "heat.png"), KEYFRAME_STORE=str(store))
    assert ran.returncode == 0, ran.stderr
    assert "pages differ" in ran.stdout
    picture = (tmp_path / "heat.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000


def test_without_checkpoints(store_path: Path) -> None:
    ran = _run(str(store_path), "--vm", "nobody")
    assert ran.returncode == 2 and "has no such checkpoints" in ran.stderr


def test_branch_and_run(agent_command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, str(_EXAMPLE.with_name("branch_and_run.py")), "3", "cat /proc/uptime"]
        + ["--", *agent_command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[0] for line in ran.stdout.splitlines()] == ["vm-1", "vm-2", "vm-3"]
    assert all("exit code 0: " in line for line in ran.stdout.splitlines())
