"""Lower the kernels for CUDA on any machine: layouts, swizzles and shared memory of a sample of all shapes."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from nightly import NIGHTLY

from pallas_kernels import gpu, testing
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.gpu import chips, tuning
from pallas_kernels.gpu.tiles import Tile

# By day the ends and what is odd of each axis; most of what lies between, tests/compile/test_gpu_compile.py compiles.
AXES = {
    "block_size": (8, 16, 24, 32, 64, 128, 256, 4096) if NIGHTLY else (8, 24, 4096),  # 4096: contiguous
    "head_dim": (64, 80, 96, 128, 256, 320, 512) if NIGHTLY else (80, 128, 512),
    "group": (1, 4, 5, 7, 8, 16, 20) if NIGHTLY else (1, 7, 20),
    "dtype": (jnp.bfloat16, jnp.float16),
    "window": (None, 100),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
    "tokens": (1, 40),
}


def sample() -> list[dict]:
    """Combinations in which every pair of values of any two axes occurs, found greedily."""
    random.seed(0)
    names = list(AXES)
    # A dictionary for its order, which is the same in every test process.
    missing = {
        frozenset([(a, x), (b, y)]): None for a, b in itertools.combinations(names, 2) for x in AXES[a] for y in AXES[b]
    }
    chosen = []
    while missing:
        candidates = []
        for _ in range(20):
            combination = dict(sorted(next(iter(missing)), key=str))
            combination = {name: combination.get(name, random.choice(AXES[name])) for name in names}
            pairs = {frozenset(pair) for pair in itertools.combinations(combination.items(), 2)}
            candidates.append((len(pairs & missing.keys()), len(candidates), combination, pairs))
        _, _, combination, pairs = max(candidates, key=lambda c: c[:2])
        for pair in pairs:
            missing.pop(pair, None)
        chosen.append(combination)
    return chosen


def lower(*, block_size, head_dim, group, dtype, window, soft_cap, sinks, tokens, tree=False, spans=False, **others):
    rows, parts, num_kv_heads, stored = 3, *((1, 1) if "rank" in others else (2, 2)), -(-head_dim // 64) * 64
    num_heads = group * num_kv_heads
    shape = jax.ShapeDtypeStruct
    q = shape((rows, tokens, num_heads, head_dim), dtype)
    kv = shape((9, parts, num_kv_heads, block_size, stored), dtype)
    tables, row = shape((rows, 4), jnp.int32), shape((rows,), jnp.int32)
    sinks = shape((num_heads,), jnp.float32) if sinks else None
    by_token = {name: shape(q.shape[:2], jnp.int32) for name, given in (("tree", tree), ("spans", spans)) if given}
    assert gpu.unsupported("paged_attention", bundle_call(q=q, kv=kv, rank=others.get("rank"))) is None

    def attend(q, kv, tables, lengths, new, sinks, by_token):
        options = dict(window=window, soft_cap=soft_cap, **by_token, **others)
        return testing.run(gpu.paged_attention, q, kv, tables, lengths, new, sinks=sinks, **options)

    jax.jit(attend).trace(q, kv, tables, row, row, sinks, by_token).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("part", range(3) if NIGHTLY else [0])
def test_matrix(part):
    failures = []
    for combination in sample()[part::3]:
        try:
            lower(**combination)
        except Exception as e:  # collected, so that one run shows them all
            failures.append((combination, repr(e)[:200]))
    assert not failures


DEFAULTS = dict(
    block_size=16, head_dim=128, group=4, dtype=jnp.bfloat16, window=None, soft_cap=None, sinks=False, tokens=1
)


@pytest.mark.parametrize(
    "asked",
    [
        {"head_dim": 96, "group": 8, "tokens": 40}, {"head_dim": 256, "tokens": 40}, {"head_dim": 512},
        {"head_dim": 136, "rank": 128, "scale": 0.1, "tokens": 40},
    ],
    ids=lambda asked: str(asked["head_dim"]),
)  # fmt: skip
def test_odd_and_wide_heads_lower(asked):
    """What neither interpreter refuses: copies of parts of tiles, and layouts that an older JAX does not find."""
    lower(**DEFAULTS | asked)


BY_WARPS = {
    "decode": {},
    "prefill": {"tokens": 40},
    "odd heads": {"head_dim": 96, "group": 7, "tokens": 40, "dtype": jnp.float16, "window": 100, "sinks": True},
    "latent rows": {"head_dim": 136, "rank": 128, "scale": 0.1, "tokens": 40},
}


@pytest.mark.parametrize("name", BY_WARPS)
def test_products_by_warps_lower(name, monkeypatch):
    """As on Blackwell; of a head_dim of 256 and with less shared memory the consumers divide columns."""
    monkeypatch.setattr(chips, "find_chip", lambda: chips.GpuChip("NVIDIA B200", 148, "10.0"))
    lower(**DEFAULTS | BY_WARPS[name])
    if "rank" not in BY_WARPS[name]:
        monkeypatch.setattr(chips, "find_chip", lambda: chips.GpuChip("NVIDIA GeForce RTX 5090", 170, "12.0"))
        lower(**DEFAULTS | BY_WARPS[name] | {"head_dim": 256})


def test_vmap_lowers():
    q, kv = jnp.zeros((2, 3, 1, 8, 64), jnp.bfloat16), jnp.zeros((2, 9, 2, 2, 16, 64), jnp.bfloat16)
    tables, row = jnp.zeros((2, 3, 4), jnp.int32), jnp.ones((2, 3), jnp.int32)
    jax.jit(jax.vmap(functools.partial(testing.run, gpu.paged_attention))).trace(q, kv, tables, row, row).lower(
        lowering_platforms=("cuda",)
    )


def test_shard_map_lowers():
    """Tensor parallel: each device has its share of the heads."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("heads",))
    heads, nothing = PartitionSpec(None, None, "heads"), PartitionSpec()
    shape, row = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((3,), jnp.int32)
    kv, tables = shape((9, 2, 4, 16, 64), jnp.bfloat16), shape((3, 40), jnp.int32)  # long enough for rows to be cut
    attend = jax.jit(
        jax.shard_map(
            functools.partial(testing.run, gpu.paged_attention),
            mesh=mesh,
            in_specs=(heads, heads, nothing, nothing, nothing),
            out_specs=heads,
        )
    )
    for tokens in (1, 3, 40) if NIGHTLY else (3, 40):
        q = shape((3, tokens, 16, 64), jnp.bfloat16)
        attend.trace(q, kv, tables, row, row).lower(lowering_platforms=("cuda",))


