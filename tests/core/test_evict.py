"""Layers that give tokens back: what is left is attended to as under a mask, and blocks are free at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import LayerConfig
from jaxkv.testing import assert_no_copy, poison

ROWS, HEADS, SIZE = 3, 2, 4
skip_by_day = pytest.mark.skipif(not NIGHTLY, reason="many small programs")
LAYER = LayerConfig(num_kv_heads=HEADS, head_dim=6, evict="layer")
HEAD = LayerConfig(num_kv_heads=HEADS, head_dim=6, evict="head")
SHARING = LayerConfig(num_kv_heads=HEADS, head_dim=6, shares_with=1)
LAYERS, LENGTHS = (LAYER, HEAD, SHARING), (13, 5, 9)


def make_config(*layers, **fields):
    default = {"max_seqs": ROWS, "max_seq_len": 30, "block_size": SIZE, "dtype": "float32"}
    sizes = {} if "group_blocks" in fields else {"num_blocks": 24}
    return jaxkv.CacheConfig(layers=layers, **(default | sizes | fields))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def counts(*numbers):
    return jnp.array(numbers, jnp.int32)


def some(shape, share, seed=0):
    return np.random.default_rng(seed).random(shape) < share


append, check_all = jax.jit(jaxkv.append), jaxkv.check_invariants
separate = jax.jit(lambda cache, layer: cache.separate(layer)[0], static_argnums=1)


@functools.partial(jax.jit, static_argnames="layer")
def evict(cache, keep, layer=0):
    return jaxkv.evict(cache, keep, layer=layer)


def keys_and_values(layers, places, seed=0):
    """[2][L][S, T, K, D]; None for layers that share."""
    return [
        [None if one.shares_with is not None else normal(seed + 10 * i + part, ROWS, places, one.num_kv_heads, 6)
         for i, one in enumerate(layers)]
        for part in range(2)
    ]  # fmt: skip


@functools.cache
def grown():
    """A cache with rows of LENGTHS, and all keys and values that went in."""
    kv = keys_and_values(LAYERS, max(LENGTHS))
    return append(jaxkv.init(make_config(*LAYERS, group_blocks=(12, 48))), *kv, counts(*LENGTHS)), kv


@functools.cache
def alone():
    """The same of one layer that evicts whole tokens, which has no block left."""
    kv = keys_and_values((LAYER,), max(LENGTHS))
    return append(jaxkv.init(make_config(LAYER, num_blocks=9)), *kv, counts(*LENGTHS)), kv


def longer(cache, *more):
    """The cache with so many tokens more, of up to 13."""
    kv = keys_and_values(LAYERS, max(LENGTHS), seed=80)
    return append(cache, *kv, counts(*more)), kv


def half(seed=0):
    return np.random.default_rng(seed).random((ROWS, HEADS, 30)) < 0.5


def blocks_used(cache):
    return [t.num_blocks - int(t.num_free) for t in cache.tables]


def dense_attention(q, k, v, seen):
    """Queries [T, H, D] over keys [C, K, D], of which each of K heads sees those in bool[T, K, C]; in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v, seen = (np.asarray(x, np.float64) for x in (q, k, v, seen))
    k, v, seen = (np.repeat(x, group, axis=1) for x in (k, v, seen))
    logits = np.where(seen, np.einsum("thd,chd->thc", q, k) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("thc,chd->thd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.mark.parametrize("layer", [pytest.param(0, marks=skip_by_day), 1])
def test_everything_kept_changes_nothing(layer):
    cache, _ = grown()
    kept = evict(cache, np.ones((ROWS, HEADS, 30) if layer else (ROWS, 30), bool), layer)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(before, after)


@functools.partial(jax.jit, static_argnames=("layer", "planned"))
def step(cache, q, k, v, num_tokens, layer, planned=False):
    """What one layer's attention gives for a step, its positions, and the cache; NaN in all that is not held."""
    cache = jaxkv.extend(poison(cache), num_tokens)
    plan = jaxkv.plan_step(cache, q.shape[:-2]) if planned else None
    out, cache = jaxkv.attention(q, k, v, cache, layer=layer, step=plan)
    if layer:  # layer 2 reads what layer 1 holds
        out = out, jaxkv.attend(q, cache, layer=2, step=plan)
    return out, jaxkv.positions(cache, q.shape[:-2]), cache


STEP = (4, 3, 6)


@pytest.mark.parametrize(
    ("layer", "group", "packed"),
    [(0, 5, False), (1, 3, True), pytest.param(1, 1, False, marks=skip_by_day)],
    ids=["layer", "packed heads", "heads"],
)
def test_what_follows_is_dense_attention_under_a_mask(layer, group, packed):
    cache, kv = grown()
    k, v = (x[layer] for x in kv)
    keep = half() if layer else half()[:, 0]
    cache = evict(cache, keep, layer)
    keep = np.broadcast_to(keep if layer else keep[:, None], (ROWS, HEADS, 30))
    check_all(cache)
    held = (keep & (np.arange(30) < np.array(LENGTHS)[:, None, None])).sum(-1)
    held = held if layer else held[:, 0]
    assert cache.layers[layer].held.tolist() == held.tolist()
    assert blocks_used(cache)[layer] == sum(-(-n // SIZE) for n in held.ravel().tolist())
    assert cache.lengths.tolist() == list(LENGTHS)

    q, new_k, new_v = arrays = [
        normal(50 + i, ROWS, max(STEP), heads, 6) for i, heads in enumerate((HEADS * group, HEADS, HEADS))
    ]
    if packed:
        arrays = [np.concatenate([*(x[r, :n] for r, n in enumerate(STEP)), x[0, :2]]) for x in arrays]
    *found, after = step(cache, *map(jnp.asarray, arrays), counts(*STEP), layer, planned=packed)
    out, positions = jax.device_get(found)
    if layer:
        np.testing.assert_array_equal(*out)
        out = out[0]
    start = 0
    for row, (length, new) in enumerate(zip(LENGTHS, STEP, strict=True)):
        place = slice(start, start + new) if packed else (row, slice(new))
        start += new
        assert positions[place].tolist() == [*range(length, length + new)]
        seen = np.zeros((new, HEADS, length + new), bool)
        seen[..., :length] = keep[row, :, :length]
        seen[..., length:] = np.tril(np.ones((new, new), bool))[:, None]
        keys, values = (np.concatenate([x[row, :length], y[row, :new]]) for x, y in ((k, new_k), (v, new_v)))
        expected = dense_attention(q[row, :new], keys, values, seen)
        np.testing.assert_allclose(out[place], expected, rtol=1e-5, atol=1e-5)
    assert after.lengths.tolist() == [a + b for a, b in zip(LENGTHS, STEP, strict=True)]
    check_all(after)


@skip_by_day
def test_packed_heads_behind_rows_that_do_not_fit():
    """Their offsets are past the array's end, where the next head's tokens begin."""
    outs = []
    for evict in (None, "head"):
        layer = LayerConfig(num_kv_heads=HEADS, head_dim=6, evict=evict)
        cache = jaxkv.extend(jaxkv.init(make_config(layer)), [4, 20, 3])
        q, k = (jnp.asarray(normal(i, 10, heads, 6)) for i, heads in enumerate((4, HEADS)))
        out, cache = jaxkv.attention(q, k, -k, cache, layer=0)
        assert cache.failed.tolist() == [False, True, True]
        outs.append(np.asarray(out))
    np.testing.assert_allclose(*outs, atol=1e-6)


best = jax.jit(lambda cache, scores, budget: jaxkv.evict(cache, scores=scores, budget=budget, layer=1))


def test_scores_and_budgets_of_rows_and_heads():
    cache, (keys, _) = grown()
    scores = np.asarray(normal(3, ROWS, HEADS, 30)).round(1)  # some are equal: then the earlier one stays
    budgets = np.array([[4, 13], [2, 0], [9, 7]], np.int32)
    kept = best(cache, jnp.asarray(scores), jnp.asarray(budgets))
    assert kept.layers[1].held.tolist() == budgets.tolist()
    dense = np.asarray(separate(kept, 1))
    for row, length in enumerate(LENGTHS):
        for head, budget in enumerate(budgets[row]):
            order = np.argsort(-scores[row, head, :length], kind="stable")[:budget]
            np.testing.assert_array_equal(dense[row, head, :budget], keys[1][row, np.sort(order), head])
            assert not dense[row, head, budget:].any()
    best(cache, jnp.asarray(scores), jnp.asarray(budgets[::-1].copy()))
    assert best._cache_size() == 1  # one program for all budgets
    if not NIGHTLY:  # many small programs
        return
    k = np.asarray(jaxkv.gather(kept, 0, layer=1)[0])
    assert k.shape == (13, HEADS, 6) and not k[4:, 0].any() and k[4:, 1].all()


def test_scores_that_are_no_numbers_mark_the_row_alone():
    cache, _ = grown()
    scores = np.ones((ROWS, HEADS, 30), np.float32)
    scores[1, 0, 20:] = np.nan  # behind what is held: nobody asks
    scores[0, 1, 3] = np.nan
    after = best(cache, jnp.asarray(scores), jnp.asarray(np.full((ROWS, HEADS), 2, np.int32)))
    assert after.failed.tolist() == [True, False, False]
    assert after.layers[1].held.tolist() == [[13, 13], [2, 2], [2, 2]]
    with pytest.raises(jaxkv.CacheError, match="request for row 0 is invalid"):
        jaxkv.check(after)
    check_all(after)


@skip_by_day
def test_of_a_layer_the_mean_of_the_heads_counts():
    cache, (keys, _) = grown()
    scores = np.zeros((ROWS, HEADS, 30), np.float32)
    scores[0, 0, 4], scores[0, 1, 2], scores[0, :, 5] = 3, 1, 1
    kept = jaxkv.evict(cache, scores=scores, budget=2, layer=0)
    np.testing.assert_array_equal(np.asarray(separate(kept, 0))[0, :, :2], np.swapaxes(keys[0][0, [4, 5]], 0, 1))


def test_shared_blocks_are_copied_where_they_change_or_the_row_is_left_alone():
    cache, (keys, _) = alone()
    cache = jaxkv.fork(cache, 0, 1)  # 3 full blocks shared, a last one each, and 3 of row 2: 8 of 9
    keep = np.ones((ROWS, 30), bool)
    keep[1, 6] = False  # of the second block: the third and last change too, of which the last is the row's own
    kept = evict(cache, jnp.asarray(keep))
    assert kept.failed.tolist() == [False, True, False] and kept.layers[0].held.tolist() == [13, 13, 9]
    with pytest.raises(jaxkv.OutOfBlocks, match=r"Row 1 \(13 tokens, 4 blocks\) needs 2 more blocks") as error:
        jaxkv.check(kept)
    assert "1 of 9 blocks" in str(error.value)
    for before, after in zip(jax.tree.leaves(cache.pools), jax.tree.leaves(kept.pools), strict=True):
        np.testing.assert_array_equal(before, after)
    keep[1, 6], keep[1, 8:] = True, False  # whole blocks: nothing is copied, and what was the fork's alone comes back
    kept = evict(cache, jnp.asarray(keep))
    assert not kept.failed.any() and blocks_used(kept)[0] == 4 + 3
    keep[1, 7] = False  # a part of a shared one: copied
    kept = evict(cache, jnp.asarray(keep))
    assert not kept.failed.any() and blocks_used(kept)[0] == 5 + 3
    dense = np.asarray(separate(kept, 0))
    np.testing.assert_array_equal(dense[0, :, :13], np.swapaxes(keys[0][0, :13], 0, 1))
    np.testing.assert_array_equal(dense[1, :, :7], np.swapaxes(keys[0][0, :7], 0, 1))
    check_all(kept)


def test_a_thinned_row_is_no_prefix():
    cache, tokens = alone()[0], [*range(13)]
    prefix = jaxkv.PrefixCache(cache.config)
    odd = np.arange(ROWS * 30).reshape(ROWS, 30) % 2 == 0
    assert prefix.insert(evict(cache, odd), 0, tokens).tables[0].kept.sum() == 0
    if not NIGHTLY:  # many small programs
        return
    cache = jaxkv.free(cache, [2])
    indexed = prefix.insert(cache, 0, tokens)  # and what an index keeps stays as it was
    match = prefix.match([*tokens, 7])
    assert match.num_tokens == 12
    kept = evict(indexed, odd)
    check_all(kept)
    adopted = prefix.adopt(kept, 2, match)
    np.testing.assert_array_equal(adopted.separate(0)[0][2, :, :12], cache.separate(0)[0][0, :, :12])
    assert adopted.layers[0].held.tolist() == [7, 3, 12] and adopted.lengths.tolist() == [13, 5, 12]


@skip_by_day
def test_of_a_tree_behind_thinned_tokens_the_accepted_path_is_kept():
    cache, _ = grown()
    cache = evict(cache, half(), 1)
    held = np.asarray(cache.layers[1].held)
    cache, (keys, _) = longer(cache, 5, 4, 0)
    kept = jax.jit(jaxkv.keep)(cache, jnp.asarray(np.array([[0, 3, 4], [1, -1, -1], [-1, -1, -1]])))
    assert kept.lengths.tolist() == [16, 6, 9]
    np.testing.assert_array_equal(kept.layers[1].held, held + np.array([[3], [1], [0]]))
    dense = np.asarray(separate(kept, 1))
    for row, path in enumerate([[0, 3, 4], [1]]):
        for head in range(HEADS):
            start = held[row, head]
            np.testing.assert_array_equal(dense[row, head, start : start + len(path)], keys[1][row, path, head])
    check_all(kept)
    all_but_one = np.ones((ROWS, HEADS, 30), bool)
    all_but_one[0, 0, 0] = False
    over = evict(cache, all_but_one, 1)
    assert over.new.tolist() == [0, 4, 0]  # an eviction ends the step of the rows that it changes


@skip_by_day  # but for the sentence, by random operations too
def test_truncate_speaks_of_what_was_seen():
    cache, _ = grown()
    cache = evict(cache, half(), 1)
    held = np.asarray(cache.layers[1].held)
    cache, _ = longer(cache, 5, 5, 5)
    truncate = jax.jit(jaxkv.truncate)
    back = truncate(cache, counts(14, 5, 8))
    assert back.failed.tolist() == [False, False, True] and back.lengths.tolist() == [14, 5, 14]
    np.testing.assert_array_equal(back.layers[1].held, held + np.array([[1], [0], [5]]))
    with pytest.raises(jaxkv.OutOfWindow, match='keep what evict="layer" leaves and what evict="head" leaves have'):
        jaxkv.check(back)
    check_all(back)
    assert not truncate(cache, counts(0, 0, 0)).blocks_in_use


def test_nothing_of_a_pool_is_copied():
    config = make_config(LAYER, HEAD, num_blocks=64)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    keep = jax.ShapeDtypeStruct((ROWS, 30), bool)
    for layer in range(0 if NIGHTLY else 1, 2):
        in_place = jax.jit(functools.partial(jaxkv.evict, layer=layer), donate_argnames="cache")
        assert_no_copy(in_place, cache, keep)


@skip_by_day
@pytest.mark.parametrize("layer", [
    LayerConfig(num_kv_heads=HEADS, head_dim=6, evict="head", dtype="int8"),
    LayerConfig.latent(4, 2, evict="layer"),
], ids=["int8", "latent"])  # fmt: skip
def test_other_kinds_of_storage(layer):
    k = [normal(1, ROWS, 13, layer.num_kv_heads, layer.head_dim)]
    cache = append(jaxkv.init(make_config(layer)), k, None if layer.rank else k, counts(13, 5, 0))
    kept = evict(cache, np.tile(np.arange(30) % 3 == 0, (ROWS, 1)))
    np.testing.assert_array_equal(jaxkv.gather(kept, 0, layer=0)[0], jaxkv.gather(cache, 0, layer=0)[0][::3])
    check_all(kept)


def test_what_is_said_of_such_layers():
    cache, _ = grown()
    kept = evict(cache, np.tile(np.arange(30) % 2 == 0, (ROWS, HEADS, 1)), 1)
    groups = jaxkv.stats(kept)["groups"]
    assert [group["evict"] for group in groups] == ["layer", "head"]
    assert groups[1]["held_per_row"] == [14, 6, 10] and groups[1]["waste_per_row"] == [2, 2, 6]
    assert kept.config.bytes == kept.bytes and kept.config.row_blocks(1, 9) == 6
    assert make_config(LAYER, HEAD).group_blocks == (24, 48)
    assert "row 0: 13 tokens" in kept._repr_html_() and "3 of 4 tokens" in kept._repr_html_()
    if not NIGHTLY:  # many small programs
        return
    k, v = kept.token(0, 6, layer=1)
    np.testing.assert_array_equal(k, cache.token(0, 12, layer=1)[0])
    with pytest.raises(IndexError, match="holds 7 tokens"):
        kept.token(0, 7, layer=1)
    stored = kept.store(1, 0, 1, 5, k[0], v[0])
    np.testing.assert_array_equal(stored.load(1, 0, 1, 5)[0], k[0])
    np.testing.assert_array_equal(stored.load(1, 0, 0, 5)[0], kept.load(1, 0, 0, 5)[0])


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "tpu"), ("cuda", "gpu")])
def test_kernels_take_heads_as_rows(platform, kernel):
    wide = LayerConfig(num_kv_heads=HEADS, head_dim=128, evict="head")
    config = make_config(wide, dtype="bfloat16", block_size=16, max_seq_len=64)
    q = jax.ShapeDtypeStruct((ROWS, 1, 8, 128), jnp.bfloat16)
    choice = jaxkv.explain(q, jax.eval_shape(lambda: jaxkv.init(config)), platform=platform)
    assert choice.implementation == kernel, choice


SMALL = LayerConfig(num_kv_heads=1, head_dim=2)
REFUSED = {
    "a layer that keeps all": (
        lambda c: jaxkv.evict(jaxkv.init(make_config(SMALL)), np.ones((ROWS, 30), bool), layer=0), "Layer 0 keeps all"
    ),
    "another layer's": (lambda c: jaxkv.evict(c, np.ones((ROWS, 30), bool), layer=2), "reads what layer 1 keeps"),
    "both ways": (lambda c: jaxkv.evict(c, np.ones((ROWS, 30), bool), budget=3, layer=0), "either keep, or scores"),
    "no budget": (lambda c: jaxkv.evict(c, scores=np.ones((ROWS, 30)), layer=0), "either keep, or scores"),
    "heads of a layer": (
        lambda c: jaxkv.evict(c, np.ones((ROWS, HEADS, 30), bool), layer=0), r"must be bool\[3, C\] over .* not bool"
    ),
    "rows": (lambda c: jaxkv.evict(c, np.ones((2, 30), bool), layer=1), r"or \[3, 2, C\] over .* not bool\[2, 30\]"),
    "dtype": (lambda c: jaxkv.evict(c, np.ones((ROWS, 30)), layer=0), "keep must be bool"),
    "short": (lambda c: jaxkv.evict(c, np.ones((ROWS, 12), bool), layer=0), "slots for 12 tokens, but a row holds 13"),
    "long": (lambda c: jaxkv.evict(c, np.ones((ROWS, 31), bool), layer=0), "with C up to 30"),
    "NaN": (lambda c: jaxkv.evict(c, scores=np.full((ROWS, 30), np.nan), budget=1, layer=0), "row 0 is NaN"),
    "no budget left": (lambda c: jaxkv.evict(c, scores=np.ones((ROWS, 30)), budget=0, layer=0), "at least 1, not 0"),
    "no budgets": (lambda c: jaxkv.evict(c, scores=np.ones((ROWS, 30)), budget=[0] * 3, layer=0), "at least one"),
    "a share": (lambda c: jaxkv.evict(c, scores=np.ones((ROWS, 30)), budget=0.5, layer=0), "budget, .* an integer"),
    "budgets": (lambda c: jaxkv.evict(c, scores=np.ones((ROWS, 30)), budget=[1] * 4, layer=0), r"shape \(3,\), not"),
    "no layer": (lambda c: jaxkv.evict(c, np.ones((ROWS, 30), bool), layer=9), "layer must be an integer from 0 to 2"),
    "window": (lambda c: read(c, 0, window=3), 'Layer 0 has evict="layer", .* cannot take window'),
    "alibi of a sharing layer": (lambda c: read(c, 2, alibi=np.ones(2, np.float32)), "Layer 2 .* cannot take alibi"),
    "mask": (lambda c: read(c, 0, mask=np.ones((ROWS, 1, 4), bool)), "cannot take mask"),
    "sinks": (lambda c: read(c, 1, sinks=np.ones(2, np.float32)), 'Layer 1 has evict="head", .* cannot take sinks'),
    "blocks": (lambda c: read(c, 1, blocks=np.zeros((ROWS, 1), np.int32)), "cannot take blocks"),
    "prefix": (lambda c: jaxkv.PrefixCache(c.config), "A PrefixCache takes no layers with evict='head'"),
    "Flax": (lambda c: jaxkv.convert.to_hugging_face(c), "to_hugging_face takes no layers with evict"),
    "contiguous": (lambda c: c.config.replace(layout="contiguous"), r'layers\[0\].evict frees .*contiguous'),
    "stacked": (lambda c: c.config.replace(stacked=True), r"layers\[0\].evict frees .*stacked=True"),
    "what": (lambda c: LayerConfig(num_kv_heads=1, head_dim=2, evict="rows"), "must be .* or None, not 'rows'"),
    "evict and window": (lambda c: LayerConfig(num_kv_heads=1, head_dim=2, evict="head", window=3), "leave one out"),
    "latent by heads": (lambda c: LayerConfig.latent(4, 2, evict="head"), "has no heads to evict by"),
    "window over evict": (
        lambda c: make_config(LAYER, LayerConfig(num_kv_heads=HEADS, head_dim=6, shares_with=0, window=3)),
        "which has evict='layer': it cannot be a layer with a window of 3",
    ),
    "evict of a sharing one": (
        lambda c: make_config(LAYER, LayerConfig(num_kv_heads=HEADS, head_dim=6, shares_with=0, evict="layer")),
        "no dtype or rotate of its own, nor evict",
    ),
}  # fmt: skip


def read(cache, layer, **options):
    return jaxkv.attend(jnp.ones((ROWS, 1, HEADS, 6)), jaxkv.extend(cache, [1, 1, 1]), layer=layer, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(name):
    function, message = REFUSED[name]
    with pytest.raises((ValueError, IndexError), match=message):
        function(grown()[0])
