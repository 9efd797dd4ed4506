"""Bad calls of the API: each argument of each function with every value that it cannot have.

Each is one sentence that names the argument, and the state is valid after it. (Those of the command line and of
checkpoints stand with them.)
"""

import functools
import inspect
import re
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import Checksum

import jaxkv
import jaxkv.convert
import jaxkv.scores
import jaxkv.testing
from jaxkv._core.config.fields import EngineFields
from jaxkv._engine.frontend import build

LAYER = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
CONFIG = jaxkv.CacheConfig(layers=(LAYER,), max_seqs=2, max_seq_len=64, num_blocks=8, dtype="float32")
NO_NUMBERS = ["1", "", b"1", [], [1], {}, object(), 1j, None, True, np.bool(True), np.ones(2), float("nan")]
NO_SIZES = [*NO_NUMBERS, 1.5, np.float32(2), 0, -1, 2**31, 10**30, float("inf"), 10**5000]
NO_ROWS = ["1", "", b"1", [[0]], {}, object(), 1j, None, 1.5, [0.5], -1, 2, [0, 2], [-1], 2**40, float("nan"), 10**5000,
           np.ones((2, 3))]  # fmt: skip
NO_COUNTS = ["1", [1], [1, 1, 1], [[1, 1]], [1.5, 1], [-1, 0], [None, 1], ["a", 1], {}, object(), None, 1, [True, "a"]]
NO_TOKENS = ["ab", [1.5], [[1]], {}, object(), None, 7, ["a"], [None]]
NO_ARRAYS = [None, 1, "a", [], [1, 2], {}, object(), np.ones(3), np.ones((2, 3, 2, 9)), np.ones((3, 3, 2, 8))]
NO_CONFIGS = [None, 1, "a", {}, [], object(), LAYER]
NO_LISTS = ["1", "", b"1", {}, {"a": 1}, object(), 1j, None, 1, 1.5, True, np.array("a"), jnp.int32(2)]
NO_WORDS = [
    "",
    "a",
    1,
    1.5,
    True,
    [],
    ["a"],
    [[]],
    {},
    {"a": 1},
    object(),
    1j,
    np.ones(2),
    np.ones((2, 3)),
    jnp.ones(2),
]
NO_SCALES = [*NO_NUMBERS, 0, -1, 10**400, float("inf"), np.array(-1.0)]
NO_BUDGETS = [*NO_NUMBERS, 1.5, -1, 10**30, [1, -1], [1.5, 1], [1, 1, 1], [[1, 1]]]
NO_ARRAYS_AT_ALL = [None, 1, "a", b"1", {}, object(), [10**30, 1], [None], ["a"], np.array("a"), True, [1]]
NO_LENGTHS = ["a", {}, object(), None, 1.5, True, -1, 4, 2**40, np.int64(2**40), [2**40, 1], [1], [1.5, 1], [-1, 1]]
NO_FLAGS = ["yes", "", 1, 0, 1.5, None, [], {}, object(), np.ones(2), np.array(True)]
NO_LAYERS = [None, "0", 1, -1, 1.5, [], {}, object(), True, 10**30, 10**5000, np.ones((2, 3))]


def layer(**fields):
    return jaxkv.LayerConfig(**{"num_kv_heads": 2, "head_dim": 8} | fields)


def config(**fields):
    return jaxkv.CacheConfig(**{"layers": (LAYER,), "max_seqs": 2, "max_seq_len": 64, "num_blocks": 8} | fields)


@functools.cache
def indexed():
    return jaxkv.extend(jaxkv.init(config(layers=(layer(index_dim=4),))), [3, 3])


def load(cache, **arguments):
    with tempfile.TemporaryDirectory() as folder:
        jaxkv.save(f"{folder}/a", cache)
        jaxkv.load(f"{folder}/a", **arguments)


def from_blocks(**arguments):
    blocks = np.ones((3, 2, 4, 8), np.float32)
    given = {"k": [blocks], "v": [blocks], "tables": [[2, 0], [1, 0]], "lengths": [6, 3]}
    return jaxkv.convert.from_blocks(**given | arguments)


