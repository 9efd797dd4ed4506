"""What `gpu.py` measures, what matters most first, and the arrays of each piece of work.

All data are random: constant data lets a chip run faster.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.common.quantization import FORMATS

# What one piece of work goes round, if pools of its size can: the L2 cache of an H200 keeps 60 MB, however it chooses.
IN_TURN = 500e6
MOST_POOLS = 32
MAX_BYTES = 30e9  # of K and V in one measurement

# Whom a piece of work is measured with: all, those that read pages too, or only this library.
type Rivals = Literal["all", "paged", "none"]


@dataclasses.dataclass(frozen=True)
class Point:
    """A step in which each of `batch` rows has `context` tokens, `new` of them the step's."""

    heads: tuple[int, int]
    batch: int
    context: int
    block: int
    new: int = 1
    head_dim: int = 128
    rank: int | None = None  # latent rows, of which so many numbers are the values
    kind: str | None = None  # of a quantised pool
    ragged: bool = False  # rows from next to nothing to twice the context, which is then their mean
    chosen: int | None = None  # tokens that each query attends to, spread over the context
    chunk: int | None = None  # the first row's new tokens, in a packed step whose other rows have one each

    @property
    def what(self) -> str:
        return "mixed" if self.chunk else "decode" if self.new == 1 else "prefill"

    @property
    def parts(self) -> int:
        """What a token is stored as: keys and values, or one row."""
        return 2 if self.rank is None else 1

    @property
    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        return [self.context * (2 * i + 1) // self.batch for i in range(self.batch)]

    @property
    def kv_bytes(self) -> int:
        token: float = self.head_dim * 2
        if self.kind is not None:
            format = FORMATS[self.kind]
            scales = math.prod(format.scale_axes(self.head_dim)) * format.scale_dtype.itemsize
            token = self.head_dim * format.bytes_per_element + scales
        seen = sum(length if self.chosen is None else min(length, self.chosen) for length in self.lengths)
        return int(seen * self.heads[1] * self.parts * token)

    @property
    def flops(self) -> float:
        """Of causal attention: both products, over what each new token sees."""
        rows = [(self.chunk or self.new, 1), (self.new, self.batch - 1)]
        context = self.context if self.chosen is None else min(self.context, self.chosen)
        seen = sum(count * new * (context - new / 2) for new, count in rows)
        return 2 * seen * self.heads[0] * (self.head_dim + (self.rank or self.head_dim))

    @property
    def pools(self) -> int:
        return max(1, min(MOST_POOLS, -(-int(IN_TURN) // self.kv_bytes)))

    @property
    def expected(self) -> float:
        """Seconds of a call at half the speed to hope for."""
        return self.kv_bytes / 2e12 + self.flops / 3e14 + 10e-6


def inputs(point: Point, pools: int) -> dict[str, Any]:
    """The step's arrays: `pools` pools of blocks in the same random order, and one table for all. A pool is one array,
    or of a kind two: numbers and their scales."""
    key = jax.random.key(0)
    held = -(-max(point.lengths) // point.block)
    blocks = point.batch * held  # of rows that hold less too, as cuDNN wants it
    shape = (blocks + 1, point.parts, point.heads[1], point.block, point.head_dim)

    @jax.jit
    def make(key):
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return x if point.kind is None else FORMATS[point.kind].encode(x)

    tokens = (point.chunk + point.batch - 1,) if point.chunk else (point.batch, point.new)
    new = jnp.full(point.batch, point.new, jnp.int32)
    return {
        "q": jax.random.normal(key, (*tokens, point.heads[0], point.head_dim), jnp.bfloat16),
        "pools": [make(key) for key in jax.random.split(key, pools)],
        "tables": (jax.random.permutation(key, blocks).astype(jnp.int32) + 1).reshape(point.batch, held),
        "lengths": jnp.asarray(point.lengths, jnp.int32),
        "new": new.at[0].set(point.chunk) if point.chunk else new,
    }


@dataclasses.dataclass(frozen=True)
class Model:
    """A decode step of a whole model: projections, write, attention and MLP of each layer, weights read each time."""

    num_layers: int = 32
    dim: int = 4096
    hidden: int = 14336

    def weights(self, point: Point) -> dict[str, tuple[int, int]]:
        (heads, kv_heads), head_dim = point.heads, point.head_dim
        return {
            "q": (self.dim, heads * head_dim), "kv": (self.dim, 2 * kv_heads * head_dim),
            "o": (heads * head_dim, self.dim),
            "up": (self.dim, 2 * self.hidden), "down": (self.hidden, self.dim),
        }  # fmt: skip

    def bytes(self, point: Point) -> int:
        """What a step must read."""
        return self.num_layers * (sum(2 * a * b for a, b in self.weights(point).values()) + point.kv_bytes)


LLAMA, LATENT = (32, 8), Point((128, 1), 32, 4096, 64, head_dim=576, rank=512)


type Piece = tuple[Model | None, Point, Rivals]


def decode(batch, context, block=16, heads=LLAMA, rivals: Rivals = "paged", **others) -> Piece:
    return None, Point(heads, batch, context, block, **others), rivals


def others() -> Iterator[Piece]:
    """Yields the rest of what is measured, what matters most first, for the case that time runs out."""
    rest = (
        decode(batch, context, block, heads)
        for heads, block, context, batch in itertools.product(
            (LLAMA, (64, 8), (32, 32)), (16, 64, 128), (2048, 32_768, 8192, 512), (32, 1, 256, 8, 64)
        )
    )
    measured = {point for model, point, _ in headlines() if model is None}
    yield from (piece for piece in rest if piece[1].kv_bytes <= MAX_BYTES and piece[1] not in measured)


def headlines() -> list[Piece]:
    """What everyone asks for."""

    def prefill(batch, context, new, rivals: Rivals = "all", **others):
        return None, Point(LLAMA, batch, context, 16, new, **others), rivals

    def model(batch, context):
        return Model(), Point(LLAMA, batch, context, 16), "none"

    return [
        decode(64, 8192, rivals="all"),
        decode(64, 8192, 64, rivals="none"),  # the same with larger blocks
        model(8, 2048),
        prefill(1, 2048, 2048),
        decode(1, 131_072),
        decode(256, 512),
        decode(64, 8192, 32, kind="int8", rivals="none"),
        decode(64, 8192, 32, kind="int4", rivals="none"),
        decode(32, 4096, ragged=True),
        prefill(1, 8192, 8192),
        prefill(4, 8192, 512),  # chunks
        decode(32, 2048, rivals="all"),
        (None, dataclasses.replace(LATENT, heads=(128, 1)), "none"),  # DeepSeek V3
        (None, dataclasses.replace(LATENT, context=32_768, chosen=2048), "none"),  # DeepSeek V3.2
        (None, Point(LLAMA, 32, 2048, 16, chunk=512), "none"),
        decode(64, 8192, 32, kind="float8_e4m3fn", rivals="none"),
        model(32, 2048),
        decode(64, 8192, heads=(64, 8)),
        decode(64, 8192, heads=(32, 32)),
        decode(64, 8192, head_dim=64),
        decode(64, 8192, heads=(8, 4), head_dim=256),
        prefill(8, 1024, 1024),
        decode(8, 2048, new=4, rivals="none"),  # a draft of three tokens checked
        decode(1, 32_768),
        *(decode(8, 1024, 32, kind=kind, rivals="none") for kind in ("int8", "int4")),
        *((None, Point(LLAMA, 1, 2048, 32, 2048, kind=kind), "none") for kind in ("int8", "int4")),
        *(decode(64, 8192, block, rivals="none") for block in (8, 32, 128)),
        decode(32, 2048, 64, rivals="none"),
        *((None, dataclasses.replace(LATENT, heads=(heads, 1)), "none") for heads in (16, 64)),  # V2-Lite, Kimi K2
        (None, dataclasses.replace(LATENT, batch=1, context=2048, new=2048), "none"),
        model(1, 8192),
        prefill(32, 512, 512),
    ]


def tiny() -> Iterator[Piece]:
    """One piece of each sort, for the interpreter."""
    point = Point((2, 1), 1, 70, 16)
    yield None, point, "all"
    yield None, dataclasses.replace(point, new=17), "all"
    yield None, dataclasses.replace(point, new=70), "all"
    yield None, dataclasses.replace(point, block=32, kind="int8"), "none"
    yield None, dataclasses.replace(point, block=32, kind="int4"), "none"
    yield None, dataclasses.replace(point, batch=2, ragged=True), "paged"
    yield None, dataclasses.replace(point, batch=2, chunk=17), "none"
    yield None, Point((16, 1), 1, 70, 16, head_dim=192, rank=128), "none"
    yield None, Point((16, 1), 1, 70, 16, head_dim=192, rank=128, chosen=9), "none"
    yield Model(2, 16, 16), point, "none"
