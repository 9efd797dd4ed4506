"""Mixers over the devices of a mesh: each computes its own heads, or channels, whose states it holds.

As for pools (`sharding`), a TPU's compiler refuses kernels that no `shard_map` divides, and elsewhere it may gather the
states.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxkv._core.state.sharding import WHOLE, head_spec, map_devices, replicate, reshard
from pallas_kernels.common.state_batch import MIXERS


def run_on_mesh(door: Callable[..., Any], states: jax.Array, axis: str | None) -> Callable[..., Any]:
    """Returns a mixer that runs on each device of the states' mesh with its own heads; on one device, and inside a
    `shard_map` over all axes, the mixer itself. States stay as they are divided; the output is whole, if axes are
    explicit, and else the compiler's to divide.

    Args:
      states: `[slots, heads or channels, ...]`.
      axis: the mesh axis that heads are divided over where they are even.
    """
    mesh = jax.typeof(states).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if all(kind == AxisType.Manual for kind in kinds.values()):
        return door
    count = 1 if axis is None or kinds.get(axis) in (None, AxisType.Manual) else mesh.shape[axis]
    divided = count > 1 and states.shape[1] % count == 0

    def run(**arguments: Any) -> Any:
        arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array | np.ndarray)}
        static = tuple((name, x) for name, x in arguments.items() if name not in arrays)
        form = MIXERS[door.__name__]
        front, specs = arrays[form.shown].ndim - form.inner, dict.fromkeys(arrays, WHOLE)
        if divided:
            assert axis is not None
            at = {name: form.find_heads(name, front) for name in form.arrays if name in arrays}
            specs |= {name: head_spec(place, axis) for name, place in at.items()}
            arrays |= {name: _repeat(arrays[name], at[name], count) for name in form.shared_arrays}
        y = specs[form.shown]
        return _run(
            arrays, door=door, static=static, specs=tuple(specs.items()), out_specs=(y, specs["states"]), mesh=mesh
        )

    return run


@functools.partial(jax.jit, static_argnames=("door", "static", "specs", "out_specs", "mesh"))
def _run(
    arrays: dict[str, Any],
    *,
    door: Callable[..., Any],
    static: tuple[tuple[str, Any], ...],
    specs: tuple[tuple[str, PartitionSpec], ...],
    out_specs: tuple[PartitionSpec, PartitionSpec],
    mesh: Any,
) -> tuple[jax.Array, jax.Array]:
    each = dict(specs)
    arrays = {name: reshard(x, each[name], mesh) for name, x in arrays.items()}
    y, states = map_devices(lambda arrays: door(**arrays, **dict(static)), mesh, (each,), out_specs)(arrays)
    return replicate(y), states


def _repeat(x: Any, axis: int, count: int) -> Any:
    """Returns heads that others share as so many that each of `count` devices has those of its own heads."""
    times = math.lcm(x.shape[axis], count) // x.shape[axis]
    return x if times == 1 else jnp.repeat(replicate(jnp.asarray(x)), times, axis=axis)