def score(cache, name, **arguments):
    given = {"expected_attention": {"rotate": lambda x, _: x}, "quest": {"num_blocks": 2}}.get(name, {})
    return getattr(jaxkv.scores, name)(cache, layer=0, **{"q": ONES, **given} | arguments)


def choose(**arguments):
    given = {"q": np.ones((2, 3, 2, 4), np.float32), "weights": np.ones((2, 3, 2), np.float32), "top_k": 2}
    return jaxkv.scores.indexer(indexed(), layer=0, **given | arguments)


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
    "index_dim": (lambda c, p, x: layer(index_dim=x), without(NO_SIZES, None)),
    "plan_step top_k": (lambda c, p, x: jaxkv.plan_step(c, (2, 3), top_k=x), without(NO_SIZES, None)),
    "index_k": (lambda c, p, x: jaxkv.write_index(indexed(), x, layer=0), NO_ARRAYS),
    "tokens": (lambda c, p, x: jaxkv.attend(ONES, c, layer=0, tokens=x), without(NO_ARRAYS, None)),
    **{
        f"{name} scale": (lambda c, p, x, name=name: score(c, name, scale=x), without(NO_SCALES, None))
        for name in ("snapkv", "tova", "observed_attention", "quest")
    },
    **{
        f"{name} q": (lambda c, p, x, name=name: score(c, name, q=x), NO_ARRAYS)
        for name in ("snapkv", "tova", "observed_attention", "expected_attention", "quest")
    },
    "rotate": (lambda c, p, x: score(c, "expected_attention", rotate=x), without(NO_WORDS, object())),
    "ada budget": (lambda c, p, x: jaxkv.scores.ada(np.ones((2, 2, 64), np.float32), x), NO_BUDGETS),
    "ada score": (lambda c, p, x: jaxkv.scores.ada(x, 3), NO_ARRAYS),
    "Eviction.budget": (lambda c, p, x: jaxkv.Eviction("knorm", budget=x), [*NO_WORDS, None]),
    "Eviction.by": (lambda c, p, x: jaxkv.Eviction("knorm", by=x), NO_WORDS),
    "permute seed": (lambda c, p, x: jaxkv.testing.permute_blocks(c, x), [*NO_NUMBERS, -1, 1.5]),
    "temp_fraction": (lambda c, p, x: jaxkv.testing.assert_no_copy(None, c, temp_fraction=x), [*NO_NUMBERS, -1]),
    "indexer top_k": (lambda c, p, x: choose(top_k=x), NO_SIZES),
    "indexer q": (lambda c, p, x: choose(q=x), NO_ARRAYS),
    "indexer weights": (lambda c, p, x: choose(weights=x), NO_ARRAYS),
    "shares_with": (lambda c, p, x: layer(shares_with=x), without(NO_SIZES, None, 0)),
    "LayerConfig.dtype": (lambda c, p, x: layer(dtype=x), ["int3", "", 1, [], {}, object(), "float64", np.int32]),
    "layers": (lambda c, p, x: config(layers=x), [*without(NO_SIZES, (LAYER,)), *NO_LISTS]),
    "evict": (lambda c, p, x: layer(evict=x), NO_WORDS),
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
    "layout": (lambda c, p, x: config(layout=x), [None, "dense", *NO_WORDS]),
    "residual_length": (lambda c, p, x: config(dtype="int4", residual_length=x), without(NO_SIZES, None)),
    "snapshot_every": (lambda c, p, x: config(snapshot_every=x), [*without(NO_SIZES, None), 16]),
    "states": (
        lambda c, p, x: layer(states=x),
        [*without(NO_LISTS, None), [1.5], [1], ["ab"], [()]],
    ),
    "from_model step_tokens": (lambda c, p, x: from_model(step_tokens=x), without(NO_SIZES, None)),
    "from_model mesh": (lambda c, p, x: from_model(mesh=x), NO_WORDS),
    "a list of group_blocks": (
        lambda c, p, x: config(num_blocks=None, group_blocks=x),
        [*without(NO_LISTS, None), [1.5], ["a"], [[1]], [0]],
    ),
    "uniform window": (
        lambda c, p, x: jaxkv.CacheConfig.uniform(
            num_layers=2, num_kv_heads=1, head_dim=8, max_seqs=1, max_seq_len=8, windows=x
        ),
        ["1", "", b"1", {}, object(), 1j, 1.5, True, np.array("a"), 0, [0, 0], [1], ["a", 1], [[1], [1]]],
    ),
    "append k": (lambda c, p, x: jaxkv.append(c, x, [ONES], [1, 1]), [*NO_LISTS, [1], ["a"], [ONES, ONES]]),
    "append v": (lambda c, p, x: jaxkv.append(c, [ONES], x, [1, 1]), [*NO_LISTS, [1], ["a"], [ONES, ONES]]),
    "a step's token ax": (
        lambda c, p, x: jaxkv.plan_step(c, x),
        ["1", "", b"1", {}, object(), 1j, None, 1.5, True, np.array("a"), [[2, 3]], ONES, (2, 1.5), (1, 2, 3)],
    ),
    "attend implementation": (lambda c, p, x: jaxkv.attend(ONES, c, layer=0, implementation=x), NO_WORDS),
    "write implementation": (lambda c, p, x: jaxkv.write(c, ONES, ONES, layer=0, implementation=x), NO_WORDS),
    "attention implementation": (
        lambda c, p, x: jaxkv.attention(*[np.ones((2, 20, 2, 8))] * 3, c, layer=0, implementation=x),
        NO_WORDS,
    ),
    "attend scale": (
        lambda c, p, x: jaxkv.attend(ONES, c, layer=0, scale=x),
        ["1", "", [], {}, object(), 1j, True, 0, -1, np.ones(2), np.array("a"), float("nan"), 10**40],
    ),
    "stacked": (lambda c, p, x: config(stacked=x), [None, "", "yes", 1, 0, [], {}, object()]),
    "join_kv": (lambda c, p, x: config(join_kv=x), ["", "yes", 1, 0, [], {}, object()]),
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
        [*without_ones(NO_NUMBERS), 1.5, -1, [1, 1], [1.5], ["a"], 2**31, 10**30],
    ),
    "config": (lambda c, p, x: jaxkv.init(x), NO_CONFIGS),
    "specs config": (lambda c, p, x: jaxkv.partition_specs(x), NO_CONFIGS),
    "index config": (lambda c, p, x: jaxkv.PrefixCache(x), NO_CONFIGS),
    "left_align counts": (
        lambda c, p, x: jaxkv.left_align([[1, 2, 3]], x),
        [[4], [-1], [10**6], [1.5], ["a"], None, 1],
    ),
    "last counts": (lambda c, p, x: jaxkv.last([[1, 2, 3]], x), [[4], [-1], [10**6], [1.5], ["a"], None, 1]),
    "left_align x": (lambda c, p, x: jaxkv.left_align(x, [1, 1]), NO_ARRAYS_AT_ALL),
    "last x": (lambda c, p, x: jaxkv.last(x, [1, 1]), NO_ARRAYS_AT_ALL),
    "merge outs": (lambda c, p, x: jaxkv.merge_attention(x, ONES[..., 0]), [*NO_ARRAYS_AT_ALL, ONES.astype(int)]),
    "merge lses": (lambda c, p, x: jaxkv.merge_attention(ONES, x), [*NO_ARRAYS_AT_ALL, ONES[..., 0].astype(int)]),
    "from_dense k": (lambda c, p, x: jaxkv.convert.from_dense(x, [ONES], [1, 1]), [*NO_LISTS, [1], ["a"], [ONES] * 2]),
    "from_dense v": (lambda c, p, x: jaxkv.convert.from_dense([ONES], x, [1, 1]), [*NO_LISTS, [1], ["a"], [ONES] * 2]),
    "from_dense lengths": (lambda c, p, x: jaxkv.convert.from_dense([ONES], [ONES], x), NO_LENGTHS),
    "from_blocks k": (lambda c, p, x: from_blocks(k=x), [*NO_LISTS, [1], ["a"], [ONES] * 2]),
    "from_blocks v": (lambda c, p, x: from_blocks(v=x), [*NO_LISTS, [1], ["a"], [ONES] * 2]),
    "from_blocks max_seq_len": (lambda c, p, x: from_blocks(max_seq_len=x), without(NO_SIZES, None)),
    "from_blocks layers": (lambda c, p, x: from_blocks(layers=x), [*without(NO_LISTS, None), [1], ["a"], [LAYER] * 2]),
    "from_blocks layout": (lambda c, p, x: from_blocks(layout=x), NO_WORDS),
    "past_key_values": (lambda c, p, x: jaxkv.convert.from_hugging_face(x), [*NO_LISTS, [], [1], ["a"], [[ONES]]]),
    "padding": (lambda c, p, x: jaxkv.convert.from_hugging_face([(ONES, ONES)], padding=x), NO_WORDS),
    "by_rows function": (lambda c, p, x: jaxkv.by_rows(x), NO_WORDS),
    "by_rows whole": (lambda c, p, x: jaxkv.by_rows(len, whole=x), [*NO_LISTS, [-1], [1.5], ["a"], [True]]),
    "match": (lambda c, p, x: p.adopt(c, 1, x), [None, 1, "a", [], {}, object()]),
    "save rows": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, rows=x), without(NO_ROWS, None)),
    "model": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, model=x), [1, 1.5, b"a", [], {}, object(), True]),
    "rename model": (lambda c, p, x: p.rename(x), [1, 1.5, b"a", [], {}, object(), True, np.ones((2, 3))]),
    "load model": (lambda c, p, x: load(c, model=x), [1, 1.5, b"a", [], {}, object(), True, np.ones((2, 3))]),
    "load config": (lambda c, p, x: load(c, config=x), without(NO_CONFIGS, None)),
    "load into a cache": (lambda c, p, x: load(c, into=x), [1, "", [], {}, object(), ONES, CONFIG, LAYER]),
    "load rows": (lambda c, p, x: load(c, rows=x), [*without(NO_LISTS, None), 10**5000, [0], [0, 0], [0, 2], [0, "a"]]),
    "partial_windows": (lambda c, p, x: load(c, partial_windows=x), NO_FLAGS),
    "metadata": (lambda c, p, x: jaxkv.save("/nonexistent/a", c, metadata=x), [1, "a", [1], {"a": object()}, object()]),
}

