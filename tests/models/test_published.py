"""Checkpoints as they are published: quantised weights, prefixes, what is left out, and what of it is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from nightly import NIGHTLY
from support import fixtures

from jaxkv import models
from jaxkv._files import safetensors
from jaxkv.models import config_reader
from jaxkv.models.checkpoints.folder import read_published


def copy_of(name, tmp_path, change_tensors=None, change_config=None):
    folder = tmp_path / "model"
    shutil.copytree(fixtures.DATA / name, folder)
    if change_tensors is not None:
        tensors = {key: np.array(x) for key, x in safetensors.read(folder / "model.safetensors").items()}
        safetensors.write(folder / "model.safetensors", change_tensors(tensors) or tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | (change_config or {})))
    return folder


def same(a, b):
    assert a.config == b.config
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_mxfp4_by_hand():
    """The lower half of a byte comes first; a scale of 127 is 1, one more is twice as much."""
    blocks = np.arange(16, dtype=np.uint8).reshape(1, 1, 1, 16) * np.uint8(16) + np.uint8(1)
    blocks = np.concatenate([blocks, blocks], axis=1)
    scales = np.array([[[127], [130]]], np.uint8)
    read = read_published({"w_blocks": blocks, "w_scales": scales}, {}, "config.json")
    assert read["w"].shape == (1, 32, 2) and read["w"].dtype == np.float32
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = np.ravel([[0.5, sign * value] for sign in (1, -1) for value in values])
    np.testing.assert_array_equal(np.asarray(read["w"])[0, :, 0], wanted)
    np.testing.assert_array_equal(np.asarray(read["w"])[0, :, 1], 8 * wanted)


def test_blocks_of_fp8_by_hand():
    weight = np.ones((3, 5)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    config = {"quantization_config": {"weight_block_size": [2, 2]}}
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b": scales}
    read = read_published(tensors, config, "config.json")
    assert sorted(read) == ["a.weight", "b"]
    np.testing.assert_array_equal(np.asarray(read["a.weight"]), [[1, 1, 2, 2, 3]] * 2 + [[4, 4, 5, 5, 6]])
    with pytest.raises(ValueError, match=r"a.weight_scale_inv has shape \[2, 3\], not \[1, 1\]: one scale for each"):
        read_published(tensors, {}, "config.json")
    for sizes in (3, [3], [0, 1], ["a", "b"]):
        with pytest.raises(ValueError, match=r"weight_block_size in config.json must"):
            read_published(tensors, {"quantization_config": {"weight_block_size": sizes}}, "config.json")


def test_fp8_with_a_scale_for_a_tensor():
    """As Ministral 3 is published, whose activations have scales too; and experts, with one for each of two halves."""
    weight, experts = (
        np.ones((2, 3)).astype(ml_dtypes.float8_e4m3fn),
        np.ones((2, 4, 3)).astype(ml_dtypes.float8_e4m3fn),
    )
    config = {"quantization_config": {"weight_block_size": None, "activation_scheme": "static", "quant_method": "fp8"}}
    tensors = {"a.weight": weight, "a.weight_scale_inv": np.float32(3), "a.activation_scale": np.float32(7),
               "up": experts, "up_scale_inv": np.arange(4, dtype=np.float32).reshape(2, 2, 1)}  # fmt: skip
    read = read_published(tensors, config, "config.json")
    assert sorted(read) == ["a.weight", "up"]
    np.testing.assert_array_equal(np.asarray(read["a.weight"]), np.full((2, 3), 3))
    np.testing.assert_array_equal(np.asarray(read["up"])[:, :, 0], [[0, 0, 1, 1], [2, 2, 3, 3]])
    with pytest.raises(ValueError, match=r"a.weight_scale_inv has shape \[2\], not one scale of \[2, 3\]"):
        read_published(tensors | {"a.weight_scale_inv": np.ones(2, np.float32)}, config, "config.json")


def test_quantised_weights_that_do_not_belong_together(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.0.mlp.experts.down_proj_scales"]

    says = "experts.down_proj is missing; model.layers.0.mlp.experts.down_proj_blocks is unknown"
    with pytest.raises(ValueError, match=says):
        models.load(copy_of("gpt_oss", tmp_path, spoil))


def test_fp8_without_its_scales(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]

    with pytest.raises(ValueError, match=r"up_proj.weight has dtype float8_e4m3fn, not float32"):
        models.load(copy_of("deepseek_v3", tmp_path, spoil))


def test_layers_that_predict_further_tokens(tmp_path):
    """One more is left out, by name; a second one is unknown, until the config says that there are two."""

    def add(tensors):
        tensors["model.layers.4.enorm.weight"] = np.ones(32, np.float32)

    folder = copy_of("deepseek_v3", tmp_path, add)
    with pytest.raises(ValueError, match=r"config.json: model.layers.4.enorm.weight is unknown"):
        models.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    models.load(folder)


def respell(name):
    """The other of the two published spellings."""
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return "model." + name


def test_gemma_3_in_both_spellings(tmp_path):
    nested = models.load(fixtures.DATA / "gemma3_nested")
    assert nested.config.family == "gemma3_text" and nested.config.windows == (6, None)
    folder = copy_of("gemma3_nested", tmp_path, lambda tensors: {respell(name): x for name, x in tensors.items()})
    same(models.load(folder), nested)


@pytest.mark.parametrize("head", ["language_model.lm_head.weight", "lm_head.weight"])
def test_gemma_3_with_a_head_of_its_own(head, tmp_path):
    def add(tensors):
        tensors[head] = np.ones((96, 20), np.float32)

    folder = copy_of("gemma3_nested", tmp_path, add, {"tie_word_embeddings": False})
    assert models.load(folder).head.shape == (96, 20)


def test_gemma_3_s_other_tensors_are_unknown(tmp_path):
    def add(tensors):
        tensors["audio_tower.weight"] = np.ones(3, np.float32)

    with pytest.raises(ValueError, match=r"audio_tower.weight is unknown"):
        models.load(copy_of("gemma3_nested", tmp_path, add))


def test_gemma_3_s_missing_fields():
    """As the 4b model was published."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {"a": 1},
              "mm_tokens_per_image": 256, "image_token_index": 262144, "torch_dtype": "bfloat16"}  # fmt: skip
    parsed = config_reader.parse(config)
    assert (parsed.num_heads, parsed.num_kv_heads, parsed.head_dim, parsed.vocab_size) == (8, 4, 256, 262_208)
    assert (parsed.max_seq_len, parsed.num_layers, parsed.embed_dim, parsed.eos_ids) == (131_072, 34, 2560, (1, 106))
    assert parsed.windows[:6] == (1024,) * 5 + (None,) and parsed.tie_embeddings
    assert (parsed.ropes[0].theta, parsed.ropes[5].theta, parsed.ropes[5].factor) == (1e4, 1e6, 8.0)
    with pytest.raises(ValueError, match="does not know and so cannot honour: audio_config"):
        config_reader.parse(config | {"audio_config": {"a": 1}})
    with pytest.raises(ValueError, match=r"text_config in config.json must be an object"):
        config_reader.parse(config | {"text_config": 3})
    with pytest.raises(ValueError, match="model_type = 'llama'"):
        config_reader.parse(config | {"text_config": text | {"model_type": "llama"}})


