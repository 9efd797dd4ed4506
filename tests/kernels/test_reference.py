"""The reference against attention spelled out token by token in NumPy."""

import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case


@pytest.mark.parametrize("packed", [False, True])
def test_against_numpy(packed):
    case = Case(
        lengths=(5, 0, 17, 9),
        new=(2, 0, 1, 9),
        block_size=4,
        packed=packed,
        padding=2,
        window=6,
        soft_cap=3.0,
        sinks=True,
        mask=True,
    )
    inputs = testing.make_inputs(case)
    options = testing.make_options(case)
    out, lse = pallas_kernels.paged_attention(*inputs, **options, return_lse=True, implementation="reference")
    q, kv, tables, lengths, new = (np.asarray(x, np.float64 if x.dtype == "float32" else x.dtype) for x in inputs)
    mask, sinks = np.asarray(options["mask"]), np.asarray(options["sinks"])
    seen_tokens = np.zeros(q.shape[:-2], bool)
    start = 0
    for row in range(len(lengths)):
        for t in range(new[row]):
            at = (start + t,) if packed else (row, t)
            seen_tokens[at] = True
            position = lengths[row] - new[row] + t
            for h in range(case.num_heads):
                head = h // (case.num_heads // case.num_kv_heads)
                logits, values = [sinks[h]], [np.zeros(case.head_dim)]
                for c in range(max(0, position - 5), position + 1):
                    if mask[(*at, c)]:
                        k, v = kv[tables[row, c // 4], :, head, c % 4]
                        logits.append(3 * np.tanh(q[at][h] @ k * case.head_dim**-0.5 / 3))
                        values.append(v)
                if len(values) == 1:
                    assert (out[at][h] == 0).all() and np.isneginf(lse[at][h])
                    continue
                weights = np.exp(logits)
                np.testing.assert_allclose(out[at][h], weights @ np.array(values) / weights.sum(), atol=2e-5)
                np.testing.assert_allclose(lse[at][h], np.log(weights.sum()), atol=2e-5)
        start += new[row]
    assert (np.asarray(out)[~seen_tokens] == 0).all() and np.isneginf(np.asarray(lse)[~seen_tokens]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_write_kv(packed):
    case = Case(lengths=(5, 0, 17, 9), new=(2, 0, 1, 9), block_size=4, packed=packed, padding=2)
    inputs = testing.make_inputs(case, poison=7.0)
    k, v = np.random.default_rng(0).standard_normal((2, *inputs.q.shape[:-2], 2, 64)).astype(np.float32)
    args = (inputs.kv, k, v, *inputs[2:])
    expected = pallas_kernels.write_kv(*args, implementation="reference")
    actual = pallas_kernels.write_kv(*args, implementation="xla")
    np.testing.assert_array_equal(actual, expected)
    assert (np.asarray(expected) != np.asarray(inputs.kv)).sum() == 2 * 12 * 2 * 64
