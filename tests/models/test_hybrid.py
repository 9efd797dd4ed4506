"""Families with layers that keep a state: through the cache what transformers computes, whatever a step's tokens."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.test_checkpoints import load, new_cache, step
from nightly import NIGHTLY
from support import fixtures

import jaxkv
from jaxkv import models
from jaxkv._files import safetensors
from jaxkv.models.loader import read_config

CONFIGS = {name: read_config(fixtures.DATA / name) for name in fixtures.NAMES}
HYBRID = [name for name, config in CONFIGS.items() if any(block.mixer is not None for block in config.blocks)]
KINDS = ("gate", "up", "down")
CHUNK = 8  # columns of a step; longest prompt 23


def read(name, columns):
    """Logits of every row's tokens, read in chunks of at most `columns`: by one row while others wait or decode."""
    wanted, model = fixtures.expected(name), load(name)
    cache, done = new_cache(model), [[] for _ in wanted]
    while any(len(out) < len(e.read) for out, e in zip(done, wanted, strict=True)):
        tokens, counts = np.full((len(wanted), columns), -1, np.int32), []
        for row, out, e in zip(tokens, done, wanted, strict=True):
            # A prompt in whole chunks; then one token at a time, so that rows at work on either are in one step.
            left = len(e.prompt) - len(out)
            counts.append(min(left, columns) if left > 0 else min(1, len(e.read) - len(out)))
            row[: counts[-1]] = e.read[len(out) : len(out) + counts[-1]]
        logits, cache = step(model, tokens, np.array(counts, np.int32), cache)
        for out, count, new in zip(done, counts, np.asarray(logits), strict=True):
            out.extend(new[:count])
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    return done


# By day packed steps, as engines take them, are in test_checkpoints.
@pytest.mark.parametrize("columns", [CHUNK, 1, 32] if NIGHTLY else [CHUNK])
@pytest.mark.parametrize("name", HYBRID if NIGHTLY else ["qwen3_next"])
def test_one_long_step_chunks_and_single_tokens(name, columns):
    for logits, e in zip(read(name, columns), fixtures.expected(name), strict=True):
        fixtures.assert_close(np.stack(logits), e.logits)


@pytest.mark.parametrize("name", HYBRID)
def test_what_a_row_keeps(name):
    """The last inputs of convolutions in the model's dtype, and states in float32."""
    config = CONFIGS[name]
    layers = config.layers_in(jnp.bfloat16)
    recurrent = [layer for layer in layers if layer.is_recurrent]
    assert recurrent and len(layers) == len(config.layers)
    kinds = {array.name: array.dtype for layer in recurrent for array in layer.states}
    assert kinds.pop("conv") == "bfloat16" and set(kinds.values()) <= {"float32"}
    mixers = [block.mixer for block in config.blocks if block.mixer is not None]
    assert recurrent == [mixer.layer("bfloat16") for mixer in mixers]
    assert config.layers_in("float32") == config.layers


def test_experts_of_qwen_3_5_in_one_tensor(tmp_path):
    """As they are published: the outputs of all gates and of all `up`s, `[experts, outputs, inputs]`."""
    shutil.copytree(fixtures.DATA / "qwen3_5_moe", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: np.array(x) for name, x in safetensors.read(path).items()}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts."
        gate, up, down = ([tensors.pop(f"{prefix}{n}.{kind}_proj.weight") for n in range(6)] for kind in KINDS)
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        tensors[f"{prefix}down_proj"] = np.stack(down)
    safetensors.write(path, tensors | {"mtp.norm.weight": np.ones(3, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "model"), load("qwen3_5_moe"))
