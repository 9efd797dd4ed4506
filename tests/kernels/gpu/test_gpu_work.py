"""How the work is spread over the chip: arithmetic on the work lists, and kernels that must fail on wrong ones."""

import functools
import heapq
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_mistakes import SOURCES, outcome_with, unless_on_a_gpu
from nightly import NIGHTLY, skip_by_day
from planting import Plant
from trials import DECODE, PREFILL

from pallas_kernels.common.masks import WindowMask
from pallas_kernels.gpu import chips, mixers, tuning, work_items as work

make_prefill_items = functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))(work.prefill_items)


def test_items_cover_every_token_once():
    lengths, new = np.array([300, 5, 0, 64, 1000], np.int32), np.array([100, 5, 0, 2, 33], np.int32)
    begin = np.array([7, 200, 0, 110, 300], np.int32)
    items, first_item, place, _ = make_prefill_items(lengths, new, begin, WindowMask(), 16, 14, 64, 2)
    lies, count = np.asarray(items)[:, 0, 5:].T
    tiles = [sorted(t for start, stop in chunks[:, 3:5] for t in range(start, stop)) for chunks in np.asarray(items)]
    assert tiles == [
        list(range(-(-stop // 64) if stop > start else 0)) for _, start, stop in np.asarray(items)[:, 0, :3]
    ]
    items = items[:, 0, :3]
    covered = [(row, p) for row, start, stop in np.asarray(items) for p in range(start, stop)]
    assert sorted(covered) == [(r, p) for r in range(5) for p in range(lengths[r] - new[r], lengths[r])]
    seen = np.asarray(items[:, 2])[: np.count_nonzero(items[:, 2] > items[:, 1])]
    assert (np.diff(seen) <= 0).all()  # the longest first
    at = np.asarray(place)[np.asarray(first_item)[0] + 50 // 16]  # token 50 of row 0
    assert items[at, 0] == 0 and lies[at] == 7 + 48
    assert (count == items[:, 2] - items[:, 1]).all()


PART_TILES = work.Cutting._field_defaults["part_tiles"]


def best_size(tiles, taken, wave, most, most_tiles, part_tiles=PART_TILES):
    """The size, of those that are tried, with which the last thread block ends first on paper, or of several the
    largest."""
    total, found = int(tiles.sum()), []
    most_wanted = work.most_wanted(len(tiles), wave)
    for wanted in (max(n * most_wanted // work.LINES, 1) for n in range(1, work.LINES + 1)):
        size = np.clip(-(-total // wanted), 1, most_tiles)
        count = np.clip(-(-tiles // size), 1, most)
        longest, num = max(-(-tiles // count)) + part_tiles, count[np.array(taken)].sum()
        share = -(-(total + num * part_tiles) // wave)
        found.append((min(-(-num // wave) * longest, share + longest), -size))
    return -min(found)[1]


def decode_items(
    lengths,
    new=None,
    taken=None,
    window_mask=None,
    wave=33,
    most_tiles=10**6,
    place=None,
    tile=64,
    deterministic=False,
    part_tiles=None,
):
    """The list that the kernel makes, one row after the other."""
    part_tiles = PART_TILES if part_tiles is None else part_tiles
    window_mask = window_mask or WindowMask()
    num_items, most = work.decode_capacity(len(lengths), wave, most_tiles)
    if deterministic:
        most = len(work.fixed_edges(most_tiles)) - 1
        num_items = len(lengths) * most
    new = np.minimum(lengths, 1) if new is None else new
    taken = [True] * len(lengths) if taken is None else taken
    place = 10 * np.arange(len(lengths)) if place is None else place
    starts = np.maximum(np.subtract(lengths, new) - (window_mask.window or 10**9) + 1, 0) // tile
    starts = np.maximum(starts - -(-window_mask.sink_tokens // tile), 0)
    tiles = [
        max(-(-length // tile) - start, 0) if its and n > 0 else 0
        for length, n, start, its in zip(lengths, new, starts, taken, strict=True)
    ]
    size = best_size(np.array(tiles), taken, wave, most, most_tiles, part_tiles)
    items, cut = [], []
    for row in np.flatnonzero(taken):
        share = max(-(-tiles[row] // max(min(-(-tiles[row] // size), most), 1)), 1)
        begins = work.fixed_edges(most_tiles) if deterministic else range(0, max(tiles[row], 1), share)
        edges = [begin for begin in begins if begin < max(tiles[row], 1)] + [tiles[row]]
        known = lengths[row], new[row], place[row], work.PART if len(edges) > 2 else work.WHOLE
        if len(edges) > 2:
            cut.append((len(items), len(items) + len(edges) - 1, row, place[row]))
        for begin, end in itertools.pairwise(edges):
            items.append((row, starts[row] + begin, starts[row] + end, *known))
    lines = np.zeros((num_items, 12), int)
    lines[: len(items), :7] = items if items else 0
    lines[: len(cut), 7:11] = cut if cut else 0
    lines[:, 11] = len(cut)
    return lines, min(len(lengths), num_items // 2) if most > 1 else 0


# Rows in up to three chunks, and up to five thread blocks: rows of nothing, of one tile and of many, longer than their
# tables, some among others that are not decoded. How many, what fills the chip once, what is seen, and are they packed?
LISTS = {
    "packed, window": (70, 9, WindowMask(100, None, 70), True),
    "one row": (1, 2, WindowMask(), False),
    "latent rows": (5, 9, WindowMask(), False),
}
if NIGHTLY:
    LISTS |= {
        "packed": (150, 33, WindowMask(), True),
        "window": (64, 1, WindowMask(100), False),
        "65 rows": (65, 9, WindowMask(), False),
        "padded": (3, 33, WindowMask(), False),
        "deterministic": (3, 33, WindowMask(), False),
        "deterministic, packed, window": (70, 9, WindowMask(1000, None, 70), True),
        "no row": (8, 9, WindowMask(), True),
    }


@pytest.mark.parametrize("name", LISTS)
def test_kernel_makes_this_list(name, interpret):
    num_rows, wave, window_mask, packed = LISTS[name]
    options = {"deterministic": name.startswith("deterministic"), "part_tiles": 6 if name == "latent rows" else 1}
    random, capacity = np.random.default_rng(num_rows), 6000
    lengths = random.choice(np.array([0, 1, 63, 64, 65, 300, 5000, 10**6], np.int32), num_rows)
    new = random.choice(np.array([0, 1, 1, 2 if name == "no row" else 1, 3], np.int32), num_rows)
    new *= name != "no row"
    if num_rows == 1:
        lengths, new = np.array([5000], np.int32), np.array([1], np.int32)
    place = random.integers(-2, 90, num_rows).astype(np.int32) if packed else 5 * np.arange(num_rows)
    items, num_items, most_cut = work.decode_items(
        jnp.asarray(lengths), jnp.asarray(new), jnp.asarray(place) if packed else 5,
        work.Cutting(capacity, window_mask, 64, wave, 100, **options), alone_of=60 if packed else None,
        interpret=interpret,
    )  # fmt: skip
    taken = (new == 1) & (place >= 0) & (place < 60) if packed else None
    expected = decode_items(np.clip(lengths, 0, capacity), new, taken, window_mask, wave, 100, place, **options)
    np.testing.assert_array_equal(items[:num_items], expected[0])
    assert most_cut == expected[1] >= expected[0][0, 11]


@pytest.mark.parametrize("wave", [1, 9, 33, 264])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("new", [1, 4])
def test_decode_items_are_even(new, window, wave):
    """One row 100 times as long as the rest is cut as finely as they are, and every tile seen is in one item."""
    lengths, taken = [32_000, 300, 0, 64, 300], [True, True, True, False, True]
    items, most_cut = decode_items(lengths, [new, new, 0, new, new], taken, WindowMask(window), wave)
    used = items[items[:, 6] != work.UNUSED]
    assert (items[len(used) :, 6] == work.UNUSED).all() and (items[len(used) :, :3] == 0).all()
    cut = []
    for row, length in enumerate(lengths):
        own = np.flatnonzero((items[:, 0] == row) & (items[:, 6] != work.UNUSED))
        first = 0 if window is None else max(length - new - window + 1, 0) // 64
        tiles = [t for start, stop in items[own, 1:3] for t in range(start, stop)]
        assert tiles == (list(range(first, -(-length // 64))) if taken[row] else [])
        assert (items[own, 3:6] == [length, new if length else 0, 10 * row]).all()
        assert len(own) == 0 or (np.diff(own) == 1).all()
        assert (items[own, 6] == (work.PART if len(own) > 1 else work.WHOLE)).all()
        assert len(own) == (1 if row == 2 else 0) or tiles  # one item for a row that has no token in the step
        if len(own) > 1:
            cut.append([own[0], own[-1] + 1, row, 10 * row])
    assert len(cut) <= most_cut and items[: len(cut), 7:11].tolist() == cut and (items[:, 11] == len(cut)).all()
    sizes = used[:, 2] - used[:, 1]
    fair = sizes.sum() / min(wave, work.MOST_ITEMS)
    assert sizes.max() <= np.ceil(1.1 * fair)  # 17 tiles for 15.5: of 16 there would be an item more than fill the chip
    assert len(items) <= 5 + 4 * wave


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_items_of_a_single_row_begin_at_once(length):
    """None waits for another to end, and none is much shorter than the rest."""
    (used,) = (items[items[:, 6] != work.UNUSED] for items, _ in [decode_items([length])])
    sizes = used[:, 2] - used[:, 1]
    assert 30 <= len(used) <= 33 and sizes.sum() == length // 64 and sizes.max() == -(-length // 64 // 33)


def test_short_tables_are_never_cut():
    items, most_cut = decode_items([256, 1, 200], most_tiles=4)
    assert most_cut == 0 and len(items) == 3 and (items[:, 6] == work.WHOLE).all()
    assert decode_items([320, 1, 200], most_tiles=5)[1] > 0


MULTIPROCESSORS = 132
# Lengths of the rows, and KV heads.
STEPS = {
    "one row of 32k": ([32_768], 8),
    "one row of 128k, one KV head": ([131_072], 1),
    "256 rows of 512": ([512] * 256, 8),
    "64 rows of 8k": ([8192] * 64, 8),
    "one row 100 times as long": ([32_000] + [320] * 15, 8),
    "one row 100 times as long, one KV head": ([32_000] + [320] * 15, 1),
    "some rows 100 times as long": ([32_000] * 4 + [320] * 60, 8),
    "all lengths": (list(range(100, 20_000, 300)), 8),
    "less work than places": ([512], 8),
}


def last_to_end(sizes, places=MULTIPROCESSORS):
    """When the last multiprocessor ends, if each takes the next thread block as soon as it is free."""
    ends = [0] * places
    for size in sizes:
        heapq.heappush(ends, heapq.heappop(ends) + size)
    return max(ends)


@pytest.mark.parametrize("name", STEPS)
def test_decode_fills_the_chip(name):
    """As many thread blocks as multiprocessors, or as tiles; none with much more than its share of the tiles."""
    lengths, num_kv_heads = STEPS[name]
    plan = tuning.decode_plan(128, 8)
    wave = -(-plan.num_blocks // num_kv_heads)
    items, _ = decode_items(lengths, wave=wave)
    sizes = items[:, 2] - items[:, 1]
    sizes = np.tile(sizes[sizes > 0], num_kv_heads)
    assert len(sizes) >= min(0.95 * MULTIPROCESSORS, sizes.sum())
    even = sizes.max() <= 1.2 * sizes.mean()
    assert even or last_to_end(sizes) <= 1.2 * sizes.sum() / MULTIPROCESSORS  # small ones fill what large ones leave


def make_batches():
    """Tiles of rows: all alike, of any length, and one much longer than the rest."""
    random = np.random.default_rng(0)
    for longest, count in itertools.product((6, 40, 500), (1, 20, 50, 250)):
        few = np.full(count, -(-longest // 20))
        few[count // 2] = longest
        yield from (np.full(count, longest), random.integers(1, longest + 1, count), few)


@pytest.mark.parametrize(("wave", "part_tiles"), [(33, 1), (264, 1), (66, 6), (132, 6)])
def test_size_of_items_is_near_the_best(wave, part_tiles):
    """Of all sizes, if multiprocessors take what they make of many batches."""

    def end(tiles, size):
        cut = [[min(share, n - i) for i in range(0, n, share)] for n in tiles for share in [-(-n // -(-n // size))]]
        return last_to_end([size + part_tiles for sizes in cut for size in sizes], wave)

    lost, plain = [], []
    for tiles in make_batches():
        total, most = tiles.sum(), work.decode_capacity(len(tiles), wave, 10**6)[1]
        sizes = {-(-int(total) // wanted) for wanted in range(1, 4 * wave, wave // 16)}
        best = min(end(tiles, size) for size in sizes if max(tiles) <= most * size)
        lost.append(end(tiles, best_size(tiles, [True] * len(tiles), wave, most, 10**6, part_tiles)) / best)
        plain.append(end(tiles, max(-(-int(total) // (2 * wave)), 1)) / best)
    assert np.mean(lost) < 1.03 and max(lost) < 1.3
    assert np.mean(plain) > 1.05  # negative control: as many as fill it twice, if rows divided evenly


@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("itemsize", "group_size"), [(2, None), (1, None), (0.5, 32), (0.5, 64)])
def test_decode_keeps_enough_in_flight(head_dim, columns, itemsize, group_size):
    """At 4.8 TB/s and a latency of a microsecond a multiprocessor needs 36 KB on their way, besides what is in use."""
    plan = tuning.decode_plan(head_dim, columns, itemsize, group_size)
    slot = 2 * plan.tile.tokens * head_dim * itemsize  # K and V
    assert plan.num_blocks // MULTIPROCESSORS * (plan.tile.stages - 1) * slot >= 64 * 1024


@pytest.mark.parametrize(("head_dim", "block_size", "ahead"), [(64, 16, 0), (128, 16, 1), (128, 8, 0), (256, 16, 0)])
def test_prefill_goes_ahead_where_a_chip_was_faster_so(head_dim, block_size, ahead):
    assert tuning.prefill_plan(head_dim, block_size).ahead == ahead


def put_at_hand(monkeypatch, kind, count, capability="9.0"):
    device = types.SimpleNamespace(device_kind=kind, core_count=count, compute_capability=capability)
    monkeypatch.setattr(chips.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chips.jax, "devices", lambda: [device])


def test_plans_go_by_the_multiprocessors_of_the_chip_put_at_hand(monkeypatch):
    """An H20 has 78; what was tuned for an H200 of the same name and another count is not for it."""
    put_at_hand(monkeypatch, "NVIDIA H20", 78)
    tuned = tuning.DecodePlan(tuning.Tile(tokens=128, stages=2), num_blocks=78)
    monkeypatch.setitem(tuning.TUNED_DECODE, (chips.GpuChip("NVIDIA H20", 132), 128, 8), tuned)
    assert tuning.decode_plan(128, 8).num_blocks == 2 * 78 and tuning.merge_blocks() == 4 * 78
    monkeypatch.setitem(tuning.TUNED_DECODE, (chips.GpuChip("NVIDIA H20", 78), 128, 8), tuned)
    assert tuning.decode_plan(128, 8) is tuned


DESCRIBED = {
    "NVIDIA H100 80GB HBM3": "9.0", "NVIDIA B200": "10.0", "NVIDIA GB300": "10.3", "NVIDIA GeForce RTX 5090": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "12.0", "NVIDIA GB10": "12.1", "NVIDIA GH200 480GB": "9.0",
    "NVIDIA A100-SXM4-80GB": None, "some GPU": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_mesh_says_what_chip_a_program_is_for(name, monkeypatch):
    """A description of a chip has no capability: its name does. Of the chip at hand the device says it."""
    device = types.SimpleNamespace(device_kind=name, num_cores=100, platform="gpu")
    monkeypatch.setattr(chips.jax.sharding, "get_abstract_mesh", lambda: types.SimpleNamespace(abstract_device=device))
    assert chips.find_chip() == chips.GpuChip(name, 100, DESCRIBED[name])
    put_at_hand(monkeypatch, name, 99, "13.0")
    assert chips.find_chip() == chips.GpuChip(name, 99, "13.0")


def test_plans_of_blackwell(monkeypatch):
    """Weights stay in registers beside outputs that leave room. With little shared memory tiles are smaller, so that
    one is copied while another is multiplied, and rows of many tokens are no chunks of states."""
    arrays = {name: jnp.zeros((64, 2, 128), jnp.bfloat16) for name in ("q", "k", "v")}
    arrays |= dict.fromkeys(("g", "beta"), jnp.zeros((64, 2)))
    of_chunks = arrays, jnp.zeros((3, 2, 128, 128)), None, 64
    forms = {}
    for capability in ("9.0", "10.0", "12.0"):
        chip = chips.GpuChip("some GPU", 100, capability)
        monkeypatch.setattr(chips, "find_chip", lambda chip=chip: chip)
        prefill = [tuning.prefill_plan(head_dim, 16) for head_dim in (128, 256)]
        decode = tuning.decode_plan(128, 8, 1).tile
        forms[capability] = (
            [(plan.weights_in_registers, plan.ahead, plan.tile.tokens) for plan in prefill],
            [tuning.divide(head_dim).halves for head_dim in (128, 256, 512)],
            (decode.tokens, decode.stages > 1),
            mixers.can_chunk(*of_chunks),
        )
    assert forms == {
        "9.0": ([(False, True, 128), (False, False, 64)], [2, 2, 1], (128, True), True),
        "10.0": ([(True, False, 128), (False, False, 64)], [2, 2, 1], (128, True), True),
        "12.0": ([(True, False, 64), (True, False, 64)], [2, 1, 1], (64, True), False),
    }


def test_an_h200_where_there_is_no_gpu(monkeypatch):
    assert chips.find_chip() == chips.H200
    device = types.SimpleNamespace(device_kind="TPU v5e", num_cores=1, platform="tpu")
    monkeypatch.setattr(chips.jax.sharding, "get_abstract_mesh", lambda: types.SimpleNamespace(abstract_device=device))
    assert chips.find_chip() == chips.H200


# By name: the trial, how it may end, and what is planted.
MISTAKES = {
    "work: a span cut off at its item's end": (
        PREFILL["spans"],
        {"wrong"},
        Plant(
            "prefill_items",
            "(tiles.start, tiles.stop, tiles.tokens, tiles[3:])",
            "(tiles.start, stop, tiles.tokens, tiles[3:])",
        ),
    ),
    "work: token_masks in another order than items": (
        PREFILL["spans"],
        {"wrong"},
        Plant("prefill_items", "token_masks[order]", "token_masks"),
    ),
    "work: chunks that overlap": (
        PREFILL["chunks"],
        {"wrong"},
        Plant("prefill_items", "chunk + 1", "chunk + 2"),
    ),
    "work: lengths beyond the table": (
        DECODE["beyond the table"],
        {"wrong", "buffer has shape", "barrier"},  # a warp that fails leaves others waiting: either may be said first
        Plant("decode_items", "jnp.clip(length, 0, capacity)", "length"),
    ),
    "work: the gap walked": (
        DECODE["first tokens"],
        {"wrong"},
        Plant("decode_items", "first = walk_from(first, window_mask, tile_tokens)", "first *= 0"),
    ),
    "work: rows that begin with their chunk": (
        DECODE["more rows than a chunk"],
        {"wrong", "buffer has shape", "barrier"},
        Plant("decode_items", "b + along(x, 0)", "b"),
    ),
    "work: a row's items where the next one's are": (
        DECODE["lengths"],
        {"wrong", "buffer has shape", "barrier"},
        Plant("decode_items", "line < nth + j * ROWS_AT_ONCE", "line <= nth + j * ROWS_AT_ONCE"),
    ),
    "work: the rows in parts listed in one place": (
        DECODE["window, cut"],
        {"wrong", "buffer has shape", "barrier"},
        Plant("decode_items", "wide(nth_cut, 1)", "wide(0 * nth_cut, 1)"),
    ),
    "work: the last tile left out": (
        DECODE["ring"],
        {"wrong"},
        Plant("decode_items", "length + (tile_tokens - 1)", "length"),
    ),
    "work: the first token's window not heeded": (
        DECODE["few tokens, window"],
        {"wrong"},
        Plant("decode_items", "length - count", "length - 1"),
    ),
}


@unless_on_a_gpu
@skip_by_day("those of decode, in test_gpu_decode.py")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, monkeypatch):
    trial, expected, *plants = MISTAKES[name]
    assert outcome_with(monkeypatch, trial, *plants) in expected


def test_every_mistake_can_be_made():
    SOURCES.check_plants(MISTAKES)
