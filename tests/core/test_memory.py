"""No step copies a pool, and `assert_no_copy` would notice if one did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from steps import model_step

import jaxkv
from jaxkv.testing import assert_no_copy

pytestmark = pytest.mark.usefixtures("rows_in_tiles")

LAYERS = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=64),
    jaxkv.LayerConfig(num_kv_heads=1, head_dim=96),
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=64),
)
ROWS = 4


def abstract_cache(dtype="float32", **fields):
    """A cache of shapes only: nothing is allocated, so it may be of a realistic size."""
    fields = {"num_blocks": 2048, "max_seq_len": 1024} | fields
    config = jaxkv.CacheConfig(layers=LAYERS, max_seqs=ROWS, dtype=dtype, **fields)
    return jax.eval_shape(lambda: jaxkv.init(config))


def tokens(cache, axes, heads=None):
    """One array of keys, values or (with `heads`) queries for each layer."""
    return [
        jax.ShapeDtypeStruct((*axes, heads or layer.num_kv_heads, layer.head_dim), cache.config.dtype)
        for layer in LAYERS
    ]


COUNTS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
CACHES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "block_size=1": {"block_size": 1, "num_blocks": 20000},
    "contiguous": {"layout": "contiguous", "num_blocks": None, "max_seq_len": 4096},
}
STEPS = {"decode": (ROWS, 1), "prefill": (ROWS, 7), "packed": (9,)}


def assert_all_aliased(jitted, cache, *args):
    """Every buffer that the step reads becomes an output. `extend` sets `new` and `offsets` without looking at them."""
    unread = sum(t.new.size + t.offsets.size for t in cache.tables) * 4
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert jitted.lower(cache, *args).compile().memory_analysis().alias_size_in_bytes == total - unread


APPENDS = [(name, step) for name in CACHES for step in STEPS]


@pytest.mark.parametrize(("name", "step"), APPENDS if NIGHTLY else APPENDS[::4])  # by day each once
def test_append_is_in_place(name, step):
    cache = abstract_cache(**CACHES[name])
    kv = tokens(cache, STEPS[step])
    append = jax.jit(jaxkv.append, donate_argnames="cache")
    assert_no_copy(append, cache, kv, kv, COUNTS)
    assert_all_aliased(append, cache, kv, kv, COUNTS)


@pytest.mark.parametrize("name", CACHES if NIGHTLY else ["bfloat16", "contiguous"])
def test_model_step_is_in_place(name):
    cache = abstract_cache(**CACHES[name])
    q, kv = tokens(cache, STEPS["decode"], heads=4), tokens(cache, STEPS["decode"])
    step = jax.jit(model_step, donate_argnames="cache")
    assert_no_copy(step, cache, q, kv, kv, COUNTS)
    assert_all_aliased(step, cache, q, kv, kv, COUNTS)


def test_scan_over_steps_is_in_place():
    cache = abstract_cache()
    q, kv = tokens(cache, (10, *STEPS["decode"]), heads=4), tokens(cache, (10, *STEPS["decode"]))

    def steps(cache, q, k, v):
        def step(cache, inputs):
            outs, cache = model_step(cache, *inputs, jnp.ones(ROWS, jnp.int32))
            return cache, outs

        return jax.lax.scan(step, cache, (q, k, v))

    assert_no_copy(jax.jit(steps, donate_argnames="cache"), cache, q, kv, kv)


@pytest.mark.parametrize("function", [jaxkv.fork, jaxkv.truncate, jaxkv.reorder, jaxkv.reserve, jaxkv.free])
def test_management_is_in_place(function):
    rows = (COUNTS, COUNTS) if function is jaxkv.fork else (COUNTS,)
    assert_no_copy(jax.jit(function, donate_argnames="cache"), abstract_cache(), *rows)


def change_first_pool(change):
    def step(cache):
        kv = cache.pools[0].kv
        return cache.replace_pool(0, type(cache.pools[0])(kv=change(kv)))

    return jax.jit(step, donate_argnames="cache")


def pad_and_write(kv):
    padded = jnp.pad(kv, [(0, 0)] * 4 + [(0, 64)])
    return padded.at[3, 0, 0, 0].set(1.0)[..., :64]


def through_other_dtype(kv):
    return kv.astype(jnp.bfloat16).at[3].set(jnp.ones((), jnp.bfloat16)).astype(jnp.float32)


def read_after_write(kv):
    written = kv.at[3].set(1.0)
    return written + kv[5].sum()  # a pass over the pool, though in place


@pytest.mark.parametrize("change", [pad_and_write, through_other_dtype, read_after_write])
def test_catches_a_copy(change):
    with pytest.raises(AssertionError, match=r"A whole pool goes through the instruction \w+"):
        assert_no_copy(change_first_pool(change), abstract_cache())


def test_catches_a_transposed_copy():
    def write_token_major(kv):
        return kv.swapaxes(2, 3).at[3, 0, 1, 1].set(1.0).swapaxes(2, 3) * 1.0

    with pytest.raises(AssertionError):
        assert_no_copy(change_first_pool(write_token_major), abstract_cache())


def test_catches_scan_over_pools():
    cache = abstract_cache()

    def step(cache):
        stacked = jnp.stack([cache.pools[0].kv, cache.pools[2].kv])
        _, stacked = jax.lax.scan(lambda carry, kv: (carry, kv.at[1].set(1.0)), 0, stacked)
        return cache.replace_pool(0, type(cache.pools[0])(kv=stacked[0]))

    with pytest.raises(AssertionError):
        assert_no_copy(jax.jit(step, donate_argnames="cache"), cache)


def test_catches_what_is_not_donated():
    cache = abstract_cache()
    kv = tokens(cache, STEPS["decode"])
    with pytest.raises(AssertionError, match=r"Only 0 of the \d+ bytes .* donate_argnames"):
        assert_no_copy(jax.jit(jaxkv.append), cache, kv, kv, COUNTS)


def test_catches_scratch_memory():
    def step(cache):
        rows = jnp.arange(1024, dtype=jnp.int32)
        large = cache.pools[0].kv[rows]  # half a pool, which is not a pool
        return jnp.sort(large, axis=0).sum(), cache

    step = jax.jit(step, donate_argnames="cache")
    says = r"bytes of scratch memory.* and part of it are blocks. Its largest buffers: \S+, f32\[1024, 2, .*from jit"
    with pytest.raises(AssertionError, match=says):
        assert_no_copy(step, abstract_cache(), temp_fraction=0.25)


def test_a_models_own_scratch_is_no_copy():
    """Large activations beside a small pool: they do not grow with it."""

    def step(x, cache):
        return jnp.sort(jnp.outer(x, x), axis=0) @ x, cache

    cache = abstract_cache()
    largest = max(pool.kv.size for pool in cache.pools)
    x = jax.ShapeDtypeStruct((int(largest**0.5),), jnp.float32)
    assert_no_copy(jax.jit(step, donate_argnames="cache"), x, cache)


def test_catches_scratch_that_grows_with_the_cache():
    """Every row's tokens gathered to its full length: no pool, and no blocks any more, but as large."""

    def step(cache):
        row, position = jnp.indices((ROWS, cache.config.max_seq_len), jnp.int32)
        k, _ = cache.read(0, row, position)
        return jnp.sort(k, axis=1).sum(), cache

    step = jax.jit(step, donate_argnames="cache")
    with pytest.raises(AssertionError, match=r"with \d+ times the blocks and max_seq_len it is"):
        assert_no_copy(step, abstract_cache(num_blocks=300), temp_fraction=0.05)


