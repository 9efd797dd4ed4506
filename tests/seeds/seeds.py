"""The contracts of five other systems that jaxkv meets: one test per promise, named by the system and the number.

S0: one layer's cache in two layouts (ferrum). S1: 16-token blocks, no allocation in the loop (cjc-runtime). S2: layers
that differ (TensorRT Edge-LLM). S3: what a kernel sees (Mojo). S4: one sequence's table and its allocator (ferrum).
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv

LAYERS = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=8), jaxkv.LayerConfig(num_kv_heads=1, head_dim=16))
LAYOUTS = ("paged", "contiguous")
ROWS = 3


def make_config(layout="paged", **fields):
    sizes = {"num_blocks": 12, "block_size": 4} if layout == "paged" else {"layout": "contiguous"}
    fields = {"layers": LAYERS, "max_seqs": ROWS, "max_seq_len": 20, "dtype": "float32"} | sizes | fields
    return jaxkv.CacheConfig(**fields)


def random_kv(places, layers=LAYERS, seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    return [
        [jnp.asarray(rng.standard_normal((rows, places, c.num_kv_heads, c.head_dim)), jnp.float32) for c in layers]
        for _ in range(2)
    ]


def counts(*numbers):
    return jnp.array(numbers, jnp.int32)


def filled(layout="paged", lengths=(9, 0, 4)):
    """A cache of rows of these lengths, and what was put into it."""
    k, v = random_kv(max(lengths))
    return jax.jit(jaxkv.append)(jaxkv.init(make_config(layout)), k, v, counts(*lengths)), k, v


def step(cache, q, k, v, num_tokens):
    cache = jaxkv.extend(cache, num_tokens)
    return jaxkv.attention(q, k, v, cache, layer=0)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
