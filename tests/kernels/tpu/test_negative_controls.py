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

import pallas_kernels.tpu
from pallas_kernels import reference, testing
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
SOURCE = pathlib.Path(pallas_kernels.tpu.__file__).parent
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
    program = str(jax.make_jaxpr(lambda *x: tpu.paged_attention(*x))(*inputs))
    products = program.count("dot_general[")
    assert products and program.count("HIGHEST, Precision.HIGHEST") + program.count("precision=HIGHEST") >= products, (
        "error: products of float32 at less than its precision"
    )


# name: (what to run, on which case, in which mode, the file, what to find there, what to put instead, and so on). None
# may wait for a copy that nobody starts.
CONTROLS = {
    "pages not awaited": (decode, ROWS, PLAIN, "decode.py", "        await_pages(buffers, slot, count)\n", ""),
    "one page not awaited": (decode, ROWS, PLAIN, "decode.py", "coming += held", "coming += jnp.maximum(held - 1, 0)"),
    "the pages of the step after awaited": (
        decode,
        FALLING,
        PLAIN,
        "decode.py",
        "at[2 * SLOTS], at[-1]",
        "at[2 * SLOTS + 1], at[-1]",
    ),
    "one slot less than steps": (decode, LONG, RACES, "decode.py", "slot == SLOTS - 1, 0,", "slot == SLOTS - 2, 0,"),
    "one slot for two steps": (
        decode,
        ROWS,
        RACES,
        "decode.py",
        "pages_of.at[slot, these]",
        "pages_of.at[0 * slot, these]",
    ),
    "a step's pages over those that are worked on": (
        decode,
        LONG,
        RACES,
        "decode.py",
        "buffer(free, segment)",
        "buffer(slot, segment)",
    ),
    "a page copied that a row has not": (decode, ROWS, RACES, "pages.py", "jnp.where(i < count, 1, 0)", "jnp.int32(1)"),
    "a table read past its end": (decode, ROWS, PLAIN, "pages.py", "jnp.minimum(begin + i, last)", "100 + begin + i"),
    "a row's last segment missed": (
        decode,
        ROWS,
        PLAIN,
        "decode.py",
        "segment + count - 1 - part,",
        "segment + count - part,",
    ),
    "a row's end before its step": (
        decode,
        LONG,
        PLAIN,
        "decode.py",
        "inside = segment < segments",
        "inside = segment >= 0",
    ),
    "wrong block": (
        decode,
        ROWS,
        PLAIN,
        "pages.py",
        "row * self.blocks_per_row + block]",
        "row * self.blocks_per_row]",
    ),
    "mask one too far": (decode, ROWS, PLAIN, "decode.py", "seen = position < limit", "seen = position <= limit"),
    "window one too far": (
        decode,
        but(ROWS, window=24),
        PLAIN,
        "decode.py",
        "covers(position, pages.reach.first(limit - 1))",
        "covers(position, pages.reach.first(limit - 1) - 1)",
    ),
    "tail not cleared": (decode, ROWS, PLAIN, "pages.py", "keep(held - 1,", "(lambda *_: None)(held - 1,"),
    "pages not cleared": (decode, ROWS, PLAIN, "pages.py", "* unit, clear", "* 0, clear"),
    "pages not cleared for many": (
        prefill_in_long_steps,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "limit, i, steps, half)",
        "limit, i, steps, 1)",
    ),
    "write not awaited": (
        decode,
        ROWS,
        PLAIN,
        "decode.py",
        "pltpu.make_async_copy(these, these, semaphore).wait",
        "lambda: None",
    ),
    "write of the wrong tile": (
        decode,
        ROWS,
        PLAIN,
        "decode.py",
        "staged[...] = merged",
        "staged[...] = buffer[there]",
    ),
    "two rows' writes in one place": (decode, SHORT, PLAIN, "decode.py", "staged.at[written]", "staged.at[0]"),
    "a row begins with another's sums": (decode, ROWS, PLAIN, "decode.py", "there & (part == 0)", "there & (part < 0)"),
    "a segment that is not there": (
        decode,
        ROWS,
        PLAIN,
        "decode.py",
        "lax.select(there, new",
        "lax.select(there | True, new",
    ),
    "the sink's logit forgotten": (
        decode,
        but(ROWS, sinks=True),
        PLAIN,
        "decode.py",
        "else sinks_ref[...]",
        "else jnp.full_like(max_ref, MASKED)",
    ),
    "the sink's weight forgotten": (
        decode,
        but(ROWS, sinks=True),
        PLAIN,
        "decode.py",
        "else jnp.ones_like(sum_ref)",
        "else jnp.zeros_like(sum_ref)",
    ),
    "the cap applied once": (
        decode,
        but(ROWS, soft_cap=3.0),
        PLAIN,
        "decode.py",
        "jnp.tanh(logits / knobs[1])",
        "jnp.tanh(logits)",
    ),
    "the heads of a pair swapped": (
        decode,
        but(ROWS, num_heads=4, num_kv_heads=2),
        PLAIN,
        "decode.py",
        "result[:, :width], result[:, width:]",
        "result[:, width:], result[:, :width]",
    ),
    "an LSE without the sum": (decode, ROWS, PLAIN, "decode.py", "so_far[0] + jnp.log(so_far[1])", "so_far[0]"),
    "decode writes the null block": (
        decode_without_a_block,
        SHORT,
        PLAIN,
        "step.py",
        "(block > 0)",
        "(block >= 0)",
        "decode.py",
        "(targets[row] > 0)",
        "(targets[row] >= 0)",
    ),
    "decode writes beyond the pool": (
        decode_without_a_block,
        SHORT,
        PLAIN,
        "step.py",
        "(block < kv.shape[0])",
        "(block < 2**30)",
    ),
    "prefill: pages not awaited": (prefill, CHUNKS, PLAIN, "prefill.py", "await_pages(buffers, slot, coming)", "pass"),
    "prefill: one page not awaited": (
        prefill,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "await_pages(buffers, slot, coming)",
        "await_pages(buffers, slot, jnp.maximum(coming - 1, 0))",
    ),
    "causality one too far": (prefill, CHUNKS, PLAIN, "prefill.py", "] <= query", "] <= query + 1"),
    "mask left out": (prefill, CHUNKS, PLAIN, "prefill.py", "<= start + 1", "<= limit"),
    "mask left out of a half": (prefill, CHUNKS, PLAIN, "prefill.py", "sure=half)", "sure=part_pages)"),
    "half a step too few": (
        prefill,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "limit <= begin + half",
        "limit <= begin + 2 * half",
    ),
    "weights not summed": (
        prefill,
        CHUNKS,
        RACES,
        "prefill.py",
        "concatenate([values, ones])",
        "concatenate([values, 0 * ones])",
    ),
    "a window longer than a step left out": (
        prefill,
        but(CHUNKS, lengths=(99, 30, 9), window=34),
        PLAIN,
        "prefill.py",
        "seen & (first_key >= pages.reach.first(limit - 1)) if pages.reach.ends else seen",
        "seen",
    ),
    "another tile's queries": (
        prefill,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "q_hbm.at[pl.ds(tokens[tile]",
        "q_hbm.at[pl.ds(tokens[0]",
    ),
    "output in another tile's place": (
        prefill,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "out_hbm.at[pl.ds(tokens[tile]",
        "out_hbm.at[pl.ds(tokens[0]",
    ),
    "queries not awaited": (prefill, CHUNKS, PLAIN, "prefill.py", 'fetch("wait", tile + 1)', "None"),
    "the first queries not awaited": (prefill, CHUNKS, PLAIN, "prefill.py", 'fetch("wait", 0)', "pass"),
    "output not awaited": (prefill, CHUNKS, PLAIN, "prefill.py", '        send("wait", tile)\n', "        pass\n"),
    "output's buffer used again early": (
        prefill,
        CHUNKS,
        RACES,
        "prefill.py",
        'lambda: send("wait", tile - 2)',
        "lambda: None",
    ),
    "nobody's tokens left as they were": (prefill, CHUNKS, PLAIN, "prefill.py", "there, -width, 0", "there, 0, 0"),
    "heads of a group mixed up": (
        prefill,
        CHUNKS,
        PLAIN,
        "words.py",
        "nth % group * size",
        "0 * size",
    ),
    "two heads of a word mixed up": (
        prefill,
        PACKED,
        PLAIN,
        "words.py",
        "return (low & jnp.uint32(0xFFFF)) | (high << 16), (low >> 16)",
        "return (low & jnp.uint32(0xFFFF)) | (low << 16), (low >> 16)",
    ),
    "sums of the tile before": (
        prefill,
        but(CHUNKS, sinks=True),
        PLAIN,
        "prefill.py",
        "out_sum_ref[head] = jnp.zeros(",
        "_ = (",
    ),
    "maxima of the tile before": (prefill, CHUNKS, PLAIN, "prefill.py", "    forget()\n    send(", "    send("),
    "half of a step left out": (
        prefill,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "jnp.where(whole, 0, parts)",
        "jnp.where(whole, 0, 1)",
    ),
    "half of a step twice": (
        prefill,
        but(CHUNKS, lengths=(99, 30, 9)),
        PLAIN,
        "prefill.py",
        "pl.ds(part * part_pages",
        "pl.ds(0 * part_pages",
    ),
    "float32 at bfloat16's precision, decode": (
        precision,
        ROWS,
        PLAIN,
        "decode.py",
        "Precision.HIGHEST",
        "Precision.DEFAULT",
    ),
    "float32 at bfloat16's precision, prefill": (
        precision,
        CHUNKS,
        PLAIN,
        "prefill.py",
        "Precision.HIGHEST",
        "Precision.DEFAULT",
    ),
    "write: the old page not awaited": (
        write,
        RUNS,
        PLAIN,
        "write.py",
        "patching.at[slot]), do)()",
        'patching.at[slot]), "start")() if do == "start" else None',
    ),
    "write: a slot refilled too early": (
        write,
        RUNS,
        RACES,
        "write.py",
        "entry + depth - 1,",
        "entry + depth,",
        "write.py",
        "(0, depth - 1)",
        "(0, depth)",
    ),
    "write: a page changed while it leaves": (
        write,
        RUNS,
        RACES,
        "write.py",
        'if_written(entry - depth, functools.partial(send, "wait"))',
        "None",
    ),
    "write: begins too early": (write, RUNS, PLAIN, "write.py", "place >= begins[entry]", "place >= 0"),
    "write: ends too late": (write, RUNS, PLAIN, "write.py", "place < ends[entry]", "place <= ends[entry]"),
    "write: another token": (
        write,
        RUNS,
        PLAIN,
        "write.py",
        "of_row(offsets - before) + start",
        "of_row(offsets - before) + start + 1",
    ),
    "write: offsets ignored": (write_with_gaps, RUNS, PLAIN, "write.py", "elif offsets is None:", "else:"),
    "write: beyond the pool": (
        write_without_a_block,
        RUNS,
        PLAIN,
        "write.py",
        "(block < kv.shape[0])\n    return Runs",
        "(block < 2**30)\n    return Runs",
    ),
}
SPANS = but(CHUNKS, spans=True)
# What goes by a token's chunk, tree or span.
CONTROLS |= {
    "a chunk one too early": (
        decode,
        but(ROWS, chunk=20),
        PLAIN,
        "decode.py",
        "covers(position, pages.reach.first(limit - 1))",
        "covers(position, pages.reach.first(limit - 1) - 1)",
    ),
    "values before the chunk": (
        decode,
        but(ROWS, chunk=20),
        PLAIN,
        "pages.py",
        "pl.when(step == in_step)",
        "pl.when(step < 0)",
    ),
    "pages before the chunk": (
        decode,
        but(ROWS, chunk=16),
        PLAIN,
        "pages.py",
        "page = divide(jnp.maximum(self.reach.first(oldest)",
        "page = 0 * divide(jnp.maximum(self.reach.first(oldest)",
    ),
    "a chunk forgotten by rows of one token": (
        prefill,
        but(CHUNKS, lengths=(37, 30, 9), new=(20, 1, 1), chunk=16),
        PLAIN,
        "step.py",
        "rank=rank, reach=reach, **options",
        "rank=rank, **options",
    ),
    "sure of what the last token does not see": (
        prefill,
        but(CHUNKS, new=(6, 7, 4), chunk=16),
        PLAIN,
        "prefill.py",
        "(first_key >= sure[0][tile])",
        "(first_key >= 0 * sure[0][tile])",
    ),
    "sure of what the first token does not see": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        "prefill.py",
        "<= sure[1][tile])",
        "<= sure[1][tile] + pages.step_tokens)",
    ),
    "a walk to the tile's last token": (
        prefill,
        but(SPANS, new=(37, 7, 4), num_heads=32),
        PLAIN,
        "prefill.py",
        "froms[tile], untils[tile]\n",
        "froms[tile], limits[tile]\n",
    ),
    "heads and tokens of a sight mixed up": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        "prefill.py",
        "jnp.tile(sight.tokens, (1, 1, group))",
        "jnp.repeat(sight.tokens, group, axis=2)",
    ),
    "the sight of the tile before": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        "prefill.py",
        "lines.shape[1:]), lambda tile, *_: (tile, 0, 0)",
        "lines.shape[1:]), lambda tile, *_: (jnp.maximum(tile - 1, 0), 0, 0)",
    ),
    "a tree taken for a chain": (
        prefill,
        but(CHUNKS, tree=True),
        PLAIN,
        "step.py",
        "(chunk, tree, spans))",
        "(chunk, spans))",
    ),
}
FIRST = but(ROWS, lengths=(21, 60), window=17, sink_tokens=5)
FIRST_CHUNKS = but(CHUNKS, lengths=(67, 30, 9), window=17, sink_tokens=5)
# First tokens beside a window.
FIRST_TOKENS = {
    "the first tokens left out": (decode, FIRST, PLAIN, "step.py", "chunk, sink_tokens),", "chunk, None),"),
    "the first tokens left out of many": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        "step.py",
        "reach = Reach.within(tables.shape[1] * kv.shape[3], window, chunk, sink_tokens)",
        "reach = Reach(window, chunk)",
    ),
    "the first tokens' pages taken for the window's": (
        decode,
        FIRST,
        PLAIN,
        "pages.py",
        "return self._moved(at, oldest, 1)",
        "return at",
    ),
    "the gap read": (decode, FIRST, PLAIN, "pages.py", "page - self.sink_pages, 0)", "0 * page, 0)"),
    "the gap read for many": (prefill, FIRST_CHUNKS, PLAIN, "pages.py", "page - self.sink_pages, 0)", "0 * page, 0)"),
    "the gap's values inside a page": (
        decode,
        FIRST,
        PLAIN,
        "pages.py",
        "[self.sink_pages - 1] * (self.reach.sink_tokens % self.page_size > 0)",
        "[]",
    ),
    "the first tokens counted twice": (
        decode,
        but(FIRST, lengths=(27, 60), sink_tokens=13),
        PLAIN,
        "pages.py",
        "jnp.maximum(page - self.sink_pages, 0)",
        "jnp.where(page > 0, page - self.sink_pages, 0)",
    ),
    "the first tokens of many counted twice": (
        prefill,
        but(FIRST_CHUNKS, lengths=(67, 35, 9), sink_tokens=13),
        PLAIN,
        "pages.py",
        "jnp.maximum(page - self.sink_pages, 0)",
        "jnp.where(page > 0, page - self.sink_pages, 0)",
    ),
    "first tokens' positions those of the walk": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        "prefill.py",
        "shape, 0), query_start)",
        "shape, 0), -1)",
    ),
}
CONTROLS |= FIRST_TOKENS
BY_DAY = list(CONTROLS)[: -len(FIRST_TOKENS) : 9]


