"""A step's plan: the same bits with it and without, and refused where it is another step's."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv._core.state.state import STALE
from jaxkv.testing import poison

ROWS, HEADS = 4, 6
LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
    jaxkv.LayerConfig(num_kv_heads=3, head_dim=8, window=5),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=8),
)
CONFIG = jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, max_seq_len=48, num_blocks=24, block_size=4, dtype="float32")
# The axes of a step, and the tokens of each row: some rows ask for more than the arrays have places for.
STEPS = {
    "decode": ((ROWS, 1), (1, 0, 1, 1)),
    "decode, a row too many": ((ROWS, 1), (1, 2, 1, 0)),
    "padded": ((ROWS, 5), (3, 5, 0, 1)),
    "padded, a row too long": ((ROWS, 5), (3, 6, 0, 1)),
    "packed": ((9,), (3, 0, 5, 1)),
    "packed, a row past the end": ((9,), (3, 0, 7, 1)),
    "packed, a tail": ((9,), (1, 0, 2, 1)),
    "packed decode": ((4,), (1, 0, 1, 1)),
    "packed decode, few places": ((2,), (0, 1, 0, 1)),
    "packed decode, too few places": ((2,), (1, 1, 0, 1)),
    "nothing": ((0,), (0, 0, 0, 0)),
}


quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def filled(lengths=(7, 4, 0, 11), config=CONFIG):
    """A cache with some tokens, and NaN wherever none is."""
    keys = [normal((ROWS, max(lengths), layer.num_kv_heads, 8), i) for i, layer in enumerate(config.layers)]
    fill = quickly_compiled(lambda counts: poison(jaxkv.append(jaxkv.init(config), keys, keys, counts)))
    return fill(jnp.array(lengths, jnp.int32))


def normal(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def run(cache, axes, counts, planned, layered, longest):
    """All layers of one step: outputs and LSE of each, and the cache."""
    cache = jaxkv.extend(cache, counts)
    step = jaxkv.plan_step(cache, axes, longest=longest) if planned else None
    outs, layers = [], list(cache.layers)
    # By day the third layer, of the first one's tables, in one of the steps.
    for i, layer in enumerate(LAYERS if NIGHTLY or axes == (ROWS, 1) else LAYERS[:2]):
        q = normal((*axes, HEADS, 8), 10 + i)
        k, v = (normal((*axes, layer.num_kv_heads, 8), 20 + i + j) for j in (0, 50))
        where = {"cache": layers[i]} if layered else {"cache": cache, "layer": i}
        out, got = jaxkv.attention(q, k, v, step=step, return_lse=True, **where)
        outs.append(out)
        if layered:
            layers[i] = got
        else:
            cache = got
    return outs, cache.with_layers(layers) if layered else cache


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@functools.cache
def compiled(axes, ways):
    """One program of a step, in several ways: each `(planned, layered, longest)`."""
    return quickly_compiled(
        lambda cache, counts: [
            run(cache, axes, counts, planned, layered, longest) for planned, layered, longest in ways
        ]
    )


PLAIN, PLANNED, LAYERED, PLANNED_LAYERED, DECODE = (
    (False, False, None), (True, False, None), (False, True, None), (True, True, None), (True, False, 1),
)  # fmt: skip


# By day the packed step is a decode step with fewer places than there are rows.
BY_DAY = [name for name in STEPS if name not in ("packed decode", "packed")]


@pytest.mark.parametrize("name", STEPS if NIGHTLY else BY_DAY)
def test_same_bits_with_and_without_a_plan(name):
    axes, counts = STEPS[name]
    ways = (PLAIN, PLANNED, LAYERED, PLANNED_LAYERED) if axes in ((ROWS, 1), *[(9,)] * NIGHTLY) else (PLAIN, PLANNED)
    (outs, after), *others = compiled(axes, ways)(filled(), jnp.array(counts, jnp.int32))
    for other in others:
        equal(other, (outs, after))
    jaxkv.check_invariants(after)
    assert not any(np.isnan(out).any() for out, _ in outs)


@pytest.mark.parametrize("name", [name for name in (STEPS if NIGHTLY else BY_DAY) if "packed decode" in name])
def test_packed_tokens_of_a_decode_step_get_what_padded_ones_get(name):
    """Packed, `decode` known; each token gets what it gets in a padded step, and the same is stored."""
    axes, counts = STEPS[name]
    step = jaxkv.plan_step(jaxkv.extend(filled(), counts), axes)
    assert step.decode  # counted, outside of jit
    counts = jnp.array(counts, jnp.int32)
    ((known, after),) = compiled(axes, (DECODE,))(filled(), counts)
    (mixed, after_mixed), _ = compiled(axes, (PLAIN, PLANNED))(filled(), counts)
    for a, b in zip(jax.tree.leaves(known), jax.tree.leaves(mixed), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    equal(after, after_mixed)


def test_rows_of_more_than_the_longest_are_left_out():
    cache = jaxkv.extend(filled(), [1, 2, 0, 1])
    step = jaxkv.plan_step(cache, (4,), longest=1)
    kv = normal((4, 2, 8), 0)
    after = jaxkv.write(cache, kv, kv, layer=0, step=step)
    assert after.lengths.tolist() == [8, 4, 0, 12]
    with pytest.raises(jaxkv.CacheError, match="row 1"):
        jaxkv.check(after)


def test_positions():
    cache = jaxkv.extend(filled(), [3, 0, 2, 1])
    for axes in ((6,), (8,), (ROWS, 3)):
        step = jaxkv.plan_step(cache, axes)
        equal(step.positions, jaxkv.positions(cache, axes))
        equal(step.positions, jaxkv.positions(cache.layers[1], axes))


CHANGES = {
    "extend": lambda cache: jaxkv.extend(cache, jnp.array([1, 1, 0, 0], jnp.int32)),
    "free": lambda cache: jaxkv.free(cache, jnp.array([0], jnp.int32)),
    "truncate": lambda cache: jaxkv.truncate(cache, jnp.array([7, 48, 48, 48], jnp.int32)),
    "reorder": lambda cache: jaxkv.reorder(cache, jnp.array([3, 1, 2, 0], jnp.int32)),
    "free and refilled to equal lengths, in other blocks": lambda cache: refill(cache),
}


def refill(cache):
    cache = jaxkv.free(cache, jnp.array([0], jnp.int32))
    for counts in ([0, 0, 13, 0], [7, 0, 0, 0], [2, 0, 0, 0]):  # the first takes what row 0 had
        cache = jaxkv.extend(cache, jnp.array(counts, jnp.int32))
    return cache


def attend_as_planned(cache, step):
    """Row 0 has two tokens in this step."""
    q, kv = normal((ROWS, 2, HEADS, 8), 1), normal((ROWS, 2, 2, 8), 2)
    return jaxkv.attention(q, kv, kv, cache, layer=0, step=step)


def check_nothing_stored(out, after, before):
    assert after.failed[0] and after.tables[0].wanted[0] == STALE
    np.testing.assert_array_equal(out[0], 0)
    equal(after.pools[0], before.pools[0])
    jaxkv.check_invariants(after)
    with pytest.raises(jaxkv.CacheError, match="does not fit the block tables of row 0"):
        jaxkv.check(after)


def test_a_plan_of_other_tables_stores_nothing():
    """Row 0 of the plan is another's: it stores nothing, its output is 0, `check` says so; pools are as they were."""

    changes = {name: change for name, change in CHANGES.items() if NIGHTLY or "free" in name}

    @quickly_compiled
    def all_changes(cache):
        planned = jaxkv.extend(cache, jnp.array([2, 0, 0, 0], jnp.int32))
        step = jaxkv.plan_step(planned, (ROWS, 2))
        changed = {name: change(planned) for name, change in changes.items()}
        return changed, {name: attend_as_planned(cache, step) for name, cache in changed.items()}

    changed, got = all_changes(filled())
    for name, (out, after) in got.items():
        check_nothing_stored(out, after, changed[name])
    planned = jaxkv.extend(filled(), [2, 0, 0, 0])  # and outside of jit
    freed = jaxkv.free(planned, [0])
    with pytest.raises(ValueError, match="No row has a token in this step"):
        attend_as_planned(freed, jaxkv.plan_step(planned, (ROWS, 2)))