# Whatever takes a cache and is given something else.
OF_A_CACHE = {
    "append": lambda x: jaxkv.append(x, [ONES], [ONES], [1, 1]),
    "block_bounds": lambda x: jaxkv.block_bounds(x, layer=0),
    "check": jaxkv.check,
    "permute_blocks": jaxkv.testing.permute_blocks,
    "poison": jaxkv.testing.poison,
    "check_invariants": jaxkv.check_invariants,
    "evict": lambda x: jaxkv.evict(x, layer=0),
    "extend": lambda x: jaxkv.extend(x, [1, 1]),
    "fork": lambda x: jaxkv.fork(x, 0, 1),
    "free": lambda x: jaxkv.free(x, 0),
    "gather": lambda x: jaxkv.gather(x, 0, layer=0),
    "keep": lambda x: jaxkv.keep(x, [[0], [0]]),
    "plan_step": lambda x: jaxkv.plan_step(x, (2, 1)),
    "reorder": lambda x: jaxkv.reorder(x, [0, 1]),
    "reserve": lambda x: jaxkv.reserve(x, [1, 1]),
    "save": lambda x: jaxkv.save("/nonexistent/a", x),
    "stats": jaxkv.stats,
    "swap_out": lambda x: jaxkv.swap_out(x, 0),
    "to_hugging_face": jaxkv.convert.to_hugging_face,
    "truncate": lambda x: jaxkv.truncate(x, [0, 0]),
}

