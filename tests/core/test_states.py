"""Layers that keep a state: random operations against the rows' own tokens, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from nightly import NIGHTLY, skip_by_day
from state_trial import (
    ATTENTION,
    ROWS,
    SPACE,
    VOCABULARY,
    WEIGHT,
    A,
    Trial,
    expected,
    make_config,
    mix,
    padded_step,
    states_of,
    tables,
)

import jaxkv
from jaxkv.testing import assert_no_copy


@pytest.mark.parametrize("seed", range(400) if NIGHTLY else [1])  # with snapshots
def test_random_operations_keep_each_row_s_states(seed):
    trial = Trial(seed)
    trial.run(60)


def test_forks_go_on_apart_and_share_until_then():
    cache = jaxkv.extend(jaxkv.init(make_config()), [3, 0, 0, 0])
    _, cache = mix(cache, jnp.array([[1, 2, 3, 0, 0]] + [[0] * 5] * 3))
    cache = jaxkv.fork(cache, 0, [1, 2, 3])
    assert jaxkv.stats(cache)["states"] | {} == {
        "layers": (0, 2), "num_slots": 4, "slots_used": 1, "slots_free": 3, "slots_shared": 1,
        "bytes_per_state": 4 * (12 + 24 + 24), "bytes_used": 240,
    }  # fmt: skip
    _, cache = mix(jaxkv.extend(cache, [1, 1, 0, 1]), jnp.array([[4], [5], [0], [6]]))
    jaxkv.check_invariants(cache)
    wanted = [expected((1, 2, 3, *more))[1][0] for more in ((4,), (5,), (), (6,))]
    np.testing.assert_allclose(states_of(cache), wanted, rtol=1e-5, atol=1e-5)
    assert cache.bytes == cache.config.bytes


def test_no_pool_is_copied_in_a_donated_step():
    state = jaxkv.LayerConfig.recurrent(state=((4, 32, 32), "float32"))
    fields = dict(max_seqs=64, num_blocks=64, snapshot_every=8)
    cache = jax.eval_shape(lambda: jaxkv.init(make_config(state, ATTENTION, **fields)))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache, k, g):
        cache = jaxkv.extend(cache, jnp.ones(64, jnp.int32))
        y, cache = jaxkv.gated_delta_rule(k, k, k, g, g, cache, 0)
        z, cache = jaxkv.state_space(k, g, g[0, 0], k, k, cache, 0)
        return y + z, cache

    assert_no_copy(step, cache, shape((64, 1, 4, 32)), shape((64, 1, 4)))


def test_a_layer_as_a_handle_is_as_the_cache():
    cache = jaxkv.extend(jaxkv.init(make_config()), [2, 0, 1, 0])
    tokens = jnp.array([[1, 2], [0, 0], [3, 0], [0, 0]])
    wanted, after = mix(cache, tokens)
    t, layers = {name: jnp.asarray(x)[tokens] for name, x in tables().items()}, list(cache.layers)
    a, layers[0] = jaxkv.causal_conv(t["x"], WEIGHT, layers[0], activation="silu")
    b, layers[0] = jaxkv.gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], layers[0])
    c, layers[1] = jaxkv.attention(t["kv"], t["kv"], t["kv"], layers[1])
    d, layers[2] = jaxkv.state_space(t["y"], t["dt"], A, t["B"], t["C"], layers[2])
    found = jnp.concatenate([x.reshape(4, 2, -1) for x in (a, b, c, d)], axis=-1)
    np.testing.assert_array_equal(found, wanted)
    put = cache.with_layers(layers)
    np.testing.assert_array_equal(states_of(put), states_of(after))
    assert {name: x.shape for name, x in jaxkv.read_states(put.layers[2]).items()} == {"state": (4, 2, 4, 3)}
    with pytest.raises(ValueError, match="what became of layers"):
        cache.with_layer(2, layers[0])


def test_states_of_other_rows_stay_as_they_are():
    cache = jaxkv.extend(jaxkv.init(make_config()), [1, 0, 1, 0])
    ones = {"state": jnp.ones((ROWS, 2, 4, 3))}
    cache = jaxkv.write_states(cache, ones, layer=2)
    cache = jaxkv.extend(cache, [1, 1, 0, 30])  # row 3 is too long
    bad = {"state": jnp.full((ROWS, 2, 4, 3), jnp.nan)}
    cache = jaxkv.extend(jaxkv.write_states(cache, bad, layer=2), [0] * ROWS)
    found = jaxkv.read_states(cache, layer=2)["state"]
    assert bool(jnp.isnan(found[:2]).all()) and bool((found[2] == 1).all()) and not found[3].any()
    again = jaxkv.extend(jaxkv.free(cache, [0]), [1, 0, 0, 0])
    assert not jaxkv.read_states(again, layer=2)["state"][0].any()


@skip_by_day("by day the same functions take rows over devices in test_by_rows")
def test_rows_over_devices_have_states_of_their_own():
    mesh = jax.make_mesh((2,), ("data",))
    cache = jaxkv.init(make_config(), mesh=mesh, rows="data")

    def step(cache, tokens, counts):
        y, cache = mix(jaxkv.extend(cache, counts), tokens)
        return cache, y

    tokens = jnp.array([[1, 2], [3, 0], [4, 5], [0, 0]])
    cache, _ = jax.jit(jaxkv.by_rows(step))(cache, tokens, jnp.array([2, 1, 2, 0]))
    states = np.concatenate([states_of(shard) for shard in cache.shards])
    for row, own in enumerate(((1, 2), (3,), (4, 5))):
        np.testing.assert_allclose(states[row], expected(own)[1][0], rtol=1e-5, atol=1e-5)
    assert not states[3].any()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto] if NIGHTLY else [AxisType.Auto])
def test_states_are_divided_over_heads(kind):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,))
    specs = jaxkv.partition_specs(make_config(), mesh)
    assert specs.states[0] == {name: jax.P(None, "model") for name in ("conv", "state")} and specs.states[1] is None
    cache = jaxkv.init(make_config(), mesh=mesh)
    assert cache.states[0]["state"].sharding.spec == jax.P(None, "model")
    with jax.set_mesh(mesh):
        y, cache = padded_step(cache, jnp.array([[1, 2]] * ROWS), jnp.array([2] * ROWS))
    assert cache.states[0]["state"].sharding.spec == jax.P(None, "model")
    np.testing.assert_allclose(np.asarray(y)[0], expected((1, 2))[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(states_of(cache)[3], expected((1, 2))[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("heads", [4, 3])  # divided, and whole on both devices
def test_kernels_of_states_run_on_each_device(heads, kind):
    """Lowered for a TPU, which has no kernel that the compiler could divide."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,))
    layer = jaxkv.LayerConfig.recurrent(conv=((16 * heads, 3, 128), "bfloat16"), state=((heads, 16, 128), "float32"))
    cache = jaxkv.init(make_config(layer, ATTENTION), mesh=mesh)

    def step(cache, k, v, g, x, weight):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        y, cache = jaxkv.gated_delta_rule(k, k, v, g, g, cache, 0, implementation="tpu")
        z, cache = jaxkv.state_space(
            v[..., :16], g, g[0, 0], v[..., :1, :], v[..., :1, :], cache, 0, implementation="tpu"
        )
        x, cache = jaxkv.causal_conv(x, weight, cache, 0, implementation="tpu")
        return y.sum() + z.sum() + x.sum(), cache

    def token(*shape):
        return jnp.ones((ROWS, 1, *shape))

    with jax.set_mesh(mesh):
        channels = 16 * heads * 128
        tokens = token(1, 16), token(heads, 128), token(heads), token(channels)
        traced = jax.jit(step).trace(cache, *tokens, jnp.ones((channels, 4)))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert len(kernels) == 3 and sum(f"5x3x{8 * heads}x128xbf16" in line for line in kernels) == 1
    assert sum(f"5x{2 if heads == 4 else 3}x16x128xf32" in line for line in kernels) == 2


