"""What the TPU compiler's cycle model says of chunks of layers with states. No TPU needed; see `tpu_cycles.py`.

    JAXKV_COMPILE_SITE=.venv/compile python benchmarks/tpu_state_chunks.py [chip ...] [--peer FOLDER]

One row of 128 and of 256 tokens with Qwen3-Next's heads, and with Kimi Linear's, whose gates are by channel: what a
further chunk of 64 costs is half of the difference. Beside the latter four chunks of 16 tokens as XLA computes them,
without what lies around them in its scan.
A mixed step of 256 tokens: 31 rows of one each, and a prompt, all of them in chunks or shared out as they are.
With the folder of the tpu-inference repository its kernel runs in the same model, see `tpu_states_peer.py`: over two
and four rows of one chunk each, and in decode over 32 rows.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tpu_peer
import tpu_states_peer
from jax.experimental import pallas as pl
from tpu_states import FAMILIES, ROWS
from tpu_works import Scalars, one_chip

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu import mixers
from pallas_kernels.tpu.recurrence.products import CHUNK
from pallas_kernels.tpu.recurrence.state_chunk import STAGES
from pallas_kernels.tpu.recurrence.state_decode import StateItems
from pallas_kernels.tpu.recurrence.state_prefill import ChunkScalars
from pallas_kernels.xla.recurrence.formulas import TokenInputs, run_chunk
from pallas_kernels.xla.recurrence.steps import CHUNK_BY_CHANNEL

HEADS = FAMILIES["Qwen3-Next"][1:]  # of keys, of values, and their widths
OURS = {"ours": "Qwen3-Next", "ours, gates by channel": "Kimi Linear"}
XLA = "XLA, gates by channel"
DTYPES = ("bfloat16", "float32")  # of values
PEER = "fused_conv1d_gdn"


FORMS = ("all in chunks", "shared out")  # of a mixed step


def replace_scalars(tokens: int, alone: int = 0, decoded: int = 0) -> None:
    """From here on a step has one row of so many tokens, which has a state.

    Args:
      alone: rows of one token before it, each of which is a chunk.
      decoded: rows of one token before it that decode.
    """
    pallas_call, chunks = pl.pallas_call, alone + -(-tokens // CHUNK)
    last = chunks - 1
    slots, none = Scalars(lambda i: i + 1), Scalars(lambda i: jnp.where(i == 9999, 1, -1))

    def is_alone(chunk):  # never known beforehand, or the compiler leaves out what chunks of fewer tokens need
        return (chunk < alone) | (chunk == 9999)

    scalars = ChunkScalars(
        Scalars(lambda i: jnp.where(i <= alone, i + 1, -2)),
        Scalars(lambda i: jnp.where((i < alone) | (i == last), i + 1, -2)),
        none,
        Scalars(lambda i: decoded + i + jnp.where(i > alone, (CHUNK - 1) * (i - alone), 0)),
        Scalars(lambda i: jnp.where(i == last, tokens - (last - alone) * CHUNK, jnp.where(is_alone(i), 1, CHUNK))),
        Scalars(lambda _: chunks), None, Scalars(lambda i: jnp.where(i == 9999, 0.5, 0.25), "float32"),
    )  # fmt: skip
    items = StateItems(
        Scalars(lambda i: i), slots, slots, none, Scalars(lambda i: i * decoded), Scalars(lambda _: decoded)
    )

    def call(body, *arguments, grid_spec, name, **options):
        told = scalars if name == "state_prefill" else items
        if name == "state_prefill":
            groups = grid_spec.grid[1]
            object.__setattr__(grid_spec, "grid", (chunks + -(-(STAGES - 1) // groups), groups))
            before = -(-(STAGES + 1) // groups)
            told = told._replace(steady=Scalars(lambda i: jnp.where((i - before > alone) & (i + 1 < last), 1, 0)))

        def tell(spec: pl.BlockSpec) -> pl.BlockSpec:
            place = spec.index_map
            return spec if place is None else pl.BlockSpec(spec.block_shape, lambda *at: place(*at[:-1], told))

        for side in ("in_specs", "out_specs"):
            specs = getattr(grid_spec, side)
            setattr(grid_spec, side, jax.tree.map(tell, specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec)))
        return pallas_call(lambda _, *refs: body(told, *refs), *arguments, grid_spec=grid_spec, name=name, **options)

    pl.pallas_call = call


def compile_chunks(array: Callable[..., Any], tokens: int, dtype: str, family: str, form: str = "") -> None:
    """Compiles a step of one layer and one row, or a mixed one in one of its forms."""
    rows = ROWS if form else 1
    if form == FORMS[0]:
        mixers._share = lambda decode, prefill, tokens, axes, states, batch: prefill(tokens, states, batch)
        replace_scalars(tokens - rows + 1, rows - 1)
    else:
        replace_scalars(tokens - rows + 1, decoded=rows - 1)
    kind, few, heads, width, value_width = FAMILIES[family]
    keys, gates = array(tokens, few, width), array(tokens, heads)
    arrays = dict(q=keys, k=keys, v=array(tokens, heads, value_width, dtype=dtype), g=gates, beta=gates, scale=array())
    if kind == "channels":
        arrays["g"] = array(tokens, heads, width)
    states, row = array(4 * ROWS + 1, heads, width, value_width), array(rows, dtype="int32")

    def program(states, arrays, row):
        return mixers.gated_delta_rule(**arrays, states=states, batch=StateBatch(row, row, row, row, row))

    jax.jit(program, donate_argnums=0).lower(states, arrays, row).compile()


def compile_xla(array: Callable[..., Any]) -> None:
    """Compiles a chunk of one row as XLA's scan has it."""
    _, _, heads, width, value_width = FAMILIES["Kimi Linear"]
    keys, values = (array(1, CHUNK_BY_CHANNEL, heads, n) for n in (width, value_width))
    inputs = TokenInputs(keys, keys, values, keys, array(1, CHUNK_BY_CHANNEL, heads))
    run = functools.partial(run_chunk, transposed=False)
    jax.jit(run, donate_argnums=1).lower(inputs, array(1, heads, width, value_width)).compile()


