"""Residual layers: a query reads its newest tokens as bfloat16, and those before as quantized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv.models
from jaxkv._cli.plan.capacity import needed_bytes
from jaxkv._cli.plan.decode_step import attention_work
from jaxkv.testing import assert_no_copy, poison
from pallas_kernels.common.rotation import rotate

ROWS, HEADS, K, D, NEWEST, BLOCK = 3, 4, 2, 32, 5, 4
LAYER = jaxkv.LayerConfig(num_kv_heads=K, head_dim=D)
LOCAL = jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, window=9)
WIDTHS = jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, v_head_dim=16)
LATENT = jaxkv.LayerConfig.latent(32, 8)
# Rows of lengths around NEWEST and BLOCK, in steps of many tokens, of one, and of none.
MOST = 14
COUNTS = ([13, 4, 0], [1, 1, 1], [6, 0, 5], [1, 1, 1], [0, MOST, 1], [1, 1, 1], [7, 9, 2], [1, 1, 0])
SLOPES, SINKS = np.linspace(0.05, 0.4, HEADS).astype(np.float32), np.linspace(-1, 1, HEADS).astype(np.float32)


def make_config(*layers, **fields):
    sizes = dict(max_seqs=ROWS, max_seq_len=48, num_blocks=60, block_size=BLOCK, dtype="int4", residual_length=NEWEST)
    return jaxkv.CacheConfig(layers=layers or (LAYER,), **sizes | fields)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16).astype(np.float32)


def draw_step(layer, seed, places):
    q, k = (
        draw(seed, ROWS, places, HEADS, layer.head_dim),
        draw(seed + 1, ROWS, places, layer.num_kv_heads, layer.head_dim),
    )
    v = None if layer.rank else draw(seed + 2, ROWS, places, K, layer.value_dim)
    return q, k, v


def decode_stored(config, layer, k, v):
    """Returns keys and values `[T, K, .]` of one row as a quantized layer gives them back, token by token."""
    found, count = config.layers[layer], len(k)
    k, v = (None if x is None else np.pad(x, [(0, 48 - count), (0, 0), (0, 0)]) for x in (k, v))  # one program
    both = np.asarray(_decode_stored(config, layer, k, v))[:, :count]
    if found.row_rank is None:
        return both
    return both[0][..., found.v_head_dim or 0 :], both[0][..., : found.row_rank]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode_stored(config, layer, k, v):
    found, kind = config.layers[layer], config.kind(layer)
    pair = [k] if v is None else [jnp.concatenate([v, k], -1)] if found.v_head_dim else [k, v]
    numbers, scale = config.encode(layer, jnp.moveaxis(jnp.stack(pair), 1, 2)[None], axis=1)
    both = kind.decode(numbers, scale, found.row_dim, found.row_rank, axis=1)
    return jnp.moveaxis((rotate(both) if config.rotates(layer) else both)[0], 1, 2)


def attend_one(
    q, exact, stored, position, *, newest=NEWEST, window=None, scale=None, soft_cap=None, alibi=None, sinks=None
):
    """Returns the output `[H, Dv]` and LSE `[H]` of one query over keys and values `[C, K, .]`, in NumPy."""
    first = 0 if window is None else max(0, position - window + 1)
    middle = max(first, position - newest + 1)
    k, v = (
        np.concatenate([old[first:middle], new[middle : position + 1]]) for new, old in zip(exact, stored, strict=True)
    )
    k, v = (np.repeat(x, HEADS // x.shape[1], axis=1) for x in (k, v))
    logits = np.einsum("hd,chd->hc", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    if alibi is not None:
        logits -= alibi[:, None] * (position - np.arange(first, position + 1))
    all_logits = logits if sinks is None else np.concatenate([logits, sinks[:, None]], axis=1)
    top = all_logits.max(axis=1, keepdims=True)
    total = np.exp(all_logits - top).sum(axis=1, keepdims=True)
    return np.einsum("hc,chd->hd", np.exp(logits - top) / total, v), (top + np.log(total))[:, 0]


class Host:
    """Rows as lists of tokens."""

    def __init__(self, config, layer=0):
        self.config, self.layer = config, layer
        self.rows = [[] for _ in range(ROWS)]  # of (key, value) [K, .]

    def add(self, counts, k, v):
        for row, count in enumerate(counts):
            self.rows[row] += [(k[row, i], None if v is None else v[row, i]) for i in range(count)]

    def contents(self, row):
        """Returns the keys and values of a row, exact and as stored."""
        k = np.stack([k for k, _ in self.rows[row]])
        rank = self.config.layers[self.layer].rank
        v = None if rank else np.stack([v for _, v in self.rows[row]])
        return (k, k[..., :rank] if rank else v), decode_stored(self.config, self.layer, k, v)

    def assert_attends(self, counts, q, out, lse, atol, **options):
        for row, count in enumerate(counts):
            if count:
                exact, stored = self.contents(row)
            for i in range(count):
                position = len(self.rows[row]) - count + i
                wanted = attend_one(q[row, i], exact, stored, position, **options)
                np.testing.assert_allclose(out[row, i], wanted[0], atol=atol, rtol=0)
                np.testing.assert_allclose(lse[row, i], wanted[1], atol=atol, rtol=0)
            assert not np.any(out[row, count:]) and np.isneginf(lse[row, count:]).all()


@functools.partial(jax.jit, static_argnames=("layer", "window", "packed", "deterministic"), donate_argnames="cache")
def run_step(cache, counts, q, k, v, *, layer=0, packed=False, **options):
    cache = jaxkv.extend(cache, counts)
    axes = q.shape[:2]
    if packed:  # without padding: its tokens are sorted to the end
        valid = (jnp.arange(axes[1])[None] < counts[:, None]).ravel()
        order = jnp.argsort(~valid, stable=True)
        q, k, v = (None if x is None else x.reshape(-1, *x.shape[2:])[order] for x in (q, k, v))
    step = jaxkv.plan_step(cache, q.shape[:-2])
    (out, lse), cache = jaxkv.attention(q, k, v, cache, layer=layer, step=step, return_lse=True, **options)
    if packed:
        undo = jnp.argsort(order)
        out, lse = (x[undo].reshape(*axes, *x.shape[1:]) for x in (out, lse))
    return out, lse, poison(cache)


CASES = {
    "padded": ((LAYER,), {}, {}),
    "packed": ((LAYER,), {}, {"packed": True}),
    "int8": ((LAYER,), {"dtype": "int8"}, {}),
    "float8, not rotated": ((LAYER,), {"dtype": "float8_e4m3fn"}, {"packed": True}),
    "a window, soft cap and sinks": ((LOCAL,), {}, {"soft_cap": 3.0, "sinks": SINKS}),
    "a window, packed": ((LOCAL,), {}, {"packed": True}),
    "a window of the call": ((LAYER,), {}, {"window": 7}),
    "a window within the newest": ((LAYER,), {}, {"window": 3}),
    "a window that slides": ((LOCAL,), {"max_seq_len": 24}, {}),
    "slopes": ((LAYER,), {}, {"alibi": SLOPES}),
    "other widths": ((WIDTHS,), {}, {}),
    "latent": ((LATENT,), {"dtype": "int8"}, {"scale": 0.2}),
    "groups of 64": ((jaxkv.LayerConfig(num_kv_heads=K, head_dim=128),), {"dtype": "k5v3"}, {}),
    "deterministic": ((LAYER,), {}, {"deterministic": True}),
    "joined": ((LAYER,), {"head_dim_multiple": 128, "join_kv": True}, {}),
    "the newest alone": ((LAYER,), {"residual_length": 48}, {}),
    "one token": ((LAYER,), {"residual_length": 1}, {}),
    "newest of whole blocks": ((LAYER,), {"residual_length": 2 * BLOCK}, {"packed": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_query_reads_its_newest_tokens_exactly(name):
    layers, fields, options = CASES[name]
    config = make_config(*layers, **fields)
    host, cache = Host(config), poison(jaxkv.init(config))
    told = {n: x for n, x in options.items() if n not in ("packed", "deterministic")}
    told["window"] = min(told.get("window", 99), layers[0].window or 99)
    for number, counts in enumerate(COUNTS):
        q, k, v = draw_step(layers[0], 10 * number, 1 if max(counts) == 1 else MOST)
        host.add(counts, k, v)
        out, lse, cache = run_step(cache, jnp.array(counts, jnp.int32), q, k, v, **options)
        jaxkv.check(cache)
        host.assert_attends(counts, q, *map(np.asarray, (out, lse)), 2e-5, newest=config.residual_length, **told)
    jaxkv.check_invariants(cache)


def fill(config, lengths=(13, 4, 0), seed=5):
    """Returns a cache with tokens that follow from `seed`, in every layer the same."""
    cache, places = jaxkv.init(config), max(lengths)
    k, v = draw(seed, ROWS, places, K, D), draw(seed + 1, ROWS, places, K, D)
    return jaxkv.append(cache, [k] * config.num_layers, [v] * config.num_layers, np.array(lengths)), k, v


def test_a_prompt_in_pieces_is_stored_and_read_as_in_one_step():
    config, length = make_config(), 30
    q, k, v = draw_step(LAYER, 3, length)
    whole, _, one = run_step(jaxkv.init(config), jnp.full(ROWS, length), q, k, v, deterministic=True)
    pieces, cache = [], jaxkv.init(config)
    for start, end in ((0, 7), (7, 9), (9, 28), (28, 30)):
        counts = jnp.full(ROWS, end - start)
        out, _, cache = run_step(cache, counts, *(x[:, start:end] for x in (q, k, v)), deterministic=True)
        pieces.append(out)
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), whole)
    for layer in range(2):
        rows, positions = jnp.arange(ROWS)[:, None], jnp.arange(length - 4, length)[None]
        for a, b in zip(one.read(layer, rows, positions), cache.read(layer, rows, positions), strict=True):
            np.testing.assert_array_equal(a, b)


def attend_all(cache, seed=9):
    """Returns the output of one query for each row and layer."""
    q, kv = draw(seed, ROWS, 1, HEADS, D), draw(seed + 1, ROWS, 1, K, D)
    cache = jaxkv.extend(cache, jnp.where(cache.lengths > 0, 1, 0))
    outs = []
    for layer in range(cache.num_layers):
        out, cache = jaxkv.attention(q, kv, kv, cache, layer=layer)
        outs.append(out)
    return jnp.stack(outs), cache


def test_each_way_to_name_a_layer():
    layers = (LAYER, LOCAL, LAYER, LOCAL, LAYER, LOCAL)
    apart, stacked = make_config(*layers), make_config(*layers, stacked=True)
    wanted = attend_all(fill(apart)[0])
    q, kv = draw(9, ROWS, 1, HEADS, D), draw(10, ROWS, 1, K, D)
    for config in (apart, stacked):
        cache = jaxkv.extend(fill(config)[0], [1, 1, 0])
        found, outs = list(cache.layers), []
        for i, layer in enumerate(found):
            out, found[i] = jaxkv.attention(q, kv, kv, layer)
            outs.append(out)
        np.testing.assert_array_equal(jnp.stack(outs), wanted[0])
        assert_stored_alike(cache.with_layers(found), wanted[1])

    def scan(cache, i):
        outs = []
        for place in range(2):
            out, cache = jaxkv.attention(q, kv, kv, cache, layer=(place, i))
            outs.append(out)
        return cache, jnp.stack(outs)

    cache, outs = jax.lax.scan(scan, jaxkv.extend(fill(stacked)[0], [1, 1, 0]), jnp.arange(3))
    np.testing.assert_allclose(outs.reshape(wanted[0].shape), wanted[0], atol=1e-6)
    assert_stored_alike(cache, wanted[1])


def assert_stored_alike(cache, other):
    assert cache.lengths.tolist() == other.lengths.tolist()
    for layer in range(len(cache.config.layers)):
        np.testing.assert_array_equal(cache.combined(layer), other.combined(layer))


def test_rows_move_as_other_rows_do(tmp_path):
    """Forked, rolled back within what is held, swapped out and in, saved and loaded, sent: what is read is the same."""
    config = make_config(LAYER, LAYER)
    cache, _, _ = fill(config)
    wanted, _ = attend_all(cache)
    forked = jaxkv.fork(cache, [0], [2])
    out, _ = attend_all(forked)
    assert out[:, 2].shape == wanted[:, 0].shape and not jnp.isnan(out).any()
    longer = jaxkv.append(cache, *[draw(77, 2, ROWS, 2, K, D)] * 2, [2, 1, 0])
    np.testing.assert_array_equal(attend_all(jaxkv.truncate(longer, [13, 4, 0]))[0], wanted)
    left, host = jaxkv.swap_out(cache, [0, 1])
    np.testing.assert_array_equal(attend_all(jaxkv.swap_in(left, [0, 1], host))[0], wanted)
    jaxkv.save(tmp_path / "rows.safetensors", cache)
    np.testing.assert_array_equal(attend_all(jaxkv.load(tmp_path / "rows.safetensors"))[0], wanted)
    np.testing.assert_array_equal(
        attend_all(jaxkv.load(tmp_path / "rows.safetensors", into=jaxkv.init(config)))[0], wanted
    )
    with pytest.raises(jaxkv.CacheFileError, match="residual_length=5, but the cache has None"):
        jaxkv.load(tmp_path / "rows.safetensors", into=jaxkv.init(config.replace(residual_length=None)))
    other = jaxkv.send(cache, [0, 1], to=jaxkv.init(config), at=[0, 1])
    np.testing.assert_array_equal(attend_all(other)[0], wanted)


def test_dense_arrays_come_and_go():
    """What others keep dense becomes both, and goes back as it is stored."""
    config = make_config(LAYER, LAYER)
    cache, k, v = fill(config)
    fields = {name: getattr(config, name) for name in ("block_size", "dtype", "residual_length", "max_seq_len")}
    found = jaxkv.convert.from_dense([k] * 2, [v] * 2, np.array([13, 4, 0]), max_seqs=ROWS, **fields)
    np.testing.assert_array_equal(attend_all(found)[0], attend_all(cache)[0])
    layers, _ = jaxkv.convert.to_hugging_face(cache)
    assert len(layers) == 2
    np.testing.assert_array_equal(layers[1][0][0], cache.separate(1)[0][0][:, :13])


def test_a_row_goes_back_no_further_than_its_newest_tokens():
    cache = jaxkv.extend(fill(make_config())[0], [0, 0, 0])
    assert not jaxkv.truncate(cache, [12, 4, 0]).failed.any()
    assert jaxkv.truncate(cache, [3, 4, 0]).failed.tolist() == [True, False, False]


def test_what_else_reads_a_cache():
    config = make_config(LAYER, LAYER)
    cache, k, v = fill(config)
    stored = decode_stored(config, 1, k[0], v[0])
    for found, wanted in zip(cache.token(0, 12, layer=1), stored, strict=True):
        np.testing.assert_allclose(found, wanted[12], atol=1e-6)
    for found, wanted in zip(cache.token(0, 12, layer=3), (k, v), strict=True):
        np.testing.assert_array_equal(found, wanted[0, 12])
    assert len(cache.layers) == cache.num_layers == 2 and len(list(cache.layers)) == 2
    # Another sequence's queries read all tokens as stored.
    q = draw(1, ROWS, 2, HEADS, D)
    whole = jaxkv.init(config.replace(residual_length=None))
    whole = jaxkv.append(whole, [k] * 2, [v] * 2, [13, 4, 0])
    np.testing.assert_array_equal(
        jaxkv.attend(q, cache, layer=1, causal=False), jaxkv.attend(q, whole, layer=1, causal=False)
    )
    # One head of one token in both of its places.
    key, value = draw(2, 2, D)
    changed, wanted = cache.store(1, 0, 1, 12, key, value), decode_stored(config, 1, key[None, None], value[None, None])
    for found, stored in zip(changed.load(1, 0, 1, 12), wanted, strict=True):
        np.testing.assert_allclose(found, stored[0, 0], atol=1e-6)
    np.testing.assert_array_equal(changed.load(3, 0, 1, 12)[0], key)
    assert "residual" in jaxkv.explain(jax.ShapeDtypeStruct((ROWS, 1, HEADS, D), jnp.float32), cache).reason


def test_the_config():
    config = make_config(LAYER, LOCAL, LAYER)
    assert config.num_layers == 3 and len(config.layers) == 6 and config.period == 2
    assert config.groups == ((0, 2), (1,), (3, 4, 5)) and [config.residual_layer(i) for i in range(4)] == [
        3,
        4,
        5,
        None,
    ]
    scope = {"CacheConfig": jaxkv.CacheConfig, "LayerConfig": jaxkv.LayerConfig}
    assert eval(repr(config), scope) == config
    assert config.replace(residual_length=None).layers == (LAYER, LOCAL, LAYER)
    assert config.replace(num_blocks=9).layers == config.layers
    wide = make_config(jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, dtype="bfloat16"), LAYER)
    assert wide.residual_layers == {1: 2}
    shared = make_config(LAYER, jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, shares_with=0))
    assert shared.residual_layer(1) == 2
    # In half a step's blocks, long rows take little more than without.
    sized = dict(max_seqs=8, max_seq_len=8192, step_tokens=64, num_kv_heads=8, head_dim=128, num_layers=2, dtype="int4")
    sizes = [jaxkv.CacheConfig.uniform(**sized, **more).bytes for more in ({}, {"residual_length": 32})]
    assert 1 < sizes[1] / sizes[0] < 1.04
    program = jax.export.export(jax.jit(lambda cache: jaxkv.extend(cache, [1, 2, 0])))(jaxkv.init(config))
    assert jax.export.deserialize(program.serialize()).call(jaxkv.init(config)).lengths.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("layers", "fields", "words"),
    [
        ((LAYER,), {"dtype": "bfloat16"}, "for quantized layers, and no layer is one"),
        ((LAYER,), {"layout": "contiguous", "num_blocks": None, "block_size": None}, 'layout="contiguous"'),
        ((LAYER, jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, window=NEWEST)), {}, "window=5 of layer 1: give that"),
        ((jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, chunk=8),), {}, "chunk=8 of layer 0"),
        ((jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, evict="layer"),), {}, "evict='layer' of layer 0"),
        ((jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, index_dim=4),), {}, "index_dim=4 of layer 0"),
        ((LAYER.make_residual(5),), {}, "names residual layers alone"),
        ((LAYER,), {"residual_length": 0}, "residual_length must be at least 1, not 0"),
        ((LAYER,), {"residual_length": "32"}, "residual_length must be an integer"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(layers, fields, words):
    with pytest.raises(ValueError, match=words):
        make_config(*layers, **fields)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tree": np.full((ROWS, 1), -1)}, "cannot take tree"),
        ({"spans": np.ones((ROWS, 1), int)}, "cannot take spans"),
        ({"tokens": np.zeros((ROWS, 1, 2), int)}, "cannot take tokens"),
        ({"window": 4, "sink_tokens": 1}, "give a wider window than 4"),
    ],
)  # fmt: skip
def test_options_that_are_refused(options, words):
    cache = jaxkv.extend(fill(make_config())[0], [1, 1, 0])
    q, kv = draw(9, ROWS, 1, HEADS, D), draw(10, ROWS, 1, K, D)
    with pytest.raises(ValueError, match=words):
        jaxkv.attention(q, kv, kv, cache, layer=0, **options)


def test_a_residual_layer_is_no_layer_of_the_model():
    cache = jaxkv.extend(fill(make_config())[0], [1, 1, 0])
    q, kv = draw(9, ROWS, 1, HEADS, D), draw(10, ROWS, 1, K, D)
    with pytest.raises(IndexError, match="layer must be an integer from 0 to 0, not 1"):
        jaxkv.attention(q, kv, kv, cache, layer=1)
    with pytest.raises(ValueError, match="blocks"):
        jaxkv.attend(q, cache, layer=0, blocks=np.zeros((ROWS, 1), int))


def test_first_tokens_beside_a_window():
    """Sink tokens are read as stored, but for those among the newest."""
    config = make_config(jaxkv.LayerConfig(num_kv_heads=K, head_dim=D, window=9, sink_tokens=2))
    host, cache = Host(config), jaxkv.init(config)
    for number, counts in enumerate(COUNTS[:2]):
        q, k, v = draw_step(LAYER, 10 * number, 1 if max(counts) == 1 else MOST)
        host.add(counts, k, v)
        out, _, cache = run_step(cache, jnp.array(counts, jnp.int32), q, k, v)
    position = 13
    (k, v), (old_k, old_v) = host.contents(0)
    seen = [0, 1, *range(position - 8, position + 1)]
    exact = [
        np.where((np.arange(14) > position - NEWEST)[:, None, None], new, old)[seen]
        for new, old in ((k, old_k), (v, old_v))
    ]
    wanted, _ = attend_one(q[0, 0], exact, exact, len(seen) - 1)
    np.testing.assert_allclose(out[0, 0], wanted, atol=2e-5)


@pytest.mark.parametrize("axis", ["heads", "context"])
def test_divided_over_devices(axis):
    config = make_config(LAYER, LOCAL)
    wanted = attend_all(fill(config)[0])[0]
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    cache = jaxkv.init(config, mesh=mesh, **{"heads": None} | {axis: "x"})
    k, v = draw(5, ROWS, 13, K, D), draw(6, ROWS, 13, K, D)
    cache = jax.jit(jaxkv.append)(cache, [k] * 2, [v] * 2, np.array([13, 4, 0]))
    np.testing.assert_allclose(jax.jit(attend_all)(cache)[0], wanted, atol=2e-6)


def test_bytes_read():
    """Whole blocks: those before the newest tokens of four bits, and those of the window of a residual layer."""
    cache = jaxkv.extend(fill(make_config(), (13, 5, 0))[0], [1, 1, 0])
    four_bits, halves = (cache.config.bytes_per_block_read(i) for i in range(2))
    assert jaxkv.plan_step(cache, (ROWS, 1)).bytes_read == (3 + 1) * four_bits + (2 + 2) * halves


def test_a_step_copies_no_pool():
    cache = jaxkv.init(make_config(LAYER, LAYER, num_blocks=4096))

    def step(cache, q, kv):
        cache = jaxkv.extend(cache, jnp.ones(ROWS, jnp.int32))
        planned = jaxkv.plan_step(cache, (ROWS, 1))
        for layer in range(2):
            out, cache = jaxkv.attention(q, kv, kv, cache, layer=layer, step=planned)
        return out, cache

    assert_no_copy(jax.jit(step, donate_argnums=0), cache, draw(1, ROWS, 1, HEADS, D), draw(2, ROWS, 1, K, D))


def test_rows_that_share_their_first_blocks_read_them_once():
    """What is shared ends before each query's newest tokens."""
    rows, length = 12, 2100
    config = make_config(max_seqs=rows, max_seq_len=length + BLOCK, num_blocks=800)
    k, v = draw(5, 1, rows, length, K, D), draw(6, 1, rows, length, K, D)
    cache = jaxkv.append(jaxkv.init(config), k, v, np.array([length] + [0] * (rows - 1)))
    cache = jaxkv.extend(jaxkv.fork(cache, [0] * (rows - 1), list(range(1, rows))), np.ones(rows, int))
    q, kv = draw(9, rows, 1, HEADS, D), draw(10, rows, 1, K, D)
    step = jaxkv.plan_step(cache, (rows, 1), cascade=True)
    assert step.shared is not None and 2000 < np.asarray(step.shared[0]).max() <= length - NEWEST
    together, alone = (
        jaxkv.attention(q, kv, kv, cache, layer=0, step=step, cascade=cascade)[0] for cascade in (True, False)
    )
    np.testing.assert_allclose(together, alone, atol=2e-6)


