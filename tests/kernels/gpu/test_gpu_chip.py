"""What only the chip can show: the front door's own choice, at the sizes of real models, against XLA's path.

The numerics of the whole matrix of shapes are `python benchmarks/gpu.py --check`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import SHAPES, testing

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")


def inputs(shape, lengths, new, block_size, packed):
    """As `testing.make_inputs`, made on the device: too much for NumPy."""
    key = jax.random.key(0)
    rows, held = len(lengths), -(-max(lengths) // block_size)
    stored = -(-shape.head_dim // 64) * 64
    tokens = (sum(new),) if packed else (rows, max(new))
    q = jax.random.normal(key, (*tokens, shape.num_heads, shape.head_dim), jnp.bfloat16)
    kv = jax.random.normal(key, (rows * held + 1, 2, shape.num_kv_heads, block_size, stored), jnp.bfloat16)
    tables = (jax.random.permutation(key, rows * held) + 1).reshape(rows, held)
    return q, kv, tables.astype(jnp.int32), jnp.asarray(lengths, jnp.int32), jnp.asarray(new, jnp.int32)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b", "qwen2-7b", "qwen2.5-14b", "gemma2-2b", "phi2"])
@pytest.mark.parametrize(
    ("lengths", "new", "packed"),
    [
        ((32_000, 1, 300, 0, 4097), (1, 1, 1, 0, 1), False),  # one long row
        (tuple(range(1, 2000, 31)), (1,) * 65, False),  # many short ones
        ((9000, 70, 3000, 512), (1, 70, 1000, 512), True),  # mixed
    ],
    ids=["long", "many", "mixed"],
)
def test_against_xla(name, block_size, lengths, new, packed):
    shape = SHAPES[name]
    arrays = inputs(shape, lengths, new, block_size, packed)
    options = dict(window=shape.window, soft_cap=shape.soft_cap, return_lse=True)
    names = dict(zip(("q", "kv", "tables", "lengths", "new"), arrays, strict=True))
    choice = pallas_kernels.explain(**names, **options)
    if choice.implementation != "gpu":
        pytest.skip(choice.reason)  # a GPU older or newer than Hopper
    out, lse = jax.jit(lambda *a: pallas_kernels.paged_attention(*a, **options))(*arrays)
    expected, expected_lse = pallas_kernels.paged_attention(*arrays, **options, implementation="xla")
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse, dtype="bfloat16")


def test_every_call_gives_the_same_bits():
    """No sum depends on which thread block ends first."""
    shape = SHAPES["llama3-8b"]
    arrays = inputs(shape, (5000, 7, 900), (1, 1, 1), 16, False)
    attend = jax.jit(lambda *a: pallas_kernels.paged_attention(*a, implementation="gpu"))
    first, *others = (np.asarray(attend(*arrays), np.float32) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)