def broken(tmp_path, monkeypatch, *changes):
    """The kernels' package under another name, with pieces of its source replaced: file, what to find, what to put."""
    name = next(names)
    (tmp_path / name).mkdir()
    sources = {path.name: path.read_text() for path in SOURCE.glob("*.py")}
    for file, find, replace in itertools.batched(changes, 3):
        assert find in sources[file], f"{find!r} is no longer in {file}: adapt the control"
        sources[file] = sources[file].replace(find, replace)
    for file, text in sources.items():
        (tmp_path / name / file).write_text(text.replace("pallas_kernels.tpu", name))
    monkeypatch.syspath_prepend(tmp_path)
    tpu = importlib.import_module(name)
    importlib.import_module(f"{name}.decode").SEGMENTS = 3
    importlib.import_module(f"{name}.write").SLOTS = 2
    return tpu


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    run, case, mode, *changes = CONTROLS[control]
    tpu = broken(tmp_path, monkeypatch, *changes)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):  # wrong, or raised by the interpreter
        run(tpu, case, mode)


def test_every_mistake_can_be_made():
    """By day too: the text that each changes is still there."""
    sources = {path.name: path.read_text() for path in SOURCE.glob("*.py")}
    for name, (_, _, _, *changes) in CONTROLS.items():
        assert all(find in sources[file] for file, find, _ in itertools.batched(changes, 3)), name


@pytest.mark.skipif(not NIGHTLY, reason="by day test_interpret.py passes on cases like these")
@pytest.mark.timeout(900, method="thread")
def test_unbroken(tmp_path, monkeypatch):
    """The controls' own cases pass on an unchanged copy."""
    tpu = broken(tmp_path, monkeypatch)
    runs = {(run, case, mode) for run, case, mode, *_ in CONTROLS.values()}
    for run, case, mode in runs:
        run(tpu, case, mode)
