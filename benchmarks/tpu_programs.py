"""The programs whose cycles `tpu_cycles.py` asks the compiler for, each in a process of its own.

    python benchmarks/tpu_programs.py CHIP WORK COPIES_ONLY LAYERS [FOLDER [BLOCK]]

With a folder, that of the tpu-inference repository, the kernel is theirs; with a block, their batched one. Prints how
many copies in and out a kernel needs, and which operations of the program stand in the branch of a condition.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tpu_batched_peer
import tpu_peer
from flax import nnx
from jax.experimental import pallas as pl
from tpu_works import FORMS, HEADS, MODELS, WORKS, Work, one_chip, stand_ins

import jaxkv
from jaxkv._core.config.kv_packing import Apart, Nibbles, OneRow, Pairs
from jaxkv.models import Decoder, DecoderConfig, Rope
from pallas_kernels import SHAPES, AttentionShape, testing, tpu
from pallas_kernels.api import cascade
from pallas_kernels.common.batch import bundle_call
from pallas_kernels.common.quantization import find_format
from pallas_kernels.tpu import decode, pages, prefill, step, write


class Plan(NamedTuple):
    """How the kernels cut a work."""

    block_rows: int  # rows of a block in decode
    segment: int  # keys
    segments: int  # in a step
    pages: int  # in a step
    tile: int  # of queries in prefill, tokens
    page: int  # that a write goes by, tokens

    @classmethod
    def of(cls, work: Work, num_heads: int, pool, tables, window: int | None = None, groups: int = 1) -> "Plan":
        walk = pages.Pages.plan(pool, tables, window, decode.segment_tokens(pool), work.deterministic)
        tokens = work.rows if work.prefix is not None else work.tokens
        return cls(
            decode.block_rows(work.rows, num_heads * groups, pool.shape[2], pool.shape[-1], 2),
            walk.step_tokens,
            decode.segments_per_step(pool, work.rows, walk),
            walk.pages_per_step,
            step.tile_tokens(tokens, num_heads, pool, tables, np.dtype("bfloat16"), work.deterministic, groups),
            write.page_tokens(pool, find_format(work.kind).group_size),
        )

    def copies(self, work: Work, parts: int) -> tuple[int, int]:
        """In and out, that the kernel of the work needs."""
        streams = 1 if work.kind is None else 2  # scales come and go beside what they scale
        if work.kernel == "decode":  # blocks; queries, new tokens, output and new pages come and go with rows
            steps = -(-work.rows // self.block_rows) * work.steps(self.block_rows, self.segment, self.segments)
            # Each place of a step has a copy, though it may be of nothing.
            places = (steps + decode.SLOTS - 1) * self.segments * self.pages
            return streams * places, streams * work.rows
        if work.kernel == "prefill":  # queries and blocks; output
            tiles = work.tokens // self.tile
            blocks = sum(-(-(work.context + (i + 1) * self.tile) // work.block_size) for i in range(tiles))
            return tiles + streams * blocks, tiles
        runs = work.rows if work.rows > 1 else work.tokens // self.page  # new tokens, and old pages of a part; pages
        sources = parts if find_format(work.kind).group_size is None else 2  # they share bytes, but come apart
        return (sources + (streams if work.rows > 1 else 0)) * runs, streams * runs


def replace_scalars(work: Work, plan: Plan, copies_only: bool) -> None:
    """From here on kernels have no arguments in scalar memory; with `copies_only` they compute nothing."""
    scalars = stand_ins(work, plan.block_rows, plan.segment, plan.segments, plan.tile, plan.page)
    of_prefill = scalars["paged_prefill"]
    known = {
        "paged_decode": [decode.DecodeScalars(*scalars["paged_decode"])],
        "paged_prefill": [prefill.PrefillScalars(*of_prefill[:6], tuple(of_prefill[6:]) or None)],
        "paged_write": scalars["paged_write"],
    }
    pallas_call = pl.pallas_call

    def with_scalars(body, *args, grid_spec, **kwargs):
        given = known[kwargs["name"]]
        if kwargs["name"] == "paged_prefill":
            object.__setattr__(grid_spec, "grid", (max(1, work.tokens // plan.tile),))
        return pallas_call(lambda *refs: body(*given, *refs[len(given) :]), *args, grid_spec=grid_spec, **kwargs)

    pl.pallas_call = with_scalars
    if copies_only:
        prefill._attend = lambda *args, **kwargs: None
        decode._attend = lambda fetch, work, *args: [fetch(segment) for segment in range(len(work))]


def step_program(work: Work, copies_only: bool, layers: int, array: Callable[..., Any]):
    """One step of `layers` layers, from q, k and v to the output; with its plan, and how many parts a pool has."""
    shape = (SHAPES | {name: AttentionShape(*heads, 128, 1) for name, heads in HEADS.items()})[work.shape]
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    format = find_format(work.kind)
    form = {False: Apart, "head": OneRow, True: Pairs}[FORMS[work.form]](shape.head_dim)
    form = form if format.group_size is None else Nibbles(shape.head_dim)
    rank = shape.rank or form.rank
    parts, pool_heads, width = form.row_shape(2 if shape.rank is None else 1, kv_heads)
    head_dim = -(-format.stored_dim(width) // 128) * 128
    blocks = work.table // work.block_size
    storage = "bfloat16" if work.kind is None else str(format.storage_dtype)
    # Several times what is read, or XLA moves the whole pool into vector memory first; but one that large it cannot.
    read = work.rows * blocks
    num_blocks = max(4096, min(2 * read, max(read, 2**16))) + 1
    pool = array(num_blocks, parts, pool_heads, work.block_size, head_dim, dtype=storage)
    tables, counts = array(work.rows, blocks, dtype="int32"), array(work.rows, dtype="int32")
    groups = 1 if format.group_size is None else shape.head_dim // format.group_size
    plan = Plan.of(work, heads, pool, tables, shape.window, groups)
    replace_scalars(work, plan, copies_only)

    options: dict[str, Any] = {
        "soft_cap": shape.soft_cap, "window": shape.window, "deterministic": work.deterministic
    }  # fmt: skip
    known = {} if rank is None else {"rank": rank}
    options |= known | ({"scale": 0.1} if form.joins or rank is not None else {})
    tokens = (work.rows, 1) if work.kernel == "decode" else (work.tokens * work.rows,)
    if work.is_mixed:
        tokens = (work.rows - 1 + work.tokens,)
    given = head_dim if shape.rank is not None else shape.head_dim
    q, k = array(*tokens, heads, given), array(*tokens, kv_heads, given)

    def program(q, k, v, pools, tables, lengths, new, shared):
        def quantised(scale):
            return {} if scale is None else {"kv_scale": scale, "kind": work.kind}

        kv, scale = pools[0]
        k, v = form.pack_kv(k, v) if shape.rank is None else (k, None)
        if work.kernel == "write":
            return testing.run(tpu.write_kv, kv, k, v, tables, lengths, new, **known, **quantised(scale))
        if work.kernel == "prefill" and not work.layer:
            q = form.pack_queries(q, pool_heads)
            return testing.run(tpu.paged_attention, q, kv, tables, lengths, new, **options, **quantised(scale))
        written = []
        for kv, scale in pools:
            q = form.pack_queries(q, pool_heads)
            step = dict(q=q, k=k, v=v, kv=kv, tables=tables, lengths=lengths, new=new, **options, **quantised(scale))
            if work.prefix is None:
                q, kv = testing.run(tpu.write_and_attend, **step)
            else:
                call = bundle_call(**step, shared=shared)
                q, stored = cascade.read_once(tpu.write_and_attend, tpu.paged_attention, call)
                kv = stored.pools
            q = form.unpack_outputs(q, pool_heads)
            written.append(kv)
        return q, written

    scales = format.scale_shape(pool.shape, shape.head_dim, rank, form.rank is not None)
    scale = None if work.kind is None else array(*scales, dtype=str(format.scale_dtype))
    arguments = (q, k, k, [(pool, scale)] * layers, tables, counts, counts, array(4, work.rows, dtype="int32"))
    donated = () if work.kernel == "prefill" and not work.layer else 3
    return jax.jit(program, donate_argnums=donated).lower(*arguments), plan, parts


def model_program(work: Work, copies_only: bool, layers: int, array: Callable[..., Any]):
    """One step of a decoder of `layers` layers, as its users call it, weights and all."""
    fields, rope = MODELS[str(work.model)], Rope(theta=500_000.0)
    config = DecoderConfig(**fields, windows=(None,) * layers, ropes=(rope,) * layers)
    model = jax.eval_shape(lambda: Decoder(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    places: dict[str, Any] = {
        "max_seqs": work.rows, "max_seq_len": work.table, "block_size": work.block_size, "join_kv": FORMS[work.form],
    }  # fmt: skip
    # As many blocks as in the programs of a step.
    blocks = max(4096, 2 * work.rows * work.table // work.block_size)
    if work.kind is not None:
        places["dtype"] = work.kind
    cache_config = jaxkv.CacheConfig.from_model(model, num_blocks=blocks, head_dim_multiple=128, **places)
    cache = jax.eval_shape(lambda: jaxkv.init(cache_config))
    kv, tables = cache.pools[0].kv, array(work.rows, work.table // work.block_size, dtype="int32")
    plan = Plan.of(work, config.num_heads, kv, tables)
    replace_scalars(work, plan, copies_only)

    def program(model, tokens, new, cache):
        cache = jaxkv.extend(cache, new)
        return model(tokens, cache=cache, logits_at=jnp.zeros(work.rows, jnp.int32))

    model, cache = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), (model, cache))
    tokens = array(*((work.rows, 1) if work.kernel == "decode" else (work.tokens,)), dtype="int32")
    new = array(work.rows, dtype="int32")
    return jax.jit(program, donate_argnames="cache").lower(model, tokens, new, cache), plan, 2


def names_in_branches(program: str) -> list[str]:
    """Of a compiled program's operations those that stand in the branch of a condition."""
    bodies = dict(re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", program, re.DOTALL | re.MULTILINE))
    branches = re.findall(r"branch_computations=\{(.*?)\}", program)
    inside = "".join(bodies[name.strip(" %")] for names in branches for name in names.split(","))
    return re.findall(r"^ *(?:ROOT )?%(\S+) = ", inside, re.MULTILINE)


def main(chip: str, name: str, copies_only: bool, layers: int, folder: str | None = None, *form: str) -> None:
    mesh, array = one_chip(chip)
    array = functools.partial(array, dtype="bfloat16")
    work = WORKS[name]
    with jax.set_mesh(mesh):
        if folder is not None:
            (tpu_batched_peer if form else tpu_peer).compile_peer(folder, chip, work, array, *map(int, form))
            return
        make = step_program if work.model is None else model_program
        lowered, plan, parts = make(work, copies_only, layers, array)
        print(json.dumps(plan.copies(work, parts)), flush=True)
        program = lowered.compile().as_text()
    print(json.dumps(names_in_branches(program) if work.prefix == 0 else []))


if __name__ == "__main__":
    main(*sys.argv[1:3], bool(int(sys.argv[3])), int(sys.argv[4]), *sys.argv[5:])
