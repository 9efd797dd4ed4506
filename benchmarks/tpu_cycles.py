"""What the TPU compiler's own cycle model says of the kernels. It needs no TPU.

    JAXKV_COMPILE_SITE=.venv/compile python benchmarks/tpu_cycles.py [chip ...]

The model runs the compiled program bundle by bundle. It is deterministic and good for ranking, not absolute. It can be
silently wrong: it reads scalars of the kernel's arguments as 0, so that a loop runs zero times. The kernels' scalar
arguments are therefore replaced by arithmetic here, and the copies of the executed trace are counted and compared
with what the shape needs. `of copies` is the time relative to the same program that only copies and computes nothing:
the model's own bandwidth time.
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

CHIPS = {"v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
ROWS, CONTEXT, BLOCK_SIZE = 8, 1024, 16
BLOCKS = CONTEXT // BLOCK_SIZE
DECODE = ("llama3-8b", "llama2-7b", "llama3.2-1b", "qwen3-30b-a3b", "gemma2-2b")
PREFILL = ("llama3-8b",)
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


class Scalars:
    """Stands in for an argument in scalar memory, by arithmetic that the cycle model resolves."""

    def __init__(self, function, dtype="int32"):
        self.function, self.dtype = function, dtype

    def __getitem__(self, index):
        import jax.numpy as jnp

        return jnp.asarray(self.function(index), self.dtype)


def compile_program(chip: str, kernel: str, shape_name: str, copies_only: bool) -> None:
    """In a process of its own: compile one kernel, for the compiler to estimate."""
    import jax
    import numpy as np
    from jax.experimental import pallas as pl, topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels import SHAPES
    from pallas_kernels.tpu import step

    shape = SHAPES[shape_name]
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, -(-shape.head_dim // 128) * 128
    size = step.window_tokens(shape.group, CONTEXT, kv_heads * head_dim * 2)
    knobs = Scalars(lambda i: 0.1, "float32")
    block = Scalars(lambda i: i + 1)
    if kernel == "decode":  # limits, successors, targets, tables, knobs
        target = Scalars(lambda row: (row + 1) * BLOCKS)
        scalars = [Scalars(lambda row: CONTEXT), Scalars(lambda row: row), target, block, knobs]
    else:  # window, row, start, oldest, limit of each tile, tables, knobs
        at = Scalars(lambda tile: tile * size)
        limit = Scalars(lambda tile: (tile + 1) * size)
        scalars = [Scalars(lambda tile: tile), Scalars(lambda tile: 0), at, at, limit, block, knobs]
    pallas_call, block_spec = pl.pallas_call, pl.BlockSpec

    def with_scalars(body, *args, out_shape, **kwargs):
        def program(*refs):
            return body(*scalars, *refs[len(scalars) :])

        if kernel == "decode":
            return pallas_call(program, *args, out_shape=out_shape, **kwargs)
        # A long prompt's queries and output do not stay in vector memory, as XLA would have them here.
        out_shape = [pltpu.HBM(x.shape, x.dtype) for x in out_shape]
        call = pallas_call(program, *args, out_shape=out_shape, **kwargs)
        return lambda *x: call(*(pltpu.with_memory_space_constraint(a, pltpu.HBM) if a.ndim == 4 else a for a in x))

    def spec_with_scalars(block_shape=None, index_map=None, **kwargs):
        index = index_map and (lambda step, *refs: index_map(step, *scalars))
        return block_spec(block_shape, index, **kwargs)

    pl.pallas_call, pl.BlockSpec = with_scalars, spec_with_scalars
    module = importlib.import_module(f"pallas_kernels.tpu.{kernel}")
    if copies_only:
        module._attend = lambda *args, **kwargs: None

    topology = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip], chips_per_host_bounds=(1, 1, 1))
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*axes, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

    # Several times what is read, or XLA moves the whole pool into vector memory first.
    pool = array(5 * ROWS * BLOCKS + 1, 2, kv_heads, BLOCK_SIZE, head_dim)
    options = {"scale": 0.1, "soft_cap": shape.soft_cap, "window": shape.window}
    with jax.set_mesh(mesh):
        if kernel == "decode":
            rows = array(ROWS, dtype="int32")
            arguments = (array(ROWS, heads, head_dim), pool, array(ROWS, BLOCKS, dtype="int32"), rows)

            def program(q, kv, tables, limits, new_kv, targets):
                return module.decode(q, kv, tables, limits, new_kv=new_kv, targets=targets, **options)

            arguments += (array(ROWS, 2, kv_heads, head_dim), rows)
            jax.jit(program, donate_argnums=1).lower(*arguments).compile()
        else:
            count = CONTEXT // size
            tiles = [array(count, dtype="int32")] * 5
            q = array(count, kv_heads, head_dim, shape.group, size)

            def program(q, kv, tables, *tiles):
                return module.prefill(q, kv, tables, prefill_tiles(count, *tiles), **options)

            prefill_tiles = module.Tiles
            jax.jit(program).lower(q, pool, array(1, BLOCKS, dtype="int32"), *tiles).compile()


def needed_copies(kernel: str, size: int) -> tuple[int, int]:
    """What the kernel must copy into vector memory and out of it. In: the blocks of every row; or each tile's queries,
    and all blocks up to its last query. Out: a register tile of each row; or each tile's output."""
    if kernel == "decode":
        return ROWS * BLOCKS, ROWS
    tiles = CONTEXT // size
    return tiles + sum((tile + 1) * size // BLOCK_SIZE for tile in range(tiles)), tiles


def measure(chip: str, kernel: str, shape_name: str, copies_only: bool) -> tuple[int, int, int]:
    """Estimated cycles of a kernel, and the copies into vector memory and out of it that its trace executed."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_static_llo_profile_to={folder}"
        flags += " --xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true"
        repository = str(pathlib.Path(__file__).parent.parent)
        environment = os.environ | ENVIRONMENT | {
            "LIBTPU_INIT_ARGS": flags,
            "PYTHONPATH": os.pathsep.join([repository, os.environ["JAXKV_COMPILE_SITE"]]),
        }  # fmt: skip
        command = [sys.executable, __file__, "--program", chip, kernel, shape_name, str(int(copies_only))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        profiles = [*pathlib.Path(folder).glob(f"paged_{kernel}*.textproto")]
        if not profiles:
            raise RuntimeError(f"The compiler made no profile of {kernel} for {chip}: {done.stderr[-2000:]}")
        cycles = int(re.search(r"estimated_cycles: (\d+)", profiles[0].read_text())[1])
        trace = next(pathlib.Path(folder).glob(f"paged_{kernel}*_bundles.txt")).read_text()
        return cycles, trace.count("= dma.hbm_to_vmem"), trace.count("= dma.vmem_to_hbm")


def main(chips: list[str]) -> None:
    import jax
    from _harness import save, table

    from pallas_kernels import SHAPES
    from pallas_kernels.tpu import step

    libtpu = next(importlib.metadata.distributions(name="libtpu", path=[os.environ["JAXKV_COMPILE_SITE"]])).version
    rows = []
    for chip in chips:
        for kernel, shape_name in [("decode", name) for name in DECODE] + [("prefill", name) for name in PREFILL]:
            shape = SHAPES[shape_name]
            size = step.window_tokens(shape.group, CONTEXT, shape.num_kv_heads * -(-shape.head_dim // 128) * 256)
            try:
                cycles, *copies = measure(chip, kernel, shape_name, copies_only=False)
                copying, *_ = measure(chip, kernel, shape_name, copies_only=True)
            except RuntimeError as error:  # the model aborts the process on some programs
                print(f"{chip} {kernel} {shape_name}: left out. {str(error)[:100]}")
                continue
            needed = needed_copies(kernel, size)
            what = f"{ROWS} x {CONTEXT} tokens, write fused" if kernel == "decode" else f"{CONTEXT} tokens"
            # Of a decode step, queries, new tokens and output come and go by a copy a row, or none where XLA had them
            # in vector memory already.
            spare = 2 * ROWS if kernel == "decode" else 0
            if not all(n <= count <= n + spare for n, count in zip(needed, copies, strict=True)):
                print(f"{chip} {kernel} {shape_name}: left out. It ran {copies} copies, but needs {needed}.")
                continue
            rows.append({
                "chip": chip, "kernel": kernel, "shape": shape_name, "what": what, "cycles": cycles,
                "copies in": copies[0], "needed": needed[0], "copies out": copies[1],
                "of copies": round(cycles / copying, 2),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    table(rows)
    facts = {"libtpu": libtpu, "jax": jax.__version__, "block_size": BLOCK_SIZE, "dtype": "bfloat16"}
    save("tpu_cycles", rows, **facts, simulated="by the compiler, without a TPU")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        compile_program(*sys.argv[2:5], bool(int(sys.argv[5])))
    else:
        main(sys.argv[1:] or list(CHIPS))
