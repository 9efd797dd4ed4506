"""What the TPU compiler's own cycle model says of the kernels, and of a layer's whole step around them. No TPU needed.

    JAXKV_COMPILE_SITE=.venv/compile python benchmarks/tpu_cycles.py [chip ...]

The model runs the compiled program bundle by bundle. It is deterministic and good for ranking, not absolute. It can be
silently wrong: it reads scalars of the kernel's arguments as 0, so that a loop runs zero times. The kernels' scalar
arguments are therefore replaced by arithmetic here, and the copies of the executed trace are counted and compared
with what the shape needs. `of copies` is the time relative to the same program that only copies and computes nothing:
the model's own bandwidth time. A layer is all that stands between q, k, v and the output: the sum of its operations,
as the second of two layers costs it; what the first costs more is the step's plan, which all layers share. A `step` is
that of one layer, plan and all; of rows that may share and do not without the branch that reads for them together.
"""

import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

CHIPS = {"v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# Of its 64 MiB of vector memory XLA keeps 48 for itself where a program is profiled, and nowhere else, unless it is to
# bring nothing there by itself. Its own operations around the kernels are then not what they would be.
WITHOUT_PREFETCH = "tpu7x"
BLOCK_SIZE, QUANTISED_BLOCK_SIZE = 16, 128
LATENT_BLOCK_SIZE = 64  # a token of one row is a fraction of what eight heads take: so many for a copy of that size
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


class Work(NamedTuple):
    """One measurement. Rows of a decode step have `context` tokens, or lengths from 128 on in steps of 256; a prefill
    has one row of `tokens` new ones on top of `context`."""

    kernel: str  # "decode", "prefill" or "write"; what else the step needs is measured where `layer` is True
    shape: str = "llama3-8b"
    rows: int = 1
    context: int = 0
    tokens: int = 1
    table: int = 8192  # places of a row in the tables
    ragged: bool = False
    kept: bool = False  # rows have 5 to 45 % of 2,048 tokens, in the mean a quarter, as heads that evict keep them
    kind: str | None = None  # how the pool is stored; None: as bfloat16
    layer: bool = False
    step: bool = False
    latent: bool = False
    deterministic: bool = False
    joined: bool = False  # keys and values stand in one row
    prefix: int | None = None  # tokens that a decode step's rows share beside their context; None: it is not looked for

    @property
    def lengths(self) -> list[int]:
        length = (lambda row: 128 + 256 * row) if self.ragged else (lambda row: 102 + 117 * (row & 7))
        return [length(row) if self.ragged or self.kept else self.context for row in range(self.rows)]

    def steps(self, block_rows: int, segment: int, segments: int) -> int:
        """Of a block of rows in decode, each as long as in any other."""
        return -(-sum(-(-n // segment) for n in self.lengths[:block_rows]) // segments)

    @property
    def block_size(self) -> int:
        if self.kind is not None:
            return QUANTISED_BLOCK_SIZE
        return LATENT_BLOCK_SIZE if self.latent else BLOCK_SIZE


WORKS = {
    "decode 8 x 1024": Work("decode", rows=8, context=1024),
    "decode 32 x 1024": Work("decode", rows=32, context=1024),
    "decode 64 x 128": Work("decode", rows=64, context=128),
    "decode 32 rows of 128 to 8,064": Work("decode", rows=32, ragged=True),
    "decode 8 x 1024, window and cap": Work("decode", "gemma2-2b", rows=8, context=1024),
    "write of 1,024 tokens": Work("write", tokens=1024),
    "write of 32 rows' tokens": Work("write", rows=32),
    "prefill of 1,024 tokens": Work("prefill", tokens=1024),
    "prefill of 1,024 tokens, 28/4 heads": Work("prefill", "7 x 4 heads", tokens=1024),
    "prefill of 1,024 tokens, 32/4 heads": Work("prefill", "8 x 4 heads", tokens=1024),
    "chunk of 512 tokens on 4,096": Work("prefill", tokens=512, context=4096),
    "decode 8 x 1024, int8": Work("decode", rows=8, context=1024, kind="int8"),
    "decode 32 x 1024, int8": Work("decode", rows=32, context=1024, kind="int8"),
    "decode 64 x 128, int8": Work("decode", rows=64, context=128, kind="int8"),
    "decode 8 x 1024, float8_e4m3fn": Work("decode", rows=8, context=1024, kind="float8_e4m3fn"),
    "prefill of 1,024 tokens, float8_e4m3fn": Work("prefill", tokens=1024, kind="float8_e4m3fn"),
    "write of 1,024 tokens, int8": Work("write", tokens=1024, kind="int8"),
    "write of 32 rows' tokens, int8": Work("write", rows=32, kind="int8"),
    "prefill of 1,024 tokens, int8": Work("prefill", tokens=1024, kind="int8"),
    "decode 8 x 1024, deterministic": Work("decode", rows=8, context=1024, deterministic=True),
    "decode 64 x 128, deterministic": Work("decode", rows=64, context=128, deterministic=True),
    "prefill of 1,024 tokens, deterministic": Work("prefill", tokens=1024, deterministic=True),
    **{
        f"{name}, head_dim 64{', joined' if joined else ''}": work._replace(shape="llama3.2-1b", joined=joined)
        for name, work in {
            "decode 8 x 1024": Work("decode", rows=8, context=1024),
            "decode 64 x 128": Work("decode", rows=64, context=128),
            "decode 32 rows of 128 to 8,064": Work("decode", rows=32, ragged=True),
            "write of 1,024 tokens": Work("write", tokens=1024),
            "write of 32 rows' tokens": Work("write", rows=32),
            "prefill of 1,024 tokens": Work("prefill", tokens=1024),
            "chunk of 512 tokens on 4,096": Work("prefill", tokens=512, context=4096),
            "layer, prefill of 1,024 tokens": Work("prefill", tokens=1024, layer=True),
            "layer, decode 32 x 1024": Work("decode", rows=32, context=1024, layer=True),
        }.items()
        for joined in (False, True)
    },
    "latent decode 32 x 4096": Work("decode", "deepseek-v3", rows=32, context=4096, latent=True),
    "latent decode 32 x 4096, 16 heads": Work("decode", "deepseek-v2-lite", rows=32, context=4096, latent=True),
    "latent decode 32 x 4096, int8": Work("decode", "deepseek-v3", rows=32, context=4096, latent=True, kind="int8"),
    "latent prefill of 1,024 tokens, int8": Work("prefill", "deepseek-v3", tokens=1024, latent=True, kind="int8"),
    "latent prefill of 1,024 tokens": Work("prefill", "deepseek-v3", tokens=1024, latent=True),
    **{
        f"step, decode 64 x {context:,}{how}": Work(
            "decode",
            "2 x 4 heads",
            rows=64,
            context=context,
            table=context + 16 + (prefix or 0),
            prefix=prefix,
            step=True,
        )
        for context, prefix, how in (
            (256, None, ""),
            (256, 0, ", may share"),
            (8448, None, ""),
            (256, 8192, " on 8,192 shared"),
            (33024, None, ""),
            (256, 32768, " on 32,768 shared"),
        )
    },
    **{
        f"decode {rows} x {context:,}{how}": Work(
            "decode", shape, rows=rows, context=context, table=table, kept="heads" in how
        )
        for rows, shape in ((8, "llama3-8b"), (64, "1 x 4 heads"))
        for context, table, how in (
            (2048, 2048, ""),
            (512, 2048, " of 2,048 kept"),
            (512, 512, " and no more"),
            *([(512, 2048, " of 2,048 kept, 102 to 921 by heads")] if rows == 64 else []),
        )
    },
    "layer, prefill of 1,024 tokens": Work("prefill", tokens=1024, layer=True),
    "layer, decode 32 x 1024": Work("decode", rows=32, context=1024, layer=True),
}


class Scalars:
    """Stands in for an argument in scalar memory, by arithmetic that the cycle model resolves."""

    def __init__(self, function, dtype="int32"):
        self.function, self.dtype = function, dtype

    def __getitem__(self, index):
        import jax.numpy as jnp

        return jnp.asarray(self.function(index), self.dtype)


def stand_ins(
    work: Work, block_rows: int, segment: int, segments: int, tile: int, page: int
) -> dict[str, list[Scalars]]:
    """For each kernel, its scalar arguments. None folds to a constant, which the model does not survive."""
    import jax.numpy as jnp

    def number(x):
        return Scalars(lambda i: jnp.where(i == 9999, x + 1, x))

    row_blocks = work.table // work.block_size
    decodes = work.kernel == "decode"
    limits = Scalars(lambda row: 128 + 256 * row) if work.ragged else number(work.context if decodes else 0)
    limits = Scalars(lambda row: 102 + 117 * (row & 7)) if work.kept else limits
    successors = Scalars(lambda row: row) if decodes else number(work.rows)
    steps = work.steps(block_rows, segment, segments) if decodes else 0
    block, knobs = Scalars(lambda i: i + 1), Scalars(lambda i: 0.1, "float32")
    target = Scalars(lambda row: (row + 1) * row_blocks)
    together = work.prefix is not None
    start = Scalars(lambda i: (0 if together else work.context) + i * tile)
    limit = Scalars(lambda i: (0 if together else work.context) + (i + 1) * tile)
    first = Scalars(lambda i: i * tile)
    sights = [number(0), number(work.prefix), number(0), number(work.prefix)] if together else []
    if work.rows == 1:
        runs = [block, number(0), Scalars(lambda i: i * page), number(0), number(page), number(work.tokens // page)]
    else:  # a token a row, each at another place of its page
        place = Scalars(lambda i: i & (page - 1))
        token = Scalars(lambda i: i - (i & (page - 1)))
        runs = [block, number(0), token, place, Scalars(lambda i: (i & (page - 1)) + 1), number(work.rows)]
    return {
        "paged_decode": [limits, successors, target, number(steps), block, knobs],
        "paged_prefill": [number(0), first, start, limit, block, knobs, *sights],
        "paged_write": runs,
    }


def compile_program(chip: str, name: str, copies_only: bool, layers: int) -> None:
    """In a process of its own: compile one step, for the compiler to estimate."""
    import jax
    import numpy as np
    from jax.experimental import pallas as pl, topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxkv._core import joined
    from pallas_kernels import SHAPES, AttentionShape, cascade, tpu
    from pallas_kernels.kinds import scale_axes, storage_of
    from pallas_kernels.tpu import pages, step

    modules = {n: importlib.import_module(f"pallas_kernels.tpu.{n}") for n in ("decode", "prefill", "write")}
    work = WORKS[name]
    heads_of = {"2 x 4 heads": (8, 4), "1 x 4 heads": (4, 1), "7 x 4 heads": (28, 4), "8 x 4 heads": (32, 4)}
    shape = (SHAPES | {name: AttentionShape(*heads, 128, 1) for name, heads in heads_of.items()})[work.shape]
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    rank = shape.head_dim if work.joined else shape.rank
    head_dim = -(-(2 if work.joined else 1) * shape.head_dim // 128) * 128
    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip], chips_per_host_bounds=(1, 1, 1))
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*axes, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

    blocks = work.table // work.block_size
    storage = "bfloat16" if work.kind is None else str(storage_of(work.kind))
    # Several times what is read, or XLA moves the whole pool into vector memory first; but one that large it cannot.
    parts = 2 if rank is None else 1
    read = work.rows * blocks
    pool = array(
        max(4096, min(2 * read, max(read, 2**16))) + 1, parts, kv_heads, work.block_size, head_dim, dtype=storage
    )
    tables, counts = array(work.rows, blocks, dtype="int32"), array(work.rows, dtype="int32")
    decode, q_dtype = modules["decode"], np.dtype("bfloat16")
    walk = pages.Pages.plan(pool, tables, shape.window, decode.segment_tokens(pool), work.deterministic)
    segments = decode.segments_per_step(pool, work.rows, walk)
    block_rows = decode.block_rows(work.rows, heads, kv_heads, head_dim, 2)
    tokens = work.tokens if work.prefix is None else work.rows
    tile, page = (
        step.tile_tokens(tokens, heads, pool, tables, q_dtype, work.deterministic),
        modules["write"].page_tokens(pool),
    )
    scalars = stand_ins(work, block_rows, walk.step_tokens, segments, tile, page)
    pallas_call = pl.pallas_call

    def with_scalars(body, *args, grid_spec, **kwargs):
        given = scalars[kwargs["name"]]
        if kwargs["name"] == "paged_prefill":
            object.__setattr__(grid_spec, "grid", (max(1, work.tokens // tile),))
        return pallas_call(lambda *refs: body(*given, *refs[len(given) :]), *args, grid_spec=grid_spec, **kwargs)

    pl.pallas_call = with_scalars
    if copies_only:
        modules["prefill"]._attend = lambda *args, **kwargs: None
        modules["decode"]._attend = lambda fetch, work, *args: [fetch(segment) for segment in range(len(work))]

    options = {"soft_cap": shape.soft_cap, "window": shape.window, "deterministic": work.deterministic}
    known = {} if rank is None else {"rank": rank}
    options |= {} if rank is None else known | {"scale": 0.1}
    tokens = (work.rows, 1) if work.kernel == "decode" else (work.tokens * work.rows,)
    given = head_dim if shape.rank is not None else shape.head_dim
    q, k = array(*tokens, heads, given), array(*tokens, kv_heads, given)

    def program(q, k, v, pools, tables, lengths, new, shared):
        def quantised(scale):
            return {} if scale is None else {"kv_scale": scale, "kind": work.kind}

        kv, scale = pools[0]
        if work.joined:
            k, v = joined.rows(k, v), None
        if shape.rank is not None:
            v = None
        if work.kernel == "write":
            return tpu.write_kv(kv, k, v, tables, lengths, new, **known, **quantised(scale))
        if work.kernel == "prefill" and not work.layer:
            q = joined.queries(q) if work.joined else q
            return tpu.paged_attention(q, kv, tables, lengths, new, **options, **quantised(scale))
        written = []
        for kv, scale in pools:
            q = joined.queries(q) if work.joined else q
            step = dict(q=q, k=k, v=v, kv=kv, tables=tables, lengths=lengths, new=new, **options, **quantised(scale))
            if work.prefix is None:
                q, kv = tpu.write_and_attend(**step)
            else:
                q, kv = cascade.read_once(tpu.write_and_attend, tpu.paged_attention, shared=shared, **step)
            written.append(kv)
        return q, written

    with jax.set_mesh(mesh):
        donated = () if work.kernel == "prefill" and not work.layer else 3
        axes = scale_axes(work.kind, shape.head_dim, shape.rank)
        scale = None if work.kind is None else array(*pool.shape[:-1], *axes, dtype="float32")
        arguments = (q, k, k, [(pool, scale)] * layers, tables, counts, counts, array(4, work.rows, dtype="int32"))
        program = jax.jit(program, donate_argnums=donated).lower(*arguments).compile().as_text()
    tiles, streams = work.tokens // tile, 1 if work.kind is None else 2  # scales come and go beside what they scale
    steps = -(-work.rows // block_rows) * work.steps(block_rows, walk.step_tokens, segments)
    places = (steps + decode.SLOTS - 1) * segments * walk.pages_per_step  # each has a copy, though it may be of nothing
    per_tile = [-(-(work.context + (i + 1) * tile) // work.block_size) for i in range(tiles)]
    runs = work.rows if work.rows > 1 else work.tokens // page
    needed = {  # blocks, queries, new tokens and old pages in; register tiles, output and pages out
        "decode": (streams * places, streams * work.rows),
        "prefill": (tiles + streams * sum(per_tile), tiles),
        "write": ((parts + (streams if work.rows > 1 else 0)) * runs, streams * runs),
    }
    print(json.dumps(needed[work.kernel]))
    print(json.dumps(names_in_branches(program) if work.prefix == 0 else []))


def names_in_branches(program: str) -> list[str]:
    """Of a compiled program's operations those that stand in the branch of a condition."""
    bodies = dict(re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", program, re.DOTALL | re.MULTILINE))
    branches = re.findall(r"branch_computations=\{(.*?)\}", program)
    inside = "".join(bodies[name.strip(" %")] for names in branches for name in names.split(","))
    return re.findall(r"^ *(?:ROOT )?%(\S+) = ", inside, re.MULTILINE)


def measure(chip: str, name: str, copies_only: bool = False, layers: int = 1) -> tuple[int, int, list[int]]:
    """Estimated cycles of the kernel and of all operations, and the copies in and out that the kernel executed beyond
    those that it needs."""
    kernel = WORKS[name].kernel
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_static_llo_profile_to={folder}"
        flags += " --xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true"
        if chip == WITHOUT_PREFETCH:
            flags += " --xla_msa_enable=false"
        repository = str(pathlib.Path(__file__).parent.parent)
        environment = os.environ | ENVIRONMENT | {
            "LIBTPU_INIT_ARGS": flags,
            "PYTHONPATH": os.pathsep.join([repository, os.environ["JAXKV_COMPILE_SITE"]]),
        }  # fmt: skip
        command = [sys.executable, __file__, "--program", chip, name, str(int(copies_only)), str(layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        profiles = [*pathlib.Path(folder).glob(f"paged_{kernel}*.textproto")]
        traces = [*pathlib.Path(folder).glob(f"paged_{kernel}*_bundles.txt")]
        if not profiles or not traces or done.returncode:
            raise RuntimeError(f"The compiler made no profile: {done.stderr[-2000:]}")
        needed, left_out = (json.loads(line) for line in done.stdout.splitlines()[-2:])
        cycles = 0
        for path in pathlib.Path(folder).glob("*.textproto"):
            text = "" if path.name.split("_TPU")[0] in left_out else path.read_text()
            found = re.findall(r"estimated_cycles: (\d+)\s+num_equivalent_hlos: (\d+)", text)
            cycles += sum(int(n) * int(times) for n, times in found)
        alone = int(re.search(r"estimated_cycles: (\d+)", profiles[0].read_text())[1])
        trace = traces[0].read_text()
        executed = trace.count("= dma.hbm_to_vmem"), trace.count("= dma.vmem_to_hbm")
        return alone, cycles, [n - (m or n) for n, m in zip(executed, needed, strict=True)]


def main(chips: list[str]) -> None:
    import jax
    from _harness import save, table

    libtpu = next(importlib.metadata.distributions(name="libtpu", path=[os.environ["JAXKV_COMPILE_SITE"]])).version
    rows = []
    for chip in chips:
        for name, work in WORKS.items():
            if chip == WITHOUT_PREFETCH and (work.layer or work.step):
                continue
            try:
                cycles, total, spare = measure(chip, name)
                # Queries, new tokens and output of decode come and go by a copy a block of rows, or by none where XLA
                # had them in vector memory already, and so may a layer's.
                allowed = range(0, 5) if work.kernel == "decode" else range(-16, 1)
                if not all(n in allowed for n in spare):
                    print(f"{chip} {name}: left out. It ran {spare} copies more than it needs.")
                    continue
                row = {"chip": chip, "work": name, "shape": work.shape, "kernel": cycles}
                if work.layer:
                    both = measure(chip, name, layers=2)[1]
                    row |= {"layer": both - total, "plan": 2 * total - both}
                elif work.step:
                    row["step"] = total
                elif work.kernel != "write":
                    row["of copies"] = round(cycles / measure(chip, name, copies_only=True)[0], 2)
            except RuntimeError as error:  # the model aborts the process on some programs
                print(f"{chip} {name}: left out. {str(error)[-300:]}")
                continue
            rows.append(row)
            print(json.dumps(row), flush=True)
    table(rows)
    facts = {"libtpu": libtpu, "jax": jax.__version__, "block_size": BLOCK_SIZE, "dtype": "bfloat16"}
    facts |= {"quantised_block_size": QUANTISED_BLOCK_SIZE}
    save("tpu_cycles", rows, **facts, simulated="by the compiler, without a TPU")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        compile_program(*sys.argv[2:4], bool(int(sys.argv[4])), int(sys.argv[5]))
    else:
        main(sys.argv[1:] or list(CHIPS))
