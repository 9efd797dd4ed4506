"""GGUF files are read as the folders that they were made of, and bad ones are refused in a sentence."""

import dataclasses
import random
import struct
import time
import tracemalloc

import gguf
import jax
import numpy as np
import pytest
from support import fixtures, gguf_files

from jaxkv import models
from jaxkv._files import gguf as reader
from jaxkv._files.gguf import StoredTensor
from jaxkv.models import loader

FAMILIES = (
    "llama", "llama_linear", "llama3", "qwen2", "qwen3", "gemma2", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_moe",
    "qwen3_vl_moe", "granite", "smollm3", "olmo2", "seed_oss", "ernie4_5",
    "gpt_oss", "gemma", "arcee",
)  # fmt: skip
WINDOWS = ("qwen2", "qwen2_5_vl", "smollm3")  # GGUF files of these have none
ENDS = ("<|im_end|>", "plain", "<|eot_id|>")


def metadata_of(name):
    if name == "llama3":  # what the converter knows are the lengths of the published models
        return {"llama.context_length": ("uint32", 128)}
    return {}


def config_of(name):
    config = loader.read_config(fixtures.DATA / name)
    if name in WINDOWS:
        config = dataclasses.replace(config, windows=[None] * config.num_layers)
    if name == "gpt_oss":  # no entry says where gates are clipped
        config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, limit=7.0))
    if name == "smollm3":  # nor what layers rotate: each but every fourth
        rotating, still = config.ropes[:2]
        config = dataclasses.replace(config, ropes=(rotating,) * 3 + (still,))
    return config


def assert_alike(model, other):
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7)  # norms lose a bit around 1


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama3"])
def test_a_file_is_the_folder_that_it_was_made_of(tmp_path, name):
    model = models.load(gguf_files.write(tmp_path / "model.gguf", name, metadata=metadata_of(name)))
    wanted = config_of(name)
    assert abs(model.config.attention_scale / wanted.attention_scale - 1) < 1e-6
    assert dataclasses.replace(model.config, attention_scale=wanted.attention_scale) == wanted
    if name not in ("qwen2", "qwen2_5_vl"):
        assert_alike(model, models.load(fixtures.DATA / name))


