"""Linear recurrences over states, each where it lies in the pool: read once, updated in registers, written once.

A thread block has some columns of one head's state of a row: their values depend on no others. It copies them into
shared memory while it reads the first token's vectors, goes through the row's tokens, and stores them. Several
thread blocks share a multiprocessor, so that copies of some are under way while others compute. Rows without tokens are
left at once. `rows` says in which order rows that share a slot have their turns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.recurrence.rows import (
    BEGIN,
    BEGINS,
    COUNT,
    NEXT,
    POSITION,
    SOURCE,
    TARGET,
    TURNS,
    write_snapshot,
)
from pallas_kernels.gpu.tiles import InterpretParams, anew, full, store

ELEMENTS = 8192  # of a state in a thread block: 64 registers of each thread


# Keys lie along the rows of a delta rule's tile, 64 values along its lines: each warp has 16 of them, and 8 lines at
# once, so that sums over keys stay in a warp.
KEYS_BY_VALUES = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (16,), (4,))), warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1
)
# Keys lie along the lines of a state space's tile: each warp has 4 lines of 32 keys at once.
VALUES_BY_KEYS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrence as the kernel runs it."""

    name: str  # that profiles and dumps show
    key_axis: int  # of a head's state
    width: int  # values of a state in one thread block
    # `(arrays, token, head, part) -> vectors`: of a token what is needed first, from references of the arrays.
    read: Callable[..., Any]
    # `(arrays, token, head, part, vectors, state) -> (output, state)`, in float32: reads by itself what is needed last,
    # which comes in time, and saves registers.
    update: Callable[..., Any]

    @property
    def layout(self):
        """How a part of a state lies in registers."""
        return VALUES_BY_KEYS if self.key_axis else KEYS_BY_VALUES

    def wide_keys(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns a vector over keys along all values."""
        return lax.broadcast_in_dim(x, shape, [self.key_axis])

    def wide_values(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns a vector over values along all keys."""
        return lax.broadcast_in_dim(x, shape, [1 - self.key_axis])

    def load_keys(self, ref) -> jax.Array:
        """Loads a vector over keys from global memory."""
        return plgpu.load(ref, layout=self.layout.reduce(1 - self.key_axis), optimized=False)

    def load_values(self, ref) -> jax.Array:
        """Loads a vector over the values of a part from global memory."""
        return plgpu.load(ref, layout=self.layout.reduce(self.key_axis), optimized=False)

    def span(self, part) -> Any:
        """The values of a part."""
        return pl.ds(part * self.width, self.width)


def update_states(
    recurrence: Recurrence,
    arrays: dict[str, jax.Array],
    out: jax.ShapeDtypeStruct,
    states: jax.Array,
    rows: jax.Array,
    snapshots: jax.Array | None,
    every: int | None,
    *,
    most_tokens: int,
    interpret: InterpretParams = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a step's tokens over the states of their rows.

    Args:
      recurrence: what a token does.
      arrays: what it reads: of all tokens, `[N, ...]`, or of none.
      out: the output's shape and dtype, `[N, H, V]`.
      states: `[slots, H, K, V]`, or `[slots, H, V, K]` where `key_axis` is 1; updated in place.
      rows: `i32[S, 8]`, of `plan_rows`.
      snapshots, every: `i32[S, n]`, the slots of the states on the way; see `StateBatch`.
      most_tokens: of a row in this step.

    Returns:
      The output, in which places of no token hold anything, and the pool.
    """
    _, num_heads, *head_shape = states.shape
    key_axis, width, num_slots = recurrence.key_axis, recurrence.width, states.shape[0]
    values = head_shape[1 - key_axis]
    shape = (head_shape[0], width) if key_axis == 0 else (width, head_shape[1])
    names = tuple(arrays)

    def kernel(*refs):
        states_ref, rows_ref, *others, out_ref, state_s, ready = refs
        snapshots_ref, *others = others if snapshots is not None else (None, *others)
        given = dict(zip(names, others, strict=True))
        first, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        span = recurrence.span(part)

        def place(slot):
            """The part of a slot's state."""
            return states_ref.at[slot, anew(head), *((slice(None), span) if key_axis == 0 else (span, slice(None)))]

        def write(state, slot):  # nobody waits for stores: by a bulk copy the thread block would end later
            store(place(slot), state.astype(states.dtype))

        def told(row):
            return row, *(rows_ref[row, i] for i in (SOURCE, TARGET, BEGIN, COUNT, BEGINS, POSITION, NEXT))

        def take_turn(i, turn):
            row, source, target, begin, count, begins, position, following = turn
            pl.when(i > 0)(plgpu.commit_smem)  # all threads have loaded the last turn's state
            pl.when(begins == 0)(lambda: plgpu.copy_gmem_to_smem(place(source), state_s, ready))
            vectors = recurrence.read(given, begin, head, part)

            def load():
                plgpu.barrier_wait(ready)
                return plgpu.load(state_s, layout=recurrence.layout, optimized=False).astype(jnp.float32)

            state = lax.cond(begins == 0, load, lambda: full(shape, 0.0, recurrence.layout))

            def update(i, vectors, state):
                y, state = recurrence.update(given, begin + i, head, part, vectors, state)
                store(out_ref.at[begin + i, head, span], y.astype(out.dtype))
                if snapshots_ref is not None:
                    after = position + i + 1
                    write_snapshot(
                        snapshots_ref, row, position, after, every, num_slots, lambda slot: write(state, slot)
                    )

                return state

            def step(i, carry):
                vectors, state = carry
                # The next token's come while this one is computed.
                following = recurrence.read(given, begin + jnp.minimum(i + 1, count - 1), head, part)
                return following, update(i, vectors, state)

            if most_tokens == 1:
                state = update(0, vectors, state)
            else:
                _, state = lax.fori_loop(0, count, step, (vectors, state))
            pl.when(target >= 0)(lambda: write(state, target))
            return told(following)

        lax.fori_loop(0, rows_ref[first, TURNS], take_turn, told(first))

    kernel.__name__ = recurrence.name
    ref = jax.new_ref(states)
    (y,) = plgpu.kernel(
        kernel,
        out_type=(out,),
        grid=(rows.shape[0], num_heads, values // width),
        grid_names=("row", "head", "part"),
        scratch_types=[plgpu.SMEM(shape, states.dtype), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(ref, rows, *(() if snapshots is None else (snapshots,)), *arrays.values())
    return y, jax.freeze(ref)
