"""Steps planned with `cascade=True`: forks read once what they share, and get what they get without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.attention import shared_prefix as cascade
from jaxkv.testing import poison

ROWS, HEADS, DIM, PROMPT = 9, 6, 8, 263
FULL, LOCAL = (jaxkv.LayerConfig(num_kv_heads=2, head_dim=DIM, **sight) for sight in ({}, {"window": 20}))
SIZES = dict(max_seqs=ROWS, max_seq_len=512, num_blocks=160, block_size=4, dtype="float32")
CONFIG = jaxkv.CacheConfig(layers=(FULL, LOCAL, FULL), **SIZES)
STACKED = jaxkv.CacheConfig(layers=(FULL, FULL), stacked=True, **SIZES)


@pytest.fixture(autouse=True)
def little_is_worth_it(monkeypatch):
    monkeypatch.setattr(cascade, "WORTH_TOKENS", 512)


COUNTS = jnp.array([1, 1, 1, 1, 1, 1, 1, 1, 0], jnp.int32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def forks(config=STACKED):
    """Eight rows of one prompt, row 7 without what comes behind; row 8 is empty. NaN everywhere else."""
    cache = jaxkv.init(config)
    prompt = [normal(i, ROWS, PROMPT, 2, DIM) for i in range(len(config.layers))]
    cache = jaxkv.append(cache, prompt, prompt, jnp.zeros(ROWS, jnp.int32).at[0].set(PROMPT))
    cache = jaxkv.fork(cache, 0, list(range(1, 8)))
    tails = [x[:, :9] for x in prompt]
    return poison(jaxkv.append(cache, tails, tails, jnp.array([4, 9, 1, 1, 2, 3, 5, 0, 0], jnp.int32)))


def queries(layer, axes):
    return normal(10 + layer, *axes, HEADS, DIM), normal(20 + layer, *axes, 2, DIM)


def step_of(cache, counts, axes, longest, once, implementation):
    """Outputs of all layers, one by one or in a scan, and the bytes that one reads."""
    cache = jaxkv.extend(cache, counts)
    step, (q, k) = jaxkv.plan_step(cache, axes, cascade=once, longest=longest), queries(0, axes)

    def one(cache, i):
        return jaxkv.attention(q, k, k, cache, layer=i, step=step, implementation=implementation)[::-1]

    if cache.config.stacked:
        return jax.lax.scan(one, cache, jnp.arange(2))[1], step.bytes_read
    return jnp.stack([one(cache, i)[1] for i in range(len(cache.config.layers))]), step.bytes_read


@pytest.mark.parametrize("config, axes, longest", [
    (STACKED, (ROWS,), 1), *[(CONFIG, (ROWS, 1), None)] * NIGHTLY,
])  # fmt: skip
def test_forks_get_what_they_get_without(config, axes, longest):
    step = jax.jit(step_of, static_argnums=(2, 3, 4, 5))
    (outs, read), (expected, read_alone) = (
        step(forks(config), COUNTS, axes, longest, *way) for way in ((True, "xla"), (False, "reference"))
    )
    np.testing.assert_allclose(outs, expected, atol=2e-6)
    assert read < 0.2 * read_alone


def test_bytes_that_a_step_reads():
    cache = jaxkv.extend(forks(), COUNTS)
    axes, size = (ROWS, 1), STACKED.bytes_per_block // 2
    assert size == 4 * 2 * 2 * DIM * 4
    lengths, shared = cache.lengths.tolist()[:8], PROMPT // 4
    blocks = [-(-length // 4) for length in lengths]
    assert jaxkv.plan_step(cache, axes).bytes_read == sum(blocks) * size
    assert jaxkv.plan_step(cache, axes, cascade=True).bytes_read == (sum(blocks) - 7 * shared) * size
    assert jaxkv.plan_step(jaxkv.extend(forks(), 0 * COUNTS), axes, cascade=True).bytes_read == 0
    two = jaxkv.extend(forks(), 2 * COUNTS)
    step, own = jaxkv.plan_step(two, (ROWS, 2), cascade=True), [-(-n // 4) - shared for n in two.lengths.tolist()[:8]]
    # Sixteen queries: 64 of up to two heads to a KV head read at once, of nine 14, of sixteen and more eight.
    for heads, times in (2, 1), (4, 1), (16, 1), (18, 2), (32, 2), (128, 2):
        assert step.bytes_read_by(heads) == (sum(own) + times * shared) * size
    with pytest.raises(ValueError, match="num_heads must be a multiple of the 2 KV heads, not 5"):
        step.bytes_read_by(5)
    local = jaxkv.CacheConfig(layers=(LOCAL,), **SIZES)
    far = jaxkv.extend(jaxkv.extend(jaxkv.init(local), [263] + [0] * 8), [1] + [0] * 8)
    assert jaxkv.plan_step(far, axes).bytes_read == 5 * size  # positions 244 to 263


def test_explain_says_whether_rows_share():
    q = jax.ShapeDtypeStruct((ROWS, 1, HEADS, DIM), jnp.float32)
    ours = " 8 rows share up to 260 of their first tokens with others: "
    assert jaxkv.explain(q, forks()).reason.endswith(ours + "a step planned with cascade=True reads them once.")
    for options in ({"cascade": False}, {"deterministic": True}, {"implementation": "reference"}):
        assert jaxkv.explain(q, forks(), **options).reason.endswith(ours + "every row reads them by itself.")
    for cache, layer in (jaxkv.init(STACKED), 0), *[(forks(CONFIG), 1)] * NIGHTLY:  # of a window's too few are shared
        assert "share" not in jaxkv.explain(q, cache, layer=layer).reason
    reasons = []
    jax.eval_shape(lambda c: reasons.append(jaxkv.explain(q, c).reason), forks())
    assert "share" not in reasons[0]


def test_explain_says_which_kernels_read_once_what_rows_share():
    layers = [jaxkv.LayerConfig(num_kv_heads=1, head_dim=128, **sight) for sight in ({}, {"window": 256})]
    sizes = dict(max_seqs=ROWS, max_seq_len=512, num_blocks=20, block_size=16, dtype="bfloat16")
    cache = jaxkv.init(jaxkv.CacheConfig(layers=tuple(layers), **sizes))
    tables = [t.tables.at[:, :16].set(jnp.arange(1, 17)) for t in cache.tables]
    lengths = jnp.full(ROWS, 260, jnp.int32)
    cache = cache.replace(tables=tuple(
        dataclasses.replace(t, tables=x, lengths=lengths) for t, x in zip(cache.tables, tables, strict=True)
    ))  # fmt: skip
    q = jax.ShapeDtypeStruct((ROWS, 1, 2, 128), jnp.bfloat16)
    for platform in ("tpu", "cuda"):
        for layer, how in enumerate(("a step planned with cascade=True reads them", "every row reads them by itself")):
            reason = jaxkv.explain(q, cache, layer=layer, platform=platform).reason
            assert f" {ROWS} rows share up to 256 of their first tokens with others: {how}" in reason


def test_who_wants_it_otherwise_reads_alone():
    """`cascade=False` and `deterministic` are programs without it; so are gradients."""
    cache, (q, _) = jaxkv.extend(forks(), COUNTS), queries(0, (ROWS, 1))
    together, alone = (jaxkv.plan_step(cache, (ROWS, 1), cascade=once) for once in (True, False))

    def loops(step, **options):
        attend = jax.jit(lambda q, cache: jaxkv.attend(q, cache, layer=0, step=step, **options))
        return attend.lower(q, cache).as_text().count("stablehlo.while")

    assert loops(together) > loops(alone)
    assert loops(together, cascade=False) == loops(alone)
    assert loops(together, deterministic=True) == loops(alone, deterministic=True)
    named = jaxkv.explain(q, cache, layer=0, platform="cpu", blocks=jnp.zeros((ROWS, 2), jnp.int32))
    assert named.implementation == "xla"
    with pytest.raises(ValueError, match="cascade must be True or False, not 'no'"):
        jaxkv.attend(q, cache, layer=0, cascade="no")
    with pytest.raises(ValueError, match="cascade must be True or False, not 2"):
        jaxkv.plan_step(cache, (ROWS, 1), cascade=2)


def test_tables_that_have_changed_since_are_read_alone():
    """The row that all read with has been freed, and holds something else."""
    cache = jaxkv.extend(forks(), COUNTS)
    q, k = queries(0, (ROWS, 1))
    cache = jaxkv.write(cache, k, k, layer=0)
    plan = jaxkv.plan_step(cache, (ROWS, 1), cascade=True)
    other = cache.tables[0].tables.at[0].set(cache.tables[0].tables[8])
    after = cache.replace(tables=(dataclasses.replace(cache.tables[0], tables=other), *cache.tables[1:]))
    out, expected = (jaxkv.attend(q, c, layer=0, step=plan) for c in (after, cache))
    assert not out[0].any()
    np.testing.assert_allclose(out[1:], expected[1:], atol=2e-6)


def test_caches_that_cannot_share_plan_nothing():
    for fields in ({"max_seqs": 6}, {"max_seqs": 8, "max_seq_len": 256}, {"layout": "contiguous"}):
        config = dict(layers=(FULL,), max_seqs=16, max_seq_len=512, num_blocks=1, block_size=4) | fields
        if "layout" in fields:
            del config["block_size"], config["num_blocks"]
        cache = jax.eval_shape(lambda config=config: jaxkv.init(jaxkv.CacheConfig(**config)))
        assert jax.eval_shape(lambda c: jaxkv.plan_step(c, (len(c.lengths), 1), cascade=True), cache).shared is None
