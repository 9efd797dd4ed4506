"""Layers with a window: what falls out of it is given back, and everything else is as if it had not been."""

import math
import pathlib

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from nightly import NIGHTLY
from steps import attend_in_all_layers

import jaxkv
from jaxkv import LayerConfig, models
from jaxkv._core.config.retention import Window
from jaxkv.testing import assert_no_copy

DATA = pathlib.Path(__file__).parents[1] / "data"
ROWS = 3
WINDOW, BLOCK_SIZE = 6, 4
LOCAL = LayerConfig(num_kv_heads=2, head_dim=8, window=WINDOW)
WIDE = LayerConfig(num_kv_heads=2, head_dim=8)


def make_config(layers=(LOCAL, WIDE, LOCAL), **fields):
    default = {
        "max_seqs": ROWS,
        "max_seq_len": 60,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "head_dim_multiple": 1,
    }
    sizes = {} if "group_blocks" in fields else {"num_blocks": 45}
    return jaxkv.CacheConfig(layers=layers, **(default | sizes | fields))


def counts(*numbers):
    return jnp.array(numbers, jnp.int32)


def random_kv(config, axes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [rng.standard_normal((*axes, layer.num_kv_heads, layer.head_dim)).astype(np.float32) for layer in config.layers]
        for _ in range(2)
    ]


PLACES = 20  # of a step, whatever it fills of them: one program
append, extend, free = jax.jit(jaxkv.append), jax.jit(jaxkv.extend), jax.jit(jaxkv.free)