ROOM = {"max_seqs": 3, "max_seq_len": 48, "block_size": 3, "num_blocks": 18, "step_tokens": 7}
MODEL = Checksum((None, 7))
NO_PROMPTS = [*NO_TOKENS, [], [-1], [10**30], [float("nan")], [True], "1", b"1", object()]


def submit(engine, **arguments):
    engine.submit(**{"prompt": [1, 2], "max_new_tokens": 2} | arguments)


def make(_, **arguments):
    jaxkv.Engine(MODEL, **{"prefix_cache": True} | ROOM | arguments)


def generate(_, **arguments):
    jaxkv.generate(MODEL, **{"prompts": [[1, 2]], "max_new_tokens": 2} | ROOM | arguments)


def from_model(**arguments):
    return jaxkv.CacheConfig.from_model(MODEL, **{"max_seqs": 2, "max_seq_len": 64} | arguments)


def stream(engine, **arguments):
    engine.stream(**{"prompts": [[1, 2]], "max_new_tokens": 2} | arguments)


def warm_up(engine, **arguments):
    engine.warmup(progress=False, **arguments)


# Of an engine: who is called with a value for which argument, and the values.
OF_AN_ENGINE = [
    (submit, "min_p", [*NO_NUMBERS, -1, 1.5, float("inf")]),
    (submit, "seed", [*without(NO_NUMBERS, None), 1.5, 10**30]),
    (submit, "priority", [*NO_NUMBERS, 1.5, 10**30]),
    (submit, "hook_args", ["a", 1, [], {}, {"a": 1}, object()]),
    (submit, "keep_prefix", ["a", 1, 0, None, [], {}, object(), np.ones(2)]),
    (submit, "adapter", [*NO_NUMBERS, -1, 1, 1.5]),
    (submit, "stop", [b"1", 1, 1.5, {}, object(), True, "a", ["a"], [1], [[]], [["a"]], [[-1]], np.array(2)]),
    (submit, "include_stop", ["a", 1, 0, None, [], {}, object(), np.ones(2)]),
    (submit, "tokenizer", ["a", 1, [], {}, object(), True]),
    (submit, "on_token", ["a", 1, [], {}, object(), True]),
    (make, "long_prefill_tokens", without(NO_SIZES, None)),
    (make, "draft", ["a", "", 1, [], {}, object(), True]),
    (lambda _, draft_branches: make(_, draft="ngram", draft_branches=draft_branches), "draft_branches", NO_SIZES),
    (lambda _, evict: make(_, prefix_cache=False, evict=evict), "evict", ["a", 1, [], {}, object(), np.ones(2)]),
    (lambda _, prefill: make(_, prefix_cache=False, prefill=prefill), "prefill", [1, [], {}, object(), np.ones(2)]),
    (make, "deterministic", ["a", 1, 0, None, [], {}, object(), np.ones(2)]),
    (make, "max_waiting", without(NO_SIZES, None)),
    (make, "disk", [1, 1.5, [], {}, object(), True, np.ones(2)]),
    (make, "snapshot_bytes", [*without(NO_NUMBERS, None), -1]),
    (make, "layout", ["dense", *NO_WORDS]),
    (make, "residual_length", without(NO_SIZES, None)),
    (make, "snapshot_every", without(NO_SIZES, None)),
    (submit, "prompt", NO_PROMPTS),
    (submit, "max_new_tokens", [*NO_NUMBERS, 0, -1, 2.5, 10**30, float("inf")]),
    (submit, "temperature", [*NO_NUMBERS, -1, 1e40, float("inf"), 10**5000]),
    (submit, "top_k", [*NO_NUMBERS, -1, 1.5, 10**30]),
    (submit, "top_p", [*NO_NUMBERS, 0, -1, 1.5, float("inf")]),
    (submit, "eos", ["1", "", b"1", -1, 1.5, [1.5], ["a"], [[1]], object(), True, [True], 1j, float("nan"), 10**30]),
    (submit, "salt", [1, 1.5, [], {}, object(), True, ("a",)]),
    (submit, "n", NO_SIZES),
    (submit, "logprobs", [*without(NO_NUMBERS, None), -1, 1.5, 10**30]),
    (submit, "prompt_logprobs", [*without(NO_NUMBERS, None, True, np.bool(True)), -1, 1.5, 10**30]),
    (lambda e, model: e.update(model), "model", [None, 1, "small", {}, object()]),
    (lambda e, keep: e.release(keep=keep), "keep", ["yes", 1, 0, None, []]),
    (make, "max_seqs", NO_SIZES),
    (make, "max_seq_len", without(NO_SIZES, None)),
    (lambda _, longest: make(_, longest=longest, max_seq_len=None), "longest", NO_SIZES),
    (make, "longest", NO_SIZES),
    (make, "draft_tokens", NO_SIZES),
    (lambda _, model: jaxkv.Engine(model), "model", [None, "small", {}, 1, object()]),
    (make, "step_tokens", NO_SIZES),
    (make, "steps_per_dispatch", NO_SIZES),
    (make, "seed", [*NO_NUMBERS, 1.5, 10**30]),
    (make, "spill_bytes", [*NO_NUMBERS, -1]),
    (make, "host_bandwidth", [*NO_NUMBERS, 0, -1]),
    (make, "swap", [None, *NO_WORDS]),
    (make, "num_blocks", without(NO_SIZES, None)),
    (lambda _, group_blocks: make(_, num_blocks=None, group_blocks=group_blocks), "group_blocks",
     [*without(NO_LISTS, None), [1.5], ["a"], [0], [None], [1]]),
    (make, "block_size", without(NO_SIZES, None)),
    (lambda _, memory_bytes: make(_, memory_bytes=memory_bytes, num_blocks=None), "memory_bytes",
     [*without(NO_NUMBERS, None), -1, 0, "1GB", 1e30]),
    (lambda _, dtype: make(_, cache_dtype=dtype), "dtype", ["int3", "", 1, [], {}, object()]),
    (make, "prefix_cache", ["yes", 1, 0, None, []]),
    (make, "logits_hook", [1, "a", [], {}, True]),
    (generate, "prompts", [None, 1, "abc", {}, object(), np.int32(1)]),
    (lambda _, prompt: generate(_, prompts=[prompt]), "prompt", NO_PROMPTS),
    (generate, "max_new_tokens", [*without_ones(NO_NUMBERS), 0, -1, [1, 2], [2.5]]),
    (stream, "prompts", [None, 1, "abc", {}, object(), np.int32(1)]),
    (stream, "seed", [1.5, "a", 10**30]),
    (warm_up, "kinds", [["a"], [1], None, 1, "greedy", [None], [[]], np.ones((2, 3))]),
    (lambda e, logprobs: warm_up(e, logprobs=logprobs, kinds=[]), "logprobs", [[-1], ["a"], None, 1, "1", [1.5]]),
    (lambda e, output: e.recompute([1, 2], output), "output", [None, 1, "a", [1.5], [None], {}]),
    (lambda e, prompt: e.recompute(prompt, [1]), "prompt", [None, 1, "a", [1.5], [None], [], {}]),
    (lambda e, output: e.recompute([1, 2], output), "output", [[-1], [2**31]]),
    (lambda e, index: e.recompute([1, 2], [3], index=index), "index", without(NO_SIZES, 0)),
    (lambda e, request: e.cancel(request), "request", [None, 1, "a", [], object()]),
    (lambda e, timeout: e.wait(timeout), "timeout", [*without(NO_NUMBERS, None), 1e30, float("inf")]),
    (lambda e, timeout: e.drain(timeout), "timeout", [*without(NO_NUMBERS, None), 1e30, float("inf")]),
    (lambda e, progress: e.warmup(kinds=[], progress=progress), "progress", NO_FLAGS),
    (generate, "progress", NO_FLAGS),
]  # fmt: skip


