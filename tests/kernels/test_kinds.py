"""Quantised pools: what is stored, how near attention over it is, and that no token's numbers touch another's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiles
from nightly import NIGHTLY, compiles_for_cpus

import pallas_kernels
from pallas_kernels import reference, testing
from pallas_kernels.common.quantization import FORMATS, QUANTIZED as KINDS, TINY, unpack_nibbles
from pallas_kernels.common.quantization.levels import FIVE_BITS, FOUR_BITS, SCALE_PARTS, THREE_BITS
from pallas_kernels.testing import Case
from pallas_kernels.xla import int8_product as digits

LEVELS = pytest.mark.parametrize("levels", [THREE_BITS, FOUR_BITS, FIVE_BITS], ids=["3", "4", "5"])
SCALES = {kind: FORMATS[kind].scale_dtype for kind in KINDS}
# Rounding to so many steps, or to so many bits, of normal data; in the Euclidean norm.
ROUND_TRIP = {"int8": 0.008, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06, "int4": 0.082, "k5v3": 0.125}
ATTENTION = {"int8": 0.01, "float8_e4m3fn": 0.04, "float8_e5m2": 0.085, "int4": 0.13, "k5v3": 0.2}

quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_trip(x, kind, scale_dtype):
    """`[N, 2, ..]`: keys and values."""
    stored, scale = FORMATS[kind].encode(x, scale_dtype, axis=1)
    return FORMATS[kind].decode(stored, scale, x.shape[-1], axis=1), stored, scale


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def error(got, wanted):
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e30])
def test_round_trip(kind, size):
    x = normal(50, 2, 80) * np.float32(size)
    got, stored, scale = round_trip(x, kind, SCALES[kind])
    assert error(got / np.float32(size), x / np.float32(size)) < ROUND_TRIP[kind]
    assert stored.shape[-1] == FORMATS[kind].stored_dim(80) and stored.dtype == FORMATS[kind].storage_dtype
    assert scale.shape == (50, 2, *FORMATS[kind].scale_axes(80)) and scale.dtype == SCALES[kind]


def test_int8_of_small_numbers():
    """A promise of the systems that came before: an error below 0.002 where the largest number is 0.1."""
    x = np.random.default_rng(0).uniform(-0.1, 0.1, (100, 2, 64)).astype(np.float32)
    assert np.abs(round_trip(x, "int8", SCALES["int8"])[0] - x).max() < 0.002


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_of_a_head_depends_on_it_alone(kind):
    x = normal(6, 2, 4, 64)
    x[0, 0, 0], x[1, 1, 1, 5], x[2, 0, 2, 7], x[3, 1, 3, :] = 0, np.nan, np.inf, 3e38
    got, stored, scale = (np.asarray(part) for part in round_trip(x, kind, SCALES[kind]))
    for token in range(6):
        alone = round_trip(x[token : token + 1, :, 1:3], kind, SCALES[kind])
        np.testing.assert_array_equal(alone[1][0], stored[token, :, 1:3])
        np.testing.assert_array_equal(np.asarray(alone[2][0], np.float32), np.asarray(scale[token, :, 1:3], np.float32))
    assert (got[0, 0, 0] == 0).all() and np.isfinite(got[3, 1, 3]).all()
    lost = ~np.isfinite(got)
    assert lost[1, 1, 1].all() and lost[2, 0, 2].all() and lost.sum() == 2 * 64


@LEVELS
def test_scales_tried_in_turn_and_at_once_are_the_same(levels):
    """The first of several that lose as much; entries that fill a group count for nothing."""
    rng = np.random.default_rng(0)
    spread = SCALE_PARTS * levels.last_parts * 0.36
    parts = np.round(np.abs(rng.normal(0, spread, (400, 3, 32)))).astype(np.float32)
    parts[:50] = 0  # all scales lose as much
    is_entry = np.ones(parts.shape, np.float32)
    is_entry[:, 2, 20:] = parts[:, 2, 20:] = 0
    at_once, in_turn = (
        np.asarray(jax.jit(f)(parts, is_entry)) for f in (levels.find_least_at_once, levels.find_least_in_turn)
    )
    np.testing.assert_array_equal(at_once, in_turn)
    assert len(np.unique(at_once)) == len(levels.scales_tried)


def list_entries(levels):
    """All the sizes, in parts, that a number of a group can have."""
    return jnp.arange(SCALE_PARTS * levels.last_parts + 1, dtype=jnp.float32)


@LEVELS
def test_levels_of_a_known_unit(levels):
    """A kernel picks them from a table, to the bit."""
    entries = list_entries(levels)
    for unit in levels.units_tried:
        np.testing.assert_array_equal(levels.pick(entries, unit) - entries, levels.lose(entries, unit))


@pytest.mark.parametrize("kind", ["int4", "k5v3"])
def test_errors_of_scales_are_summed_exactly(kind):
    """Whatever the order: of a group whose entries all lose the most, float32 holds the sum of the squares."""
    for levels in FORMATS[kind].levels:
        entries = list_entries(levels)
        most = max(float(jnp.square(levels.lose(entries, unit)).max()) for unit in levels.units_tried)
        assert most * FORMATS[kind].group_size < 2**24 and most < 2**18  # which kernels sum by products


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_groups_of_64_take_four_bits_and_a_quarter(head_dim):
    pair = jax.ShapeDtypeStruct((2, head_dim), jnp.float32)
    stored, scale = jax.eval_shape(functools.partial(FORMATS["k5v3"].encode, axis=0), pair)
    assert 8 * (stored.size + 2 * scale.size) == 4.25 * pair.size and scale.dtype == jnp.bfloat16


@pytest.mark.skipif(not compiles_for_cpus(), reason="what another compiler keeps is its own")
def test_a_prompt_is_stored_in_four_bits_in_little_memory():
    """Not the eight scales that are tried of each number at a time."""
    x = jax.ShapeDtypeStruct((8, 256, 4, 128), jnp.bfloat16)
    memory = jax.jit(FORMATS["int4"].encode).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3.5 * 4 * x.size


def test_all_bits_of_int4_are_levels():
    """Every byte is two levels, which are what the table says, and goes back to itself."""
    int4, stored = FORMATS["int4"], jnp.arange(256, dtype=jnp.uint8)[:, None]
    numbers = np.asarray(int4.from_bits(stored))
    levels = list_levels(FOUR_BITS)
    for half, code in ((0, np.arange(256) % 16), (1, np.arange(256) // 16)):
        np.testing.assert_array_equal(numbers[:, half], levels[(code + 8) % 16])
    np.testing.assert_array_equal(int4.to_bits(numbers), stored)


def test_all_bits_of_k5v3_are_levels():
    """Every byte of a packed row is a value of eight levels and, above it, a key of 32; apart as they are together."""
    k5v3, rows = FORMATS["k5v3"], np.arange(256, dtype=np.uint8)[:, None].repeat(2, axis=1)
    values, keys = np.split(np.asarray(k5v3.from_bits(rows)), 2, axis=-1)
    np.testing.assert_array_equal(values[:, 0], list_levels(THREE_BITS)[(np.arange(256) % 8 + 4) % 8])
    np.testing.assert_array_equal(keys[:, 0], list_levels(FIVE_BITS)[(np.arange(256) // 8 + 16) % 32])
    apart = k5v3.read_pair(*unpack_nibbles(rows))
    np.testing.assert_array_equal(apart[0], keys)
    np.testing.assert_array_equal(apart[1], values)


def list_levels(levels):
    return np.array([*(-x for x in reversed(levels.above_0)), *levels.above_0])


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 16), ("k5v3", 64), ("k5v3", 48)])
@pytest.mark.parametrize("which", [0, 1])
def test_numbers_take_the_nearest_levels_of_the_best_scale(kind, group, which):
    """Against NumPy, which tries all: normal numbers, a few large ones, equal ones, and one alone; a full group, and
    one that is not."""
    x = normal(60, group) * np.float32(10) ** np.arange(-30, 30, dtype=np.float32)[:, None]
    x[:20, ::5] *= 30
    x[20:25], x[25:30, 1:] = x[20:25, :1], 0
    got, _, scale = round_trip(np.stack([x, x], axis=1), kind, SCALES[kind])
    got, scale = np.asarray(got[:, which], np.float64), scale[:, which]
    levels = FORMATS[kind].levels[which]

    def lose(scale):
        numbers = np.asarray(scale, np.float64)[:, None, None] * list_levels(levels)
        nearest = np.abs(x[..., None] - numbers).min(axis=-1)
        return np.linalg.norm(nearest, axis=1)

    np.testing.assert_allclose(np.linalg.norm(got - x, axis=1), lose(scale[:, 0]), rtol=1e-4)
    largest = np.maximum(np.abs(x).max(axis=1), TINY) / np.float32(levels.last)
    tried = [lose(largest * np.float32(part / SCALE_PARTS)) for part in levels.scales_tried]
    least = np.min(tried, axis=0)
    off = 2**-8 * np.maximum(np.linalg.norm(x.astype(np.float64), axis=1), least)  # by a scale in bfloat16
    assert (lose(scale[:, 0]) < least + off).all()


def test_int4_loses_less_than_even_steps_would():
    """Of normal numbers: 0.63 of the squared error of 15 even steps up to the largest number of each 32."""
    x = normal(1000, 2, 32)
    step = np.abs(x).max(axis=-1, keepdims=True) / 7
    even = error(np.round(x / step) * step, x)
    assert error(round_trip(x, "int4", SCALES["int4"])[0], x) ** 2 < 0.65 * even**2


def quantised(case, kind, seed=0):
    """A case's inputs with a pool of a kind, and the same with what it holds as float32. What must not be read is NaN
    in float32, and any number under a NaN scale when quantised."""
    return testing.quantise(case, testing.make_inputs(case, seed), kind, SCALES[kind], seed)


CASES = {
    "decode": Case(lengths=(17, 0, 40, 16), new=(1, 0, 1, 1), head_dim=80, num_heads=6),
    "chunks under a window": Case(lengths=(17, 3, 40), new=(9, 3, 2), window=7, soft_cap=3.0, block_size=5),
    "packed": Case(lengths=(70, 3, 40), new=(40, 1, 2), packed=True, padding=3, num_kv_heads=4, block_size=1),
    "joined": Case(lengths=(17, 0, 40, 16), new=(9, 0, 1, 1), head_dim=10, rank=5, scale=0.3, joined=True, window=20),
}


BY_DAY = {
    "decode": ("int8", "float8_e5m2", "k5v3"), "chunks under a window": ("float8_e4m3fn",), "packed": ("int4",),
    "joined": ("int8",),
}  # fmt: skip
EACH = [
    (name, kind)
    for name in CASES for kind in (KINDS if NIGHTLY else BY_DAY[name])
    if name != "joined" or FORMATS[kind].group_size is None
]  # fmt: skip
TWO = ("int8", "int4")


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_attention_over_what_is_stored(name, kind):
    """XLA, in tiles and at once, and the reference against float32 attention over the same numbers, NaN in all that
    must not be read."""
    case = CASES[name]
    inputs, scale, held = quantised(case, kind)
    options = testing.make_options(case)
    wanted, wanted_lse = testing.expected(case, held, return_lse=True)
    for implementation, given in ("xla", in_tiles(inputs)), ("xla", inputs), ("reference", inputs):
        attend = quickly_compiled(
            lambda inputs, scale, implementation=implementation: pallas_kernels.paged_attention(
                *inputs, kv_scale=scale, kind=kind, implementation=implementation, return_lse=True, **options
            )
        )
        out, lse = attend(given, scale)
        testing.assert_close(out, wanted, dtype="float32")
        testing.assert_close(lse, wanted_lse, dtype="float32")


@pytest.mark.parametrize("name", CASES if NIGHTLY else ("decode", "packed", "joined"))
def test_bytes_are_multiplied_as_they_lie(name):
    """By queries of 16 bits, on a CPU. The LSE, in float32, shows that no more is lost than that."""
    case = CASES[name]
    inputs, scale, held = quantised(case, "int8")
    q = inputs.q.astype(jnp.bfloat16)
    options = testing.make_options(case)
    wanted, wanted_lse = testing.expected(case, held._replace(q=q.astype(jnp.float32)), return_lse=True)
    for given in in_tiles(inputs), inputs:
        attend = quickly_compiled(
            lambda inputs, scale: pallas_kernels.paged_attention(
                *inputs, kv_scale=scale, kind="int8", implementation="xla", return_lse=True, **options
            )
        )
        out, lse = attend(given._replace(q=q), scale)
        testing.assert_close(out, wanted, dtype="bfloat16")
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_digits", [2, 3])
def test_products_with_bytes(num_digits):
    """Rows of one size, of very different sizes, and what is no number; each is counted in units of its own."""
    numbers = np.random.default_rng(0).integers(-128, 128, (2, 300, 40)).astype(np.int8)
    rows = normal(2, 6, 40) * np.float32([1, 1e-30, 1e30, 1, 0, 1])[:, None]
    rows[:, 3, 7] *= 1e4
    lost = rows.copy()
    lost[0, 0, 3], lost[0, 1, 5], lost[1, 2, 0] = np.nan, np.inf, -np.inf
    multiply = jax.jit(functools.partial(digits.product, "bqd,bcd->bqc", num_digits=num_digits))
    wanted = np.einsum("bqd,bcd->bqc", rows.astype(np.float64), numbers)
    most = np.abs(rows).max(axis=-1, keepdims=True) * np.linalg.norm(numbers.astype(np.float64), axis=-1)[:, None]
    assert (np.abs(multiply(rows, numbers) - wanted) <= 2 * most / (127 * 128 ** (num_digits - 1))).all()
    got = np.asarray(multiply(lost, numbers))
    assert np.isnan(got).sum() == 3 * 300 and np.isnan(got[0, :2]).all() and np.isnan(got[1, 2]).all()


@pytest.mark.parametrize("kind", KINDS if NIGHTLY else TWO)
def test_error_of_attention(kind):
    """Of normal data, over a thousand tokens: what quantising costs."""
    case = Case(lengths=(1024,), new=(64,), num_heads=4, num_kv_heads=2, head_dim=128)
    exact = testing.make_inputs(case)
    inputs, scale, _ = quantised(case, kind)
    attend = quickly_compiled(lambda *inputs, **options: pallas_kernels.paged_attention(*inputs, **options, kind=kind))
    out = attend(*inputs, kv_scale=scale)
    wanted = np.asarray(testing.expected(case, exact), np.float64)
    for head in range(4):
        assert error(out[0, :, head], wanted[0, :, head]) < ATTENTION[kind]


@pytest.mark.parametrize("kind", KINDS if NIGHTLY else TWO)
def test_writes_in_any_steps_store_the_same_bits(kind):
    """Ten tokens of two rows at once, one after another, or packed: one pool. NaN stays with its token and head."""
    block_size, head_dim = 4, 64
    kv = jnp.zeros((9, 2, 2, block_size, FORMATS[kind].stored_dim(head_dim)), FORMATS[kind].storage_dtype)
    scale = jnp.zeros((9, 2, 2, block_size, *FORMATS[kind].scale_axes(head_dim)), SCALES[kind])
    tables = jnp.array([[3, 7, 1], [5, 2, 8]], jnp.int32)
    k, v = (jnp.asarray(normal(2, 10, 2, head_dim, seed=s)) for s in (1, 2))
    k = k.at[0, 4, 1, 3].set(jnp.nan)

    @functools.partial(quickly_compiled, static_argnames="implementation")
    def write(kv, scale, k, v, lengths, new, implementation="xla"):
        return pallas_kernels.write_kv(
            kv, k, v, tables, lengths, new, kv_scale=scale, kind=kind, implementation=implementation
        )

    def one_by_one(pools, t):
        return write(*pools, k[:, t : t + 1], v[:, t : t + 1], ten - 9 + t, ten // 10)

    ten = jnp.array([10, 10], jnp.int32)
    whole = write(kv, scale, k, v, ten, ten)
    for other in (
        write(kv, scale, k, v, ten, ten, implementation="reference"),
        write(kv, scale, k.reshape(20, 2, -1), v.reshape(20, 2, -1), ten, ten),
        functools.reduce(one_by_one, range(10), (kv, scale)),
    ):
        for a, b in zip(whole, other, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    read = np.asarray(FORMATS[kind].decode(*whole, head_dim))
    assert np.isnan(read[7, 0, 1, 0]).all() and np.isnan(read).sum() == head_dim
    assert not np.asarray(whole[0][0]).any()


@pytest.mark.parametrize("kind, dtype", [("int8", "float32"), ("int8", "bfloat16"), ("int4", "float32")])
@pytest.mark.parametrize("which", [0, 1])
def test_a_scale_of_nan_reaches_who_sees_it_and_nobody_else(which, kind, dtype):
    """Of one token's keys or values in one head: queries before it, and other heads, do not notice."""
    case = Case(lengths=(9,), new=(6,), block_size=4)
    inputs, scale, _ = quantised(case, kind)
    inputs = inputs._replace(q=inputs.q.astype(dtype))
    attend = quickly_compiled(
        lambda scale: pallas_kernels.paged_attention(*inputs, kv_scale=scale, kind=kind, implementation="xla")
    )
    clean = np.asarray(attend(scale))[0]
    assert np.isfinite(clean).all()  # though what no one sees is NaN
    dirty = np.asarray(attend(scale.at[inputs.tables[0, 1], which, 0, 1].set(jnp.nan)))[0]  # position 5
    sees = np.arange(3, 9) >= 5
    assert np.isnan(dirty[sees, :2]).all()
    np.testing.assert_array_equal(dirty[~sees], clean[~sees])
    np.testing.assert_array_equal(dirty[:, 2:], clean[:, 2:])


