"""A generation that is interrupted goes on with the same tokens, wherever its keys and values were meanwhile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import on_device

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

PROMPTS = [np.random.default_rng(i).integers(0, 64, length).tolist() for i, length in enumerate((21, 5, 16))]


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        vocab_size=64, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=256,
        windows=(None, 6), ropes=(Rope(), Rope()), attention_scale=0.25,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


@functools.partial(jax.jit, donate_argnames="cache")
def step(model, tokens, counts, cache):
    """The likeliest next token of each row; `tokens[s, :counts[s]]` are new."""
    cache = jaxkv.extend(cache, counts)
    logits, cache = model(tokens, cache=cache, logits_at=jnp.maximum(counts - 1, 0))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


def go_on(model, cache, tokens, steps, rows=(0, 1, 2)):
    """The tokens that follow `tokens`, the last of the sequences in `rows`, which are not in the cache yet."""
    out = [[] for _ in rows]
    counts = np.isin(np.arange(cache.config.max_seqs), rows).astype(np.int32)
    for _ in range(steps):
        column = np.zeros((cache.config.max_seqs, 1), np.int32)
        column[list(rows), 0] = tokens
        tokens, cache = step(model, column, counts, cache)
        tokens = np.asarray(tokens)[list(rows)]
        for one, token in zip(out, tokens.tolist(), strict=True):
            one.append(token)
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    return out, cache


def start(model, **fields):
    """All prompts prefilled and five tokens further, and the last tokens of each."""
    fields = {"max_seqs": 3, "max_seq_len": 64, "num_blocks": 40, "block_size": 4} | fields
    cache = on_device(jaxkv.init(jaxkv.CacheConfig.from_model(model, **fields)))
    padded = np.zeros((3, 32), np.int32)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    tokens, cache = step(model, padded, np.array([len(p) for p in PROMPTS], np.int32), cache)
    out, cache = go_on(model, cache, np.asarray(tokens)[:3], 5)
    return cache, [tokens[-1] for tokens in out]


def swapped(model, cache, path):
    cache, host = jaxkv.swap_out(cache, [2, 0, 1])
    assert cache.blocks_in_use == 0
    return jaxkv.swap_in(cache, [2, 0, 1], host), (0, 1, 2)


def swapped_to_other_rows(model, cache, path):
    cache, host = jaxkv.swap_out(cache, [0, 1, 2])
    return jaxkv.swap_in(cache, [2, 0, 1], host), (2, 0, 1)


def saved(model, cache, path):
    jaxkv.save(path, cache, model="m")
    return jaxkv.load(path, model="m"), (0, 1, 2)


def restored_in_other_blocks(model, cache, path):
    jaxkv.save(path, cache)
    config = jaxkv.CacheConfig.from_model(model, max_seqs=4, max_seq_len=50, num_blocks=90, block_size=2)
    return jaxkv.load(path, config, rows=[3, 0, 1]), (3, 0, 1)


def restored_into_a_running_cache(model, cache, path):
    jaxkv.save(path, cache, rows=[1, 2, 0])
    other = jaxkv.init(cache.config.replace(max_seqs=4, num_blocks=60))
    other = jaxkv.extend(other, [0, 9, 0, 0])
    other = jaxkv.load(path, into=other, rows=[0, 2, 3])
    return jaxkv.free(other, [1]), (3, 0, 2)


@pytest.mark.parametrize(
    "way", [swapped, swapped_to_other_rows, saved, restored_in_other_blocks, restored_into_a_running_cache]
)
def test_the_same_tokens_after_a_break(model, way, tmp_path):
    cache, last = start(model)
    expected, _ = go_on(model, *start(model), 12)
    cache, rows = way(model, cache, tmp_path / "cache.safetensors")
    actual, _ = go_on(model, cache, last, 12, rows)
    assert actual == expected