def assert_is_a_sentence(error, name, value):
    sentence = str(error)
    assert name in sentence.lower(), (type(value), sentence)
    assert len(sentence) < 400 and sentence.endswith(".") and "\n" not in sentence, sentence


@pytest.fixture(scope="module")
def engine():
    return jaxkv.Engine(MODEL, **ROOM, prefix_cache=True)


@pytest.mark.parametrize("i", range(len(OF_AN_ENGINE)), ids=lambda i: OF_AN_ENGINE[i][1])
def test_so_is_one_of_an_engine(i, engine):
    call, name, values = OF_AN_ENGINE[i]
    for value in values:
        with pytest.raises(ValueError) as error:
            call(engine, **{name: value})
        assert_is_a_sentence(error.value, name, value)
    assert not engine._core.is_busy and engine.steps == 0


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
        assert_is_a_sentence(error.value, name.split()[-1].split(".")[-1], value)
    prefix.check_invariants(cache)
    jaxkv.check_invariants(cache)


def test_there_are_enough():
    assert sum(len(v) for _, v in CALLS.values()) + sum(len(v) for _, _, v in OF_AN_ENGINE) > 1000


@pytest.mark.parametrize("name", OF_A_CACHE)
def test_what_is_no_cache_is_called_so(name, state):
    for value in (None, 1, "a", [], object(), CONFIG, ONES):
        with pytest.raises(ValueError, match=r"cache must be a Cache, as jaxkv\.init makes one, not ") as error:
            OF_A_CACHE[name](value)
        assert_is_a_sentence(error.value, "cache", value)
    with pytest.raises(ValueError, match="must be the whole cache, not one of its layers: cache") as error:
        OF_A_CACHE[name](state[0].layers[0])
    assert_is_a_sentence(error.value, "cache", "a layer")


