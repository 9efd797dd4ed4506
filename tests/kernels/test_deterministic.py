"""`deterministic=True`: a row's bits are its own, whoever else is in the batch and wherever its blocks lie."""

import functools
import random

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from nightly import NIGHTLY

import pallas_kernels
from pallas_kernels import gpu, testing, tpu
from pallas_kernels.common.masks import ALL, WindowMask
from pallas_kernels.gpu import decode as decode_gpu, tuning, work_items as work
from pallas_kernels.gpu.tiles import Tile
from pallas_kernels.testing import Case
from pallas_kernels.tpu import decode
from pallas_kernels.tpu.pages import Pages
from pallas_kernels.tpu.step import tile_tokens
from pallas_kernels.xla import attention

pytestmark = pytest.mark.timeout(1500 if NIGHTLY else 120, method="thread")
LENGTHS = (1, 5, 63, 64, 65, 150, 300, 301)
STEPS = {"decode": (1,) * 8, "mixed": (1, 5, 9, 1, 2, 7, 33, 40)}
SIZES = {
    "xla": dict(num_heads=10, num_kv_heads=2, head_dim=16, block_size=5),
    "tpu": dict(num_heads=10, num_kv_heads=2, head_dim=128, block_size=16),
    "gpu": dict(num_heads=5, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16"),
}
INTERPRETERS = {
    "tpu": (functools.partial(testing.run, tpu.paged_attention), pltpu.InterpretParams()),
    "gpu": (functools.partial(testing.run, gpu.paged_attention), plgpu.InterpretGPUParams()),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Rows of a few hundred tokens are cut, and several of their parts are one step's work; the chip is small."""
    monkeypatch.setattr(decode, "SEGMENTS", 2)
    for name, value in {"FIXED_TILES": 2, "FEW_TILES": 1}.items():
        monkeypatch.setattr(work, name, value)
    plan = tuning.DecodePlan(Tile(tokens=64, stages=2), num_blocks=4)
    monkeypatch.setattr(tuning, "decode_plan", lambda *_: plan)


@pytest.fixture(autouse=True)
def products_by_line(monkeypatch):
    """The GPU's interpreter multiplies by `np.matmul`, where a line's last bits go by its place among the others, which
    they do on no chip."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype)))


@functools.cache
def rows_of(backend, step):
    """Each row's table, length, count and queries; and the pool. In NumPy: what is done to them compiles nothing."""
    return jax.tree.map(np.asarray, testing.make_inputs(Case(lengths=LENGTHS, new=STEPS[step], **SIZES[backend])))


class Attend:
    """Of some rows, computed together, their bits."""

    def __init__(self, backend, step, deterministic=True, **variant):
        self.inputs, self.counts, self.is_xla = rows_of(backend, step), STEPS[step], backend == "xla"
        options = dict(return_lse=True, deterministic=deterministic, **variant)
        if backend == "xla":
            self.run = jax.jit(functools.partial(pallas_kernels.paged_attention, implementation="xla", **options))
        else:
            function, mode = INTERPRETERS[backend]
            careless = {"xla_backend_optimization_level": 0}
            self.run = jax.jit(functools.partial(function, interpret=mode, **options), compiler_options=careless)

    def __call__(self, rows, columns, tokens, seed):
        """With their blocks in other places, and so many columns of the tables and token places."""
        inputs, rows = self.inputs, list(rows)
        order = np.random.default_rng(seed).permutation(inputs.kv.shape[0])
        tables = np.argsort(order).astype(np.int32)[inputs.tables[rows]][:, :columns]
        tables = np.pad(tables, ((0, 0), (0, columns - tables.shape[1])))
        q = np.pad(inputs.q, ((0, 0), (0, max(0, tokens - inputs.q.shape[1])), (0, 0), (0, 0)))[rows][:, :tokens]
        out, lse = map(np.asarray, self.run(q, inputs.kv[order], tables, inputs.lengths[rows], inputs.new[rows]))
        return [(out[i, : self.counts[row]], lse[i, : self.counts[row]]) for i, row in enumerate(rows)]

    def alone(self, row):
        """In kernels one token alone is a decode step, whatever it is beside others, and little rows have little
        tables; in XLA all rows have one program."""
        alike = self.is_xla
        columns = 1 if LENGTHS[row] <= 5 and not alike else -(-304 // self.inputs.kv.shape[3])
        return self([row], columns, 1 if self.counts[row] == 1 and not alike else max(self.counts), 0)[0]


def differing(backend, step, batches, deterministic=True, wider=(0, 29), size=8, **variant):
    """How many rows of random batches have other bits than alone."""
    attend, draw, wrong = Attend(backend, step, deterministic, **variant), random.Random(step), 0
    alone = {row: attend.alone(row) for row in range(8)}
    tokens, columns = max(STEPS[step]), -(-304 // SIZES[backend]["block_size"])
    for seed in range(batches):
        batch = tuple(draw.sample(range(8), size) if seed % 2 else draw.choices(range(8), k=size))
        more, places = draw.choice(wider), draw.choice((tokens, tokens, tokens + (3 if tokens > 1 else 0)))
        for row, found in zip(batch, attend(batch, columns + more, places, seed), strict=True):
            wrong += not all(np.array_equal(a, b) for a, b in zip(found, alone[row], strict=True))
    return wrong


@pytest.mark.parametrize("step", STEPS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(step):
    assert differing("xla", step, 200 if NIGHTLY else 8) == 0


@pytest.mark.skipif(not NIGHTLY, reason="of each backend, on interpreters")
@pytest.mark.parametrize("variant", [{"window": 70}, {"chunk": 100}, {"window": 70, "sink_tokens": 20}], ids=str)
@pytest.mark.parametrize("backend", SIZES)
def test_nor_do_they_where_less_is_seen(backend, variant):
    assert differing(backend, "decode", 4, size=4, **variant) == 0


def test_nor_does_one_tokens_on_the_places_beside_it():
    """Alone in a step of one place, padded, and among packed tokens of others."""
    attend, columns = Attend("xla", "decode"), -(-304 // 5)
    padded, inputs = attend(range(8), columns, 4, 0), attend.inputs
    others = np.concatenate([np.zeros_like(inputs.q[:, 0]), inputs.q[:, 0]])  # of no row
    packed = attend.run(others, inputs.kv, inputs.tables, inputs.lengths, inputs.new, offsets=np.arange(8, 16))
    for row in (0, 3, 7):
        for alone, beside, among in zip(attend([row], columns, 1, 1)[0], padded[row], packed, strict=True):
            np.testing.assert_array_equal(alone, beside)
            np.testing.assert_array_equal(alone[0], among[8 + row])


@pytest.mark.skipif(not NIGHTLY, reason="two hundred batches of each backend, on interpreters")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_nor_do_they_in_kernels(backend, step):
    assert differing(backend, step, 100, size=4) == 0


def test_nor_do_they_in_a_tpus_decode():
    """A short row in a table that has room for no segment, and beside a longer one in a wide table."""
    attend = Attend("tpu", "decode")
    for alone, beside in zip(attend.alone(1), attend([5, 1], 48, 1, 0)[1], strict=True):
        np.testing.assert_array_equal(alone, beside)


def test_a_rows_items_do_not_depend_on_its_neighbours():
    """The work of a GPU's decode: the same parts of a row, in order, alone and beside others, in any table."""
    lengths = np.array([40_000, 1, 700, 128 * 64], np.int32)

    @functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
    def items_of(lengths, capacity):
        return work.decode_items(
            lengths, jnp.ones_like(lengths), 1,
            work.Cutting(capacity, WindowMask(), 64, 33, capacity // 64, deterministic=True), alone_of=None,
            interpret=plgpu.InterpretGPUParams(),
        )[0]  # fmt: skip

    def parts(rows, capacity):
        items = np.asarray(items_of(lengths[rows], capacity))
        used = items[:, 6] != work.UNUSED
        return [items[used & (items[:, 0] == i), 1:3].tolist() for i in range(len(rows))]

    together = parts([3, 0, 2, 1], 131_072)
    assert together[1:2] == parts([0], 40_000) and together[2:3] == parts([2], 704)
    for row, found in zip((3, 0, 2, 1), together, strict=True):
        begins, ends = zip(*found, strict=True)
        assert begins == (0, *ends[:-1]) and ends[-1] == -(-lengths[row] // 64)
    assert len(work.fixed_edges(131_072 // 64)) < 2 * len(work.fixed_edges(40_000 // 64))


@pytest.mark.skipif(not NIGHTLY, reason="kernels on the interpreter")
@pytest.mark.parametrize("backend", SIZES)
def test_a_prompt_may_come_in_pieces(backend):
    """Of two tokens or more: the 40 last of a row at once, or 2, 17 and 21 of them."""
    attend = Attend(backend, "mixed")
    whole = attend([7], -(-304 // SIZES[backend]["block_size"]), 40, 0)[0]
    inputs, done = attend.inputs, 0
    for count in (2, 17, 21):
        q = np.zeros_like(inputs.q)
        q[7, :count] = inputs.q[7, done : done + count]
        done += count
        lengths, new = inputs.lengths.copy(), inputs.new.copy()
        lengths[7], new[7] = 301 - 40 + done, count
        attend.inputs, attend.counts = inputs._replace(q=q, lengths=lengths, new=new), {7: count}
        found = attend([7], -(-304 // SIZES[backend]["block_size"]), 40, 1)[0]
        for a, b in zip(found, whole, strict=True):
            np.testing.assert_array_equal(a, b[done - count : done])


def test_no_kernels_tiles_go_by_who_else_is_there(monkeypatch):
    """Nor by how much the tables have room for: what is summed at once is the same in a step of 2 tokens and of 512."""
    shape = jax.ShapeDtypeStruct
    kv, tables = shape((99, 2, 2, 16, 128), jnp.bfloat16), [shape((2, n), jnp.int32) for n in (1, 40)]
    sizes = {tile_tokens(n, 8, kv, t, jnp.bfloat16, True) for n, t in zip((2, 512), tables, strict=True)}
    steps = {Pages.plan(kv, t, ALL, 1024, True).step_tokens for t in tables}
    assert len(sizes) == len(steps) == 1
    assert len({tile_tokens(n, 8, kv, tables[1], jnp.bfloat16) for n in (2, 512)}) == 2

    def by_what_there_is(*_):
        raise AssertionError("how many tiles there are to do")

    monkeypatch.setattr(tuning, "prefill_chunks", by_what_there_is)
    merges = []
    monkeypatch.setattr(
        decode_gpu, "merge", lambda *x, **y: merges.append((y["deterministic"], y["new_tokens"])) or x[4:6]
    )
    given = [shape((2, 16, 8, 128), jnp.bfloat16), kv, tables[1], *[shape((2,), jnp.int32)] * 2]
    for tokens in (1, 2, 16):
        given[0] = shape((2, tokens, 8, 128), jnp.bfloat16)
        jax.eval_shape(functools.partial(testing.run, gpu.paged_attention, deterministic=True), *given)
    assert merges == [(True, 1)] * 3
    with pytest.raises(AssertionError, match="how many tiles there are"):
        given[0] = shape((2, 16, 8, 128), jnp.bfloat16)
        jax.eval_shape(functools.partial(testing.run, gpu.paged_attention), *given)


def test_spans_are_not_for_kernels():
    """Whether they can depends on the spans of all rows."""
    shape = jax.ShapeDtypeStruct
    q, kv = shape((2, 8, 8, 128), jnp.bfloat16), shape((9, 2, 2, 16, 128), jnp.bfloat16)
    given = dict(q=q, kv=kv, tables=shape((2, 4), jnp.int32), spans=shape((2, 8), jnp.int32))
    for platform in ("tpu", "cuda"):
        assert pallas_kernels.explain(**given, platform=platform).implementation != "xla"
        choice = pallas_kernels.explain(**given, platform=platform, deterministic=True)
        assert choice == ("xla", choice.reason) and "those of all rows" in choice.reason
        del given["spans"]
        assert pallas_kernels.explain(**given, platform=platform, deterministic=True).implementation != "xla"
        given["spans"] = shape((2, 8), jnp.int32)


def test_it_is_attention():
    attend, inputs = Attend("xla", "mixed"), rows_of("xla", "mixed")
    out, lse = attend.run(*inputs)
    expected, expected_lse = Attend("xla", "mixed", False).run(*inputs)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse)


def merge_backwards(running, at, items, is_token, merge=attention.merge_in_order):
    """Merges those of one step of the loop backwards: what is in one step goes by the batch."""
    return merge(running, *jax.tree.map(lambda x: x[::-1], (at, items, is_token)))


def edges_of_the_table(most_tiles):
    """Four items to a row, however long its table."""
    size = max(1, -(-most_tiles // 4))
    return tuple(range(0, most_tiles + size, size))


# What makes bits depend on others, and must be seen: (backend, step, the module, a name in it, what it is instead).
CONTROLS = {
    "merged as they come": ("xla", "decode", attention, "merge_in_order", merge_backwards),
    "items of the table": ("gpu", "decode", work, "fixed_edges", edges_of_the_table),
}


@pytest.mark.skipif(not NIGHTLY, reason="it says that the others can fail")
@pytest.mark.parametrize("backend, step", [("xla", "mixed"), ("tpu", "decode"), ("gpu", "decode")])
def test_it_is_not_so_by_itself(backend, step):
    """The negative control, in XLA over tables that are not read at once."""
    assert differing(backend, step, 3, False, wider=(0, 1939) if backend == "xla" else (29,)) > 0


@pytest.mark.skipif(not NIGHTLY, reason="it says that the others can fail")
@pytest.mark.parametrize("name", CONTROLS)
def test_what_follows_the_batch_is_seen(name, monkeypatch):
    backend, step, module, what, instead = CONTROLS[name]
    monkeypatch.setattr(module, what, instead)
    jax.clear_caches()  # what the backend is made of has been traced
    try:
        assert differing(backend, step, 3) > 0
    finally:
        jax.clear_caches()
