"""Which backend runs a mixer, and why nothing faster does; runs it, with a gradient.

A backend's mixers are a module, named in `MODULES`, or the attribute `mixers` of a backend that `register_backend`
took. It provides:

1. for each op that it has, a function of this name. It takes the op's arrays and options by name, and `batch=`, and
   returns `(y, states)`: y in the dtype of `v` (or `x`) and 0 for padding, the pool with what rows wrote. A gradient is
   XLA's, whatever the backend, so none is needed.
2. `unsupported(call) -> str | None`: why it cannot run a `MixerCall` of these shapes and dtypes, and the way out, in a
   sentence; None: it can. It is asked only about its own ops, reads no values, and finds what is unknown to be None (of
   an `explain` without rows all of `call.batch`; without arrays it is not asked).

To add a backend, write the module and its line in `MODULES`: the platform that it runs on is that of `IMPLEMENTATIONS`,
and there it is chosen by itself.
"""

import functools
import importlib
from typing import Any

import jax
from jax.sharding import AxisType

from pallas_kernels.api.backends import (
    REGISTERED,
    Choice,
    check_implementation,
    choose_among,
    find_backend,
    read_platform,
    run_chosen,
)
from pallas_kernels.api.mixer_arguments import SHAPES_ONLY, check_arguments, check_batch
from pallas_kernels.common.state_batch import MixerCall, StateBatch

# implementation -> its module in this package
MODULES = {"xla": "xla.mixers", "reference": "reference_mixers", "gpu": "gpu.mixers", "tpu": "tpu.mixers"}
DIFFERENTIABLE = ("xla", "reference")


def run_call(call: MixerCall, implementation: str | None) -> Any:
    """Checks a call, has a backend chosen, and returns what it computes."""
    check_implementation(implementation)
    token_axes = check_arguments(call)
    check_batch(call.batch, call.arrays["states"], token_axes)
    choice = _choose(call, implementation, None)
    options, batch = dict(call.options), call.batch
    scale = options.get("scale")
    if "scale" in options and scale is None:
        options["scale"] = call.arrays["k"].shape[-1] ** -0.5
    elif scale is not None and not isinstance(scale, jax.Array):
        options["scale"] = float(scale)
    traced = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
    static = tuple((name, x) for name, x in options.items() if name not in traced)
    insists, arrays = implementation is not None, call.arrays | traced
    return _once(call.op, choice.implementation, insists, static, batch.every, arrays, batch._replace(every=None))


def explain_call(call: MixerCall, implementation: str | None, platform: str | None) -> Choice:
    """Returns what `explain` says of a call, of which arrays and rows may be left out."""
    if call.arrays:
        token_axes = check_arguments(call, SHAPES_ONLY)
        if None not in (call.batch.slots, call.batch.kv_lens, call.batch.query_lens):
            check_batch(call.batch, call.arrays["states"], token_axes)
    return _choose(call, implementation, None if platform is None else read_platform(platform))


def _choose(call: MixerCall, implementation: str | None, platform: str | None) -> Choice:
    return choose_among(lambda name: _find_refusal(name, call), implementation, platform)


def _find_refusal(implementation: str, call: MixerCall) -> str | None:
    """Returns why a backend cannot run a call, and the way out; None: it can."""
    find_backend(implementation)
    mixers = _find_mixers(implementation)
    if not hasattr(mixers, call.op):
        return (
            f"The {implementation} backend has no kernel of its own for {call.op}; leave implementation=None to use "
            "XLA's."
        )
    if implementation in DIFFERENTIABLE or not call.arrays:
        return None
    if is_divided(call.arrays["states"]):
        return (
            f"The compiler cannot divide the {implementation} kernel of {call.op} over the devices of a mesh: call it "
            "inside jax.shard_map, over heads, or leave implementation=None to use XLA's."
        )
    return mixers.unsupported(call)


def _find_mixers(implementation: str) -> Any:
    """Returns a backend's mixers, or None if it has none."""
    if implementation in REGISTERED:
        return getattr(REGISTERED[implementation], "mixers", None)
    name = MODULES.get(implementation)  # imported when needed: a kernel's imports are not cheap
    return None if name is None else importlib.import_module(f"pallas_kernels.{name}")


def is_divided(x: Any) -> bool:
    """Tells whether an array may be divided among devices outside of any `shard_map`."""
    meshes = (
        jax.sharding.get_abstract_mesh(),
        *([] if isinstance(x, SHAPES_ONLY[1:]) else [jax.typeof(x).sharding.mesh]),
    )
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


# Layers of the same shapes are traced and lowered once in a program.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _once(
    op: str,
    implementation: str,
    insists: bool,
    static: tuple,
    every: int | None,
    arrays: dict[str, Any],
    batch: StateBatch,
) -> Any:
    def run(name: str, arrays: dict[str, Any], batch: StateBatch) -> Any:
        return getattr(_find_mixers(name), op)(**arrays, **dict(static), batch=batch._replace(every=every))

    def bind(name: str) -> Any:
        return functools.partial(run, name) if name in DIFFERENTIABLE else _with_gradient(run, name)

    return run_chosen(bind, implementation, insists, arrays, batch)


def _with_gradient(run: Any, name: str) -> Any:
    """Returns a kernel with XLA's gradient."""
    kernel = jax.custom_vjp(functools.partial(run, name))
    kernel.defvjp(
        lambda arrays, batch: jax.vjp(functools.partial(run, "xla"), arrays, batch), lambda pull, bar: pull(bar)
    )
    return kernel


def forget_mixers() -> None:
    """Lets calls outside of compiled programs find their backend anew."""
    _once.clear_cache()  # type: ignore[attr-defined]
