"""Bounds of blocks' keys, and decode steps that read few blocks: equal to dense attention masked to those."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
import jaxkv.scores
from jaxkv.scores import _blocks
from jaxkv.testing import poison

ROWS, LENGTH, HEADS, QUERIES, DIM = 4, 40, 2, 6, 5
LENGTHS = (33, 0, 7, 8)  # over a boundary, none, up to one but one, up to one


def make(block_size=4, dtype="float32", window=None, **fields):
    """A cache with random keys, poisoned where no row holds a token, and what each layer's are."""
    layer = jaxkv.LayerConfig(num_kv_heads=HEADS, head_dim=DIM, window=window)
    config = jaxkv.CacheConfig(
        layers=(layer,) * 2, max_seqs=ROWS, max_seq_len=LENGTH, num_blocks=60, block_size=block_size, dtype=dtype,
        **fields,
    )  # fmt: skip
    k, v = np.random.default_rng(block_size).standard_normal((2, 2, ROWS, max(LENGTHS), HEADS, DIM), np.float32)
    return poison(append(jaxkv.init(config), k, v, np.array(LENGTHS, np.int32))), k[1], v[1]


append = jax.jit(jaxkv.append)
bounds_of = jax.jit(functools.partial(jaxkv.block_bounds, layer=1), static_argnames="last")


