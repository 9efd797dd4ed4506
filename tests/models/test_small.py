"""The models that ship with the package have learnt what they were trained for."""

import argparse
import ast
import contextlib
import functools
import pathlib

import bundled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import models
from jaxkv._cli.generate import DEMO_PROMPTS


def test_they_are_small():
    folder = pathlib.Path(models.__file__).parent.parent / "data"
    for name, most in (("small", 4e6), ("recall", 1e6)):
        assert sum(file.stat().st_size for file in (folder / name).iterdir()) < most


def test_it_expects_python():
    """Nats per byte of Python source, far below what its letters' frequencies alone would give (about 3)."""
    model = bundled.small()
    source = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)[: 8 * 200].astype(np.int32)

    @jax.jit
    def loss(model, tokens):
        scores = jax.nn.log_softmax(model(tokens[:, :-1])[0])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    source_loss = float(loss(model, source.reshape(8, 200)))
    junk_loss = float(loss(model, source[::-1].reshape(8, 200)))
    assert source_loss < 1.7 < junk_loss, (source_loss, junk_loss)


def test_it_writes_python():
    """Its likeliest continuations of the demo's prompts, but for the last, unfinished line: three of five."""
    valid, prompts = 0, [list(prompt.encode()) for prompt in DEMO_PROMPTS]
    for prompt, tokens in zip(prompts, jaxkv.generate(bundled.small(), prompts, 96), strict=True):
        complete = bytes([*prompt, *tokens]).partition(b"\0")[0].rpartition(b"\n")[0]
        with contextlib.suppress(SyntaxError):
            ast.parse(complete)
            valid += len(complete) > len(prompt)
    assert valid >= 3


def test_its_tokens_are_bytes():
    config = models.small().config
    assert (config.byte_tokens, config.vocab_size, config.eos_ids) == (True, 256, (0,))


KINDS = [("int8", 0.005), ("float8_e4m3fn", 0.01), ("int4", 0.05), ("k5v3", 0.05)]


@pytest.mark.parametrize(("kind", "most"), KINDS if NIGHTLY else KINDS[:1])
def test_loss_with_a_quantised_cache(kind, most):
    """How much worse the next byte is guessed, as a share of the loss, when all keys and values are rounded."""
    model = bundled.small()
    source = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)[: 4 * 200].astype(np.int32)
    tokens = source.reshape(4, 200)

    @functools.partial(jax.jit, static_argnums=1)
    def loss(model, dtype):
        config = jaxkv.CacheConfig.from_model(model, max_seqs=4, max_seq_len=200, dtype=dtype)
        logits, _ = model(tokens, cache=jaxkv.extend(jaxkv.init(config), jnp.full(4, 200, jnp.int32)))
        log_probabilities = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1))

    exact, rounded = (float(loss(model, dtype)) for dtype in ("float32", kind))
    assert exact < rounded * 1.001 and rounded < exact * (1 + most), (exact, rounded)


def test_it_recalls():
    """Every value, wherever its key stands: right behind the first token, at the end, or next to another pair."""
    random, pairs = np.random.default_rng(0), 32
    tokens = random.integers(130, 192, (2, 1024 + 2 * pairs)).astype(np.int32)
    tokens[:, 0], tokens[:, 1024::2] = 0, 1
    place = 1 + 2 * np.sort(random.choice(511, pairs, replace=False))
    place[[0, 1, -1]] = 1, 3, 1022
    values = random.integers(66, 130, (2, pairs))
    for row, value in zip(tokens, values, strict=True):
        row[place], row[place + 1] = 2 + random.permutation(64)[:pairs], value
        row[1025::2] = row[place]
    logits, _ = jax.jit(lambda model, tokens: model(tokens))(models.recaller(), tokens)
    assert (np.asarray(logits)[:, 1025::2].argmax(axis=-1) == values).all()
