"""Layers with `compress_ratio`: entries of several tokens, against NumPy, through all that a cache can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY, skip_by_day

import jaxkv
from jaxkv import LayerConfig
from jaxkv._files import safetensors
from jaxkv.testing import permute_blocks, poison

ROWS, LONGEST, WIDTH, INDEX = 3, 64, 8, 4
OVERLAPPING, APART = 4, 8  # tokens of an entry, made of twice as many, or of no others
# As the two kinds of DeepSeek-V4's layers: each beside a window, and with the inputs of its entries.
LOCAL = LayerConfig(num_kv_heads=1, head_dim=WIDTH, window=12)
LAYERS = (
    LOCAL,
    LayerConfig(num_kv_heads=1, head_dim=WIDTH, compress_ratio=OVERLAPPING, index_dim=INDEX),
    LayerConfig(num_kv_heads=1, head_dim=WIDTH, window=2 * OVERLAPPING, dtype="float32"),
    LOCAL,
    LayerConfig.latent(WIDTH - 2, 2, compress_ratio=APART),
    LayerConfig(num_kv_heads=1, head_dim=WIDTH, window=APART, dtype="float32"),
)
PAIRS = {1: 2, 4: 5}  # layers that compress, and those of their inputs


def make_cache(layers=LAYERS, **fields):
    sizes = dict(max_seqs=ROWS, max_seq_len=LONGEST, num_blocks=60, block_size=8, dtype="float32") | fields
    return jaxkv.init(jaxkv.CacheConfig(layers=layers, **sizes))


@functools.cache
def draw_tokens(seed=0):
    """Keys and gates of all tokens of rows, `f32[rows, tokens, 1, WIDTH]` each."""
    return np.random.default_rng(seed).standard_normal((2, ROWS, LONGEST, 1, WIDTH)).astype(np.float32)


def weigh(k, gate, is_token, position, *, is_latent=False):
    """The mean of tokens by a softmax of their gates, turned by the entry's position, so that a wrong one shows."""
    gate = jnp.where(is_token[..., None, None], gate, -jnp.inf)
    key = jnp.sum(jnp.where(is_token[..., None, None], k, 0) * jax.nn.softmax(gate, axis=1), axis=1)
    key = key + position[:, None, None] / 64
    return (key, None) if is_latent else (key, 2 * key, key.mean(axis=1)[:, :INDEX])


