"""DeepSeek V4: its files' names and formats, the table of experts, hyper-connections, and layers in a scan."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY, skip_by_day
from support import fixtures

import jaxkv
from jaxkv import LayerConfig, models
from jaxkv._cli.plan.decode_step import attention_work, find_compressors
from jaxkv._files import safetensors
from jaxkv.models import Decoder, config_reader
from jaxkv.models.blocks.compressor import rotate_last
from jaxkv.models.blocks.hyper import make_doubly_stochastic
from jaxkv.models.blocks.part_configs import CompressedConfig, CompressorConfig, HyperConfig, IndexConfig
from jaxkv.models.checkpoint_formats import dequantize
from jaxkv.models.checkpoints.parameter_counts import count_parameters
from jaxkv.models.config_fields import Fields
from jaxkv.models.experts import TokenTable
from jaxkv.models.families.deepseek_v4_layers import read_ropes
from jaxkv.models.mixers.block_config import BlockConfig
from jaxkv.models.rope import Rope

FOLDER = fixtures.DATA / "deepseek_v4"
TOKENS = np.arange(2, 22, dtype=np.int32)[None] * 7 % 96
load = functools.cache(lambda: models.load(FOLDER))


@jax.jit
def dense(model, tokens):
    return model(tokens)[0]


def tensors_of(folder=FOLDER):
    return safetensors.read(folder / "model.safetensors")


def write(folder, tensors, **fields):
    config = json.loads((FOLDER / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.write(folder / "model.safetensors", tensors)
    return folder


def name_as_deepseek(name):
    """DeepSeek's name of a tensor that transformers has written."""
    name = name.replace("model.embed_tokens.", "embed.").replace("model.hc_head.hc_", "hc_head_")
    return name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")