@pytest.mark.skipif(not NIGHTLY, reason="by day they are compiled, in tests/compile")
@pytest.mark.parametrize("tokens", [1, 40])
def test_latent_rows_lower(tokens):
    """Tensor parallel: each device has its share of the heads, and all rows; also with 64 bits."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("heads",))
    heads, nothing = PartitionSpec(None, None, "heads"), PartitionSpec()
    shape = jax.ShapeDtypeStruct
    arrays = shape((3, tokens, 32, 576), jnp.bfloat16), shape((9, 1, 1, 16, 576), jnp.bfloat16)
    tables, row = shape((3, 40), jnp.int32), shape((3,), jnp.int32)

    def attend(*arrays):
        return testing.run(gpu.paged_attention, *arrays, rank=512, scale=0.1, window=100, sink_tokens=3)

    divided = jax.shard_map(attend, mesh=mesh, in_specs=(heads, *(nothing,) * 4), out_specs=heads)
    jax.jit(divided).trace(*arrays, tables, row, row).lower(lowering_platforms=("cuda",))
    with jax.enable_x64(True):
        jax.jit(attend).trace(*arrays, tables, row, row).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("tokens", [1, 40])
def test_x64_lowers(tokens):
    with jax.enable_x64(True):
        lower(**DEFAULTS | dict(sinks=True, window=100, sink_tokens=33, soft_cap=30.0, tokens=tokens))


@pytest.mark.parametrize(
    "asked",
    [dict(tree=True, chunk=100, tokens=40), dict(deterministic=True, tokens=3)]
    + NIGHTLY
    * [
        dict(tree=True, tokens=3),
        dict(spans=True, tokens=40),
        *(dict(tree=True, window=100, sink_tokens=4, tokens=tokens) for tokens in (3, 40)),
        *(dict(window=60, sink_tokens=70, tokens=tokens, block_size=256) for tokens in (1, 3, 40)),
    ],
)
def test_what_goes_by_the_token_lowers(asked):
    lower(**DEFAULTS | asked)


def test_too_many_stages(monkeypatch):
    """Negative control: more slots than shared memory holds run in the interpreter, and are caught here."""
    plan = tuning.DecodePlan(Tile(tokens=128, stages=4), num_blocks=8)
    monkeypatch.setattr(tuning, "decode_plan", lambda *_: plan)
    with pytest.raises(ValueError, match="shared memory"):
        lower(**DEFAULTS | dict(head_dim=256))
