"""A cache under JAX's transformations, and what must not reach a result whatever it holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from nightly import NIGHTLY
from steps import model_step

import jaxkv
import pallas_kernels
from jaxkv.testing import permute_blocks, poison

pytestmark = pytest.mark.usefixtures("rows_in_tiles")

ALL_LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=16),
    jaxkv.LayerConfig(num_kv_heads=4, head_dim=8),
)
LAYERS = ALL_LAYERS if NIGHTLY else ALL_LAYERS[:1]  # but where they are in two groups: a layer is most of a program
ROWS, HEADS, LONGEST = 4, 4, 24
LAYOUTS = {
    "paged": {"num_blocks": 15, "block_size": 4, "max_seq_len": LONGEST},
    "contiguous": {"layout": "contiguous", "max_seq_len": LONGEST},
}
# Two groups of layers; the second gives back what falls out of its window.
WINDOWS = LAYOUTS["paged"] | {"layers": (ALL_LAYERS[0], dataclasses.replace(ALL_LAYERS[1], window=3))}


def make_cache(layout="paged", **fields):
    fields = {"layers": LAYERS} | (LAYOUTS | {"windows": WINDOWS})[layout] | fields
    return jaxkv.init(jaxkv.CacheConfig(max_seqs=ROWS, dtype="float32", **fields))


def random_step(axes, layers=LAYERS):
    """Queries, keys and values of every layer."""
    rng = np.random.default_rng(0)

    def arrays(heads):
        return [rng.standard_normal((*axes, heads or c.num_kv_heads, c.head_dim)).astype(np.float32) for c in layers]

    return arrays(HEADS), arrays(None), arrays(None)


def step_of(cache, *axes):
    return random_step(axes, cache.config.layers)


step = jax.jit(model_step)


append = jax.jit(jaxkv.append)


def counts(*numbers):
    return jnp.array(numbers, jnp.int32)


def filled(layout="paged", lengths=(9, 0, 4, 6)):
    cache = make_cache(layout)
    _, k, v = step_of(cache, ROWS, LONGEST)  # places of a step, whatever it fills of them: one program
    return append(cache, k, v, counts(*lengths))


def shapes_of(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def assert_alike(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, expected)


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


EVERY_FUNCTION = {
    "step": lambda cache: step(cache, *step_of(cache, ROWS, 3), counts(1, 3, 0, 2)),
    "append": lambda cache: jaxkv.append(cache, *step_of(cache, ROWS, 3)[1:], counts(1, 3, 0, 2)),
    "packed": lambda cache: step(cache, *step_of(cache, 7), counts(1, 3, 0, 2)),
    "reserve": lambda cache: jaxkv.reserve(cache, counts(12, 3, 0, 0)),
    "fork": lambda cache: jaxkv.fork(cache, jnp.array([0, 2]), jnp.array([1, 3])),
    "truncate": lambda cache: jaxkv.truncate(cache, counts(5, 0, 4, 0)),
    "reorder": lambda cache: jaxkv.reorder(cache, counts(1, 0, 0, 3)),
    "free": lambda cache: jaxkv.free(cache, jnp.array([0, 3])),
    "store": lambda cache: cache.store(0, 2, 1, 3, jnp.ones(16), jnp.ones(16)),
}
# Under transformations that compile a program for each: by day the one that attends, and beside it what is named below.
TRANSFORMED = [name for name in EVERY_FUNCTION if name != "store"] if NIGHTLY else ["step"]
ALSO_BY_DAY = EVERY_FUNCTION if NIGHTLY else ["step", "truncate", "store"]
BY_DAY = ["paged"]


@pytest.mark.parametrize("layout", LAYOUTS if NIGHTLY else BY_DAY)
@pytest.mark.parametrize("name", ALSO_BY_DAY)
def test_old_caches_stay_as_they_were(name, layout):
    old = filled(layout)
    before = jax.tree.map(np.array, old)
    jax.jit(EVERY_FUNCTION[name])(old)
    assert_same(old, before)


@pytest.mark.parametrize("name", ALSO_BY_DAY)
def test_jit_changes_nothing(name):
    cache = filled()
    assert_same(jax.jit(EVERY_FUNCTION[name])(cache), EVERY_FUNCTION[name](cache))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_donated_buffers_are_reused(layout):
    cache = filled(layout)
    donating = jax.jit(jaxkv.append, donate_argnames="cache")
    _, k, v = random_step((ROWS, 2))
    pointers = [pool.kv.unsafe_buffer_pointer() for pool in cache.pools]
    old = cache
    for _ in range(3):
        cache = donating(cache, k, v, counts(1, 2, 0, 1))
        assert [pool.kv.unsafe_buffer_pointer() for pool in cache.pools] == pointers
    assert all(pool.kv.is_deleted() for pool in old.pools)


@pytest.mark.skipif(not NIGHTLY, reason="by day a thousand steps are one program")
def test_scan_over_steps():
    steps = 12
    q, k, v = random_step((steps, ROWS, 1))
    num_tokens = jnp.asarray(np.random.default_rng(1).integers(0, 2, (steps, ROWS)), jnp.int32)

    def one(cache, inputs):
        outs, cache = step(cache, *inputs)
        return cache, outs

    scanned, outs = jax.jit(lambda cache: jax.lax.scan(one, cache, (q, k, v, num_tokens)))(filled())
    cache = filled()
    for t in range(steps):
        expected, cache = step(cache, *at((q, k, v, num_tokens), t))
        assert_alike(at(outs, t), expected)
    assert_same(scanned, cache)


@pytest.mark.skipif(not NIGHTLY, reason="tests/core/test_windows.py has it by day, with more groups")
def test_a_thousand_steps_compile_once_and_stay_on_the_device():
    """Rows join and leave, some run out of blocks, and nothing moves between host and device."""
    traces = 0

    def decode(cache, q, k, v, num_tokens, leaving):
        nonlocal traces
        traces += 1
        outs, cache = step.__wrapped__(jaxkv.free(cache, leaving), q, k, v, num_tokens)
        return outs, jnp.array(cache.failed), cache

    decode = jax.jit(decode, donate_argnames="cache")
    rng = np.random.default_rng(0)
    plan = [(counts(*rng.choice([0, 1, 1, 1, 2], ROWS)), jnp.asarray(rng.random(ROWS) < 0.06)) for _ in range(1000)]
    q, k, v = jax.device_put(random_step((ROWS, 2)))
    cache, failures = make_cache(), []
    with jax.transfer_guard("disallow"):
        for num_tokens, leaving in plan:
            outs, failed, cache = decode(cache, q, k, v, num_tokens, leaving)
            failures.append(failed)
    assert traces == 1 and decode._cache_size() == 1
    jaxkv.check_invariants(cache)
    assert all(np.isfinite(out).all() for out in outs)
    failures = np.array(failures)
    assert failures.any() and not failures.all()  # the plan does run out of blocks at times


@pytest.mark.parametrize("layout", ["paged", "windows"])
def test_vmap_over_caches(layout):
    caches = [filled(layout, lengths) for lengths in ((9, 0, 4, 6), (1, 2, 3, 0), (0, 0, 20, 20))]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *caches)
    for name in TRANSFORMED if layout == "paged" else ["truncate", *(["step"] if NIGHTLY else [])]:
        function = EVERY_FUNCTION[name]
        expected = [jax.jit(function)(cache) for cache in caches]
        actual = jax.jit(jax.vmap(function))(stacked)
        for i, one in enumerate(expected):
            assert_alike(at(actual, i), one)


GRADIENTS = [((7,), "paged")]
if NIGHTLY:
    GRADIENTS += [((ROWS, 3), "contiguous"), ((ROWS, 3), "paged"), ((7,), "contiguous")]


@pytest.mark.parametrize(("axes", "layout"), GRADIENTS)
def test_grad_through_attention(axes, layout):
    cache, (q, k, v) = filled(layout), (x[0] for x in random_step(axes))
    num_tokens = counts(1, 3, 0, 2)
    weights = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)

    def loss(q, k, v, implementation):
        out, _ = jaxkv.attention(q, k, v, jaxkv.extend(cache, num_tokens), layer=0, implementation=implementation)
        return jnp.sum(out * weights)

    grads = jax.jit(jax.grad(functools.partial(loss, implementation="xla"), argnums=(0, 1, 2)))
    actual, expected = grads(q, k, v), _dense_grads(cache, num_tokens, weights, q, k, v)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert np.abs(other).max() > 0.01


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "int4"])
def test_grad_of_what_a_quantised_layer_rounds_is_refused(kind):
    """It was that of the scales alone, which says nothing of the numbers; that of queries is near float32's."""
    sizes = dict(num_layers=1, num_kv_heads=2, head_dim=32, max_seqs=2, max_seq_len=32)
    q, k, v = (np.random.default_rng(0).standard_normal((2, 5, h, 32)).astype(np.float32) for h in (4, 2, 2))

    def loss(q, k, v, dtype):
        cache = jaxkv.init(jaxkv.CacheConfig.uniform(**sizes, dtype=dtype))
        out, _ = jaxkv.attention(q, k, v, jaxkv.extend(cache, [5, 3]), layer=0)
        return jnp.sum(jnp.sin(out))

    def grad(argument, *arguments):  # of one program
        return jax.jit(jax.grad(loss, argnums=argument), static_argnums=3)(*arguments)

    rounded, exact = (grad(0, q, k, v, dtype) for dtype in (kind, "float32"))
    assert np.abs(rounded - exact).max() < 0.2 * np.abs(exact).max()
    for argument in (1, 2):
        with pytest.raises(ValueError, match=rf"no gradient where they are stored in {kind}.*stop_gradient"):
            grad(argument, q, k, v, kind)
    stopped = jax.jit(jax.grad(lambda q: loss(q, *map(jax.lax.stop_gradient, (q[:, :, :2], q[:, :, 2:])), kind)))(q)
    assert np.isfinite(stopped).all()