def test_needs_a_cache():
    with pytest.raises(ValueError, match=r"holds a jaxkv\.Cache"):
        assert_no_copy(jax.jit(lambda x: x), jnp.ones(3))


def test_a_state_shares_no_memory_with_what_it_was_made_from():
    """NumPy arrays are not immutable. JAX takes them as they lie, without a copy, where they happen to be aligned."""

    def aligned(array):
        store = np.zeros(array.nbytes + 64, np.uint8)
        start = -store.ctypes.data % 64
        copy = store[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    blocks, rows = np.ones((ROWS, 2, 4, 8), np.float32), np.arange(ROWS, dtype=np.int32)
    k, v, tables, lengths, counts = map(aligned, (blocks, blocks, rows[:, None], np.full(ROWS, 3, np.int32), rows))
    made = [jaxkv.convert.from_blocks(k=[k], v=[v], tables=tables, lengths=lengths, max_seq_len=4)]
    made += [jaxkv.extend(made[0], counts), jaxkv.truncate(made[0], counts), jaxkv.reorder(made[0], counts)]
    before = [np.array(x) for x in jax.tree.leaves(made)]
    for array in (k, v, tables, lengths, counts):
        array[...] = 99
    for x, then in zip(jax.tree.leaves(made), before, strict=True):
        np.testing.assert_array_equal(x, then)