def expected_bounds(keys, lengths, block_size, first=0):
    """By a loop over blocks; `first` tokens have been given back."""
    width = -(-LENGTH // block_size)
    found = np.zeros((2, ROWS, width, HEADS, DIM), np.float32)
    for row, length in enumerate(lengths):
        for block in range(first // block_size, -(-length // block_size)):
            part = keys[row, block * block_size : min((block + 1) * block_size, length)]
            found[:, row, block] = part.min(axis=0), part.max(axis=0)
    return found


@pytest.mark.parametrize("fields", [{}] + NIGHTLY * [{"block_size": 7, "dtype": "int8", "stacked": True}])
def test_bounds_are_the_least_and_the_largest_of_what_is_held(fields):
    cache, k, _ = make(**fields)
    if "dtype" in fields:  # as attention sees them
        for row, length in enumerate(LENGTHS):
            k[row, :length] = jaxkv.gather(cache, row, layer=1)[0]
    np.testing.assert_array_equal(bounds_of(cache), expected_bounds(k, LENGTHS, cache.config.block_size))


def test_what_a_window_has_given_back_has_no_bounds():
    cache, k, _ = make(window=9)
    cache = jaxkv.extend(cache, [1, 0, 0, 0])  # gives back what its token does not see
    k = np.concatenate([k, k[:, :1]], axis=1)
    cache = jaxkv.write(cache, k[:, 33:], k[:, 33:], layer=1)
    first = cache.config.first_retained_block(0, 33) * 4
    expected = expected_bounds(k, (34, *LENGTHS[1:]), 4)
    expected[:, 0, : first // 4] = 0
    assert first > 0 and not np.asarray(cache.tables[0].tables)[0, : first // 4].any()
    np.testing.assert_array_equal(bounds_of(cache), expected)


@functools.partial(jax.jit, static_argnames=("tokens", "last"))
def step(cache, bounds, k, counts, tokens, last):
    cache = jaxkv.extend(cache, counts)
    cache = jaxkv.write(cache, k, k, layer=1)
    return cache, jaxkv.block_bounds(cache, layer=1, bounds=bounds, last=last)


def test_bounds_are_kept_up_to_date_by_each_rows_last_blocks():
    cache, _, _ = make()
    tokens, last = 5, 3
    bounds, rng = bounds_of(cache), np.random.default_rng(3)
    for _ in range(4):
        counts = np.minimum(rng.integers(0, tokens + 1, ROWS), LENGTH - 1 - np.asarray(cache.lengths)).astype(np.int32)
        new = rng.standard_normal((ROWS, tokens, HEADS, DIM), np.float32)
        cache, bounds = step(cache, bounds, new, counts, tokens, last)
        np.testing.assert_array_equal(bounds, bounds_of(cache))
    stale = jaxkv.BlockBounds(bounds.low + 1, bounds.high - 1)
    some = bounds_of(cache, bounds=stale, last=1)
    ends = -(-np.asarray(cache.lengths) // 4)
    for row, end in enumerate(ends):
        fresh = np.asarray(some.low)[row] == np.asarray(bounds.low)[row]
        assert fresh[max(end, 1) - 1].all() and not fresh[: max(end, 1) - 1].any() and not fresh[max(end, 1) :].any()


choose = jax.jit(functools.partial(jaxkv.scores.quest, layer=1), static_argnames="num_blocks")
attend = jax.jit(functools.partial(jaxkv.attend, layer=1))


def decode(cache, k, v, seed=0):
    """A token more in every row but the empty one; keys and values of all, and its queries."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((ROWS, 1, QUERIES, DIM), np.float32)
    new_k, new_v = rng.standard_normal((2, ROWS, 1, HEADS, DIM), np.float32)
    k, v = (np.concatenate([x, np.zeros_like(new)], axis=1) for x, new in ((k, new_k), (v, new_v)))
    for row, length in enumerate(LENGTHS):
        k[row, length], v[row, length] = new_k[row, 0], new_v[row, 0]
    cache = jaxkv.extend(cache, np.array([1, 0, 1, 1], np.int32))
    return jaxkv.write(cache, new_k, new_v, layer=1), q, k, v


def dense(q, k, v, lengths, blocks, block_size):
    """Softmax in float64 over the tokens of the blocks, and what share of all attention they have."""
    out, shares = np.zeros((ROWS, QUERIES, DIM)), np.ones((ROWS, QUERIES))
    for row in range(ROWS):
        end = lengths[row]
        if not end:
            continue
        kept = np.isin(np.arange(end) // block_size, blocks[row])
        for head in range(QUERIES):
            logits = k[row, :end, head // (QUERIES // HEADS)].astype(float) @ q[row, 0, head] * DIM**-0.5
            weights = np.exp(logits - logits.max())
            shares[row, head] = weights[kept].sum() / max(weights.sum(), 1e-30)
            weights = np.where(kept, weights, 0)
            out[row, head] = weights @ v[row, :end, head // (QUERIES // HEADS)] / max(weights.sum(), 1e-30)
    return out, shares


def chosen_by_hand(bounds, q, lengths, num_blocks, block_size):
    """By a loop over rows and heads, in float64; a row's new token is its last."""
    low, high = (np.asarray(x, float) for x in bounds)
    found = []
    for row, length in enumerate(lengths):
        held = np.clip(length - np.arange(low.shape[1]) * block_size, 0, block_size)[: -(-length // block_size)]
        total = np.zeros(len(held))
        for head in range(QUERIES if length else 0):
            at, entries = (row, slice(len(held)), head // (QUERIES // HEADS)), q[row, 0, head].astype(float)
            weights = held * np.exp(np.maximum(low[at] * entries, high[at] * entries).sum(axis=1) * DIM**-0.5)
            total += weights / weights.sum()
        total[-1:] = np.inf
        best = sorted(np.argsort(-total)[:num_blocks].tolist())
        found.append(best + [-1] * (num_blocks - len(best)))
    return found


@pytest.mark.parametrize("block_size", [4] + NIGHTLY * [1])
def test_a_step_that_reads_few_blocks_is_dense_attention_masked_to_them(block_size):
    cache, k, v = make(block_size)
    cache, q, k, v = decode(cache, k, v)
    lengths, width = np.asarray(cache.lengths), -(-LENGTH // block_size)
    held = -(-lengths // block_size)
    for num_blocks in (2, width + 2):
        blocks = np.asarray(choose(cache, q=q, num_blocks=num_blocks))
        assert blocks.shape == (ROWS, num_blocks)
        for row in range(ROWS):
            chosen = blocks[row, : min(num_blocks, held[row])]
            assert (np.diff(chosen) > 0).all() and (blocks[row, len(chosen) :] == -1).all()
            assert not len(chosen) or (chosen[-1] == held[row] - 1 and chosen[0] >= 0)
        assert blocks.tolist() == chosen_by_hand(bounds_of(cache), q, lengths, num_blocks, block_size)
        expected, shares = dense(q, k, v, lengths, blocks, block_size)
        np.testing.assert_allclose(attend(q, cache, blocks=blocks)[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(attend(q, cache, blocks=blocks), attend(q, cache), atol=1e-6)
    assert (shares == 1).all()


def test_the_blocks_that_matter_are_chosen():
    """A key like the query, far back, is found by its bounds; and so is most of the attention among random ones."""
    cache, k, v = make()
    cache, q, k, v = decode(cache, k, v)
    planted = 13
    loud = 4 * np.repeat(q.reshape(ROWS, 1, HEADS, -1, DIM).mean(axis=3), 4, axis=1)[:1]
    block = int(np.asarray(cache.tables[0].tables)[0, planted // 4])
    pool = cache.pools[1]
    put = pool.kv.at[block, 0, :, :, :DIM].set(np.moveaxis(loud[0], 0, 1))
    with_key = cache.replace(pools=(cache.pools[0], dataclasses.replace(pool, kv=put)))
    blocks = np.asarray(choose(with_key, q=q, num_blocks=2))
    assert blocks[0].tolist() == [planted // 4, 33 // 4]
    _, by_quest = dense(q, k, v, np.asarray(cache.lengths), np.asarray(choose(cache, q=q, num_blocks=5)), 4)
    _, by_recency = dense(q, k, v, np.asarray(cache.lengths), np.array([[4, 5, 6, 7, 8]] * ROWS), 4)
    assert by_quest[0].mean() > by_recency[0].mean() + 0.05


def test_bounds_that_lie_beside_the_blocks_choose_alike(monkeypatch):
    monkeypatch.setattr(_blocks, "TOGETHER", 3 * ROWS * 2 * HEADS * DIM * 4)  # three columns at a time, of ten
    cache, k, v = make()
    layers = (cache.config.layers[0], dataclasses.replace(cache.config.layers[1], bounds=True))
    keeping = jaxkv.init(cache.config.replace(layers=layers))
    keeping = poison(append(keeping, k[None].repeat(2, 0), v[None].repeat(2, 0), np.array(LENGTHS, np.int32)))
    keeping, q, k, v = decode(keeping, k, v)
    read = bounds_of(keeping, bounds=jax.tree.map(jnp.zeros_like, bounds_of(keeping)))
    for queries in (q, q[[0, 2, 3]][:, 0]) if NIGHTLY else (q[[0, 2, 3]][:, 0],):
        expected = choose(keeping, q=queries, num_blocks=5, bounds=read)
        np.testing.assert_array_equal(choose(keeping, q=queries, num_blocks=5), expected)


def test_bounds_that_are_given_are_used_and_packed_queries_choose_alike():
    cache, k, v = make()
    cache, q, _, _ = decode(cache, k, v)
    padded = choose(cache, q=q, num_blocks=4)
    bounds = bounds_of(cache)
    np.testing.assert_array_equal(choose(cache, q=q, num_blocks=4, bounds=bounds), padded)
    np.testing.assert_array_equal(choose(cache, q=q[[0, 2, 3]][:, 0], num_blocks=4, bounds=bounds), padded)
    few = np.asarray(choose(cache, q=q, num_blocks=2, bounds=bounds))
    centre = np.asarray(bounds.low + bounds.high)[3]
    otherwise = np.repeat(50 * (centre[0] - centre[1]), QUERIES // HEADS, axis=0)[None]
    for padding in (otherwise, otherwise * np.nan):  # a tail that would choose otherwise
        behind = np.concatenate([q[[0, 2, 3]][:, 0], padding, padding])
        np.testing.assert_array_equal(choose(cache, q=behind, num_blocks=2, bounds=bounds), few)
    assert few[3].tolist() == [1, 2]
    there = np.concatenate([q[[0, 2]][:, 0], otherwise, padding, padding])
    assert choose(cache, q=there, num_blocks=2, bounds=bounds)[3].tolist() == [0, 2]
    nothing = jax.tree.map(jnp.zeros_like, bounds)
    assert np.asarray(choose(cache, q=q, num_blocks=4, bounds=nothing))[0].tolist() == [0, 1, 2, 8], "ties: the first"
    broken = jaxkv.BlockBounds(bounds.low, bounds.high.at[0, 5].set(jnp.nan))
    assert 5 in np.asarray(choose(cache, q=q, num_blocks=2, bounds=broken))[0], "what cannot be told is read"


def test_bad_input_is_one_sentence():
    cache, _, _ = make()
    q, bounds = jnp.ones((ROWS, 1, QUERIES, DIM)), jaxkv.block_bounds(cache, layer=1)
    bounds_in, quest = functools.partial(jaxkv.block_bounds, cache), functools.partial(jaxkv.scores.quest, cache)
    for error, text, call, fields in [
        (IndexError, "layer must be an integer from 0 to 1, not 2", bounds_in, {"layer": 2}),
        (ValueError, "last= says which blocks", bounds_in, {"last": 1}),
        (ValueError, "last must be at least 1, not 0", bounds_in, {"bounds": bounds, "last": 0}),
        (ValueError, "bounds must be what block_bounds gave for this layer, two .4, 10, 2, 5., not", bounds_in,
         {"bounds": jax.tree.map(lambda x: x[:2], bounds)}),
        (ValueError, "bounds must be what block_bounds gave", bounds_in, {"bounds": 7}),
        (ValueError, "bounds must be what block_bounds gave", quest, {"bounds": (bounds.low,)}),
        (ValueError, "num_blocks must be at least 1, not 0", quest, {"num_blocks": 0}),
        (ValueError, "num_blocks must be an integer, not nan", quest, {"num_blocks": float("nan")}),
        (ValueError, r"q must be \[4, T, H, 5\], or packed", quest, {"q": q[:2]}),
        (ValueError, r"q must be \[4, T, H, 5\], or packed", quest, {"q": 7}),
        (ValueError, "q has 5 heads of 5, but the layer 2 of 5", quest, {"q": q[:, :, :5]}),
        (ValueError, "scale must be a finite number", quest, {"scale": np.nan}),
    ]:  # fmt: skip
        defaults = {"layer": 0} | ({"q": q, "num_blocks": 1} if call is quest else {})
        with pytest.raises(error, match=text):
            call(**defaults | fields)
    with pytest.raises(ValueError, match="cache must be a Cache"):
        jaxkv.block_bounds(None, layer=0)
    layer = dataclasses.replace(cache.config.layers[0], evict="head")
    by_heads = jaxkv.init(cache.config.replace(layers=(layer,)))
    for call in (jaxkv.block_bounds, functools.partial(jaxkv.scores.quest, q=q, num_blocks=1)):
        with pytest.raises(ValueError, match='layer 0, with evict="head", each head has blocks of its own'):
            call(by_heads, layer=0)


@pytest.mark.parametrize("bounds", [True, False])
def test_rows_of_windows_that_go_on(bounds):
    """Beyond max_seq_len, and in arrays that go by the window: what is chosen is read, and all of it is as without."""
    layer = jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, window=16, bounds=bounds)
    sizes = dict(max_seqs=2, num_blocks=16, block_size=4, dtype="float32")
    cache, longer = (jaxkv.init(jaxkv.CacheConfig(layers=(layer,), max_seq_len=n, **sizes)) for n in (64, 1 << 20))
    assert jax.eval_shape(lambda c: jaxkv.block_bounds(c, layer=0), longer).low.shape[1] <= 64
    rng = np.random.default_rng(0)

    @jax.jit
    def step(cache, kv):
        return jaxkv.write(jaxkv.extend(cache, jnp.ones(2, jnp.int32)), kv, kv, layer=0)

    for _ in range(90):
        cache = step(cache, jnp.asarray(rng.standard_normal((2, 1, 1, 8)), jnp.float32))
    q = jnp.asarray(rng.standard_normal((2, 1, 2, 8)), jnp.float32)
    kept = jaxkv.block_bounds(cache, layer=0)
    choose = jax.jit(jaxkv.scores.quest, static_argnames=("layer", "num_blocks"))
    for given in (None, kept, jaxkv.block_bounds(cache, layer=0, bounds=kept, last=2)):
        blocks = choose(cache, layer=0, q=q, num_blocks=3, bounds=given)
        assert (np.diff(blocks) > 0).all() and (blocks[:, -1] == 89 // 4).all() and (blocks[:, 0] >= 74 // 4).all()
        np.testing.assert_allclose(
            jaxkv.attend(q, cache, layer=0, blocks=blocks.tolist()), jaxkv.attend(q, cache, layer=0, blocks=blocks)
        )
    every = choose(cache, layer=0, q=q, num_blocks=8)
    assert (np.asarray(every)[:, 4:] <= 22).all()
    whole = jaxkv.attend(q, cache, layer=0)
    np.testing.assert_allclose(jaxkv.attend(q, cache, layer=0, blocks=every), whole, atol=1e-6)
    assert np.abs(np.asarray(jaxkv.attend(q, cache, layer=0, blocks=blocks) - whole)).max() > 1e-3
