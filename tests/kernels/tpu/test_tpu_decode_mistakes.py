"""Kernels of decode broken on purpose: the checks must fail on each, or their silence on real ones means nothing."""

from dataclasses import replace

import interpreter
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from tpu_mistakes import SOURCES, check_noticed, check_precision, check_unbroken

from pallas_kernels import testing
from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
ROWS = Case((5, 37), (1, 1), 2, 1, 128, 8)
LONG = Case((5, 261), (1, 1), 2, 1, 128, 8)
FALLING = Case((165, 5), (1, 1), 2, 1, 128, 8)
SHORT = Case((5, 9), (1, 1), 2, 1, 128, 8)
FIRST = replace(ROWS, lengths=(21, 60), window=17, sink_tokens=5)


def decode(tpu, case, mode):
    interpreter.check_write_and_attention(tpu, case, mode, step_tokens=16)


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
        Plant("_attend", "position <= at", "position <= at + 1"),
    ),
    "window one too far": (
        decode,
        replace(ROWS, window=24),
        PLAIN,
        Plant("_attend", "pages.window_mask.first(at)", "pages.window_mask.first(at) - 1"),
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
        replace(ROWS, sinks=True),
        PLAIN,
        Plant("_attend", "sinks_ref[...]", "jnp.full_like(max_ref, MASKED)"),
    ),
    "the sink's weight forgotten": (
        decode,
        replace(ROWS, sinks=True),
        PLAIN,
        Plant("_attend", "jnp.ones_like(sum_ref)", "jnp.zeros_like(sum_ref)"),
    ),
    "the cap applied once": (
        decode,
        replace(ROWS, soft_cap=3.0),
        PLAIN,
        Plant("_attend", "logits / knobs[1]", "logits"),
    ),
    "the heads of a pair swapped": (
        decode,
        replace(ROWS, num_heads=4, num_kv_heads=2),
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
        Plant("_place_tokens", "block > 0", "block >= 0"),
        Plant("_kernel", "targets[row] > 0", "targets[row] >= 0"),
    ),
    "decode writes beyond the pool": (
        decode_without_a_block,
        SHORT,
        PLAIN,
        Plant("_place_tokens", "block < kv.shape[0]", "block < 2 ** 30"),
    ),
    "float32 at bfloat16's precision, decode": (
        check_precision,
        ROWS,
        PLAIN,
        Plant("decode:_attend", "lax.Precision.HIGHEST", "lax.Precision.DEFAULT"),
    ),
    # What goes by a token's chunk, tree or span.
    "a chunk one too early": (
        decode,
        replace(ROWS, chunk=20),
        PLAIN,
        Plant("_attend", "pages.window_mask.first(at)", "pages.window_mask.first(at) - 1"),
    ),
    "values before the chunk": (
        decode,
        replace(ROWS, chunk=20),
        PLAIN,
        Plant("Pages.hide_values", "step == in_step", "step < 0"),
    ),
    "pages before the chunk": (
        decode,
        replace(ROWS, chunk=16),
        PLAIN,
        Plant(
            "Pages.first",
            "divide(jnp.maximum(self.window_mask.first(oldest), 0), self.page_size)",
            "0 * divide(jnp.maximum(self.window_mask.first(oldest), 0), self.page_size)",
        ),
    ),
    # First tokens beside a window.
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
    "the gap's values inside a page": (
        decode,
        FIRST,
        PLAIN,
        Plant("Pages.hide_values", "[self.sink_pages - 1] * (self.window_mask.sink_tokens % self.page_size > 0)", "[]"),
    ),
    "the first tokens counted twice": (
        decode,
        replace(FIRST, lengths=(27, 60), sink_tokens=13),
        PLAIN,
        Plant(
            "Pages.first", "jnp.maximum(page - self.sink_pages, 0)", "jnp.where(page > 0, page - self.sink_pages, 0)"
        ),
    ),
}
BY_DAY = ("pages not awaited", "two rows' writes in one place")


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    check_noticed(CONTROLS[control], tmp_path, monkeypatch)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)


@skip_by_day("test_interpret.py passes on cases like these")
@pytest.mark.timeout(900, method="thread")
def test_unbroken(tmp_path, monkeypatch):
    check_unbroken(CONTROLS, tmp_path, monkeypatch)
