"""Trees, kept paths, chunks, spans and memories of other sequences, through a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import gather_row

import jaxkv
from jaxkv.testing import assert_no_copy, poison

ROWS, HEADS, DIM, PLACES = 7, 6, 8, 7
FULL, LOCAL, CHUNKED = (
    jaxkv.LayerConfig(num_kv_heads=2, head_dim=DIM, **sight) for sight in ({}, {"window": 5}, {"chunk": 4})
)
CONFIG = jaxkv.CacheConfig(
    layers=(FULL, LOCAL, CHUNKED), max_seqs=ROWS, max_seq_len=40, num_blocks=100, block_size=3, dtype="float32"
)
CONTEXT = 8
PARENTS = [-1, 0, 0, 1, 2, -1, 4]  # of the tree: its paths are 0 1 3, 0 2 4 6, and 5
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [5], [0, 2, 4, 6]]  # to each of its tokens
SLOPES = jnp.linspace(0.1, 0.6, HEADS)


def attended(q, keys):
    """What one query gets of keys that are their own values: heads of q and keys `[C, K, D]`, in NumPy."""
    keys = np.repeat(keys, HEADS // keys.shape[1], axis=1)
    weights = np.exp(np.einsum("hd,chd->hc", q, keys) * DIM**-0.5)
    return np.einsum("hc,chd->hd", weights / weights.sum(axis=1, keepdims=True), keys)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def context():
    """Every row has the same tokens; NaN everywhere else."""
    kv = [jnp.broadcast_to(normal(i, 1, CONTEXT, 2, DIM), (ROWS, CONTEXT, 2, DIM)) for i in range(3)]
    return jax.jit(lambda: poison(jaxkv.append(jaxkv.init(CONFIG), kv, kv)))()


def tree_tokens():
    """Queries and keys (and values) of the tree's tokens, layer by layer, the same in every row."""
    return [[jnp.repeat(normal(10 * h + i, 1, PLACES, h, DIM), ROWS, axis=0) for i in range(3)] for h in (HEADS, 2)]


@jax.jit
def step_of(cache, counts, q, k, tree):
    cache = jaxkv.extend(cache, counts)
    step = jaxkv.plan_step(cache, (ROWS, PLACES), tree=tree)
    outs = []
    for layer in range(3):
        options = {"alibi": SLOPES} if layer == 0 else {}
        out, cache = jaxkv.attention(q[layer], k[layer], k[layer], cache, layer=layer, step=step, **options)
        outs.append(out)
    return outs, step.positions, cache


CHAIN = jnp.repeat(jnp.arange(-1, PLACES - 1, dtype=jnp.int32)[None], ROWS, axis=0)


@functools.cache
def grown():
    """The context and the whole tree in every row."""
    q, k = tree_tokens()
    tree = jnp.repeat(jnp.array([PARENTS], jnp.int32), ROWS, axis=0)
    return step_of(context(), jnp.full(ROWS, PLACES, jnp.int32), q, k, tree)


@functools.cache
def alone():
    """Row i has only token i and its ancestors behind the context."""
    q, k = tree_tokens()
    padded = np.array([[*path, *[0] * (PLACES - len(path))] for path in PATHS])
    q, k = ([x[np.arange(ROWS)[:, None], padded] for x in xs] for xs in (q, k))
    return step_of(context(), jnp.array([len(path) for path in PATHS], jnp.int32), q, k, CHAIN)


def test_a_token_of_a_tree_gets_what_its_ancestors_alone_would_give():
    """In layers with slopes, with a window and with chunks."""
    (outs, positions, cache), (expected, chain_positions, _) = grown(), alone()
    for i, path in enumerate(PATHS):
        assert positions[0, i] == chain_positions[i, len(path) - 1] == CONTEXT + len(path) - 1
        for out, alone_out in zip(outs, expected, strict=True):
            np.testing.assert_allclose(out[0, i], alone_out[i, len(path) - 1], atol=2e-6)
    assert not cache.failed.any()
    packed = jnp.tile(jnp.array(PARENTS, jnp.int32), ROWS)
    assert (jaxkv.positions(cache, (ROWS * PLACES,), tree=packed) == positions.ravel()).all()


keep = jax.jit(jaxkv.keep, donate_argnames="cache")


def copied(cache):
    return jax.tree.map(jnp.array, cache)


