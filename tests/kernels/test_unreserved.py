"""Tokens beyond their row's table, or without a reserved block, go nowhere: no number of any pool changes by them.

The TPU's kernels are in `tpu/test_tpu_unreserved.py`. For GPUs XLA writes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from unreserved import DECODE_ROWS, POOLS, ROWS, check_write, make_write

import pallas_kernels
from pallas_kernels.common.batch import PagedBatch
from pallas_kernels.common.index_keys import StoredIndex
from pallas_kernels.common.quantization import find_format
from pallas_kernels.xla.chosen.index import write_index

EACH = [(name, packed) for name in POOLS for packed in (False, True)]
BY_DAY = [(name, nth % 2 == 0) for nth, name in enumerate(POOLS)]


def run(implementation, write):
    op = functools.partial(pallas_kernels.write_kv, implementation=implementation)
    return jax.jit(op, static_argnames=("kind", "rank"))(*write.arguments, **write.options)


@pytest.mark.parametrize(("name", "packed"), EACH if NIGHTLY else BY_DAY)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_write(implementation, name, packed):
    write = make_write(POOLS[name], packed)
    check_write(write, run(implementation, write))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_decode(implementation):
    write = make_write(POOLS["bfloat16"], packed=False, given_rows=DECODE_ROWS)
    check_write(write, run(implementation, write))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("packed", [False, True])
def test_write_and_attend(implementation, packed):
    """The rows whose tokens all have a place see what they would see alone."""
    write = make_write(POOLS["float32"], packed)
    kv, k, v, tables, lengths, new = write.arguments
    q = jnp.repeat(k, 2, axis=-2)
    out, written = jax.jit(functools.partial(pallas_kernels.write_and_attend, implementation=implementation))(
        q, k, v, kv, tables, lengths, new
    )
    check_write(write, written)
    fits = jnp.asarray([fits == slice(0, count) for _, _, count, _, fits in ROWS])
    wanted = pallas_kernels.paged_attention(
        q, written, tables, jnp.where(fits, lengths, 0), jnp.where(fits, new, 0), offsets=jnp.cumsum(new) - new
    ) if packed else pallas_kernels.paged_attention(q, written, tables, lengths, jnp.where(fits, new, 0))  # fmt: skip
    token = pallas_kernels.locate(q.shape[:-2], lengths, new)
    is_whole = np.asarray(token.valid & fits[token.row])
    assert is_whole.any()
    np.testing.assert_array_equal(out[is_whole], wanted[is_whole])


@pytest.mark.parametrize("packed", [False, True])
def test_write_of_a_run_of_every_block(packed):
    write = make_write(POOLS["bfloat16"], packed)
    kv, *rest = write.arguments
    for number in range(2):
        stripe, run = jnp.asarray([number, 2], jnp.int32), slice(4 * number, 4 * number + 4)
        written = jax.jit(pallas_kernels.write_kv)(kv[:, :, :, run], *rest, stripe=stripe)
        check_write(write._replace(expected=[write.expected[0][:, :, :, run]]), written)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_index_keys(kind):
    """A pool of one part and one head: what is written of them is what `write_kv` writes of latent rows."""
    write = make_write(POOLS["latent" if kind is None else "latent int8"], packed=True)
    kv, k, _, tables, lengths, new = write.arguments
    scale = None if kind is None else write.options["kv_scale"][..., 0]
    batch = PagedBatch(tables, lengths, new)

    def put(keys, scale):
        return write_index(k[:, 0], StoredIndex(keys, scale, find_format(kind)), batch)

    keys, scales = jax.jit(put)(kv, scale)
    changed = [np.asarray(x != old).any(axis=-1) for x, old in ((write.expected[0], kv), (keys, kv))]
    np.testing.assert_array_equal(*changed)
    if kind is None:
        check_write(write, keys)
    else:
        np.testing.assert_array_equal(scales != scale, changed[0])


def test_gradients_do_not_reach_them():
    write = make_write(POOLS["float32"], packed=True)
    kv, k, v, *where = write.arguments

    def total(kv, k, v):
        return pallas_kernels.write_kv(kv, k, v, *where).sum()

    of_kv, of_k, of_v = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(kv, k, v)
    counts = [(fits.stop - fits.start) for *_, fits in ROWS]
    is_written = np.concatenate(
        [np.isin(np.arange(new), np.arange(fits.start, fits.stop)) for _, _, new, _, fits in ROWS]
    )
    for bar in (of_k, of_v):
        np.testing.assert_array_equal(np.asarray(bar != 0).any(axis=(1, 2)), is_written)
    assert (np.asarray(of_kv) == 0).sum() == 2 * 2 * 40 * sum(counts)


@pytest.mark.parametrize("name", ["bfloat16", "joined int4"])
def test_no_pool_is_copied(name):
    """Of a donated pool, many times as large as what is written."""
    pool = POOLS[name]
    write = make_write(pool, packed=True, block_size=2048)
    op = functools.partial(pallas_kernels.write_kv, implementation="xla")
    static = {name: x for name, x in write.options.items() if name != "kv_scale"}
    donated = jax.jit(
        lambda kv, scale, *rest: op(kv, *rest, **static | ({} if scale is None else {"kv_scale": scale})),
        donate_argnums=(0, 1),
    )
    kv, *rest = write.arguments
    memory = donated.lower(kv, write.options.get("kv_scale"), *rest).compile().memory_analysis()
    assert 20 * memory.temp_size_in_bytes < kv.nbytes <= memory.alias_size_in_bytes