def test_positions_are_asked_of_a_cache_or_a_layer():
    for value in (None, 1, "a", [], object()):
        with pytest.raises(ValueError, match="cache must be a Cache"):
            jaxkv.positions(value, (2, 1))


@pytest.mark.parametrize(
    "name, meant",
    [("stop", "eos"), ("max_tokens", "max_new_tokens"), ("max_length", "max_seq_len"), ("do_sample", "temperature")],
)
def test_what_others_call_an_option_is_named(name, meant):
    with pytest.raises(TypeError, match=f"Engine and generate take no {name}: did you mean {meant}"):
        generate(None, **{name: 1})
    with pytest.raises(TypeError, match=r"take no colour: options are .*prefix_cache, .*; and of a cache block_size, "):
        make(None, colour="red")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("prefix_caching", "prefix_cache"),
        ("prefix_cach", "prefix_cache"),
        ("step_token", "step_tokens"),
        ("max_seq", "max_seqs"),
        ("block_sise", "block_size"),
        ("temprature", "temperature"),
        ("max_model_length", "max_seq_len"),  # nearly another's name
        ("enable_prefix_caching", "prefix_cache"),
        ("gpu_memory_utilization", "memory_bytes"),
        ("tensor_parallel_size", "the mesh of the model, as of jaxkv.models.load"),
        ("max_num_batched_tokens", "step_tokens"),
    ],
)
def test_a_misspelt_option_is_told_its_name(name, meant):
    for call in (generate, make):
        with pytest.raises(TypeError, match=f"Engine and generate take no {name}: did you mean {re.escape(meant)}"):
            call(None, **{name: 1})


