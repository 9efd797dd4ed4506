"""Families of 2025 and 2026 whose layers differ: what their config.json says of each, and what is refused."""

import copy
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import fixtures

import jaxkv
from jaxkv import LayerConfig, models
from jaxkv._files import safetensors
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


def test_gemma_4():
    big, mixed, small = (parse(f"gemma-4-{name}-it") for name in ("31b", "26b-a4b", "e2b"))
    local, full = LayerConfig(num_kv_heads=16, head_dim=256, window=1024), LayerConfig(num_kv_heads=4, head_dim=512)
    assert big.layers == (*[local] * 5, full) * 10 and big.period == 6 and big.per_layer is None
    assert [block.values_are_keys for block in big.blocks] == [False, False, False, False, False, True] * 10
    assert (big.ropes[5].scaling, big.ropes[5].partial_rotary_factor, big.ropes[0].theta) == ("proportional", 0.25, 1e4)
    assert (mixed.experts.count, mixed.experts.beside_mlp, mixed.mlp_dim, mixed.layers[5].num_kv_heads) == (
        128, True, 2112, 2,
    )  # fmt: skip
    assert [layer.shares_with for layer in small.layers[13:20]] == [None, None, 13, 13, 13, 13, 14]
    assert (small.blocks[14].mlp_dim, small.blocks[15].mlp_dim, small.per_layer.dim, small.period) == (
        None, 12288, 256, 35,
    )  # fmt: skip
    again = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}  # as transformers 5.24 says
    changed = dict(per_layer_config=again, global_head_dim=None, num_global_key_value_heads=None)
    assert parse("gemma-4-31b-it", **changed) == big
    assert parse("gemma-4-31b-it", layer_types=None) == big
    name = "gemma-4-31b-it"
    refuses(name, "use_bidirectional_attention = 'all'", use_bidirectional_attention="all")
    refuses(name, "num_kv_shared_layers = 60.*window", num_kv_shared_layers=60)
    refuses(name, "num_kv_shared_layers = 55.*window None", num_kv_shared_layers=55)
    refuses(name, "lacks the field num_experts, which enable_moe_block", enable_moe_block=True)
    refuses(name, "layer_types", layer_types=["chunked_attention"] * 60)
    refuses(name, "layer 3 in per_layer_config .*rank = 3", per_layer_config={"3": {"rank": 3}})
    refuses(name, "per_layer_config .* 60 = ", per_layer_config={"60": {"head_dim": 8}})
    refuses(name, "attn_logit_softcapping = 50.0", attn_logit_softcapping=50.0)


def test_gemma_3n():
    config = parse("gemma-3n-e4b-it")
    assert (config.streams.count, config.streams.active, config.streams.rank, config.per_layer.dim) == (4, 0, 64, 256)
    assert [block.gate_sparsity for block in config.blocks] == [0.95] * 10 + [0.0] * 25
    assert [layer.shares_with for layer in config.layers[18:25]] == [None, None, 18, 18, 18, 18, 19]
    assert config.windows[:5] == (512, 512, 512, 512, None) and config.logit_soft_cap == 30.0
    left_out = dict(activation_sparsity_pattern=None, layer_types=None, intermediate_size=16384)
    assert parse("gemma-3n-e4b-it", **left_out) == config
    name = "gemma-3n-e4b-it"
    refuses(name, "activation_sparsity_pattern", activation_sparsity_pattern=[0.5])
    refuses(name, "activation_sparsity_pattern = .*below 1", activation_sparsity_pattern=[1.0] * 35)
    refuses(name, "intermediate_size = .*35 layers", intermediate_size=[8])
    refuses(name, "altup_active_idx", altup_active_idx=4)
    refuses(name, "hidden_size_per_layer_input = 0", hidden_size_per_layer_input=0)
    refuses(name, "num_kv_shared_layers = 35", num_kv_shared_layers=35)


SMALL_31 = {"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 4,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9, "sliding_window": None,
            "vocab_size": 131072}  # fmt: skip


@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_mistral_3_is_what_it_nests(family):
    text = SMALL_31 | {"model_type": family}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
             "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
             "vision_feature_layer": -1, "vision_config": {"model_type": "pixtral"}}  # fmt: skip
    config = config_reader.parse(outer | {"text_config": text})
    assert config == config_reader.parse(text) and config.family == family
    with pytest.raises(ValueError, match=r"model_type = 'llama'.*mistral and ministral3 and mistral4"):
        config_reader.parse(outer | {"text_config": text | {"model_type": "llama"}})


def test_mistral_4():
    fields = json.loads((fixtures.DATA / "mistral4" / "config.json").read_text())["text_config"]
    config = config_reader.parse(fields)
    rope, experts = config.ropes[0], config.experts
    assert (rope.temperature_beta, rope.original_max_position, rope.interleaved) == (0.5, 8, True)
    assert (experts.scores, experts.normalise, config.expert_layers) == ("softmax", True, (False, True, True))
    size = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64,
            "num_attention_heads": 4, "max_position_embeddings": 1 << 20, "model_type": "mistral4"}  # fmt: skip
    left_out = config_reader.parse(size)
    assert (left_out.latent.rank, left_out.latent.query_rank, left_out.experts.count) == (256, 1024, 128)
    assert (left_out.ropes[0].factor, left_out.ropes[0].temperature_beta, left_out.norm_eps) == (128.0, 0.1, 1e-6)
    with pytest.raises(ValueError, match=r"topk_group = 1.*n_group, 2"):
        config_reader.parse(fields | {"n_group": 2})
    with pytest.raises(ValueError, match=r"partial_rotary_factor = 0.7"):
        config_reader.parse(fields | {"rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": 0.7}})
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta = 0.5"):
        config_reader.parse(fields | {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.5}})


def test_gemma_4_in_the_published_spelling(tmp_path):
    """Layers that read another's keys and values are published with projections for them too."""
    folder = tmp_path / "model"
    shutil.copytree(fixtures.DATA / "gemma4", folder)
    tensors = {name: np.array(x) for name, x in safetensors.read(folder / "model.safetensors").items()}
    spare = {
        name.replace("layers.1.", "layers.4."): x for name, x in tensors.items() if "layers.1.self_attn.k_" in name
    }
    assert len(spare) == 2 and any("vision_tower" in name for name in tensors)
    safetensors.write(folder / "model.safetensors", spare | tensors)
    model, plain = models.load(folder), models.load(fixtures.DATA / "gemma4")
    jax.tree.map(np.testing.assert_array_equal, model, plain)
    assert model.layers[3].attention.key is None and model.layers[2].attention.key is not None


def test_layers_that_read_another_s_keys_keep_none():
    model = models.load(fixtures.DATA / "gemma4")
    config = jaxkv.CacheConfig.from_model(model, max_seqs=2, max_seq_len=32, num_blocks=8)
    assert [pool is None for pool in jaxkv.init(config).pools] == [False, False, False, True, True]


def test_chunks_without_a_cache():
    """Each chunk is what it is alone."""
    attention = Attention(8, 2, chunk=3, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    apart = [attention(x[i : i + 3])[0] for i in (0, 3, 6)]
    np.testing.assert_allclose(attention(x)[0], jnp.concatenate(apart), atol=1e-6)
    attention.chunk = None
    assert not np.allclose(attention(x)[0], jnp.concatenate(apart), atol=1e-3)
