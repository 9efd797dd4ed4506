"""Checks of the TPU kernels over quantised pools: any numbers under NaN scales in everything that must not be read."""

import functools

import interpreter
import numpy as np

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.testing import Case

F32 = {"dtype": "float32", "stored_head_dim": 128, "block_size": 128}
BF16 = {**F32, "dtype": "bfloat16"}
LATENT = {**F32, "stored_head_dim": 256, "scale": 0.1}
LATENT_BF16 = {**LATENT, "dtype": "bfloat16"}
# Keys and values joined: of several heads or one, in one register's lanes or two, with padding behind them or without.
JOINED = {**F32, "scale": 0.1, "joined": True}
JOINED_BF16 = {**JOINED, "dtype": "bfloat16"}
# In four bits: several groups of entries or one, pairs of heads or not, with padding behind them or without.
NIBBLES = {**JOINED, "stored_head_dim": 256}
NIBBLES_BF16 = {**NIBBLES, "dtype": "bfloat16"}
WRITES = [
    Case((128, 0, 129, 255, 300, 17, 127), (128, 0, 4, 127, 170, 1, 0), 2, 2, 128, packed=True, padding=3, **BF16),
    Case((256, 31), (1, 3), 3, 3, 96, padding=1, **F32),
    Case((131, 0, 128), (5, 0, 128), 2, 1, 136, rank=72, packed=True, padding=3, **LATENT),
    Case((131, 0, 128), (5, 0, 128), 6, 3, 80, rank=40, packed=True, padding=3, **JOINED),
]
NIBBLE_WRITES = [
    Case((131, 0, 128), (5, 0, 128), 6, 2, 256, rank=128, packed=True, padding=3, **NIBBLES),
    # Runs of as many tokens as are encoded at once where there are few, and of one more; over such a piece's edge.
    Case((136, 20, 13, 250), (8, 9, 8, 1), 2, 1, 256, rank=128, packed=True, **NIBBLES),
]


def stored(case, kind):
    inputs, scale, held = testing.quantise(case, testing.make_inputs(case), kind)
    return inputs, scale, held


def check(case, out, lse, held, **options):
    wanted, wanted_lse = testing.expected(case, held, return_lse=True, **options)
    testing.assert_close(out, wanted)
    testing.assert_close(lse, wanted_lse, dtype=case.dtype)


def assert_written(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x.astype("float32") if x.dtype == "bfloat16" else x) for x in (a, b))
        np.testing.assert_array_equal(a, b)  # a NaN equals a NaN


def check_write_and_attention(tpu, kind, case, mode):
    (q, kv, *rest), scale, _ = stored(case, kind)
    k, v = interpreter.new_tokens(case, q)
    nan = np.full_like(k, np.nan)  # what attends before it writes is caught
    kv, scale = interpreter.write_kv(
        kv, nan, None if v is None else nan, *rest, kv_scale=scale, kind=kind, rank=case.rank
    )
    (out, lse), written = interpreter.run(
        functools.partial(tpu.write_and_attend, kind=kind), q, k, v, kv, *rest, mode=mode,
        **testing.make_options(case), kv_scale=scale, return_lse=True,
    )  # fmt: skip
    expected = interpreter.write_kv(kv, k, v, *rest, kv_scale=scale, kind=kind, rank=case.rank)
    assert_written(written, expected)
    held = testing.decode(case, *expected, kind)
    check(case, out, lse, testing.Inputs(q, held, *rest))


def check_attention(tpu, kind, case, mode, **options):
    inputs, scale, held = stored(case, kind)
    # With the LSE in one mode and without it in the other, where the kernel sums the weights in another way.
    wanted = not mode.detect_races
    result = interpreter.run(
        functools.partial(tpu.paged_attention, kind=kind), *inputs, mode=mode, **testing.make_options(case),
        kv_scale=scale, return_lse=wanted, **options,
    )  # fmt: skip
    out, lse = result if wanted else (result, testing.expected(case, held, return_lse=True)[1])
    check(case, out, lse, held)


def check_write(tpu, kind, case, mode):
    inputs, scale, _ = stored(case, kind)
    k, v = interpreter.new_tokens(case, inputs.q)
    valid = pallas_kernels.locate(k.shape[:-2], inputs.lengths, inputs.new).valid
    valid = np.asarray(valid)[..., None, None]
    k, v = (None if x is None else np.where(valid, x, np.asarray(np.nan, x.dtype)) for x in (k, v))
    k[(0,) * (k.ndim - 1) + (-1,)] = np.nan  # then all of that token is
    arguments = (inputs.kv, k, v, *inputs[2:])
    options = {"kind": kind, "rank": case.rank}
    written = interpreter.run(functools.partial(tpu.write_kv, **options), *arguments, mode=mode, kv_scale=scale)
    assert_written(written, interpreter.write_kv(*arguments, kv_scale=scale, **options))
