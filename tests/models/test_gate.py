"""Published and people's config.json files: read as transformers reads them, or refused by the field that matters."""

import json
import math
import pathlib
import warnings

import numpy as np
import pytest
from flax import nnx
from support import fixtures

from jaxkv import models
from jaxkv.models import config_reader
from jaxkv.models.checkpoints.parameter_counts import count_parameters, layer_shapes, outer_shapes
from jaxkv.models.decoder import Decoder
from jaxkv.models.loader import read_config

PUBLISHED = json.loads((fixtures.DATA / "published.json").read_text())
DEFAULTS = json.loads((fixtures.DATA / "defaults.json").read_text())
READ = [name for name, entry in PUBLISHED.items() if entry["expected"] is not None]
QUANTISED = "qwen3-32b-fp8-static-modelopt"  # by quantization_config, in a way that is not read
LLAMA, QWEN, GPT_OSS = (PUBLISHED[name]["config"] for name in ("llama-3.1-8b", "qwen3-8b", "gpt-oss-20b"))


def parse(fields, **options):
    """The decoder, and the names in the one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = config_reader.parse(fields, **options)
    assert len(caught) <= 1
    passed = str(caught[0].message).rstrip(".").partition("passed over: ")[2].split(", ") if caught else []
    return config, passed


@pytest.mark.parametrize("name", READ)
def test_published_configs_mean_what_transformers_reads(name):
    fields, expected = PUBLISHED[name]["config"], PUBLISHED[name]["expected"]
    config, _ = parse(fields, ignore=("quantization_config",) if name == QUANTISED else ())
    np.testing.assert_allclose(config.attention_scale, expected["scale"], rtol=1e-6)
    assert config.windows == tuple(expected["windows"] or [None] * config.num_layers)
    widths = [config.latent.rope_dim if config.latent else layer.head_dim for layer in config.layers]
    pairs = zip(config.ropes, widths, strict=True)
    ropes = [(rope, rope.frequencies(n)[::8]) for rope, n in dict.fromkeys(pairs) if rope.partial_rotary_factor]
    assert len(ropes) == len(expected["ropes"])
    for frequencies, magnitude in expected["ropes"]:
        alike = [(rope, own) for rope, own in ropes if len(own) == len(frequencies)]
        near = [np.allclose(own, frequencies, rtol=2e-6, atol=1e-12) for _, own in alike]
        assert any(ok and np.isclose(rope.magnitude, magnitude) for ok, (rope, _) in zip(near, alike, strict=True))


# One of each family: counting makes a decoder of two layers, without its numbers.
@pytest.mark.parametrize(
    "name",
    ["llama-3.2-3b", "mistral-nemo-instruct-2407", "qwen2.5-3b", "qwen3-0.6b", "gemma-3-27b-it-tf4.56", "gpt-oss-20b",
     "deepseek-v2-lite", "kimi-k2-instruct", "mixtral-8x7b-v0.1", "qwen3-30b-a3b", "llama-4-scout-17b-16e",
     "llama-4-maverick-17b-128e", "gemma-4-31b-it", "gemma-4-26b-a4b-it", "gemma-4-e2b-it",
     "gemma-3n-e4b-it"],
)  # fmt: skip
def test_as_many_parameters_as_transformers_has(name):
    config, _ = parse(PUBLISHED[name]["config"])
    chosen = config.experts is not None and config.experts.choice_bias  # a buffer there, a parameter here
    buffers = config.experts.count * sum(config.expert_layers) if chosen else config.num_layers * config.layer_scale
    assert count_parameters(config) - buffers == PUBLISHED[name]["expected"]["parameters"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_as_many_parameters_as_transformers_has_by_default(name):
    assert count_parameters(parse(DEFAULTS[name]["config"])[0]) == DEFAULTS[name]["parameters"]


def test_which_fields_are_passed():
    assert parse(PUBLISHED["qwen2.5-3b"]["config"])[1] == ["use_mrope"]
    passed = parse(PUBLISHED["qwen3-coder-480b-a35b-instruct"]["config"])[1]
    assert passed == ["qkv_bias", "shared_expert_intermediate_size", "use_qk_norm"]
    assert parse(LLAMA)[1] == []


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in READ])
def test_drafts_are_refused_by_their_class(name):
    fields = PUBLISHED[name]["config"]
    with pytest.raises(ValueError, match=r"architectures.*draft head.*ignore="):
        config_reader.parse(fields)
    with pytest.raises(ValueError, match=r"cannot honour: .*draft_vocab_size|num_target_layers"):
        config_reader.parse(fields, ignore="architectures")


PASSED = {
    "_attn_implementation": "eager", "_attn_implementation_autoset": True, "_anything": [1], "unk_token_id": 3,
    "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "use_mrope": False,
    "chat_template": "{{ x }}", "tokenizer": "x", "trust_remote_code": True, "max_sequence_length": 8192,
    "use_qk_norm": False, "qkv_bias": False, "tokenizer_class": "X", "max_grad_norm": 1.0, "learning_rate": 1e-4,
    "gradient_checkpointing": True, "use_flash_attention_2": True, "sequence_parallel_enabled": True,
    "num_train_epochs": 3, "per_device_train_batch_size": 4, "temperature": 0.6, "do_sample": True, "top_p": 0.9,
    "mamba_layers": [], "sliding_window_size": None, "norm_eps": 1e-5, "n_embd": 4096, "head_size": 128,
    "logit_scale": 1.0, "task_specific_params": None, "license": "apache", "rotary_pct": 1.0, "pruned_heads": {},
    "neftune_noise_alpha": 5, "bf16": True, "attn_softcap": 0, "use_fused_rms_norm": True, "partial_rotary_factor": 1,
}  # fmt: skip


def test_what_says_nothing_of_a_decoder_is_passed_in_one_warning():
    config, passed = parse(LLAMA | PASSED)
    assert config == parse(LLAMA)[0]
    # Factors of 1 are as good as absent: they are checked, and need no warning.
    assert sorted(passed) == sorted(PASSED.keys() - {"logit_scale", "rotary_pct", "partial_rotary_factor"})


MATTERS = {
    "attention_multiplier": 0.0078, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "logit_scale": 0.0625, "clip_qkv": 8.0, "alibi": True, "use_parallel_residual": True, "no_rope_layers": [1, 0],
    "attention_chunk_size": 8192, "attn_temperature_tuning": True, "partial_rotary_factor": 0.5, "rotary_pct": 0.25,
    "use_qk_norm": True, "qkv_bias": True, "rope_interleaved": True, "use_mrope": True, "norm_eps": 1e-6,
    "layer_norm_type": "np", "n_embd": 2048, "head_size": 64, "num_experts": 8, "shared_expert_intermediate_size": 512,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window": 4096, "sliding_window_size": 512,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu", "num_kv_shared_layers": 4, "index_topk": 2048,
    "layer_types": ["mamba"], "altup_num_inputs": 4, "hidden_size_per_layer_input": 256, "draft_vocab_size": 32000,
    "kv_lora_rank": 512, "mamba_d_state": 128, "cross_attention_layers": [3], "is_causal": False,
    "tie_embeddings": True, "norm_after": True, "use_rope": False, "moe_num_experts": 8, "interleave_moe_layer_step": 2,
    "experts_per_token": 2,
    "embedding_size": 512, "mlp_ratio": 4, "vision_config": {"a": 1}, "rope_ratio": 2, "something": 7,
    "quantization_config": {"bits": 4}, "is_encoder_decoder": True, "use_batch_norm": True, "rope_version": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", MATTERS)
def test_a_field_that_matters_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"config.json (has|says) .*\b{name} = ") as caught:
        config_reader.parse(LLAMA | {name: MATTERS[name]})
    assert len(str(caught.value)) < 400 and str(caught.value).endswith(".")
    assert config_reader.parse(LLAMA | {name: MATTERS[name]}, ignore=(name,)) == config_reader.parse(LLAMA)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        (QWEN, {"use_qk_norm": False}),
        (GPT_OSS, {"qkv_bias": False}),
        (PUBLISHED["deepseek-v3"]["config"], {"rope_interleaved": False}),
    ],
)
def test_a_switch_that_is_off_is_refused_where_the_decoder_has_it_on(fields, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        config_reader.parse(fields | change)


def test_several_are_refused_in_one_sentence_that_says_how_to_ignore_them():
    with pytest.raises(ValueError, match=r'alibi = True, clip_qkv = 8.*give ignore=\("alibi", "clip_qkv"\)\.$'):
        config_reader.parse(LLAMA | {"alibi": True, "clip_qkv": 8})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-nemo-instruct-2407", "qwen2.5-7b-instruct", "qwen3-8b",
                                  "qwen3-30b-a3b", "mixtral-8x7b-v0.1"])  # fmt: skip
def test_yarn_in_every_family(name):
    """As Qwen's model cards say to write it; transformers' magnitude is 0.1 ln 4 + 1."""
    rope = parse(PUBLISHED[name]["config"] | {"rope_scaling": YARN})[0].ropes[0]
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32768)
    assert np.isclose(rope.magnitude, 1.1386294361119891)


def test_what_else_is_said_of_rotary_embeddings():
    fields = QWEN | {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 65536}
    assert parse(fields)[0].ropes[0].factor == 2.0
    outside = QWEN | {"rope_scaling": YARN, "original_max_position_embeddings": 4096}
    assert parse(outside)[0].ropes[0].original_max_position == 4096
    assert parse(QWEN | {"rope_scaling": YARN | {"finetuned": True, "mrope_section": None}})[1] == [
        "finetuned", "mrope_section",
    ]  # fmt: skip
    for change in ({"mrope_section": [1]}, {"long_factor": [1.0]}, {"attn_factor": 2.0}):
        with pytest.raises(ValueError, match=f"rope_scaling in config.json has .*{next(iter(change))}"):
            config_reader.parse(QWEN | {"rope_scaling": YARN | change})


def test_the_first_llama():
    """As it was converted at first, with another name for its length and for its class."""
    first = {"architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
             "hidden_size": 4096, "intermediate_size": 11008, "initializer_range": 0.02, "max_sequence_length": 2048,
             "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": -1,
             "rms_norm_eps": 1e-06, "torch_dtype": "float16", "transformers_version": "4.27.0.dev0", "use_cache": True,
             "vocab_size": 32000}  # fmt: skip
    assert parse(first)[0].max_seq_len == 2048


def copy_of_llama(tmp_path, **fields):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (fixtures.DATA / "llama").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return pathlib.Path(folder)


def test_load_ignores_and_warns(tmp_path):
    folder = copy_of_llama(tmp_path, alibi=True, unk_token_id=3)
    with pytest.raises(ValueError, match=r'ignore=\("alibi",\)'):
        models.load(folder)
    with pytest.warns(UserWarning, match=r"passed over: unk_token_id\.$") as caught:
        model = models.load(folder, ignore=("alibi",))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert model.config == models.load(fixtures.DATA / "llama").config


def test_what_is_quantised_elsewhere_is_refused_in_one_short_sentence(tmp_path):
    folder = copy_of_llama(tmp_path)
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["x" * 1000]}}))
    with pytest.raises(ValueError, match=r"quantized as 'NVFP4' by hf_quant_config.json") as caught:
        models.load(folder)
    assert len(str(caught.value)) < 300
    path.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    models.load(folder)


def test_many_missing_tensors_are_a_capped_list(tmp_path):
    with pytest.raises(ValueError, match=r"is missing.*; and \d+ more\.$") as caught:
        models.load(copy_of_llama(tmp_path, num_hidden_layers=5))
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("name", fixtures.NAMES)
def test_parameters_are_counted_without_making_them(name):
    config = read_config(fixtures.DATA / name)
    _, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    made = {path: x.shape for path, x in nnx.to_flat_state(state)}
    counted = {path: shape for path, shape in outer_shapes(config).items() if shape is not None}
    for i in range(config.num_layers):
        shapes = layer_shapes(config, i)
        counted |= {("layers", i, *path): shape for path, shape in shapes.items() if shape is not None}
    assert counted == made
    assert count_parameters(config) == sum(map(math.prod, made.values()))
