"""Families of 2025 and 2026 whose layers differ: what their config.json says of each, and what is refused."""

import copy
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import fixtures

from jaxkv.models import config_reader
from jaxkv.nnx import Attention

PUBLISHED = json.loads((fixtures.DATA / "published.json").read_text())


def parse(name, **fields):
    """A published config, with fields of its text model changed."""
    config = copy.deepcopy(PUBLISHED[name]["config"])
    config["text_config"] |= fields
    return config_reader.parse(config)


def refuses(name, says, **fields):
    with pytest.raises(ValueError, match=says) as caught:
        parse(name, **fields)
    assert "config.json" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_llama_4():
    scout, maverick = parse("llama-4-scout-17b-16e"), parse("llama-4-maverick-17b-128e")
    for config, normed in ((scout, 1e-5), (maverick, None)):
        assert [layer.chunk for layer in config.layers] == [8192, 8192, 8192, None] * 12
        assert [rope.norm_eps for rope in config.ropes[:4]] == [normed] * 3 + [None]
        assert [rope.temperature_beta for rope in config.ropes[:4]] == [0, 0, 0, 0.1]
        assert config.ropes[3].temperature_length == 8192 and config.ropes[3].rotated_dim(128) == 0
        assert (config.mlp_dim, config.experts.shared_dim, config.experts.weigh_inputs) == (16384, 8192, True)
    assert (sum(scout.expert_layers), maverick.expert_layers[:4]) == (48, (False, True, False, True))
    assert (scout.period, maverick.period, scout.ropes[0].scaling) == (4, 4, "llama3")
    assert parse("llama-4-scout-17b-16e", attn_temperature_tuning=4, no_rope_layers=[]) == scout  # as at first
    assert parse("llama-4-scout-17b-16e", attn_temperature_tuning=False).ropes[3].temperature_beta == 0
    name = "llama-4-scout-17b-16e"
    refuses(name, "attn_temperature_tuning = 3", attn_temperature_tuning=3)
    refuses(name, "floor_scale = 0.5|floor_scale .* 1", floor_scale=0.5)
    refuses(name, "floor_scale = 1.5", floor_scale=1.5)
    refuses(name, "moe_layers = .*48", moe_layers=[48])
    refuses(name, "layer_types = .*full_attention or chunked_attention", layer_types=["sliding_attention"] * 48)
    refuses(
        name, "layer_types = .*attention_chunk_size", layer_types=["chunked_attention"] * 48, attention_chunk_size=None
    )
    refuses(name, "no_rope_layers", no_rope_layers=[1])


def test_chunks_without_a_cache():
    """Each chunk is what it is alone."""
    attention = Attention(8, 2, chunk=3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    apart = [attention(x[i : i + 3])[0] for i in (0, 3, 6)]
    np.testing.assert_allclose(attention(x)[0], jnp.concatenate(apart), atol=1e-6)
    attention.chunk = None
    assert not np.allclose(attention(x)[0], jnp.concatenate(apart), atol=1e-3)
