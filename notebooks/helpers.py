"""What the notebooks draw with, and the real model that they fetch."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import jaxkv.text
from jaxkv._files.packaged_model import smollm2

BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, TEAL, YELLOW = COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#76b7b2", "#edc948",
)  # fmt: skip
FREE, KEPT, SHARED = -1, -2, -3  # what `Trace.owners` says of a block that no single row holds


def load_smollm2() -> tuple[Any, Any]:
    """Returns SmolLM2-135M-Instruct and its tokenizer. The first time 93 MB are fetched."""
    path = smollm2()
    return jaxkv.models.load(path), jaxkv.text.Tokenizer(path)


def finish(*axes: Any, legend: Any = None) -> None:
    """Shows a figure without frames, with a legend beside the axes named."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        legend.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].figure.tight_layout()
    plt.show()


def plot_bars(title: str, values: Mapping[str, float], text: str) -> None:
    """Draws a bar for each value, with the value in `text`'s format behind it."""
    _, axis = plt.subplots(figsize=(6.5, 0.45 + 0.35 * len(values)), dpi=80)
    bars = axis.barh(list(values), list(values.values()), color=COLOURS[: len(values)])
    axis.bar_label(bars, fmt=text, padding=3)
    axis.set(title=title, xlim=(0, 1.25 * max(values.values())))
    axis.invert_yaxis()
    finish(axis)


def plot_owners(trace: Any, axis: Any, rows: int) -> None:
    """Draws who holds which block: a column is a step, a line is a block."""
    colours = {FREE: "#eceff1", KEPT: "#cfb53b", SHARED: "black"} | {r: COLOURS[r % len(COLOURS)] for r in range(rows)}
    owners = trace.owners().T
    picture = [[plt.matplotlib.colors.to_rgb(colours[row]) for row in line] for line in owners]
    axis.imshow(np.array(picture), aspect="auto", interpolation="nearest", origin="lower")
    axis.set(xlabel="step", ylabel="block", title="blocks, by the row that holds them")
    said = {FREE: "free", KEPT: "kept for reuse", SHARED: "shared by rows"}
    for row, label in (said | {row: f"row {row}" for row in range(min(rows, len(COLOURS)))}).items():
        if row >= 0 or (owners == row).any():
            axis.plot([], [], "s", color=colours[row], label=label)


def plot_run(trace: Any) -> None:
    """Draws a run: the row of each block over time, and the memory in use beside that of a dense cache."""
    config = trace.config
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 2.8), dpi=80, width_ratios=(3, 2))
    plot_owners(trace, left, config.max_seqs)
    left.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    used = trace.bytes_in_use / 2**20
    right.axhline(config.dense_bytes / 2**20, color=BROWN, linestyle=":", label="dense")
    right.fill_between(range(len(used)), used, step="post", color=BLUE, alpha=0.5, label="blocks in use")
    right.set(xlabel="step", title="MiB", ylim=(0, 1.1 * config.dense_bytes / 2**20))
    right.legend(frameon=False, loc="center right")
    finish(right)


def plot_latencies(waits: Sequence[float], gaps: Sequence[float]) -> None:
    """Draws which share of requests had their first token, and which share of tokens came, within how long."""
    _, axes = plt.subplots(1, 2, figsize=(9, 2.4), dpi=80, sharey=True)
    for axis, title, seconds, colour in zip(
        axes, ("to the first token", "between tokens"), (waits, gaps), (BLUE, GREEN), strict=True
    ):
        axis.step(np.sort(seconds), np.linspace(0, 100, len(seconds)), where="post", color=colour)
        axis.set(title=title, xlabel="seconds", xlim=(0, None), ylim=(0, 100))
    axes[0].set_ylabel("%")
    finish(*axes)
