"""Attention over a paged cache against attention over a dense one, at several fills, side by side in one run.

    python benchmarks/attention.py                           # decode steps of real models' shapes
    python benchmarks/attention.py --new 256 --rows 2        # chunks of prompts instead
    python benchmarks/attention.py --shapes phi2 --dtypes float32 --fills 1 50

`paged` is `pallas_kernels.paged_attention` with the implementation that this machine gets by default; `dense` is
`jax.nn.dot_product_attention` over all places of a row, masked to its length; `flax` is a decode step of
`nnx.MultiHeadAttention`, and `paged+write` is what does the same here, the write of the new token included.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from _harness import copy_contender, save, table, time_side_by_side
from flax import nnx

from pallas_kernels import SHAPES, explain, paged_attention, write_and_attend


def make_paged(shape, rows: int, places: int, new: int, block_size: int, dtype, rng):
    """Queries, a pool with every place of every row, and tables that scatter the rows' blocks over it."""
    width = -(-places // block_size)
    q = jnp.asarray(rng.standard_normal((rows, new, shape.num_heads, shape.head_dim), np.float32), dtype)
    pool = (rows * width + 1, 2, shape.num_kv_heads, block_size, shape.head_dim)
    kv = jnp.asarray(rng.standard_normal(pool, np.float32), dtype)
    tables = jnp.asarray(1 + rng.permutation(rows * width).reshape(rows, width), jnp.int32)
    return q, kv, tables


def dense_contender(shape, q, places: int, length: int, dtype):
    """The usual way: a cache `[rows, places, K, D]`, all of it read, and a mask."""
    rows, new = q.shape[:2]
    keys = jnp.ones((rows, places, shape.num_kv_heads, shape.head_dim), dtype)
    values = keys + 1
    position = length - new + jnp.arange(new)
    mask = jnp.broadcast_to(jnp.arange(places)[None] <= position[:, None], (rows, 1, new, places))
    attend = jax.jit(lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask))
    return lambda: attend(q, keys, values, mask)


def flax_contender(shape, rows: int, places: int, dtype):
    """A decode step of Flax's own module. Narrow inputs, so that attention is what is timed, not the projections."""
    features = 16
    module = nnx.MultiHeadAttention(
        shape.num_heads, features, shape.num_heads * shape.head_dim, num_kv_heads=shape.num_kv_heads, decode=True,
        dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0),
    )  # fmt: skip
    module.init_cache((rows, places, features), dtype)
    x = jnp.ones((rows, 1, features), dtype)
    graph, state = nnx.split(module)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        module = nnx.merge(graph, state)
        return module(x), nnx.state(module)

    def run():
        nonlocal state
        out, state = step(state, x)
        return out

    return run


def write_contender(q, kv, tables, lengths, new, num_kv_heads: int):
    step = jax.jit(write_and_attend, donate_argnums=3)
    k = jnp.ones((*q.shape[:2], num_kv_heads, q.shape[-1]), q.dtype)

    def run():
        nonlocal kv
        out, kv = step(q, k, k, kv, tables, lengths, new)
        return out

    return run


def measure(name: str, dtype, fill: int, arguments) -> dict:
    shape, rows, places = SHAPES[name], arguments.rows, arguments.places
    length = max(arguments.new, places * fill // 100)
    rng = np.random.default_rng(0)
    q, kv, tables = make_paged(shape, rows, places, arguments.new, arguments.block_size, dtype, rng)
    lengths, new = (jnp.full(rows, n, jnp.int32) for n in (length, arguments.new))
    copied, copy = copy_contender()
    attend = jax.jit(paged_attention)
    contenders = {
        "copy": copy,
        "paged": lambda: attend(q, kv, tables, lengths, new),
        "dense": dense_contender(shape, q, places, length, dtype),
    }
    if arguments.new == 1:
        # The pool is donated: this contender has one of its own.
        contenders["paged+write"] = write_contender(q, kv + 0, tables, lengths, new, shape.num_kv_heads)
        contenders["flax"] = flax_contender(shape, rows, places, dtype)
    seconds = time_side_by_side(contenders, arguments.repeats)
    read = rows * length * 2 * shape.num_kv_heads * shape.head_dim * jnp.dtype(dtype).itemsize
    result = {"shape": name, "dtype": dtype, "fill %": fill, "length": length}
    result |= {f"{name} ms": seconds[name] * 1e3 for name in contenders if name != "copy"}
    result["dense / paged"] = seconds["dense"] / seconds["paged"]
    if arguments.new == 1:
        result["flax / paged+write"] = seconds["flax"] / seconds["paged+write"]
        result["GB/s"] = read / seconds["paged"] / 1e9
        result["of copy"] = result["GB/s"] / (copied / seconds["copy"] / 1e9)
    result["implementation"] = explain(q=q, kv=kv, tables=tables, lengths=lengths, new=new).implementation
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama3-8b", "llama3.2-1b", "gemma3-1b"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--fills", nargs="+", type=int, default=[10, 50, 100], help="percent of the places in use")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--places", type=int, default=2048, help="room for each row")
    parser.add_argument("--new", type=int, default=1, help="tokens of each row in this step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    grid = [
        (shape, dtype, fill) for shape in arguments.shapes for dtype in arguments.dtypes for fill in arguments.fills
    ]
    results = [measure(*point, arguments) for point in grid]
    table(results)
    facts = {name: getattr(arguments, name) for name in ("places", "new", "block_size", "repeats")}
    save("attention" if arguments.new == 1 else "attention_chunks", results, max_seqs=arguments.rows, **facts)


if __name__ == "__main__":
    main()