def test_what_others_call_an_option_is_one_of_ours():
    """But for what is no option of its own."""
    ours = {*inspect.signature(jaxkv.Engine).parameters, *inspect.signature(jaxkv.generate).parameters}
    ours |= EngineFields.__annotations__.keys()
    others = {meant for meant in build.MEANT.values() if " " not in meant and not meant.startswith("jaxkv.")}
    assert others <= ours and not build.MEANT.keys() & ours


SHARED = [
    ("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("stop_token_ids", "eos"),
    ("num_return_sequences", "n"), ("max_seq", None), ("best_of", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), SHARED)
def test_a_misspelt_argument_of_a_request_is_told_its_name(name, meant, engine):
    for call, what in ((submit, "submit"), (stream, "stream")):
        if meant == "n" and what == "stream":
            continue
        said = f"did you mean {meant}\\?" if meant else "it takes .*temperature, .*top_k, .*\\."
        with pytest.raises(TypeError, match=f"^{what} takes no {name}: {said}$"):
            call(engine, **{name: 1})
    assert engine.is_idle


@pytest.mark.parametrize(
    ("make_config", "name", "said"),
    [
        (config, "blocksize", "CacheConfig takes no blocksize: did you mean block_size?"),
        (config, "cache_size", "CacheConfig takes no cache_size: it takes layers, max_seqs, max_seq_len, num_blocks, "),
        (layer, "sliding_window", "LayerConfig takes no sliding_window: it takes num_kv_heads, head_dim, "),
        (layer, "num_heads", "LayerConfig takes no num_heads: did you mean num_kv_heads?"),
        (from_model, "num_block", "CacheConfig takes no num_block: did you mean num_blocks?"),
    ],
)
def test_a_misspelt_field_is_told_its_name(make_config, name, said):
    with pytest.raises(TypeError) as error:
        make_config(**{name: 1})
    assert str(error.value).startswith(said)
