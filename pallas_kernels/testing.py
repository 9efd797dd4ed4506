"""Inputs and comparisons for testing a paged attention kernel: the same for every backend.

>>> from pallas_kernels import reference, testing
>>> case = testing.Case(lengths=(5, 0, 17), new=(1, 0, 1), block_size=8)
>>> inputs = testing.make_inputs(case)
>>> testing.assert_close(reference.paged_attention(*inputs), testing.expected(case, inputs))
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.masks import WindowMask
from pallas_kernels.common.quantization import FORMATS


@dataclasses.dataclass(frozen=True)
class Case:
    """One test case. `new` tokens of each row belong to the step; `packed` chooses the token layout."""

    lengths: tuple[int, ...]
    new: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: Any = "float32"
    packed: bool = False
    padding: int = 0  # token places that belong to no row: beyond max(new) when padded, at the end when packed
    window: int | None = None
    sink_tokens: int | None = None  # seen beside the window
    chunk: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    mask: bool = False
    tree: bool = False  # of the new tokens
    spans: bool = False
    rank: int | None = None  # latent rows, whose first `rank` numbers are the values; give `scale` too
    joined: bool = False  # quantized rows of `rank` values have scales for the keys behind them, too
    stored_head_dim: int | None = None  # the pool's minor dimension, when it is padded
    max_blocks: int | None = None  # table width; default: just enough

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of this case that are not arrays."""
        options = {"window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}
        return options | {
            name: x for name in ("rank", "chunk", "sink_tokens") if (x := getattr(self, name)) is not None
        }

    def __str__(self) -> str:  # a readable test id
        changed = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]  # fmt: skip
        return ",".join(changed).replace(" ", "")


class Inputs(NamedTuple):
    """The positional arguments of `paged_attention`."""

    q: jax.Array
    kv: jax.Array
    tables: jax.Array
    lengths: jax.Array
    new: jax.Array


