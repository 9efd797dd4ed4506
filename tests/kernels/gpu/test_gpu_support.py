"""What the GPU backend refuses, and that it says so by name with the way out."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import pallas_kernels
from jaxkv._cli.plan.chips import reads_groups
from pallas_kernels.common.quantization import FORMATS
from pallas_kernels.gpu import chips


def arguments(
    *, dtype=jnp.bfloat16, pool_dtype=None, head_dim=128, stored=None, block_size=16, heads=8, tokens=1, **others
):
    shape = jax.ShapeDtypeStruct
    pool = (9, 2, 2) if "rank" not in others else (9, 1, 1)
    kv = shape((*pool, block_size, stored or head_dim), pool_dtype or dtype)
    row = shape((2,), jnp.int32)
    q = shape((2, tokens, heads, head_dim), dtype)
    return dict(q=q, kv=kv, tables=shape((2, 4), jnp.int32), lengths=row, new=row, **others)


def four_bits(head_dim, block_size=32, dtype=jnp.bfloat16, kind="int4", **others):
    scale = jax.ShapeDtypeStruct((9, 2, 2, block_size, -(-head_dim // FORMATS[kind].group_size)), dtype)
    stored = -(-head_dim // 64) * 32
    return arguments(
        head_dim=head_dim,
        stored=stored,
        pool_dtype=jnp.uint8,
        block_size=block_size,
        kind=kind,
        kv_scale=scale,
        **others,
    )


def latent(**others):
    return arguments(**dict(head_dim=576, heads=128, rank=512, scale=0.1) | others)


REFUSED = {
    "mask": arguments(mask=jax.ShapeDtypeStruct((2, 1, 64), jnp.bool_)),
    "kv_scale": arguments(kv_scale=jax.ShapeDtypeStruct((9, 2, 2, 16), jnp.float32)),
    "float32": arguments(dtype=jnp.float32),
    "dtype": arguments(pool_dtype=jnp.float16),
    "block_size": arguments(block_size=12),
    r"store 128 with CacheConfig\(head_dim_multiple=64\)": arguments(head_dim=80),
    "up to 512, but q has 576": arguments(head_dim=576),
    "more than 256 in multiples of 64, not 300": arguments(head_dim=300, stored=320),
    "one head, not of 2; give the cache join_kv=False": latent()
    | {"kv": jax.ShapeDtypeStruct((9, 1, 2, 16, 576), jnp.bfloat16)},
    "multiples of 128 up to 512, not 500": latent(rank=500),
    "multiples of 128 up to 512, not 640": latent(rank=640, head_dim=704),
    "64 query heads or a multiple of them, not 72; pad q to 128": latent(heads=72),
    "latent rows of bfloat16 or float16, not of int8": latent(
        pool_dtype=jnp.int8, kind="int8", kv_scale=jax.ShapeDtypeStruct((9, 1, 1, 16, 2), jnp.float32)
    ),
    "multiples of 16 up to 256 in int4, not 320": four_bits(320),
    "multiples of 16 up to 256 in int4, not 72": four_bits(72),
    "multiples of 16 up to 256 in k5v3, not 320": four_bits(320, kind="k5v3"),
    "multiples of 32 tokens in int4, not 16": four_bits(128, block_size=16),
    "scales of bfloat16, not float32; cast them": four_bits(128, dtype=jnp.float32),
    "latent rows of bfloat16 or float16, not of int4; give the cache join_kv=False": latent(
        pool_dtype=jnp.uint8, kind="int4", kv_scale=jax.ShapeDtypeStruct((9, 1, 1, 16, 18), jnp.bfloat16)
    ),
    "multiples of 64 up to 576, but q has 640": latent(head_dim=640),
    r"q has 528 and the pool stores 528; store 576 with": latent(head_dim=528),
    "multiples of 8 tokens, not 12": latent(block_size=12),
    "16384 rows": arguments()
    | {
        "q": jax.ShapeDtypeStruct((16_385, 1, 4, 64), jnp.bfloat16),
        "tables": jax.ShapeDtypeStruct((16_385, 4), jnp.int32),
        **dict.fromkeys(("lengths", "new"), jax.ShapeDtypeStruct((16_385,), jnp.int32)),
    },
}


@pytest.mark.parametrize("word", REFUSED)
def test_refusals(word):
    choice = pallas_kernels.explain(platform="cuda", **REFUSED[word])
    assert choice.implementation == "xla"
    assert re.search(word, choice.reason) and "implementation=None" in choice.reason
    with pytest.raises(NotImplementedError, match=word):
        pallas_kernels.explain(implementation="gpu", **REFUSED[word])


@pytest.mark.parametrize(("head_dim", "stored"), [(64, 64), (80, 128), (96, 128), (128, 128), (256, 256), (80, 256)])
def test_supported(head_dim, stored):
    choice = pallas_kernels.explain(platform="cuda", **arguments(head_dim=head_dim, stored=stored))
    assert choice.implementation == "gpu"


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["int4", "k5v3"])
def test_four_bits(kind, head_dim, tokens):
    """As a cache on a GPU stores them by itself, whose plan says so too."""
    given = four_bits(head_dim, tokens=tokens, kind=kind)
    assert pallas_kernels.explain(platform="cuda", **given).implementation == "gpu"
    layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=head_dim, dtype=kind)
    sizes = dict(max_seqs=2, max_seq_len=64, num_blocks=8, head_dim_multiple=64)
    pool = jax.eval_shape(lambda: jaxkv.init(jaxkv.CacheConfig(layers=(layer,), **sizes))).pools[0]
    for array, name in ((pool.kv, "kv"), (pool.scale, "kv_scale")):
        assert (array.shape, array.dtype) == (given[name].shape, given[name].dtype)
    assert reads_groups("gpu", layer, FORMATS[kind])


def test_plans_know_what_four_bits_are_refused():
    for head_dim in (72, 320):
        assert not reads_groups("gpu", jaxkv.LayerConfig(num_kv_heads=2, head_dim=head_dim), FORMATS["int4"])
    assert not reads_groups("gpu", jaxkv.LayerConfig.latent(512, 64), FORMATS["int4"])


@pytest.mark.parametrize("heads", [64, 66, 96, 142, 256])
def test_any_number_of_query_heads(heads):
    """Of 2 KV heads: those of one are taken in parts, where they are more than a thread block has room for."""
    for tokens in (1, 9):
        given = arguments(heads=heads, tokens=tokens)
        assert pallas_kernels.explain(platform="cuda", **given).implementation == "gpu"


@pytest.mark.parametrize(("heads", "tokens"), [(8, 1), (8, 8), (80, 1), (8, 40), (142, 9)])
@pytest.mark.parametrize("head_dim", [320, 512])
def test_wide_heads(head_dim, heads, tokens):
    """Of 2 KV heads, decoded or prefilled."""
    for kind in (None, "int8"):
        given = arguments(head_dim=head_dim, heads=heads, tokens=tokens, block_size=32)
        if kind is not None:
            given |= {"kind": kind, "kv_scale": jax.ShapeDtypeStruct((9, 2, 2, 32), jnp.float32)}
            given["kv"] = jax.ShapeDtypeStruct(given["kv"].shape, jnp.int8)
        choice = pallas_kernels.explain(platform="cuda", **given)
        assert choice.implementation == "gpu", choice


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "kimi-k2", "deepseek-v3"])
def test_latent_rows_of_a_cache(name):
    """As `attention` takes them, in the pool that a cache on a GPU makes."""
    shape = pallas_kernels.SHAPES[name]
    layers = (jaxkv.LayerConfig.latent(shape.rank, shape.head_dim - shape.rank),)
    config = jaxkv.CacheConfig(
        layers=layers, max_seqs=2, max_seq_len=64, num_blocks=8, head_dim_multiple=64, dtype="bfloat16"
    )
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    assert cache.pools[0].kv.shape[-1] == 576
    for tokens in (1, 9):
        q = jax.ShapeDtypeStruct((2, tokens, shape.num_heads, shape.head_dim), jnp.bfloat16)
        choice = jaxkv.explain(q, cache, layer=0, platform="cuda")
        assert choice.implementation == "gpu", choice


@pytest.mark.parametrize("head_dim", [80, 96])
def test_the_way_out_of_an_odd_head_dim(head_dim):
    """The pool that CacheConfig makes with the multiple that the refusal names is one that the kernels take."""
    layers = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=head_dim),)
    config = jaxkv.CacheConfig(
        layers=layers, max_seqs=2, max_seq_len=64, num_blocks=8, block_size=16, head_dim_multiple=64, dtype="bfloat16"
    )
    stored = jaxkv.init(config).pools[0].kv.shape[-1]
    choice = pallas_kernels.explain(platform="cuda", **arguments(head_dim=head_dim, stored=stored))
    assert stored == 128 and choice.implementation == "gpu"


def test_write_is_left_to_xla():
    choice = pallas_kernels.explain("write_kv", platform="cuda", **arguments())
    assert choice.implementation == "xla"


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [
        ("8.0", "xla"),
        ("8.9", "xla"),
        ("9.0", "gpu"),
        ("10.0", "gpu"),
        ("10.3", "gpu"),
        ("12.0", "gpu"),
        ("13.0", "xla"),
        (None, "xla"),
    ],
)
def test_chips(capability, chosen, monkeypatch):
    monkeypatch.setattr(chips, "find_chip", lambda: chips.GpuChip("some GPU", 100, capability))
    choice = pallas_kernels.explain(platform="cuda", **arguments())
    assert choice.implementation == chosen
    assert (
        chosen == "gpu" or (capability or "'some GPU' is no name of one that they know; describe it") in choice.reason
    )