SIZE = dict(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=5, num_attention_heads=4,
            max_position_embeddings=64, num_experts_per_tok=8)  # fmt: skip


def test_absent_fields_have_their_family_s_meaning():
    v3 = config_reader.parse(SIZE | dict(model_type="deepseek_v3"))
    assert (v3.latent.rank, v3.latent.rope_dim, v3.latent.query_rank, v3.head_dim) == (512, 64, 1536, 192)
    assert (v3.experts.count, v3.experts.groups, v3.experts.groups_per_token) == (256, 8, 4)
    assert v3.expert_layers == (False, False, False, True, True) and v3.experts.choice_bias and v3.experts.normalise
    v2 = config_reader.parse(SIZE | dict(model_type="deepseek_v2"))
    assert (v2.experts.count, v2.experts.groups, v2.experts.shared_dim, v2.experts.scale) == (64, 1, 2 * 1407, 1.0)
    oss = config_reader.parse(SIZE | dict(model_type="gpt_oss", num_key_value_heads=2))
    assert oss.windows == (128, None, 128, None, 128) and oss.qkv_bias and oss.out_bias and oss.sinks
    assert (oss.ropes[0].scaling, oss.ropes[0].theta, oss.ropes[0].truncate) == ("yarn", 150_000.0, False)
    moe = config_reader.parse(SIZE | dict(model_type="qwen3_moe", num_key_value_heads=2))
    assert moe.expert_layers == (True,) * 5 and moe.experts.count == 128 and moe.qk_norm and not moe.experts.normalise
    assert moe.windows == (None,) * 5


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("deepseek_v3", dict(n_group=3), "256 experts cannot lie in 3 groups"),
        ("deepseek_v3", dict(n_routed_experts=8, num_experts_per_tok=2), "8 experts cannot lie in 8 groups of 2"),
        ("deepseek_v3", dict(num_experts_per_tok=200), "A token cannot go to 200 experts where 128"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func = 'softmax'.* knows 'sigmoid'"),
        ("deepseek_v3", dict(topk_method="greedy"), "topk_method = 'greedy'.* knows noaux_tc"),
        ("deepseek_v3", dict(qk_head_dim=100), "qk_head_dim = 100"),
        ("deepseek_v3", dict(qk_rope_head_dim=33), "must be even"),
        (
            "deepseek_v3",
            dict(quantization_config={"quant_method": "gptq"}),
            "quantization_config = .*gptq.*, which is not read",
        ),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob = True"),
        ("deepseek_v2", dict(moe_layer_freq=2), "moe_layer_freq = 2"),
        ("gpt_oss", dict(num_experts=5, num_local_experts=6), "num_experts = 5.* the same as num_local_experts, 6"),
        ("gpt_oss", dict(rope_scaling=dict(rope_type="longrope")), "rope_type = 'longrope'.* llama3, yarn"),
        ("qwen3_moe", dict(mlp_only_layers=3), "mlp_only_layers = 3"),
    ],
)
def test_what_is_refused(family, fields, says):
    config = SIZE | dict(model_type=family, num_key_value_heads=4) | fields
    with pytest.raises(ValueError, match=says) as caught:
        config_reader.parse(config)
    assert "config.json" in str(caught.value) or "even" in says
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
@pytest.mark.skipif(not NIGHTLY, reason="by day gradients go through attention and the write")
def test_gradients_reach_every_parameter(name):
    """But for the bias that only chooses. Nothing else that is loaded is left out of the computation."""
    model, tokens = models.load(fixtures.DATA / name), fixtures.expected(name)[3].prompt
    grads = jax.jit(jax.grad(lambda model, tokens: jnp.sum(jnp.square(model(tokens)[0]))))(model, tokens)
    for path, grad in jax.tree.leaves_with_path(grads):
        where = jax.tree_util.keystr(path)
        assert (float(jnp.abs(grad).max()) > 0) != ("choice_bias" in where), where
