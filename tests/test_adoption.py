"""Three decoders with dense caches, each in the style of codebases that there are, and what it takes to page them.

The dense ones and the paged ones stand side by side in `tests/adopted`; `benchmarks/adoption.py` times them.
"""

import dataclasses
import difflib
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY

FOLDER = pathlib.Path(__file__).parent / "adopted"
STYLES = ("nnx", "linen", "flax")
MOST_LINES = 12
STEPS = 8
COUNTS = np.array([9, 3, 6], np.int32)


def changed_lines(style):
    """The lines of code that the paged decoder has and the dense one has not."""
    dense, paged = ((FOLDER / f"{style}_{kind}.py").read_text().splitlines() for kind in ("dense", "paged"))
    new = [line[2:] for line in difflib.ndiff(dense, paged) if line.startswith("+ ")]
    return [line for line in new if line.strip() and not line.strip().startswith("#")]


def prompts(style):
    """What `generate` of a style takes: three prompts, as its codebases have them."""
    tokens = np.random.default_rng(0).integers(1, 61, (3, 9)).astype(np.int32)
    places = np.arange(9)[None]
    if style == "nnx":  # padded on the left
        is_token = places >= 9 - COUNTS[:, None]
        return jnp.where(is_token, tokens, 0), jnp.asarray(is_token, jnp.int32)
    if style == "linen":  # padded on the right
        return jnp.where(places < COUNTS[:, None], tokens, 0), jnp.asarray(COUNTS)
    return (jnp.asarray(tokens),)  # of one length


def test_count_of_changed_lines():
    for style in STYLES:
        lines = changed_lines(style)
        assert 5 < len(lines) <= MOST_LINES, (style, lines)


@pytest.mark.parametrize("style", STYLES if NIGHTLY else ["nnx"])
def test_tokens_are_equal(style):
    outputs = {}
    for kind in ("dense", "paged"):
        module = importlib.import_module(f"adopted.{style}_{kind}")
        config = dataclasses.replace(module.Config(), num_layers=2)
        model = module.make(config)
        if isinstance(model, nnx.Module):
            nnx.update(model, jax.tree.map(sharpened, nnx.state(model, nnx.Param)))
        else:
            model = (model[0], jax.tree.map(sharpened, model[1]))
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as in a user's session
            outputs[kind] = np.asarray(module.generate(model, config, *prompts(style), STEPS))
    np.testing.assert_array_equal(outputs["paged"], outputs["dense"])
    rows = outputs["dense"].tolist()  # they say something, and not all the same
    assert len(set(map(tuple, rows))) > 1 and len(np.unique(rows)) > 3, rows


def sharpened(x):
    """Parameters that make a model say something, not the token it was given again and again."""
    if x.shape[0] == 61:  # the embedding, which the blocks are to drown
        return x
    noise = np.random.default_rng(x.size).normal(size=x.shape)
    return x + jnp.asarray(0.4 * noise, x.dtype)