def test_keep_leaves_what_the_path_alone_would_have_left():
    (_, _, tree), (_, _, expected) = grown(), alone()
    path = jnp.array([[*p, *[-1] * (5 - len(p))] for p in PATHS], jnp.int32)
    assert_no_copy(keep, copied(tree), path)
    kept = keep(copied(tree), path)
    jaxkv.check_invariants(kept)
    assert kept.lengths.tolist() == expected.lengths.tolist() and not kept.new.any() and not kept.failed.any()
    assert kept.blocks_in_use == expected.blocks_in_use
    for layer in range(3):
        for row in (1, 4, 6):
            for a, b in zip(*(gather_row(c, row, layer) for c in (kept, expected)), strict=True):
                np.testing.assert_array_equal(a, b)


def test_keep_on_the_device_leaves_rows_of_wrong_paths_alone():
    _, _, tree = grown()
    wrong = [[1, 1, -1], [2, 0, -1], [0, -1, 2], [0, 7, -1], [-2, -1, -1]]
    path = jnp.array([[*p, -1, -1] for p in (*wrong, [-1, -1, -1], [0, 1, 2])], jnp.int32)
    kept = keep(copied(tree), path)
    assert kept.failed.tolist() == [True] * 5 + [False] * 2
    assert kept.lengths.tolist() == [CONTEXT + PLACES] * 5 + [CONTEXT, CONTEXT + 3]
    jaxkv.check_invariants(kept)
    for row, entries in enumerate(wrong):
        with pytest.raises(ValueError, match=f"path .*row {row}"):
            jaxkv.keep(tree, np.array([[-1] * 3] * row + [entries] + [[-1] * 3] * (ROWS - row - 1)))
    shared = keep(jaxkv.fork(copied(tree), 0, 1), jnp.array([[0, 2, -1, -1, -1]] * ROWS, jnp.int32))
    assert shared.failed.tolist() == [True, True] + [False] * 5  # row 1 has no last step any more


