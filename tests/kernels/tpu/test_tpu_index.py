"""Scores by index keys and streamed choices by the TPU kernel, interpreted: XLA's choices, and NaN elsewhere."""

import functools
import importlib
import itertools
import pathlib
from typing import NamedTuple

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from planting import Plant, Sources

import pallas_kernels
from pallas_kernels import tpu
from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.index_keys import StoredIndex
from pallas_kernels.common.quantization import find_format
from pallas_kernels.tpu import index
from pallas_kernels.xla.chosen.index import select_tokens

pytestmark = pytest.mark.timeout(240, method="thread")
SOURCES = Sources(pathlib.Path(tpu.__file__).parent, "pallas_kernels.tpu")
names = (f"broken_tpu_index_{i}" for i in itertools.count())


class Choice(NamedTuple):
    """A step of rows with so many tokens before and in it, which choose."""

    before: tuple[int, ...] = (300, 0, 15, 16, 600)
    new: tuple[int, ...] = (1, 1, 0, 1, 1)
    top_k: int = 100
    heads: int = 3
    width: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    packed: bool = False
    options: tuple = ()  # of the mask
    q_dtype: str = "float32"


class Step(NamedTuple):
    q: jax.Array
    weights: jax.Array
    keys: jax.Array
    tables: jax.Array
    lengths: jax.Array
    new: jax.Array


DECODE = Choice()
TWO_ROWS = Choice(before=(150, 15), new=(1, 1), top_k=30, q_dtype="bfloat16")
CHOICES = {
    "two rows": TWO_ROWS,
    "decode": DECODE,
    "decode, float32": Choice(before=(130, 3, 255), new=(1, 1, 1), top_k=7, dtype="float32", block_size=24),
    "more rows than a tile has": Choice(before=tuple(range(0, 270, 27)), new=(1,) * 10, top_k=9, heads=8),
    "a window": Choice(options=(("window", 40),), top_k=30),
    "a window and first tokens": Choice(options=(("window", 40), ("sink_tokens", 5)), top_k=50),
    "chunks": Choice(options=(("chunk", 48),), top_k=20),
    "prefill": Choice(before=(120, 0, 40), new=(11, 0, 3), top_k=33),
    "mixed, packed": Choice(before=(120, 0, 40, 256), new=(9, 2, 1, 1), top_k=20, packed=True),
    "all": Choice(before=(100, 3), new=(1, 1), top_k=500),
    "none": Choice(before=(9, 3), new=(0, 0)),
}


