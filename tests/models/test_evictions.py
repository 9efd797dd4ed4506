"""What kvpress keeps of a prompt is kept here, and the tokens after it are those of transformers' model.

`tests/data/make_evictions.py` has made what is compared with: of each case the kept tokens and 16 greedy ones.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import fixtures

import jaxkv
from jaxkv import models, scores

RATIOS = (0.25, 0.5, 0.75)
METHODS = ("streaming_llm", "knorm", "keydiff", "snapkv", "tova", "expected_attention", "ada")
CASES = [(name, ratio) for name in METHODS for ratio in RATIOS]  # a row of the cache each
LAYERS, HEADS, NEW_TOKENS, LONGEST = 2, 2, 16, 112


@pytest.fixture(scope="module")
def expected():
    with np.load(fixtures.DATA / "evictions.npz") as file:
        return dict(file)


def make_config(model, rows, kind):
    layers = tuple(dataclasses.replace(layer, evict=kind) for layer in model.layer_configs)
    sizes = dict(max_seqs=rows, max_seq_len=LONGEST, max_tokens=rows * LONGEST, dtype="float32")
    return jaxkv.CacheConfig(layers=layers, **sizes)


@jax.jit
def look(model, prompt):
    """A cache of the prompt alone, and of each layer's tokens what each method gives them."""
    asked = []

    def noting(rope, q, k, positions):
        asked.append((q, rope(q, k, positions)[0]))
        return rope(q, k, positions)

    ropes = [block.attention.position_fn for block in model.layers]
    for block, rope in zip(model.layers, ropes, strict=True):
        block.attention.position_fn = functools.partial(noting, rope)
    cache = jaxkv.extend(jaxkv.init(make_config(model, 1, "layer")), [prompt.shape[1]])
    _, cache = model(prompt, cache=cache)
    worth = []
    for i, (plain, q) in enumerate(asked):

        def rotate(x, positions, rope=ropes[i]):
            return rope(x, x, positions)[0]

        snapkv = scores.snapkv(cache, layer=i, q=q, window_size=8)
        worth.append({
            "streaming_llm": scores.streaming_llm(cache, layer=i), "knorm": scores.knorm(cache, layer=i),
            "keydiff": scores.keydiff(cache, layer=i), "snapkv": snapkv, "tova": scores.tova(cache, layer=i, q=q),
            "expected_attention": scores.expected_attention(cache, layer=i, q=plain, rotate=rotate), "ada": snapkv,
        })  # fmt: skip
    return cache, worth


@jax.jit
def thin(model, cache, worth, count):
    """A row of the prompt for each case, thinned by heads; and the same before."""
    rows = make_config(model, len(CASES), "head")
    kv = [jaxkv.gather(cache, 0, layer=i, max_len=LONGEST) for i in range(LAYERS)]
    k, v = ([jnp.broadcast_to(one[part], (len(CASES), *one[part].shape)) for one in kv] for part in range(2))
    full = thinned = jaxkv.append(jaxkv.init(rows), k, v, jnp.full(len(CASES), count, jnp.int32))
    kept = jnp.array([int(90 * (1 - ratio)) for _, ratio in CASES], jnp.int32)
    for i, of_layer in enumerate(worth):
        score = jnp.concatenate([of_layer[name] for name, _ in CASES])
        competing = jnp.array([name == "ada" for name, _ in CASES])
        budget = jnp.where(competing[:, None], scores.ada(score, kept), kept[:, None])
        thinned = jaxkv.evict(thinned, scores=score, budget=budget, layer=i)
    return full, thinned


@jax.jit
def go_on(model, cache, tokens):
    """`i32[cases, NEW_TOKENS]`: greedy tokens, of which these are the first."""

    def step(carry, _):
        tokens, cache = carry
        logits, cache = model(tokens[:, None], cache=jaxkv.extend(cache, jnp.ones(len(CASES), jnp.int32)))
        return (jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache), tokens

    (_, cache), every = jax.lax.scan(step, (tokens, cache), length=NEW_TOKENS)
    return every.T, cache.failed


@pytest.fixture(scope="module")
def thinned(expected):
    model = models.load(fixtures.DATA / "llama3")
    cache, worth = look(model, expected["prompt"][None])
    return model, *thin(model, cache, worth, len(expected["prompt"]))


def test_the_same_tokens_are_kept(expected, thinned):
    """They stand in front, in their order, each with its own key and value."""
    _, full, after = thinned
    for i in range(LAYERS):
        before = [np.asarray(x[0]) for x in full.separate(i)]  # [K, C, D]
        keys_and_values = [np.asarray(x) for x in after.separate(i)]
        held = np.asarray(after.layers[i].held)
        for row, (name, ratio) in enumerate(CASES):
            kept = np.unpackbits(expected[f"{name}_{ratio}_kept"][i], axis=-1, count=90).astype(bool)
            assert held[row].tolist() == kept.sum(axis=1).tolist(), (name, ratio)
            for head in range(HEADS):
                for x, y in zip(keys_and_values, before, strict=True):
                    np.testing.assert_array_equal(x[row, head, : held[row, head]], y[head, :90][kept[head]])


def test_the_same_tokens_follow(expected, thinned):
    model, _, after = thinned
    wanted = np.stack([expected[f"{name}_{ratio}_tokens"] for name, ratio in CASES])
    tokens, failed = jax.device_get(go_on(model, after, wanted[:, 0]))
    assert not failed.any()
    np.testing.assert_array_equal(tokens, wanted)
