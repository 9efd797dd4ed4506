"""Kernels broken on purpose: the suite must fail on each, or its silence about the real ones means nothing."""

import importlib
import itertools
import pathlib

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY
from planting import Plant, Sources

import pallas_kernels.tpu
from pallas_kernels import reference, testing
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
FOLDER = pathlib.Path(pallas_kernels.tpu.__file__).parent
SOURCES = Sources(FOLDER, "pallas_kernels.tpu")
names = (f"broken_tpu_{i}" for i in itertools.count())
ROWS = Case((5, 37), (1, 1), 2, 1, 128, 8)
LONG = Case((5, 261), (1, 1), 2, 1, 128, 8)
FALLING = Case((165, 5), (1, 1), 2, 1, 128, 8)
SHORT = Case((5, 9), (1, 1), 2, 1, 128, 8)
CHUNKS = Case((37, 30, 9), (20, 7, 4), 2, 1, 128, 8, packed=True, padding=3)
PACKED = Case((37, 30, 9), (20, 7, 4), 2, 1, 128, 16, dtype="bfloat16", packed=True, padding=3)
RUNS = Case((70, 21, 3), (60, 2, 0), 1, 1, 128, 8, packed=True, padding=2)


def but(case, **changes):
    return Case(**{**vars(case), **changes})


def decode(tpu, case, mode):
    interpreter.check_write_and_attention(tpu, case, mode, step_tokens=16)


def prefill(tpu, case, mode):
    interpreter.check_attention(tpu, case, mode, step_tokens=16)


def prefill_in_long_steps(tpu, case, mode):
    interpreter.check_attention(tpu, case, mode, step_tokens=32)


def write(tpu, case, mode, offsets=None, block=None):
    inputs = testing.make_inputs(case, poison=7.0)
    k, v = jax.random.normal(jax.random.key(0), (2, *inputs.q.shape[:-2], 1, 128))
    tables = inputs.tables if block is None else inputs.tables.at[0, 2].set(block)
    actual = interpreter.run(tpu.write_kv, inputs.kv, k, v, tables, *inputs[3:], mode=mode, offsets=offsets)
    expected = reference.write_kv(inputs.kv, k, v, *inputs[2:], offsets=offsets)
    if block is not None:
        lost = inputs.tables[0, 2]
        expected = expected.at[lost].set(inputs.kv[lost])
    np.testing.assert_array_equal(actual, expected)


def write_with_gaps(tpu, case, mode):
    write(tpu, case, mode, offsets=jnp.asarray([1, 62, 64]))


def write_without_a_block(tpu, case, mode):
    write(tpu, case, mode, block=10**9)


def decode_without_a_block(tpu, case, mode):
    """The null block stays as it is, and so does what an id beyond the pool might mean."""
    inputs = testing.make_inputs(case)
    k, v = jnp.ones((2, 2, 1, 1, 128))
    for block in (0, 10**9):
        tables = inputs.tables.at[1, 1].set(block)
        _, kv = interpreter.run(
            tpu.write_and_attend, inputs.q, k, v, inputs.kv, tables, *inputs[3:], mode=mode, step_tokens=16
        )
        assert not np.asarray(kv[0]).any(), "differ: the null block"


def precision(tpu, case, mode):
    """A CPU multiplies in float32 whatever it is told: what a TPU is told stands in the program."""
    inputs = testing.make_inputs(case)
    program = str(jax.make_jaxpr(lambda *x: testing.run(tpu.paged_attention, *x))(*inputs))
    products = program.count("dot_general[")
    assert products and program.count("HIGHEST, Precision.HIGHEST") + program.count("precision=HIGHEST") >= products, (
        "error: products of float32 at less than its precision"
    )


