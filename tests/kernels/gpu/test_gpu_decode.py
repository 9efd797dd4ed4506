"""The decode kernels against the reference: interpreted with races detected, or natively on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu, testing
from pallas_kernels.gpu import tuning, work
from pallas_kernels.gpu.tiles import Tile
from pallas_kernels.testing import Case

pytestmark = pytest.mark.usefixtures("small_plans")

B16, F16 = {"dtype": "bfloat16"}, {"dtype": "float16"}
CASES = [
    Case((5, 0, 150, 64), (1, 0, 1, 1), **B16),
    Case((700,), (1,), num_kv_heads=1, **B16),  # cut into many items; slots used again
    Case((300, 1, 0), (1, 1, 0), window=60, sinks=True, block_size=256, **B16),
    Case((200, 100), (1, 1), num_heads=5, num_kv_heads=1, window=64, soft_cap=5.0, block_size=24, **F16),
    Case((130, 0), (1, 0), num_heads=1, num_kv_heads=1, head_dim=80, stored_head_dim=128, sinks=True, **F16),
    Case((70,), (1,), num_heads=20, num_kv_heads=1, head_dim=256, block_size=8, scale=0.1, **B16),
    Case((40, 90), (1, 1), num_heads=14, stored_head_dim=128, max_blocks=9, **B16),
]


def attend(inputs, interpret, **options):
    return jax.jit(lambda *inputs: gpu.paged_attention(*inputs, return_lse=True, interpret=interpret, **options))(
        *inputs
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case, interpret):
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    assert gpu.unsupported("paged_attention", dict(q=inputs.q, kv=inputs.kv)) is None
    out, lse = attend(inputs, interpret, **options)
    expected_out, expected_lse = testing.expected(case, inputs, return_lse=True)
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


def test_a_row_cut_into_many_items(monkeypatch, interpret):
    """One KV head: only cuts of its single row fill the chip."""
    plan = tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=70)
    monkeypatch.setattr(tuning, "decode_plan", lambda head_dim, columns: plan)
    case = Case((64 * 69 + 5,), (1,), num_kv_heads=1, block_size=128, sinks=True, **B16)
    inputs = testing.make_inputs(case)
    _, first_item = work.decode_items(inputs.lengths, None, 64, 70)
    assert first_item[1] == 70
    out, lse = attend(inputs, interpret, **testing.make_options(case))
    expected_out, expected_lse = testing.expected(case, inputs, return_lse=True)
    testing.assert_close(out, expected_out)
    testing.assert_close(lse, expected_lse, dtype=case.dtype)


POISONED = {
    "decode": Case((300, 70), (1, 1), num_kv_heads=1, window=60, **B16),
    "prefill": Case((300, 70), (20, 5), num_kv_heads=1, window=60, **B16),
}


@pytest.mark.parametrize("name", POISONED)
def test_what_no_token_sees_never_reaches_the_output(name, interpret):
    """Blocks wholly before the window hold NaN, and their table entries, like those past the length, are anything."""
    case = dataclasses.replace(POISONED[name], max_blocks=25)
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    expected = testing.expected(case, inputs)
    kv, tables = np.array(inputs.kv), np.array(inputs.tables)
    wild = np.resize(np.array([-(2**31), -1, 10**6, 2**31 - 1], np.int32), tables.shape)
    for row, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        before = max(length - new - case.window + 1, 0) // case.block_size
        assert row > 0 or before > 10
        kv[tables[row, :before]] = np.nan
        held = -(-length // case.block_size)
        tables[row, :before], tables[row, held:] = wild[row, :before], wild[row, held:]
    kv[0] = np.nan
    out, lse = attend(inputs._replace(kv=jnp.asarray(kv), tables=jnp.asarray(tables)), interpret, **options)
    for row, new in enumerate(case.new):
        testing.assert_close(out[row, :new], expected[row, :new])
    assert np.isfinite(np.asarray(lse[0])).all()


def test_traced_scale_and_cap(interpret):
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16", scale=0.2, soft_cap=4.0)
    inputs = testing.make_inputs(case)

    @jax.jit
    def attend(scale, soft_cap, *inputs):
        return gpu.paged_attention(*inputs, scale=scale, soft_cap=soft_cap, interpret=interpret)

    testing.assert_close(attend(0.2, 4.0, *inputs), testing.expected(case, inputs))


def test_row_lengths_and_block_ids_are_not_trusted(interpret):
    """Rows with wild block ids or a length beyond their table do not disturb the others, and stay finite."""
    case = Case(lengths=(100, 90, 80), new=(1, 1, 1), dtype="bfloat16")
    inputs = testing.make_inputs(case, poison=0.5)
    expected = testing.expected(case, inputs)
    tables = inputs.tables.at[0, 1].set(10**6).at[0, 2].set(-7)
    wild = inputs._replace(tables=tables, lengths=inputs.lengths.at[1].set(10**6))
    out, lse = attend(wild, interpret)
    testing.assert_close(out[2], expected[2])
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.isfinite(np.asarray(lse)).all()


def test_vmap(interpret):
    """Two caches of one shape, side by side."""
    case = Case(lengths=(20, 70), new=(1, 1), dtype="bfloat16")
    inputs = [testing.make_inputs(case, seed) for seed in (0, 1)]
    batched = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
    out = jax.vmap(lambda *inputs: gpu.paged_attention(*inputs, interpret=interpret))(*batched)
    for i in range(2):
        testing.assert_close(out[i], testing.expected(case, inputs[i]))