def test_a_cache_with_states_is_one_of_many():
    caches = jax.vmap(lambda _: jaxkv.init(make_config()))(jnp.arange(2))
    tokens = jnp.array([[[1, 2]] * ROWS, [[3, 4]] * ROWS])
    step = jax.vmap(lambda cache, tokens: mix(jaxkv.extend(cache, jnp.array([2] * ROWS)), tokens)[0])
    found = step(caches, tokens)
    np.testing.assert_allclose(found[1, 0], expected((3, 4))[0], rtol=1e-5, atol=1e-5)


def test_a_step_of_guesses_and_keep_are_one_program():
    @jax.jit
    def guess(cache, entry):
        cache = jaxkv.extend(cache, jnp.full(ROWS, 3), guesses=True)
        y, cache = mix(cache, entry[0])
        return jaxkv.keep(cache, entry[1]), y

    random, cache = np.random.default_rng(0), jaxkv.init(make_config())
    tokens = jnp.asarray(random.integers(VOCABULARY, size=(3, ROWS, 3)))
    counts = random.integers(4, size=(3, ROWS, 1))
    path = np.where(np.arange(3) < counts, np.arange(3), -1)
    cache, _ = jax.lax.scan(guess, cache, (tokens, path))
    jaxkv.check_invariants(cache)
    for row in range(ROWS):
        own = sum((tuple(t[row, : n[row, 0]].tolist()) for t, n in zip(tokens, counts, strict=True)), ())
        np.testing.assert_allclose(states_of(cache)[row], expected(own)[1][0], rtol=2e-4, atol=2e-4)