def make_inputs(case: Case, seed: int = 0, *, poison: float = np.nan) -> Inputs:
    """Random inputs of a case. Everything that must not be read is `poison`: blocks that no row owns, and tails past
    a row's length. Physical blocks are in random order, and unused table entries are the null block 0."""
    rng = np.random.default_rng(seed)
    held = [-(-length // case.block_size) for length in case.lengths]
    width = max(1, *held) if case.max_blocks is None else case.max_blocks
    num_blocks = sum(held) + 3
    stored = case.stored_head_dim or case.head_dim
    parts = 2 if case.rank is None else 1
    kv = np.full((num_blocks + 1, parts, case.num_kv_heads, case.block_size, stored), poison, np.float32)
    kv[0] = 0  # the null block is never written
    tables = np.zeros((len(held), width), np.int32)
    ids = iter(rng.permutation(num_blocks) + 1)
    for row, length in enumerate(case.lengths):
        for column in range(held[row]):
            block = tables[row, column] = next(ids)
            used = min(case.block_size, length - column * case.block_size)
            kv[block, :, :, :used] = 0  # the padding of the head dimension
            kv[block, :, :, :used, : case.head_dim] = rng.standard_normal(
                (parts, case.num_kv_heads, used, case.head_dim)
            )
    tokens = (sum(case.new) + case.padding,) if case.packed else (len(held), max(case.new) + case.padding)
    q = rng.standard_normal((*tokens, case.num_heads, case.head_dim))
    if case.joined:
        q[..., : case.rank] = 0
    dtype = jnp.dtype(case.dtype)
    return Inputs(
        jnp.asarray(q.astype(dtype)),
        jnp.asarray(kv.astype(dtype)),
        jnp.asarray(tables),
        jnp.asarray(case.lengths, jnp.int32),
        jnp.asarray(case.new, jnp.int32),
    )


def quantise(
    case: Case, inputs: Inputs, kind: str, scale_dtype: Any = None, seed: int = 0
) -> tuple[Inputs, jax.Array, Inputs]:
    """The inputs with their pool stored in a kind, its scales (by default in the kind's own dtype), and the inputs with
    what is stored as float32. Where the pool is NaN there is any number, under a scale that is NaN."""
    scale_dtype = FORMATS[kind].scale_dtype if scale_dtype is None else jnp.dtype(scale_dtype)
    kv = np.asarray(inputs.kv, np.float32)
    unread = np.isnan(kv).all(axis=-1)
    exact = np.where(unread[..., None], 0.0, kv)[..., : case.head_dim]
    stored, scale, decoded = (np.asarray(x) for x in _round_trip(case, exact, kind, scale_dtype))
    held = np.where(unread[..., None], np.nan, decoded)
    missing = FORMATS[kind].stored_dim(inputs.kv.shape[-1]) - stored.shape[-1]
    stored = np.pad(stored, [(0, 0)] * 4 + [(0, missing)])
    info = np.iinfo(stored.dtype)
    noise = np.random.default_rng(seed).integers(info.min, info.max, stored.shape, endpoint=True)
    stored = np.where(unread[..., None], noise.astype(stored.dtype), stored)
    hidden = unread.reshape(*unread.shape, *(1,) * (scale.ndim - unread.ndim))
    scale = np.where(hidden, np.asarray(np.nan, scale.dtype), scale)
    return inputs._replace(kv=jnp.asarray(stored)), jnp.asarray(scale), inputs._replace(kv=jnp.asarray(held))


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode(case: Case, stored: jax.Array, scale: jax.Array, kind: str) -> jax.Array:
    """Returns the numbers that a pool holds, as float32; joined rows have values and keys, each with its scale."""
    if case.joined:
        keys, values = scale[:, :1], scale[:, 1:]
        join = jnp.stack if FORMATS[kind].group_size is None else jnp.concatenate
        scale = join([values, keys], axis=-1)
    return FORMATS[kind].decode(stored, scale, case.head_dim, case.rank, axis=1)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _round_trip(case: Case, x: jax.Array, kind: str, scale_dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns stored numbers, their scales, and what they decode to, in one program instead of one per operation."""
    if case.joined:
        assert case.rank is not None
        stored, *scales = FORMATS[kind].encode_packed(x, scale_dtype, case.rank)
        scale = jnp.concatenate(scales, axis=1)
    else:
        stored, scale = FORMATS[kind].encode(x, scale_dtype, case.rank, axis=1)
    return stored, scale, decode(case, stored, scale, kind)


def make_options(case: Case, seed: int = 0) -> dict[str, Any]:
    """The keyword arguments of a case, its `sinks`, `mask`, `tree` and `spans` arrays included."""
    rng = np.random.default_rng(seed + 1)
    options = case.options
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32)
    if case.mask:
        inputs = make_inputs(case, seed)
        context = inputs.tables.shape[1] * case.block_size
        options["mask"] = jnp.asarray(rng.random((*inputs.q.shape[:-2], context)) < 0.7)
    tokens = [(row, nth) for row, count in enumerate(case.new) for nth in range(count)]
    axes = (len(tokens) + case.padding,) if case.packed else (len(case.new), max(case.new) + case.padding)
    places: Any = range(len(tokens)) if case.packed else tokens
    if case.tree:  # most hang from one of the last few, the others from the context
        parents = np.full(axes, 99, np.int32)
        for place, (_, nth) in zip(places, tokens, strict=True):
            parents[place] = nth - rng.integers(1, 4) if rng.random() < 0.8 else -1
        options["tree"] = jnp.asarray(parents)
    if case.spans:  # runs of up to seven tokens, some of them in no span
        spans, number = np.full(axes, 99, np.int32), 0
        for place, (_, nth) in zip(places, tokens, strict=True):
            number = 1 if nth == 0 else number + (rng.random() < 0.2)
            spans[place] = 0 if number % 4 == 0 else number
        options["spans"] = jnp.asarray(spans)
    return options


def hide_unseen(case: Case, inputs: Inputs) -> Inputs:
    """Puts NaN in all tokens before the window or chunk of each row's first new token, sink tokens aside. Blocks that
    hold nothing else may be free already: their entries are those of the null block, NaN too."""
    window_mask = WindowMask(case.window, case.chunk)
    kv, tables = np.array(inputs.kv), np.array(inputs.tables)
    kv[0] = np.nan
    for row, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        unseen = max(int(window_mask.first(jnp.int32(length - new))), 0)
        kept = case.sink_tokens or 0
        for position in range(kept, unseen):
            kv[tables[row, position // case.block_size], :, :, position % case.block_size] = np.nan
        tables[row, -(-kept // case.block_size) : unseen // case.block_size] = 0
    return inputs._replace(kv=jnp.asarray(kv), tables=jnp.asarray(tables))


def expected(case: Case, inputs: Inputs, **options: Any) -> Any:
    """Returns the reference's result, computed in float32 from the same (possibly rounded) inputs."""
    q, kv, *rest = inputs
    options = make_options(case) | options
    return reference.paged_attention(q.astype(jnp.float32), kv.astype(jnp.float32), *rest, **options)


POSITIONAL = {
    "paged_attention": ("q", "kv", "tables", "lengths", "new"),
    "write_kv": ("kv", "k", "v", "tables", "lengths", "new"),
    "write_and_attend": ("q", "k", "v", "kv", "tables", "lengths", "new"),
}


def run(op: Callable, *arrays: Any, interpret: Any = None, step_tokens: int | None = None, **options: Any) -> Any:
    """Returns what a backend's function of one of the names in `POSITIONAL` does, called as the public one is.

    `interpret` and `step_tokens` are for kernels.
    """
    names = POSITIONAL[op.__name__]
    call = bundle_call(**dict(zip(names, arrays, strict=False)), **options)
    others = {name: x for name, x in (("interpret", interpret), ("step_tokens", step_tokens)) if x is not None}
    if op.__name__ == "write_kv":
        return op(call.k, call.v, call.stored, call.batch, **others).pools
    if op.__name__ == "paged_attention":
        return op(call.q, *call[:4], **others)
    out, written = op(call.q, call.k, call.v, *call[:4], **others)
    return out, written.pools


# (bound for 99 % of the values, bound for all of them), relative to the magnitude of attention's output, about 1.
TOLERANCES = {
    "float32": (2e-6, 2e-5),
    "float16": (2e-3, 1e-2),
    "bfloat16": (1e-2, 5e-2),
}


def assert_close(actual: Any, desired: Any, *, dtype: Any = None) -> None:
    """Compare with tiered tolerances: nearly all values within a tight bound, the rest within a wider one. A NaN, or
    an infinity on one side only, fails. The bounds go by `actual`'s dtype unless another `dtype` is named."""
    tight, wide = TOLERANCES[jnp.dtype(dtype or actual.dtype).name]
    actual, desired = (np.asarray(x, np.float32) for x in (actual, desired))
    assert actual.shape == desired.shape, f"shape {actual.shape}, expected {desired.shape}"
    infinite = np.isinf(desired)
    np.testing.assert_array_equal(actual[infinite], desired[infinite])
    actual, desired = actual[~infinite], desired[~infinite]
    if not actual.size:
        return
    error = np.abs(actual - desired) / (1 + np.abs(desired))
    assert not np.isnan(error).any(), f"{np.isnan(error).sum()} of {error.size} values are NaN"
    assert error.max() <= wide, f"largest error {error.max():.2e} is above {wide:.0e}"
    loose = (error > tight).mean()
    assert loose <= 0.01, f"{loose:.1%} of the values differ by more than {tight:.0e} (largest {error.max():.2e})"
