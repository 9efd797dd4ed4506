"""Kernels of prefill broken on purpose: the checks must fail on each, or their silence on real ones means nothing."""

from dataclasses import replace

import interpreter
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from tpu_mistakes import SOURCES, check_noticed, check_precision, check_unbroken

from pallas_kernels.testing import Case

pytestmark = pytest.mark.timeout(240, method="thread")
CHUNKS = Case((37, 30, 9), (20, 7, 4), 2, 1, 128, 8, packed=True, padding=3)
PACKED = Case((37, 30, 9), (20, 7, 4), 2, 1, 128, 16, dtype="bfloat16", packed=True, padding=3)
SPANS = replace(CHUNKS, spans=True)
FIRST_CHUNKS = replace(CHUNKS, lengths=(67, 30, 9), window=17, sink_tokens=5)


def prefill(tpu, case, mode):
    interpreter.check_attention(tpu, case, mode, step_tokens=16)


def prefill_in_long_steps(tpu, case, mode):
    interpreter.check_attention(tpu, case, mode, step_tokens=32)


# name: (what to run, on which case, in which mode, what is planted). None may wait for a copy that nobody starts.
CONTROLS = {
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
        replace(CHUNKS, lengths=(99, 30, 9), window=34),
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
        replace(CHUNKS, sinks=True),
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
        replace(CHUNKS, lengths=(99, 30, 9)),
        PLAIN,
        Plant("_attend", "part * part_pages", "0 * part_pages"),
    ),
    "float32 at bfloat16's precision, prefill": (
        check_precision,
        CHUNKS,
        PLAIN,
        Plant("prefill:_attend", "lax.Precision.HIGHEST", "lax.Precision.DEFAULT"),
    ),
    # What goes by a token's chunk, tree or span.
    "a chunk forgotten by rows of one token": (
        prefill,
        replace(CHUNKS, lengths=(37, 30, 9), new=(20, 1, 1), chunk=16),
        PLAIN,
        Plant(
            "attend_to_new",
            "decode(alone, stored, tables, limits, options, window_mask=window_mask, **store, **own)",
            "decode(alone, stored, tables, limits, options, **store, **own)",
        ),
    ),
    "sure of what the last token does not see": (
        prefill,
        replace(CHUNKS, new=(6, 7, 4), chunk=16),
        PLAIN,
        Plant("_kernel", "sure[0][tile]", "0 * sure[0][tile]"),
    ),
    "sure of what the first token does not see": (
        prefill,
        replace(CHUNKS, tree=True),
        PLAIN,
        Plant("_kernel", "sure[1][tile]", "sure[1][tile] + pages.step_tokens"),
    ),
    "a walk to the tile's last token": (
        prefill,
        replace(SPANS, new=(37, 7, 4), num_heads=32),
        PLAIN,
        Plant("_kernel", "(froms[tile], untils[tile])", "(froms[tile], limits[tile])"),
    ),
    "heads and tokens of a token_mask mixed up": (
        prefill,
        replace(CHUNKS, tree=True),
        PLAIN,
        Plant("prefill", "jnp.tile(token_mask.tokens, (1, 1, group))", "jnp.repeat(token_mask.tokens, group, axis=2)"),
    ),
    "the token_mask of the tile before": (
        prefill,
        replace(CHUNKS, tree=True),
        PLAIN,
        Plant("prefill", "(tile, 0, 0)", "(jnp.maximum(tile - 1, 0), 0, 0)"),
    ),
    "a tree taken for a chain": (
        prefill,
        replace(CHUNKS, tree=True),
        PLAIN,
        Plant("attend_to_new", "mask.by_token or not mask.causal", "mask.chunk is not None or not mask.causal"),
    ),
    # First tokens beside a window.
    "the first tokens left out of many": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        Plant(
            "attend_to_new",
            "WindowMask.from_spec(mask, tables.shape[1] * kv.shape[3])",
            "WindowMask(mask.window, mask.chunk)",
        ),
    ),
    "the gap read for many": (
        prefill,
        FIRST_CHUNKS,
        PLAIN,
        Plant("Pages.first", "page - self.sink_pages", "0 * page"),
    ),
    "the first tokens of many counted twice": (
        prefill,
        replace(FIRST_CHUNKS, lengths=(67, 35, 9), sink_tokens=13),
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
BY_DAY = ("another tile's queries",)


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    check_noticed(CONTROLS[control], tmp_path, monkeypatch)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)


@skip_by_day("test_interpret.py passes on cases like these")
@pytest.mark.timeout(900, method="thread")
def test_unbroken(tmp_path, monkeypatch):
    check_unbroken(CONTROLS, tmp_path, monkeypatch)