def _dense_grads(cache, num_tokens, weights, q, k, v):
    """The same loss, from gathered keys and values and softmax spelled out."""
    packed, num_tokens = q.ndim == 3, np.asarray(num_tokens)
    start = np.cumsum(num_tokens) - num_tokens
    dense, lengths = np.asarray(cache.combined(0)), cache.lengths.tolist()
    held = [dense[row, :, :, :length].swapaxes(1, 2) for row, length in enumerate(lengths)]  # each [2, C, K, D]

    def loss(q, k, v):
        total = 0.0
        for row, count in enumerate(num_tokens.tolist()):
            at = (slice(start[row], start[row] + count),) if packed else (row, slice(0, count))
            keys, values = (jnp.concatenate([old, new[at]]) for old, new in zip(held[row], (k, v), strict=True))
            keys, values = (jnp.repeat(x, 2, axis=1) for x in (keys, values))
            logits = jnp.einsum("thd,chd->htc", q[at], keys, precision="highest") / 4.0
            seen = jnp.tri(count, keys.shape[0], keys.shape[0] - count, dtype=bool)
            probabilities = jax.nn.softmax(jnp.where(seen[None], logits, -jnp.inf))
            out = jnp.einsum("htc,chd->thd", probabilities, values, precision="highest")
            total += jnp.sum(out * weights[at])
        return total

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)


