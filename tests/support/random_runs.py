"""Random runs of an engine over all of its options; each request must get what an engine gives it that serves it alone.

`python tests/support/random_runs.py FIRST COUNT` runs seeds from the command line and says what went wrong.
"""

import dataclasses
import functools
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checksum_model import LONGEST, VOCAB, Checksum, Latent, Placed, Several
from hybrid_model import SEEN, Hybrid
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_maps import forget_many_programs

import jaxkv

MOST_STEPS = 1500  # that a run takes: more is a standstill
KNOWN = [[random.Random(i).randrange(VOCAB) for _ in range(30)] for i in range(3)]
FULL, MIXED, FIRST = (None,), (None, 7), (None, (7, 2))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What programs are compiled for: the rest of an engine's options is drawn for each run."""

    windows: tuple[Any, ...] = FULL
    prefix_cache: bool = False
    block_size: int = 3
    step_tokens: int = 7
    steps_per_dispatch: int = 1
    draft: str | None = None
    evict: str | None = None
    devices: int = 1
    cache_dtype: str | None = None
    is_latent: bool = False
    residual_length: int | None = None


SHAPES = [
    Shape(prefix_cache=True),
    Shape(MIXED, steps_per_dispatch=3, block_size=4),
    Shape(FIRST, step_tokens=24),
    Shape(MIXED, prefix_cache=True, block_size=4, step_tokens=16),
    Shape(prefix_cache=True, draft="ngram", step_tokens=24, block_size=4),
    Shape(prefix_cache=True, steps_per_dispatch=4, step_tokens=40, block_size=4),
    Shape(evict="streaming_llm", step_tokens=9),
    Shape(prefix_cache=True, devices=2, block_size=4, step_tokens=9),
    Shape(devices=2, steps_per_dispatch=2, block_size=4, step_tokens=11),
    Shape(SEEN, steps_per_dispatch=3),
    Shape(SEEN, draft="ngram", step_tokens=24, block_size=4),
    Shape(SEEN, draft="hybrid", step_tokens=24, block_size=4),
    Shape(SEEN, evict="streaming_llm", step_tokens=9),
    Shape(SEEN, prefix_cache=True),
    Shape(SEEN, prefix_cache=True, draft="hybrid", step_tokens=24, block_size=4),
    Shape(SEEN, prefix_cache=True, steps_per_dispatch=4, step_tokens=16, block_size=4),
    Shape(SEEN, prefix_cache=True, devices=2, block_size=4, step_tokens=9),
    Shape((7,), step_tokens=12),
    Shape(MIXED, cache_dtype="int8", step_tokens=16),
    Shape(MIXED, is_latent=True, step_tokens=16),
    Shape(MIXED, cache_dtype="int8", residual_length=4, prefix_cache=True, block_size=4, step_tokens=16),
    Shape(cache_dtype="int8", residual_length=6, prefix_cache=True, draft="ngram", step_tokens=24, block_size=4),
    Shape(cache_dtype="int8", residual_length=5, devices=2, steps_per_dispatch=2, step_tokens=11),
]


def plain_model(shape: Shape) -> Any:
    if shape.windows == SEEN:
        return Hybrid()
    if shape.is_latent:
        return Latent(shape.windows)
    return (Several if shape.draft else Checksum)(shape.windows)


@functools.cache
def model_of(shape: Shape) -> Any:
    model = plain_model(shape)
    if shape.devices == 1:
        return model
    place = Mesh(np.array(jax.devices()[: shape.devices]), ("data",))
    return Placed(jax.device_put(jnp.zeros(()), NamedSharding(place, PartitionSpec())), model)


def options_of(shape: Shape) -> dict[str, Any]:
    evict = shape.evict and jaxkv.Eviction(shape.evict, 0.6, every=5)
    sizes = {"max_seq_len": LONGEST, "block_size": shape.block_size, "evict": evict}
    stored = {"cache_dtype": shape.cache_dtype, "residual_length": shape.residual_length}
    return sizes | {name: x for name, x in stored.items() if x is not None}