def test_llama_3_scales_by_a_tensor(tmp_path):
    rope = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
    factors = gguf_files.llama3_factors(rope | {"rope_theta": 500_000.0}, 16)
    entries = {"llama.rope.freq_base": ("float32", 500_000.0)}
    made = {"rope_freqs.weight": factors}
    path = gguf_files.write(tmp_path / "model.gguf", "llama", metadata=entries, tensors=made)
    found = loader.read_config(path).ropes[0]
    assert (found.scaling, found.factor, found.original_max_position) == ("llama3", 8.0, 8192)
    assert (factors > 1).sum() > 2
    factors[-2] *= 1.5
    path = gguf_files.write(tmp_path / "model.gguf", "llama", metadata=entries, tensors={"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight which the decoder cannot honour"):
        loader.read_config(path)


def test_split_files_and_floats(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", "llama", split=5)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    wanted = models.load(fixtures.DATA / "llama")
    for given in (files[0], files[-1], tmp_path):
        assert_alike(models.load(given), wanted)
    files[1].rename(tmp_path / "aside")
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-0000\d\.gguf is not beside it"):
        models.load(files[0])


def test_quantized_matrices_are_dequantized(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    model = models.load(gguf_files.write(tmp_path / "model.gguf", "llama", quantize=kind), dtype="bfloat16")
    stored = fixtures.DATA / "llama"
    assert model.dtype == "bfloat16"
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(models.load(stored)), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b, rtol=0, atol=0.02 * float(np.abs(b).max()))
    assert models.load(tmp_path / "model.gguf").dtype == "float32"


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=int), ids=lambda kind: kind.name)
def test_every_format_of_the_package(kind, monkeypatch):
    group, size = gguf.GGML_QUANT_SIZES[kind]
    monkeypatch.setattr(reader, "SLICE", 2 * group)  # five groups in slices of two
    data = np.random.default_rng(0).integers(0, 256, 5 * size).astype(np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(data, kind).reshape(5, group)
        found = StoredTensor((5, group), int(kind), data).read(np.dtype(np.float32))
    np.testing.assert_array_equal(found, wanted)


def test_experts_of_a_layer_are_one_tensor(tmp_path):
    """Quantized too: each is dequantized by itself, where it is asked for."""
    random = np.random.default_rng(0)
    experts = random.normal(size=(6, 24, 32)).astype(np.float32)
    data = gguf.quants.quantize(experts, gguf.GGMLQuantizationType.Q8_0)
    kind = int(gguf.GGMLQuantizationType.Q8_0)
    parts = StoredTensor(experts.shape, kind, data.reshape(-1)).split()
    assert [part.shape for part in parts] == [(24, 32)] * 6
    whole = gguf.dequantize(data, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(np.stack([part.read() for part in parts]), whole)
    assert sum(np.shares_memory(part.data, data) for part in parts) == 6


@pytest.mark.parametrize(("metadata", "message"), [
    ({"qwen3moe.expert_count": (None, 0)}, r"lacks qwen3moe\.expert_count in its metadata"),
    ({"qwen3moe.expert_used_count": ("uint32", 7)}, r"num_experts_per_tok.*7"),
    ({"qwen3moe.expert_feed_forward_length": ("uint32", 25)}, r"shape \[24, 32\], not \[25, 32\]"),
    ({"qwen3moe.expert_shared_count": ("uint32", 1)}, r"qwen3moe\.expert_shared_count = 1"),
    ({"qwen3moe.expert_count": ("uint32", 5)}, r"experts\.5\.\w+\.weight is unknown"),
])  # fmt: skip
def test_experts_that_do_not_fit_are_refused(tmp_path, metadata, message):
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3_moe", metadata=metadata)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_a_file_may_say_no_width_of_mlps_where_all_layers_have_experts(tmp_path):
    for value in (("uint32", 0), (None, 0)):
        path = gguf_files.write(tmp_path / "model.gguf", "qwen3_moe", metadata={"qwen3moe.feed_forward_length": value})
        assert loader.read_config(path).mlp_dim == 24


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 7)])
def test_experts_of_odd_shapes_are_refused(tmp_path, shape):
    odd = {"blk.1.ffn_up_exps.weight": np.zeros(shape, np.float32)}
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3_moe", tensors=odd)
    with pytest.raises(ValueError, match=r"ffn_up_exps\.weight of shape .*, which is not \[experts, outputs, inputs\]"):
        models.load(path)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"blk.1.ffn_gate_exps.weight": None}, r"experts\.gate_up_proj is missing"),
    ({"blk.1.ffn_gate_exps.bias": None}, r"experts\.gate_up_proj_bias is missing"),
    ({"blk.0.ffn_down_exps.weight": None}, r"experts\.down_proj is missing"),
    ({"blk.0.ffn_up_exps.bias": np.zeros(3, np.float32)}, r"bias of shape \[3\].*not \[experts, outputs\]"),
    ({"blk.0.ffn_up_exps.weight": np.zeros((5, 32, 31), np.float32)}, r"experts\.gate_up_proj is missing"),
    ({"blk.0.attn_sinks.weight": None}, r"self_attn\.sinks is missing"),
    ({"blk.0.ffn_gate_inp.bias": np.zeros(3, np.float32)}, r"router\.bias has shape \[3\], not \[5\]"),
])  # fmt: skip
def test_experts_of_gpt_oss_that_do_not_fit_are_refused(tmp_path, tensors, message):
    path = gguf_files.write(tmp_path / "model.gguf", "gpt_oss", tensors=tensors)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_end_tokens_are_known_by_their_text_too(tmp_path):
    entries = {
        "tokenizer.ggml.tokens": ("array", list(ENDS)), "tokenizer.ggml.token_type": ("array", [3, 1, 4]),
        "tokenizer.ggml.eos_token_id": ("uint32", 1),
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "model.gguf", "llama", metadata=entries)
    assert loader.read_config(path).eos_ids == (1, 0, 2)


