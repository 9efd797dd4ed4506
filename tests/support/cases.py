"""The cases that every backend must pass: one list, drawn from the shapes that other projects test or fail on.

The full product of the dimensions below has some 200,000 members. `cover` picks the few that together have as many
pairs of values as they can, always the same ones.
"""

import itertools
import random

import jax.numpy as jnp
import numpy as np
from nightly import NIGHTLY

from pallas_kernels.common.platforms import is_for_gpu
from pallas_kernels.testing import Case, Inputs
from pallas_kernels.xla import tile_sizes

DIMENSIONS = {
    "block_size": (1, 5, 8, 16, 32, 64, 128),
    "num_kv_heads": (1, 2, 4, 8),
    "group": (1, 2, 4, 5, 7, 8, 16, 20),
    "head_dim": (16, 64, 80, 96, 128, 256),
    "dtype": ("float32", "bfloat16", "float16"),
    "step": ("decode", "long decode", "mixed", "ragged", "chunk"),
    "packed": (False, True),
    "window": (None, 64),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
    "mask": (False, True),
}


def rows(step: str, block_size: int) -> list[tuple[int, int]]:
    """(new, length) of every row of a kind of step."""
    around = (0, 1, block_size - 1, block_size, block_size + 1)
    return {
        "decode": [(min(length, 1), length) for length in (*around, 54, 97)],
        "long decode": [(1, 512), (0, 60), (1, 513), (1, 1023), (1, 2048)],
        "mixed": [(5, 18), (0, 0), (1, 97), (37, 37), (1, 1), (3, block_size + 2), (0, 20)],
        "ragged": [(1, 528), (5, 18), (1, 23), (37, 237)],
        "chunk": [(129, 463)],
    }[step]


def make_case(choice: dict) -> Case:
    rest = {name: value for name, value in choice.items() if name not in ("group", "step")}
    new, lengths = zip(*rows(choice["step"], choice["block_size"]), strict=True)
    padding = 2 if choice["packed"] or max(new) > 1 else 0  # a padded decode step is [S, 1]
    return Case(lengths=lengths, new=new, num_heads=choice["group"] * choice["num_kv_heads"], padding=padding, **rest)


def reference_size(case: Case) -> int:
    """Numbers in the largest array of the reference, which copies the whole context for every token."""
    tokens = (sum(case.new) if case.packed else len(case.new) * max(case.new)) + case.padding
    return tokens * max(case.lengths) * case.num_heads * case.head_dim


def cover(count: int, seed: int = 0) -> list[Case]:
    """`count` cases, each the one of many that has most pairs of values which none before it had."""
    rng = random.Random(seed)
    covered: set = set()
    cases = []
    for _ in range(count):
        candidates = [{name: rng.choice(values) for name, values in DIMENSIONS.items()} for _ in range(400)]
        candidates = [c for c in candidates if reference_size(make_case(c)) < 3e7]
        best = max(candidates, key=lambda c: len(set(itertools.combinations(c.items(), 2)) - covered))
        covered |= set(itertools.combinations(best.items(), 2))
        cases.append(make_case(best))
    return cases


def use_sizes(patch, **sizes):
    """XLA's loops have tiles and steps of other sizes while the patch lasts."""
    patch.setitem(tile_sizes.SIZES, is_for_gpu(), tile_sizes.find_sizes()._replace(**sizes))


def in_tiles(inputs: Inputs) -> Inputs:
    """The same with tables so wide that XLA does not read all that they could hold at once, but in a loop."""
    queries, width = inputs.q.reshape(-1, *inputs.q.shape[-2:]), inputs.tables.shape[1]
    while tile_sizes.tile_rows(queries, inputs.kv, inputs.tables, inputs.q.shape[-3]) is not None:
        inputs = inputs._replace(tables=np.pad(inputs.tables, ((0, 0), (0, width))))
        width *= 2
    return inputs._replace(tables=jnp.asarray(inputs.tables))


CASES = [
    *cover(14 if NIGHTLY else 8),  # by day every value, if not every pair that can be had
    Case(lengths=(700, 3, 699, 701), new=(1, 1, 1, 1), block_size=701, packed=True),  # one block a row: contiguous
    Case(
        lengths=(700, 3, 300), new=(40, 3, 1), block_size=701, window=64
    ),  # a block of several tiles, the last one cut
    Case(lengths=(40, 7), new=(2, 1), head_dim=80, stored_head_dim=128),  # a padded pool
    Case(lengths=(33, 80), new=(1, 2), max_blocks=40, scale=0.3),  # a table much wider than needed
    Case(lengths=(17, 3, 9), new=(2, 1, 0), packed=True),  # as many tokens as rows, but not one of each
    # Latent rows: of many heads, with all options; of odd sizes, packed; a padded pool.
    Case(lengths=(17, 0, 16, 63), new=(1, 0, 1, 1), num_heads=16, num_kv_heads=1, head_dim=48, rank=40, scale=0.2),
    Case(
        lengths=(5, 33, 70, 40),
        new=(5, 1, 40, 7),
        num_heads=5,
        num_kv_heads=1,
        head_dim=21,
        rank=15,
        block_size=5,
        scale=0.3,
        packed=True,
        padding=3,
        window=13,
        soft_cap=3.0,
        sinks=True,
        mask=True,
    ),
    Case(
        lengths=(40, 7),
        new=(2, 1),
        num_heads=3,
        num_kv_heads=1,
        head_dim=24,
        rank=16,
        stored_head_dim=32,
        scale=0.2,
        block_size=1,
    ),
]
