"""A folder that cannot be honoured is refused by name; nothing is half-read."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import fixtures

from jaxkv import models
from jaxkv._files import safetensors
from jaxkv.models import config_reader


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint to spoil."""
    shutil.copytree(fixtures.DATA / "llama", tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: np.array(x) for name, x in safetensors.read(path).items()}
    change(tensors)
    safetensors.write(path, tensors)


def refused(folder, says, error=ValueError, **options):
    with pytest.raises(error, match=says) as caught:
        models.load(folder, **options)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message, message


def test_no_folder(tmp_path):
    says = "There is no folder .*nowhere: give one .* in it, a .gguf file, or owner/name on the Hugging Face hub"
    refused(tmp_path / "nowhere", says, FileNotFoundError)
    (tmp_path / "model.bin").write_text("x")
    refused(tmp_path / "model.bin", r"model.bin is a file: give a folder with config.json")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "has no config.json", FileNotFoundError)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json (is not valid JSON|must hold a JSON object)")


def test_unknown_family(folder):
    change_config(folder, model_type="mamba")
    refused(
        folder, r"of the family \(model_type\) 'mamba', but .* knows llama, mistral, qwen2, qwen3, gemma2, gemma3_text"
    )
    change_config(folder, model_type=...)
    refused(folder, r"of the family \(model_type\) None")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            dict(quantization_config={"bits": 4}),
            r"quantized, quantization_config = .*bits.*in MXFP4 or in blocks of float8, or a GGUF file",
        ),
        (dict(num_experts=4, sliding_window=7), "cannot honour: num_experts = 4, sliding_window = 7"),
        (dict(hidden_act="relu"), "hidden_act = 'relu', which the decoder cannot honour; it knows silu"),
        (dict(is_encoder_decoder=True), "is_encoder_decoder = True"),
        (
            dict(rope_parameters=dict(rope_type="dynamic", factor=4.0)),
            "rope_type = 'dynamic'.* default, linear, llama3, yarn",
        ),
        (dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 2])), r"mrope_section = \[1, 2\]"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor = 0.5"),
        (dict(rope_parameters=dict(rope_type="linear")), "^rope_parameters in .* lacks the field factor"),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "only where there are no rope_parameters"),
        (dict(hidden_size=...), "lacks the field hidden_size"),
        (dict(num_key_value_heads=3), "4 query heads cannot be shared among 3 KV heads"),
        (dict(jaxkv_tokenizer="words"), "jaxkv_tokenizer = 'words'"),
    ],
)
def test_config_fields(folder, fields, says):
    change_config(folder, **fields)
    refused(folder, says)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping = 50.0"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
        ("gemma3", dict(rope_parameters=dict(rope_type="default")), "rope_type = 'default'"),
        (
            "gemma2",
            dict(layer_types=["full_attention"]),
            "one of full_attention and sliding_attention for each of the 4",
        ),
        ("gemma2", dict(layer_types=["chunked_attention"] * 4), "layer_types"),
        ("qwen2", dict(use_sliding_window=False), "only with a sliding_window, and that is off"),
        ("mistral", dict(attention_bias=True), "attention_bias = True"),
        ("qwen2", dict(num_key_value_heads=...), "lacks the field num_key_value_heads"),
    ],
)
def test_config_fields_of_a_family(name, fields, says):
    config = json.loads((fixtures.DATA / name / "config.json").read_text()) | fields
    with pytest.raises(ValueError, match=says):
        config_reader.parse({k: v for k, v in config.items() if v is not ...})


def test_every_wrong_tensor_is_named_at_once(folder):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(16, np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :5]
        tensors["model.layers.1.mlp.up_proj.bias"] = np.zeros(40, np.int32)

    change_tensors(folder, spoil)
    refused(
        folder,
        "do not fit its config.json: model.norm.weight is missing; "
        "model.layers.0.self_attn.q_norm.weight is unknown; "
        r"lm_head.weight has shape \[96, 5\], not \[96, 32\]; "
        "model.layers.1.mlp.up_proj.bias has dtype int32",
    )


def test_a_kernel_that_is_not_transposed(folder):
    """40 x 32 and 32 x 40 have the same number of elements: shapes are compared, not sizes."""

    def spoil(tensors):
        name = "model.layers.0.mlp.gate_proj.weight"
        tensors[name] = tensors[name].T

    change_tensors(folder, spoil)
    refused(folder, r"gate_proj.weight has shape \[32, 40\], not \[40, 32\]")