def test_layers_with_chunks_give_back_what_lies_before_the_next_tokens_chunk():
    config = jaxkv.CacheConfig(layers=(CHUNKED, FULL), max_seqs=1, max_seq_len=40, num_blocks=40, block_size=3)
    extend, cache = jax.jit(jaxkv.extend), jaxkv.init(config)
    most = 0
    for length in range(1, 20):
        cache = extend(cache, jnp.ones(1, jnp.int32))
        first = min((length - 1) // 4 * 4, max(length - 2, 0)) // 3  # when the last token was added
        held = np.flatnonzero(cache.tables[0].tables[0])
        assert held.tolist() == list(range(first, -(-length // 3)))
        most = max(most, len(held))
        jaxkv.check_invariants(cache)
    assert most <= config.row_blocks(0, 40) < config.row_blocks(1, 40)
    assert config.group_windows == (None, None) and config.group_chunks == (4, None)
    assert jaxkv.stats(cache)["groups"][0]["chunk"] == 4


def test_spans_see_each_other_and_a_memory_is_seen_as_a_whole():
    cache = jaxkv.extend(context(), [PLACES] * ROWS)
    q, k = (xs[1] for xs in tree_tokens())
    for layer in (0, 1):
        cache = jaxkv.write(cache, k, k, layer=layer)
    one = jnp.ones((ROWS, PLACES), jnp.int32)
    outs = jaxkv.attend(q, cache, layer=1, spans=one, window=5)
    new = k[0].astype(jnp.float32)
    last = jaxkv.attend(q[:, -1:], cache, layer=0, causal=False, num_tokens=jnp.array([1] * 6 + [0]))
    keys = jaxkv.gather(cache, 0, layer=1)[0][-PLACES:]
    np.testing.assert_array_equal(keys, new)
    # Of the first token: the window of 5 before it, and all of its span behind it.
    keys = np.asarray(jaxkv.gather(cache, 0, layer=1)[0])
    np.testing.assert_allclose(outs[0, 0], attended(q[0, 0], keys[CONTEXT - 4 :]), atol=1e-5)
    assert last.shape == (ROWS, 1, HEADS, DIM) and not last[6].any() and last[:6].any()


def test_named_blocks_are_read_and_no_others():
    """NaN in all the others changes nothing."""
    cache, blocks = context(), np.array([[0, 2]] * 3 + [[1, -1]] * 3 + [[-1, -1]])
    q = normal(5, ROWS, 1, HEADS, DIM)
    named = set(np.take_along_axis(np.asarray(cache.tables[0].tables), np.maximum(blocks, 0), axis=1)[:6].ravel())
    spoilt = np.array(cache.pools[0].kv)
    spoilt[[b for b in range(1, 101) if b not in named]] = np.nan
    cache = cache.replace(pools=(dataclasses.replace(cache.pools[0], kv=jnp.asarray(spoilt)), *cache.pools[1:]))
    out = jaxkv.attend(q, cache, layer=0, causal=False, blocks=blocks)
    kv = np.asarray(jaxkv.gather(context(), 0, layer=0)[0])
    for row, places in (0, [0, 1, 2, 6, 7]), (3, [3, 4, 5]):
        np.testing.assert_allclose(out[row, 0], attended(q[row, 0], kv[places]), atol=1e-5)
    assert not out[6].any()


def refused(**options):
    return lambda c: jaxkv.attend(jnp.ones((ROWS, PLACES, HEADS, DIM)), c, layer=0, **options)


def tree(*parents):
    return np.array([parents] * ROWS)


WRONG = {
    "a parent that is itself": (refused(tree=tree(-1, 1, 0, 0, 0, 0, 0)), "the parent of token 1 .* is 1, itself"),
    "a parent ahead": (refused(tree=tree(-1, 0, 5, 0, 0, 0, 0)), "the parent of token 2 .* is 5, no earlier one"),
    "a parent below": (refused(tree=tree(-1, -2, 0, 0, 0, 0, 0)), "the parent of token 1 .* is -2, no earlier one"),
    "a tree's shape": (refused(tree=tree(-1, 0)), r"tree must be i32\[7, 7\], .* its shape is \(7, 2\)"),
    "a tree with spans": (refused(tree=tree(*PARENTS), spans=tree(*PARENTS)), "cannot be combined with spans"),
    "a tree of words": (refused(tree=[["a"]]), "tree must be integers"),
    "a planned tree and another": (
        lambda c: refused(tree=tree(*PARENTS), step=jaxkv.plan_step(c, (ROWS, PLACES), tree=tree(*PARENTS)))(c),
        "This step was planned with a tree",
    ),
    "a layer's chunk and window": (
        lambda c: jaxkv.LayerConfig(num_kv_heads=1, head_dim=8, chunk=4, window=4), "chunk=4 and window=4 cannot both",
    ),
    "a window in a layer with chunks": (
        lambda c: jaxkv.attend(jnp.ones((ROWS, PLACES, HEADS, DIM)), c, layer=2, window=3), "cannot take window=3",
    ),
    "sharing with another chunk": (
        lambda c: jaxkv.CacheConfig(layers=(CHUNKED, jaxkv.LayerConfig(num_kv_heads=2, head_dim=8, shares_with=0)),
                                    max_seqs=1, max_tokens=9),
        "shares with layer 0, with chunks of 4, and cannot be a layer without a window",
    ),
    "attention that is not causal": (
        lambda c: jaxkv.attention(*[jnp.ones((ROWS, 1, 2, DIM))] * 3, c, layer=0, causal=False), "attention is causal",
    ),
    "blocks that do not increase": (refused(blocks=[[1, 1]] * ROWS), r"in increasing order, .* row 0 has \[1, 1\]"),
    "blocks behind -1": (refused(blocks=[[0, -1, 2]] * ROWS), "blocks must name blocks 0 to 13 in increasing order"),
    "a block that there is not": (refused(blocks=[[0, 14]] * ROWS), "blocks must name blocks 0 to 13"),
    "blocks of too few rows": (refused(blocks=[[0]]), r"blocks must be i32\[7, n\], .* not int64\[1, 1\]"),
    "queries without causal=False": (refused(num_tokens=[1] * ROWS), "num_tokens is for causal=False"),
    "too many queries": (refused(causal=False, num_tokens=[8] * ROWS), "asks for 8 queries, but q has slots for 7"),
    "a memory's window": (
        lambda c: jaxkv.attend(jnp.ones((ROWS, 1, HEADS, DIM)), c, layer=1, causal=False), "to measure window from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(name):
    call, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence) as error:
        call(jaxkv.extend(context(), [PLACES] * ROWS))
    assert str(error.value).endswith(".")


def test_unknown_options_are_refused():
    q = jax.ShapeDtypeStruct((ROWS, 1, HEADS, DIM), jnp.float32)
    for call in (jaxkv.explain, jaxkv.attend):
        with pytest.raises(TypeError, match="takes no colour: it takes alibi"):
            call(q, context(), layer=0, colour=1)
        with pytest.raises(TypeError, match="takes no bias: a slope by distance is alibi="):
            call(q, context(), layer=0, bias=1)
    why = jaxkv.explain(q, context(), layer=2, platform="tpu", alibi=jnp.ones(HEADS)).reason
    assert why == "The tpu kernels take no alibi yet; leave implementation=None to use XLA's."