def test_layers_as_handles_guess_too():
    cache, layers = jaxkv.extend(made(), [2, 0, 1, 0], guesses=[0]), None
    t = {name: jnp.asarray(x)[jnp.array([[1, 2], [0, 0], [3, 0], [0, 0]])] for name, x in tables().items()}
    layers = list(cache.layers)
    _, layers[0] = jaxkv.causal_conv(t["x"], WEIGHT, layers[0], activation="silu")
    _, layers[0] = jaxkv.gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], layers[0])
    _, layers[2] = jaxkv.state_space(t["y"], t["dt"], A, t["B"], t["C"], layers[2])
    jaxkv.check_invariants(cache.with_layers(layers))
    cache = jaxkv.keep(cache.with_layers(layers), [[0], [-1], [0], [-1]])
    assert cache.lengths.tolist() == [1, 0, 1, 0] and not cache.failed.any()
    np.testing.assert_allclose(states_of(cache)[[0, 2]], [expected((n,))[1][0] for n in (1, 3)], rtol=1e-5, atol=1e-5)


def test_no_pool_is_copied_in_a_donated_step_of_guesses():
    state = jaxkv.LayerConfig.recurrent(state=((4, 32, 32), "float32"))
    cache = jax.eval_shape(lambda: jaxkv.init(make_config(state, ATTENTION, max_seqs=64, num_blocks=64)))
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache, k, g, path):
        cache = jaxkv.extend(cache, jnp.full(64, 3), guesses=True)
        y, cache = jaxkv.gated_delta_rule(k, k, k, g, g, cache, 0)
        return y, jaxkv.keep(cache, path)

    path = jax.ShapeDtypeStruct((64, 3), jnp.int32)
    assert_no_copy(step, cache, shape((64, 3, 4, 32)), shape((64, 3, 4)), path, temp_fraction=4)  # the rows' states


def guessed(**fields):
    cache = jaxkv.extend(jaxkv.init(make_config(**fields)), [3, 0, 0, 0], guesses=True)
    return jaxkv.write_states(cache, {"state": jnp.ones((4, 2, 4, 3))}, layer=2)


