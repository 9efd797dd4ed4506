"""The TPU kernels are traced where JAX's integers have 64 bits: a chip's scalars have 32, and are not widened."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels

ROWS, WIDTH = 4, 128


def shape(*axes, dtype="int32"):
    return jax.ShapeDtypeStruct(axes, dtype)


def step(*axes, kind=None, **others):
    """Arrays and static options of a step whose tokens have these axes."""
    arrays = dict(
        q=shape(*axes, 8, WIDTH, dtype="bfloat16"),
        kv=shape(9, 2, 2, 128, WIDTH, dtype=kind or "bfloat16"),
        tables=shape(ROWS, 8), lengths=shape(ROWS), new=shape(ROWS),
    )  # fmt: skip
    if kind is not None:
        arrays["kv_scale"] = shape(9, 2, 2, 128, dtype="float32")
    return arrays | others, {} if kind is None else {"kind": kind}


def states(*axes):
    arrays = {name: shape(*axes, 8, WIDTH, dtype="bfloat16") for name in "qkv"}
    arrays |= {name: shape(*axes, 8, dtype="float32") for name in ("g", "beta")}
    rows = {name: shape(ROWS) for name in ("slots", "to_slots", "lengths", "new")}
    return arrays | rows | {"states": shape(9, 8, WIDTH, WIDTH, dtype="float32")}, {}


def convolution(*axes):
    rows = {name: shape(ROWS) for name in ("slots", "to_slots", "lengths", "new")}
    arrays = {"x": shape(*axes, 8 * WIDTH, dtype="bfloat16"), "weight": shape(8 * WIDTH, 4, dtype="bfloat16")}
    return arrays | rows | {"states": shape(9, 8, 3, WIDTH, dtype="bfloat16")}, {"activation": "silu"}


KERNELS = {
    "decode": ("paged_attention", step(ROWS, 1)),
    "decode, int8": ("paged_attention", step(ROWS, 1, kind="int8")),
    "prefill": ("paged_attention", step(ROWS, 3)),
    "packed, int8": ("paged_attention", step(16, kind="int8")),
    "chosen tokens": ("paged_attention", step(ROWS, 1, tokens=shape(ROWS, 1, 50))),
    "the delta rule": ("gated_delta_rule", states(ROWS, 1)),
    "a convolution": ("causal_conv", convolution(ROWS, 1)),
    "the delta rule in chunks": ("gated_delta_rule", states(ROWS, 70)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_is_traced(name):
    op, (arrays, static) = KERNELS[name]
    kernel = functools.partial(getattr(pallas_kernels, op), implementation="tpu", **static)
    with jax.enable_x64(True):
        found = jax.eval_shape(lambda arrays: kernel(**arrays), arrays)
    assert all(x.dtype in (jnp.bfloat16, jnp.float32) for x in jax.tree.leaves(found))