def grown(lengths, chunk=5, config=None, seed=0):
    """A cache whose rows have grown to these lengths by chunks; and all keys and values that went in."""
    config = config or make_config()
    longest = -(-max(lengths) // chunk) * chunk
    k, v = random_kv(config, (config.max_seqs, longest + PLACES), seed)
    cache = jaxkv.init(config)
    for start in range(0, longest, chunk):
        more = [min(max(length - start, 0), chunk) for length in lengths]
        now = [[x[:, start : start + PLACES] for x in xs] for xs in (k, v)]
        cache = append(cache, *now, counts(*more))
    assert cache.lengths.tolist() == list(lengths)
    return cache, k, v


def attend_all(cache, seed=5):
    """One more token, the same in every row that has some; the outputs of all layers, and the cache."""
    rng = np.random.default_rng(seed)
    layers = cache.config.layers
    q, k, v = (
        [jnp.asarray(rng.standard_normal((1, 1, heads, layer.head_dim)), jnp.float32) for layer in layers]
        for heads in (4, 2, 2)
    )
    return _attend_all(cache, *([jnp.repeat(x, cache.config.max_seqs, axis=0) for x in xs] for xs in (q, k, v)))


@jax.jit
def _attend_all(cache, q, k, v):
    cache = jaxkv.extend(cache, (cache.lengths > 0).astype(jnp.int32))
    return attend_in_all_layers(cache, q, k, v)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Blocks.


SIZES = [(window, block_size) for window in (1, 2, 3, 4, 6, 16, 17) for block_size in (1, 3, 4, 16)]
SIZES_BY_DAY = [(1, 1), (2, 4), (3, 16), (4, 3), (6, 4), (16, 16), (17, 4)]


@pytest.mark.parametrize(("window", "block_size"), SIZES if NIGHTLY else SIZES_BY_DAY)
@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_a_row_holds_its_window_and_the_step(window, block_size, chunk):
    """At most ceil(window / block_size) + 1 blocks and the step's own, and it never needs more than it was promised."""
    layer = LayerConfig(num_kv_heads=1, head_dim=2, window=window)
    config = make_config(layers=(layer,), max_seqs=1, max_seq_len=60, block_size=block_size, num_blocks=60)
    cache, most = jaxkv.init(config), 0
    bound = math.ceil(window / block_size) + (1 if chunk == 1 else 1 + math.ceil(chunk / block_size))
    for _ in range(60 // chunk):
        cache = extend(cache, counts(chunk))
        most = max(most, int(cache.tables[0].num_blocks_per_row[0]))
        jaxkv.check_invariants(cache)
    assert not cache.failed.any()
    assert most <= bound
    assert most <= config.window_blocks(Window(window), chunk)
    assert chunk > 1 or most <= config.row_blocks(0, 60)
    assert cache.tables[0].peak == most


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_no_more_blocks_than_window_blocks(data):
    """Whatever the steps are, as long as each adds no more tokens than was said."""
    window, step_tokens, block_size = data.draw(
        st.sampled_from([(1, 3, 1), (2, 5, 4), (5, 8, 4), (9, 3, 4), (4, 12, 3)])
    )
    layer = LayerConfig(num_kv_heads=1, head_dim=2, window=window)
    config = make_config(layers=(layer,), max_seq_len=30, block_size=block_size, num_blocks=100)
    config = config.replace(num_blocks=config.window_blocks(Window(window), step_tokens))
    cache = jaxkv.init(config)
    for _ in range(25):
        ends = sorted(data.draw(st.lists(st.integers(0, step_tokens), min_size=ROWS, max_size=ROWS)))
        step = np.diff([0, *ends])[data.draw(st.permutations(range(ROWS)))]
        step = np.minimum(step, 30 - np.asarray(cache.lengths))
        failed, cache = extend_and_free_full(cache, step.astype(np.int32))
        assert not failed.any()
    jaxkv.check_invariants(cache)


@jax.jit
def extend_and_free_full(cache, counts):
    cache = jaxkv.extend(cache, counts)
    return cache.failed, jaxkv.free(cache, cache.lengths == cache.config.max_seq_len)


def test_that_bound_is_reached():
    """One block fewer and a step of the promised size can fail: the bound is no larger than it must be."""
    layer = LayerConfig(num_kv_heads=1, head_dim=2, window=6)
    config = make_config(layers=(layer,), max_seqs=1, max_seq_len=60, num_blocks=100)
    blocks = config.window_blocks(Window(6), 8)
    for num_blocks, fails in ((blocks, False), (blocks - 1, True)):
        failed = False
        for first in range(1, 9):  # wherever the window begins in its block
            cache = jaxkv.init(config.replace(num_blocks=num_blocks))
            for step in [1] * (20 + first) + [8]:
                cache = extend(cache, counts(step))
            failed |= bool(cache.failed.any())
        assert failed == fails


def test_memory_of_five_local_layers_to_a_global_one():
    """At long context a 5:1 model takes less than half of what it would without windows, and a row proves it."""
    local = LayerConfig(num_kv_heads=2, head_dim=8, window=32)
    layers = ((local,) * 5 + (WIDE,)) * 2
    fields = {"max_seqs": 2, "max_seq_len": 1024, "block_size": 16, "dtype": "float32"}
    without = jaxkv.CacheConfig(layers=(WIDE,) * 12, num_blocks=128, **fields)

    class Model:
        layer_configs, dtype = layers, "float32"

    config = jaxkv.CacheConfig.from_model(Model, max_seqs=2, max_seq_len=1024, block_size=16, step_tokens=64)
    assert config.group_blocks == ((2 * (32 + 29) + 64) // 16, 128)
    assert config.bytes < 0.3 * without.bytes
    cache = jaxkv.init(config)
    for _ in range(1024 // 32):
        cache = extend(cache, counts(32, 32))
    jaxkv.check(cache)
    assert cache.lengths.tolist() == [1024, 1024]


def test_rows_that_are_not_in_the_step_give_back_too():
    cache, *_ = grown((20, 20, 7), chunk=20)
    assert cache.tables[0].num_blocks_per_row.tolist() == [5, 5, 2]
    cache = extend(cache, counts(0, 1, 0))
    assert cache.tables[0].num_blocks_per_row.tolist() == [2, 3, 2]  # positions 15.., 15.. and one more block, 2..
    assert cache.tables[1].num_blocks_per_row.tolist() == [5, 6, 2]
    jaxkv.check_invariants(cache)


def test_blocks_run_out_in_one_group_only():
    for group_blocks, window in (((4, 45), 6), ((45, 4), None)):
        cache = extend(jaxkv.init(make_config(group_blocks=group_blocks)), counts(9, 12, 1))
        jaxkv.check_invariants(cache)
        assert (cache.lengths.tolist(), cache.failed.tolist()) == ([9, 0, 1], [False, True, False])
        where = "without a window" if window is None else "with a window of 6"
        with pytest.raises(
            jaxkv.OutOfBlocks, match=f"Row 1 .* 3 more blocks .* 0 of 4 blocks are free in the layers {where}"
        ):
            jaxkv.check(cache)


def test_a_row_refused_in_one_group_takes_nothing_in_the_other():
    """Row 0 does not fit into one group; row 1 fits into both, once row 0 is out of the way."""
    cache = jaxkv.init(make_config(group_blocks=(2, 6)))
    cache = extend(cache, counts(12, 5, 0))
    assert (cache.lengths.tolist(), cache.failed.tolist()) == ([0, 5, 0], [True, False, False])
    cache = jaxkv.init(make_config(group_blocks=(6, 2)))
    cache = jaxkv.reserve(cache, counts(12, 5, 0))
    assert cache.failed.tolist() == [True, False, False] and cache.tables[0].num_blocks_per_row.tolist() == [0, 2, 0]


# Contents.


def test_tokens_given_back_are_zero_and_said_to_be_gone():
    cache, k, v = grown((20, 3, 0))
    k_row, v_row = jaxkv.gather(cache, 0, layer=0)
    first = int(np.argmax(np.asarray(cache.tables[0].tables[0]) != 0)) * BLOCK_SIZE
    assert first == 8  # before the last step of 5 the row had 15 tokens, and the next one saw 10 and later
    assert not k_row[:first].any() and not v_row[:first].any()
    assert_same((k_row[first:], v_row[first:]), (k[0][0, first:20], v[0][0, first:20]))
    assert_same(jaxkv.gather(cache, 0, layer=1), (k[1][0, :20], v[1][0, :20]))
    padded, _ = jax.jit(lambda cache: jaxkv.gather(cache, 0, layer=0, max_len=30))(cache)
    assert_same((padded[:20], padded[20:]), (k_row, jnp.zeros((10, 2, 8))))
    combined = cache.combined(2)
    assert not combined[0, :, :, :first].any()
    assert_same(combined[0, 0, :, first:20].swapaxes(0, 1), k[2][0, first:20])

    assert_same(cache.token(0, first, layer=0), (k[0][0, first], v[0][0, first]))
    with pytest.raises(IndexError, match=f"window of 6, has freed the token of row 0 at position {first - 1}"):
        cache.token(0, first - 1, layer=0)
    cache.token(0, 0, layer=1)
    assert cache.slots(0, 0, layer=0)[0] == 0 and cache.slots(0, 0, layer=1)[0] != 0


@pytest.mark.parametrize("function", ["fork", "reorder", "truncate"])
@pytest.mark.parametrize("length", [15, 16, 17, 18, 20])
def test_sharing_within_windows(function, length):
    """A row whose layers have given back what its copies never see goes on the same in all of them."""
    cache, *_ = grown((length, 2, 0), chunk=1)
    expected, _ = attend_all(cache)
    if function == "fork":
        cache = jaxkv.fork(cache, 0, [1, 2])
    elif function == "reorder":
        cache = jaxkv.reorder(cache, [0, 0, 0])
    else:
        cache = jaxkv.fork(jaxkv.extend(cache, counts(3, 0, 0)), 0, [1, 2])
        cache = jaxkv.truncate(cache, [length] * ROWS)
    jaxkv.check(cache)
    assert cache.lengths.tolist() == [length] * ROWS
    outs, cache = attend_all(cache)
    jaxkv.check_invariants(cache)
    for out, alone in zip(outs, expected, strict=True):
        assert_same(out, jnp.repeat(alone[:1], ROWS, axis=0))


def test_truncate_back_to_the_last_step_and_no_further():
    cache, *_ = grown((20, 20, 3), chunk=10)
    assert jaxkv.truncate(cache, [10, 12, 3]).lengths.tolist() == [10, 12, 3]
    cache = extend(cache, counts(1, 1, 1))
    kept = int(np.argmax(np.asarray(cache.tables[0].tables[0]) != 0)) * BLOCK_SIZE  # the first token still there
    assert kept == 12
    for target in range(1, 21):
        after = jaxkv.truncate(cache, [target, 60, 60])
        jaxkv.check_invariants(after)
        possible = target - WINDOW + 1 >= kept
        assert after.failed.tolist() == [not possible, False, False]
        assert after.lengths.tolist() == [target if possible else 21, 21, 4]
    assert jaxkv.truncate(cache, [0, 60, 60]).lengths.tolist() == [0, 21, 4], "an empty row sees nothing"
    with pytest.raises(jaxkv.OutOfWindow) as error:
        jaxkv.check(jaxkv.truncate(cache, [7, 9, 2]))
    assert str(error.value) == (
        "Truncating row 0 (21 tokens) to 7 tokens and row 1 (21 tokens) to 9 tokens goes back to tokens that layers "
        "that keep a window of 6 tokens have freed. The row is unchanged: free it and compute its tokens again, or "
        "fork it before the tokens that you may drop."
    )


def test_a_refused_truncation_tells_of_first_tokens_too():
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, window=WINDOW, sink_tokens=3)
    cache = jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seqs=1, max_seq_len=64, num_blocks=16, block_size=4))
    for _ in range(20):
        cache = jaxkv.extend(cache, [1])
    with pytest.raises(jaxkv.OutOfWindow, match="a window of 6 and 3 sink tokens have freed"):
        jaxkv.check(jaxkv.truncate(cache, [7]))


def test_a_fork_keeps_what_its_source_gives_back():
    """As that sentence advises: fork before going on, and the fork can still go back to where it was."""
    cache, k, _ = grown((12, 0, 0), chunk=12)
    cache = jaxkv.fork(cache, 0, 1)
    for _ in range(8):
        cache = extend(cache, counts(1, 0, 0))
    cache = jaxkv.fork(cache, 1, 0)
    jaxkv.check_invariants(cache)
    assert_same(jaxkv.gather(cache, 0, layer=1)[0], k[1][0, :12])


def test_reserved_blocks_of_a_row_behind_its_window():
    cache, *_ = grown((17, 0, 0), chunk=1)
    cache = jaxkv.reserve(cache, [30, 0, 0])
    jaxkv.check_invariants(cache)
    end = cache.tables[0].end.tolist()
    assert end == [8, 0, 0]
    for _ in range(13):
        cache = extend(cache, counts(1, 0, 0))
        assert cache.tables[0].end.tolist() == end
    jaxkv.check_invariants(cache)


@pytest.mark.parametrize("window", [7, 100])
def test_a_window_asked_for_cannot_be_wider_than_what_is_kept(window):
    cache, *_ = grown((3, 0, 0))
    q = jnp.ones((ROWS, 1, 4, 8))
    with pytest.raises(ValueError, match=f"window={window} is wider than what layer 0 keeps, a window of 6 tokens"):
        jaxkv.attend(q, cache, layer=0, window=window)
    jaxkv.attend(q, cache, layer=0, window=3)
    jaxkv.attend(q, cache, layer=1, window=window)


def test_contiguous_layers_with_a_window_keep_everything_and_see_the_same():
    lengths = (20, 3, 0)
    paged, *_ = grown(lengths)
    config = jaxkv.CacheConfig(
        layers=paged.config.layers, max_seqs=ROWS, max_seq_len=60, layout="contiguous", dtype="float32"
    )
    contiguous, *_ = grown(lengths, config=config)
    assert config.groups == ((0, 1, 2),) and contiguous.combined(0)[0, :, :, :20].all()
    for one, other in zip(attend_all(paged)[0], attend_all(contiguous)[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# Buffers and programs.


def test_every_group_owns_its_buffers():
    """Whatever was called without jit, a jit that donates can follow: no buffer stands in the state twice."""
    config = make_config()
    donating = jax.jit(lambda cache: jaxkv.extend(cache, counts(1, 1, 1)), donate_argnums=0)
    cache = jaxkv.init(config)
    _, host = jaxkv.swap_out(jaxkv.extend(cache, [5, 0, 0]), 0)
    functions = {
        "init": lambda cache: cache,
        "extend": lambda cache: jaxkv.extend(cache, [9, 1, 0]),
        "append": lambda cache: jaxkv.append(cache, *random_kv(config, (ROWS, 2)), [2, 1, 0]),
        "reserve": lambda cache: jaxkv.reserve(cache, [9, 1, 0]),
        "truncate": lambda cache: jaxkv.truncate(jaxkv.extend(cache, [9, 1, 0]), [2, 0, 0]),
        "fork": lambda cache: jaxkv.fork(jaxkv.extend(cache, [9, 1, 0]), 0, 1),
        "reorder": lambda cache: jaxkv.reorder(jaxkv.extend(cache, [9, 1, 0]), [1, 0, 0]),
        "free": lambda cache: jaxkv.free(jaxkv.extend(cache, [9, 1, 0]), [0]),
        "swap_out": lambda cache: jaxkv.swap_out(jaxkv.extend(cache, [9, 1, 0]), 0)[0],
        "swap_in": lambda cache: jaxkv.swap_in(cache, 1, host),
        "too many places": lambda cache: jaxkv.write(
            jaxkv.extend(cache, [9, 1, 0]), *[x[0] for x in random_kv(config, (ROWS, 2))], layer=0
        ),
        "jit": jax.jit(lambda cache: jaxkv.extend(cache, counts(9, 1, 0))),
        "from_blocks": lambda cache: jaxkv.convert.from_blocks(
            k=[np.ones((3, 2, 4, 8), np.float32)] * 2, v=[np.ones((3, 2, 4, 8), np.float32)] * 2,
            tables=np.array([[2, 0], [1, 0], [0, 0]], np.int32), lengths=np.array([6, 3, 0], np.int32),
            layers=(LOCAL, WIDE),
        ),
    }  # fmt: skip
    for name, function in functions.items():
        made = function(jaxkv.init(config))
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(made)]
        assert len(set(pointers)) == len(pointers), name
        after = donating(made)
        jaxkv.check_invariants(after)


def decode(cache, q, k, v, num_tokens, leaving):
    cache = jaxkv.extend(jaxkv.free(cache, leaving), num_tokens)
    outs, cache = attend_in_all_layers(cache, q, k, v)
    return outs, jnp.array(cache.failed), cache


def test_no_pool_is_copied():
    config = make_config((LOCAL, WIDE), group_blocks=(512, 2048), max_seq_len=1024)
    cache = jax.eval_shape(lambda: jaxkv.init(config))

    def tokens(heads):
        return [jax.ShapeDtypeStruct((ROWS, 1, heads, layer.head_dim), jnp.float32) for layer in config.layers]

    numbers, mask = jax.ShapeDtypeStruct((ROWS,), jnp.int32), jax.ShapeDtypeStruct((ROWS,), bool)
    q, kv = tokens(4), tokens(2)
    assert_no_copy(jax.jit(decode, donate_argnames="cache"), cache, q, kv, kv, numbers, mask)
    for function in (jaxkv.extend, jaxkv.truncate, jaxkv.reorder, jaxkv.reserve) if NIGHTLY else (jaxkv.truncate,):
        assert_no_copy(jax.jit(function, donate_argnames="cache"), cache, numbers)


def test_a_thousand_steps_compile_once_and_stay_on_the_device():
    config = make_config((LOCAL, WIDE), group_blocks=(8, 30))
    step = jax.jit(decode, donate_argnames="cache")
    rng = np.random.default_rng(0)
    plan = [(counts(*rng.choice([0, 1, 1, 1, 2], ROWS)), jnp.asarray(rng.random(ROWS) < 0.02)) for _ in range(1000)]
    k, v = jax.device_put(random_kv(config, (ROWS, 2)))
    q = [jnp.repeat(x, 2, axis=2) for x in k]
    cache, failures, most = jaxkv.init(config), [], []
    with jax.transfer_guard("disallow"):
        for num_tokens, leaving in plan:
            outs, failed, cache = step(cache, q, k, v, num_tokens, leaving)
            failures.append(failed)
            most.append(jnp.array(cache.lengths))
    assert step._cache_size() == 1
    jaxkv.check_invariants(cache)
    assert all(np.isfinite(out).all() for out in outs)
    assert np.max(most) == 60 and np.any(failures) and not np.all(failures)  # rows reach the end, and only then fail
    assert cache.tables[0].peak <= 8


# Other ways to make one, and what is said about it.


def test_from_blocks_with_windows():
    k, v = (np.random.default_rng(i).standard_normal((2, 6, 2, 4, 8)).astype(np.float32) for i in range(2))
    cache = jaxkv.convert.from_blocks(
        k=k, v=v, tables=[[2, 0, 4, 1], [3, 0, 0, 0]], lengths=[14, 3], layers=(LOCAL, WIDE), max_seq_len=16
    )
    jaxkv.check_invariants(cache)
    assert cache.config.group_windows == (6, None) and cache.lengths.tolist() == [14, 3]
    dense = np.concatenate([k[0, b].swapaxes(0, 1) for b in (2, 0, 4, 1)])[:14]
    assert_same(jaxkv.gather(cache, 0, layer=0)[0], dense)
    cache = extend(cache, counts(1, 1))
    jaxkv.check_invariants(cache)
    assert [t.num_blocks_per_row.tolist() for t in cache.tables] == [[2, 1], [4, 1]]
    assert_same(jaxkv.gather(cache, 0, layer=0)[0][8:14], dense[8:])


def test_stats_of_groups():
    cache, *_ = grown((20, 3, 0))
    stats = jaxkv.stats(cache)
    local, wide = stats["groups"]
    assert (local["window"], local["layers"], wide["window"], wide["layers"]) == (6, (0, 2), None, (1,))
    assert (local["blocks_used"], wide["blocks_used"], stats["blocks_used"]) == (4, 6, 10)
    assert (local["waste_per_row"], wide["waste_per_row"], stats["waste_per_row"]) == ([0, 1, 0], [0, 1, 0], [0, 2, 0])
    assert stats["bytes_used"] == (2 * 4 + 6) * 2 * 2 * 4 * 8 * 4
    assert stats["bytes_peak"] == stats["bytes_used"]
    assert (stats["num_blocks"], stats["blocks_free"], stats["tokens"]) == (90, 80, 23)
    assert "10 of 90 blocks used" in repr(cache)


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gemma3"])
@pytest.mark.skipif(not NIGHTLY, reason="by day engines of a small model with windows give the same")
def test_models_generate_the_same_with_windows_that_give_back(name):
    """Prompts several windows long, in chunks: the tokens that dense attention, without any cache, chooses."""
    model = models.load(DATA / name)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, n).tolist() for n in (52, 45, 50)]  # so that `recompute` compiles once
    engine = jaxkv.Engine(model, max_seqs=2, max_seq_len=64, step_tokens=8, block_size=4)
    outputs = [[] for _ in prompts]
    held = []
    for index, token in engine.stream(prompts, 12):
        outputs[index].append(token)
        held.append(int(engine.cache.tables[0].num_blocks_per_row.max()))
    jaxkv.check_invariants(engine.cache)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert engine.recompute(prompt, output, index=i) == output
    assert engine.config.group_windows[0] == 6 and max(held) <= math.ceil(6 / 4) + 1 + 8 / 4