def test_explain_takes_a_step_as_attend_does():
    config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=64, max_seqs=2, max_seq_len=128)
    cache, q = jaxkv.extend(jaxkv.init(config), [65, 0]), jax.ShapeDtypeStruct((2, 65, 4, 64), jnp.bfloat16)
    found = []
    for how in ({}, {"tree": np.full((2, 65), -1, np.int32)}):
        step = jaxkv.plan_step(cache, (2, 65), **how)
        found.append(jaxkv.explain(q, cache, step=step, platform="cuda"))
        assert found[-1] == jaxkv.explain(q, cache, platform="cuda", **how)
    assert [choice.implementation for choice in found] == ["gpu", "xla"]  # a tree of 65 tokens is too large
    with pytest.raises(ValueError, match="step must be what plan_step returned, not int"):
        jaxkv.explain(q, cache, step=3)


def test_a_step_without_its_extend():
    """What extend made room for is known outside of jit: that of the step before, of more tokens than are given."""
    cache = jaxkv.extend(filled(), [2, 0, 0, 1])
    q, kv = normal((ROWS, 1, HEADS, 8), 1), normal((ROWS, 1, 2, 8), 2)
    with pytest.raises(ValueError, match="room for 2 tokens of a row in this step, but q has slots for 1") as padded:
        jaxkv.attention(q, kv, kv, cache, layer=0)
    assert str(padded.value).endswith("Padded arrays are [S, T, heads, D], of 4 rows with 1 slot each.")
    with pytest.raises(ValueError, match=r"not ArrayImpl: .* attend\(q, cache\) and write\(cache, k, v\)"):
        jaxkv.write(kv, kv, cache, layer=0)
    with pytest.raises(ValueError, match=r"room for 3 tokens in this step, but q has slots for 2: .* step's tokens\.$"):
        jaxkv.attention(q[:2, 0], kv[:2, 0], kv[:2, 0], cache, layer=0)


