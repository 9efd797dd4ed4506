"""Tile sizes and the number of thread blocks, by chip and shape: a table of what was tuned, and a default for the rest.

`benchmarks/tune_gpu.py` measures the candidates on a chip and prints entries for `TUNED`.
"""

import dataclasses
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.common.batch import StoredKV
from pallas_kernels.gpu import chips
from pallas_kernels.gpu.chips import GpuChip
from pallas_kernels.gpu.tiles import Tile

# The kernel that merges is started while the one that splits still runs, and waits for its end on the chip.
EARLY_LAUNCH = hasattr(plgpu, "griddepcontrol_wait")
RESERVED = 1024  # of a multiprocessor's, for each thread block on it
MOST_COLUMNS = 32  # queries of one row and part of a KV head that decode takes, for the registers' sake


CONSUMERS = 2  # warpgroups of prefill that multiply
HALF = 64  # query rows of one consumer: the matrix unit's width


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    tile: Tile
    num_blocks: int  # thread blocks that fill the chip once
    # What each thread block costs beside its tiles, in tiles: to begin, to end, and to have its output merged.
    part_tiles: int = 1


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Ways of prefill, for a chip to decide; two are FlashAttention-3's (https://arxiv.org/abs/2407.08608)."""

    tile: Tile
    # The softmax's weights are multiplied from the registers where they are made, not from shared memory. The
    # interpreter does not do that.
    weights_in_registers: bool = False
    # One consumer's products are issued while the other does its softmax.
    in_turns: bool = False
    # A tile's products with its keys are issued before those of the last one with its values, and its softmax is done
    # under these.
    ahead: bool = False


# (chip, head_dim, columns) -> plan; an entry wins over the default. Columns: queries of a KV head, padded to 8.
TUNED_DECODE: dict[tuple[GpuChip, int, int], DecodePlan] = {}
# (chip, head_dim) -> plan.
TUNED_PREFILL: dict[tuple[GpuChip, int], PrefillPlan] = {}


def number_bytes(stored: StoredKV) -> float:
    """Returns what a number of a pool takes: two bytes, one, or half of one."""
    return stored.kv.dtype.itemsize / stored.format.numbers_per_entry


def decode_plan(head_dim: int, columns: int, itemsize: float = 2, group_size: int | None = None) -> DecodePlan:
    """The plan for the chip at hand, or for an H200 where there is none.

    Args:
      itemsize: `number_bytes` of the pool.
      group_size: entries of a head that share a scale, of the pool's format; None: all of them.
    """
    chip = chips.find_chip()
    if itemsize == 2 and (plan := TUNED_DECODE.get((chip, head_dim, columns))):
        return plan
    # Of bytes a tile has twice the tokens, where registers allow: what is done once a tile takes as long as with more.
    is_wide = itemsize <= 1 and head_dim <= 128 and columns <= 8
    plan = _plan_decode(128 if is_wide else 64, head_dim, columns, itemsize, group_size)
    return plan if plan.tile.stages > 1 else _plan_decode(64, head_dim, columns, itemsize, group_size)