@pytest.mark.parametrize(("metadata", "tensors", "message"), [
    ({"general.architecture": ("string", "rwkv6")}, {}, r"architecture 'rwkv6'.*knows llama, qwen2"),
    ({"general.type": ("string", "mmproj")}, {}, "no model but 'mmproj'"),
    ({"llama.expert_count": ("uint32", 8)}, {}, r"llama\.expert_count = 8"),
    ({"llama.attention.sliding_window": ("uint32", 8)}, {}, r"llama\.attention\.sliding_window = 8"),
    ({"llama.rope.dimension_count": ("uint32", 8)}, {}, r"rope\.dimension_count = 8"),
    ({"llama.rope.scaling.type": ("string", "longrope")}, {}, r"rope_type = 'longrope'"),
    ({"llama.attention.value_length": ("uint32", 8)}, {}, r"value_length = 8"),
    ({"llama.block_count": ("uint32", 2**31)}, {}, "num_hidden_layers"),
    ({"llama.block_count": ("uint32", 3)}, {}, r"model\.layers\.2\.input_layernorm\.weight is missing"),
    ({"llama.block_count": (None, 0)}, {}, r"lacks llama\.block_count"),
    ({}, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, r"blk\.0\.attn_sinks\.weight is unknown"),
    ({}, {"blk.1.ffn_up.weight": np.zeros((40, 31), np.float32)}, r"up_proj\.weight has shape \[40, 31\]"),
    ({}, {"blk.1.attn_q.weight": np.zeros((63, 32), np.float32)}, r"attn_q\.weight of shape \[63, 32\]"),
    ({}, {"token_embd.weight": None}, r"lacks the field vocab_size|embed_tokens"),
    ({}, {"blk.1.ffn_up.weight": np.zeros((40, 32), np.int8)}, r"gguf package cannot dequantize the format I8"),
])  # fmt: skip
def test_what_is_not_known_is_refused_by_name(tmp_path, metadata, tensors, message):
    path = gguf_files.write(tmp_path / "model.gguf", "llama", metadata=metadata, tensors=tensors)
    with pytest.raises(ValueError, match=message) as raised:
        models.load(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def header(tensors=0, values=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def crafted_headers():
    """200 headers that promise what the file does not have, or what no model has."""
    rng = random.Random(0)
    large = [2**n + d for n in (31, 32, 40, 60, 63) for d in (-1, 0)] + [2**64 - 1]
    key = string("general.name")
    for n in large:
        yield header(tensors=n)
        yield header(values=n)
        yield header(values=1) + struct.pack("<Q", n) + b"name"  # a name
        yield header(values=1) + key + struct.pack("<IQ", 8, n) + b"text"  # a string
        for kind in (0, 6, 7, 8, 10):
            yield header(values=1) + key + struct.pack("<IIQ", 9, kind, n)  # an array
        yield header(values=1) + key + struct.pack("<IIQ", 9, 9, n)  # of arrays
        yield header(tensors=1) + string("x") + struct.pack("<IQQIQ", 2, n, n, 0, 0)
        yield header(tensors=1) + string("x") + struct.pack("<IQIQ", 1, 32, 0, n)
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(5000))  # each array holds the next
    yield header(values=1) + key + struct.pack("<I", 9) + nested
    yield header(values=2) + (key + struct.pack("<IB", 0, 1)) * 2
    yield header(values=1) + string("general.alignment") + struct.pack("<II", 4, 3)
    yield header(tensors=2) + (string("x") + struct.pack("<IQIQ", 1, 32, 0, 0)) * 2 + bytes(256)
    yield header(tensors=2) + b"".join(string(n) + struct.pack("<IQIQ", 1, 32, 0, 0) for n in "xy") + bytes(256)
    for rank in (0, 5, 2**32 - 1):
        yield header(tensors=1) + string("x") + struct.pack("<I", rank) + bytes(64)
    yield header(tensors=1) + string("x") + struct.pack("<IQIQ", 1, 32, 999, 0) + bytes(256)  # an unknown format
    yield header(version=1)
    yield header(version=0x03000000)
    yield b"GGU"
    yield b""
    for kind in (13, 200, 2**32 - 1):
        yield header(values=1) + key + struct.pack("<I", kind) + bytes(64)
    whole = header(values=1) + key + struct.pack("<I", 8) + string("text") + bytes(512)
    while True:
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[rng.randrange(4, 60)] = rng.randrange(256)
        yield bytes(damaged)


def test_crafted_headers_cost_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    tracemalloc.start()
    try:
        for number, data in zip(range(250), crafted_headers(), strict=False):
            path.write_bytes(data)
            if number % 3 == 0:  # a large file with nothing in it
                with path.open("r+b") as file:
                    file.truncate(2**33)
            tracemalloc.reset_peak()
            begin = time.process_time()
            with pytest.raises(ValueError, match=str(path)) as raised:
                models.load(path)
            assert time.process_time() - begin < 1, data[:80]
            assert tracemalloc.get_traced_memory()[1] < 100e6, data[:80]
            assert "\n" not in str(raised.value) and len(str(raised.value)) < 600
    finally:
        tracemalloc.stop()


def test_a_file_cut_short(tmp_path):
    data = gguf_files.write(tmp_path / "whole.gguf", "llama").read_bytes()
    path = tmp_path / "model.gguf"
    for size in (3, 20, 200, 900, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"truncated|no GGUF file"):
            models.load(path)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        models.load(tmp_path / "other.gguf")