# name: (what to run, on which case, in which mode, what is planted). None may wait for a copy that nobody starts.
CONTROLS = {
    "pages not awaited": (
        decode,
        ROWS,
        PLAIN,
        Plant("_kernel", "await_pages(buffers, slot, count)", ""),
    ),
    "one page not awaited": (
        decode,
        ROWS,
        PLAIN,
        Plant("_kernel", "coming += held", "coming += jnp.maximum(held - 1, 0)"),
    ),
    "the pages of the step after awaited": (
        decode,
        FALLING,
        PLAIN,
        Plant("_kernel", "at[2 * SLOTS]", "at[2 * SLOTS + 1]"),
    ),
    "one slot less than steps": (
        decode,
        LONG,
        RACES,
        Plant("_kernel", "slot == SLOTS - 1", "slot == SLOTS - 2"),
    ),
    "one slot for two steps": (
        decode,
        ROWS,
        RACES,
        Plant("_kernel", "(slot, these)", "(0 * slot, these)"),
    ),
    "a step's pages over those that are worked on": (
        decode,
        LONG,
        RACES,
        Plant("_kernel", "buffer(free, segment)", "buffer(slot, segment)"),
    ),
    "a page copied that a row has not": (
        decode,
        ROWS,
        RACES,
        Plant("Pages.start", "jnp.where(i < count, 1, 0)", "jnp.int32(1)"),
    ),
    "a table read past its end": (
        decode,
        ROWS,
        PLAIN,
        Plant("Pages.start", "jnp.minimum(begin + i, last)", "100 + begin + i"),
    ),
    "a row's last segment missed": (
        decode,
        ROWS,
        PLAIN,
        Plant("_kernel", "segment + count - 1", "segment + count"),
    ),
    "a row's end before its step": (
        decode,
        LONG,
        PLAIN,
        Plant("_kernel", "inside = segment < segments", "inside = segment >= 0"),
    ),
    "wrong block": (
        decode,
        ROWS,
        PLAIN,
        Plant("Pages.start_held", "row * self.blocks_per_row + block", "row * self.blocks_per_row"),
        Plant("Pages.start", "row * self.blocks_per_row + block", "row * self.blocks_per_row"),
    ),
    "mask one too far": (
        decode,
        ROWS,
        PLAIN,
        Plant("_attend", "position < limit", "position <= limit"),
    ),
    "window one too far": (
        decode,
        but(ROWS, window=24),
        PLAIN,
        Plant("_attend", "pages.window_mask.first(limit - 1)", "pages.window_mask.first(limit - 1) - 1"),
    ),
    "tail not cleared": (
        decode,
        ROWS,
        PLAIN,
        Plant(
            "Pages.hide_values",
            "keep(held - 1, lambda position: position < limit)",
            "(lambda *_: None)(held - 1, lambda position: position < limit)",
        ),
    ),
    "pages not cleared": (
        decode,
        ROWS,
        PLAIN,
        Plant("Pages.hide_values", "divide(held + (unit - 1), unit) * unit", "divide(held + (unit - 1), unit) * 0"),
    ),
    "pages not cleared for many": (
        prefill_in_long_steps,
        CHUNKS,
        PLAIN,
        Plant(
            "_kernel",
            "pages.hide_values(buffers[0][0].at[slot], start, limit, i, steps, half)",
            "pages.hide_values(buffers[0][0].at[slot], start, limit, i, steps, 1)",
        ),
    ),
    "write not awaited": (
        decode,
        ROWS,
        PLAIN,
        Plant("_kernel", "pltpu.make_async_copy(these, these, semaphore).wait", "lambda: None"),
    ),
    "write of the wrong tile": (
        decode,
        ROWS,
        PLAIN,
        Plant("_insert", "staged[...] = merged", "staged[...] = buffer[there]"),
    ),
    "two rows' writes in one place": (
        decode,
        SHORT,
        PLAIN,
        Plant("_kernel", "staged.at[written]", "staged.at[0]"),
    ),
    "a row begins with another's sums": (
        decode,
        ROWS,
        PLAIN,
        Plant("_attend", "part == 0", "part < 0"),
    ),
    "a segment that is not there": (
        decode,
        ROWS,
        PLAIN,
        Plant("_attend", "lax.select(there, new, old)", "lax.select(there | True, new, old)"),
    ),
    "the sink's logit forgotten": (
        decode,
        but(ROWS, sinks=True),
        PLAIN,
        Plant("_attend", "sinks_ref[...]", "jnp.full_like(max_ref, MASKED)"),
    ),
    "the sink's weight forgotten": (
        decode,
        but(ROWS, sinks=True),
        PLAIN,
        Plant("_attend", "jnp.ones_like(sum_ref)", "jnp.zeros_like(sum_ref)"),
    ),
    "the cap applied once": (
        decode,
        but(ROWS, soft_cap=3.0),
        PLAIN,
        Plant("_attend", "logits / knobs[1]", "logits"),
    ),
    "the heads of a pair swapped": (
        decode,
        but(ROWS, num_heads=4, num_kv_heads=2),
        PLAIN,
        Plant(
            "_per_head",
            "jnp.where(lax.rem(row, jnp.int32(2 * group)) < group, *each)",
            "jnp.where(lax.rem(row, jnp.int32(2 * group)) < group, *each[::-1])",
        ),
    ),
    "an LSE without the sum": (
        decode,
        ROWS,
        PLAIN,
        Plant("_attend", "so_far[0] + jnp.log(so_far[1])", "so_far[0]"),
    ),
    "decode writes the null block": (
        decode_without_a_block,
        SHORT,
        PLAIN,
        Plant("decode_step", "block > 0", "block >= 0"),
        Plant("_kernel", "targets[row] > 0", "targets[row] >= 0"),
    ),
    "decode writes beyond the pool": (
        decode_without_a_block,
        SHORT,
        PLAIN,
        Plant("decode_step", "block < kv.shape[0]", "block < 2 ** 30"),
    ),
    "prefill: pages not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "await_pages(buffers, slot, coming)", ""),
    ),
    "prefill: one page not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant(
            "_kernel", "await_pages(buffers, slot, coming)", "await_pages(buffers, slot, jnp.maximum(coming - 1, 0))"
        ),
    ),
    "causality one too far": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_attend", "key[:, :width] <= query", "key[:, :width] <= query + 1"),
    ),
    "mask left out": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "start + 1", "limit"),
    ),
    "mask left out of a half": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "attend(at, part_pages, sure=half)", "attend(at, part_pages, sure=part_pages)"),
    ),
    "half a step too few": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "half * pages.page_size", "2 * half * pages.page_size"),
    ),
    "weights not summed": (
        prefill,
        CHUNKS,
        RACES,
        Plant("_attend", "[values, ones]", "[values, 0 * ones]"),
    ),
    "a window longer than a step left out": (
        prefill,
        but(CHUNKS, lengths=(99, 30, 9), window=34),
        PLAIN,
        Plant(
            "_kernel",
            "seen & (first_key >= pages.window_mask.first(limit - 1)) if pages.window_mask.ends else seen",
            "seen",
        ),
    ),
    "another tile's queries": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "q_hbm.at[pl.ds(tokens[tile], size)]", "q_hbm.at[pl.ds(tokens[0], size)]"),
    ),
    "output in another tile's place": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "out_hbm.at[pl.ds(tokens[tile], size)]", "out_hbm.at[pl.ds(tokens[0], size)]"),
    ),
    "queries not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "fetch('wait', tile + 1)", "None"),
    ),
    "the first queries not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "fetch('wait', 0)", ""),
    ),
    "output not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "send('wait', tile)", ""),
    ),
    "output's buffer used again early": (
        prefill,
        CHUNKS,
        RACES,
        Plant("_kernel", "send('wait', tile - 2)", "None"),
    ),
    "nobody's tokens left as they were": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("make_tiles", "-width", "0"),
    ),
    "heads of a group mixed up": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("to_heads", "nth % group", "0"),
    ),
    "two heads of a word mixed up": (
        prefill,
        PACKED,
        PLAIN,
        Plant("Words.swap", "high << 16", "low << 16"),
    ),
    "sums of the tile before": (
        prefill,
        but(CHUNKS, sinks=True),
        PLAIN,
        Plant(
            "_kernel",
            "out_sum_ref[head] = jnp.zeros(out_sum_ref.shape[1:], out_sum_ref.dtype)",
            "_ = (out_sum_ref.shape[1:], out_sum_ref.dtype)",
        ),
    ),
    "maxima of the tile before": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "forget()\nsend('start', tile)", "send('start', tile)"),
    ),
    "half of a step left out": (
        prefill,
        CHUNKS,
        PLAIN,
        Plant("_kernel", "jnp.where(whole, 0, parts)", "jnp.where(whole, 0, 1)"),
    ),
    "half of a step twice": (
        prefill,
        but(CHUNKS, lengths=(99, 30, 9)),
        PLAIN,
        Plant("_attend", "part * part_pages", "0 * part_pages"),
    ),
    "float32 at bfloat16's precision, decode": (
        precision,
        ROWS,
        PLAIN,
        Plant("decode:_attend", "lax.Precision.HIGHEST", "lax.Precision.DEFAULT"),
    ),
    "float32 at bfloat16's precision, prefill": (
        precision,
        CHUNKS,
        PLAIN,
        Plant("prefill:_attend", "lax.Precision.HIGHEST", "lax.Precision.DEFAULT"),
    ),
    "write: the old page not awaited": (
        write,
        RUNS,
        PLAIN,
        Plant(
            "_kernel",
            "getattr(pltpu.make_async_copy(page(target, entry), old.at[slot], patching.at[slot]), do)()",
            "getattr(pltpu.make_async_copy(page(target, entry), old.at[slot], patching.at[slot]), "
            "'start')() if do == 'start' else None",
        ),
    ),
    "write: a slot refilled too early": (
        write,
        RUNS,
        RACES,
        Plant("_kernel", "entry + depth - 1", "entry + depth"),
        Plant("_kernel", "pl.loop(0, depth - 1)", "pl.loop(0, depth)"),
    ),
    "write: a page changed while it leaves": (
        write,
        RUNS,
        RACES,
        Plant("_kernel", "if_written(entry - depth, functools.partial(send, 'wait'))", "None"),
    ),
    "write: begins too early": (
        write,
        RUNS,
        PLAIN,
        Plant("_kernel", "place >= begins[entry]", "place >= 0"),
    ),
    "write: ends too late": (
        write,
        RUNS,
        PLAIN,
        Plant("_kernel", "place < ends[entry]", "place <= ends[entry]"),
    ),
    "write: another token": (
        write,
        RUNS,
        PLAIN,
        Plant("find_runs", "of_row(offsets - before) + start", "of_row(offsets - before) + start + 1"),
    ),
    "write: offsets ignored": (
        write_with_gaps,
        RUNS,
        PLAIN,
        Plant(
            "find_runs",
            "if query_starts is None:\n    query_starts = default_offsets(query_lens)",
            "query_starts = default_offsets(query_lens)",
        ),
    ),
    "write: beyond the pool": (
        write_without_a_block,
        RUNS,
        PLAIN,
        Plant("find_runs", "kv.shape[0]", "2 ** 30"),
    ),
}
SPANS = but(CHUNKS, spans=True)
# What goes by a token's chunk, tree or span.
CONTROLS |= {
    "a chunk one too early": (
        decode,
        but(ROWS, chunk=20),
        PLAIN,
        Plant("_attend", "pages.window_mask.first(limit - 1)", "pages.window_mask.first(limit - 1) - 1"),
    ),
    "values before the chunk": (
        decode,
        but(ROWS, chunk=20),
        PLAIN,
        Plant("Pages.hide_values", "step == in_step", "step < 0"),
    ),
    "pages before the chunk": (
        decode,
        but(ROWS, chunk=16),
        PLAIN,
        Plant(
            "Pages.first",
            "divide(jnp.maximum(self.window_mask.first(oldest), 0), self.page_size)",
            "0 * divide(jnp.maximum(self.window_mask.first(oldest), 0), self.page_size)",
        ),
    ),
    "a chunk forgotten by rows of one token": (
        prefill,
        but(CHUNKS, lengths=(37, 30, 9), new=(20, 1, 1), chunk=16),
        PLAIN,
        Plant(
            "attend",
            "decode(alone, stored, tables, jnp.where(single, kv_lens, 0), options, window_mask=window_mask, **own)",
            "decode(alone, stored, tables, jnp.where(single, kv_lens, 0), options, **own)",
        ),
    ),
    "sure of what the last token does not see": (
        prefill,
        but(CHUNKS, new=(6, 7, 4), chunk=16),
        PLAIN,
        Plant("_kernel", "sure[0][tile]", "0 * sure[0][tile]"),
    ),
    "sure of what the first token does not see": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        Plant("_kernel", "sure[1][tile]", "sure[1][tile] + pages.step_tokens"),
    ),
    "a walk to the tile's last token": (
        prefill,
        but(SPANS, new=(37, 7, 4), num_heads=32),
        PLAIN,
        Plant("_kernel", "(froms[tile], untils[tile])", "(froms[tile], limits[tile])"),
    ),
    "heads and tokens of a token_mask mixed up": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        Plant("prefill", "jnp.tile(token_mask.tokens, (1, 1, group))", "jnp.repeat(token_mask.tokens, group, axis=2)"),
    ),
    "the token_mask of the tile before": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        Plant("prefill", "(tile, 0, 0)", "(jnp.maximum(tile - 1, 0), 0, 0)"),
    ),
    "a tree taken for a chain": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        Plant("attend", "mask.by_token or not mask.causal", "mask.chunk is not None or not mask.causal"),
    ),
}
FIRST = but(ROWS, lengths=(21, 60), window=17, sink_tokens=5)
FIRST_CHUNKS = but(CHUNKS, lengths=(67, 30, 9), window=17, sink_tokens=5)
# First tokens beside a window.
FIRST_TOKENS = {
    "the first tokens left out": (
        decode,
        FIRST,
        PLAIN,
        Plant(
            "decode_step",
            "WindowMask.from_spec(mask, capacity)",
            "WindowMask.from_spec(mask, capacity)._replace(sink_tokens=0)",
        ),
    ),
    "the first tokens left out of many": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        Plant(
            "attend", "WindowMask.from_spec(mask, tables.shape[1] * kv.shape[3])", "WindowMask(mask.window, mask.chunk)"
        ),
    ),
    "the first tokens' pages taken for the window's": (
        decode,
        FIRST,
        PLAIN,
        Plant("Pages.page", "self._moved(at, oldest, 1)", "at"),
    ),
    "the gap read": (
        decode,
        FIRST,
        PLAIN,
        Plant("Pages.first", "page - self.sink_pages", "0 * page"),
    ),
    "the gap read for many": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        Plant("Pages.first", "page - self.sink_pages", "0 * page"),
    ),
    "the gap's values inside a page": (
        decode,
        FIRST,
        PLAIN,
        Plant("Pages.hide_values", "[self.sink_pages - 1] * (self.window_mask.sink_tokens % self.page_size > 0)", "[]"),
    ),
    "the first tokens counted twice": (
        decode,
        but(FIRST, lengths=(27, 60), sink_tokens=13),
        PLAIN,
        Plant(
            "Pages.first", "jnp.maximum(page - self.sink_pages, 0)", "jnp.where(page > 0, page - self.sink_pages, 0)"
        ),
    ),
    "the first tokens of many counted twice": (
        prefill,
        but(FIRST_CHUNKS, lengths=(67, 35, 9), sink_tokens=13),
        PLAIN,
        Plant(
            "Pages.first", "jnp.maximum(page - self.sink_pages, 0)", "jnp.where(page > 0, page - self.sink_pages, 0)"
        ),
    ),
    "first tokens' positions those of the walk": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        Plant(
            "_attend",
            "pages.position(start + sure + place, query_start)",
            "pages.position(start + sure + place, -1)",
        ),
    ),
}
CONTROLS |= FIRST_TOKENS
BY_DAY = list(CONTROLS)[: -len(FIRST_TOKENS) : 18]


def broken(tmp_path, monkeypatch, *plants):
    """The kernels' package under another name, with mistakes planted in it."""
    name = next(names)
    SOURCES.write_copy(tmp_path, name, *plants)
    monkeypatch.syspath_prepend(tmp_path)
    tpu = importlib.import_module(name)
    importlib.import_module(f"{name}.decode").SEGMENTS = 3
    importlib.import_module(f"{name}.write").SLOTS = 2
    return tpu


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    run, case, mode, *plants = CONTROLS[control]
    tpu = broken(tmp_path, monkeypatch, *plants)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):  # wrong, or raised by the interpreter
        run(tpu, case, mode)


def test_every_mistake_can_be_made():
    for name, (_, _, _, *plants) in CONTROLS.items():
        assert SOURCES.broken(*plants), name


@pytest.mark.skipif(not NIGHTLY, reason="by day test_interpret.py passes on cases like these")
@pytest.mark.timeout(900, method="thread")
def test_unbroken(tmp_path, monkeypatch):
    """The controls' own cases pass on an unchanged copy."""
    tpu = broken(tmp_path, monkeypatch)
    runs = {(run, case, mode) for run, case, mode, *_ in CONTROLS.values()}
    for run, case, mode in runs:
        run(tpu, case, mode)
