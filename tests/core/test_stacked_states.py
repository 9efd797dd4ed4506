"""Recurrent layers whose states stand in one array: a scan over them, and what rows take along."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY, skip_by_day
from state_trial import ATTENTION, DELTA, ROWS, VOCABULARY, WEIGHT, Trial, make_config, states_of, tables

import jaxkv
from jaxkv.testing import assert_no_copy, poison

PERIODS = 3
LAYERS = (DELTA, ATTENTION) * PERIODS


def make(stacked, **fields):
    return make_config(*LAYERS, stacked=stacked, **fields)


def mix(cache, tokens, recurrent, attending, factor, step=None):
    """Computes one period."""
    t = {name: jnp.asarray(x)[tokens] * factor for name, x in tables().items()}
    a, cache = jaxkv.causal_conv(t["x"], WEIGHT, cache, recurrent, activation="silu", step=step)
    b, cache = jaxkv.gated_delta_rule(t["q"], t["k"], t["v"], t["g"], t["beta"], cache, recurrent, step=step)
    c, cache = jaxkv.attention(t["kv"], t["kv"], t["kv"], cache, layer=attending, step=step)
    return jnp.concatenate([x.reshape(*x.shape[: tokens.ndim], -1) for x in (a, b, c)], axis=-1), cache


def one_by_one(cache, tokens, step=None):
    outs = []
    for i in range(PERIODS):
        y, cache = mix(cache, tokens, 2 * i, 2 * i + 1, jnp.float32(i + 1), step)
        outs.append(y)
    return jnp.stack(outs), cache


def scanned(cache, tokens, step=None):

    def period(carried, number):
        pools, states, slots = carried
        inner = cache.replace(pools=pools, states=states, state_slots=slots)
        y, after = mix(inner, tokens, (0, number), (1, number), number.astype(jnp.float32) + 1, step)
        return (after.pools, after.states, after.state_slots), y

    carried = cache.pools, cache.states, cache.state_slots
    (pools, states, slots), outs = jax.lax.scan(period, carried, jnp.arange(PERIODS, dtype=jnp.int32))
    return outs, cache.replace(pools=pools, states=states, state_slots=slots)


@functools.partial(jax.jit, static_argnames=("run", "packed"), donate_argnames="cache")
def take(cache, tokens, counts, run, packed=False):
    cache = jaxkv.extend(cache, counts)
    return run(cache, tokens, jaxkv.plan_step(cache, tokens.shape) if packed else None)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(VOCABULARY, size=shape).astype(np.int32))


STEPS = (((ROWS, 5), (5, 3, 0, 4), False), ((9,), (4, 1, 3, 1), True), ((ROWS, 1), (1, 0, 1, 1), False))


@pytest.mark.parametrize("every", [None, 4])
def test_a_scan_computes_what_layers_one_by_one_do(every):
    stacked, apart = (jaxkv.init(make(x, snapshot_every=every)) for x in (True, False))
    for seed, (shape, counts, packed) in enumerate(STEPS):
        tokens = draw(seed, *shape)
        y, stacked = take(poison(stacked), tokens, jnp.array(counts), scanned, packed)
        wanted, apart = take(apart, tokens, jnp.array(counts), one_by_one, packed)
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(states_of(stacked), states_of(apart), rtol=2e-5, atol=2e-5)
        jaxkv.check_invariants(stacked)
    assert jaxkv.snapshots(stacked) == jaxkv.snapshots(apart)
    assert jaxkv.stats(stacked)["states"] == jaxkv.stats(apart)["states"] and stacked.config.bytes == apart.config.bytes
    assert len({id(x) for x in stacked.states if x is not None}) == 1, "one array for all three layers"


def test_no_state_is_copied_in_a_scan():
    state = jaxkv.LayerConfig.recurrent(state=((4, 32, 32), "float32"))
    config = make_config(*(state, ATTENTION) * PERIODS, stacked=True, max_seqs=64, num_blocks=64)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(cache, k, g, kv):
        cache = jaxkv.extend(cache, jnp.ones(64, jnp.int32))

        def period(carried, number):
            inner = cache.replace(pools=carried[0], states=carried[1])
            _, inner = jaxkv.gated_delta_rule(k, k, k, g, g, inner, (0, number))
            _, inner = jaxkv.attention(kv, kv, kv, inner, layer=(1, number))
            return (inner.pools, inner.states), None

        pools, states = jax.lax.scan(period, (cache.pools, cache.states), jnp.arange(PERIODS, dtype=jnp.int32))[0]
        return cache.replace(pools=pools, states=states)

    cache = jax.eval_shape(lambda: jaxkv.init(config))
    assert_no_copy(step, cache, shape((64, 1, 4, 32)), shape((64, 1, 4)), shape((64, 1, 1, 4)))


@pytest.fixture(scope="module")
def filled():
    """A stacked cache and one of layers apart, whose rows hold the same."""
    stacked, apart = (jaxkv.init(make(x, snapshot_every=4)) for x in (True, False))
    shape, counts, _ = STEPS[0]
    _, stacked = take(stacked, draw(0, *shape), jnp.array(counts), one_by_one)
    _, apart = take(apart, draw(0, *shape), jnp.array(counts), one_by_one)
    np.testing.assert_array_equal(states_of(stacked), states_of(apart))
    return stacked, apart


def test_rows_travel_between_stacked_caches_and_others(filled, tmp_path):
    stacked, apart = filled
    wanted, marks = states_of(apart), jaxkv.snapshots(apart)
    for source, to in ((stacked, apart.config), (apart, stacked.config), (stacked, stacked.config)):
        sent = jaxkv.send(source, [0, 1, 3], to=jaxkv.init(to), at=[0, 1, 3])
        jaxkv.save(tmp_path / "x.safetensors", source)
        loaded = jaxkv.load(tmp_path / "x.safetensors", to)
        host = jaxkv.swap_out(source, [0, 1, 3])[1]
        back = jaxkv.swap_in(jaxkv.init(to), [0, 1, 3], host) if to == source.config else sent
        for cache in (sent, loaded, back):
            jaxkv.check_invariants(cache)
            np.testing.assert_array_equal(states_of(cache), wanted)
            assert jaxkv.snapshots(cache) == marks


def test_rows_are_forked_and_set_back(filled):
    results = []
    for cache in filled:
        cache = jaxkv.truncate(jaxkv.fork(cache, 0, [2]), [4, 3, 5, 0])
        _, cache = take(jax.tree.map(jnp.copy, cache), draw(5, ROWS, 2), jnp.array([2, 0, 1, 2]), one_by_one)
        jaxkv.check_invariants(cache)
        results.append(states_of(cache))
    np.testing.assert_array_equal(*results)


def test_a_list_of_layers_is_put_back(filled):
    stacked, apart = filled
    cache = jaxkv.extend(stacked, [1, 0, 0, 1])
    layers = list(cache.layers)
    new = {"conv": jnp.full((ROWS, 2, 2, 3), 3.0), "state": jnp.full((ROWS, 2, 3, 4), 4.0)}
    layers[2] = jaxkv.write_states(layers[2], new)
    again = jaxkv.write_states(cache, new, layer=2)
    np.testing.assert_array_equal(states_of(cache.with_layers(layers)), states_of(again))
    other = jaxkv.write_states(jaxkv.extend(apart, [1, 0, 0, 1]), new, layer=2)
    np.testing.assert_array_equal(states_of(again), states_of(other))
    assert cache.layers[(0, 1)].number == 0 and jaxkv.read_states(cache, layer=(0, 1))["conv"].shape == (ROWS, 2, 2, 3)


def test_guesses_are_kept_layer_by_layer_and_refused_in_a_scan(filled):
    results, counts = [], jnp.array([2, 1, 0, 2])
    for cache in filled:
        cache = jaxkv.extend(cache, counts, guesses=True)
        _, cache = one_by_one(cache, draw(7, ROWS, 2))
        cache = jaxkv.keep(cache, np.array([[0, -1], [-1, -1], [-1, -1], [0, 1]]))
        jaxkv.check_invariants(cache)
        results.append(states_of(cache))
    np.testing.assert_array_equal(*results)
    with pytest.raises(ValueError, match="takes recurrent layers one by one"):
        scanned(jaxkv.extend(filled[0], counts, guesses=True), draw(7, ROWS, 2))


class StackedTrial(Trial):
    """All layers differ, so each stands alone in its array."""

    def config(self, **fields):
        return super().config(stacked=True, **fields)


@skip_by_day("by day rows travel, are forked and set back once")
@pytest.mark.parametrize("seed", range(100 if NIGHTLY else 1))
def test_random_operations(seed):
    StackedTrial(seed).run(60)
