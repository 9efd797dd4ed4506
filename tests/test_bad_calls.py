"""Bad calls of the API: each argument of each function with every value that it cannot have.

Each is one sentence that names the argument, and the state is valid after it. (Those of the command line and of
checkpoints stand with them.)
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

LAYER = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
CONFIG = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=2, max_seq_len=64, num_blocks=8, dtype="float32")
NO_NUMBERS = ["1", "", b"1", [], [1], {}, object(), 1j, None, True, np.bool(True), np.ones(2), float("nan")]
NO_SIZES = [*NO_NUMBERS, 1.5, np.float32(2), 0, -1, 2**31, 10**30, float("inf"), 10**5000]
NO_ROWS = ["1", "", b"1", [[0]], {}, object(), 1j, None, 1.5, [0.5], -1, 2, [0, 2], [-1], 2**40, float("nan")]
NO_COUNTS = ["1", [1], [1, 1, 1], [[1, 1]], [1.5, 1], [-1, 0], [None, 1], ["a", 1], {}, object(), None, 1, [True, "a"]]
NO_TOKENS = ["ab", [1.5], [[1]], {}, object(), None, 7, ["a"], [None]]
NO_ARRAYS = [None, 1, "a", [], [1, 2], {}, object(), np.ones(3), np.ones((2, 3, 2, 9)), np.ones((3, 3, 2, 8))]
NO_LAYERS = [None, "0", 1, -1, 1.5, [], {}, object(), True, 10**30]


def layer(**fields):
    return jaxkv.LayerConfig(**{"num_kv_heads": 2, "head_dim": 8} | fields)


def config(**fields):
    return jaxkv.CacheConfig(**{"layers": (LAYER,), "max_seqs": 2, "max_seq_len": 64, "num_blocks": 8} | fields)


def without(values, *right):
    return [v for v in values if not any(v is r for r in right)]


def without_ones(values):
    return [v for v in values if not isinstance(v, list) or v != [1]]


ONES = np.ones((2, 3, 2, 8), np.float32)
# What is called with a value in the place of which argument, and the values.
CALLS = {
    "num_kv_heads": (lambda c, p, x: layer(num_kv_heads=x), NO_SIZES),
    "head_dim": (lambda c, p, x: layer(head_dim=x), NO_SIZES),
    "window": (lambda c, p, x: layer(window=x), without(NO_SIZES, None)),
    "shares_with": (lambda c, p, x: layer(shares_with=x), without(NO_SIZES, None, 0)),
    "LayerConfig.dtype": (lambda c, p, x: layer(dtype=x), ["int3", "", 1, [], {}, object(), "float64", np.int32]),
    "layers": (lambda c, p, x: config(layers=x), without(NO_SIZES, (LAYER,))),
    "max_seqs": (lambda c, p, x: config(max_seqs=x), NO_SIZES),
    "max_seq_len": (lambda c, p, x: config(max_seq_len=x), without(NO_SIZES, None)),
    "num_blocks": (lambda c, p, x: config(num_blocks=x), NO_SIZES),
    "max_tokens": (
        lambda c, p, x: config(num_blocks=None, max_tokens=x),
        [*NO_NUMBERS, 1.5, 0, -1, 10**30, float("inf"), 10**5000],
    ),
    "block_size": (lambda c, p, x: config(block_size=x), without(NO_SIZES, None)),
    "group_blocks": (lambda c, p, x: config(num_blocks=None, group_blocks=x), without_ones(without(NO_SIZES, None))),
    "head_dim_multiple": (lambda c, p, x: config(head_dim_multiple=x), without(NO_SIZES, None)),
    "layout": (lambda c, p, x: config(layout=x), [None, "", "dense", 1, [], {}, object(), True]),
    "stacked": (lambda c, p, x: config(stacked=x), [None, "", "yes", 1, 0, [], {}, object()]),
    "memory_bytes": (lambda c, p, x: CONFIG.with_memory(x), [*NO_NUMBERS, 0, -1, 1e30, 10**5000, float("inf")]),
    "step_tokens": (lambda c, p, x: CONFIG.with_memory(1e6, step_tokens=x), without(NO_SIZES, None)),
    "num_tokens": (lambda c, p, x: jaxkv.extend(c, x), NO_COUNTS),
    "target_lengths": (lambda c, p, x: jaxkv.reserve(c, x), NO_COUNTS),
    "lengths": (lambda c, p, x: jaxkv.truncate(c, x), NO_COUNTS),
    "order": (lambda c, p, x: jaxkv.reorder(c, x), [*NO_COUNTS, [0, 2]]),
    "src": (lambda c, p, x: jaxkv.fork(c, x, 1), NO_ROWS),
    "dst": (lambda c, p, x: jaxkv.fork(c, 0, x), NO_ROWS),
    "rows": (lambda c, p, x: jaxkv.free(c, x), NO_ROWS),
    "swap_out rows": (lambda c, p, x: jaxkv.swap_out(c, x), NO_ROWS),
    "host": (lambda c, p, x: jaxkv.swap_in(c, 1, x), [None, 1, "a", [], {}, object()]),
    "k": (lambda c, p, x: jaxkv.write(c, x, ONES, layer=0), NO_ARRAYS),
    "v": (lambda c, p, x: jaxkv.write(c, ONES, x, layer=0), NO_ARRAYS),
    "q": (lambda c, p, x: jaxkv.attend(x, c, layer=0), NO_ARRAYS),
    "layer": (lambda c, p, x: jaxkv.attend(ONES, c, layer=x), NO_LAYERS),
    "gather layer": (lambda c, p, x: jaxkv.gather(c, 0, layer=x), NO_LAYERS),
    "row": (lambda c, p, x: jaxkv.gather(c, x, layer=0), NO_ROWS),
    "shape, a token axis": (lambda c, p, x: jaxkv.positions(c, x), [(-1,), (1.5,), ("a",), (None,), (2, -1)]),
    "spill_bytes": (lambda c, p, x: jaxkv.PrefixCache(CONFIG, spill_bytes=x), [*NO_NUMBERS, -1, 10**5000]),
    "max_pinned": (lambda c, p, x: jaxkv.PrefixCache(CONFIG, max_pinned=x), [*NO_NUMBERS, -0.1, 1.1, 2]),
    "match tokens": (lambda c, p, x: p.match(x), NO_TOKENS),
    "insert tokens": (lambda c, p, x: p.insert(c, 0, x), NO_TOKENS),
    "pin tokens": (lambda c, p, x: p.pin(x), NO_TOKENS),
    "salt": (lambda c, p, x: p.match([1], salt=x), [1, 1.5, [], {}, object(), True, ("a",)]),
    "adapter": (lambda c, p, x: p.match([1], adapter=x), [1, b"a", [], {}, object(), True, ("a",)]),
    "insert row": (lambda c, p, x: p.insert(c, x, [1]), NO_ROWS),
    "adopt row": (lambda c, p, x: p.adopt(c, x, p.match([1])), NO_ROWS),
    "make_room num_blocks": (
        lambda c, p, x: p.make_room(c, x),
        [*without_ones(NO_NUMBERS), 1.5, [1, 1], [1.5], ["a"], 2**31, 10**30],
    ),
    "match": (lambda c, p, x: p.adopt(c, 1, x), [None, 1, "a", [], {}, object()]),
    "save rows": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, rows=x), without(NO_ROWS, None)),
    "model": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, model=x), [1, 1.5, b"a", [], {}, object(), True]),
    "metadata": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, metadata=x), [1, "a", [1], {"a": object()}, object()]),
}


@pytest.fixture(scope="module")
def state():
    cache, prefix = jaxkv.init(CONFIG), jaxkv.PrefixCache(CONFIG)
    kv = jnp.ones((1, 2, 20, 2, 8))
    cache = jaxkv.append(cache, kv, kv, [20, 0])
    return prefix.insert(cache, 0, list(range(20))), prefix


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_one_sentence(name, state):
    cache, prefix = state
    call, values = CALLS[name]
    for value in values:
        with pytest.raises((ValueError, IndexError)) as error:
            call(cache, prefix, value)
        sentence = str(error.value)
        assert name.split()[-1].split(".")[-1] in sentence, (value if len(str(type(value))) < 99 else "", sentence)
        assert len(sentence) < 400 and sentence.endswith(".") and "\n" not in sentence, sentence
    prefix.check_invariants(cache)
    jaxkv.check_invariants(cache)
