"""Index keys, the queries that choose tokens by them, and what they choose: for every backend."""

from typing import NamedTuple

import jax

from pallas_kernels.common.batch import MaskSpec, PagedBatch
from pallas_kernels.common.quantization import StorageFormat

NOTHING = -float("inf")  # the score of no token


class StoredIndex(NamedTuple):
    """The index keys of a layer."""

    keys: jax.Array  # [num_blocks + 1, 1, 1, block_size, E'], E' may be padded beyond E
    scale: jax.Array | None  # f32[num_blocks + 1, 1, 1, block_size]
    format: StorageFormat


class Best(NamedTuple):
    """The best tokens of queries, best first; equal ones in order of their positions."""

    score: jax.Array  # f32[.., k], -inf where there is none
    position: jax.Array  # i32[.., k], -1 where there is none


class Lanes(NamedTuple):
    """Tiles of queries, each of one row, of one query or of as many as a backend computes at once."""

    row: jax.Array  # i32[lanes]
    token: jax.Array  # i32[lanes, queries]: among all tokens, flat
    position: jax.Array  # i32[lanes, queries]; -1 of none


class IndexQueries(NamedTuple):
    """The tokens of a step, flat, and what they choose from."""

    q: jax.Array  # [tokens, heads, E]
    weights: jax.Array  # [tokens, heads]
    stored: StoredIndex
    batch: PagedBatch
    mask: MaskSpec