def test_eval_shape():
    cache = make_cache()
    shapes = jax.eval_shape(lambda: jaxkv.init(cache.config))
    assert shapes_of(shapes) == shapes_of(cache)
    assert repr(shapes).startswith(f"Cache(traced, {len(LAYERS)} layer")
    _, after = jax.eval_shape(step, shapes, *random_step((ROWS, 1)), counts(1, 1, 1, 1))
    assert shapes_of(after) == shapes_of(shapes)


def test_shapes_are_computed_without_the_other_processes(monkeypatch):
    """A cache over hosts that are not there can be compiled ahead."""
    config = jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=4, head_dim=8, max_seqs=2, max_seq_len=16)
    mesh = jax.make_mesh((2,), ("model",))
    alone = jax.eval_shape(lambda: jaxkv.init(config, mesh=mesh))
    monkeypatch.setattr("jaxkv._core.cache.init.list_processes", lambda mesh: [0, 1])
    assert shapes_of(jax.eval_shape(lambda: jaxkv.init(config, mesh=mesh))) == shapes_of(alone)
    for axes in ({"heads": None, "context": "model"}, {"heads": None, "rows": "model"}):
        jax.eval_shape(lambda axes=axes: jaxkv.init(config, mesh=mesh, **axes))
    with pytest.raises(RuntimeError, match="processes that know each other"):
        jaxkv.init(config, mesh=mesh)


