"""The rotation in the form for TPUs, which is compiled there alone, against the form for everything else."""

import jax
import numpy as np
import pytest

from jaxkv.models.rope import pairs_by_halves, pairs_by_product


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pairs_by_product_are_those_by_halves(dtype, head_dim, interleaved):
    x = jax.random.normal(jax.random.key(0), (5, 3, head_dim)).astype(dtype)
    for found, wanted in zip(pairs_by_product(x, interleaved), pairs_by_halves(x, interleaved), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
