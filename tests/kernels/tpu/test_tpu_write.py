"""The TPU's write kernel on the interpreter: bit for bit what the reference writes, and nothing else in the pool.

Then negative controls: with a known mistake it must fail.
"""

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import PLAIN, RACES
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from tpu_mistakes import SOURCES, check_noticed, check_unbroken

import pallas_kernels
from pallas_kernels import reference, testing, tpu
from pallas_kernels.testing import Case
from pallas_kernels.tpu import write

pytestmark = pytest.mark.timeout(240, method="thread")
BF16 = {"dtype": "bfloat16", "stored_head_dim": 128, "head_dim": 128}
CASES = {
    "rows that are empty, of one token, on and beside the borders of pages": (
        Case((16, 0, 5, 40, 33, 250, 7, 17, 15), (16, 0, 5, 21, 1, 235, 0, 17, 1), packed=True, padding=3, **BF16)
    ),
    "blocks of 32, one KV head": Case((64, 33, 31), (64, 2, 1), 2, 1, block_size=32, packed=True, **BF16),
    "blocks of several pages": Case((100, 65, 64), (70, 1, 64), 2, 2, block_size=64, packed=True, **BF16),
    "float32, blocks of 8, padded": Case((9, 0, 17, 16), (2, 0, 1, 16), block_size=8, stored_head_dim=128, padding=2),
    "an odd number of heads": Case((20, 48), (20, 31), 3, 3, block_size=48, packed=True, padding=1, **BF16),
    "blocks that no tile divides": Case((9, 12), (5, 12), 2, 2, block_size=5, packed=True, **BF16),
    "latent rows": Case((64, 33, 31), (64, 2, 1), 2, 1, block_size=32, packed=True, rank=96, scale=1.0, **BF16),
    "latent rows that no tile divides": Case((9, 12), (5, 12), 2, 1, block_size=5, rank=96, scale=1.0, **BF16),
    "nothing": Case((9, 0), (0, 0), packed=True, padding=2, **BF16),
}


def poisoned(case):
    """A case whose pool and whose tokens of nobody are NaN with bits of their own, and its new keys and values."""
    inputs = testing.make_inputs(case)
    rng = np.random.default_rng(0)
    words = np.uint16 if case.dtype == "bfloat16" else np.uint32
    bits = rng.integers(0, np.iinfo(words).max, inputs.kv.shape, words, endpoint=True)
    shape = (2, *inputs.q.shape[:-2], case.num_kv_heads, case.head_dim)
    kv = rng.standard_normal(shape).astype(inputs.kv.dtype)
    kv[:, ~np.asarray(reference.locate(shape[1:-2], inputs.lengths, inputs.new).valid)] = np.nan
    k, v = map(jnp.asarray, kv)
    return inputs._replace(kv=jnp.asarray(bits.view(inputs.kv.dtype))), k, None if case.rank else v


BOTH = [(name, mode) for name in CASES for mode in interpreter.MODES]
BY_DAY = BOTH[1::8] + BOTH[6::8]  # each in one mode


@pytest.mark.parametrize(("name", "mode"), BOTH if NIGHTLY else BY_DAY)
def test_write(name, mode):
    case = CASES[name]
    inputs, k, v = poisoned(case)
    arguments = (inputs.kv, k, v, *inputs[2:])
    actual = interpreter.run(tpu.write_kv, *arguments, mode=interpreter.MODES[mode], rank=case.rank)
    expected = reference.write_kv(*arguments)
    np.testing.assert_array_equal(*(interpreter.bits(x)[..., : case.head_dim] for x in (actual, expected)))
    unwritten = (interpreter.bits(expected) == interpreter.bits(inputs.kv)).all((1, 2, 3, 4))
    np.testing.assert_array_equal(interpreter.bits(actual)[unwritten], interpreter.bits(inputs.kv)[unwritten])
    assert unwritten[0] and (unwritten.all() == (sum(case.new) == 0))


