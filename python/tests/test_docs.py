"""The examples in the docstrings, and those of the README that drive VMs."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import keyframe

from .fake_agent import FakeAgent, Good

_PURE = ["command_line", "html", "processes"]
_README = Path(__file__).resolve().parents[1] / "README.md"


def run_examples(module: str, names: dict[str, Any]) -> None:
    """Runs the examples of a module, of which each docstring sees `names`."""
    found = doctest.DocTestFinder().find(importlib.import_module(f"keyframe.{module}"))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        test.globs.update(names)
        runner.run(test)
    results = runner.summarize(verbose=False)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("module", _PURE)
def test_pure_examples(module: str) -> None:
    run_examples(module, {})


def test_examples_with_an_agent(tmp_path: Path) -> None:
    with FakeAgent(tmp_path / "agent.sock", Good()):
        run_examples("agent", {"agent_socket": tmp_path / "agent.sock"})


def test_examples_of_a_vm(command: list[str], fresh: keyframe.Store) -> None:
    names: dict[str, Any] = {"keyframe": keyframe, "command": command, "store": fresh}
    with keyframe.run(command, fresh, name="first") as vm:
        [clone] = vm.branch(vm.take())
        # Its own VM is named web; those of other examples have other names.
        connected = doctest.DocTestFinder().find(keyframe.connect, "connect", globs={})
        modules = [importlib.import_module(f"keyframe.{name}") for name in ("vm", "starting")]
        runner = doctest.DocTestRunner()
        for test in (test for module in modules for test in doctest.DocTestFinder().find(module)):
            if test.name.endswith(".connect"):
                continue
            test.globs.update(names, clone=clone)
            runner.run(test)
    with keyframe.run(command, fresh, name="web"):
        for test in connected:
            test.globs.update(names)
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_examples_of_clones(command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(command, fresh, name="web") as vm:
        base = vm.take(tag="base")
        run_examples("clones", {"keyframe": keyframe, "vm": vm, "base": base, "store": fresh})


def test_examples_with_an_agent_in_a_guest(agent_command: list[str], fresh: keyframe.Store) -> None:
    with keyframe.run(agent_command, fresh) as vm:
        vm.exec(["true"], timeout=120)
        run_examples("machine", {"vm": vm})


def test_the_readme(agent_command: list[str], fresh: keyframe.Store) -> None:
    """The Python blocks about driving VMs run, with this test's VM in place of the reader's."""
    section = _README.read_text().partition("## Drive VMs\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, Any] = {"command": agent_command, "store": fresh}
        code = compile(block, _README.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        waiting = eval(code, names)
        if waiting is not None:
            asyncio.run(waiting)
        assert {done.returncode for done in names["results"]} == {0}
    assert [one.tags for one in fresh.checkpoints()].count(("base",)) == 1
