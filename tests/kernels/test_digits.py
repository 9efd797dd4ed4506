"""Products with bytes, by digits: against float64, and where numbers are zero, tiny, huge or not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.xla import int8_product as digits

product = jax.jit(digits.product, static_argnums=(0, 3))


@pytest.mark.parametrize("num_digits, units", [(2, 127 * 128), (3, 127 * 128**2)])
def test_products(num_digits, units):
    """Of rows whose largest numbers are far apart: each is counted in units of its own."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((2, 4, 48)).astype(np.float32) * np.float32([1, 1e-30, 1e30, 0])[:, None]
    stored = random.integers(-128, 128, (2, 100, 48)).astype(np.int8)
    found = np.asarray(product("bqd,bcd->bqc", jnp.asarray(rows), jnp.asarray(stored), num_digits))
    expected = np.einsum("bqd,bcd->bqc", rows.astype(np.float64), stored.astype(np.float64))
    assert not found[:, 3].any()
    # A number is off by up to half of its row's unit, whatever it is; and sums are rounded to float32.
    found, expected, largest = found[:, :3], expected[:, :3], np.abs(rows[:, :3]).max(-1)[..., None]
    scatter = largest / units / 12**0.5 * np.sqrt((stored.astype(np.float64) ** 2).sum(-1))[:, None]
    rounding = 2**-24 * np.abs(expected).max(-1, keepdims=True)
    off = (found - expected) / np.hypot(scatter, rounding)
    assert np.sqrt((off**2).mean()) < 1.2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_no_other(bad):
    rows = np.ones((66, 65), np.float32)
    rows[np.arange(65), np.arange(65)] = bad
    found = np.asarray(product("qd,cd->qc", jnp.asarray(rows), jnp.full((2, 65), 3, jnp.int8), 2))
    assert np.isnan(found[:65]).all() and np.allclose(found[65], 195, rtol=1e-6)
