"""Which backend runs a call of attention or a write that has been checked; runs it, with a gradient.

The choice is made for the platform that a program is lowered for, not for the process's default device.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import cascade
from pallas_kernels.api.backends import Choice, check_implementation, choose, find_backend, run_chosen
from pallas_kernels.api.mixer_dispatch import forget_mixers
from pallas_kernels.api.sizes import warn_of_sizes
from pallas_kernels.common import context_parallel
from pallas_kernels.common.batch import Call, StoredKV, count_entries, forget_ratio, leave_out_newest


def choose_checked(op: str, platform: str | None, implementation: str | None, call: Call) -> Choice:
    """Returns who runs a call that has been checked."""
    # A shard of every block is as a whole one where only tokens are written, or every query sees its whole row.
    if call.batch.context_shard is not None and (op == "write_kv" or context_parallel.reads_whole_rows(call)):
        call = call._replace(batch=call.batch._replace(context_shard=None))
    if op == "paged_attention":  # whose rows then end earlier, or hold entries as tokens, for all backends
        mask = forget_ratio(call.q, dataclasses.replace(call.mask, residual_length=None))
        call = call._replace(mask=mask)
    return choose(op, implementation, platform, call)


def attend(implementation: str | None, call: Call) -> Any:
    """`paged_attention` of a call that has been checked."""
    batch, mask = count_entries(call.q, *leave_out_newest(call.batch, call.mask))
    call = call._replace(batch=batch, mask=mask)
    if call.batch.context_shard is not None and context_parallel.reads_whole_rows(call):
        call = call._replace(batch=context_parallel.select_local_rows(call.batch, call.stored.kv.shape[3]))
    return differentiable("paged_attention", implementation, call)


def write(implementation: str | None, call: Call) -> StoredKV:
    """`write_kv` of a call that has been checked."""
    if call.batch.context_shard is not None:
        k, v, batch = context_parallel.select_local_tokens(call.k, call.v, call.batch, call.stored.kv.shape[3])
        call = call._replace(k=k, v=v, batch=batch)
    return differentiable("write_kv", implementation, call)


def write_then_attend(implementation: str | None, call: Call) -> tuple[Any, StoredKV]:
    """`write_and_attend` of a call that has been checked, by two kernels; the write's is chosen by itself."""
    written = write(None, Call(call.stored, call.batch, k=call.k, v=call.v))
    return attend(implementation, call._replace(stored=written, k=None, v=None)), written


def differentiable(op: str, implementation: str | None, call: Call) -> Any:
    """`_run` with a gradient (reverse mode) whatever the backend: kernels have none of their own."""
    check_implementation(implementation)
    leaves, tree = jax.tree.flatten(call)
    arrays = [jnp.asarray(x) if isinstance(x, jax.Array | np.ndarray) else None for x in leaves]
    static = tuple(None if isinstance(x, jax.Array | np.ndarray) else x for x in leaves)
    return _once(op, implementation, _Static(tree, static), arrays)


class _Static(NamedTuple):
    """What a program is compiled for, of a call: all but its arrays."""

    tree: Any
    numbers: tuple

    def call(self, arrays: list) -> Call:
        """Returns the call with these arrays."""
        return self.tree.unflatten([n if x is None else x for x, n in zip(arrays, self.numbers, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _with_gradient(op: str, implementation: str | None, static: _Static, arrays: list) -> Any:
    return _run(op, implementation, static, arrays)


def _forward(op: str, implementation: str | None, static: _Static, arrays: list) -> tuple[Any, Any]:
    """Returns the result, and what pulls its cotangent back to the arrays'."""
    call = static.call(arrays)
    if op == "paged_attention" and call.mask.tokens is None:
        from pallas_kernels.xla.gradients import NOTHING_SEEN

        asked = jax.tree.structure(call._replace(options=dataclasses.replace(call.options, return_lse=True)))
        out, lse = _run(op, implementation, static._replace(tree=asked), arrays)
        kept = jnp.where(jnp.isneginf(lse), NOTHING_SEEN, lse)
        pull = jax.tree_util.Partial(functools.partial(_pull_attention, static), arrays, out, kept)
        return ((out, lse) if call.options.return_lse else out), pull
    from pallas_kernels import xla

    def plain(arrays: list) -> Any:
        call = static.call(arrays)
        if op == "paged_attention":
            return xla.paged_attention(call.q, call.stored, call.batch, call.mask, call.options)
        if op == "write_kv":
            return xla.write_kv(call.k, call.v, call.stored, call.batch)
        return write_then_attend(implementation, call)

    return jax.vjp(plain, arrays)


def _pull_attention(static: _Static, arrays: list, out, lse, cotangent) -> tuple[list]:
    from pallas_kernels.xla.gradients import attention_gradients

    call = static.call(arrays)
    out_bar, lse_bar = cotangent if call.options.return_lse else (cotangent, None)
    gradients = attention_gradients(out_bar, lse_bar, out, lse, call)
    bars = static.tree.flatten_up_to(gradients)
    return ([None if x is None else bar for x, bar in zip(arrays, bars, strict=True)],)


_with_gradient.defvjp(_forward, lambda op, implementation, static, pull, cotangent: pull(cotangent))

# Layers of the same shapes are traced and lowered once in a program: a kernel takes seconds.
_once = jax.jit(_with_gradient, static_argnums=(0, 1, 2))


def forget_choices() -> None:
    """Lets calls outside of compiled programs choose their backend anew."""
    _once.clear_cache()  # type: ignore[attr-defined]
    forget_mixers()


def _run(op: str, implementation: str | None, static: _Static, arrays: list) -> Any:
    call = static.call(arrays)
    choice = choose_checked(op, None, implementation, call)
    if implementation is None and choice.implementation == "xla":
        warn_of_sizes(op, choice.reason, call)

    def bind(name: str) -> Any:
        return lambda arrays: _run_on(name, op, static.call(arrays))

    return run_chosen(bind, choice.implementation, implementation is not None, arrays)


def _run_on(name: str, op: str, call: Call) -> Any:
    """Returns what a backend makes of a call that it supports, an op that it lacks by those that it has."""
    backend: Any = find_backend(name)
    q, k, v, stored, batch, mask, options = (call.q, call.k, call.v, *call[:4])
    if op == "write_kv" and backend.write_kv is not None:
        return backend.write_kv(k, v, stored, batch)
    if op != "paged_attention" and backend.write_and_attend is None:
        return write_then_attend(name, call)
    new = () if op == "paged_attention" else (k, v)
    run = backend.paged_attention if op == "paged_attention" else backend.write_and_attend
    if options.shared is None:
        return run(q, *new, stored, batch, mask, options)
    if cascade.cascade_refusal(name, call) is not None:
        return run(q, *new, stored, batch, mask, dataclasses.replace(options, shared=None))
    if backend.READS_SHARED_ONCE:
        return run(q, *new, stored, batch, mask, options)
    # On a GPU the host takes the branches, and all would wait for it.
    return cascade.read_once(run, backend.paged_attention, call, branches=name == "tpu")