def _plan_decode(tokens: int, head_dim: int, columns: int, itemsize: float, group_size: int | None) -> DecodePlan:
    """Two thread blocks a multiprocessor, if they fit, hide each other's waits; slots share what memory that leaves."""
    chip = chips.find_chip()
    stage = int(2 * tokens * head_dim * itemsize)
    rest = columns * (tokens + head_dim * 2) * 2 + 4096
    if itemsize <= 1:  # scales, and a tile to multiply
        stage += 2 * tokens * _scale_bytes(head_dim, group_size)
        rest += tokens * head_dim * 2
    # 32 columns take too many registers, or beside an operand 24, or any if that is wide.
    most_columns = 24 if itemsize == 2 else 16 if head_dim <= 128 else 0
    in_flight = 256 // (tokens * max(int(itemsize), 1))
    memory = chip.shared_memory + RESERVED  # of a multiprocessor
    two_fit = 2 * (in_flight * stage + rest + RESERVED) <= memory
    blocks = 2 if columns <= most_columns and two_fit else 1
    most = int(1024 // (tokens * itemsize)) // blocks
    stages = min((memory // blocks - RESERVED - rest) // stage, most)
    return DecodePlan(Tile(tokens=tokens, stages=stages), num_blocks=blocks * chip.num_cores)


def _scale_bytes(head_dim: int, group_size: int | None) -> int:
    """Returns what a token's scales take in shared memory, at most: of groups whole lines of 64 for 32 tokens."""
    return 4 if group_size is None else -(-head_dim // (2 * group_size)) * 4


class Split(NamedTuple):
    """How the query heads of a KV head are shared out to thread blocks."""

    parts: int
    group: int  # heads of a part; the last part may have fewer, and is padded
    columns: int  # queries of one part that decode takes at most, of one token or of several

    def can_decode(self, width: int, *, deterministic: bool) -> bool:
        """Tells whether the decode kernels take all rows of a padded step of `width` tokens."""
        return width * self.group <= self.columns and (width == 1 or not deterministic)


def split_heads(group: int, head_dim: int, stored: StoredKV) -> Split:
    """Returns the parts of a KV head's query heads: none has more than the registers and shared memory of decode have
    room for."""
    size = number_bytes(stored), stored.format.group_size
    columns = next((n for n in (MOST_COLUMNS, 24, 16) if decode_plan(head_dim, n, *size).tile.stages > 0), 8)
    parts = -(-group // columns)
    return Split(parts, -(-group // parts), columns)


def latent_plan(width: int) -> DecodePlan:
    """The plan for rows of so many numbers, padded to tiles. One thread block has a multiprocessor to itself, so that
    nothing hides how it begins and ends; and a part of a row writes 128 KB, which are read again to be merged."""
    tile = 64 * width * 2  # bytes, of queries as of rows
    rest = tile + 64 * 64 * 2 + 1024
    chip = chips.find_chip()
    stages = min((chip.shared_memory - rest) // tile, 4)
    return DecodePlan(Tile(tokens=64, stages=stages), chip.num_cores, part_tiles=6)


def merge_blocks() -> int:
    """Thread blocks of the kernel that merges: as many as the chip holds at once."""
    return 4 * chips.find_chip().num_cores


class Division(NamedTuple):
    """What each consumer of prefill has of an item: 64 query rows of its own, or columns of its own of the same 64."""

    halves: int  # of query rows in an item
    columns: int  # of queries, values and the output, in a consumer's registers

    @property
    def splits_columns(self) -> bool:
        return self.halves == 1


def divide(head_dim: int) -> Division:
    """Returns how the consumers divide an item of heads of so many columns, whole tiles: registers hold 256 of the
    output, and shared memory the queries of 128 rows, or where there is little of 64."""
    if head_dim <= (256 if chips.find_chip().shared_memory > 2**17 else 128):
        return Division(CONSUMERS, head_dim)
    return Division(1, -(-head_dim // (64 * CONSUMERS)) * 64)


def prefill_plan(head_dim: int, block_size: int, itemsize: float = 2) -> PrefillPlan:
    """The plan for the chip at hand, or for an H200 where there is none.

    It has no stages where none fits, nor in four bits where consumers divide columns: groups' scales are not divided.
    """
    chip = chips.find_chip()
    tile = Tile(tokens=128 if head_dim <= 128 else 64, stages=2 if head_dim <= 256 else 1)
    if chip.has_wgmma:  # of an H200's measurements: see benchmarks/NOTES.md
        plan = PrefillPlan(tile, ahead=head_dim == 128)
    else:  # beside a wider output there are no registers for weights
        plan = PrefillPlan(tile, weights_in_registers=divide(head_dim).columns <= 128)
    if itemsize == 2:
        plan = TUNED_PREFILL.get((chip, head_dim), plan)
    if plan.tile.pieces(block_size) > 8:  # the producer's registers hold no more block ids
        plan = PrefillPlan(Tile(64, plan.tile.stages), plan.weights_in_registers)
    is_divided = itemsize < 1 and divide(head_dim).splits_columns
    tiles = () if is_divided else (plan.tile, Tile(64, plan.tile.stages), Tile(64, 1))
    fits = (x for x in tiles if _prefill_bytes(head_dim, itemsize, x, plan) <= chip.shared_memory)
    return dataclasses.replace(plan, tile=next(fits, Tile(64, 0)))


def _prefill_bytes(head_dim: int, itemsize: float, tile: Tile, plan: PrefillPlan) -> int:
    """Returns the shared memory of a thread block of prefill, at most."""
    division = divide(head_dim)
    values = CONSUMERS * division.columns if division.splits_columns else head_dim
    queries = CONSUMERS * HALF * division.columns * 2
    weights = 0 if plan.weights_in_registers else CONSUMERS * HALF * tile.tokens * 2
    rings = int(tile.stages * tile.tokens * (head_dim + values) * itemsize)
    if itemsize < 2:  # tiles to multiply, of keys and values or in turn, and scales
        rings += tile.tokens * (values if division.splits_columns else 2 * head_dim) * 2
        rings += tile.stages * 2 * tile.tokens * _scale_bytes(head_dim, None if itemsize == 1 else 32)
    return queries + rings + weights + 3072  # of logarithms, barriers, and sums along lines


def prefill_chunks(num_blocks: int, most_tiles: int) -> int:
    """Returns the number of chunks that the context of each prefill item is cut into, so that few items fill the chip.

    A chunk has at least 8 tiles, or merging would cost more than it gains.
    """
    return max(1, min(chips.find_chip().num_cores // num_blocks, most_tiles // 8))