def test_old_buffers_are_ignored(folder):
    change_tensors(
        folder, lambda t: t.update({"model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)})
    )
    models.load(folder)


def test_tied_embeddings_with_a_head(tmp_path):
    shutil.copytree(fixtures.DATA / "llama3", tmp_path / "model")
    embed = "model.embed_tokens.weight"
    change_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": t[embed]}))
    models.load(tmp_path / "model")
    change_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": t[embed] + 1}))
    refused(tmp_path / "model", "ties its embeddings, but lm_head.weight differs")


def test_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor model.safetensors.index.json", FileNotFoundError)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, "model.safetensors is truncated: its header describes .* bytes, but the file has")


def test_shards(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(fixtures.DATA / "qwen3", folder)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    last = max(weight_map.values())
    (folder / last).rename(folder / "elsewhere")
    refused(folder, f"lacks {last}, which its index names", FileNotFoundError)
    (folder / "elsewhere").rename(folder / last)
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../model/" + last}}))
    refused(folder, "files in its own folder")
    index.write_text("{}")
    refused(folder, "must have a weight_map")


def test_a_file_that_is_written_to_later(folder):
    """JAX uses arrays in place that lie well: a loaded model must not lie in the file."""
    file = folder / "model.safetensors"
    contents = file.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    padding = b" " * (-end % 64)
    start = end + len(padding)
    for mesh in (None, jax.make_mesh((2,), ("model",))):
        file.write_bytes((start - 8).to_bytes(8, "little") + contents[8:end] + padding + contents[end:])
        model = models.load(folder, mesh=mesh)
        before = [np.array(x) for x in jax.tree.leaves(model)]
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"\1" * (len(contents) - end))
        for x, old in zip(jax.tree.leaves(model), before, strict=True):
            np.testing.assert_array_equal(np.asarray(x), old)


def test_dtype(folder):
    refused(folder, "dtype must be one of float32, bfloat16, float16, not int8", dtype="int8")
    refused(folder, "not float12", dtype="float12")
    for wrong in (1, "", [], {}, object(), np.ones((2, 3)), "float64", bool):
        refused(folder, "dtype must be one of float32, bfloat16, float16, not ", dtype=wrong)
    assert models.load(folder, dtype=jnp.float16).dtype == jnp.float16


def test_options_of_another_kind(folder):
    for wrong in (1, None, object(), {"a": 1}, [1], [None], b"a", np.ones((2, 3))):
        refused(folder, "ignore must be ", ignore=wrong)
    for wrong in (1, 0, "", "yes", [], np.ones((2, 3))):
        refused(folder, "scan must be True, False, ", scan=wrong)


def test_what_ends_a_text(folder):
    change_config(folder, eos_token_id=5)
    assert models.load(folder).config.eos_ids == (5,)
    change_config(folder, eos_token_id=[5, 6])
    assert models.load(folder).config.eos_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert models.load(folder).config.eos_ids == (7, 8)


def test_absent_fields_have_their_family_s_meaning():
    """What transformers takes for a field that an old config.json leaves out."""
    size = dict(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=12, num_attention_heads=4,
                max_position_embeddings=64)  # fmt: skip
    llama = config_reader.parse(size | dict(model_type="llama"))
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings, llama.ropes[0].theta) == (4, 16, False, 10_000.0)
    size["num_key_value_heads"] = 2
    assert set(config_reader.parse(size | dict(model_type="mistral")).windows) == {4096}
    assert config_reader.parse(size | dict(model_type="qwen3")).head_dim == 128
    gemma2 = config_reader.parse(size | dict(model_type="gemma2"))
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.tie_embeddings) == (50.0, 30.0, True)
    assert gemma2.windows[:2] == (4096, None)
    gemma3 = config_reader.parse(size | dict(model_type="gemma3_text"))
    assert [window is None for window in gemma3.windows] == [False, False, False, False, False, True] * 2
    assert (gemma3.ropes[0].theta, gemma3.ropes[5].theta) == (10_000.0, 1_000_000.0)


def test_known_fields_cover_what_transformers_writes():
    for name in fixtures.NAMES:
        fields = json.loads((fixtures.DATA / name / "config.json").read_text())
        assert re.fullmatch(r"[\d.]+", fields["transformers_version"])
        config_reader.parse(fields)


def test_windows_that_a_family_does_not_have_are_not_lost(tmp_path):
    sizes = dict(vocab_size=96, embed_dim=32, mlp_dim=40, num_heads=2, num_kv_heads=1, head_dim=16)
    config = models.DecoderConfig(
        **sizes, windows=[None, 8], ropes=[models.Rope()] * 2, max_seq_len=64, attention_scale=0.25
    )
    with pytest.raises(ValueError, match="of the family llama cannot say that layer 1 is with a window of 8: loaded"):
        models.save(models.Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "model")
    assert not (tmp_path / "model").exists()