def test_a_plan_counts_what_an_engine_stores():
    """The bytes of rows, and those that a decode step reads: the newest tokens in bfloat16, the others in four bits."""
    fields = dict(block_size=BLOCK, dtype="int4", residual_length=NEWEST)
    needed = needed_bytes([LAYER] * 3, ROWS, 48, max_seq_len=48, step_tokens=8, **fields)
    config = jaxkv.CacheConfig.uniform(
        num_layers=3, num_kv_heads=K, head_dim=D, max_seqs=ROWS, max_seq_len=48, step_tokens=8, **fields
    )
    assert needed == config.bytes and config.group_blocks[1] < config.group_blocks[0]
    four_bits, halves = (config.bytes_per_block_read(i) / BLOCK for i in (0, 3))
    assert attention_work(config, 40)[0] == 3 * ((40 - NEWEST) * four_bits + NEWEST * halves)


def test_trees_of_guesses_are_refused():
    with pytest.raises(ValueError, match="draft_branches make a tree, and residual_length=32"):
        jaxkv.Engine(
            jaxkv.models.small(), cache_dtype="int4", residual_length=32, draft="ngram", draft_branches=2, max_seqs=2
        )


def test_errors_name_the_layers_that_users_made():
    """Residual layers are named by what they are for: models have neither their numbers nor their windows."""
    config = make_config(LAYER, LAYER)
    cache = jaxkv.extend(fill(config)[0], [0, 0, 0])
    with pytest.raises(jaxkv.OutOfWindow, match=r"that layers that keep the newest 5 tokens \(residual_length\) have"):
        jaxkv.check(jaxkv.truncate(cache, [3, 4, 0]))
    few = jaxkv.init(make_config(num_blocks=None, group_blocks=(9, 3)))
    with pytest.raises(jaxkv.OutOfBlocks, match=r"the layers that keep the newest 5 tokens \(residual_length\)\. A"):
        jaxkv.check(jaxkv.extend(few, [8, 8, 0]))
    with pytest.raises(ValueError, match="residual_length=5, but the cache sent to has residual_length=6: make both"):
        jaxkv.send(cache, [0], to=jaxkv.init(config.replace(residual_length=6)), at=[0])
    with pytest.raises(ValueError, match="residual_length=5, but the cache sent to has none: make both"):
        jaxkv.send(cache, [0], to=jaxkv.init(config.replace(residual_length=None)), at=[0])


def test_errors_about_wider_blocks_name_residual_layers(tmp_path):
    """The newest tokens of a row may begin in the middle of a block of another size."""
    config = make_config(LAYER, LAYER)
    cache, path = jaxkv.extend(fill(config, (18, 4, 0))[0], [0, 0, 0]), tmp_path / "rows.safetensors"
    wide, told = config.replace(block_size=8), r"Row 0 .* the tokens of the residual layer of layer 0 from 12 on, the"
    jaxkv.save(path, cache)
    with pytest.raises(jaxkv.CacheFileError, match=told):
        jaxkv.load(path, into=jaxkv.init(wide))
    with pytest.raises(ValueError, match=told):
        jaxkv.send(cache, [0], to=jaxkv.init(wide), at=[0])
