"""The model that ships with the package has learnt what it was trained for."""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import models


def test_it_is_small():
    folder = pathlib.Path(models.__file__).parent.parent / "data" / "small"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6


def test_it_expects_python():
    """Nats per byte of Python source, far below what its letters' frequencies alone would give (about 3)."""
    model = models.small()
    source = np.frombuffer(pathlib.Path(argparse.__file__).read_bytes(), np.uint8)[: 8 * 200].astype(np.int32)

    @jax.jit
    def loss(model, tokens):
        scores = jax.nn.log_softmax(model(tokens[:, :-1])[0])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    source_loss = float(loss(model, source.reshape(8, 200)))
    junk_loss = float(loss(model, source[::-1].reshape(8, 200)))
    assert source_loss < 1.7 < junk_loss, (source_loss, junk_loss)


def test_its_tokens_are_bytes():
    config = models.small().config
    assert (config.byte_tokens, config.vocab_size, config.eos_ids) == (True, 256, (0,))


KINDS = [("int8", 0.005), ("float8_e4m3fn", 0.01), ("int4", 0.05)]


@pytest.mark.parametrize(("kind", "most"), KINDS if NIGHTLY else KINDS[:1])
def test_loss_with_a_quantised_cache(kind, most):
    """How much worse the next byte is guessed, as a share of the loss, when all keys and values are rounded."""
    model = models.small()
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