@pytest.mark.parametrize("step", range(-1, 2))
@pytest.mark.parametrize("size", [16] if not NIGHTLY else [1, 15, 16, 17, 33])
def test_around_the_borders_of_pages(size, step):
    case = Case((48 + step, 48 + step + size), (size, size), 2, 1, packed=True, **BF16)
    inputs, k, v = poisoned(case)
    arguments = (inputs.kv, k, v, *inputs[2:])
    actual = interpreter.run(tpu.write_kv, *arguments, mode=interpreter.PLAIN)
    np.testing.assert_array_equal(interpreter.bits(actual), interpreter.bits(reference.write_kv(*arguments)))


def test_offsets_may_leave_gaps():
    case = Case((20, 33, 5), (3, 17, 0), 2, 1, packed=True, padding=12, **BF16)
    inputs, k, v = poisoned(case)
    k, v = (jnp.asarray(np.where(np.isnan(x), np.ones_like(x), x)) for x in (k, v))
    arguments = (inputs.kv, k, v, *inputs[2:])
    offsets = jnp.asarray([2, 9, 30], jnp.int32)
    actual = interpreter.run(tpu.write_kv, *arguments, mode=interpreter.PLAIN, offsets=offsets)
    expected = reference.write_kv(*arguments, offsets=offsets)
    np.testing.assert_array_equal(interpreter.bits(actual), interpreter.bits(expected))
    assert not np.array_equal(interpreter.bits(expected), interpreter.bits(reference.write_kv(*arguments)))


@pytest.mark.parametrize("block_size", [16, 5])  # of tiles, and not
def test_tokens_without_a_block_go_nowhere(block_size):
    """Nor those past the tables' end, nor what more tokens are promised than there are."""
    case = Case((40, 20), (30, 2), 2, 1, block_size=block_size, packed=True, **BF16)
    inputs, k, v = poisoned(case)
    lost = np.asarray(inputs.tables)[0, 1]
    expected = interpreter.bits(reference.write_kv(inputs.kv, k, v, *inputs[2:])).copy()
    expected[lost] = interpreter.bits(inputs.kv)[lost]
    blocks = [0, -3, 10**9]
    wild = np.repeat(np.asarray(inputs.tables)[None], len(blocks), axis=0)
    wild[:, 0, 1] = blocks

    def write(wild, *rest, **options):  # one program, which writes once for each
        kv, k, v, lengths, new = rest
        return jax.lax.map(lambda tables: testing.run(tpu.write_kv, kv, k, v, tables, lengths, new, **options), wild)

    arguments = (wild, inputs.kv, k, v, inputs.lengths, inputs.new)
    actual = interpreter.run(write, *arguments, mode=interpreter.PLAIN)
    for block, one in zip(blocks, actual, strict=True):
        np.testing.assert_array_equal(interpreter.bits(one), expected, err_msg=str(block))