# From the names that transformers writes to those of its modules.
MODULES = [
    ("^head", "lm_head"), (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."), (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."), (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn_sink", ".sinks"),
    (r"self_attn\.norm", "self_attn.kv_norm"), (r"\.q_norm\.", ".q_a_norm."), (r"\.w(q|o)_(a|b)\.", r".\1_\2_proj."),
    (r"\.wkv\.", ".kv_proj."), (r"\.gate\.bias", ".gate.e_score_correction_bias"), (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
]  # fmt: skip


def name_as_modules(tensors):
    found = {}
    for name, x in tensors.items():
        for pattern, new in MODULES:
            name = re.sub(pattern, new, name)
        found[name] = x
    for i in range(3):
        stem = f"model.layers.{i}.mlp.experts"
        both = {kind: np.stack([found.pop(f"{stem}.{j}.{kind}_proj.weight") for j in range(6)])
                for kind in ("gate", "up", "down")}  # fmt: skip
        found[f"{stem}.gate_up_proj"] = np.concatenate([both["gate"], both["up"]], axis=1)
        found[f"{stem}.down_proj"] = both["down"]
    return found


def test_rotary_embeddings():
    """As published, beside the bases; and both together, with all that they have."""
    yarn = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    flat = {"rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": yarn | {"type": "yarn"}}
    share = {"partial_rotary_factor": 0.125}
    scaled = share | yarn | {"rope_theta": 160000.0, "rope_type": "yarn", "attention_factor": 1.0}
    nested = {"main": share | {"rope_theta": 10000.0, "rope_type": "default"}, "compress": scaled}
    found = read_ropes(Fields(flat, "config.json"), 1 << 20, 512, 64)
    assert found == read_ropes(Fields({"rope_parameters": nested}, "config.json"), 1 << 20, 512, 64)
    assert found["main"] == Rope(theta=10000.0, interleaved=True)
    compress = found["compress"]
    assert (compress.scaling, compress.theta, compress.factor, compress.magnitude) == ("yarn", 160000.0, 16.0, 1.0)
    with pytest.raises(ValueError, match=r"main of rope_parameters in config.json has partial_rotary_factor = 0.25"):
        nested["main"]["partial_rotary_factor"] = 0.25
        read_ropes(Fields({"rope_parameters": nested}, "config.json"), 1 << 20, 512, 64)


def assert_same(model, other):
    jax.tree.map(np.testing.assert_array_equal, model, other)


def test_deepseek_s_names(tmp_path):
    tensors = {name_as_deepseek(name): x for name, x in tensors_of().items()}
    assert {
        "embed.weight",
        "head.weight",
        "norm.weight",
        "hc_head_fn",
        "layers.0.attn.kv_norm.weight",
    } <= tensors.keys()
    extra = {"mtp.0.attn.wq_a.weight": np.ones((2, 2), np.float32), "mtp.0.hc_head_fn": np.ones(2, np.float32)}
    assert_same(models.load(write(tmp_path, tensors | extra)), load())


def test_names_of_transformers_modules(tmp_path):
    tensors = name_as_modules(tensors_of())
    own = {"mlp.gate.e_score_correction_bias", "self_attn.o_a_proj.weight", "attn_hc.fn", "mlp.experts.gate_up_proj"}
    assert {"lm_head.weight"} | {f"model.layers.1.{name}" for name in own} <= tensors.keys()
    assert_same(models.load(write(tmp_path, tensors)), load())


def test_weights_of_four_and_eight_bits(tmp_path):
    """As published: matrices of 8 bits in blocks, experts of 4 bits, both with powers of two as scales."""
    random, stored, plain = np.random.default_rng(0), {}, {}
    for name, x in tensors_of().items():
        key = name_as_deepseek(name)
        stored[key] = plain[key] = x
        if ".experts." in name and "shared" not in name:
            codes = random.integers(-128, 128, (x.shape[0], x.shape[1] // 2), dtype=np.int8)
            scales = np.exp2(random.integers(-4, -1, (x.shape[0], x.shape[1] // 8))).astype(ml_dtypes.float8_e8m0fnu)
            both = np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], axis=-1).reshape(x.shape)
            levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
            numbers = np.where(both & 8, -1, 1) * levels[both & 7] * np.repeat(scales.astype(np.float32), 8, axis=1)
        elif ".attn.w" in name or ".shared_experts." in name:
            codes = (x * 8).astype(ml_dtypes.float8_e4m3fn)
            shape = tuple(-(-n // 16) for n in x.shape)
            scales = np.exp2(random.integers(-4, -2, shape)).astype(ml_dtypes.float8_e8m0fnu)
            of_each = np.repeat(np.repeat(scales.astype(np.float32), 16, axis=0), 16, axis=1)
            numbers = codes.astype(np.float32) * of_each[: x.shape[0], : x.shape[1]]
        else:
            continue
        stored |= {key: codes, f"{key.removesuffix('.weight')}.scale": scales}
        plain[key] = numbers.astype(np.float32)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    published = write(tmp_path / "a", stored, quantization_config=quantization, expert_dtype="fp4")
    assert_same(models.load(published), models.load(write(tmp_path / "b", plain)))
    with pytest.raises(ValueError, match="expert_dtype = 'int3'"):
        models.load(write(tmp_path / "a", stored, quantization_config=quantization, expert_dtype="int3"))
    wrong = {"a.weight": np.zeros((4, 8), np.int8), "a.weight_scale_inv": np.ones((4, 3), np.float32)}
    with pytest.raises(ValueError, match=r"not one scale for each of 4 rows' blocks of 16 numbers"):
        dequantize(wrong, {}, "config.json")


def test_the_table_of_experts(tmp_path):
    """Integers stay integers, whatever the weights' dtype, and belong to no trained parameters."""
    model = models.load(FOLDER, dtype="bfloat16")
    table = model.layers[0].experts.expert_ids
    assert isinstance(table, TokenTable) and not isinstance(table, nnx.Param) and table.dtype == jnp.int32
    np.testing.assert_array_equal(table[...], tensors_of()["model.layers.0.ffn.gate.tid2eid"])
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("bfloat16")}
    models.save(model, tmp_path)
    assert tensors_of(tmp_path)["model.layers.0.ffn.gate.tid2eid"].dtype == np.int64
    wrong = dict(tensors_of()) | {"model.layers.0.ffn.gate.tid2eid": np.zeros((96, 2), np.float32)}
    with pytest.raises(ValueError, match="tid2eid has dtype float32, not integers"):
        models.load(write(tmp_path, wrong))


@skip_by_day("gradients of attention to entries are tried in tests/kernels/test_compress_ratio.py")
def test_every_parameter_has_a_gradient():
    """Through a cache the same as densely; the table has none, and a choice of entries passes none on."""
    model = models.load(FOLDER, scan=False)

    def loss(model, cache=None):
        logits, _ = model(TOKENS, cache=cache)
        return jnp.square(logits).mean()

    found = nnx.to_flat_state(jax.jit(nnx.grad(loss))(model))
    assert not any("expert_ids" in path for path, _ in found)
    for path, x in found:
        assert bool(jnp.isfinite(x[...]).all()), path
        assert (float(jnp.abs(x[...]).max()) > 0) != (path[-1] == "choice_bias" or "indexer" in path), path
    config = jaxkv.CacheConfig.from_model(model, max_seqs=1, max_seq_len=32, block_size=8)
    cache = jaxkv.extend(jaxkv.init(config), [TOKENS.size])
    paged = nnx.to_flat_state(jax.jit(nnx.grad(loss))(model, cache))
    for (path, x), (_, wanted) in zip(paged, found, strict=True):
        np.testing.assert_allclose(x[...], wanted[...], atol=2e-4 * np.abs(wanted[...]).max() + 1e-7, err_msg=str(path))


@pytest.mark.parametrize("scan", ["stacked", "apart"] if NIGHTLY else ["stacked"])
def test_layers_in_a_scan(scan, tmp_path):
    """Two periods, each of a layer whose experts a table names, and of one that compresses its tokens."""
    window, sparse, heavy, _ = (block.compressor for block in load().config.blocks)
    blocks = (BlockConfig(hash_experts=True, compressor=heavy), BlockConfig(compressor=sparse)) * 2
    assert window is None
    config = dataclasses.replace(
        load().config, blocks=blocks, ropes=load().config.ropes[1:2] * 4,
        layers=tuple(layer for block in blocks for layer in block.layers(load().config.layers[0])),
    )  # fmt: skip
    random = np.random.default_rng(0)
    model = Decoder(config, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x + jnp.asarray(random.normal(0, 0.2, x.shape), x.dtype), params))
    models.save(model, tmp_path)
    plain, scanned = models.load(tmp_path, scan=False), models.load(tmp_path, scan=scan)
    assert plain.config == config and (scanned.periods, scanned.num_scanned, plain.scan) == (2, 4, False)
    wanted = dense(plain, TOKENS)
    np.testing.assert_allclose(dense(scanned, TOKENS), wanted, rtol=1e-4, atol=1e-4)
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache=jaxkv.extend(cache, [10])))
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(scanned, max_seqs=1, max_seq_len=32, block_size=8))
    for half in (0, 10):
        logits, cache = step(scanned, TOKENS[:, half : half + 10], cache)
        np.testing.assert_allclose(logits, wanted[:, half : half + 10], rtol=1e-4, atol=1e-4)


def test_over_two_devices():
    """Heads in their groups, experts by their widths; the table is on each."""
    model = models.load(FOLDER, mesh=jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]))
    layer = model.layers[0]
    attention, experts = layer.attention, layer.experts
    divided = ((attention.query_up, 0), (attention.out_down, 0), (attention.out_up, 1), (experts.up, 2))
    assert all(x[...].sharding.spec[axis] == "model" for x, axis in divided)
    assert layer.experts.expert_ids[...].sharding.is_fully_replicated
    np.testing.assert_allclose(dense(model, TOKENS), dense(load(), TOKENS), rtol=1e-4, atol=1e-4)


