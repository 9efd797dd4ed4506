"""Text models of models that read images: under each name and in each form that is published."""

import json
import shutil

import jax
import numpy as np
import pytest
from support import fixtures

from jaxkv import models
from jaxkv._files import safetensors
from jaxkv.models import config_reader
from jaxkv.models.families.vision_language import PLAIN, WRAPPERS

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# Beside `text_config`, as the models' own config.json files have them.
OUTSIDE = {
    "llava": {
        "ignore_index": -100, "image_seq_length": 576, "image_token_index": 32000, "projector_hidden_act": "gelu",
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "multimodal_projector_bias": True,
    },
    "llava_next": {
        "image_grid_pinpoints": [[336, 672]], "image_token_index": 32000, "use_image_newline_parameter": True,
        "projector_hidden_act": "gelu", "tie_word_embeddings": False,
    },
    "llava_onevision": {
        "image_token_index": 151646, "vision_aspect_ratio": "anyres_max_9", "video_token_index": 151647,
        "vision_feature_select_strategy": "full", "use_image_newline_parameter": True,
    },
    "internvl": {
        "downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151667, "vision_feature_layer": -1,
    },
    "idefics3": {"image_token_id": 128257, "scale_factor": 2},
    "smolvlm": {
        "image_token_id": 49190, "pad_token_id": 128002, "scale_factor": 4, "use_reentrant_checkpointing": False,
        "vocab_size": 96,
    },
    "lfm2_vl": {
        "do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "max_image_tokens": 256,
        "max_num_patches": 1024, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2,
        "projector_bias": True, "projector_hidden_size": 2560, "tile_size": 512, "use_image_special_tokens": True,
        "use_thumbnail": True, "vision_feature_layer": -1,
    },
}  # fmt: skip


def copy_of(name, tmp_path, rename, change=lambda tensor: tensor):
    """A fixture whose tensors have other names, or lie otherwise."""
    folder = shutil.copytree(fixtures.DATA / name, tmp_path / "model")
    tensors = safetensors.read(folder / "model.safetensors").items()
    safetensors.write(folder / "model.safetensors", {rename(key): change(key, np.array(x)) for key, x in tensors})
    return folder


def assert_same(folder, name):
    model, wanted = models.load(folder), models.load(fixtures.DATA / name)
    assert model.config == wanted.config
    jax.tree.map(np.testing.assert_array_equal, model, wanted)


@pytest.mark.filterwarnings("ignore:config.json has fields that are off")
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_images_need_is_passed_over(name):
    config = {"model_type": name, "text_config": LLAMA, "vision_config": {"hidden_size": 8}} | OUTSIDE[name]
    found = config_reader.parse(config)
    wanted = config_reader.parse(LLAMA | ({"rms_norm_eps": 1e-5} if name in ("idefics3", "smolvlm") else {}))
    tied = name in ("internvl", "lfm2_vl")
    assert (found.family, found.tie_embeddings) == ("llama", tied)
    assert (found.layers, found.norm_eps, found.ropes) == (wanted.layers, wanted.norm_eps, wanted.ropes)


def test_smolvlm_as_it_is_published():
    """The config.json of SmolVLM2-500M, whose text model says how its images are put together."""
    text = {
        "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
        "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    }  # fmt: skip
    outer = OUTSIDE["smolvlm"] | {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "tie_word_embeddings": False,
        "torch_dtype": "float32", "use_cache": False, "vocab_size": 49280, "vision_config": {"hidden_size": 768},
    }  # fmt: skip
    with pytest.warns(UserWarning, match="is_llama_config, neftune_noise_alpha, qk_layer_norms"):
        config = config_reader.parse(outer | {"text_config": text})
    assert (config.num_layers, config.embed_dim, config.head_dim, config.num_kv_heads) == (32, 960, 64, 5)
    assert config.ropes[0].theta == 100000 and not config.tie_embeddings


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen2_5_vl", "model.language_model.", "model."),
        ("qwen3_vl", "model.language_model.", "language_model.model."),
        ("llava", "language_model.model.", "model.language_model."),
        ("smolvlm", "model.text_model.", "model.language_model."),
    ],
)
def test_older_and_newer_names_of_tensors(name, old, new, tmp_path):
    folder = copy_of(name, tmp_path, lambda key: key.replace(old, new), lambda key, x: x)
    assert_same(folder, name)