def test_lengths_beyond_the_tables_and_counts_beyond_the_tokens():
    case = Case((40, 32), (8, 16), 2, 1, packed=True, **BF16)
    inputs, k, v = poisoned(case)
    lengths, new = jnp.asarray([60, 32], jnp.int32), jnp.asarray([20, 16], jnp.int32)  # 24 tokens, 48 places a row
    actual = interpreter.run(tpu.write_kv, inputs.kv, k, v, inputs.tables, lengths, new, mode=interpreter.PLAIN)
    expected = reference.write_kv(
        inputs.kv, k, v, inputs.tables, jnp.asarray([48, 20], jnp.int32), jnp.asarray([8, 4], jnp.int32),
        offsets=jnp.asarray([0, 20], jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(interpreter.bits(actual), interpreter.bits(expected))


def test_no_tokens_at_all():
    case = Case((9, 0), (0, 0), packed=True, **BF16)
    inputs, k, v = poisoned(case)
    assert k.shape[0] == 0
    actual = pallas_kernels.write_kv(inputs.kv, k, v, *inputs[2:], implementation="tpu")
    np.testing.assert_array_equal(interpreter.bits(actual), interpreter.bits(inputs.kv))


def test_only_four_bits_take_the_room_of_two_sources():
    """Float8 rows are bytes of the same dtype: what shares a byte is the format's to say, not the pool's."""
    rows = jax.ShapeDtypeStruct((9, 1, 1, 128, 640), jnp.uint8)
    page = write.page_tokens(rows)
    assert write.slots(rows, page) > write.slots(rows, page, group_size=32)
    assert write.write_bytes(rows) <= write.write_bytes(jax.ShapeDtypeStruct(rows.shape, jnp.int8))


RUNS = Case((70, 21, 3), (60, 2, 0), 1, 1, 128, 8, packed=True, padding=2)


def check_write(tpu, case, mode, offsets=None, block=None):
    inputs = testing.make_inputs(case, poison=7.0)
    k, v = jax.random.normal(jax.random.key(0), (2, *inputs.q.shape[:-2], 1, 128))
    tables = inputs.tables if block is None else inputs.tables.at[0, 2].set(block)
    actual = interpreter.run(tpu.write_kv, inputs.kv, k, v, tables, *inputs[3:], mode=mode, offsets=offsets)
    expected = reference.write_kv(inputs.kv, k, v, *inputs[2:], offsets=offsets)
    if block is not None:
        lost = inputs.tables[0, 2]
        expected = expected.at[lost].set(inputs.kv[lost])
    np.testing.assert_array_equal(actual, expected)


def check_write_with_gaps(tpu, case, mode):
    check_write(tpu, case, mode, offsets=jnp.asarray([1, 62, 64]))


def check_write_without_a_block(tpu, case, mode):
    check_write(tpu, case, mode, block=10**9)


# name: (what to run, on which case, in which mode, what is planted). None may wait for a copy that nobody starts.
CONTROLS = {
    "write: the old page not awaited": (
        check_write,
        RUNS,
        PLAIN,
        Plant(
            "_kernel",
            "getattr(pltpu.make_async_copy(page(target, entry), old.at[slot], patching.at[slot]), do)()",
            "getattr(pltpu.make_async_copy(page(target, entry), old.at[slot], patching.at[slot]), "
            "'start')() if do == 'start' else None",
        ),
    ),
    "write: a slot refilled too early": (
        check_write,
        RUNS,
        RACES,
        Plant("_kernel", "entry + depth - 1", "entry + depth"),
        Plant("_kernel", "pl.loop(0, depth - 1)", "pl.loop(0, depth)"),
    ),
    "write: a page changed while it leaves": (
        check_write,
        RUNS,
        RACES,
        Plant("_kernel", "if_written(entry - depth, functools.partial(send, 'wait'))", "None"),
    ),
    "write: begins too early": (
        check_write,
        RUNS,
        PLAIN,
        Plant("_kernel", "place >= begins[entry]", "place >= 0"),
    ),
    "write: ends too late": (
        check_write,
        RUNS,
        PLAIN,
        Plant("_kernel", "place < ends[entry]", "place <= ends[entry]"),
    ),
    "write: another token": (
        check_write,
        RUNS,
        PLAIN,
        Plant("find_runs", "of_row(offsets - before) + start", "of_row(offsets - before) + start + 1"),
    ),
    "write: offsets ignored": (
        check_write_with_gaps,
        RUNS,
        PLAIN,
        Plant(
            "find_runs",
            "if query_starts is None:\n    query_starts = default_offsets(query_lens)",
            "query_starts = default_offsets(query_lens)",
        ),
    ),
    "write: beyond the pool": (
        check_write_without_a_block,
        RUNS,
        PLAIN,
        Plant("find_runs", "kv.shape[0]", "2 ** 30"),
    ),
}
CONTROLS_BY_DAY = ("write: begins too early",)


@pytest.mark.parametrize("control", CONTROLS if NIGHTLY else CONTROLS_BY_DAY)
def test_control(control, tmp_path, monkeypatch):
    check_noticed(CONTROLS[control], tmp_path, monkeypatch)


def test_every_mistake_can_be_made():
    SOURCES.check_plants(CONTROLS)


@skip_by_day("test_write passes on cases like these")
@pytest.mark.timeout(900, method="thread")
def test_unbroken(tmp_path, monkeypatch):
    check_unbroken(CONTROLS, tmp_path, monkeypatch)
