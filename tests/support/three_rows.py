"""A small cache of three rows, one of them empty, on which every wrong call is tried."""

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import CacheConfig, LayerConfig

LAYERS = (LayerConfig(num_kv_heads=2, head_dim=8), LayerConfig(num_kv_heads=1, head_dim=4))
CONFIG = CacheConfig(layers=LAYERS, max_seqs=3, max_seq_len=20, num_blocks=8, block_size=4, dtype="float32")


def ones(*shape):
    return jnp.ones(shape)


def filled():
    kv = [ones(3, 6, c.num_kv_heads, c.head_dim) for c in LAYERS]
    return jax.jit(jaxkv.append)(jaxkv.init(CONFIG), kv, kv, jnp.array([6, 0, 3]))
