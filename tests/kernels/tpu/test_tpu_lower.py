"""The TPU kernels lowered, without a TPU: what the interpreter does not see of transformations around them."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels

BATCH, ROWS = 3, 2


def step(q, k, v, kv, kv_scale, tables, lengths, new):
    kind = None if kv_scale is None else "int8"
    return pallas_kernels.write_and_attend(
        q, k, v, kv, tables, lengths, new, kv_scale=kv_scale, kind=kind, implementation="tpu"
    )


def loss(q, *rest):
    return step(q, *rest)[0].astype(jnp.float32).sum()


@pytest.mark.parametrize("tokens", [(ROWS, 1), (7,)], ids=["decode", "packed"])
@pytest.mark.parametrize("function", [step, jax.grad(loss)], ids=["step", "gradient"])
def test_vmap_over_caches(tokens, function):
    """Its loop over a batch takes pools apart, which say to no one else that they stay in HBM."""

    def batch(*axes, dtype="bfloat16"):
        return jax.ShapeDtypeStruct((BATCH, *axes), dtype)

    q, k, pool = batch(*tokens, 8, 128), batch(*tokens, 2, 128), (9, 2, 2, 128)
    rows = batch(ROWS, 4, dtype="int32"), *[batch(ROWS, dtype="int32")] * 2
    int8 = batch(*pool, 128, dtype="int8"), batch(*pool, dtype="float32")
    for kv, scale in (int8, (batch(*pool, 128), None)):
        program = jax.jit(jax.vmap(function)).trace(q, k, k, kv, scale, *rows)
        assert "tpu_custom_call" in program.lower(lowering_platforms=("tpu",)).as_text()