REFUSED = {
    "call keep before the next step": lambda: jaxkv.extend(guessed(), [1, 0, 0, 0]),
    "call keep before rows become others": lambda: jaxkv.fork(guessed(), 0, 1),
    "call keep before rows are truncated": lambda: jaxkv.truncate(guessed(), [2, 0, 0, 0]),
    "call keep before rows are copied": lambda: jaxkv.swap_out(guessed(), [0]),
    "roll back states that write_states wrote": lambda: jaxkv.keep(guessed(), [[0]] + [[-1]] * 3),
    "path must be a chain, 0, 1, 2": lambda: jaxkv.keep(jaxkv.extend(made(), [3, 0, 0, 0]), [[0, 2]] + [[-1, -1]] * 3),
    "guesses must be bool\\[4\\]": lambda: jaxkv.extend(made(), [3, 0, 0, 0], guesses=jnp.ones(3, bool)),
    "takes no window": lambda: jaxkv.LayerConfig.recurrent(window=4),
    "takes no evict": lambda: dataclasses.replace(SPACE, evict="head"),
    "must be \\(shape, dtype\\)": lambda: jaxkv.LayerConfig.recurrent(x=3),
    "dtype of x must be one of": lambda: jaxkv.LayerConfig.recurrent(x=((3,), "int8")),
    "at least one axis": lambda: jaxkv.LayerConfig.recurrent(x=((), "float32")),
    "needs at least one array": lambda: jaxkv.LayerConfig.recurrent(),
    "at least one attention layer": lambda: make_config(SPACE),
    "cannot be stored with layout": lambda: make_config(SPACE, ATTENTION, layout="contiguous"),
    "no keys and values to share": lambda: make_config(SPACE, ATTENTION, dataclasses.replace(ATTENTION, shares_with=0)),
    "without keys and values": lambda: jaxkv.attend(jnp.ones((4, 1, 1, 4)), made(), layer=0),
    "keeps no state: take it to attention": lambda: jaxkv.read_states(made(), layer=1),
    "keeps no 'kv', only state": lambda: jaxkv.write_states(made(), {"kv": jnp.ones(4)}, layer=2),
    "must be float32\\[4, 2, 4, 3\\]": lambda: jaxkv.write_states(made(), {"state": jnp.ones((4, 2))}, layer=2),
    "not bfloat16": lambda: jaxkv.write_states(made(), {"state": jnp.ones((4, 2, 4, 3), jnp.bfloat16)}, layer=2),
    "states must be a dict": lambda: jaxkv.write_states(made(), jnp.ones(4), layer=2),
    "keeps no 'conv', only state": lambda: jaxkv.causal_conv(jnp.ones((4, 1, 6)), WEIGHT, made(), 2),
    "padded to all rows of the cache": lambda: jaxkv.causal_conv(jnp.ones((3, 1, 6)), WEIGHT, made(), 0),
    "for a cache, but this is one": lambda: jaxkv.read_states(made().layers[0], layer=0),
    "layer must say which": lambda: jaxkv.read_states(made()),
    "cache must be a jaxkv.Cache": lambda: jaxkv.read_states(3, layer=0),
    "which takes one token after another": lambda: jaxkv.plan_step(made(), (4,), tree=jnp.array([-1, 0, 0, 1])),
    "leave tree out": lambda: jaxkv.attention(*[jnp.ones((4, 1, 1, 4))] * 3, made(), layer=1, tree=-jnp.ones((4, 1))),
    "must be a multiple of block_size = 4, not 6": lambda: make_config(snapshot_every=6),
    "must be an integer": lambda: make_config(snapshot_every="all"),
    "is for recurrent layers": lambda: make_config(ATTENTION, snapshot_every=4),
    "counts tokens up to max_seq_len": lambda: make_config(
        dataclasses.replace(ATTENTION, window=4), SPACE, snapshot_every=4
    ),
    "so spill_bytes must be at least 480": lambda: jaxkv.PrefixCache(
        make_config(), disk=".", disk_bytes=1e4, spill_bytes=479
    ),
}