@pytest.mark.parametrize("layout", ["paged", "windows"] if NIGHTLY else ["windows"])
def test_shard_map_over_kv_heads(layout):
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    cache = filled(layout)
    specs = jax.tree.map(lambda x: PartitionSpec(), cache)
    specs = specs.replace(pools=jax.tree.map(lambda x: PartitionSpec(None, None, "heads"), cache.pools))
    heads, nothing = PartitionSpec(None, None, "heads"), PartitionSpec()
    sharded = jax.jit(
        jax.shard_map(
            step.__wrapped__, mesh=mesh, in_specs=(specs, heads, heads, heads, nothing), out_specs=(heads, specs)
        )
    )
    inputs = (*step_of(cache, ROWS, 3), counts(1, 3, 0, 2))
    outs, after = sharded(cache, *inputs)
    expected, expected_cache = step(cache, *inputs)
    assert_alike(outs, expected)
    assert_same(after, expected_cache)
    assert after.pools[0].kv.sharding.spec[2] == "heads"


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "paged") for name in TRANSFORMED), ("truncate", "windows"), *([("step", "windows")] if NIGHTLY else [])],
)
def test_shard_map_over_caches(name, layout):
    """Data parallel: every device has a cache of its own."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    caches = [filled(layout, lengths=(20, 20, 13, 0)), filled(layout)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *caches)

    def local(stacked):
        return jax.tree.map(lambda x: x[None], EVERY_FUNCTION[name](at(stacked, 0)))

    each = PartitionSpec("data")
    actual = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=each))(stacked)
    for i, cache in enumerate(caches):
        assert_alike(at(actual, i), jax.jit(EVERY_FUNCTION[name])(cache))


def test_dtypes_do_not_depend_on_x64():
    with jax.enable_x64(True):
        cache = jax.eval_shape(filled)
        assert shapes_of(cache) == shapes_of(make_cache())
        for function in EVERY_FUNCTION.values():
            result = jax.eval_shape(function, cache)
            after = result[1] if isinstance(result, tuple) else result
            assert shapes_of(after) == shapes_of(cache)


# What must not be read.


@jax.jit
def all_that_is_seen(cache):
    """Of every row and layer, and once more after rows were copied and cut."""
    others = jaxkv.reorder(cache, counts(1, 0, 0, 2)), jaxkv.truncate(cache, counts(5, 1, 9, 9))
    layers = range(cache.num_layers)
    rows = [jaxkv.gather(cache, row, layer=layer, max_len=LONGEST) for row in range(ROWS) for layer in layers]
    return rows, [other.combined(layer) for other in others for layer in layers]


@pytest.mark.parametrize("layout", LAYOUTS if NIGHTLY else BY_DAY)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("axes", [(ROWS, 3), (7,)])
def test_what_no_row_holds_has_no_effect(layout, value, axes):
    cache, inputs = filled(layout), (*random_step(axes), counts(1, 3, 0, 2))
    poisoned = poison(cache, value)
    assert not np.isfinite(np.asarray(poisoned.pools[0].kv)).all() or value == 1e30
    expected, after = step(cache, *inputs)
    actual, poisoned_after = step(poisoned, *inputs)
    assert_same(actual, expected)
    assert_same(all_that_is_seen(poisoned_after), all_that_is_seen(after))


@pytest.mark.parametrize("junk", [3, 10**6, -1])
def test_unused_table_entries_have_no_effect(junk):
    """Nor does the null block, for kernels used without a cache."""
    cache = filled()
    tables, kv = cache.tables[0], poison(cache).pools[0].kv
    entries = jnp.where(tables.tables == 0, junk, tables.tables)
    q = random_step((ROWS, 9))[0][0]
    for implementation in ("reference", "xla"):
        attend = functools.partial(pallas_kernels.paged_attention, implementation=implementation)
        expected = attend(q, cache.pools[0].kv, tables.tables, tables.lengths, tables.new)
        actual = attend(q, kv.at[0].set(jnp.nan), entries, tables.lengths, tables.new)
        assert_same(actual, expected)
    new = random_step((ROWS, 9))[1][0]
    expected = pallas_kernels.write_kv(kv, new, new, tables.tables, tables.lengths, tables.new)
    assert_same(pallas_kernels.write_kv(kv, new, new, entries, tables.lengths, tables.new), expected)


@pytest.mark.parametrize("seed", range(3))
def test_physical_order_of_blocks_has_no_effect(seed):
    cache = filled()
    permuted = permute_blocks(cache, seed)
    jaxkv.check_invariants(permuted)
    assert permuted.tables[0].tables.tolist() != cache.tables[0].tables.tolist()
    for _ in range(3):
        inputs = (*random_step((ROWS, 3)), counts(1, 3, 0, 2))
        expected, cache = step(cache, *inputs)
        actual, permuted = step(permuted, *inputs)
        assert_same(actual, expected)
        cache, permuted = (jaxkv.reorder(jaxkv.free(c, [3]), [1, 0, 0, 2]) for c in (cache, permuted))
    layers = range(cache.num_layers)
    assert_same([permuted.combined(i) for i in layers], [cache.combined(i) for i in layers])


@pytest.mark.parametrize("layout", LAYOUTS if NIGHTLY else BY_DAY)
def test_nan_of_one_row_never_reaches_another(layout):
    cache = make_cache(layout)
    q, k, v = random_step((ROWS, LONGEST))
    bad_k, bad_v = ([np.concatenate([np.full_like(x[:1], np.nan), x[1:]]) for x in xs] for xs in (k, v))
    outs, cache = step(cache, q, bad_k, bad_v, counts(14, 9, 3, 0))
    for out in outs:
        assert np.isnan(out[0, :14]).all() and np.isfinite(out[1:]).all()
    held_by_bad = set(np.asarray(cache.tables[0].tables[0]).tolist()) - {0}
    cache = jaxkv.free(cache, [0])
    outs, cache = step(cache, q, k, v, counts(6, 2, 8, 14))  # into the blocks that hold NaN
    if layout == "paged":
        assert held_by_bad & set(np.asarray(cache.tables[0].tables[1:]).ravel().tolist())
    forked = jaxkv.truncate(jaxkv.reorder(cache, [3, 3, 1, 0]), [5, 14, 10, 3])
    for result in (outs, [c.combined(i) for c in (cache, forked) for i in range(c.num_layers)]):
        assert all(np.isfinite(x).all() for x in result)
    assert all(np.isfinite(out).all() for out in step(forked, q, k, v, counts(1, 1, 0, 2))[0])


# The edges.


@pytest.mark.parametrize("layout", LAYOUTS if NIGHTLY else BY_DAY)
@pytest.mark.parametrize("lengths", [(3, 4, 5, 0), (7, 8, 9, 1), (24, 0, 0, 0), (0, 0, 0, 0), (23, 24, 1, 4)])
def test_block_boundaries(layout, lengths):
    """In one go, or token by token: the same cache and the same last output; and then one token more."""
    q, k, v = random_step((ROWS, LONGEST))
    outs, cache = step(make_cache(layout), q, k, v, counts(*lengths))
    slow = make_cache(layout)
    for t in range(max(lengths)):
        now = at((q, k, v), (slice(None), slice(t, t + 1)))
        slow_outs, slow = step(slow, *now, counts(*(int(length > t) for length in lengths)))
        for out, slow_out in zip(outs, slow_outs, strict=True):
            np.testing.assert_allclose(slow_out[:, 0], out[:, t], atol=1e-5)
    for layer in range(cache.num_layers):
        assert_same(slow.combined(layer), cache.combined(layer))
    more, after = step(cache, *at((q, k, v), (slice(None), slice(1))), counts(1, 1, 1, 1))
    failed = [length == 24 for length in lengths]
    assert after.failed.tolist() == failed
    assert after.lengths.tolist() == [n if full else n + 1 for n, full in zip(lengths, failed, strict=True)]
    for out in more:
        assert [bool((row == 0).all()) for row in np.asarray(out)] == failed


@pytest.mark.skipif(not NIGHTLY, reason="by day the oracle has full rows among others")
def test_all_rows_full():
    cache = make_cache(num_blocks=24)
    q, k, v = random_step((ROWS, 24))
    _, cache = step(cache, q, k, v, counts(24, 24, 24, 24))
    assert cache.blocks_in_use == 24 and not cache.failed.any()
    outs, after = step(cache, *at((q, k, v), (slice(None), slice(1))), counts(1, 1, 1, 1))
    assert after.failed.all() and all((np.asarray(out) == 0).all() for out in outs)
    assert_same(after.pools, cache.pools)
    with pytest.raises(jaxkv.SequenceTooLong):
        jaxkv.check(after)


def test_request_larger_than_the_pool():
    cache = make_cache(num_blocks=3)
    after = jax.jit(jaxkv.extend)(cache, counts(13, 12, 1, 0))
    assert after.failed.tolist() == [True, False, True, False] and after.lengths.tolist() == [0, 12, 0, 0]
    with pytest.raises(jaxkv.OutOfBlocks, match=r"Row 0 \(0 tokens, 0 blocks\) needs 4 more blocks for 13 tokens"):
        jaxkv.check(after)


@pytest.mark.parametrize("axes", [(ROWS, 0), (0,)])
def test_no_token_places_at_all(axes):
    cache = filled()
    outs, after = step(cache, *random_step(axes), counts(0, 0, 0, 0))
    assert [out.shape for out in outs] == [(*axes, HEADS, c.head_dim) for c in LAYERS]
    assert after.lengths.tolist() == cache.lengths.tolist() and not after.failed.any()
