"""Detects copies of a pool in a compiled step, by its aliases, its instructions, and its scratch memory."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._core.cache.cache import Cache
from jaxkv._core.cache.init import init
from jaxkv._core.config.validation import real
from jaxkv._core.state.state import Pool
from jaxkv._tiers.host_blocks import HostBlocks

# Operations that XLA does in place, or without touching memory.
IN_PLACE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "fusion", "custom-call",
    "dynamic-update-slice", "scatter", "optimization-barrier", "async-start", "async-update", "async-done",
}  # fmt: skip
NO_BUFFER = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant"}
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>\S+) = \(?(?P<dtype>\w+)\[(?P<dims>[\d,]+)\]\S* (?P<opcode>[\w-]+)\("
)
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
NAMED = 3  # buffers named in a message
LARGE = 1 << 27  # bytes of a pool that no step reads as a whole; a step may do so with a small pool


def assert_no_copy(jitted: Any, *args: Any, temp_fraction: float = 0.5, **kwargs: Any) -> None:
    """Raises AssertionError if a compiled step copies a pool of its cache instead of updating it in place.

    Args:
      jitted: a function under `jax.jit` or `nnx.jit` that donates its cache and returns it.
      *args, **kwargs: its arguments, a `Cache` among them. Nothing is run, so arrays may be `jax.ShapeDtypeStruct`s:
        `jax.eval_shape(lambda: jaxkv.init(config))` is a cache that takes no memory.
      temp_fraction: scratch memory above this share of the largest pool must be the model's own: no large part of the
        scratch memory may be blocks of a pool, and it must be a small share of the pool when the step is compiled again
        for a cache with many times the blocks and max_seq_len.

    Raises:
      AssertionError: names the instruction or the buffers, their shapes and their origin.
      ValueError: no cache among the arguments.

    Copies are easy to miss: a pool that is padded or transposed for a kernel, converted as a whole, passed through
    `scan` as `xs` and `ys`, or not donated. Each doubles the memory, and costs time that grows with the pool.

    >>> import jax, jaxkv
    >>> layer = jaxkv.LayerConfig(num_kv_heads=2, head_dim=8)
    >>> config = jaxkv.CacheConfig(layers=(layer,), max_seqs=2, max_seq_len=64, num_blocks=400)
    >>> cache = jax.eval_shape(lambda: jaxkv.init(config))
    >>> kv = jax.ShapeDtypeStruct((1, 2, 1, 2, 8), "bfloat16")
    >>> assert_no_copy(jax.jit(jaxkv.append, donate_argnames="cache"), cache, kv, kv)
    >>> assert_no_copy(jax.jit(jaxkv.append), cache, kv, kv)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: Only 0 of the 410624 bytes of the cache's pools are updated in place: ...
    """
    temp_fraction = real("temp_fraction", temp_fraction, least=0)
    pools = _pools((args, kwargs))
    if not pools:
        raise ValueError("None of the arguments holds a jaxkv.Cache, so there is no pool that could be copied.")
    compiled = jitted.lower(*args, **kwargs).compile()
    memory = compiled.memory_analysis()
    total = sum(map(_bytes, pools))
    if memory.alias_size_in_bytes < total:
        raise AssertionError(
            f"Only {memory.alias_size_in_bytes} of the {total} bytes of the cache's pools are updated in place: donate "
            'the cache, jax.jit(step, donate_argnames="cache"), and return it with the shapes and dtypes it came with.'
        )
    text = compiled.as_text()
    for instruction in _instructions(text):
        if instruction.opcode not in IN_PLACE and any(_is_as_large(instruction.shape, pool) for pool in pools):
            raise AssertionError(
                f"A whole pool goes through the instruction {instruction.opcode} ({instruction}). Index or slice "
                "the pool instead, and write into it with jaxkv.write or .at[...]."
            )
    largest, scratch = max(map(_bytes, pools)), memory.temp_size_in_bytes
    if scratch <= temp_fraction * largest:
        return
    buffers = sorted(_buffers(text, pools), key=lambda instruction: -instruction.bytes)
    blocks = [
        instruction
        for instruction in buffers
        if instruction.bytes > temp_fraction * largest / 2 and _is_blocks(instruction.shape, pools)
    ]
    factor = 1 << math.ceil(math.log2(max(4 * scratch / max(temp_fraction, 0.01), LARGE) / largest))
    grown = None if blocks else _scratch_of_a_larger_cache(jitted, args, kwargs, factor)
    if grown is not None and grown.scratch <= temp_fraction / 2 * grown.largest:
        return  # the model's own scratch memory
    why = "part of it are blocks" if blocks else "it is not known whether it grows with the cache"
    if grown is not None:
        why = f"with {factor} times the blocks and max_seq_len it is {grown.scratch}"
    raise AssertionError(
        f"The step takes {scratch} bytes of scratch memory, more than {temp_fraction} of its largest pool of {largest} "
        f"bytes, and {why}. Its largest buffers: {'; '.join(map(str, (blocks or buffers)[:NAMED])) or 'not known'}. "
        "Read a pool with jaxkv.attend or jaxkv.gather. Attention itself may read most of a small pool: give one of "
        "many blocks, jax.eval_shape(lambda: jaxkv.init(config.replace(num_blocks=4000))). What the step may need all "
        "the same, say with temp_fraction."
    )


class Grown(NamedTuple):
    """Scratch memory of a step for a larger cache, in bytes."""

    scratch: int
    largest: int  # of the pools


class Instruction(NamedTuple):
    """A line of a compiled program."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    origin: str  # the JAX operation that the instruction comes from, or ""
    is_fused: bool  # inside another instruction, without a buffer of its own

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * max(1, int(bits[0]) // 8 if bits else 1)

    def __str__(self) -> str:
        where = f", which comes from {self.origin}" if self.origin else ""
        return f"{self.name}, {self.dtype}{list(self.shape)}, {self.bytes} bytes{where}"


def _instructions(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation = begins["name"]
        if found := INSTRUCTION.match(line):
            origin = re.search(r'op_name="([^"]*)"', line)
            shape = tuple(int(n) for n in found["dims"].split(","))
            is_fused = "fused" in computation or "wrapped" in computation
            yield Instruction(
                found["name"], found["dtype"], shape, found["opcode"], origin[1] if origin else "", is_fused
            )


def _buffers(text: str, pools: list[Any]) -> Iterator[Instruction]:
    """Yields the instructions that need new memory, as far as the program's text tells."""
    for instruction in _instructions(text):
        if not (
            instruction.is_fused
            or instruction.opcode in NO_BUFFER
            or any(_is_as_large(instruction.shape, pool) for pool in pools)
        ):
            yield instruction


def _scratch_of_a_larger_cache(jitted: Any, args: Any, kwargs: Any, factor: int) -> Grown | None:
    """Returns the step's scratch memory for caches `factor` times larger; None if the step fails for them."""
    larger = functools.partial(_larger, factor)
    try:
        args, kwargs = jax.tree.map(larger, (args, kwargs), is_leaf=lambda x: isinstance(x, Cache))
        memory = jitted.lower(*args, **kwargs).compile().memory_analysis()
    except Exception:  # another shape may break a user's step in any way
        return None
    return Grown(memory.temp_size_in_bytes, max(map(_bytes, _pools((args, kwargs)))))


def _larger(factor: int, x: Any) -> Any:
    if not isinstance(x, Cache):
        return x
    config = x.config
    blocks = {} if config.contiguous else {"group_blocks": tuple(factor * n for n in config.group_blocks)}
    config = config.replace(max_seq_len=factor * config.max_seq_len, **blocks)
    made = jax.eval_shape(lambda: init(config))
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(x), strict=True)
    leaves = [jax.ShapeDtypeStruct(new.shape, new.dtype, sharding=getattr(old, "sharding", None)) for new, old in pairs]
    return jax.tree.unflatten(jax.tree.structure(made), leaves)


def _pools(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Pool | HostBlocks))
    pools = [x.kv for x in leaves if isinstance(x, Pool)]  # not the pools on the host
    caches = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Cache))
    return pools + [x for cache in caches if isinstance(cache, Cache) for x in jax.tree.leaves(cache.states)]


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def _is_as_large(shape: tuple[int, ...], pool: Any) -> bool:
    """Tells whether an array has at least a pool's elements, and an axis that can be the pool's blocks."""
    return math.prod(shape) >= math.prod(pool.shape) and any(d % pool.shape[0] == 0 for d in shape)


def _is_blocks(shape: tuple[int, ...], pools: list[Any]) -> bool:
    """Tells whether an array has the axes of a pool's blocks, whole or of the keys or values alone."""
    return any(shape[-len(block) :] == block for pool in pools for block in (pool.shape[1:], pool.shape[2:]))
