"""Draws the memory that a VM wrote, and when.

Checkpoints are from left to right, guest-physical memory from bottom to top.

    python heat_map.py STORE [--vm NAME] [--last N] [-o FILE.png]

Or run it cell by cell in a notebook (VS Code, Spyder, jupytext) with KEYFRAME_STORE in the
environment. It needs matplotlib.
"""

# %% The input: a store, and in it the newest run of a VM.
import argparse
import os
from pathlib import Path

import matplotlib
import numpy as np

import keyframe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("store", nargs="?", default=os.environ.get("KEYFRAME_STORE"))
parser.add_argument("--vm", help="the VM [default: that of the newest checkpoint]")
parser.add_argument("--last", type=int, help="only the newest N checkpoints")
parser.add_argument(
    "--rows", type=int, default=256, help="the number of rows of the picture [default: 256]"
)
parser.add_argument("-o", "--output", type=Path, default=Path("heat_map.png"))
arguments, _ = parser.parse_known_args()
if arguments.store is None:
    parser.error("name a store, or set KEYFRAME_STORE")

store = keyframe.Store(arguments.store)
checkpoints = store.checkpoints(vm=arguments.vm, last=arguments.last)
checkpoints = [c for c in checkpoints if c.run == checkpoints[-1].run]
if not checkpoints:
    parser.error(f"{arguments.store} has no such checkpoints")
print(
    f"{len(checkpoints)} checkpoints of {checkpoints[0].vm} from "
    f"{checkpoints[0].taken_at:%Y-%m-%d %H:%M:%S} UTC on"
)

# %% The share of pages that differ from the checkpoint before, by row of memory and column of time.
columns = []
with store:
    members = checkpoints[0].members()
    member = members[0] if members else None
    for checkpoint in checkpoints:
        mask = checkpoint.dirty_mask(member=member)
        edges = np.linspace(0, len(mask), min(arguments.rows, len(mask)) + 1).astype(int)
        columns.append(np.add.reduceat(mask, edges[:-1], dtype=np.int64) / np.diff(edges))
        print(f"checkpoint {checkpoint.id}: {mask.sum()} of {len(mask)} pages differ")
heat = np.stack(columns, axis=1)
ram_mib = len(mask) * keyframe.PAGE_BYTES / 2**20

# %% The picture. The first checkpoint of a run differs from empty memory: it shows all used pages.
figure, axes = plt.subplots(figsize=(10, 6), layout="constrained")
extent = (-0.5, len(checkpoints) - 0.5, 0, ram_mib)
image = axes.imshow(
    100 * heat,
    origin="lower",
    aspect="auto",
    interpolation="nearest",
    cmap="inferno",
    extent=extent,
)
ticks = range(0, len(checkpoints), max(1, len(checkpoints) // 12))
axes.set_xticks(list(ticks), [str(checkpoints[n].id) for n in ticks])
axes.set_xlabel("checkpoint")
axes.set_ylabel("guest-physical memory, MiB")
axes.set_title(f"pages of {member or checkpoints[0].vm} that differ from the checkpoint before")
figure.colorbar(image, label="% of pages")
figure.savefig(arguments.output, dpi=120)
print(f"drawn: {arguments.output}")
