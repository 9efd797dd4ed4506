"""What the TPU compiler's cycle model says of a decode step of layers with states. No TPU needed; see `tpu_cycles.py`.

    JAXKV_COMPILE_SITE=.venv/compile python benchmarks/tpu_states.py [chip ...]

`copies` is the same program that computes nothing. The model lets copies in and copies out each have all of the
memory's rate, and several at once have more of it than there is: `rate` is the time that all states take one way at the
rate of `tpu_cycles.py`'s decode of 8 x 1,024 tokens (32 MiB in 30,700 cycles on v6e, 19,400 on tpu7x), which is the one
to hold a kernel against. `XLA` is a layer of XLA's own operations, of convolutions with the last inputs in groups of
channels, as the kernel takes them, and without.
"""

import argparse
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from tpu_works import one_chip

from pallas_kernels.common.state_batch import StateBatch
from pallas_kernels.tpu import mixers
from pallas_kernels.tpu.recurrence.state_decode import StateItems
from pallas_kernels.xla.recurrence.convolution import causal_conv

ROWS = 32
RATES = {"v6e": 30_700 / 2**25, "tpu7x": 19_400 / 2**25}  # cycles a byte
# A mixer, heads of keys (or groups), heads, the two widths of a head's state.
FAMILIES = {
    "Qwen3-Next": ("delta", 16, 32, 128, 128), "Kimi Linear": ("channels", 32, 32, 128, 128),
    "Nemotron-H": ("space", 8, 128, 64, 128), "Granite 4": ("space", 1, 48, 64, 128),
    "Falcon-H1": ("space", 1, 24, 64, 256),
}  # fmt: skip
CHANNELS = {"Qwen3-Next": 8192, "Kimi Linear": 12288, "Nemotron-H": 10240, "Falcon-H1": 2048}  # of convolutions
WIDTH, GROUP = 4, 128
FORMS = ("kernel", "copies", "XLA", "XLA, no groups")


class Scalars:
    """Stands in for an argument in scalar memory, which the model reads as 0; opaque, so that nothing is folded."""

    def __init__(self, first: int, step: int):
        self.first, self.step = first, step

    def __getitem__(self, index: Any) -> jax.Array:
        return jnp.asarray(self.first + self.step * index + jnp.where(jnp.asarray(index) == 9999, 3, 0), jnp.int32)


def replace_scalars(copies_only: bool) -> None:
    """From here on each row has a token, and its own slot; with `copies_only` kernels compute nothing."""
    pallas_call = pl.pallas_call

    def call(body, *arguments, grid_spec, **options):
        (blocks,) = grid_spec.grid
        rows, slots, none = Scalars(0, 1), Scalars(1, 1), Scalars(-1, 0)
        items = StateItems(rows, slots, slots, none, Scalars(0, ROWS // blocks), Scalars(ROWS, 0))
        return pallas_call(lambda _, *refs: body(items, *refs), *arguments, grid_spec=grid_spec, **options)

    pl.pallas_call = call
    if copies_only:
        mixers.update_delta = lambda inputs, *_: inputs[2]
        mixers.update_space = lambda inputs, *_: jnp.zeros((inputs[1].shape[0], inputs[0].size // inputs[1].shape[0]))
        mixers.update_conv = lambda inputs, *_, **options: inputs[0]


def compile_step(chip: str, family: str, channels: int, form: str) -> None:
    """Compiles a decode step of one layer, or of its convolution of some channels, in a process of its own, and prints
    nothing of it."""
    mesh, array = one_chip(chip)
    if form in FORMS[:2]:
        replace_scalars(form == "copies")

    def token(*axes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return array(ROWS, 1, *axes, dtype=dtype)

    kind, few, heads, *widths = FAMILIES[family]
    inner, dtype = (heads, *widths), "float32"
    if channels:
        inner, dtype = (channels // GROUP, WIDTH - 1, GROUP), "bfloat16"
        if form == "XLA, no groups":
            inner = channels, WIDTH - 1
        arrays = {"x": token(channels, dtype=dtype), "weight": array(channels, WIDTH, dtype=dtype)}
        step = functools.partial(mixers.causal_conv if form in FORMS[:2] else causal_conv, activation="silu")
        options = {"bias": array(channels, dtype=dtype)}
    elif kind == "space":
        b = token(few, widths[1], dtype="bfloat16")
        arrays = {"x": token(heads, widths[0], dtype="bfloat16"), "dt": token(heads), "A": array(heads), "B": b, "C": b}
        step, options = mixers.state_space, {"D": array(heads)}
    else:
        gates = token(heads, widths[0]) if kind == "channels" else token(heads)
        arrays = {"q": token(few, widths[0]), "k": token(few, widths[0]), "g": gates, "beta": token(heads)}
        step, options = mixers.gated_delta_rule, {"v": token(heads, widths[1], dtype="bfloat16")}
        options["scale"] = array()
    rows, states = array(ROWS, dtype="int32"), array(4 * ROWS + 1, *inner, dtype=dtype)

    def program(states, arrays, rows):
        return step(**arrays, states=states, batch=StateBatch(rows, rows, rows, None, rows))

    with jax.set_mesh(mesh):
        jax.jit(program, donate_argnums=0).lower(states, arrays | options, rows).compile()


def measure(chip: str, family: str, channels: int, form: str) -> tuple[int, int]:
    """Returns the cycles of the kernel, 0 if it is XLA that runs, and of all operations."""
    from tpu_cycles import profile

    made = profile(chip, "state_decode", family, channels, form, script=pathlib.Path(__file__))
    if made.error or bool(made.kernels) != (form in FORMS[:2]):
        raise RuntimeError(f"The compiler made no profile: {made.error}")
    if not made.kernels:
        return 0, sum(made.cycles.values())
    ((kernel, copies_in, copies_out),) = made.kernels.values()
    items = ROWS * (2 if family == "Nemotron-H" and not channels else 1)
    if not items <= min(copies_in, copies_out) <= max(copies_in, copies_out) <= items + 8:
        raise RuntimeError(f"It ran {copies_in} copies in and {copies_out} out for {items} items.")
    return kernel, sum(made.cycles.values())


def main() -> None:
    """Measures, prints and saves."""
    from _harness import save, table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=list(RATES), metavar="chip")
    rows = []
    works = [(family, 0) for family in FAMILIES] + list(CHANNELS.items())
    for chip in parser.parse_args().chips:
        for family, channels in works:
            _, _, heads, *widths = FAMILIES[family]
            kernel, total = measure(chip, family, channels, "kernel")
            state = 2 * (WIDTH - 1) * channels or 4 * heads * widths[0] * widths[1]
            rate, copies = round(RATES[chip] * ROWS * state), measure(chip, family, channels, "copies")[0]
            row = {"chip": chip, "family": family, "channels": channels or "", "kernel": kernel, "layer": total}
            row |= {"rate": rate, "copies": copies, "of rate": round(kernel / rate, 2)}
            row |= {form: measure(chip, family, channels, form)[1] if channels else "" for form in FORMS[2:]}
            rows.append(row)
            print(json.dumps(row), flush=True)
    table(rows)
    save("tpu_states", rows, jax=jax.__version__, rows_at_once=ROWS, simulated="by the compiler, without a TPU")


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[4] in FORMS:
        compile_step(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