def test_a_cache_holds_a_token_once():
    """And entries of 4 and of 8, and their inputs in windows as long as an entry's."""
    near, sparse = LayerConfig.latent(16, 0, window=8), LayerConfig.latent(16, 0, compress_ratio=4, index_dim=16)
    inputs = [LayerConfig(num_kv_heads=1, head_dim=n, window=8, dtype="float32") for n in (2 * (16 + 16), 16)]
    heavy = LayerConfig.latent(16, 0, compress_ratio=8)
    of_sparse = (near, sparse, inputs[0])
    assert load().layer_configs == (near, *of_sparse, near, heavy, inputs[1], *of_sparse)
    cache = jaxkv.init(jaxkv.CacheConfig.from_model(load(), max_seqs=1, max_seq_len=32, num_blocks=8))
    assert cache.config.block_size == 16
    numbers = [cache.config.bytes_per_layer_block(i) // 4 for i in range(4)]
    assert numbers == [16 * 16, 16 * 16, 16 // 4 * (16 + 16), 16 * 2 * 64]
    assert cache.config.bytes_per_layer_block(5) == 16 // 8 * 16 * 4


def test_a_matrix_becomes_doubly_stochastic():
    x = jnp.exp(jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 4)), jnp.float32))
    once, often = make_doubly_stochastic(x, 1, 0.0), make_doubly_stochastic(x, 30, 0.0)
    np.testing.assert_allclose(once, x / x.sum(axis=-2, keepdims=True), rtol=1e-6)
    for axis in (-1, -2):
        np.testing.assert_allclose(often.sum(axis=axis), 1, rtol=1e-4)


