"""A small step through the GPU kernels: a case, the plans it runs with, and what is expected.

That comes from NumPy, which reads only what a token may see: so everything else can be poisoned. The steps are in
`trials` and `quantised_trials`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_plans import FORMS
from numpy_attention import attention

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
        tile = Tile(tokens=64, stages=2)
        decode = tuning.DecodePlan(tile, num_blocks=self.wave * self.case.num_kv_heads, part_tiles=0)
        stages = tuning.prefill_plan(self.case.head_dim, self.case.block_size).tile.stages
        prefill = tuning.PrefillPlan(Tile(tokens=self.prefill_tokens, stages=stages), **FORMS.get(self.form, {}))
        monkeypatch.setattr(tuning, "decode_plan", lambda *_: decode)
        monkeypatch.setattr(tuning, "prefill_plan", lambda *_: prefill)
        heads = -(-self.case.num_heads // 64)
        latent = tuning.DecodePlan(tile, num_blocks=self.wave * heads, part_tiles=0)
        monkeypatch.setattr(tuning, "latent_plan", lambda *_: latent)
        monkeypatch.setattr(tuning, "merge_blocks", lambda: 2)
        monkeypatch.setattr(tuning, "prefill_chunks", lambda *_: self.chunks)
        monkeypatch.setattr(work, "FEW_TILES", 1)

    def stored_inputs(self) -> tuple[Inputs, dict[str, Any], Inputs, dict[str, Any]]:
        """What the kernels get, and their options; the numbers that are held, and how a quantised pool holds them."""
        inputs, options = self.inputs()
        if self.kind is None:
            return inputs, options, inputs, {}
        inputs, scale, held = testing.quantise(self.case, inputs, self.kind)
        return inputs, options, held, {"kv_scale": scale, "kind": self.kind}

    def find_refusal(self) -> str | None:
        inputs, _, _, quantised = self.stored_inputs()
        return self._find_refusal(inputs, quantised)

    def _find_refusal(self, inputs: Inputs, quantised: dict[str, Any]) -> str | None:
        given = dict(q=inputs.q, kv=inputs.kv, rank=self.case.rank, **quantised)
        return gpu.unsupported("paged_attention", bundle_call(**given))

    def check(self, interpret) -> None:
        inputs, options, held, quantised = self.stored_inputs()
        assert self._find_refusal(inputs, quantised) is None
        attend = jax.jit(
            lambda *a: testing.run(
                gpu.paged_attention, *a, **options, **quantised, return_lse=True, interpret=interpret
            )
        )
        out, lse = attend(*inputs)
        expected_out, expected_lse = attention(*held, **options)
        testing.assert_close(out, expected_out)
        testing.assert_close(lse, expected_lse, dtype=self.case.dtype)


ONE = dict(num_kv_heads=1, **B16)
SMALL = dict(wave=12)  # rows are cut