def test_experts_of_a_layer_in_one_tensor(tmp_path):
    """By inputs, as Qwen 3 VL's are published; transformers 5 writes them by outputs."""
    seen = []

    def turn(key, x):
        if x.ndim != 3 or "experts" not in key:
            return x
        seen.append(key)
        return np.ascontiguousarray(np.swapaxes(x, 1, 2))

    folder = copy_of("qwen3_vl_moe", tmp_path, lambda key: key, turn)
    assert len(seen) == 2
    assert_same(folder, "qwen3_vl_moe")


def test_absent_fields_mean_what_they_do_where_models_read_images():
    def read(name, *absent, **fields):
        config = json.loads((fixtures.DATA / name / "config.json").read_text())
        text = {key: x for key, x in config["text_config"].items() if key not in absent}
        return config_reader.parse(config | {"text_config": text} | fields)

    assert read("glm4v_moe", "attention_bias").qkv_bias
    assert read("qwen3_vl_moe", "norm_topk_prob").experts.normalise
    for name in ("qwen2_5_vl", "glm4v", "smolvlm"):
        assert read(name, "rms_norm_eps").norm_eps == 1e-5
    flat = json.loads((fixtures.DATA / "qwen2_5_vl" / "config_old.json").read_text())
    assert config_reader.parse(flat | {"rms_norm_eps": 1e-6}).norm_eps == 1e-6


def test_tensors_of_images_are_passed_over(tmp_path):
    folder = shutil.copytree(fixtures.DATA / "llava", tmp_path / "model")
    tensors = {key: np.array(x) for key, x in safetensors.read(folder / "model.safetensors").items()}
    own = ("model.image_newline", "image_newline", "mm_projector.proj.0.weight", "model.connector.weight", "visual.x")
    safetensors.write(folder / "model.safetensors", tensors | dict.fromkeys(own, np.ones(3, np.float32)))
    assert_same(folder, "llava")
    safetensors.write(folder / "model.safetensors", tensors | {"image_newlines": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="image_newlines is unknown"):
        models.load(folder)


def test_what_is_saved_is_the_text_model(tmp_path):
    saved = {"qwen2_5_vl": "qwen2", "qwen3_vl_moe": "qwen3_moe", "glm4v": "glm4", "kimi_k25": "deepseek_v3"}
    for name, family in saved.items():
        models.save(models.load(fixtures.DATA / name), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == family
        assert_same(tmp_path / name, name)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_text_model_of_another_kind_is_refused(name):
    config = {"model_type": name, "text_config": LLAMA | {"model_type": "gemma4_text"}}
    with pytest.raises(ValueError, match="model_type = 'gemma4_text', which the decoder cannot honour; it knows"):
        config_reader.parse(config)
    with pytest.raises(ValueError, match=r"text_config in config.json must be an object"):
        config_reader.parse(config | {"text_config": 3})
    with pytest.raises(ValueError, match=r"config.json lacks the field"):
        config_reader.parse({"model_type": name})


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads"])
def test_odd_sizes_of_glm_are_refused(name):
    config = json.loads((fixtures.DATA / "glm4v" / "config.json").read_text())
    for value in (0, -1, "a", None, True, 2**40):
        with pytest.raises(ValueError, match=name):
            config_reader.parse(config | {"text_config": config["text_config"] | {name: value}})


def test_quantized_weights_inside_are_refused():
    """As Kimi K2.5 is published, with four bits a weight."""
    config = json.loads((fixtures.DATA / "kimi_k25" / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    with pytest.raises(ValueError, match="says that weights are quantized"):
        config_reader.parse(config)


def test_any_wrapper_takes_any_plain_text_model():
    for name in PLAIN:
        if (fixtures.DATA / name).is_dir():
            text = json.loads((fixtures.DATA / name / "config.json").read_text())
            found = config_reader.parse({"model_type": "llava", "text_config": text})
            assert found == config_reader.parse(text), name