def test_keys_of_other_tokens():
    cache, q, kv = jaxkv.extend(filled(), [2, 0, 0, 1]), normal((ROWS, 2, HEADS, 8), 1), normal((ROWS, 5, 2, 8), 2)
    with pytest.raises(ValueError, match=r"as in cross-attention, are stored once by jaxkv.append"):
        jaxkv.attention(q, kv, kv, cache, layer=0)


def test_other_rows_go_on_beside_a_stale_one():
    planned = jaxkv.extend(filled(), [2, 1, 0, 2])
    step = jaxkv.plan_step(planned, (ROWS, 2))
    cache = jaxkv.free(planned, [0])
    q, kv = normal((ROWS, 2, HEADS, 8), 1), normal((ROWS, 2, 2, 8), 2)
    out, after = jaxkv.attention(q, kv, kv, cache, layer=0, step=step)
    wanted, _ = jaxkv.attention(q, kv, kv, planned, layer=0)
    equal(out[1:], wanted[1:])
    assert after.failed.tolist() == [True, False, False, False]


def test_a_plan_goes_through_jit():
    """What a jit makes of plan and cache are other objects; the plan still holds, for every layer."""
    cache = jaxkv.extend(filled(), [2, 1, 0, 2])
    step = jaxkv.plan_step(cache, (ROWS, 2))
    q, kv = normal((ROWS, 2, HEADS, 8), 1), normal((ROWS, 2, 2, 8), 2)

    @jax.jit
    def one_layer(q, kv, cache, step):
        return jaxkv.attention(q, kv, kv, cache, layer=0, step=step)

    out, after = one_layer(q, kv, cache, step)
    again, after = one_layer(q, kv, after, step)  # of an inner jit, or a second layer: tables settled before
    equal(out, again)
    assert not after.failed.any()


def test_rows_that_did_not_fit_stay_left_out_in_later_layers():
    """The plan has taken them back; the cache that the first layer returns has them marked, and no more than that."""
    cache = jaxkv.extend(filled(), [3, 0, 0, 1])
    step = jaxkv.plan_step(cache, (ROWS, 2))
    q, kv = normal((ROWS, 2, HEADS, 8), 1), normal((ROWS, 2, 2, 8), 2)
    attend = jax.jit(
        lambda cache, step, layer: jaxkv.attention(q, kv, kv, cache, layer=layer, step=step)[1], static_argnums=2
    )
    for layer in (0, 2):
        cache = attend(cache, step, layer)
        assert cache.lengths.tolist() == [7, 4, 0, 12] and cache.failed.tolist() == [True, False, False, False]
        assert cache.tables[0].wanted[0] == -1
    jaxkv.check_invariants(cache)


