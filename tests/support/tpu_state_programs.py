"""Compiles the TPU kernels that update states for chips that are not there, and prints what the compiler says as JSON.

`python tpu_state_programs.py CHIP FAMILY[:TOKENS[:ROWS]] ...`; "four" is four v6e chips, over which heads are divided.
"""

import json
import os
import re
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import pallas_kernels
from pallas_kernels.tpu.pages import VMEM_BYTES
from pallas_kernels.tpu.recurrence import state_decode, state_prefill

TOPOLOGIES = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1", "four": "v6e:2x2"}
ROWS = 32
# Families that `jaxkv.models` reads: a mixer, heads of keys (or groups), heads, the two widths of a head's state.
FAMILIES = {
    "qwen3-next": ("delta", 16, 32, 128, 128), "kimi-linear": ("channels", 32, 32, 128, 128),
    "nemotron-h": ("space", 8, 128, 64, 128), "granite4": ("space", 1, 48, 64, 128),
    "falcon-h1": ("space", 1, 24, 64, 256), "small": ("delta", 4, 8, 128, 128),
    "small-channels": ("channels", 4, 8, 128, 128),
    # Convolutions: groups of channels, inputs that are kept, channels of a group.
    "qwen3-next-conv": ("conv", 0, 64, 3, 128), "kimi-linear-conv": ("conv", 0, 96, 3, 128),
    "nemotron-h-conv": ("conv", 0, 80, 3, 128), "falcon-h1-conv": ("conv", 0, 16, 3, 128),
    "small-conv": ("conv", 0, 8, 3, 128),
}  # fmt: skip


def program(mesh, family, rows=ROWS, tokens=None):
    """Compiles a step of two layers, on a donated pool each: decode, or of so many packed tokens; bytes per chip."""
    kind, few, heads, *widths = FAMILIES[family]
    kept = "bfloat16" if kind == "conv" else "float32"
    chips, head_axis = mesh.size, "x" if mesh.size > 1 else None

    def array(*axes, spec=(), dtype="float32"):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def token(*inner, dtype="float32"):
        axes = (rows, 1) if tokens is None else (tokens,)
        return array(*axes, *inner, spec=(*[None] * len(axes), head_axis), dtype=dtype)

    if kind == "conv":
        channels = heads * widths[1]
        arrays = {"x": token(channels, dtype="bfloat16"), "weight": array(channels, 4, spec=(head_axis,), dtype=kept)}
    elif kind == "space":
        b = token(few, widths[1], dtype="bfloat16")
        arrays = {"x": token(heads, widths[0], dtype="bfloat16"), "dt": token(heads), "B": b, "C": b}
        arrays |= {name: array(heads, spec=(head_axis,)) for name in ("A", "D")}
    else:
        gates = token(heads, widths[0]) if kind == "channels" else token(heads)
        arrays = {"q": token(few, widths[0]), "k": token(few, widths[0]), "g": gates, "beta": token(heads)}
        arrays["v"] = token(heads, widths[1], dtype="bfloat16")
    pool = array(8 * ROWS + 1, heads, *widths, spec=(None, head_axis), dtype=kept)
    rows_of_step = [array(rows, dtype="int32")] * 4 + [array(rows, 1, dtype="int32")]
    door, value = pallas_kernels.gated_delta_rule, "v"
    if kind in ("space", "conv"):
        door, value = pallas_kernels.causal_conv if kind == "conv" else pallas_kernels.state_space, "x"

    def step(arrays, pools, slots, to_slots, lengths, new, snapshots):
        written = []
        for states in pools:  # as a model's layers: each goes on with what the last one gave
            y, states = door(
                **arrays, states=states, slots=slots, to_slots=to_slots, lengths=lengths, new=new, every=64,
                snapshot_slots=snapshots, implementation="tpu" if chips > 1 else None,
            )  # fmt: skip
            arrays = arrays | {value: y}
            written.append(states)
        return y, written

    if chips > 1:
        specs = {name: x.sharding.spec for name, x in arrays.items()}
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(specs, [pool.sharding.spec] * 2, *[P()] * 5),
            out_specs=(arrays[value].sharding.spec, [pool.sharding.spec] * 2),
        )  # fmt: skip
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=1).lower(arrays, [pool] * 2, *rows_of_step).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    used: dict[str, int] = {}
    sizes = r'%(state_\w+?)[.\d]* = .*?"used_scoped_memory_configs":\[{[^]]*?"size":"(\d+)"}\]'
    for name, size in re.findall(sizes, text):
        used[name] = max(used.get(name, 0), int(size))
    inner = f"{heads // chips},{widths[0]}", *[f"{widths[0]},{heads // chips}"] * (kind == "conv")
    shape = rf"\[{pool.shape[0]},({'|'.join(inner)}),{widths[1]}\]"
    return {
        "name": family, "tokens": tokens, "pool": 2 * pool.size * pool.dtype.itemsize // chips,
        "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes,
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "pool copies": len(re.findall(rf"= b?f\d+{shape}\S* copy", text)),
        "in vector memory": len(re.findall(shape + r"\{[^}]*S\(1\)\}", text)),
        "used": used, "model": dict(MODELS), "limit": VMEM_BYTES,
        "collectives": len(re.findall(r"\b(?:all|reduce|collective)-(?:gather|reduce|to-all|scatter|permute)", text)),
    }  # fmt: skip


def record_bytes():
    """Lets the kernels' models of their vector memory be read: returns what they say last, by kernels."""
    found = {}

    def recorded(kernel, model):
        def record(*arguments):
            found[kernel] = model(*arguments)
            return found[kernel]

        return record

    state_decode.state_decode_bytes = recorded("state_decode", state_decode.state_decode_bytes)
    state_prefill.state_prefill_bytes = recorded("state_prefill", state_prefill.state_prefill_bytes)
    return found


MODELS = record_bytes()


def main(chip, *families):
    side = 2 if chip == "four" else 1
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[chip], chips_per_host_bounds=(side, side, 1)
    )
    mesh = Mesh(np.array(topology.devices[: side * side]), ("x",))
    for family in families or FAMILIES:
        name, *sizes = family.split(":")
        tokens, rows = [*map(int, sizes), *(None, ROWS)[len(sizes) :]]
        print(json.dumps(program(mesh, name, rows, tokens)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
