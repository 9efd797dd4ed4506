"""Tokens beyond their row's table, or without a reserved block, with the TPU's kernels on the interpreter."""

import functools

import interpreter
import jax.numpy as jnp
import pytest
from nightly import NIGHTLY
from unreserved import DECODE_ROWS, POOLS, check_write, make_write

from pallas_kernels import tpu

pytestmark = pytest.mark.timeout(240, method="thread")
# The tokens of a block of each pool. What the kernel does not write, a scatter does.
SIZES = {
    "bfloat16": 16, "int8": 128, "float8": 128, "latent": 16, "latent int8": 128, "joined int8": 128,
    "joined int4": 128,
}  # fmt: skip
SCATTERED = {"float16": 16}


def parametrize_layouts(names, *by_day):
    """Parametrizes a test over pools of padded and packed tokens by night, and over these by day."""
    each = [(name, packed) for name in names for packed in (False, True)]
    return pytest.mark.parametrize(("name", "packed"), each if NIGHTLY else by_day)


def make(name, packed, **options):
    return make_write(POOLS[name], packed, (SIZES | SCATTERED)[name], 128, **options)


def run(op, write, *arrays, **options):
    static = {name: x for name, x in write.options.items() if name != "kv_scale"}
    given = {name: x for name, x in write.options.items() if name == "kv_scale"}
    op = functools.partial(op, **static)
    return interpreter.run(op, *arrays, mode=interpreter.PLAIN, **given, **options)


@parametrize_layouts(SIZES | SCATTERED, ("bfloat16", False), ("float16", True))
def test_write(name, packed):
    write = make(name, packed)
    check_write(write, run(tpu.write_kv, write, *write.arguments))


@parametrize_layouts(SIZES, ("int8", True))
def test_write_and_attend(name, packed):
    check_fused(name, make(name, packed))


@pytest.mark.parametrize("name", SIZES if NIGHTLY else ["bfloat16"])
def test_decode(name):
    check_fused(name, make(name, packed=False, given_rows=DECODE_ROWS))


def check_fused(name, write):
    kv, k, *rest = write.arguments
    q = jnp.repeat(k, 2, axis=-2)  # bfloat16, as the pools are that are not quantized
    if "joined" in name:
        q = q.at[..., : write.options["rank"]].set(0)
    options = {"scale": 0.1} if "rank" in write.options else {}
    _, written = run(tpu.write_and_attend, write, q, k, rest[0], kv, *rest[1:], **options)
    check_write(write, written)
