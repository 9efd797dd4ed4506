"""Every wrong argument gets one sentence: what was expected, what came, and the way out. And nothing is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import Checksum
from three_rows import CONFIG, LAYERS, filled, ones

import jaxkv
from jaxkv import CacheConfig, LayerConfig
from jaxkv._core.cache.data_parallel import shard_config


@pytest.fixture(scope="module")
def cache():
    return filled()


K = ones(3, 1, 2, 8)
Q = ones(3, 1, 4, 8)


def attend(cache, q=Q, layer=0, **options):
    return jaxkv.attend(q, cache, layer=layer, **options)


def attention(cache, q=Q, k=K, v=K, layer=0, **options):
    return jaxkv.attention(q, k, v, cache, layer=layer, **options)


def write(cache, k=K, v=K, layer=0):
    return jaxkv.write(cache, k, v, layer=layer)


def append(cache, shape, num_tokens=None, count=2):
    kv = [ones(*shape, c.num_kv_heads, c.head_dim) for c in LAYERS][:count]
    return jaxkv.append(cache, kv, kv, num_tokens)


def layer(**fields):
    return LayerConfig(**({"num_kv_heads": 2, "head_dim": 8} | fields))


def config(**fields):
    return CacheConfig(**({"layers": LAYERS, "max_seqs": 3, "max_seq_len": 20, "num_blocks": 8} | fields))


BLOCKS = np.ones((3, 2, 4, 8), np.float32)


def from_blocks(**parts):
    default = {"k": [BLOCKS], "v": [BLOCKS], "tables": [[2, 0], [1, 0]], "lengths": [6, 3]}
    return jaxkv.convert.from_blocks(**(default | parts))


# What is called with the cache -> the error, and words of its message: the expected, the given, the way out.
CALLS = {
    # Sizes.
    "no layers": (lambda c: config(layers=()), ValueError, "layers must name at least one LayerConfig, .* empty"),
    "not a layer": (lambda c: config(layers=(3,)), ValueError, r"layers\[0\] must be a LayerConfig, not 3"),
    "no heads": (lambda c: layer(num_kv_heads=0), ValueError, "num_kv_heads must be at least 1, not 0"),
    "head_dim is a float": (lambda c: layer(head_dim=8.0), ValueError, "head_dim must be an integer, not 8.0"),
    "window 0": (lambda c: layer(window=0), ValueError, "window must be at least 1, not 0"),
    "layer dtype": (
        lambda c: layer(dtype="int32"),
        ValueError,
        "LayerConfig.dtype must be one of .*float32.*, not int32",
    ),
    "block_size 0": (lambda c: config(block_size=0), ValueError, "block_size must be at least 1, not 0"),
    "block_size True": (lambda c: config(block_size=True), ValueError, "block_size must be an integer, not True"),
    "no rows": (lambda c: config(max_seqs=0), ValueError, "max_seqs must be at least 1, not 0"),
    "no length": (lambda c: config(max_seq_len=None), ValueError, "needs max_seq_len, the most tokens of one row"),
    "negative length": (lambda c: config(max_seq_len=-4), ValueError, "max_seq_len must be at least 1, not -4"),
    "no blocks": (lambda c: config(num_blocks=0), ValueError, "num_blocks must be at least 1, not 0"),
    "blocks not said": (
        lambda c: config(num_blocks=None),
        ValueError,
        "needs num_blocks .* or max_tokens .* it would be num_blocks=6",
    ),
    "blocks said twice": (
        lambda c: config(max_tokens=50),
        ValueError,
        "max_tokens=50 takes 4 blocks of 16, but num_blocks is 8",
    ),
    "dtype": (
        lambda c: config(dtype="int8x"),
        ValueError,
        "dtype must be one of bfloat16, float16, float32, int8, float8_e4m3fn, float8_e5m2, int4, k5v3, not int8x",
    ),
    "layout": (lambda c: config(layout="dense"), ValueError, "layout must be 'paged' or 'contiguous', not 'dense'"),
    "contiguous": (
        lambda c: config(layout="contiguous"),
        ValueError,
        "num_blocks is 3 in the contiguous layout .*, not 8: leave it out",
    ),
    "head_dim_multiple": (
        lambda c: config(head_dim_multiple=0),
        ValueError,
        "head_dim_multiple must be at least 1, not 0",
    ),
    "little memory": (
        lambda c: CONFIG.with_memory(1000),
        ValueError,
        "memory_bytes=1000 is too little: one block of 4 tokens takes 640 bytes",
    ),
    # Layers, rows and heads.
    "layer": (lambda c: c.layer(2), IndexError, "layer must be an integer from 0 to 1, not 2"),
    "negative layer": (lambda c: c.layer(-1), IndexError, "layer must be an integer from 0 to 1, not -1"),
    "layer of attend": (lambda c: attend(c, layer=2), IndexError, "layer must be an integer from 0 to 1, not 2"),
    "layer of attention": (
        lambda c: attention(c, layer=-1),
        IndexError,
        "layer must be an integer from 0 to 1, not -1",
    ),
    "layer of write": (lambda c: write(c, layer=True), IndexError, "layer must be an integer from 0 to 1, not True"),
    "layer of gather": (
        lambda c: jaxkv.gather(c, 0, layer=-1),
        IndexError,
        "layer must be an integer from 0 to 1, not -1",
    ),
    "layer_config": (lambda c: c.layer_config(-1), IndexError, "layer must be an integer from 0 to 1, not -1"),
    "combined": (lambda c: c.combined(2), IndexError, "layer must be an integer from 0 to 1, not 2"),
    "row of gather": (lambda c: jaxkv.gather(c, 3, layer=0), IndexError, "row must be an integer from 0 to 2, not 3"),
    "negative row": (lambda c: jaxkv.gather(c, -1, layer=0), IndexError, "row must be an integer from 0 to 2, not -1"),
    "row on the device": (
        lambda c: jaxkv.gather(c, jnp.array(-1), layer=0),
        IndexError,
        "row must be an integer from 0 to 2, not Array",
    ),
    "row of token": (lambda c: c.token(1.5, 0), IndexError, "row must be an integer from 0 to 2, not 1.5"),
    "position": (lambda c: c.token(2, 3), IndexError, "Row 2 holds 3 tokens, so it has no token at position 3"),
    "negative position": (
        lambda c: c.token(2, -1),
        IndexError,
        "Row 2 holds 3 tokens, so it has no token at position -1",
    ),
    "head of load": (lambda c: c.load(0, 0, 2, 0), IndexError, "head must be an integer from 0 to 1 in layer 0, not 2"),
    "negative head": (
        lambda c: c.load(0, 0, -1, 0),
        IndexError,
        "head must be an integer from 0 to 1 in layer 0, not -1",
    ),
    "store where nothing is": (lambda c: c.store(0, 1, 0, 0, ones(8), ones(8)), IndexError, "Row 1 holds 0 tokens"),
    "store of a scalar": (
        lambda c: c.store(0, 0, 0, 0, 1.0, 2.0),
        ValueError,
        r"k and v must be \[8\] each, .*, not \(\) and \(\)",
    ),
    "cache_length": (lambda c: c.cache_length(-1), IndexError, "row must be an integer from 0 to 2, not -1"),
    "free": (lambda c: jaxkv.free(c, [0, 3]), IndexError, r"rows must be rows from 0 to 2, not \[0, 3\]"),
    "free a negative row": (lambda c: jaxkv.free(c, -1), IndexError, "rows must be rows from 0 to 2, not -1"),
    "free by a short mask": (
        lambda c: jaxkv.free(c, [True, False]),
        ValueError,
        r"rows must be bool\[3\], .* its shape is \(2,\)",
    ),
    "free by floats": (
        lambda c: jaxkv.free(c, [0.0]),
        ValueError,
        "rows must be a row index or a list of them, not float",
    ),
    "fork from": (lambda c: jaxkv.fork(c, 3, 1), IndexError, "src must be rows from 0 to 2, not 3"),
    "fork to": (lambda c: jaxkv.fork(c, 0, -1), IndexError, "dst must be rows from 0 to 2, not -1"),
    "fork in a ring": (
        lambda c: jaxkv.fork(c, [0, 1], [1, 0]),
        ValueError,
        r"Rows \[0, 1\] are in src and in dst .* use reorder",
    ),
    "fork twice": (lambda c: jaxkv.fork(c, [0, 2], [1, 1]), ValueError, r"dst names a row twice: \[1, 1\]"),
    "fork unequal": (
        lambda c: jaxkv.fork(c, [0, 2], [1]),
        ValueError,
        "src and dst must be equally long, but have 2 and 1 rows",
    ),
    "order": (lambda c: jaxkv.reorder(c, [0, 1, 3]), IndexError, r"order must be rows from 0 to 2, not \[0, 1, 3\]"),
    "short order": (
        lambda c: jaxkv.reorder(c, [0, 1]),
        ValueError,
        r"order must have one integer for each of the 3 rows, but its shape is \(2,\)",
    ),
    # Numbers of tokens.
    "negative count": (
        lambda c: jaxkv.extend(c, [1, -2, 0]),
        ValueError,
        "num_tokens must not be negative, but row 1 has -2",
    ),
    "counts of other rows": (
        lambda c: jaxkv.extend(c, [1, 2]),
        ValueError,
        r"num_tokens must have one integer for each of the 3 rows, but its shape is \(2,\)",
    ),
    "one count for all": (lambda c: jaxkv.extend(c, 1), ValueError, r"for each of the 3 rows, but its shape is \(\)"),
    "float counts": (
        lambda c: jaxkv.extend(c, [1.0, 2.0, 0.0]),
        ValueError,
        "num_tokens must be integers, not float64",
    ),
    "device float counts": (lambda c: jaxkv.extend(c, ones(3)), ValueError, "num_tokens must be integers, not float32"),
    "more than T": (
        lambda c: append(c, (3, 2), [1, 3, 0]),
        ValueError,
        "num_tokens asks for 3 tokens, but k and v have T = 2 slots",
    ),
    "more than N": (
        lambda c: append(c, (4,), [1, 3, 1]),
        ValueError,
        "num_tokens asks for 5 tokens, but k and v have N = 4 slots",
    ),
    "packed without counts": (
        lambda c: append(c, (4,)),
        ValueError,
        "Packed tokens need num_tokens, how many of them belong to each row",
    ),
    "one layer of two": (
        lambda c: append(c, (3, 1), count=1),
        ValueError,
        "one array for each of the 2 layers, but have 1 and 1",
    ),
    "negative truncate": (
        lambda c: jaxkv.truncate(c, [0, 0, -1]),
        ValueError,
        "lengths must not be negative, but row 2 has -1",
    ),
    "negative reserve": (
        lambda c: jaxkv.reserve(c, [-1, 0, 0]),
        ValueError,
        "target_lengths must not be negative, but row 0 has -1",
    ),
    "token axes of a plan": (
        lambda c: jaxkv.plan_step(c, (2, 5)),
        ValueError,
        r"token_axes must be \(N,\) or \(3, T\), .* not \(2, 5\)",
    ),
    "shape of positions": (
        lambda c: jaxkv.positions(c, (2, 5)),
        ValueError,
        r"shape must be \(N,\) or \(3, T\), .* not \(2, 5\)",
    ),
    # Keys, values and queries.
    "rank": (
        lambda c: write(c, ones(2, 8), ones(2, 8)),
        ValueError,
        r"k must be \[S, T, heads, 8\] or packed \[N, heads, 8\], but its shape is \(2, 8\)",
    ),
    "rows": (
        lambda c: write(c, ones(2, 1, 2, 8), ones(2, 1, 2, 8)),
        ValueError,
        "k has 2 rows, but the cache has max_seqs = 3: pad it to all rows",
    ),
    "head_dim": (
        lambda c: write(c, ones(3, 1, 2, 6), ones(3, 1, 2, 6)),
        ValueError,
        "k has head_dim 6, but layer 0 of the cache has 8",
    ),
    "KV heads": (
        lambda c: write(c, ones(3, 1, 1, 8), ones(3, 1, 1, 8)),
        ValueError,
        "k has 1 heads?, but the pool has 2 KV heads",
    ),
    "integers": (
        lambda c: write(c, K.astype(jnp.int32), K.astype(jnp.int32)),
        ValueError,
        "k must be floating point, not int32",
    ),
    "v unlike k": (
        lambda c: write(c, K, ones(3, 2, 2, 8)),
        ValueError,
        r"v has the token axes \(3, 2\), but k has \(3, 1\): they must agree, \[S, T, heads, head_dim\]",
    ),
    "dtype of v": (
        lambda c: write(c, K, K.astype(jnp.bfloat16)),
        ValueError,
        "k and v must be alike, but k is float32.* and v is bfloat16",
    ),
    "a list": (lambda c: write(c, [[1.0]], [[1.0]]), ValueError, "k must be an array, not list"),
    "q unlike k": (
        lambda c: attention(c, q=ones(3, 2, 4, 8)),
        ValueError,
        r"k has the token axes \(3, 1\), but q has \(3, 2\)",
    ),
    "group": (
        lambda c: attend(c, ones(3, 1, 5, 8)),
        ValueError,
        "5 query heads cannot be shared among 2 KV heads: H must be a multiple of K",
    ),
    "q head_dim": (
        lambda c: attend(c, ones(3, 1, 4, 16)),
        ValueError,
        "q has head_dim 16, but layer 0 of the cache has 8",
    ),
    "NaN scale": (
        lambda c: attend(c, scale=float("nan")),
        ValueError,
        "scale must be a finite number above 0, not nan: leave it out",
    ),
    "scale of a shape": (
        lambda c: attend(c, scale=ones(2)),
        ValueError,
        r"scale must be a number or a scalar array, but its shape is \(2,\)",
    ),
    "soft_cap": (lambda c: attend(c, soft_cap=0.0), ValueError, "soft_cap must be a finite number above 0, not 0.0"),
    "window": (lambda c: attend(c, window=0), ValueError, "window must be an integer from 1 .* not 0: None means no"),
    "window, a word": (lambda c: attend(c, window="a"), ValueError, "window must be an integer, not 'a'"),
    "window, a part": (lambda c: attend(c, window=2.5), ValueError, "window must be an integer, not 2.5"),
    "window, NaN": (lambda c: attend(c, window=float("nan")), ValueError, "window must be an integer, not nan"),
    "chunk": (
        lambda c: attend(c, chunk=2),
        TypeError,
        "attention takes no chunk: a layer's chunk is its LayerConfig's",
    ),
    "what kernels take": (
        lambda c: attend(c, lengths=ones(3)),
        TypeError,
        "attention takes no lengths: it takes alibi, blocks, cascade, causal, .*, window",
    ),
    "sinks": (
        lambda c: attend(c, sinks=ones(2)),
        ValueError,
        r"sinks must have one entry for each of the 4 query heads, but its shape is \(2,\)",
    ),
    "mask": (
        lambda c: attend(c, mask=ones(3, 1, 20)),
        ValueError,
        r"mask must be bool\[3, 1, C\], not float32\[3, 1, 20\]",
    ),
    "implementation": (
        lambda c: attend(c, implementation="cuda"),
        ValueError,
        "implementation must be None or one of xla, .*, not 'cuda'",
    ),
    # Existing blocks.
    "id out of range": (
        lambda c: from_blocks(tables=[[2, 0], [3, 0]]),
        ValueError,
        r"tables\[1, 0\] is 3, but the blocks are 0 to 2",
    ),
    "negative id": (
        lambda c: from_blocks(tables=[[2, -1], [1, 0]]),
        ValueError,
        r"tables\[0, 1\] is -1, but the blocks are 0 to 2",
    ),
    "beyond the table": (
        lambda c: from_blocks(max_seq_len=9),
        ValueError,
        "max_seq_len=9 is beyond the table: 2 blocks of 4 hold 8 tokens",
    ),
    "long row": (
        lambda c: from_blocks(lengths=[9, 3]),
        ValueError,
        "lengths must be from 0 to max_seq_len = 8, but row 0 has 9",
    ),
    "negative row length": (
        lambda c: from_blocks(lengths=[6, -3]),
        ValueError,
        "lengths must be from 0 to max_seq_len = 8, but row 1 has -3",
    ),
    "shared tail": (
        lambda c: from_blocks(tables=[[2, 1], [1, 0]]),
        ValueError,
        "Block 1 is the partial last block of row 0, .* only full blocks can be shared",
    ),
    "tables and lengths": (
        lambda c: from_blocks(lengths=[6]),
        ValueError,
        r"tables must be \[S, M\] and lengths \[S\], but their shapes are \(2, 2\) and \(1,\)",
    ),
    "float tables": (
        lambda c: from_blocks(tables=[[2.0, 0], [1, 0]]),
        ValueError,
        "must be integers, not float64 and int64",
    ),
    "no arrays": (lambda c: from_blocks(k=[], v=[]), ValueError, "one array per layer each, but have 0 and 0"),
    "three axes": (
        lambda c: from_blocks(k=[BLOCKS[0]], v=[BLOCKS[0]]),
        ValueError,
        r"must be alike and have four axes, but are \(2, 4, 8\)",
    ),
    "layers of other sizes": (
        lambda c: from_blocks(k=[BLOCKS, BLOCKS[:2]], v=[BLOCKS, BLOCKS[:2]]),
        ValueError,
        "Layer 1 has 2 blocks of 4 tokens, but layer 0 has 3 of 4",
    ),
    "layers unlike arrays": (
        lambda c: from_blocks(layers=[LayerConfig(num_kv_heads=4, head_dim=8)]),
        ValueError,
        r"layers say .* \[\(4, 8\)\], but the arrays have \[\(2, 8\)\]",
    ),
    "axis order": (
        lambda c: from_blocks(layout="bhsd"),
        ValueError,
        "layout must be 'head_major' or 'token_major', not 'bhsd'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_message(name, cache):
    call, error, words = CALLS[name]
    before = jax.tree.map(np.array, cache)
    with pytest.raises(error, match=words) as raised:
        call(cache)
    assert type(raised.value) is error
    message = str(raised.value)
    assert message[-1] == "." and "\n" not in message
    jax.tree.map(np.testing.assert_array_equal, cache, before)


GIVEN = [{"num_blocks": 8}, {"max_tokens": 18}, {"group_blocks": [7, 6]}, {"memory_bytes": 400}]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: next(iter(given)))
def test_what_to_raise_is_what_was_given(given):
    """With layers that have windows their blocks follow from it."""
    (name,), sizes = given, {"max_seqs": 2, "max_seq_len": 48, "block_size": 2, "step_tokens": 4}
    config = CacheConfig.from_model(Checksum(), **sizes, **given)
    assert config.replace(dtype="bfloat16").size_argument == name == shard_config(config, 1, "rows").size_argument
    assert config.replace(num_blocks=7).size_argument == "num_blocks"
    cache = jaxkv.extend(jaxkv.init(config), [6, 0])
    with pytest.raises(jaxkv.OutOfBlocks, match=f"or raise the cache's {name}\\."):
        jaxkv.check(jaxkv.extend(cache, [30, 0]))
    prefix = jaxkv.PrefixCache(config, max_pinned=0)
    prefix.insert(cache, 0, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=f"unpin others, or raise {name}\\."):
        prefix.pin([1, 2, 3, 4])
    assert f": raise {name}, or lower max_new_tokens" in jaxkv.Engine(Checksum(), **sizes, **given).problem([1] * 20, 9)


def test_row_index_is_checked_when_the_cache_is_traced(cache):
    with pytest.raises(IndexError, match="row must be an integer from 0 to 2, not 3"):
        jax.jit(lambda c: c.token(3, 0))(cache)
    with pytest.raises(ValueError, match="gather inside jit needs max_len="):
        jax.jit(lambda c: jaxkv.gather(c, 0, layer=0))(cache)


def test_attention_without_a_cache_names_what_attends_without_one():
    x = jnp.ones((1, 2, 1, 8))
    with pytest.raises(ValueError, match=r"not NoneType\. Without a cache, as in training, call jax\.nn\.dot"):
        jaxkv.attention(x, x, x, None, layer=0)
