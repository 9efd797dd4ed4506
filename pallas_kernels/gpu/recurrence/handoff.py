"""Two warpgroups that walk over a row's chunks together: one updates the state, the other one computes outputs.

Each waits long for products of its own, one behind another, and a multiprocessor has room for both. What the outputs
want of the state, its numbers before the chunk and what the tokens add, goes from one to the other in shared memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.gpu.recurrence.chunk_steps import CHUNK, WIDTH, RowChunk, operand

UPDATER, WRITER = range(2)
THREADS = {"num_threads": 2, "thread_name": "warpgroup"}  # of `plgpu.kernel`


class Handed(NamedTuple):
    """What goes from the updater to the writer, in halves."""

    state: tuple[Any, Any]  # before a chunk
    gains: tuple[Any, Any]  # what its tokens add


class Signals(NamedTuple):
    """Barriers: it is there; it was read."""

    state_ready: Any
    state_free: Any
    gains_ready: Any
    gains_free: Any


def make_handoff(keys: int) -> tuple[Handed, Signals]:
    """Returns the memory for it, of states of so many keys."""
    return Handed((operand(WIDTH, keys),) * 2, (operand(WIDTH, CHUNK),) * 2), Signals(*(plgpu.Barrier(),) * 4)


def await_reader(free: Any, chunk: RowChunk) -> None:
    """Waits until the writer has read what was given of the chunk before, if that is not a thread block's first."""
    pl.when(chunk.nth > 0)(lambda: plgpu.barrier_wait(free))


def give(halves: tuple[jax.Array, jax.Array], targets: tuple[Any, Any], ready: Any, free: Any, chunk: RowChunk) -> None:
    """Gives the writer numbers of a chunk in halves, when it has read the ones before."""
    await_reader(free, chunk)
    for half, target in zip(halves, targets, strict=True):
        target[...] = half
    plgpu.commit_smem()
    plgpu.barrier_arrive(ready)


def share_work(update: Callable[[], None], write: Callable[[], None]) -> None:
    """Runs both, each in its warpgroup."""
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == UPDATER)(update)
    pl.when(warpgroup == WRITER)(write)