def find_entries(row, length, layer, tokens=None):
    """The entries that a row of so many tokens has, `f32[n, WIDTH]`."""
    ratio, window = LAYERS[layer].compress_ratio, LAYERS[PAIRS[layer]].window
    k, gate = (x[row, :, 0].astype(np.float64) for x in (draw_tokens() if tokens is None else tokens))
    found = np.zeros((length // ratio, WIDTH))
    for i in range(len(found)):
        own = slice(max(0, (i + 1) * ratio - window), (i + 1) * ratio)
        weights = np.exp(gate[own])
        found[i] = (k[own] * weights / weights.sum(axis=0)).sum(axis=0) + i * ratio / 64
    return found


def add(cache, k, gate, num_tokens):
    """A step of tokens, padded or packed."""
    cache = jaxkv.extend(cache, num_tokens)
    step = jaxkv.plan_step(cache, k.shape[:-2])
    for layer in (0, 3):
        cache = jaxkv.write(cache, k, gate, layer=layer, step=step)
    for layer, inputs in PAIRS.items():
        cache = jaxkv.write(cache, k, gate, layer=inputs, step=step)
        function = functools.partial(weigh, is_latent=layer == 4)
        cache = jaxkv.compress(cache, function, layer=layer, inputs=inputs, step=step)
    return cache


run = jax.jit(add)


def give(cache, counts, rows=(0, 1, 2), *, tokens=None, packed=False, room=24):
    """Adds the next tokens of each row, which are those of the rows named."""
    both, held = draw_tokens() if tokens is None else tokens, np.asarray(cache.lengths)
    pieces = [
        both[:, of, at : at + n] for of, at, n in zip(rows, held.tolist(), counts, strict=True)
    ]  # fmt: skip
    if packed:
        flat = np.concatenate(pieces, axis=1)
        x = np.pad(flat, ((0, 0), (0, ROWS * room - flat.shape[1]), (0, 0), (0, 0)))
    else:
        x = np.stack([np.pad(p, ((0, 0), (0, room - p.shape[1]), (0, 0), (0, 0))) for p in pieces], axis=1)
    return run(cache, *x, np.array(counts, np.int32))


def filled(lengths=(33, 16, 7), **fields):
    cache = make_cache(**fields)
    return give(give(cache, [n // 2 for n in lengths]), [n - n // 2 for n in lengths])


def assert_held(cache, of=(0, 1, 2), atol=1e-5, tokens=None):
    """Each row has the entries of the row whose tokens it was given, and those alone."""
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    for row, (source, length) in enumerate(zip(of, np.asarray(cache.lengths).tolist(), strict=True)):
        for layer in PAIRS:
            wanted = find_entries(source, length, layer, tokens)
            k, v = jaxkv.gather(cache, row, layer=layer)
            assert k.shape == (len(wanted), 1, WIDTH)
            np.testing.assert_allclose(k[:, 0], wanted, atol=atol)
            values = wanted[:, : WIDTH - 2] if layer == 4 else 2 * wanted
            np.testing.assert_allclose(v[:, 0], values, atol=2 * atol)
        keys = read_index(cache, row)
        np.testing.assert_allclose(keys, find_entries(source, length, 1, tokens)[:, :INDEX], atol=atol)


def read_index(cache, row):
    count, pool = int(cache.layer(1).held[row]), cache.pool(1)
    block, offset = (np.asarray(x) for x in cache.slots(row, np.arange(count), layer=1))
    bits = pool.index.keys[block, 0, 0, offset, :INDEX]
    keys = np.asarray(cache.config.index_kind(1).from_bits(bits), np.float32)
    return keys if pool.index.scale is None else keys * np.asarray(pool.index.scale)[block, 0, 0, offset, None]


@pytest.mark.parametrize("seed", range(8) if NIGHTLY else range(2))
def test_however_tokens_are_split_into_steps(seed):
    draw, cache = np.random.default_rng(seed), make_cache()
    while (left := LONGEST - np.asarray(cache.lengths)).any():
        most = draw.choice([1, 2, 5, 24])
        counts = np.minimum(draw.integers(0, most + 1, ROWS) * (draw.random(ROWS) < 0.8), left)
        cache = give(poison(permute_blocks(cache, seed)), counts.tolist(), packed=draw.random() < 0.5)
    assert_held(cache)


def test_lengths_around_entries_and_blocks():
    for length in (0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17):
        cache = give(poison(make_cache()), [length, 0, 1])
        assert_held(cache)
        assert [int(cache.layer(i).held[0]) for i in (1, 4)] == [length // 4, length // 8]


def test_what_a_row_holds_takes_no_more_bytes():
    config = make_cache().config
    assert config.block_slots(1) == 2 and config.block_slots(4) == 1 and config.block_slots(0) == 8
    assert config.pool_shape(1) == (61, 2, 1, 2, WIDTH) and config.pool_shape(4) == (61, 1, 1, 1, WIDTH)
    assert config.index_shapes(1)[0] == (61, 1, 1, 2, INDEX)
    assert config.bytes_per_layer_block(1) == 4 * (2 * 2 * WIDTH + 2 * INDEX)
    assert jaxkv.init(config).bytes == config.bytes


FORMATS = {"bfloat16": 0.05, "int8": 0.05, "float8_e4m3fn": 0.3, "int4": 0.6}


@pytest.mark.parametrize("dtype, atol", FORMATS.items() if NIGHTLY else [("int8", 0.05)])
def test_in_every_format(dtype, atol):
    cache = filled(dtype=dtype)
    assert_held(cache, atol=atol)


def test_stacked():
    cache = filled(stacked=True)
    assert_held(poison(cache))


def test_in_one_block_a_row(tmp_path):
    """The contiguous layout, whose files have blocks all the same."""
    cache = filled(layout="contiguous", block_size=None, num_blocks=None)
    assert_held(poison(cache))
    jaxkv.save(tmp_path / "rows.safetensors", cache)
    assert_held(jaxkv.load(tmp_path / "rows.safetensors", into=make_cache(), partial_windows=True))
    assert_held(give(jaxkv.truncate(cache, [9, 16, 3]), [9, 9, 9]))


def test_forks_go_apart():
    cache = jaxkv.fork(jaxkv.free(filled(), [2]), 0, [2])
    other = draw_tokens(1)
    mixed = np.array(draw_tokens())
    mixed[:, 2, :33], mixed[:, 2, 33:] = mixed[:, 0, :33], other[:, 2, 33:]
    cache = give(poison(cache), [9, 9, 10], tokens=mixed)
    assert_held(cache, tokens=mixed)


@pytest.mark.parametrize("length", [32, 31, 28, 26, 25] if NIGHTLY else [31, 26])
def test_rows_go_back_and_on_with_other_tokens(length):
    """An entry that had been completed is made anew."""
    cache = jaxkv.truncate(filled(), [length, 16, 7])
    mixed = np.array(draw_tokens())
    mixed[:, 0, length:] = draw_tokens(1)[:, 0, length:]
    assert_held(cache, tokens=mixed)
    assert_held(give(poison(cache), [7, 3, 1], tokens=mixed), tokens=mixed)


def test_guesses_that_are_taken_back():
    cache = give(filled(), [6, 5, 3])
    cache = jaxkv.keep(cache, [[0, 1, 2, -1], [0, -1, -1, -1], [-1] * 4])
    assert np.asarray(cache.lengths).tolist() == [36, 17, 7]
    mixed = np.array(draw_tokens())
    for row, length in enumerate((36, 17, 7)):
        mixed[:, row, length:] = draw_tokens(1)[:, row, length:]
    assert_held(give(poison(cache), [9, 9, 9], tokens=mixed), tokens=mixed)


def test_beams():
    cache = jaxkv.reorder(filled(), [1, 0, 0])
    assert_held(cache, of=(1, 0, 0))
    assert_held(give(poison(cache), [5, 9, 9], rows=(1, 0, 0)), of=(1, 0, 0))


@pytest.mark.parametrize("length", [33, 32, 24, 39] if NIGHTLY else [33, 39])
def test_prefix_cache(length):
    """What is found goes on as if it had been computed."""
    cache, prefix = make_cache(), None
    prefix = jaxkv.PrefixCache(cache.config)
    cache = give(cache, [24, 0, 0])
    cache = give(cache, [length - 24, 0, 0])
    tokens = list(range(length))
    cache = jaxkv.free(prefix.insert(cache, 0, tokens), [0])
    match = prefix.match([*tokens, 99])
    cache = prefix.adopt(poison(cache), 1, match)
    held = int(cache.lengths[1])
    assert held >= length // 8 * 8
    assert_held(cache, of=(0, 0, 2))
    cache = give(cache, [0, min(20, LONGEST - held), 0], rows=(0, 0, 2))
    assert_held(cache, of=(0, 0, 2))


def test_to_the_host_and_back():
    cache, host = jaxkv.swap_out(filled(), [0, 1])
    cache = jaxkv.swap_in(poison(cache), [1, 0], host)
    assert_held(give(cache, [8, 9, 3], rows=(1, 0, 2)), of=(1, 0, 2))


@pytest.mark.parametrize("block_size", [8, 16, 24] if NIGHTLY else [16])
def test_files(tmp_path, block_size):
    """Rows go into blocks of another size with their entries."""
    jaxkv.save(tmp_path / "rows.safetensors", poison(filled()))
    # What a block held before its row is not saved, where an entry is not complete.
    tensors = safetensors.read(tmp_path / "rows.safetensors")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in tensors.values())
    into = make_cache(block_size=block_size)
    cache = jaxkv.load(tmp_path / "rows.safetensors", into=poison(into), partial_windows=True)
    assert_held(cache)
    assert_held(give(cache, [9, 9, 9]))


@pytest.mark.parametrize("block_size", [8, 16] if NIGHTLY else [16])
def test_sent(block_size):
    cache = jaxkv.send(filled((33, 48, 7)), [1, 0], to=poison(make_cache(block_size=block_size)), at=[0, 1])
    assert_held(give(cache, [9, 9, 0], rows=(1, 0, 2)), of=(1, 0, 2))


def attend_to_entries(q, row, position, layer, chosen=None):
    entries = find_entries(row, position + 1, layer)
    seen = np.arange(len(entries)) if chosen is None else np.intersect1d(chosen, np.arange(len(entries)))
    if not len(seen):
        return np.zeros((q.shape[0], WIDTH - 2 if layer == 4 else WIDTH))
    logits = q.astype(np.float64) @ entries[seen].T * 0.3
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    values = entries[seen, : WIDTH - 2] if layer == 4 else 2 * entries[seen]
    return weights / weights.sum(axis=1, keepdims=True) @ values


def test_rows_that_share_blocks_read_entries_by_themselves():
    """In a step that reads what rows share once, in layers of tokens."""
    cache = make_cache(max_seqs=8, max_seq_len=8192, num_blocks=200)
    k, gate = (jnp.ones((8, 24, 1, WIDTH)) for _ in range(2))
    cache = run(cache, k, gate, np.array([24] + [0] * 7, np.int32))
    cache = jaxkv.fork(cache, 0, list(range(1, 8)))
    cache = run(cache, k[:, :1], gate[:, :1], np.ones(8, np.int32))
    q = np.random.default_rng(0).standard_normal((8, 1, 4, WIDTH)).astype(np.float32)
    steps = (jaxkv.plan_step(cache, (8, 1), cascade=flag) for flag in (True, False))
    outs = [jaxkv.attend(q, cache, layer=1, step=step) for step in steps]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("layer", PAIRS)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_to_entries(layer, packed):
    counts, lengths = (9, 1, 0), (24, 15, 3)
    cache = give(give(make_cache(), lengths), counts, packed=packed)
    axes = (ROWS * 24,) if packed else (ROWS, 24)
    q = np.random.default_rng(0).standard_normal((*axes, 4, WIDTH)).astype(np.float32)
    step = jaxkv.plan_step(cache, axes)
    out, lse = jaxkv.attend(q, poison(cache), layer=layer, step=step, scale=0.3, return_lse=True)
    starts = np.cumsum(counts) - counts
    for row, count in enumerate(counts):
        for nth in range(count):
            at = starts[row] + nth if packed else (row, nth)
            position = lengths[row] + nth
            np.testing.assert_allclose(out[at], attend_to_entries(q[at], row, position, layer), atol=1e-5)
            assert np.isneginf(lse[at]).all() == (position + 1 < LAYERS[layer].compress_ratio)


@pytest.mark.parametrize("counts", [(9, 1, 0), (1, 1, 1)])
def test_chosen_entries(counts):
    """The indexer chooses entries, by their index keys, of those whose tokens a query sees."""
    lengths, top_k = (24, 15, 3), 3
    cache = give(give(make_cache(), lengths), counts, packed=True)
    axes = (ROWS * 24,) if max(counts) > 1 else (ROWS,)
    draw = np.random.default_rng(0)
    q, index_q = (draw.standard_normal((*axes, 4, n)).astype(np.float32) for n in (WIDTH, INDEX))
    weights = draw.standard_normal((*axes, 4)).astype(np.float32)
    cache, step = poison(cache), jaxkv.plan_step(cache, axes)
    tokens = jaxkv.scores.indexer(cache, layer=1, q=index_q, weights=weights, top_k=top_k, step=step)
    out = jaxkv.attend(q, cache, layer=1, step=step, scale=0.3, tokens=tokens)
    at = 0
    for row, count in enumerate(counts):
        for nth in range(count):
            position = lengths[row] + nth
            keys = find_entries(row, position + 1, 1)[:, :INDEX]
            scores = (np.maximum(index_q[at] @ keys.T, 0) * weights[at][:, None]).sum(axis=0)
            best = np.argsort(-scores, kind="stable")[:top_k]
            assert sorted(x for x in np.asarray(tokens[at]).tolist() if x >= 0) == sorted(best.tolist())
            np.testing.assert_allclose(out[at], attend_to_entries(q[at], row, position, 1, best), atol=1e-5)
            at += 1


@pytest.mark.parametrize("kind", ["Auto", "Explicit"] if NIGHTLY else ["Explicit"])
@pytest.mark.parametrize("heads", [1, 2] if NIGHTLY else [2])
def test_over_two_devices(heads, kind):
    """Heads are divided among them, or each has the only one."""
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2], axis_types=(axis_type,))
    layers = (*(x.replace(num_kv_heads=heads) for x in LAYERS[:3]), *LAYERS[3:])
    with jax.set_mesh(mesh):
        config = make_cache(layers).config
        cache, alone = jaxkv.init(config, mesh=mesh), jaxkv.init(config)
        k, gate = (np.repeat(x[:, :33], heads, axis=2) for x in draw_tokens())
        for _ in range(2):
            cache, alone = (jax.jit(add_by_heads)(x, k[:, :17], gate[:, :17]) for x in (cache, alone))
        for layer in PAIRS:
            for row in range(ROWS):
                found, wanted = (jaxkv.gather(x, row, layer=layer, max_len=8) for x in (cache, alone))
                for one, other in zip(found, wanted, strict=True):
                    np.testing.assert_allclose(one, other, atol=1e-6)
        q = np.ones((ROWS, 17, 4, WIDTH), np.float32)
        for layer in PAIRS:
            found, wanted = (
                jax.jit(functools.partial(jaxkv.attend, layer=layer, scale=0.3))(q, x) for x in (cache, alone)
            )
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def add_by_heads(cache, k, gate):
    cache = jaxkv.extend(cache, [17, 16, 9])
    step = jaxkv.plan_step(cache, k.shape[:-2])
    for layer, inputs in PAIRS.items():
        own = [x[:, :, : cache.config.layers[inputs].num_kv_heads] for x in (k, gate)]
        cache = jaxkv.write(cache, *own, layer=inputs, step=step)
        function = functools.partial(weigh, is_latent=layer == 4)
        cache = jaxkv.compress(cache, function, layer=layer, inputs=inputs, step=step)
    return cache


@skip_by_day("each device has its programs to compile")
def test_caches_of_their_own_rows_on_each_device():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    config = make_cache(max_seqs=2, num_blocks=24).config
    shards = jaxkv.init(config, mesh=mesh, rows="data")
    k, gate = (x[:2, :9] for x in draw_tokens())
    shards = jaxkv.by_rows(add_nine)(shards, k, gate)
    alone = add_nine(jaxkv.init(config), k, gate)
    for row, cache in enumerate(shards.shards):
        np.testing.assert_allclose(*(jaxkv.gather(x, at, layer=1)[0] for x, at in ((cache, 0), (alone, row))))


def add_nine(cache, k, gate):
    return add(cache, k, gate, jnp.full(k.shape[0], 9, jnp.int32))


def test_one_program_for_all_steps_that_copies_no_pool():
    cache = make_cache(num_blocks=4000)
    x = jnp.ones((ROWS, 1, 1, WIDTH))
    step = jax.jit(add, donate_argnums=0)
    memory = step.lower(cache, x, x, jnp.ones(ROWS, jnp.int32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.config.bytes
    assert memory.temp_size_in_bytes < cache.config.bytes / 20
    for _ in range(40):
        cache = step(cache, x, x, jnp.ones(ROWS, jnp.int32))
    assert step._cache_size() == 1
    # An entry of equal tokens is as they are, but for its position.
    k, _ = jaxkv.gather(cache, 0, layer=1)
    np.testing.assert_allclose(k[:, 0, 0], 1 + np.arange(0, 40, 4) / 64, rtol=1e-6)


BAD_LAYERS = {
    "0": (dict(compress_ratio=0), "at least 1"),
    "True": (dict(compress_ratio=True), "compress_ratio must be"),
    "a string": (dict(compress_ratio="4"), "compress_ratio must be"),
    "window": (dict(compress_ratio=4, window=8), "does not go with window=8"),
    "chunk": (dict(compress_ratio=4, chunk=8), "does not go with chunk=8"),
    "evict": (dict(compress_ratio=4, evict="layer"), "does not go with evict='layer'"),
    "bounds": (dict(compress_ratio=4, bounds=True), "does not go with bounds=True"),
    "shares_with": (dict(compress_ratio=4, shares_with=0), "does not go with shares_with=0"),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_layers_that_cannot_be(name):
    fields, message = BAD_LAYERS[name]
    with pytest.raises(ValueError, match=message):
        LayerConfig(num_kv_heads=1, head_dim=WIDTH, **fields)


def test_an_entry_of_a_token_is_a_token():
    assert LayerConfig(num_kv_heads=1, head_dim=8, compress_ratio=1) == LayerConfig(num_kv_heads=1, head_dim=8)


BAD_CONFIGS: dict = {
    "block_size": (dict(block_size=12), r"holds no whole entries of layer 4, which has compress_ratio=8"),
    "contiguous": (
        dict(layout="contiguous", block_size=None, num_blocks=None, max_seq_len=36),
        "max_seq_len=36 holds no whole entries of layer 4",
    ),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_configs_that_cannot_be(name):
    fields, message = BAD_CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        make_cache(**fields)


def test_the_default_block_size_holds_whole_entries():
    sizes = dict(max_seqs=2, max_seq_len=512, num_blocks=9, block_size=None)
    assert make_cache(**sizes).config.block_size == 16
    wide = LAYERS[4].replace(compress_ratio=128)
    config = make_cache(layers=(*LAYERS, wide), **sizes).config
    assert config.block_size == 128 and config.replace(layers=LAYERS).block_size == 16


def mean(k, v, is_token, position):
    return k.mean(axis=1), v.mean(axis=1), k.mean(axis=(1, 2))[:, :INDEX]


def run_in_step(run, *, layers=LAYERS, axes=(ROWS, 1), **arguments):
    cache = jaxkv.extend(make_cache(layers), [1, 1, 1])
    named = {"layer": 1, "inputs": 2, "step": jaxkv.plan_step(cache, axes)} | arguments
    return run(cache, **named)


def compress_by(function):
    return lambda cache, **named: jaxkv.compress(cache, function, **named)


X = jnp.ones((ROWS, 1, 1, WIDTH))
BAD_CALLS = {
    "write": (lambda cache, **_: jaxkv.write(cache, X, X, layer=1), "stores entries of 4 tokens"),
    "attention": (lambda cache, **_: jaxkv.attention(X, X, X, cache, layer=1), "stores entries of 4 tokens"),
    "attention, without keys": (
        lambda cache, **_: jaxkv.attention(X, None, None, cache, layer=1), "stores entries of 4 tokens",
    ),
    "append": (
        lambda cache, **_: jaxkv.append(cache, [X] * 6, [X] * 4 + [None, X], [1] * 3), "stores entries of 4 tokens",
    ),
    "write_index": (
        lambda cache, **_: jaxkv.write_index(cache, jnp.ones((ROWS, 1, INDEX)), layer=1), "stores entries of 4 tokens",
    ),
    "a window": (lambda cache, **_: jaxkv.attend(X, cache, layer=1, window=3), "cannot be combined with window"),
    "a tree": (
        lambda cache, **_: jaxkv.plan_step(cache, (ROWS, 1), tree=[[-1]] * ROWS), "layer 1 of this one stores entries",
    ),
    "keep": (
        lambda cache, **_: jaxkv.keep(jaxkv.extend(cache, [3, 3, 3]), [[0, 2]] * ROWS), "path must be a chain",
    ),
    "block_bounds": (lambda cache, **_: jaxkv.block_bounds(cache, layer=1), "stores entries of 4 tokens"),
    "scores": (lambda cache, **_: jaxkv.scores.knorm(cache, layer=1), "stores entries of 4 tokens"),
    "to_flax": (lambda cache, **_: jaxkv.convert.to_flax(make_cache(LAYERS[:4]), {}), "no layers with compress_ratio"),
    "no step": (lambda cache, **named: jaxkv.compress(cache, mean, **named | {"step": None}), "needs the plan"),
    "no layer": (lambda cache, **named: jaxkv.compress(cache, mean, **named | {"layer": 9}), "from 0 to 5"),
    "a layer of tokens": (lambda cache, **named: jaxkv.compress(cache, mean, **named | {"layer": 0}), "stores tokens"),
    "inputs of entries": (
        lambda cache, **named: jaxkv.compress(cache, mean, **named | {"inputs": 4}),
        "window of 4 tokens, or a multiple",
    ),
    "another window": (
        lambda cache, **named: jaxkv.compress(cache, mean, **named | {"layer": 4, "inputs": 0}),
        "window of 8 tokens, or a multiple",
    ),
    "a layer alone": (lambda cache, **named: jaxkv.compress(cache.layers[1], mean, **named), "must be"),
    "no index keys": (compress_by(lambda *x: mean(*x)[:2]), "must return index_k .*, not None"),
    "values of a latent layer": (
        lambda cache, **named: jaxkv.compress(cache, mean, **named | {"layer": 4, "inputs": 5}),
        "must return v None",
    ),
    "all tokens": (compress_by(lambda k, v, *_: (k, v, k[:, :, 0])), r"must return k \["),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_are_refused(name):
    function, message = BAD_CALLS[name]
    with pytest.raises((ValueError, IndexError), match=message):
        run_in_step(function)


def test_a_step_of_another_cache_is_refused():
    with pytest.raises(ValueError, match="another config"):
        run_in_step(compress_by(mean), step=jaxkv.plan_step(jaxkv.extend(make_cache(num_blocks=9), [1] * 3), (ROWS, 1)))


def test_rows_without_blocks_store_no_entry():
    """A row that fails stays as it was, and others go on."""
    cache = give(make_cache(num_blocks=9), [24, 20, 7])
    cache = give(cache, [9, 4, 24])
    assert np.asarray(cache.failed).tolist() == [False, False, True]
    assert np.asarray(cache.lengths).tolist() == [33, 24, 7]
    assert_held(jaxkv.free(cache, [2]))


def test_a_gpu_takes_no_branch():
    """A step that completes no entry computes none; on a GPU the host would have to take the branch, and waits."""
    cache = jaxkv.extend(make_cache(LAYERS[:3]), [1, 1, 1])
    step = jaxkv.plan_step(cache, (ROWS, 1))
    run = jax.jit(functools.partial(jaxkv.compress, compressor=mean, layer=1, inputs=2)).trace(cache, step=step)
    cpu, gpu, tpu = (run.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu"))
    # The choice of the platform is one of a constant.
    assert cpu.count("stablehlo.case") == tpu.count("stablehlo.case") == gpu.count("stablehlo.case") + 1
