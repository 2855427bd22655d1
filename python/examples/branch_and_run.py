"""Runs a command in N clones of a VM at the same time, and prints what it printed.

    python branch_and_run.py N COMMAND -- QEMU_COMMAND_LINE...

The guest runs the QEMU guest agent.
"""

import shlex
import sys

import keyframe

count, command, _, *line = sys.argv[1:]
with keyframe.run(line) as vm:
    vm.exec(["true"], timeout=300)
    with vm.branch(vm.take(), int(count)) as clones:
        for clone, done in zip(clones, clones.exec(shlex.split(command))):
            print(f"{clone.name}: exit code {done.returncode}: {done.text.strip()}")