@pytest.mark.skipif(not NIGHTLY, reason="by day those of float32 do")
def test_gradients_reach_queries_and_scales():
    """Those of attention over what is stored; of int4 scales too, each of which serves 32 entries."""
    case = Case(lengths=(9, 17), new=(2, 3), head_dim=80)
    for kind in TWO if NIGHTLY else TWO[1:]:
        inputs, scale, _ = quantised(case, kind)
        scale = jnp.where(jnp.isnan(scale), jnp.asarray(0, scale.dtype), scale).astype(jnp.float32)

        def loss(q, scale, implementation, inputs=inputs, kind=kind):
            options = {"kv_scale": scale, "kind": kind}
            run = reference.paged_attention if implementation is None else pallas_kernels.paged_attention
            return jnp.sum(run(q, *inputs[1:], **options) ** 2)

        got, wanted = (
            quickly_compiled(jax.grad(functools.partial(loss, implementation=name), (0, 1)))(inputs.q, scale)
            for name in ("xla", None)
        )
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def bad(**changes):
    case = CASES["decode"]
    inputs, scale, _ = quantised(case, "int8")
    arguments = {**inputs._asdict(), "kv_scale": scale, "kind": "int8"} | changes
    return pallas_kernels.paged_attention(**arguments)


BAD = {
    "kind must be None or one of int8, float8_e4m3fn": lambda: bad(kind="int5"),
    "A pool of kind int4 is stored as uint8, not int8": lambda: bad(kind="int4"),
    "needs kv_scale": lambda: bad(kv_scale=None),
    "kv_scale must be float32 or bfloat16, not float16": lambda: bad(kv_scale=jnp.zeros((9, 2, 2, 16), jnp.float16)),
    "without its last axis, ": lambda: bad(kv_scale=jnp.zeros((9, 2, 2, 15))),
}


@pytest.mark.parametrize("text", BAD)
def test_refusals(text):
    with pytest.raises(ValueError) as refused:
        BAD[text]()
    assert text in str(refused.value)


def test_kernels_that_do_not_know_a_kind_say_so():
    inputs, scale, _ = quantised(CASES["decode"], "int4")
    kv = jnp.pad(inputs.kv, [(0, 0)] * 4 + [(0, 128 - inputs.kv.shape[-1])])
    with pytest.raises(NotImplementedError, match="head's keys and values share their bytes: give the"):
        bad(kv=kv, kv_scale=scale.astype(jnp.bfloat16), kind="int4", implementation="tpu")