def new_engine(shape: Shape, draw: random.Random, spill_bytes: int) -> jaxkv.Engine:
    """An engine with few blocks, of which a run can make do."""
    least = -(-LONGEST // shape.block_size) + 1
    options = options_of(shape) | {
        "max_seqs": 4 * shape.devices, "num_blocks": shape.devices * draw.choice([least, least + 5, 3 * least]),
        "step_tokens": shape.step_tokens, "long_prefill_tokens": draw.choice([None, None, 1, 3, 99]),
        "steps_per_dispatch": shape.steps_per_dispatch, "swap": draw.choice(["always", "never", "auto"]),
    }  # fmt: skip
    if shape.prefix_cache:
        options |= {"prefix_cache": True, "spill_bytes": spill_bytes}
    if shape.draft:
        options |= {"draft": Hybrid(wrong=3) if shape.draft == "hybrid" else shape.draft, "draft_tokens": 4}
    return jaxkv.Engine(model_of(shape), **options)


@functools.cache
def lone_engine(shape: Shape) -> jaxkv.Engine:
    """Serves one request at a time, in a row of its own."""
    model = plain_model(dataclasses.replace(shape, draft=None))
    return jaxkv.Engine(model, max_seqs=1, step_tokens=LONGEST, **options_of(shape))


@functools.lru_cache(maxsize=4096)
def lone_tokens(shape: Shape, prompt: tuple[int, ...], fields: tuple[tuple[str, Any], ...]) -> list[list[int]]:
    alone = Shape(
        shape.windows, block_size=shape.block_size, evict=shape.evict, cache_dtype=shape.cache_dtype,
        is_latent=shape.is_latent, residual_length=shape.residual_length,
    )  # fmt: skip
    engine = lone_engine(alone)
    request = engine.submit(list(prompt), **dict(fields))
    list(engine.run())
    return [sample.tokens for sample in request.samples]


def draw_request(draw: random.Random) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """A prompt, what its tokens follow from, and what they must not follow from."""
    begin = draw.choice(KNOWN)[: draw.randint(1, 28)]
    prompt = begin + [draw.randrange(VOCAB) for _ in range(draw.choice([0, 0, 1, 2, 5]))]
    fields: dict[str, Any] = {"max_new_tokens": draw.randint(1, LONGEST - len(prompt) if draw.random() < 0.2 else 14)}
    if draw.random() < 0.3:
        fields |= {"temperature": draw.choice([0.7, 1.5]), "seed": draw.randrange(4), "top_k": draw.choice([0, 20])}
    if draw.random() < 0.3:
        fields |= {"eos": draw.randrange(VOCAB)}
    if draw.random() < 0.25:
        fields |= {"n": draw.choice([2, 3, 4, 5, 8])}
    if draw.random() < 0.15:
        fields |= {"stop": tuple((draw.randrange(VOCAB),) for _ in range(8)), "include_stop": draw.random() < 0.3}
    others = {
        "priority": draw.choice([0, 0, 0, -1, 2]), "salt": draw.choice([None, None, "a"]),
        "keep_prefix": draw.choice([True, True, False, "prompt"]),
    }  # fmt: skip
    return tuple(prompt), fields, others


class Run:
    """One engine and its requests, from a seed."""

    def __init__(self, seed: int, shapes: list[Shape] | None = None):
        self.draw = random.Random(seed)
        shapes = SHAPES if shapes is None else shapes
        self.shape = shapes[seed % len(shapes)]
        self.spill_bytes = self.draw.choice([0, 0, 10**4])
        self.engine = new_engine(self.shape, self.draw, self.spill_bytes)
        self.requests: list[tuple[jaxkv.Request, tuple[int, ...], dict[str, Any]]] = []
        self.told: dict[jaxkv.Request, list[int]] = {}
        self.pins: list[tuple[Any, list[int], Any]] = []
        self.had_pins = False
        self.steps = 0

    def go(self) -> None:
        for _ in range(self.draw.randint(5, 25)):
            self.act()
        while self.engine._core.is_busy:
            self.step()
            assert self.steps < MOST_STEPS, "it stands still"
        self.step()
        self.check()

    def act(self) -> None:
        draw, engine = self.draw, self.engine
        for _ in range(draw.choice([0, 1, 1, 2, 6])):
            prompt, fields, others = draw_request(draw)
            self.requests.append((engine.submit(list(prompt), **fields, **others), prompt, fields))
        if self.requests and draw.random() < 0.15:
            request = draw.choice(self.requests)[0]
            draw.choice(request.samples).cancel() if draw.random() < 0.5 else request.cancel()
        if draw.random() < 0.05 and not self.pins:
            self.let_go()
        if engine.prefix is not None and draw.random() < 0.2:
            self.pin()
        if self.pins and draw.random() < 0.2:
            self.unpin()
        for _ in range(draw.choice([0, 1, 2, 5])):
            self.step()

    def step(self) -> None:
        self.steps += 1
        try:
            for request, token in self.engine.step():
                if token is not None:  # else it is an end that is told
                    self.told.setdefault(request, []).append(token)
        except jaxkv.OutOfBlocks as error:
            assert self.had_pins and error.request.ended == "error", "nothing but pins keeps a request from beginning"

    def let_go(self) -> None:
        """Gives the cache's memory back for a while."""
        has_host = self.engine.prefix is None or self.spill_bytes > 0
        self.engine.release(keep=has_host and self.draw.random() < 0.7)
        self.engine.restore()

    def pin(self) -> None:
        prefix = self.draw.choice(getattr(self.engine.prefix, "shards", [self.engine.prefix]))
        tokens, salt = self.draw.choice(KNOWN)[: self.draw.randint(3, 30)], self.draw.choice([None, "a"])
        try:
            if prefix.pin(tokens, salt=salt):
                self.pins.append((prefix, tokens, salt))
                self.had_pins = True
        except ValueError:  # more than may be pinned
            pass

    def unpin(self) -> None:
        prefix, tokens, salt = self.pins.pop(self.draw.randrange(len(self.pins)))
        prefix.unpin(tokens, salt=salt)

    def check(self) -> None:
        for request, prompt, fields in self.requests:
            wanted = lone_tokens(self.shape, prompt, tuple(fields.items()))
            for sample, tokens in zip(request.samples, wanted, strict=True):
                assert sample.done and self.told.get(sample, []) == sample.tokens
                if sample.ended in ("cancelled", "error"):
                    assert sample.ended == "cancelled" or self.had_pins
                    assert sample.tokens == tokens[: len(sample.tokens)], (sample, tokens)
                else:
                    assert sample.tokens == tokens, (sample, sample.tokens, tokens)
        while self.pins:
            self.unpin()
        for core in self.engine._cores:
            jaxkv.check_invariants(core.cache)
            assert core.cache.is_empty and not core.open
            assert not (core.scheduler.waiting or core.scheduler.running)
            if core.cache_manager.prefix is not None:
                core.cache_manager.prefix.check_invariants(core.cache)
            else:
                assert not core.cache.blocks_in_use


def main(first: int, count: int) -> None:
    wrong = samples = 0
    for seed in range(first, first + count):
        try:
            run = Run(seed)
            run.go()
            samples += sum(len(request.samples) for request, _, _ in run.requests)
        except Exception as error:
            wrong += 1
            shape = SHAPES[seed % len(SHAPES)]
            print(f"seed {seed} {shape}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        forget_many_programs()
        if seed % 50 == 49:
            print(f"{seed + 1 - first} runs of {samples} samples, {wrong} wrong", flush=True)
    print(f"{count} runs of {samples} samples, {wrong} wrong")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
