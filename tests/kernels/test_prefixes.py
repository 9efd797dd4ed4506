"""Rows that begin with the same blocks read them once, and get what they get by themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiles
from nightly import NIGHTLY
from sharing import share

import pallas_kernels
from pallas_kernels import testing
from pallas_kernels.common.shared_prefix import TOGETHER, WORTH_ROWS, Shared
from pallas_kernels.testing import Case

# Who shares 264 first tokens, who 260; the others: empty, out of the step, alike for a few tokens, alone.
A, B, EMPTY, IDLE, BRIEF, ALONE = (0, 2, 3, 5, 7, 9, 11, 13, 15), (1, 4, 6, 8, 10, 12, 14, 20), 16, 17, 18, 19
ROWS, SHARED_A, SHARED_B = 21, 264, 260
LENGTHS = np.array([
    # Of some rows what they share is all that lies in full blocks, or all but the step's tokens.
    {EMPTY: 0, IDLE: 280, BRIEF: 190, ALONE: 77, 0: SHARED_A + 1, 2: SHARED_A + 3, 4: SHARED_B + 1}.get(
        row, (SHARED_A if row in A else SHARED_B) + 2 + row
    ) for row in range(ROWS)
])  # fmt: skip
DECODE = np.array([0 if row in (EMPTY, IDLE) else 1 for row in range(ROWS)])
# More than one token of some rows; one row of A has so many that it reads by itself.
MIXED = np.where(DECODE == 0, 0, np.array([{0: 1, 2: 3, 4: 1, 5: 4, 15: TOGETHER + 1}.get(r, 1) for r in range(ROWS)]))
SIZES = dict(head_dim=8, block_size=4)
WORTH = 512  # tokens to be spared: few, so that few are needed


def shared_inputs(new, **fields):
    """A case in which rows share blocks; those that they gave up for it are NaN."""
    lengths = LENGTHS + np.where(np.isin(np.arange(ROWS), (0, 2, 4)), 0, np.maximum(new - 1, 0))
    case = Case(**SIZES | dict(lengths=tuple(lengths.tolist()), new=tuple(new.tolist()), **fields))
    groups = {(*A, IDLE): SHARED_A, B: SHARED_B, (A[0], BRIEF): 12}
    blocks = {rows: tokens // case.block_size for rows, tokens in groups.items()}
    return case, share(case, testing.make_inputs(case), blocks)[0]


def find(inputs, block_size, **options):
    _, _, tables, lengths, new = inputs
    return pallas_kernels.find_shared(tables, lengths - new, new, block_size=block_size, worth=WORTH, **options)


def check(inputs, block_size, exact=None, **options):
    """Against the reference. What a row shares is NaN by its own table: only the first one's is read."""
    shared = Shared.unpack(find(inputs, block_size))
    assert (shared.tokens > 0).sum() >= len(B) + len(A) - 1
    tables, free = np.array(inputs.tables), inputs.kv.shape[0] - 1
    while free in tables:
        free -= 1
    for row in range(ROWS):
        if shared.leader[row] != row:
            tables[row, : shared.tokens[row] // block_size] = free
    spoilt, static = inputs._replace(tables=jnp.asarray(tables)), {}
    for name in [name for name, x in options.items() if not isinstance(x, jax.Array)]:
        static[name] = options.pop(name)
    attend = jax.jit(functools.partial(pallas_kernels.paged_attention, implementation="xla", return_lse=True, **static))
    out, lse = attend(*spoilt, shared=jnp.stack(shared), **options)
    options, static = ({k: x for k, x in o.items() if k not in ("kv_scale", "kind")} for o in (options, static))
    reference = jax.jit(functools.partial(pallas_kernels.reference.paged_attention, return_lse=True, **static))
    expected, expected_lse = reference(*(inputs if exact is None else exact), **options)
    testing.assert_close(out, expected)
    testing.assert_close(lse, expected_lse)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_who_reads_what_with_whom():
    _, inputs = shared_inputs(DECODE)
    shared = Shared.unpack(find(inputs, 4))
    tokens = {**dict.fromkeys(A, SHARED_A), **dict.fromkeys(B, SHARED_B)}
    assert shared.tokens.tolist() == [tokens.get(row, 0) for row in range(ROWS)]
    leaders = {**dict.fromkeys(A, A[0]), **dict.fromkeys(B, B[0])}
    assert shared.leader.tolist() == [leaders.get(row, row) for row in range(ROWS)]
    assert shared.queries.tolist() == [{A[0]: len(A), B[0]: len(B)}.get(row, 0) for row in range(ROWS)]
    assert [int(shared.place[row]) for row in (*A, *B)] == list(range(len(A) + len(B)))
    assert shared.place[B[0]] == len(A)


def test_the_decision_does_not_depend_on_numbers_of_blocks():
    _, inputs = shared_inputs(MIXED)
    order = np.random.default_rng(5).permutation(inputs.kv.shape[0] - 1).astype(np.int32) + 1
    moved = jnp.append(0, jnp.asarray(order))[inputs.tables]
    np.testing.assert_array_equal(find(inputs, 4), find(inputs._replace(tables=moved), 4))
    shared = Shared.unpack(find(inputs, 4))
    assert not shared.tokens[15] and shared.queries[0] == MIXED[list(A[:-1])].sum() == len(A) - 1 + 2 + 3
    assert shared.place[5] - shared.place[2] == 1 + MIXED[3] + MIXED[2] - 1


def test_a_row_goes_where_most_is_saved():
    """A prompt that all begin with, and samples of a longer one; rows that only look alike in some column."""
    tables = np.zeros((24, 40), np.int32)
    tables[:, :40] = 1000 + np.arange(24 * 40).reshape(24, 40)
    tables[:, :5] = np.arange(1, 6)
    tables[8:18, :30] = range(1, 31)
    tables[20, 7:] = tables[8, 7:]  # what stands before differs
    ones = jnp.ones(24, jnp.int32)
    shared = Shared.unpack(
        pallas_kernels.find_shared(jnp.asarray(tables), 640 * ones, ones, block_size=16, worth=WORTH)
    )
    assert shared.tokens[8:18].tolist() == [480] * 10 and set(shared.leader[8:18].tolist()) == {8}
    others = [row for row in range(24) if not 8 <= row < 18 and row != 20]
    assert {int(shared.tokens[row]) for row in others} == {80} and {int(shared.leader[row]) for row in others} == {0}
    assert shared.tokens[20] in (0, 80)


@pytest.mark.parametrize("rows, tokens, pays", [
    (WORTH_ROWS + 1, WORTH, True), (WORTH_ROWS + 1, WORTH - 16, False), (WORTH_ROWS, 4096, False),
    (2 * WORTH_ROWS, 4096, True),
])  # fmt: skip
def test_it_must_pay(rows, tokens, pays):
    """Of 12 rows, those that take part."""
    tables = jnp.broadcast_to(jnp.arange(1, 258, dtype=jnp.int32), (12, 257))
    new, before = (jnp.arange(12) < rows).astype(jnp.int32), jnp.full(12, tokens, jnp.int32)
    find = functools.partial(pallas_kernels.find_shared, tables, before, new, block_size=16, worth=WORTH)
    assert find()[0].tolist() == [tokens * pays] * rows + [0] * (12 - rows)
    unseen = jnp.full(12, tokens // 16 - 1, jnp.int32)
    assert not find(first=unseen)[0].any()  # a window sees one block of it


VARIANTS = {
    "a tree, slopes, a window, packed": (
        dict(new=MIXED, packed=True, padding=3), dict(tree=True, window=100, alibi=jnp.linspace(0.01, 0.1, 4)),
    ),
}  # fmt: skip
if NIGHTLY:
    VARIANTS |= {
        "decode, blocks of 1, groups of 7, soft cap and sinks": (
            dict(new=DECODE, num_heads=14, block_size=1), dict(soft_cap=2.0, sinks=normal(1, 14)),
        ),
        "decode, groups of 5 heads": (dict(new=DECODE, num_heads=10), {}),
        "one head for 128, packed": (dict(new=DECODE, num_heads=128, num_kv_heads=1, packed=True, padding=2), {}),
        "a window into what is shared": (dict(new=MIXED), dict(window=60)),
        "a window behind what is shared": (dict(new=DECODE), dict(window=2)),
        "chunks, slopes": (dict(new=MIXED, packed=True, padding=3), dict(chunk=150, alibi=jnp.linspace(0.01, 0.1, 4))),
        "spans": (dict(new=MIXED, num_heads=2), dict(spans=True, mask=True)),
        "latent rows": (dict(new=DECODE, num_kv_heads=1, rank=6, scale=0.3), dict(rank=6, scale=0.3)),
    }  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_get_what_they_get_by_themselves(name):
    fields, options = VARIANTS[name]
    case, inputs = shared_inputs(**fields)
    draw, axes = np.random.default_rng(3), inputs.q.shape[:-2]
    if "spans" in options:
        context = inputs.tables.shape[1] * case.block_size
        options = options | {"spans": jnp.asarray(draw.integers(0, 3, axes), jnp.int32)}
        options["mask"] = jnp.asarray(draw.random((*axes, context)) < 0.8)
    if "tree" in options:
        starts = np.repeat(np.cumsum(MIXED) - MIXED, MIXED)
        parents = (np.arange(len(starts)) - starts) // 2 - 1  # each token has two children
        options = options | {"tree": jnp.asarray(np.pad(parents, (0, axes[0] - len(parents))), jnp.int32)}
    check(inputs, case.block_size, **options)


def test_one_row_is_in_no_group_and_all_groups_that_there_can_be_are_there():
    half = WORTH_ROWS + 1
    rows = 2 * half + 1
    inputs = testing.make_inputs(Case(lengths=(600,) * rows, new=(1,) * rows, **SIZES))
    tables = np.array(inputs.tables)
    for first in (0, half):
        tables[first : first + half, :140] = tables[first, :140]
    inputs = inputs._replace(tables=jnp.asarray(tables))
    shared = find(inputs, 4)
    assert (Shared.unpack(shared).tokens > 0).tolist() == [True] * (rows - 1) + [False]
    attend = jax.jit(functools.partial(pallas_kernels.paged_attention, implementation="xla"))
    testing.assert_close(attend(*inputs, shared=shared), attend(*inputs))


@pytest.mark.parametrize("kind", ["int8", "int4"] if NIGHTLY else ["int8"])
def test_quantised_rows_in_blocks_of_1_and_groups_of_7_with_soft_cap_and_sinks(kind):
    case, inputs = shared_inputs(DECODE, num_heads=14, block_size=1)
    stored, scale, exact = testing.quantise(case, inputs, kind)
    check(stored, 1, exact, kind=kind, kv_scale=scale, soft_cap=2.0, sinks=normal(1, 14))


@pytest.mark.skipif(not NIGHTLY, reason="by day only that they are those of rows by themselves, see the loops below")
def test_gradients_are_those_of_rows_by_themselves():
    _, inputs = shared_inputs(DECODE)
    q, kv, *rest = inputs
    weights, shared = normal(4, *q.shape), find(inputs, 4)

    @jax.jit
    def pull(q, kv):
        attend = functools.partial(pallas_kernels.paged_attention, return_lse=True)
        _, pull = jax.vjp(lambda q, kv: attend(q, kv, *rest, shared=shared), q, kv)
        _, expected = jax.vjp(lambda q, kv: attend(q, kv, *rest, implementation="reference"), q, kv)
        return [p((weights, weights[..., 0])) for p in (pull, expected)]

    for a, b in zip(*pull(q, kv), strict=True):
        testing.assert_close(a, b)


def test_who_reads_alone_does_not_take_part():
    """`deterministic`, named blocks, and kernels: the program is the same."""
    inputs = in_tiles(shared_inputs(DECODE)[1])
    shared, named = find(inputs, 4), jnp.zeros((ROWS, 1), jnp.int32)
    paged_attention, loops = pallas_kernels.paged_attention, []
    for options in ({}, {"deterministic": True}, {"blocks": named}, {"implementation": "reference"}):
        attend = jax.jit(functools.partial(paged_attention, **options))
        loops.append([attend.lower(*inputs, shared=x).as_text().count("stablehlo.while") for x in (shared, None)])
    pull = jax.jit(lambda q, out, shared: jax.vjp(lambda q: paged_attention(q, *inputs[1:], shared=shared), q)[1](out))
    gradients = [pull.lower(inputs.q, inputs.q, x).as_text().count("stablehlo.while") for x in (shared, None)]
    (together, alone), *others = loops
    assert gradients[0] == gradients[1] + 1  # forwards
    assert together == alone + 1 and all(a == b for a, b in others)


def test_what_is_no_plan_of_groups_is_refused():
    _, inputs = shared_inputs(DECODE)
    with pytest.raises(ValueError, match=r"shared must be i32\[4, 21\], as find_shared returns it, not float32\[2\]."):
        pallas_kernels.paged_attention(*inputs, shared=jnp.zeros(2))