def test_only_last_numbers_are_rotated():
    """Of heads of which less than half rotates, and of which all does."""
    x = np.arange(24, dtype=np.float32).reshape(2, 2, 6)
    (part,), (whole,) = (rotate_last(lambda y: (-y,), size, x) for size in (2, 6))
    np.testing.assert_array_equal(part, x * np.array([1, 1, 1, 1, -1, -1], np.float32))
    np.testing.assert_array_equal(whole, -x)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_heads_are_rotated_back(interleaved, share):
    rope = Rope(theta=100.0, interleaved=interleaved, partial_rotary_factor=share)
    x, positions = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 8)), jnp.float32), jnp.arange(3, 8)
    np.testing.assert_allclose(rope.rotate_back(rope(x, x, positions)[0], positions), x, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(layers=(LayerConfig(num_kv_heads=1, head_dim=16),) * 10), "whose rank is their head_dim"),
        (dict(layers=load().layer_configs[:9]), "blocks have 10 layers, but layers 9"),
        (dict(compressed=None), "need compressed=, the config of their attention"),
        (
            dict(compressed=CompressedConfig(rope_dim=8, query_rank=4, out_groups=3, out_rank=2)),
            "cannot lie in 3 groups",
        ),
        (dict(compressed=CompressedConfig(rope_dim=18, query_rank=4, out_groups=2, out_rank=2)), "or 18 entries of 16"),
        (dict(experts=None, expert_layers=()), "Blocks 0 have hash_experts"),
        (dict(layer_scale=True), "no per_layer and no layer_scale"),
    ],
)
def test_what_does_not_go_together(change, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(load().config, **change)
    with pytest.raises(
        ValueError, match=r"index\.dim must be at least rope_dim, 8, as so many entries of it rotate, not 4"
    ):
        blocks = list(load().config.blocks)
        narrow = CompressorConfig(ratio=4, overlaps=2, index=IndexConfig(heads=1, dim=4, top_k=2))
        blocks[1] = dataclasses.replace(blocks[1], compressor=narrow)
        dataclasses.replace(load().config, blocks=tuple(blocks))
    with pytest.raises(ValueError, match="overlaps must be"):
        CompressorConfig(ratio=4, overlaps=3)
    with pytest.raises(ValueError, match="rope_dim must be even"):
        CompressedConfig(rope_dim=3, query_rank=4, out_groups=2, out_rank=2)
    with pytest.raises(ValueError, match="count must be at least 2"):
        HyperConfig(count=1)


def test_the_published_size():
    """V4 Flash: as many parameters as its name says, and bytes of a cache that a plan counts."""
    fields = json.loads((FOLDER / "config.json").read_text())
    left_out = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
    small = {name: x for name, x in fields.items() if name in ("model_type", "architectures") and name not in left_out}
    flash = small | dict(
        vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, num_key_value_heads=1,
        compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], num_hash_layers=3, max_position_embeddings=1 << 20,
    )  # fmt: skip
    config = config_reader.parse(flash)
    assert 284e9 < count_parameters(config) < 284.5e9
    cache = jaxkv.CacheConfig(layers=config.layer_configs, max_seqs=1, max_seq_len=1 << 20, num_blocks=1 << 13)
    assert cache.block_size == 128 and cache.group_windows == (128, None, 8)
    assert cache.bytes_per_group_block(1) // 128 == 2 * (21 * (512 + 128) // 4 + 20 * 512 // 128)
    read, _, scored = attention_work(cache, 1 << 20, None, find_compressors(config))
    halves = 43 * 128 * 512 + 20 * 2 * 2 * 512 + 21 * (2 * 2 * 2 * 2 * 640 + 512 * 512 + (128 << 18)) + 20 * (512 << 13)
    assert read == 2 * halves
    assert scored == 21 * 64 * 128 * (1 << 18)
