"""The TPU's own form of the cache write: bit for bit what the reference writes."""

import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import testing


@pytest.mark.parametrize("packed", [False, True])
def test_write_kv(packed):
    case = testing.Case(
        lengths=(9, 0, 17, 16),
        new=(2, 0, 1, 16),
        block_size=8,
        head_dim=64,
        stored_head_dim=128,
        packed=packed,
        padding=2,
    )
    inputs = testing.make_inputs(case, poison=7.0)
    k, v = np.random.default_rng(0).standard_normal((2, *inputs.q.shape[:-2], 2, 64)).astype(np.float32)
    arguments = (inputs.kv, k, v, *inputs[2:])
    actual = pallas_kernels.write_kv(*arguments, implementation="tpu")
    expected = pallas_kernels.write_kv(*arguments, implementation="reference")
    np.testing.assert_array_equal(actual[..., :64], expected[..., :64])
    assert (np.asarray(expected) != np.asarray(inputs.kv)).sum() == 2 * 19 * 2 * 64
