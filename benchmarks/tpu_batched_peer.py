"""tpu-inference's batched ragged paged attention for the compiler's cycle model, beside ours in `tpu_cycles.py`.

Its kernel is taken from a checkout of https://github.com/vllm-project/tpu-inference as it is; it works on a block of
keys of each of several rows in one step. Which ones, another kernel writes into scalar memory, once for all layers, and
the model reads that as 0. So it stands here as arithmetic of a step's number, for rows of equal lengths. New tokens are
written, as by ours. Of some sizes of blocks the best is reported.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import tpu_info
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_peer import GENERATION, HEAD_DIM, HEADS, KV_HEADS, VMEM_BYTES, load
from tpu_works import Scalars, Work, number

PACKAGE = "tpu_inference.kernels.experimental.batched_rpa"
MODULES = ("utils", "configs", "schedule", "stitch_utils", "bref_override", "flash_attention", "kernel")
VERSIONS = {6: tpu_info.ChipVersion.TPU_V6E, 7: tpu_info.ChipVersion.TPU_7X}
LANES, BUFFERS = 8, 3  # rows in a step, and steps whose keys have room
BLOCKS = (128, 256, 512)  # keys of a row in a step


def forms(work: Work) -> list[tuple[int, ...]]:
    """The sizes of blocks that are tried; none where rows are not simple to tell."""
    plain = work._replace(context=0, rows=1) == Work("decode") and work.rows % LANES == 0
    return [(size,) for size in BLOCKS if work.context % size == 0] if plain else []


def kernel_of(_: Work) -> str:
    """How the name of its kernel for decode begins."""
    return "RPAd"


def copies_needed(work: Work, name: str) -> int:
    """In: of each row and block its pages, the new token and queries, some of nothing."""
    block = int(re.search(r"-k(\d+)", name)[1])  # type: ignore[index]
    return work.rows * (work.context // block) * (block // work.block_size + 2)


def compile_peer(folder: str, chip: str, work: Work, array: Callable[..., Any], block: int) -> None:
    """Compile its step for the same work, of `block` keys of each lane's row."""
    modules = load(pathlib.Path(folder), PACKAGE, MODULES)
    kernel, configs, schedule = (modules[name] for name in ("kernel", "configs", "schedule"))
    info = tpu_info.get_tpu_info_for_chip(VERSIONS[GENERATION[chip]], 1)
    pltpu.get_tpu_info = lambda: info
    dtype, pages = jnp.dtype("bfloat16"), work.rows * work.table // work.block_size
    cfgs = configs.RpaConfigs(
        block=configs.BlockSizes(bq_sz=1, bq_c_sz=1, bkv_sz=block, batch_size=LANES, n_buffer=BUFFERS),
        model=configs.ModelConfigs(HEADS, KV_HEADS, HEAD_DIM, mask_value=float(jnp.finfo(dtype).min), sm_scale=0.1),
        serve=configs.ServingConfigs(
            num_seqs=work.rows, page_size=work.block_size, total_q_tokens=work.rows, num_page_indices=pages,
            dtype_q=dtype, dtype_kv=dtype, dtype_out=dtype,
        ),
        vmem_limit_bytes=VMEM_BYTES,
        mode=configs.RpaCase.DECODE,
    )  # fmt: skip
    told = _Schedule(work, block)
    _tell(kernel, modules["bref_override"], schedule.RpaSchedule, told, work)
    kernel.pl = _Pallas(told.steps)
    queries = array(KV_HEADS, work.rows, HEADS // KV_HEADS // 2, 2, HEAD_DIM)
    new = array(work.rows, KV_HEADS, 2, HEAD_DIM)
    cache = array(max(4096, 2 * pages) + 1, work.block_size, KV_HEADS, 2, HEAD_DIM)
    scalars = [array(n, dtype="int32") for n in (work.rows + 1, work.rows, pages)]
    planned = jax.tree.map(lambda x: array(*x.shape, dtype="int32"), schedule.RpaSchedule.create_shape_dtype(cfgs))
    step = jax.jit(lambda *arrays: kernel.rpa_kernel(*arrays, cfgs=cfgs), donate_argnums=(4, 6))
    step.lower(*scalars, planned, queries, new, cache).compile()


class _Schedule:
    """Its schedule, for rows of equal lengths: a lane goes through one row, and then the one `LANES` further on."""

    def __init__(self, work: Work, block: int):
        blocks = work.context // block
        shift, pages, row_pages = blocks.bit_length() - 1, block // work.block_size, work.table // work.block_size
        self.steps = work.rows // LANES * blocks

        def row(step, lane):
            return (step >> shift) * LANES + lane

        def which(step):
            return step & (blocks - 1)

        def is_last(step):
            return jnp.where(which(step) == blocks - 1, 1, 0)

        def new(step, lane, _):
            last_page = row(step, lane) * row_pages + work.context // work.block_size - 1
            place = last_page * work.block_size + work.block_size - 1
            numbers = dict(fetch_hbm=row(step, lane), fetch_vmem=block - 1, wb_hbm=place, wb_vmem=block - 1)
            fields = {name: Scalars(lambda _, x=x: x) for name, x in numbers.items()}
            return _Entry(**fields, fetch_val=is_last(step), wb_val=is_last(step))

        def kept(step, lane, page):
            size = work.block_size - (is_last(step) if page == pages - 1 else 0)
            return row(step, lane) * row_pages + which(step) * pages + page, page * work.block_size, jnp.int32(size)

        self.s_idx, self.q_idx, self.k_idx = _At(row), _At(lambda step, _: step & 0), _At(lambda step, _: which(step))
        self.is_last_k = self.do_writeback = _At(lambda step, _: is_last(step))
        self.dma_kv_new, self.get_dma_kv_cache = _At(new), kept
        self.get_dma_q = lambda step, lane: (row(step, lane), jnp.int32(1))


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a new token is brought from and to, and sent to."""

    fetch_hbm: Scalars
    fetch_vmem: Scalars
    wb_hbm: Scalars
    wb_vmem: Scalars
    fetch_val: Any
    wb_val: Any


class _At:
    """A function of a place in an array, looked up like one."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __getitem__(self, at: tuple) -> Any:
        return self.function(*at)


def _tell(kernel: Any, buffers: Any, planned: type, told: _Schedule, work: Work) -> None:
    """Have its body and its copies ask `told` instead of what is planned in scalar memory."""
    body, tables = kernel.rpa_body, Scalars(lambda i: i + 1)
    known = {"cu_q_lens_ref": Scalars(lambda i: i), "kv_lens_ref": number(work.context)}
    kernel.rpa_body = lambda q, kv, out, _, *rest, cfgs, **others: body(q, kv, out, told, *rest, cfgs=cfgs, **known)
    for name in ("BatchingQRef", "KVBufferedRefHeadAlongSublane", "BatchingORef"):
        of = getattr(buffers, name)
        for copy in {"copy_in", "wait_in", "copy_out", "wait_out"} & vars(of).keys():
            method = vars(of)[copy]

            def instead(self, refs, indices, method=method):
                refs = [told if isinstance(x, planned) else x for x in refs]
                return method(self, [*refs[:3], tables] if len(refs) == 4 else refs, indices)

            setattr(of, copy, instead)


@dataclasses.dataclass(frozen=True)
class _Unread:
    """An array of a schedule that nobody brings into scalar memory."""

    shape: tuple[int, ...]
    dtype: Any
    memory_space: None = None


class _Pallas:
    """Pallas as its kernel sees it: how many steps there are is known."""

    def __init__(self, steps: int):
        self.steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(pl, name)

    def pallas_call(self, body, *args, **kwargs):
        def known(cu_q_lens, kv_lens, indices, planned, *refs):
            unread = jax.tree.map(lambda x: _Unread(x.shape, x.dtype), planned)
            steps = number(self.steps, 1)
            steps.memory_space = None
            return body(cu_q_lens, kv_lens, indices, dataclasses.replace(unread, actual_steps=steps), *refs)

        return pl.pallas_call(known, *args, **kwargs)
