"""Scores against what their papers say, in NumPy, token by token and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY

import jaxkv
from jaxkv import LayerConfig, scores
from jaxkv.models.rope import Rope

ROWS, HEADS, GROUP, SIZE, PLACES, LONGEST = 3, 2, 2, 6, 17, 21
LENGTHS, NEW = (17, 6, 0), (12, 6, 0)  # tokens in all, and of the last step
ROPE = Rope()


def normal(seed, *shape):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


KEYS, VALUES = normal(1, ROWS, PLACES, HEADS, SIZE), normal(2, ROWS, PLACES, HEADS, SIZE)
Q = normal(3, ROWS, PLACES, HEADS * GROUP, SIZE)  # of all tokens


def rotate(x, positions):
    return ROPE(x, x, positions)[0]


@pytest.fixture(scope="module")
def cache():
    layers = [LayerConfig(num_kv_heads=HEADS, head_dim=SIZE, evict=kind) for kind in ("layer", "head")]
    config = jaxkv.CacheConfig(layers=layers, max_seqs=ROWS, max_seq_len=LONGEST, num_blocks=9, dtype="float32")

    @jax.jit
    def fill(k, v):
        cache = jaxkv.init(config)
        before = [a - b for a, b in zip(LENGTHS, NEW, strict=True)]
        cache = jaxkv.append(cache, [k] * 2, [v] * 2, jnp.array(before, jnp.int32))
        late = [jnp.stack([jnp.roll(x[r], -n, axis=0) for r, n in enumerate(before)]) for x in (k, v)]
        return jaxkv.append(cache, [late[0]] * 2, [late[1]] * 2, jnp.array(NEW, jnp.int32))

    return fill(jnp.asarray(KEYS), jnp.asarray(VALUES))


def last_queries():
    """Those of the last step, row by row at its first places."""
    return jnp.asarray(np.stack([np.roll(Q[r], NEW[r] - LENGTHS[r], axis=0) for r in range(ROWS)]))


def weights(row, head, query, q=Q):
    """f64[G, n]: what one of a row's queries attends to."""
    keys = KEYS[row, : query + 1, head].astype(np.float64)
    group = q[row, query, head * GROUP : (head + 1) * GROUP].astype(np.float64)
    found = np.exp(group @ keys.T * SIZE**-0.5)
    return found / found.sum(axis=1, keepdims=True)


def streaming_llm(row, head, n):
    order = [*range(min(4, n)), *reversed(range(4, n))]
    return order  # what stays longest, first


def knorm(row, head, n):
    return -np.sqrt((KEYS[row, :n, head].astype(np.float64) ** 2).sum(axis=1))


def keydiff(row, head, n):
    keys = KEYS[row, :n, head].astype(np.float64)
    mean = np.mean([key / np.sqrt(key @ key) for key in keys], axis=0)
    return np.array([-key @ mean / np.sqrt(key @ key * (mean @ mean)) for key in keys])


