"""Sizes that nobody names: kernels run with them, on platforms that have any; and where they do not, that is said."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import trace_for

import jaxkv
import jaxkv.models
import pallas_kernels
from jaxkv._cli.main import main
from jaxkv._core.cache.data_parallel import shard_config
from pallas_kernels.api import sizes

LAYER = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128)
PLATFORMS = {"tpu": ("tpu", 128), "cuda": ("gpu", 64)}  # the kernels' name, and what head_dim is rounded up to
ROOM = [(8, 4096, None), (256, 32768, None), (32, 131072, None), (32, 131072, 1024), (1, 17, None)]


def chosen(config, platform, rows, tokens=1):
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    q = jax.ShapeDtypeStruct((rows, tokens, 32, 128), jnp.bfloat16)
    return jaxkv.explain(q, cache, layer=0, platform=platform)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("rows, max_seq_len, window", ROOM)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_kernels_run_with_the_default_block_size(platform, rows, max_seq_len, window, dtype):
    name, multiple = PLATFORMS[platform]
    layer = jaxkv.LayerConfig(num_kv_heads=8, head_dim=128, window=window)
    config = jaxkv.CacheConfig(
        layers=(layer,), max_seqs=rows, max_seq_len=max_seq_len, num_blocks=64, dtype=dtype,
        head_dim_multiple=multiple, join_kv=False,
    )  # fmt: skip
    for tokens in (1, 128):
        choice = chosen(config, platform, rows, tokens)
        assert choice.implementation == name, choice.reason
    assert config.block_size == config.default_block_size
    if dtype == "bfloat16" and rows * max_seq_len < 2**20:
        assert config.block_size == 16


def test_it_follows_what_it_depends_on():
    config = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=4, max_seq_len=512, num_blocks=64, head_dim_multiple=128)
    assert config.block_size == 16
    int8 = config.replace(dtype="int8")
    assert (int8.block_size, int8.num_blocks, int8.max_tokens) == (128, 64, 64 * 128)
    assert int8.replace(block_size=32).replace(max_seqs=8).block_size == 32
    assert config.replace(block_size=int8.block_size).block_size == 128
    assert int8.replace(head_dim_multiple=1).block_size == 16
    mixed = config.replace(layers=(LAYER, jaxkv.LayerConfig(num_kv_heads=8, head_dim=128, dtype="int8")))
    assert mixed.block_size == 128
    large = config.replace(max_seqs=256, max_seq_len=32768)
    assert large.block_size == 64 and shard_config(large, 4, "data").block_size == 64
    assert jaxkv.CacheConfig(layers=(LAYER,), max_seqs=4, max_seq_len=96, layout="contiguous").block_size == 96


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the platform has kernels")
def test_it_is_16_where_no_kernels_are():
    for dtype in ("bfloat16", "int8", "int4"):
        config = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=256, max_seq_len=32768, num_blocks=64, dtype=dtype)
        assert config.block_size == 16


def test_whoever_makes_a_config_chooses_it():
    model = jaxkv.models.small()
    fields = dict(max_seqs=2, max_seq_len=256, head_dim_multiple=128)
    made = [
        jaxkv.CacheConfig.from_model(model, **fields, dtype="int8"),
        jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=64, dtype="int8", **fields),
        jaxkv.CacheConfig.like([(np.zeros((2, 2, 256, 64), np.float32),) * 2], dtype="int8", **fields),
        jaxkv.Engine(model, cache_dtype="int8", **fields).config,
    ]
    assert [config.block_size for config in made] == [128] * 4
    tokens = jaxkv.generate(model, [[1, 2, 3], [4] * 130], 4, cache_dtype="int8", head_dim_multiple=128)
    assert [len(t) for t in tokens] == [4, 4]


def test_the_plan_begins_with_it(capsys, tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
    widths = {"vocab_size": 128, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | heads | widths))
    for chip, size in {"v5e": 128, "h100": 32}.items():
        assert main(["plan", "--model", str(tmp_path), "--chip", chip, "--dtype", "int8", "--weights", "1GB"]) == 0
        assert f"For the cache with blocks of {size}:" in capsys.readouterr().out


def shapes(block_size, kind=None, head_dim=128, rows=2, columns=4):
    shape = jax.ShapeDtypeStruct
    stored = jnp.int8 if kind else jnp.bfloat16
    arrays = [shape((rows, 1, 4, head_dim), jnp.bfloat16), shape((9, 2, 2, block_size, head_dim), stored)]
    arrays += [shape((rows, columns), jnp.int32), shape((rows,), jnp.int32), shape((rows,), jnp.int32)]
    return arrays, shape((9, 2, 2, block_size), jnp.float32) if kind else None


@pytest.mark.parametrize(
    "platform, given, wanted",
    [
        ("tpu", dict(block_size=16, kind="int8"), r"tpu kernels would with CacheConfig\(block_size=128\)"),
        ("gpu", dict(block_size=16, kind="int8"), r"gpu kernels would with CacheConfig\(block_size=32\)"),
        ("tpu", dict(block_size=16, rows=32, columns=8192), r"CacheConfig\(block_size=32\)"),
        ("tpu", dict(block_size=16, head_dim=64), r"CacheConfig\(head_dim_multiple=128\)"),
        ("gpu", dict(block_size=4097, columns=1), r"CacheConfig\(block_size=4104\) \(if contiguous, max_seq_len says"),
        ("tpu", dict(block_size=4097, columns=1), r"CacheConfig\(block_size=4112\) \(if contiguous, max_seq_len says"),
        ("tpu", dict(block_size=16, kind="int8", head_dim=64), r"CacheConfig\(block_size=128, head_dim_multiple=128\)"),
    ],
)
def test_what_a_size_would_cure_is_said_once(platform, given, wanted, monkeypatch):
    monkeypatch.setattr(sizes, "_WARNED", set())
    arrays, scale = shapes(**given)

    def attend(*arrays, kv_scale, bias):  # `bias`: two programs, traced apart
        return pallas_kernels.paged_attention(*arrays, kv_scale=kv_scale, kind=given.get("kind"), scale=bias)

    with trace_for(platform), pytest.warns(UserWarning, match=wanted) as told:
        for bias in (0.5, 0.25):
            jax.eval_shape(lambda *a, bias=bias: attend(*a[:-1], kv_scale=a[-1], bias=bias), *arrays, scale)
    assert len(told) == 1


def test_nothing_is_said_where_no_size_would_help(monkeypatch):
    monkeypatch.setattr(sizes, "_WARNED", set())
    arrays, _ = shapes(16)
    narrow, scale = shapes(16, "int8")
    mask = jax.ShapeDtypeStruct((2, 1, 64), jnp.bool_)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trace_for("tpu"):
            jax.eval_shape(lambda *a: pallas_kernels.paged_attention(*a[:-1], mask=a[-1]), *arrays, mask)
            asked = dict(kind="int8", implementation="xla")
            jax.eval_shape(lambda *a: pallas_kernels.paged_attention(*a[:-1], kv_scale=a[-1], **asked), *narrow, scale)
        with trace_for("cpu"):
            jax.eval_shape(
                lambda *a: pallas_kernels.paged_attention(*a[:-1], kv_scale=a[-1], kind="int8"), *narrow, scale
            )
