"""What the tests of files save: caches of every layout, and what a row of one holds."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._core.blocks.tables import release_windows

LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=5, window=6, dtype="float32"),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=5, window=4, shares_with=1),
)


def config(**fields):
    fields = {"layers": LAYERS, "max_seqs": 5, "max_seq_len": 41, "num_blocks": 30, "block_size": 4} | fields
    return jaxkv.CacheConfig(**fields)


def contiguous(**fields):
    return config(layout="contiguous", num_blocks=None, block_size=None, **fields)


CONFIGS = {
    "blocks of 4": config(),
    "blocks of 1": config(block_size=1, num_blocks=120),
    "blocks of 7, padded": config(block_size=7, head_dim_multiple=16, dtype="float16"),
    "keys and values joined": config(block_size=3, num_blocks=40, head_dim_multiple=32, join_kv=True),
    "contiguous": contiguous(),
}


def append(cache, counts, seed=0):
    """Random tokens, different ones in every layer and row; of one shape, so that little is compiled."""
    random, places = np.random.default_rng(seed), max(24, *counts)
    kv = [
        [jnp.asarray(random.normal(size=(len(counts), places, c.num_kv_heads, c.head_dim)), jnp.float32)
         if c.shares_with is None else None for c in cache.config.layers] for _ in "kv"
    ]  # fmt: skip
    return jax.jit(jaxkv.append)(cache, *kv, jnp.asarray(counts))


def filled(config):
    """Prompts of odd lengths, an empty row, and forks that share blocks and then go on alone."""
    cache = append(jaxkv.init(config), [23, 0, 8, 1, 0])
    cache = append(jax.jit(jaxkv.fork)(cache, jnp.array(0), jnp.array(4)), [2, 0, 5, 0, 3], seed=1)
    jaxkv.check(cache)
    return cache  # 25, 0, 13, 1 and 26 tokens


def contents(cache, row):
    """The bytes that a row holds in each layer, read off tables and pools: with NumPy, for that compiles nothing."""
    for i, layer in enumerate(cache.config.layers):
        tables, kv, d = cache.layer(i).tables, np.asarray(cache.pool(i).kv), layer.head_dim
        if kv.shape[1] == 1:  # values, then keys, in one row
            kv = np.concatenate([kv[..., d : 2 * d], kv[..., :d]], axis=1)
        elif kv.shape[2] < layer.num_kv_heads:  # two heads in one row
            kv = np.concatenate([kv[..., :d], kv[..., d : 2 * d]], axis=2)
        length, size = int(tables.lengths[row]), cache.config.block_size
        first = 0 if layer.window is None else max(0, length + 1 - layer.window)  # what later tokens see
        position = np.arange(first, length)
        yield kv[np.asarray(tables.tables)[row, position // size], :, :, position % size, :d].tobytes()


def assert_same(old, new, rows=None):
    """`rows[i]` of the new cache is row i of the old one, bit by bit; None: not there."""
    jaxkv.check_invariants(new)
    jaxkv.check(new)
    for row, other in enumerate(range(len(old.lengths)) if rows is None else rows):
        if other is not None:
            assert int(new.lengths[other]) == int(old.lengths[row])
            assert list(contents(old, row)) == list(contents(new, other))


def shared(cache):
    """Blocks that several rows share, in each group, of those that the next step will not give back."""
    return [group["blocks_shared"] for group in jaxkv.stats(release_windows(cache))["groups"]]