def snapkv(row, head, n, window=4, kernel=3):
    window = min(window, NEW[row])
    first = n - window
    seen = np.zeros((GROUP, n))
    for query in range(first, n):
        seen[:, : query + 1] += weights(row, head, query) / window
    padded = np.pad(seen[:, :first], ((0, 0), (kernel // 2, kernel // 2)))
    found = np.array([padded[:, i : i + kernel].sum(axis=1) / kernel for i in range(first)]).reshape(first, GROUP)
    return np.append(found.mean(axis=1), [np.inf] * window)  # the best of all heads: filled in below


def tova(row, head, n):
    found = np.mean([weights(row, h, n - 1) for h in range(HEADS)], axis=(0, 1))[: n - 1]
    return np.append(found, np.inf)


def observed_attention(row, head, n):
    found, could = np.zeros(n), np.zeros(n)
    for query in range(n - NEW[row], n):
        found[: query + 1] += weights(row, head, query).mean(axis=0)
        could[: query + 1] += 1
    return found / could


def expected_attention(row, head, n, ahead=5, sinks=2):
    first = max(n - NEW[row], sinks)
    keys, values = (x[row, sinks:n, head].astype(np.float64) for x in (KEYS, VALUES))
    turns = []
    for position in range(n, n + ahead):
        unit = np.eye(SIZE, dtype=np.float32)[:, None]
        turns.append(np.asarray(rotate(jnp.asarray(unit), jnp.full(SIZE, position, jnp.int32)))[:, 0].T)
    turn, found = np.mean(turns, axis=0), []  # turn @ vector
    for h in range(head * GROUP, (head + 1) * GROUP):
        q = Q[row, first:n, h].astype(np.float64)
        mean, spread = turn @ q.mean(axis=0), turn @ np.cov(q.T, bias=True) @ turn.T
        logits = np.array([k @ mean / np.sqrt(SIZE) + k @ spread @ k / SIZE / 2 for k in keys])
        found.append(np.exp(logits) / np.exp(logits).sum())
    return np.append([np.inf] * sinks, np.mean(found, axis=0) * np.sqrt((values**2).sum(axis=1)))


CASES = {
    "knorm": (knorm, {}), "keydiff": (keydiff, {}), "snapkv": (snapkv, {"window_size": 4, "kernel_size": 3}),
    "tova": (tova, {}), "observed_attention": (observed_attention, {}),
    "expected_attention": (expected_attention, {"rotate": rotate, "n_future_positions": 5, "n_sink": 2}),
}  # fmt: skip
ASK = ("snapkv", "tova", "observed_attention", "expected_attention")


@pytest.fixture(scope="module")
def found(cache):
    """All scores of the first layer, by one program."""

    def all_scores(cache, q):
        every = {n: getattr(scores, n)(cache, layer=0, **({"q": q} if n in ASK else {}), **CASES[n][1]) for n in CASES}
        return every | {"streaming_llm": scores.streaming_llm(cache, layer=0)}

    return jax.device_get(jax.jit(all_scores)(cache, last_queries()))


@pytest.mark.parametrize("name", CASES)
def test_as_the_paper_has_it(found, name):
    naive, found = CASES[name][0], found[name]
    assert found.shape == (ROWS, HEADS, LONGEST) and found.dtype == np.float32
    for row, n in enumerate(LENGTHS):
        assert (found[row, :, n:] == -np.inf).all()
        expected = np.array([naive(row, head, n) for head in range(HEADS)]) if n else np.zeros((HEADS, 0))
        if n:
            most = np.max(expected, where=np.isfinite(expected), initial=0.0)
            expected = np.where(np.isinf(expected), most, expected)
        np.testing.assert_allclose(found[row, :, :n], expected, rtol=1e-4, atol=1e-5)


def test_the_first_and_the_last_tokens(found):
    for row, n in enumerate(LENGTHS):
        assert np.argsort(-found["streaming_llm"][row, 1, :n], stable=True).tolist() == streaming_llm(row, 1, n)


@pytest.mark.parametrize("window_size", [64, 4, 2])
def test_of_a_window_larger_than_the_budget_the_latest_stay(cache, window_size):
    q = jnp.asarray(np.stack([np.roll(Q[r], 4 - LENGTHS[r], axis=0)[:4] for r in range(ROWS)]))
    snapkv = jax.jit(scores.snapkv, static_argnames=("layer", "window_size"))
    found = snapkv(cache, layer=1, q=q, num_tokens=jnp.full(ROWS, 4), window_size=window_size)
    most = min(window_size, 4)
    for row, n in enumerate(LENGTHS):
        for best in np.argsort(-np.asarray(found[row, :, :n]), axis=1)[:, :most] if n >= 4 else ():
            assert best.tolist() == list(range(n - 1, n - 1 - most, -1))


def test_of_thinned_heads_what_each_holds_is_scored(cache):
    keep = np.random.default_rng(5).random((ROWS, HEADS, LONGEST)) < 0.5
    keep[..., 14:] = True  # the last queries' own, so that each sees what it saw
    counts = jnp.array([3, 2, 0], jnp.int32)
    q = jnp.asarray(np.stack([np.roll(Q[r], n - LENGTHS[r], axis=0)[:4] for r, n in enumerate([3, 2, 0])]))
    keep[1, :, 4:6] = True
    thinned = jaxkv.evict(cache, jnp.asarray(keep), layer=1)
    snapkv = jax.jit(lambda *x: scores.snapkv(x[0], layer=1, q=x[1], num_tokens=x[2], window_size=2, kernel_size=1))
    found = np.asarray(snapkv(thinned, q, counts))
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        n = LENGTHS[row]
        places = np.flatnonzero(keep[row, head, :n])
        expected = np.zeros(len(places) - 2)
        for query in (n - 2, n - 1):
            for g in range(GROUP):
                logits = Q[row, query, head * GROUP + g] @ KEYS[row, places[places <= query], head].T * SIZE**-0.5
                expected += (np.exp(logits) / np.exp(logits).sum())[: len(expected)] / 2 / GROUP
        np.testing.assert_allclose(found[row, head, : len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert (found[row, head, len(places) :] == -np.inf).all()
    with pytest.raises(ValueError, match="tova is a mean over heads, but in layer 1"):
        scores.tova(thinned, layer=1, q=q)


def test_budgets(cache):
    assert scores.uniform(cache, 0.3).tolist() == [int(0.3 * n) for n in LENGTHS]
    assert scores.uniform(cache, np.int64(7)).tolist() == [7, 7, 7]
    for keep in (0, 1.5, 0.0, True, "half", float("nan")):
        with pytest.raises(ValueError, match="keep"):
            scores.uniform(cache, keep)
    by_layer = [scores.pyramid(cache, 0.5, layer=i, window_size=2, beta=3).tolist() for i in range(2)]
    # Of 17 tokens 8.5 in the mean: from 17 - 8.5 / 3 down to 8.5 / 3. Of 6, 3: from 4, all but the window, down to 2.
    assert by_layer == [[14, 4, 0], [3, 2, 0]]
    assert scores.pyramid(cache, 0.5, layer=0).tolist() == [8, 3, 0]  # too short for the window: uniform, rounded


@pytest.mark.parametrize("safeguard", [0.0, 0.2, 1.0] if NIGHTLY else [0.2])
def test_heads_compete_for_a_budget(safeguard):
    score = normal(7, 2, 4, 10)
    score[0, 2] -= 9  # a head that would have nothing
    score[1, :, 7:] = -np.inf
    budget = np.array([3, 6])
    ada = jax.jit(functools.partial(scores.ada, safeguard=safeguard))
    found = np.asarray(ada(jnp.asarray(score), jnp.asarray(budget, jnp.int32)))
    for row, n in enumerate(budget):
        certain = max(int(n * safeguard), 1) if safeguard else 0
        kept = {(h, i) for h in range(4) for i in np.argsort(-score[row, h])[:certain]}
        order = sorted(((h, i) for h in range(4) for i in range(10)), key=lambda at: -score[row][at])
        kept |= set([at for at in order if at not in kept][: 4 * n - len(kept)])
        assert found[row].tolist() == [sum(h == head for h, _ in kept) for head in range(4)]
    if safeguard == 1:
        assert found.tolist() == [[3] * 4, [6] * 4]
    with pytest.raises(ValueError, match="of each head by itself"):
        scores.ada(jnp.ones((2, 3)), 2)


def test_queries_of_another_shape_are_refused(cache):
    with pytest.raises(ValueError, match=r"q must be \[3, T, H, 6\], .* of 2, but its shape is \(3, 6, 3, 6\)"):
        scores.snapkv(cache, layer=0, q=jnp.ones((3, 6, 3, 6)))
