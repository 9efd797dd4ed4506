"""Steps some of whose tokens have no place: beyond their row's table or before it, or in a block that is none."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import reference
from pallas_kernels.common.quantization import FORMATS

# A row each, of a table of two blocks: full blocks and tokens behind them; how many are of the step; the entry of the
# second block, None where it is reserved; and which tokens of the step have a place.
ROWS = (
    (2, 4, 8, None, slice(0, 4)),
    (1, 2, 4, 0, slice(0, 2)),
    (1, 1, 2, -3, slice(0, 1)),
    (1, 4, 3, 2**30, slice(0, 0)),
    (2, 0, 3, None, slice(0, 3)),
    (2, 3, 2, None, slice(0, 0)),
    (0, 2, 3, None, slice(1, 3)),
    (1, 1, 1, None, slice(0, 1)),
    (2, 1, 1, None, slice(0, 0)),
)
DECODE_ROWS = (
    (1, 1, 1, None, slice(0, 1)),
    (2, 1, 1, None, slice(0, 0)),
    (1, 1, 1, 0, slice(0, 0)),
    (2, 0, 1, None, slice(0, 1)),
    (1, 4, 1, -3, slice(0, 0)),
    (1, 1, 1, 2**30, slice(0, 0)),
    (0, 0, 1, None, slice(0, 0)),
)


class Pool(NamedTuple):
    """How a pool stores its numbers."""

    format: str
    num_kv_heads: int = 2
    head_dim: int = 64
    rank: int | None = None
    joined: bool = False  # keys behind values, each with scales of their own


POOLS = {
    "bfloat16": Pool("bfloat16"),
    "float16": Pool("float16"),
    "float32": Pool("float32", head_dim=40),
    "int8": Pool("int8"),
    "float8": Pool("float8_e4m3fn"),
    "int4": Pool("int4"),
    "latent": Pool("bfloat16", 1, 96, rank=64),
    "latent int8": Pool("int8", 1, 96, rank=64),
    "latent int4": Pool("int4", 1, 96, rank=64),
    "joined int8": Pool("int8", 2, 80, rank=40, joined=True),
    "joined int4": Pool("int4", 2, 256, rank=128, joined=True),
}


class Write(NamedTuple):
    """The arguments of `write_kv`, by position and by name, and the pools that it must leave, scales included."""

    arguments: tuple
    options: dict[str, Any]
    expected: list


def make_write(
    pool: Pool, packed: bool, block_size: int = 8, stored_head_dim: int | None = None, given_rows: tuple = ROWS
) -> Write:
    """Draws a pool of any numbers, and a step's tokens. What must be left is what the reference writes of those tokens
    alone that have a place."""
    rng, rows, format = np.random.default_rng(0), len(given_rows), FORMATS[pool.format]
    width = format.stored_dim(pool.head_dim) if stored_head_dim is None else stored_head_dim
    blocks = 2 * rows + 1
    shape = (blocks, 1 if pool.rank else 2, pool.num_kv_heads, block_size, width)
    numbers = np.where(np.arange(width) < format.stored_dim(pool.head_dim), rng.integers(0, 100, shape), 0)
    kv, options = jnp.asarray(numbers, format.storage_dtype), {}
    if format.is_quantized:
        of_scales = format.scale_shape(shape, pool.head_dim, pool.rank, pool.joined)
        scale = jnp.asarray(rng.random(of_scales), format.scale_dtype)
        options = {"kind": format.kind, "kv_scale": scale}
    if pool.rank:
        options["rank"] = pool.rank
    tables = (rng.permutation(blocks - 1) + 1).reshape(rows, 2).astype(np.int32)
    for row, (*_, entry, _) in enumerate(given_rows):
        tables[row, 1] = tables[row, 1] if entry is None else entry
    lengths, new = np.array([(full * block_size + more, new) for full, more, new, *_ in given_rows], np.int32).T
    count, longest = int(new.sum()), int(new.max())
    tokens = rng.standard_normal((2, count, pool.num_kv_heads, pool.head_dim)).astype("float32")
    row, nth = np.repeat(np.arange(rows), new), np.concatenate([np.arange(n) for n in new])
    given = tokens
    if not packed:
        given = np.zeros((2, rows, longest, *tokens.shape[2:]), tokens.dtype)
        given[:, row, nth] = tokens
    first, end = (np.array([getattr(fits, name) for *_, fits in given_rows], np.int32) for name in ("start", "stop"))
    fitting = tokens[:, (nth >= first[row]) & (nth < end[row])]
    k, v, fitting_k, fitting_v = (jnp.asarray(x, jnp.bfloat16) for x in (*given, *fitting))
    if pool.rank:
        v = fitting_v = None
    expected = reference.write_kv(
        kv, fitting_k, fitting_v, jnp.asarray(tables), jnp.asarray(lengths - new + end), jnp.asarray(end - first),
        **options,
    )  # fmt: skip
    arguments = (kv, k, v, *map(jnp.asarray, (tables, lengths, new)))
    return Write(arguments, options, list(expected) if format.is_quantized else [expected])


def check_write(write: Write, written: Any) -> None:
    """Compares whole pools, to the bit."""
    written = list(written) if isinstance(written, tuple) else [written]
    for got, wanted in zip(written, write.expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
