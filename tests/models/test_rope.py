"""The rotation in the form for TPUs, which is compiled there alone, against the form for everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.rope import Rope, pairs_by_halves, pairs_by_product


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pairs_by_product_are_those_by_halves(dtype, head_dim, interleaved):
    x = jax.random.normal(jax.random.key(0), (5, 3, head_dim)).astype(dtype)
    for found, wanted in zip(pairs_by_product(x, interleaved), pairs_by_halves(x, interleaved), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "interleaved", "by_product"),
    [(33, 128, False, True), (32, 128, False, False), (64, 64, False, False), (1, 64, True, True)],
)
def test_where_a_tpu_rotates_by_a_product(num_tokens, head_dim, interleaved, by_product):
    rope, x = Rope(interleaved=interleaved), jnp.ones((num_tokens, 2, head_dim))
    traced = jax.jit(lambda x: rope(x, x, jnp.arange(num_tokens))).trace(x)
    for platform, there in (("tpu", by_product), ("cpu", False)):
        assert ("dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()) == there