def made():
    return jaxkv.init(make_config())


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_named(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_check_says_where_a_row_can_go_back_to():
    cache = jaxkv.truncate(jaxkv.extend(made(), [5, 4, 0, 0]), [2, 4, 0, 0])
    assert cache.failed.tolist() == [True, False, False, False]
    with pytest.raises(jaxkv.OutOfWindow, match=r"to 2 tokens goes back to where recurrent layers \(0 and 2\)"):
        jaxkv.check(cache)


def test_what_keeps_a_state_says_so_in_a_line():
    cache = jaxkv.extend(made(), [5, 4, 0, 0])
    assert repr(SPACE) == "LayerConfig.recurrent(state=((2, 4, 3), 'float32'))"
    assert eval(repr(cache.config), vars(jaxkv)) == cache.config
    assert repr(cache.state_slots) == "StateSlots(2 of 4 slots used)"
    assert repr(cache.layers[2]).startswith("StateLayer(2 of 3, LayerConfig.recurrent(")


def test_rows_go_back_to_snapshots_and_on_apart():
    cache = jaxkv.extend(jaxkv.init(make_config(snapshot_every=4, max_seq_len=16)), [5, 0, 0, 0])
    _, cache = mix(cache, jnp.array([[1, 2, 3, 4, 5]] + [[0] * 5] * 3))
    cache = jaxkv.fork(cache, 0, [1, 2])
    cache = jaxkv.truncate(cache, jnp.array([5, 4, 4, 0]))
    assert jaxkv.snapshots(cache) == [[4], [4], [4], []] and jaxkv.stats(cache)["states"]["slots_used"] == 2
    _, cache = mix(jaxkv.extend(cache, [3, 1, 4, 0]), jnp.array([[6, 7, 8, 0], [9] * 4, [1, 2, 3, 4], [0] * 4]))
    jaxkv.check_invariants(cache)
    rows = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 9), (1, 2, 3, 4, 1, 2, 3, 4)
    np.testing.assert_allclose(states_of(cache)[:3], [expected(row)[1][0] for row in rows], rtol=1e-5, atol=1e-5)
    assert jaxkv.snapshots(cache) == [[4, 8], [4], [4, 8], []] and jaxkv.stats(cache)["states"]["snapshots"] == 3
    cache = jaxkv.truncate(jaxkv.free(cache, [2]), jnp.array([4, 3, 0, 0]))
    np.testing.assert_allclose(states_of(cache)[0], expected(rows[1][:4])[1][0], rtol=1e-5, atol=1e-5)
    with pytest.raises(jaxkv.OutOfWindow, match="row 1 has snapshots of 4 tokens"):
        jaxkv.check(cache)
    with pytest.raises(jaxkv.OutOfWindow, match=r"; row 0 has no snapshots\. "):
        jaxkv.check(jaxkv.truncate(jaxkv.extend(jaxkv.free(cache, [0, 1]), [3, 0, 0, 0]), [2, 0, 0, 0]))


def test_states_written_by_hand_stay_where_steps_end():
    layers = ATTENTION, jaxkv.LayerConfig.recurrent(state=((1,), "float32"))
    cache = jaxkv.init(make_config(*layers, snapshot_every=4))
    for number, counts in enumerate(([4, 5, 0, 0], [4, 8, 0, 0], [4, 0, 0, 0])):
        cache = jaxkv.extend(cache, counts)
        cache = jaxkv.write_states(cache, {"state": jnp.full((ROWS, 1), number + 1.0)}, layer=1)
    jaxkv.check_invariants(cache)
    assert jaxkv.snapshots(cache) == [[4, 8, 12], [], [], []]
    cache = jaxkv.truncate(cache, jnp.array([8, 13, 0, 0]))
    assert states_of(cache)[:2].tolist() == [[2.0], [2.0]]
