"""Small steps that together window_mask every branch of the kernels: what the tests pass and each mutant must fail.

What is expected comes from NumPy, which reads only what a token may see: so everything else can be poisoned.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_plans import FORMS
from seen import seen_by

from pallas_kernels import gpu, testing
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.masks import WindowMask
from pallas_kernels.gpu import tuning, work_items as work
from pallas_kernels.gpu.tiles import Tile
from pallas_kernels.testing import Case, Inputs

B16, F16 = {"dtype": "bfloat16"}, {"dtype": "float16"}
WILD = np.array([-(2**31), -1, 10**6, 2**31 - 1], np.int32)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A case, the plans it runs with, and what is done to its inputs."""

    case: Case
    wave: int = 1  # thread blocks that fill the imagined chip; 1: one item for all of a row
    waves: int = 1
    prefill_tokens: int = 64  # in a tile
    form: str = ""  # of prefill
    chunks: int = 1  # into which prefill cuts the context
    poison_before_window: bool = False  # NaN in every place that no token of its row sees, wild table entries
    poison: float = np.nan  # of what no row owns and of tails
    loud: tuple[tuple[int, int], ...] = ()  # (row, position) whose values are 100: seen or not seen is no small change
    tables: tuple[tuple[int, int, int], ...] = ()  # (row, column, block id) to set
    lengths: tuple[int, ...] | None = None  # to pass, in place of the case's
    kind: str | None = None  # how the pool is stored
    gaps: int = 0  # packed: places between one row's tokens and the next one's, with explicit offsets

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        changed = {k: v for k, v in changed.items() if v != getattr(type(self), k) and v == v}
        return ",".join([str(self.case), *(f"{k}={v}" for k, v in changed.items())]).replace(" ", "")

    def inputs(self) -> tuple[Inputs, dict[str, Any]]:
        case = self.case
        if self.gaps:
            case = dataclasses.replace(case, padding=case.padding + self.gaps * len(case.new))
        inputs, options = testing.make_inputs(case, poison=self.poison), testing.make_options(case)
        kv, tables = np.array(inputs.kv), np.array(inputs.tables)
        for row, position in self.loud:
            kv[tables[row, position // case.block_size], -1, :, position % case.block_size, : case.rank] = 100
        if self.poison_before_window:
            window_mask = WindowMask(case.window, case.chunk)
            assert window_mask.ends
            kv[0] = np.nan
            wild = np.resize(WILD, tables.shape)
            for row, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
                unseen = max(int(window_mask.first(jnp.int32(length - new))), 0)
                kept = case.sink_tokens or 0
                for position in range(kept, unseen):
                    kv[tables[row, position // case.block_size], :, :, position % case.block_size] = np.nan
                before, held = unseen // case.block_size, -(-length // case.block_size)
                first = -(-kept // case.block_size)
                tables[row, first:before], tables[row, held:] = wild[row, first:before], wild[row, held:]
        for row, column, block in self.tables:
            tables[row, column] = block
        lengths = inputs.lengths if self.lengths is None else jnp.asarray(self.lengths, jnp.int32)
        if self.gaps:
            starts = np.cumsum(case.new) - case.new + self.gaps * (1 + np.arange(len(case.new)))
            options["offsets"] = jnp.asarray(starts, jnp.int32)
        return inputs._replace(kv=jnp.asarray(kv), tables=jnp.asarray(tables), lengths=lengths), options

    def use_plans(self, monkeypatch) -> None:
        decode = tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=self.wave * self.case.num_kv_heads)
        stages = tuning.prefill_plan(self.case.head_dim, self.case.block_size).tile.stages
        prefill = tuning.PrefillPlan(Tile(tokens=self.prefill_tokens, stages=stages), **FORMS.get(self.form, {}))
        monkeypatch.setattr(tuning, "decode_plan", lambda *_: decode)
        monkeypatch.setattr(tuning, "prefill_plan", lambda *_: prefill)
        heads = -(-self.case.num_heads // 64)
        latent = tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=self.wave * heads, waves=self.waves)
        monkeypatch.setattr(tuning, "latent_plan", lambda *_: latent)
        monkeypatch.setattr(tuning, "merge_blocks", lambda: 2)
        monkeypatch.setattr(tuning, "prefill_chunks", lambda *_: self.chunks)
        monkeypatch.setattr(work, "default_waves", lambda _: self.waves)
        monkeypatch.setattr(work, "FEW_TILES", 1)

    def check(self, interpret) -> None:
        inputs, options = self.inputs()
        held, quantised = inputs, {}
        if self.kind is not None:
            inputs, scale, held = testing.quantise(self.case, inputs, self.kind)
            quantised = {"kv_scale": scale, "kind": self.kind}
        given = dict(q=inputs.q, kv=inputs.kv, rank=self.case.rank, **quantised)
        assert gpu.unsupported("paged_attention", bundle_call(**given)) is None
        attend = jax.jit(
            lambda *a: testing.run(
                gpu.paged_attention, *a, **options, **quantised, return_lse=True, interpret=interpret
            )
        )
        out, lse = attend(*inputs)
        expected_out, expected_lse = attention(*held, **options)
        testing.assert_close(out, expected_out)
        testing.assert_close(lse, expected_lse, dtype=self.case.dtype)


def attention(
    q, kv, tables, lengths, new, *, offsets=None, scale=None, soft_cap=None, window=None, sinks=None, chunk=None,
    tree=None, spans=None, sink_tokens=0, rank=None,
):  # fmt: skip
    """Paged attention one token at a time, in float64; table entries are clamped into the pool, lengths to tables."""
    q, kv, tables, lengths, new = (np.asarray(x) for x in (q, kv, tables, lengths, new))
    q, block_size = q.astype(np.float64), kv.shape[3]
    tables, lengths = np.clip(tables, 0, len(kv) - 1), np.clip(lengths, 0, tables.shape[1] * block_size)
    starts = np.cumsum(new) - new if offsets is None else np.asarray(offsets)
    group, head_dim = q.shape[-2] // kv.shape[2], q.shape[-1]
    out, lse = np.zeros((*q.shape[:-1], rank or head_dim)), np.full(q.shape[:-1], -np.inf)
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        first_place = row * q.shape[1] if q.ndim == 4 else starts[row]
        parents, numbers = (
            None if x is None else np.asarray(x).reshape(-1)[first_place : first_place + count] for x in (tree, spans)
        )
        for t in range(count):
            place, last = ((row, t) if q.ndim == 4 else starts[row] + t), length - count + t
            if last < 0:
                continue
            seen = np.array(sorted(seen_by(t, last - t, last, window, chunk, parents, numbers, sink_tokens)))
            kept = kv[tables[row, seen // block_size], :, :, seen % block_size]
            k, v = kept[:, 0, :, :head_dim], kept[:, -1, :, : rank or head_dim]
            k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
            logits = np.einsum("hd,nhd->hn", q[place], k) * (head_dim**-0.5 if scale is None else scale)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if sinks is not None:
                logits = np.concatenate([logits, np.asarray(sinks, np.float64)[:, None]], axis=1)
            most = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - most)
            total = weights.sum(axis=1, keepdims=True)
            out[place] = np.einsum("hn,nhd->hd", (weights / total)[:, : len(seen)], v)
            lse[place] = (most + np.log(total))[:, 0]
    return out, lse


ONE = dict(num_kv_heads=1, **B16)
SMALL = dict(wave=3, waves=4)  # rows are cut

DECODE = {
    "lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), **B16), **SMALL),
    # Eight tiles in a ring of two: every slot is filled four times.
    "ring": Trial(Case((500,), (1,), **ONE)),
    # One place of the last tile, or of the last but one, is not seen.
    "tails": Trial(Case((63, 127, 191, 64), (1, 1, 1, 1), **ONE)),
    # The window begins inside a block, a piece and a tile; before it there is NaN.
    "window": Trial(Case((300, 70, 237), (1, 1, 1), window=60, max_blocks=25, **ONE), poison_before_window=True),
    "window, cut": Trial(
        Case((500, 200, 350), (1, 1, 1), window=330, block_size=32, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "the window's first token": Trial(Case((190,), (1,), window=60, **ONE), loud=((0, 129), (0, 130))),
    # First tokens that end inside a block, over two tiles, at a tile's edge, and in the window's first tile; a row that
    # is shorter than they and the window. Between there is NaN, and there are no blocks.
    "first tokens": Trial(
        Case((300, 237, 70, 0, 20), (1, 1, 1, 0, 1), window=60, sink_tokens=20, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    "first tokens, cut": Trial(
        Case((500, 350, 270), (1, 1, 1), window=200, block_size=32, sink_tokens=70, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "first tokens of a tile": Trial(
        Case((330, 200), (1, 1), window=100, sink_tokens=64, num_heads=7, num_kv_heads=1, head_dim=80,
             stored_head_dim=128, block_size=8, max_blocks=60, **F16),
        poison_before_window=True, loud=((0, 63), (0, 64)),
    ),
    # Query heads of a KV head in two parts, and in three that 71 do not fill.
    "48 heads of two": Trial(Case((150, 5), (1, 1), num_heads=96, num_kv_heads=2, sinks=True, **B16), **SMALL),
    "71 heads, window": Trial(
        Case((300, 70), (1, 1), num_heads=71, window=60, soft_cap=5.0, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "head_dim 512": Trial(
        Case((150, 70), (1, 1), num_heads=10, head_dim=512, window=100, sinks=True, max_blocks=15, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "64 heads": Trial(Case((130, 0, 64), (1, 0, 1), num_heads=64, head_dim=128, **ONE)),
    "wild ids": Trial(
        Case((150, 30), (1, 1), **B16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ONE), poison=0.5, lengths=(200, 40, 97)),
    "far beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ONE), poison=0.5, lengths=(10**6, 40, 2**31 - 1)),
    "extreme logits": Trial(Case((200, 20), (1, 1), scale=40.0, **ONE), **SMALL),
    "extreme logits, capped": Trial(Case((200, 20), (1, 1), scale=1e4, soft_cap=20.0, **ONE)),
    "sinks": Trial(Case((300, 1, 0), (1, 1, 0), window=60, sinks=True, block_size=256, **B16), **SMALL),
    "group of 5": Trial(
        Case((200, 100), (1, 1), num_heads=5, num_kv_heads=1, window=64, soft_cap=5.0, block_size=24, **F16), **SMALL,
    ),
    "head_dim 80": Trial(
        Case((130, 0), (1, 0), num_heads=1, num_kv_heads=1, head_dim=80, stored_head_dim=128, sinks=True, **F16),
    ),
    "head_dim 256": Trial(
        Case((70,), (1,), num_heads=20, num_kv_heads=1, head_dim=256, block_size=8, scale=0.1, **B16),
    ),
    "group of 7": Trial(Case((40, 90), (1, 1), num_heads=14, stored_head_dim=128, max_blocks=9, **B16)),
    "explicit offsets": Trial(Case((90, 0, 40), (1, 0, 1), packed=True, **B16), gaps=2),
    "more rows than a chunk": Trial(Case((9,) * 64 + (150, 3), (0,) * 63 + (1, 1, 1), **ONE), **SMALL),
    # A few new tokens a row, as when a draft is checked: each sees one more than the last, or has a window of its own.
    "few tokens": Trial(Case((200, 5, 0, 64, 130), (3, 5, 0, 1, 2), **B16), **SMALL),
    "few tokens, window": Trial(
        Case((318, 70, 64), (5, 3, 5), window=61, block_size=32, sinks=True, max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "few tokens, the window's first token": Trial(
        Case((200,), (4,), num_heads=3, window=60, **ONE), loud=((0, 137), (0, 138), (0, 196)), **SMALL,
    ),
    "few tokens, more new than tokens": Trial(Case((64, 40), (5, 3), **ONE), poison=0.5, lengths=(3, 40)),
    # A row's first place in a chunk, its last, and one between; blocks and tiles that lie before are NaN.
    "chunk": Trial(Case((97, 96, 300), (1, 1, 1), chunk=96, max_blocks=25, **ONE), poison_before_window=True),
    "chunk, cut": Trial(
        Case((500, 255), (1, 1), chunk=256, block_size=32, sinks=True, max_blocks=25, **ONE), poison_before_window=True,
        **SMALL,
    ),
    # Tokens on both sides of a chunk's edge.
    "few tokens, chunk": Trial(
        Case((163, 98, 40), (5, 4, 1), chunk=32, num_heads=3, max_blocks=25, **ONE), poison_before_window=True, **SMALL,
    ),
    "tree": Trial(
        Case((130, 5, 0, 64), (5, 5, 0, 2), tree=True, num_heads=3, **ONE), loud=((0, 127), (3, 63)), **SMALL,
    ),
    "tree of as many tokens as fit": Trial(Case((100,), (32,), tree=True, num_heads=1, **ONE)),
    "tree, window": Trial(
        Case((130,), (8,), tree=True, window=6, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "tree, chunk": Trial(Case((130,), (8,), tree=True, chunk=64, max_blocks=25, **ONE), poison_before_window=True),
    "few tokens, first tokens": Trial(
        Case((318, 70, 64), (5, 3, 5), window=61, block_size=32, sink_tokens=33, num_heads=5, num_kv_heads=1,
             max_blocks=25, **B16),
        poison_before_window=True, **SMALL,
    ),
    "tree, first tokens": Trial(
        Case((330, 12), (8, 8), tree=True, window=6, sink_tokens=5, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "few tokens, spans": Trial(Case((40, 70), (8, 3), spans=True, window=3, **ONE)),
    "one item for each of many tiles": Trial(
        Case((64 * 39 + 5,), (1,), block_size=128, sinks=True, **ONE), wave=40,
    ),
}  # fmt: skip

BLOCKS_OF_32 = {**ONE, "block_size": 32}
# Every kind in both kernels: more tiles than slots, cut rows, a window's edges, tails, an odd group, a padded head_dim.
QUANTISED_DECODE = {
    "int8, lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), block_size=32, **B16), kind="int8", **SMALL),
    "int8, ring": Trial(Case((500,), (1,), **BLOCKS_OF_32), kind="int8"),
    "int8, window, group of 5": Trial(
        Case((237,), (1,), num_heads=5, num_kv_heads=1, head_dim=128, window=100, block_size=64, sinks=True, **F16),
        poison_before_window=True, kind="int8",
    ),
    "int8, first tokens": Trial(
        Case((300,), (1,), window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int8",
        poison_before_window=True,
    ),
    "e4m3": Trial(
        Case((130, 63), (1, 1), head_dim=80, stored_head_dim=128, block_size=32, **B16), kind="float8_e4m3fn",
    ),
    "int8, 48 heads of two": Trial(
        Case((150, 40), (1, 1), num_heads=96, num_kv_heads=2, block_size=32, **B16), kind="int8", **SMALL,
    ),
    "e5m2, few tokens": Trial(Case((200, 5), (3, 5), **BLOCKS_OF_32), kind="float8_e5m2", **SMALL),
    "int4, one tile": Trial(Case((33,), (1,), num_heads=2, **BLOCKS_OF_32), kind="int4"),
    "int4, lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), block_size=32, **B16), kind="int4", **SMALL),
    "int4, edges of blocks": Trial(
        Case((31, 32, 33, 0, 63, 64, 65), (1, 1, 1, 0, 1, 1, 1), num_heads=5, **BLOCKS_OF_32), kind="int4", **SMALL,
    ),
    "int4, ring": Trial(Case((500,), (1,), head_dim=128, **BLOCKS_OF_32), kind="int4"),
    "int4, odd groups": Trial(
        Case((130, 63), (1, 1), head_dim=80, stored_head_dim=128, block_size=32, **B16), kind="int4",
    ),
    "int4, groups across halves": Trial(
        Case((33, 129, 191), (1, 1, 1), head_dim=96, stored_head_dim=128, block_size=96, **F16), kind="int4", **SMALL,
    ),
    "int4, one group": Trial(
        Case((31, 65), (1, 1), head_dim=32, stored_head_dim=64, block_size=64, **F16), kind="int4",
    ),
    "int4, window, head_dim 256": Trial(
        Case((237,), (1,), num_heads=5, num_kv_heads=1, head_dim=256, window=100, block_size=128, sinks=True, **B16),
        poison_before_window=True, kind="int4",
    ),
    "int4, first tokens": Trial(
        Case((300,), (1,), head_dim=192, window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int4",
        poison_before_window=True,
    ),
    "int4, few tokens": Trial(Case((200, 5), (3, 5), **BLOCKS_OF_32), kind="int4", **SMALL),
}  # fmt: skip
QUANTISED_PREFILL = {
    "int8, mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), block_size=32, **B16), kind="int8", **SMALL),
    "int8, 48 heads of two": Trial(
        Case((150, 40), (9, 3), num_heads=96, num_kv_heads=2, block_size=32, **B16), kind="int8", **SMALL,
    ),
    "int8, ring": Trial(Case((440,), (9,), **BLOCKS_OF_32), kind="int8"),
    "int8, wide tiles": Trial(
        Case((390,), (40,), num_heads=2, head_dim=128, window=200, **BLOCKS_OF_32), prefill_tokens=128, kind="int8",
        poison_before_window=True,
    ),
    "int8, first tokens": Trial(
        Case((300,), (9,), window=60, sink_tokens=5, max_blocks=12, **BLOCKS_OF_32), kind="int8",
        poison_before_window=True,
    ),
    "e4m3": Trial(Case((191,), (20,), soft_cap=9.0, **BLOCKS_OF_32), kind="float8_e4m3fn"),
    "e5m2": Trial(Case((100,), (9,), **BLOCKS_OF_32), kind="float8_e5m2"),
    "int8, head_dim 512": Trial(
        Case((300, 9), (20, 3), num_heads=5, num_kv_heads=1, head_dim=512, window=150, packed=True, padding=2,
             max_blocks=12, block_size=32, **B16),
        poison_before_window=True, kind="int8", **SMALL,
    ),
    "e4m3, head_dim 320": Trial(Case((191,), (20,), head_dim=320, **BLOCKS_OF_32), kind="float8_e4m3fn"),
    "int4, mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), block_size=32, **B16), kind="int4", **SMALL),
    "int4, ring": Trial(Case((440,), (9,), head_dim=128, **BLOCKS_OF_32), kind="int4"),
    "int4, wide tiles": Trial(
        Case((390,), (40,), num_heads=2, head_dim=96, stored_head_dim=128, window=200, **BLOCKS_OF_32), kind="int4",
        poison_before_window=True, prefill_tokens=128,
    ),
    "int4, head_dim 256": Trial(Case((191,), (20,), head_dim=256, block_size=64, **F16), kind="int4"),
}  # fmt: skip

PREFILL = {
    "mixed": Trial(Case((5, 0, 150, 64), (3, 0, 70, 1), **B16), **SMALL),
    "packed": Trial(
        Case((5, 0, 150, 64), (3, 0, 70, 1), packed=True, padding=3, num_heads=5, num_kv_heads=1, sinks=True, **B16),
        **SMALL,
    ),
    "71 heads of two": Trial(
        Case((5, 0, 70, 64), (3, 0, 9, 1), packed=True, padding=3, num_heads=142, num_kv_heads=2, sinks=True, **B16),
        **SMALL,
    ),
    "48 heads, chunks": Trial(Case((330, 60), (9, 3), num_heads=48, sinks=True, packed=True, **ONE), chunks=3),
    "64 heads, tree": Trial(Case((100, 40), (6, 3), tree=True, num_heads=64, **ONE), **SMALL),
    "48 heads, window": Trial(
        Case((300,), (20,), num_heads=48, window=60, sink_tokens=20, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # Seven tiles in a ring of two, of a long context and few queries.
    "ring": Trial(Case((440,), (9,), **ONE)),
    "tails": Trial(Case((63, 191), (20, 3), **ONE)),
    "tails of wide tiles": Trial(Case((383,), (40,), num_heads=2, head_dim=128, **ONE), prefill_tokens=128),
    "wide tiles": Trial(Case((390,), (40,), num_heads=2, head_dim=128, **ONE), prefill_tokens=128),
    "window": Trial(
        Case((300, 70, 237), (20, 5, 9), window=60, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # The last token's window begins one place into a tile that causality shows wholly to all.
    "the window's first token": Trial(Case((161,), (30,), window=96, **ONE), loud=((0, 64), (0, 65))),
    "a window of less than a tile": Trial(
        Case((300, 20), (130, 2), window=50, num_heads=1, num_kv_heads=1, block_size=24, packed=True, **F16), **SMALL,
    ),
    "a window that sees some tiles wholly": Trial(
        Case(
            (90, 7), (40, 7), num_heads=20, num_kv_heads=1, head_dim=80, stored_head_dim=128, block_size=256,
            window=80, **F16,
        ),
    ),
    "head_dim 256": Trial(
        Case((200, 20), (20, 2), window=50, soft_cap=4.0, num_kv_heads=1, head_dim=256, block_size=8, **B16),
    ),
    # Consumers with columns of their own: half of them each, and of five tiles three and two.
    "head_dim 512": Trial(
        Case((200, 20), (20, 9), window=50, soft_cap=4.0, num_kv_heads=1, head_dim=512, block_size=8, sinks=True,
             packed=True, padding=2, max_blocks=40, **B16),
        poison_before_window=True, **SMALL,
    ),
    "head_dim 320": Trial(Case((70,), (5,), num_heads=5, num_kv_heads=1, head_dim=320, packed=True, **F16), gaps=1),
    "head_dim 384, chunks": Trial(
        Case((330, 60), (10, 3), num_heads=10, num_kv_heads=2, head_dim=384, sinks=True, packed=True, padding=2, **B16),
        chunks=3,
    ),
    "head_dim 512, ring": Trial(Case((440,), (9,), head_dim=512, **ONE)),
    "head_dim 512, tree": Trial(Case((100, 40), (50, 3), tree=True, num_heads=2, head_dim=512, **ONE), **SMALL),
    "head_dim 512, first tokens": Trial(
        Case((300,), (20,), num_heads=48, head_dim=512, window=60, sink_tokens=20, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    # The second row has fewer tiles than there are chunks; the first one's queries do not see all of the last.
    "chunks": Trial(Case((330, 60), (40, 3), sinks=True, packed=True, padding=2, **ONE), chunks=3),
    # Items of both consumers' tokens, of one's, and of some of it; nothing lies at a multiple of anything.
    "odd places": Trial(
        Case((52, 11), (25, 11), packed=True, num_heads=7, num_kv_heads=1, head_dim=96, stored_head_dim=128, **F16),
        gaps=3,
    ),
    "padding": Trial(Case((70, 9), (66, 5), num_heads=1, num_kv_heads=1, **B16)),  # more than 32 places without a token
    "sinks": Trial(Case((20, 3), (17, 3), num_heads=6, num_kv_heads=2, sinks=True, packed=True, **B16)),
    "chunks, window": Trial(
        Case((430,), (30,), window=200, max_blocks=30, **ONE), chunks=2, poison_before_window=True,
    ),
    "first tokens": Trial(
        Case((300, 70, 237), (20, 5, 9), window=60, sink_tokens=20, max_blocks=25, **ONE), poison_before_window=True,
    ),
    "first tokens, wide tiles": Trial(
        Case((430, 20), (40, 9), num_heads=5, num_kv_heads=1, head_dim=128, window=150, sink_tokens=130, max_blocks=30,
             packed=True, **B16),
        prefill_tokens=128, poison_before_window=True,
    ),
    "first tokens, chunks": Trial(
        Case((430, 60), (30, 3), window=150, sink_tokens=70, max_blocks=30, sinks=True, packed=True, **ONE), chunks=3,
        poison_before_window=True,
    ),
    "first tokens, tree": Trial(
        Case((300, 20), (50, 18), tree=True, window=5, sink_tokens=9, num_heads=2, packed=True, padding=2,
             max_blocks=25, **ONE),
        poison_before_window=True, **SMALL,
    ),
    "first tokens, spans": Trial(
        Case((300,), (70,), spans=True, window=4, sink_tokens=9, num_heads=2, max_blocks=25, **ONE),
        poison_before_window=True,
    ),
    # As many items as there is room for: each row's last has one token.
    "chunk": Trial(
        Case((230, 110), (60, 9), chunk=80, num_heads=2, max_blocks=25, **ONE), poison_before_window=True,
    ),
    # The first query sees all of one tile, and the others none of it.
    "the chunk's first token": Trial(Case((200,), (9,), chunk=64, **ONE), loud=((0, 128), (0, 190), (0, 192))),
    "tree": Trial(Case((150, 5, 64), (50, 3, 1), tree=True, num_heads=2, packed=True, padding=2, **ONE), **SMALL),
    "tree, window": Trial(Case((200,), (64,), tree=True, window=5, sinks=True, **ONE)),
    "tree, chunks": Trial(Case((330,), (40,), tree=True, chunk=128, max_blocks=25, **ONE), chunks=2),
    "spans": Trial(Case((60, 200), (3, 70), spans=True, packed=True, padding=3, num_heads=2, **ONE), **SMALL),
    "spans, window": Trial(Case((200,), (70,), spans=True, window=4, num_heads=2, **ONE)),
    "tight items": Trial(Case((40, 33, 33), (33, 33, 33), packed=True, **ONE)),
    "explicit offsets": Trial(Case((90, 3, 40), (30, 1, 17), packed=True, **B16), gaps=2),
    "wild ids": Trial(
        Case((150, 30), (9, 4), packed=True, **B16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40), (9, 3), **ONE), poison=0.5, lengths=(10**6, 40)),
    "more new tokens than tokens": Trial(Case((64, 40, 9), (9, 3, 2), **ONE), poison=0.5, lengths=(4, 40, 0)),
    "extreme logits": Trial(Case((100, 20), (9, 2), scale=40.0, **ONE)),
    "4, 3, 2, 1 and 0 tiles": Trial(
        Case((256, 192, 128, 64, 9), (9,) * 5, **ONE), poison=0.5, lengths=(256, 192, 128, 64, 0)
    ),
    "nothing to prefill": Trial(Case((9, 3), (1, 0), packed=True, **B16)),
}  # fmt: skip

# Rows of 136 stored as 192, of which 128 are values.
LATENT_ROWS = dict(num_kv_heads=1, head_dim=136, stored_head_dim=192, rank=128, scale=0.1)
ROWS_16 = dict(num_heads=16, **LATENT_ROWS, **B16)
LATENT = {
    "lengths": Trial(Case((5, 0, 150, 64), (1, 0, 1, 1), num_heads=5, **LATENT_ROWS, **B16), **SMALL),
    # Eight tiles in a ring of two: every slot is filled four times.
    "ring": Trial(Case((500,), (1,), **ROWS_16)),
    "tails": Trial(Case((63, 127, 191, 1), (1, 1, 1, 1), num_heads=1, block_size=8, **LATENT_ROWS, **F16)),
    "two tiles of heads, cut": Trial(
        Case((150, 70), (1, 1), num_heads=128, sinks=True, **LATENT_ROWS, **B16), **SMALL,
    ),
    "a loud token behind the last": Trial(Case((129, 3), (1, 1), **ROWS_16), loud=((0, 129), (1, 3)), poison=0.5),
    "window": Trial(Case((300, 70, 237), (1, 1, 1), window=60, max_blocks=25, **ROWS_16), poison_before_window=True),
    "the window's first token": Trial(Case((190,), (1,), window=60, **ROWS_16), loud=((0, 129), (0, 130))),
    "window, cut": Trial(
        Case((500, 350), (1, 1), window=330, block_size=32, sinks=True, soft_cap=5.0, max_blocks=25, **ROWS_16),
        poison_before_window=True, **SMALL,
    ),
    "first tokens, cut": Trial(
        Case((500, 270, 20), (1, 1, 1), window=200, block_size=32, sink_tokens=70, max_blocks=25, **ROWS_16),
        poison_before_window=True, **SMALL,
    ),
    "chunk": Trial(Case((97, 96, 300), (1, 1, 1), chunk=96, max_blocks=25, **ROWS_16), poison_before_window=True),
    "wild ids": Trial(
        Case((150, 30), (1, 1), **ROWS_16), poison=0.5, tables=((0, 1, 10**6), (0, 2, -7), (0, 3, 2**31 - 1)),
    ),
    "beyond the table": Trial(Case((64, 40, 96), (1, 1, 1), **ROWS_16), poison=0.5, lengths=(200, 40, 97)),
    "extreme logits": Trial(Case((200, 20), (1, 1), **ROWS_16 | dict(scale=20.0)), **SMALL),
    "as published": Trial(
        Case((130,), (1,), num_kv_heads=1, num_heads=16, head_dim=576, rank=512, scale=0.1, block_size=64, **B16),
    ),
    "rank 384, all of it keys": Trial(
        Case((130,), (1,), num_kv_heads=1, num_heads=7, head_dim=384, rank=384, scale=0.05, **F16), **SMALL,
    ),
    "few tokens": Trial(
        Case((200, 5, 0, 64, 130), (3, 5, 0, 1, 2), num_heads=7, sinks=True, **LATENT_ROWS, **B16), **SMALL,
    ),
    "few tokens, window": Trial(
        Case((318, 70, 64), (4, 3, 4), window=61, block_size=32, max_blocks=25, **ROWS_16), poison_before_window=True,
        **SMALL,
    ),
    "few tokens, more new than tokens": Trial(Case((64, 40), (4, 3), **ROWS_16), poison=0.5, lengths=(3, 40)),
    "few tokens, tree": Trial(
        Case((130, 5, 0, 64), (5, 5, 0, 2), tree=True, num_heads=3, **LATENT_ROWS, **B16), loud=((0, 127), (3, 63)),
        **SMALL,
    ),
    "packed": Trial(
        Case((5, 0, 150, 64), (3, 0, 20, 1), packed=True, padding=3, sinks=True, **ROWS_16), **SMALL,
    ),
    "packed, two tiles of heads": Trial(
        Case((70, 3), (3, 1), packed=True, num_heads=128, **LATENT_ROWS, **B16), **SMALL,
    ),
    "prefill": Trial(Case((191, 64, 40), (9, 1, 0), num_heads=5, padding=2, **LATENT_ROWS, **B16), **SMALL),
    "prefill, ring": Trial(Case((440,), (9,), **ROWS_16)),
    "prefill, window": Trial(
        Case((300, 70), (20, 5), window=60, max_blocks=25, **ROWS_16), poison_before_window=True,
    ),
    "prefill, the window's first token": Trial(
        Case((161,), (17,), window=96, **ROWS_16), loud=((0, 64), (0, 65), (0, 160)),
    ),
    "prefill, first tokens": Trial(
        Case((300, 70), (6, 5), window=60, sink_tokens=20, max_blocks=25, **ROWS_16), poison_before_window=True,
    ),
    "prefill, chunks": Trial(Case((330, 60), (10, 3), sinks=True, packed=True, **ROWS_16), chunks=3),
    "prefill, chunks, tree": Trial(Case((200,), (10,), tree=True, num_heads=8, **LATENT_ROWS, **B16), chunks=2),
    "prefill, tree": Trial(
        Case((150, 5, 64), (20, 3, 1), tree=True, packed=True, padding=2, **ROWS_16), **SMALL,
    ),
    "prefill, spans": Trial(Case((60, 80), (3, 17), spans=True, packed=True, padding=3, **ROWS_16), **SMALL),
    "prefill, a chunk's edge": Trial(Case((110,), (20,), chunk=96, max_blocks=25, **ROWS_16)),
    "prefill, explicit offsets": Trial(Case((90, 3, 40), (10, 1, 7), packed=True, **ROWS_16), gaps=2),
    "prefill, more new than tokens": Trial(Case((64, 40), (9, 3), **ROWS_16), poison=0.5, lengths=(4, 40)),
}  # fmt: skip