def make_step(case: Choice, seed: int = 0) -> Step:
    """Small whole numbers, whose sums are exact in any order, so that many scores are equal. NaN in all that no row of
    the step owns."""
    draw = np.random.default_rng(seed)
    lengths = np.add(case.before, case.new)
    held = -(-lengths // case.block_size)
    tables, keys = np.zeros((len(held), max(1, *held) + 1), np.int32), None
    ids = iter(draw.permutation(held.sum() + 2) + 1)
    keys = np.full((held.sum() + 3, 1, 1, case.block_size, case.width), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for column in range(held[row]):
            block = tables[row, column] = next(ids)
            used = min(case.block_size, length - column * case.block_size)
            keys[block, 0, 0, :used] = draw.integers(-2, 3, (used, case.width))
    axes = (sum(case.new) + 2,) if case.packed else (len(case.new), max(1, *case.new))
    q = draw.integers(-2, 3, (*axes, case.heads, case.width)).astype(np.float32)
    weights = draw.integers(-4, 5, (*axes, case.heads)).astype(np.float32) / 4
    rows = (jnp.asarray(x, jnp.int32) for x in (tables, lengths, case.new))
    return Step(jnp.asarray(q, case.q_dtype), jnp.asarray(weights), jnp.asarray(keys, case.dtype), *rows)


def choose(case, select, step, **options):
    stored = StoredIndex(step.keys, None, find_format(None))
    batch, mask = PagedBatch(step.tables, step.lengths, step.new), MaskSpec(**dict(case.options))
    return select(step.q, step.weights, stored, batch, mask, case.top_k, **options)


def check(case, mode, module=index, seeds=(0,)):
    """Raises AssertionError unless choices are XLA's, one by one, of batches alike but for their numbers."""

    def run(steps, interpret):
        return jax.lax.map(lambda step: choose(case, module.select_tokens, step, interpret=interpret), steps)

    steps = [make_step(case, seed) for seed in seeds]
    found = interpreter.run(run, jax.tree.map(lambda *x: jnp.stack(x), *steps), mode=mode)
    for i, step in enumerate(steps):
        wanted = jax.jit(functools.partial(choose, case, select_tokens))(step)
        np.testing.assert_array_equal(found.position[i], wanted.position)
        np.testing.assert_array_equal(found.score[i], wanted.score)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    shrink(monkeypatch, index)


def shrink(monkeypatch, module):
    for name, size in (("STEP_TOKENS", 128), ("SCORED", 128), ("UNROLLED", 2)):
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("mode", interpreter.MODES)
@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_xla_s(name, mode):
    if not NIGHTLY and (name, mode) != ("two rows", "races"):
        pytest.skip("by day two rows choose in one mode")
    check(CHOICES[name], interpreter.MODES[mode])


@pytest.mark.skipif(not NIGHTLY, reason="200 batches")
@pytest.mark.parametrize("seed", range(20))
def test_random_batches(seed):
    draw = np.random.default_rng(seed)
    rows = int(draw.integers(1, 5))
    counts = draw.integers(0, 4, rows) if seed % 2 else draw.integers(0, 2, rows)
    before = draw.integers(0, 300, rows)
    case = Choice(
        tuple(map(int, before)), tuple(map(int, counts)), int(draw.integers(1, 200)), int(draw.integers(1, 9)),
        block_size=int(draw.choice([16, 32, 48])), dtype=str(draw.choice(["bfloat16", "float32"])),
        packed=bool(draw.integers(2)),
    )  # fmt: skip
    check(case, interpreter.PLAIN, seeds=range(10 * seed, 10 * seed + 10))


def broken(tmp_path, monkeypatch, *plants):
    """The kernel's module under another name, with mistakes planted in it."""
    name = next(names)
    SOURCES.write_copy(tmp_path, name, *plants)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"{name}.index")
    shrink(monkeypatch, module)
    return module


# name: (case, mode, what is planted).
CONTROLS = {
    "keys not awaited": (
        TWO_ROWS, "races",
        Plant("index:_kernel", "number + SLOTS - 1", "number"),
    ),
    "another row's keys": (
        TWO_ROWS, "plain",
        Plant("index:_kernel", "row_ref[tile * rows + safe] * columns", "row_ref[tile * rows] * columns"),
    ),
    "tokens that are not there yet": (
        TWO_ROWS, "plain",
        Plant("index:_select", "(at <= position) & (i < count)", "i < count"),
    ),
    "later ones of equal tokens": (
        TWO_ROWS, "plain",
        Plant("index:_select", "equal & (equal_before < wanted)", "equal & (equal_before >= wanted)"),
    ),
    "a threshold without its last bits": (
        TWO_ROWS, "plain",
        Plant("index:_select", "threshold | lax.shift_left(jnp.int32(1), 31 - bit)",
              "threshold | (lax.shift_left(jnp.int32(1), 31 - bit) & -(1 << 18))"),
    ),
    "what moves by whole lines stays": (
        DECODE, "plain",
        Plant("index:_bits", "(lines - 1).bit_length()", "0"),
    ),
    "negative scores in reverse": (
        TWO_ROWS, "plain",
        Plant("index:_select", "bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
    ),
    "heads that count although they are negative": (
        TWO_ROWS, "plain",
        Plant("index:_score", "jnp.maximum(found, 0.0)", "found"),
    ),
}  # fmt: skip


@pytest.mark.skipif(not NIGHTLY, reason="each interprets a kernel; by day it is tried that every mistake can be made")
@pytest.mark.parametrize("control", CONTROLS)
def test_control(control, tmp_path, monkeypatch):
    case, mode, *plants = CONTROLS[control]
    module = broken(tmp_path, monkeypatch, *plants)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(case, interpreter.MODES[mode], module)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)


def shapes(context=32768, *, rows=32, block_size=64, width=128, dtype="bfloat16", **others):
    """What `explain` is told of a decode step of DeepSeek V3.2's indexer."""
    shape = jax.ShapeDtypeStruct
    q, keys = shape((rows, 1, 64, 128), jnp.bfloat16), shape((9, 1, 1, block_size, width), dtype)
    tables = shape((rows, context // block_size), jnp.int32)
    return dict(q=q, keys=keys, tables=tables, platform="tpu") | others


def test_it_is_traced_where_integers_have_64_bits():
    case = CHOICES["a window"]
    step = make_step(case)
    with jax.enable_x64(True):
        found = jax.eval_shape(functools.partial(choose, case, index.select_tokens), step)
    assert (found.score.dtype, found.position.dtype) == (jnp.float32, jnp.int32)


def test_who_runs():
    explain = functools.partial(pallas_kernels.explain, "select_tokens")
    assert explain(**shapes()).implementation == "tpu"
    refused = {
        "reads no int8 keys": shapes(kind="int8", dtype="int8"),
        "not float16": shapes(dtype="float16"),
        "Index keys of 64 numbers fill no whole lines of 128": shapes(width=64),
        "cannot read blocks of 8 tokens in steps of about": shapes(block_size=8),
        "cannot read blocks of 2064 tokens": shapes(4 * 2064, block_size=2064),  # a contiguous cache's
        "choose a block_size that is a power of 2 from 16 on": shapes(2032, block_size=2032),
        "reads whole blocks, not runs of them": shapes(stripe=jax.ShapeDtypeStruct((2,), jnp.int32)),
        "scores of 1048576 tokens, 64 heads and the best 2048 take": shapes(1 << 20),
        "and the best 262144 take": shapes(1 << 18, top_k=1 << 18),
        "32 x 16384 entries do not fit a TPU's scalar memory": shapes(1 << 18, block_size=16),
        "There are no kernels for the platform 'cpu'": shapes(platform="cpu"),
        "The gpu backend has no kernel that chooses tokens": shapes(platform="cuda"),
    }
    for sentence, arguments in refused.items():
        choice = explain(**arguments)
        assert choice.implementation == "xla" and sentence in choice.reason, choice
    assert explain(**shapes(1 << 18)).implementation == "tpu"
    with pytest.raises(TypeError, match="select_tokens takes no tokens: it takes keys, kind, q, stripe, tables, top_k"):
        explain(**shapes(), tokens=None)
    with pytest.raises(NotImplementedError, match="no int8 keys"):
        explain(**shapes(kind="int8", dtype="int8"), implementation="tpu")
