"""The XLA path: against the reference, and that its work and memory follow the tokens held."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DIMENSIONS, in_tiles, use_sizes
from nightly import NIGHTLY
from platforms import trace_for

import pallas_kernels
from pallas_kernels import reference, testing, xla
from pallas_kernels.testing import Case
from pallas_kernels.xla import tile_sizes, work_list as work
from pallas_kernels.xla.softmax import PartialSoftmax, RunningSoftmax, merge_in_order


def attend(inputs, **options):
    return pallas_kernels.paged_attention(*inputs, return_lse=True, implementation="xla", **options)


def junk_tables(case, inputs):
    """Unused entries point anywhere, also out of the pool."""
    tables = np.array(inputs.tables)
    junk = np.random.default_rng(2).choice([-(2**31), -1, 1, 2**20, 2**31 - 1], tables.shape)
    held = -(-np.array(case.lengths) // case.block_size)
    unused = np.arange(tables.shape[1])[None] >= held[:, None]
    return inputs._replace(tables=jnp.asarray(np.where(unused, junk, tables), jnp.int32))


def permute_blocks(inputs):
    order = np.random.default_rng(3).permutation(inputs.kv.shape[0])
    where = np.argsort(order).astype(np.int32)
    kv, tables = np.asarray(inputs.kv)[order], where[np.asarray(inputs.tables)]
    return inputs._replace(kv=jnp.asarray(kv), tables=jnp.asarray(tables))


@pytest.mark.parametrize("case", CASES if NIGHTLY else CASES[::2], ids=str)
def test_against_the_reference(case):
    """Tiles of it in a loop; and at once, if that is what is done, by day in half of the cases."""
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    by_reference = jax.jit(functools.partial(testing.expected, case, return_lse=True))
    expected_out, expected_lse = by_reference(inputs)
    # Neither what is not theirs nor where their blocks lie makes a difference, to the last bit.
    others = testing.make_inputs(case, poison=0), junk_tables(case, inputs), permute_blocks(inputs)
    for widened in (in_tiles,) if CASES.index(case) % 2 and not NIGHTLY else (in_tiles, lambda inputs: inputs):
        out, lse = attend(widened(inputs), **options)
        assert out.dtype == inputs.q.dtype and lse.dtype == jnp.float32
        testing.assert_close(out, expected_out)
        testing.assert_close(lse, expected_lse)
        for other in others:
            for a, b in zip((out, lse), attend(widened(other), **options), strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", sorted(DIMENSIONS.keys() - {"group", "step"}))
def test_cases_have_every_value(name):
    assert {getattr(case, name) for case in CASES} >= set(DIMENSIONS[name])


def trace_steps(monkeypatch, case, max_blocks, **options):
    """The queries of each tile that the loops of a call really took, when tables have `max_blocks` entries."""
    steps = []
    find_items = work.find_items

    def counting(tiling, *args):
        jax.debug.callback(lambda: steps.append(tiling.queries))
        return find_items(tiling, *args)

    inputs = testing.make_inputs(case)
    tables = jnp.pad(inputs.tables, ((0, 0), (0, max_blocks - inputs.tables.shape[1])))
    with monkeypatch.context() as patch:
        patch.setattr(work, "find_items", counting)
        jax.jit(lambda *args: testing.run(xla.paged_attention.__wrapped__, *args, **options))(
            *inputs._replace(tables=tables)
        )
        jax.effects_barrier()
    return sorted(steps)  # callbacks come in any order


def test_work_follows_the_tokens_held(monkeypatch):
    """Twice the tokens, twice the steps; room for a hundred times more makes none."""
    use_sizes(monkeypatch, step_bytes=1)  # one item a step
    tile = tile_sizes.find_sizes().decode_context
    short = Case(lengths=(tile, 3 * tile, 0, 1), new=(1, 1, 0, 1), block_size=8)
    assert trace_steps(monkeypatch, short, max_blocks=1000) == [1] * (1 + 3 + 0 + 1)
    long = Case(lengths=(2 * tile, 6 * tile, 0, 1), new=(1, 1, 0, 1), block_size=8)
    assert trace_steps(monkeypatch, long, max_blocks=1000) == [1] * (2 + 6 + 0 + 1)
    windowed = Case(lengths=(20 * tile + 1, 1), new=(1, 1), block_size=8)
    assert trace_steps(monkeypatch, windowed, max_blocks=1000, window=tile) == [1] * (2 + 1)


def test_a_chunk_does_not_make_decode_rows_pay(monkeypatch):
    use_sizes(monkeypatch, step_bytes=1)
    _, _, _, queries, context, _ = tile_sizes.find_sizes()
    case = Case(lengths=(2 * queries, 1, 1, 1), new=(2 * queries, 1, 1, 1), block_size=8)
    assert 2 * queries <= context
    assert trace_steps(monkeypatch, case, max_blocks=1000) == [1, 1, 1, queries, queries]


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window=300),
        dict(deterministic=True),
        dict(chunk=200, soft_cap=9.0),
        dict(window=40, sink_tokens=600),
    ],
    ids=str,
)
def test_tiles_of_a_gpu(monkeypatch, options):
    """Rows that end at, before and behind its tiles of queries and of tokens, a few items to a step."""
    _, _, decode, queries, context, _ = tile_sizes.SIZES[True]
    lengths = (context + 1, 2 * context, decode, decode + 1, 0, 1, 3 * context - 1, context + queries)
    new = (queries + 1, queries, 1, 1, 0, 1, 2 * queries - 1, context)
    case = Case(lengths, new, num_heads=2, num_kv_heads=1, head_dim=8, block_size=16, packed=True, padding=3)
    inputs = testing.make_inputs(case)
    items = tile_sizes._item_bytes(inputs.q, inputs.kv, queries, context)
    use_sizes(monkeypatch, **tile_sizes.SIZES[True]._replace(step_bytes=3 * items, at_once_bytes=0)._asdict())
    out, lse = attend(inputs, **options)
    seen = {name: value for name, value in options.items() if name != "deterministic"}
    expected = reference.paged_attention(*inputs, return_lse=True, **seen)
    testing.assert_close(out, expected[0])
    testing.assert_close(lse, expected[1])


def count_steps(rows, length, new):
    """Returns the steps of a loop over full rows of Llama 3 8B's heads, on the platform at hand."""
    q, kv, tables = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((rows * new, 32, 128), jnp.bfloat16),
            ((rows * length // 32, 2, 8, 32, 128), jnp.bfloat16),
            ((rows, length // 32), jnp.int32),
        )
    )
    queries = min(new, tile_sizes.find_sizes().queries)
    tiling = tile_sizes.choose_tiling(q, kv, tables, queries, rows * new // queries)
    context = tiling.pieces * tiling.run
    ends = [length - new + min(new, i + queries) for i in range(0, new, queries)]
    return -(-rows * sum(-(-end // context) for end in ends) // tiling.items)


def test_a_gpu_takes_few_steps():
    """Each is some 50 us of launches there, while on a CPU short steps stay in cache."""
    with trace_for("cpu"):
        assert count_steps(1, 2048, 2048) == 144 and count_steps(64, 8192, 1) == 547
    for gpu in "gpu", "rocm":
        with trace_for(gpu):
            assert count_steps(1, 2048, 2048) == 4 and count_steps(64, 8192, 1) == 17


def compile_decode(max_seq_len, block_size=16):
    rows, heads, head_dim = 8, 8, 64
    num_blocks = 4096 // block_size
    arguments = (
        jax.ShapeDtypeStruct((rows, 1, 4 * heads, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_blocks + 1, 2, heads, block_size, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, max_seq_len // block_size), jnp.int32),
        *[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2,
    )
    return jax.jit(functools.partial(testing.run, xla.paged_attention)).lower(*arguments).compile()


def test_memory_is_one_step_of_the_loop():
    """Not a row's dense keys and values: room for 32 times longer rows costs no memory but its tables'."""
    short, long = (compile_decode(n).memory_analysis().temp_size_in_bytes for n in (2048, 65536))
    assert short < 2 * tile_sizes.find_sizes().step_bytes
    assert long < short * 1.1


def test_one_compile_for_all_lengths():
    case = Case(lengths=(5, 300), new=(1, 40), block_size=8)
    inputs = testing.make_inputs(case)
    run = jax.jit(lambda *args, **options: pallas_kernels.paged_attention(*args, **options))
    for lengths, new in ([5, 300], [1, 40]), ([0, 1], [0, 1]), ([300, 40], [40, 40]):
        run(*inputs[:3], jnp.array(lengths, jnp.int32), jnp.array(new, jnp.int32), scale=jnp.float32(0.1 + new[0]))
    assert run._cache_size() == 1


def count_equations(jaxpr):
    inner = [
        j
        for e in jaxpr.eqns
        for j in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns"))
        if hasattr(j, "eqns")
    ]
    return len(jaxpr.eqns) + sum(count_equations(j) for j in inner)


def test_the_program_is_small():
    def size(new, widened):
        inputs = widened(testing.make_inputs(Case(lengths=(50, 300), new=new)))
        return count_equations(jax.make_jaxpr(functools.partial(testing.run, xla.paged_attention))(*inputs).jaxpr)

    decode, mixed = (size(new, in_tiles) for new in ((1, 1), (1, 40)))
    assert 100 < decode < 600 and mixed < 1200  # the lower bound: the count sees into the loops
    at_once = [size(new, lambda inputs: inputs) for new in ((1, 1), (1, 40))]
    assert max(at_once) < 250


@pytest.mark.parametrize("packed", [False, True] if NIGHTLY else [True])
def test_nan_stays_in_its_row(packed):
    """... and is not seen by the tokens before it."""
    case = Case(lengths=(70, 90, 33), new=(1, 20, 33), packed=packed)
    inputs = testing.make_inputs(case)
    clean, _ = attend(inputs)
    block, place = divmod(80, case.block_size)
    kv = inputs.kv.at[inputs.tables[1, block], :, :, place].set(jnp.nan)
    dirty, _ = attend(inputs._replace(kv=kv))
    sees = np.zeros(inputs.q.shape[:-2], bool)
    if packed:
        sees[1 + 10 : 1 + 20] = True  # row 1's tokens are at positions 70 to 89
    else:
        sees[1, 10:20] = True
    assert np.isnan(dirty)[sees].all()
    np.testing.assert_array_equal(dirty[~sees], clean[~sees])


QUANTISED = [(new, kind) for new in ((1, 1), (1, 30)) for kind in ("int8", "float8_e4m3fn")]


@pytest.mark.parametrize(("new", "kind"), QUANTISED if NIGHTLY else QUANTISED[::3])
def test_quantised_pools(kind, new):
    case = Case(lengths=(65, 130), new=new, mask=True)
    inputs, options = testing.make_inputs(case), testing.make_options(case)
    rng = np.random.default_rng(0)
    owned = ~np.isnan(np.asarray(inputs.kv)[..., 0])
    integers = jnp.asarray(rng.integers(-127, 128, inputs.kv.shape), jnp.int8)
    kv, size = (integers, 1 / 60) if kind == "int8" else (inputs.kv.astype(kind), 1.0)
    kv_scale = jnp.asarray(np.where(owned, size * rng.uniform(0.5, 1.5, owned.shape), np.nan), jnp.float32)
    out, lse = attend(inputs._replace(kv=kv), kv_scale=kv_scale, **options)
    expected = testing.expected(case, inputs._replace(kv=kv), kv_scale=kv_scale, return_lse=True)
    testing.assert_close(out, expected[0])
    testing.assert_close(lse, expected[1])


DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]


@pytest.mark.parametrize("dtypes", DTYPES if NIGHTLY else DTYPES[:1])
def test_queries_of_another_dtype(dtypes):
    case = Case(lengths=(65, 130), new=(1, 3), dtype=dtypes[1])
    inputs = testing.make_inputs(case)
    inputs = inputs._replace(q=inputs.q.astype(dtypes[0]))
    out, _ = attend(inputs)
    assert out.dtype == dtypes[0]
    testing.assert_close(out, testing.expected(case, inputs), dtype=min(dtypes, key=lambda d: jnp.finfo(d).bits))


def test_scale_and_soft_cap_as_numbers_and_as_arrays():
    inputs = testing.make_inputs(Case(lengths=(65, 130), new=(1, 3)))
    numbers = attend(inputs, scale=0.3, soft_cap=2.0)
    arrays = jax.jit(lambda scale, soft_cap: attend(inputs, scale=scale, soft_cap=soft_cap))(0.3, 2.0)
    half = attend(inputs, scale=jnp.bfloat16(0.3), soft_cap=np.float32(2.0))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), arrays, numbers)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-2), half, numbers)


@pytest.mark.parametrize("shape", [(2, 0), (0,)])
def test_no_tokens(shape):
    inputs = testing.make_inputs(Case(lengths=(5, 9), new=(1, 1)))
    out, lse = attend(inputs._replace(q=jnp.zeros((*shape, 4, 64)), new=jnp.zeros(2, jnp.int32)))
    assert out.shape == (*shape, 4, 64) and lse.shape == (*shape, 4)
    loss = lambda q, kv: pallas_kernels.paged_attention(q, kv, *inputs[2:]).sum()  # noqa: E731
    q_bar, kv_bar = jax.grad(loss, argnums=(0, 1))(out, inputs.kv)
    assert q_bar.shape == out.shape and (kv_bar == 0).all()


def test_packed_rows_with_gaps():
    """Rows that failed keep their places but have no tokens; `offsets` says where the others are."""
    case = Case(lengths=(9, 5, 40), new=(3, 0, 20), packed=True, padding=7)
    inputs = testing.make_inputs(case)
    offsets = jnp.array([0, 3, 8], jnp.int32)
    out, lse = attend(inputs, offsets=offsets)
    expected = reference.paged_attention(*inputs, offsets=offsets, return_lse=True)
    testing.assert_close(out, expected[0])
    testing.assert_close(lse, expected[1])
    assert (np.asarray(out)[3:8] == 0).all()


@pytest.mark.parametrize("backwards", [False, True])
def test_tiles_that_reach_into_other_rows(backwards, monkeypatch):
    """A tile's window ends in tokens of the next rows, which have been attended to before or have not yet."""
    case = Case(lengths=(900, 1590, 700, 1290, 540, 9), new=(3, 1, 33, 1, 2, 9), packed=True, head_dim=16)
    inputs = testing.make_inputs(case)
    items = tile_sizes._item_bytes(inputs.q, inputs.kv, *tile_sizes.find_sizes()[3:5])
    use_sizes(monkeypatch, step_bytes=3 * items)  # many steps of the loops, with several items each
    in_loops = inputs._replace(tables=jnp.pad(inputs.tables, ((0, 0), (0, 4000))))  # too wide to be read at once
    offsets = jnp.cumsum(inputs.new) - inputs.new
    if backwards:
        offsets = jnp.cumsum(inputs.new[::-1])[::-1] - inputs.new
    expected = reference.paged_attention(*inputs, offsets=offsets, return_lse=True)
    for options in ({}, {"deterministic": True}):
        out, lse = attend(in_loops, offsets=offsets, **options)
        testing.assert_close(out, expected[0])
        testing.assert_close(lse, expected[1])


def test_a_window_changes_no_bit_of_other_tokens():
    """Not even the sign of a zero: another row's place in the batch would show in it."""
    values = -jnp.zeros((1, 4, 2))
    running = RunningSoftmax(jnp.stack([jnp.ones(8), -jnp.zeros(8)])[:, :4].reshape(1, 8), values)
    top, total = jnp.full((1, 1, 2), 1.0), jnp.ones((1, 1, 2))
    items, is_token = PartialSoftmax(top, jnp.ones((1, 1, 2, 2)), total), jnp.array([[[True, False]]])
    after = merge_in_order(running, jnp.array([1]), items, is_token)
    assert np.signbit(after.values[0, :, 0]).tolist() == [True, False, True, True]
    assert np.signbit(after.both[0, 4:]).tolist() == [True, False, True, True]


def test_rows_that_fill_their_tiles_badly():
    """As many lanes as there can be."""
    queries = tile_sizes.find_sizes().queries
    case = Case(lengths=(queries + 1,) * 6 + (2,) * 6, new=(queries + 1,) * 6 + (2,) * 6, packed=True, head_dim=16)
    inputs = testing.make_inputs(case)
    testing.assert_close(attend(inputs)[0], testing.expected(case, inputs))


def test_with_64_bit_types_on():
    """What has no dtype named is then 64 bits wide, and would not fit into what has."""
    case = Case(lengths=(5, 60), new=(1, 9), packed=True)
    inputs = testing.make_inputs(case)
    with jax.enable_x64(True):
        out, lse = attend(inputs, scale=0.2)
        q_bar = jax.grad(lambda q: pallas_kernels.paged_attention(q, *inputs[1:]).sum())(inputs.q)
    assert out.dtype == lse.dtype == q_bar.dtype == jnp.float32
    testing.assert_close(out, testing.expected(case, inputs, scale=0.2))
