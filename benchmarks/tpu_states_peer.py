"""tpu-inference's gated delta net for the compiler's cycle model, beside ours in `tpu_states.py`.

Its kernel is taken from a checkout of https://github.com/vllm-project/tpu-inference as it is, with its own sizes of
tiles; it computes convolution, gates and states in one pass, as its models do. Which rows and tokens a tile has is told
by arrays in scalar memory, which the model reads as 0: what they would say is added to them here.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import tpu_info
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_batched_peer import VERSIONS
from tpu_peer import GENERATION, load
from tpu_works import Scalars

PACKAGE = "tpu_inference.kernels.gdn"
MODULES = ("config", "memory_ref", "metadata", "vmem_ldst", "compute_conv1d", "compute_gdn", "wrapper")
DECODE_ROWS, CHUNK = 4, 64  # of a tile, by its defaults


def compile_peer(folder: str, chip: str, array: Any, rows: int, tokens: int, heads: tuple[int, int, int, int]) -> None:
    """Compiles its step of rows with so many new tokens each; `heads` are of keys, of values, and their widths."""
    info = tpu_info.get_tpu_info_for_chip(VERSIONS[GENERATION[chip]], 1)
    pltpu.get_tpu_info = lambda: info
    load(pathlib.Path(folder), PACKAGE, ("triangle_solver",))
    modules = load(pathlib.Path(folder), f"{PACKAGE}.v3", MODULES)
    wrapper = modules["wrapper"]
    outer = wrapper.outer_kernel

    def told(metadata: Any, *rest: Any, cfg: Any, **others: Any) -> None:
        # Of a number that is known the compiler makes a constant, and of what stands in memory the model knows nothing.
        def run(again: Any, _: None) -> None:
            outer(_Metadata.read(metadata, cfg, rows, tokens, again), *rest, cfg=cfg, **others)

        jax.lax.fori_loop(0, 2, run, None)

    wrapper.outer_kernel = told
    wrapper.pl = _Pallas("batched" if tokens == 1 else "per_seq")
    few, many, width, value_width = heads
    dim, count = 2 * few * width + many * value_width, rows * tokens
    conv, states = array(4 * rows + 1, 3, dim, dtype="bfloat16"), array(4 * rows + 1, many, width, value_width)
    inputs = array(count, dim, dtype="bfloat16"), array(count, many), array(count, many), conv, states
    weights = array(dim, 1, 4, dtype="bfloat16"), None, array(many), array(many)
    numbers = [array(n, dtype="int32") for n in (rows + 1, rows, 3, rows)]
    sizes = {"n_kq": few, "n_v": many, "d_k": width, "d_v": value_width, "kernel_size": 4}
    wrapper.fused_conv1d_gdn.lower(*inputs, *weights, *numbers, **sizes).compile()


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """Its metadata as rows of equal lengths have them: decode by tiles of rows, or one row's chunks after another."""

    num_tiles: Any
    p_id_to_s_idx: Any
    p_id_to_r_base: Any
    p_id_to_r_size: Any
    p_id_is_first_tile: Any
    p_id_is_last_tile: Any
    s_idx_has_initial_state: Any
    s_idx_to_state_indices: Any
    s_idx_to_read_offset: Any

    @classmethod
    def read(cls, real: Any, cfg: Any, rows: int, tokens: int, again: Any) -> "_Metadata":
        chunks = tokens // CHUNK
        if cfg.mode == "batched":
            tiles, row = (rows // DECODE_ROWS, lambda p, i: p * DECODE_ROWS + i) if tokens == 1 else (0, lambda p, i: p)
            base, size, first, last = row, 1, lambda p: p >= 0, lambda p: p >= 0
        else:
            tiles, size, shift = (0, 1, 0) if tokens == 1 else (rows * chunks, CHUNK, chunks.bit_length() - 1)
            row, base = (lambda p, i: p >> shift), (lambda p, i: p * CHUNK)
            first, last = (lambda p: (p & (chunks - 1)) == 0), (lambda p: (p & (chunks - 1)) == chunks - 1)

        return cls(
            num_tiles=Scalars(lambda _: jnp.where(again == 0, tiles, 0)),
            p_id_to_s_idx=Scalars(lambda at: row(*at)),
            p_id_to_r_base=Scalars(lambda at: base(*at)),
            p_id_to_r_size=Scalars(lambda at: real.p_id_to_r_size[at] + size),
            p_id_is_first_tile=Scalars(lambda at: first(at[0]), "bool"),
            p_id_is_last_tile=Scalars(lambda at: last(at[0]), "bool"),
            s_idx_has_initial_state=Scalars(lambda row: real.s_idx_has_initial_state[row] == 0, "bool"),
            s_idx_to_state_indices=Scalars(lambda row: row + 1),
            s_idx_to_read_offset=Scalars(lambda row: real.s_idx_to_read_offset[row]),
        )


class _Pallas:
    """Pallas as its wrapper sees it: of its two kernels, for tiles of rows and for chunks of one, only one runs."""

    def __init__(self, mode: str):
        self.mode = mode

    def __getattr__(self, name: str) -> Any:
        return getattr(pl, name)

    def pallas_call(self, body: Any, *, name: str, out_shape: Any, **options: Any) -> Any:
        if self.mode in name:
            return pl.pallas_call(body, name=name, out_shape=out_shape, **options)
        return lambda _, qkv, b, a, conv, states, out, weights: (
            jnp.zeros_like(out_shape[0]) if out is None else out,
            conv,
            states,
        )