def compile_step(
    chip: str, tokens: int, dtype: str, family: str, folder: str = "", rows: int = 1, form: str = ""
) -> None:
    """Compiles ours, or with a folder tpu-inference's, for a chip that is not there."""
    mesh, array = one_chip(chip)
    with jax.set_mesh(mesh):
        if folder:
            tpu_states_peer.compile_peer(folder, chip, array, rows, tokens, HEADS)
        elif family == XLA:
            compile_xla(array)
        else:
            compile_chunks(array, tokens, dtype, family, form)


def measure(chip: str, kernel: str, *arguments: Any) -> tuple[int, int]:
    """Returns the cycles of the kernel, 0 if it is XLA that runs, and of all operations."""
    from tpu_cycles import profile

    made = profile(chip, kernel, *arguments, script=pathlib.Path(__file__))
    if arguments[-1] == XLA:
        return 0, sum(made.cycles.values())
    if len(made.kernels) != 1:
        raise RuntimeError(f"The compiler made no profile: {made.error}")
    ((cycles, _, _),) = made.kernels.values()
    return cycles, sum(made.cycles.values())


def measure_mixed(chip: str, form: str) -> tuple[int, int]:
    """Returns the cycles of all kernels of a mixed step, and of all operations."""
    from tpu_cycles import profile

    made = profile(chip, "state_", 8 * ROWS, DTYPES[0], OURS["ours"], form, script=pathlib.Path(__file__))
    if len(made.kernels) != 1 + FORMS.index(form):
        raise RuntimeError(f"The compiler made no profile: {made.error}")
    return sum(cycles for cycles, _, _ in made.kernels.values()), sum(made.cycles.values())


def main() -> None:
    """Measures, prints and saves."""
    from _harness import save, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=["v6e", "tpu7x"], metavar="chip")
    parser.add_argument("--peer", metavar="FOLDER", help="of tpu-inference: its kernel beside ours")
    given, rows = parser.parse_args(), []
    for chip in given.chips:
        works = [
            (f"{name}, values in {dtype}", [("state_prefill", n, dtype, family) for n in (128, 256)])
            for name, family in OURS.items()
            for dtype in DTYPES
        ]
        if given.peer:
            works.append(("tpu-inference", [(PEER, CHUNK, "", "", given.peer, n) for n in (2, 4)]))
        for name, (two, four) in works:
            (cycles, layer), (more, _) = measure(chip, *two), measure(chip, *four)
            rows.append({"chip": chip, "kernel": name, "two chunks": cycles, "layer": layer})
            rows[-1]["a further chunk"] = (more - cycles) // 2
            print(json.dumps(rows[-1]), flush=True)
        for form in FORMS:
            cycles, layer = measure_mixed(chip, form)
            rows.append({"chip": chip, "kernel": f"a mixed step, {form}", "cycles": cycles, "layer": layer})
            print(json.dumps(rows[-1]), flush=True)
        cycles = measure(chip, "", CHUNK_BY_CHANNEL, "", XLA)[1]
        rows.append({"chip": chip, "kernel": XLA, "a further chunk": CHUNK // CHUNK_BY_CHANNEL * cycles})
        print(json.dumps(rows[-1]), flush=True)
        if given.peer:
            decode = measure(chip, PEER, 1, "", "", given.peer, ROWS)[0]
            rows.append({"chip": chip, "kernel": f"tpu-inference, decode of {ROWS} rows", "cycles": decode})
            print(json.dumps(rows[-1]), flush=True)
    table(rows)
    facts = {"tpu-inference": tpu_peer.commit_of(given.peer)} if given.peer else {}
    save("tpu_state_chunks", rows, jax=jax.__version__, simulated="by the compiler, without a TPU", **facts)


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[2].isdigit():
        chip, tokens, dtype, family, *others = sys.argv[1:]
        form, peer = (others[0], []) if others and others[0] in FORMS else ("", others)
        compile_step(chip, int(tokens), dtype, family, *peer[:1], *map(int, peer[1:]), form=form)
    else:
        main()