def refused(cache, step, axes=(ROWS, 2), **kwargs):
    kv = jnp.ones((*axes, 2, 8))
    return jaxkv.write(cache, kv, kv, layer=0, step=step, **kwargs)


def test_refusals_by_shape():
    cache = jaxkv.extend(filled(), [1, 1, 0, 0])
    step = jaxkv.plan_step(cache, (ROWS, 2))
    with pytest.raises(ValueError, match=re.escape("planned for the token axes (4, 2), but k has (4, 3)")):
        refused(cache, step, axes=(ROWS, 3))
    other = jaxkv.init(CONFIG.replace(num_blocks=30))
    with pytest.raises(ValueError, match="planned for a cache of another config"):
        refused(other, step)
    with pytest.raises(ValueError, match="must be what plan_step returned, not dict"):
        refused(cache, {})
    for axes in ((3, 2), (1, 2, 3), (), "ab", (-1,), (2.5,)):
        with pytest.raises(ValueError, match=r"must be|at least"):
            jaxkv.plan_step(cache, axes)
    with pytest.raises(ValueError, match="longest must be an integer"):
        jaxkv.plan_step(cache, (4,), longest=1.5)
    with pytest.raises(ValueError, match="layer must say which"):
        jaxkv.attend(jnp.ones((ROWS, 2, HEADS, 8)), cache)
    with pytest.raises(ValueError, match="leave it out"):
        jaxkv.attend(jnp.ones((ROWS, 2, HEADS, 8)), cache.layers[0], layer=0)


def test_layers_put_back():
    cache = filled()
    layers = list(cache.layers)
    with pytest.raises(ValueError, match="all 3 layers of the cache, but has 2"):
        cache.with_layers(layers[:2])
    with pytest.raises(ValueError, match=r"layers\[0\] of this cache, not layer 1 of a cache of 3 layers"):
        cache.with_layer(0, layers[1])
    with pytest.raises(ValueError, match="not a dict"):
        cache.with_layer(0, {})
    assert len(jax.tree.leaves(cache.layers)) == len(jax.tree.leaves(layers))
    with pytest.raises(IndexError, match="from 0 to 2, not 3"):
        cache.layers[3]
    with pytest.raises(ValueError, match="must be an integer for this cache"):
        jax.jit(lambda cache, i: cache.layers[i])(cache, 1)


def count_operations(planned, num_layers, axes, longest):
    """Operations of the entry computation of an optimised step, and lines of all of it."""
    layers = (LAYERS[0],) * num_layers
    sizes = dict(max_seq_len=longest, group_blocks=None, num_blocks=24, max_tokens=None)
    config = dataclasses.replace(CONFIG, layers=layers, **sizes)
    cache = jax.eval_shape(lambda: jaxkv.init(config))

    def step(cache, q, kv, counts):
        cache = jaxkv.extend(cache, counts)
        plan = jaxkv.plan_step(cache, axes) if planned else None
        for i in range(num_layers):
            q, cache = jaxkv.attention(q, kv, kv, cache, layer=i, step=plan)
        return q, cache

    arrays = (jax.ShapeDtypeStruct((*axes, n, 8), jnp.float32) for n in (HEADS, 2))
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    text = jax.jit(step, donate_argnums=0).lower(cache, *arrays, counts).compile().as_text()
    entry = text[text.index("\nENTRY") :].splitlines()[2:]
    opcodes = [re.search(r" ([\w-]+)\(", line) for line in entry]
    operations = sum(1 for op in opcodes if op and op[1] not in ("parameter", "get-tuple-element", "bitcast", "tuple"))
    return operations, text.count("\n")


@pytest.mark.parametrize("planned", [False, True] if NIGHTLY else [True])
@pytest.mark.parametrize(("axes", "longest", "most", "lines"), [
    ((ROWS, 1), 40_960, 7, 500), ((9,), 40_960, 9, 1000), ((ROWS, 1), 48, 13, 230), ((9,), 48, 15, 290)
])  # fmt: skip
def test_layers_share_what_follows_from_the_tables(planned, axes, longest, most, lines):
    """Each further layer adds the write, its loops and little else; of short rows the attention, without a loop."""
    two, three = (count_operations(planned, layers, axes, longest) for layers in (2, 3))
    assert three[0] - two[0] <= most
    assert three[1] - two[1] <= lines
