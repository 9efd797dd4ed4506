"""Random runs of an engine over all of its options; each request must get what an engine gives it that serves it alone.

`python tests/support/random_runs.py FIRST COUNT` runs seeds from the command line and says what went wrong.
"""

import dataclasses
import functools
import pathlib
import random
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from adapted_model import PlacedAdapted, adapted, move_by_all
from checksum_model import LONGEST, VOCAB, Checksum, Latent, Placed, Several
from hybrid_model import SEEN, Hybrid
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_maps import forget_many_programs

import jaxkv
from jaxkv.text.tokenizer import TextStream

MOST_STEPS = 1500  # that a run takes: more is a standstill
DECISIVE = (  # what tokens follow from
    "windows", "block_size", "evict", "cache_dtype", "is_latent", "residual_length", "width", "has_adapters",
    "has_hook", "is_scored",
)  # fmt: skip
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
    has_adapters: bool = False
    has_hook: bool = False
    is_scored: bool = False
    is_apart: bool = False
    is_text: bool = False
    moves: bool = False
    width: int = 1
    layout: str = "paged"

    @property
    def has_disk(self) -> bool:
        return self.moves and self.prefix_cache


ADAPTED = {"has_adapters": True, "moves": True}
HOOKED = ADAPTED | {"has_hook": True}
FOUR_BITS = {"cache_dtype": "int4", "residual_length": 4, "width": 32}
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
    Shape(MIXED, **ADAPTED, is_scored=True),
    Shape(MIXED, **HOOKED, prefix_cache=True, is_text=True, block_size=4, step_tokens=16),
    Shape(**HOOKED, steps_per_dispatch=3, is_scored=True, step_tokens=16),
    Shape(SEEN, **HOOKED, prefix_cache=True, is_scored=True, draft="ngram", step_tokens=24, block_size=4),
    Shape(MIXED, **HOOKED, **FOUR_BITS, prefix_cache=True, draft="own", step_tokens=24, block_size=4),
    Shape(SEEN, **HOOKED, is_apart=True, is_text=True, step_tokens=16),
    Shape(**HOOKED, prefix_cache=True, devices=2, is_scored=True, block_size=4, step_tokens=9),
    Shape(MIXED, **ADAPTED, is_latent=True, cache_dtype="int8", residual_length=5, prefix_cache=True, step_tokens=16),
    Shape(FIRST, **HOOKED, layout="contiguous", steps_per_dispatch=3, is_text=True, step_tokens=16),
]


def plain_model(shape: Shape) -> Any:
    own = adapted if shape.has_adapters else lambda kind: kind
    if shape.windows == SEEN:
        return own(Hybrid)()
    if shape.is_latent:
        return own(Latent)(shape.windows)
    if shape.draft or shape.is_scored or shape.width > 1:
        return own(Several)(shape.windows, width=shape.width)
    return own(Checksum)(shape.windows)


@functools.cache
def model_of(shape: Shape) -> Any:
    model, nothing = plain_model(shape), jnp.zeros(())
    if shape.devices > 1:
        place = Mesh(np.array(jax.devices()[: shape.devices]), ("data",))
        nothing = jax.device_put(nothing, NamedSharding(place, PartitionSpec()))
    elif not shape.has_disk:
        return model
    return (PlacedAdapted if shape.has_adapters else Placed)(nothing, model)


def options_of(shape: Shape) -> dict[str, Any]:
    evict = shape.evict and jaxkv.Eviction(shape.evict, 0.6, every=5)
    sizes = {"max_seq_len": LONGEST, "block_size": shape.block_size, "evict": evict}
    others = {
        "cache_dtype": shape.cache_dtype, "residual_length": shape.residual_length,
        "logits_hook": move_by_all if shape.has_hook else None,
    }  # fmt: skip
    return sizes | {name: x for name, x in others.items() if x is not None}


def draft_of(shape: Shape) -> Any:
    if shape.draft == "hybrid":
        return Hybrid(wrong=3)
    return dataclasses.replace(plain_model(shape), wrong=3) if shape.draft == "own" else shape.draft


def new_engine(shape: Shape, draw: random.Random, spill_bytes: int, disk: pathlib.Path) -> jaxkv.Engine:
    """An engine with few blocks, of which a run can make do."""
    least = -(-LONGEST // shape.block_size) + 1
    options = options_of(shape) | {
        "max_seqs": 4 * shape.devices, "num_blocks": shape.devices * draw.choice([least, least + 5, 3 * least]),
        "step_tokens": shape.step_tokens, "long_prefill_tokens": draw.choice([None, None, 1, 3, 99]),
        "steps_per_dispatch": shape.steps_per_dispatch, "swap": draw.choice(["always", "never", "auto"]),
    }  # fmt: skip
    if shape.layout == "contiguous":
        del options["num_blocks"], options["block_size"]
        options["layout"] = "contiguous"
    if shape.prefix_cache:
        options |= {"prefix_cache": True, "spill_bytes": spill_bytes}
        options |= {"disk": disk, "disk_bytes": 10**6} if shape.has_disk and spill_bytes else {}
    if shape.draft:
        options |= {"draft": draft_of(shape), "draft_tokens": 4}
    if shape.is_apart:
        options |= {"prefill": plain_model(shape)}
    return jaxkv.Engine(model_of(shape), **options)


@functools.cache
def lone_engine(shape: Shape) -> jaxkv.Engine:
    """Serves one request at a time, in a row of its own."""
    return jaxkv.Engine(plain_model(shape), max_seqs=1, step_tokens=LONGEST, **options_of(shape))


@functools.lru_cache(maxsize=4096)
def lone_samples(shape: Shape, prompt: tuple[int, ...], fields: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    """The samples of a request that an engine serves alone."""
    alone = Shape(**{name: getattr(shape, name) for name in DECISIVE})
    engine = lone_engine(alone)
    request = engine.submit(list(prompt), **dict(fields))
    list(engine.run())
    return request.samples


def draw_request(draw: random.Random, shape: Shape) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
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
    if shape.has_adapters:
        fields |= {"adapter": draw.choice([0, 1, 1, 2])}
    if shape.has_hook and draw.random() < 0.6:
        fields |= {"hook_args": (draw.randrange(9), draw.choice([0, 0, 0.5]))}
    if shape.is_text and draw.random() < 0.5:
        stop = tuple("".join(draw.choice("abc") for _ in range(draw.randint(2, 5))) for _ in range(2))
        fields |= {"tokenizer": Letters(), "stop": draw.choice([(), stop, stop + fields.get("stop", ())])}
    if shape.is_scored:
        fields |= {"logprobs": draw.choice([None, 3])}
        fields |= {"prompt_logprobs": draw.choice([None, None, 2])}
    return tuple(prompt), fields, others


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer whose tokens are none, one, or several letters."""

    def decode(self, tokens, special=False):
        return "".join("abc"[token % 3] * (token % 7 // 2) for token in tokens)

    def stream(self, prompt=()):
        return TextStream(self, list(prompt))


class Asked(NamedTuple):
    """A request, and what it was submitted with."""

    samples: list[jaxkv.Request]  # where they are now: an engine that is saved goes on with others
    prompt: tuple[int, ...]
    fields: dict[str, Any]


class Run:
    """One engine and its requests, from a seed."""

    def __init__(self, seed: int, shapes: list[Shape] | None = None):
        self.draw = random.Random(seed)
        shapes = SHAPES if shapes is None else shapes
        self.shape = shapes[seed % len(shapes)]
        self.spill_bytes = self.draw.choice([0, 0, 10**4])
        self.folder = tempfile.TemporaryDirectory()
        self.engine = self.new_engine()
        self.asked: list[Asked] = []
        self.told: dict[jaxkv.Request, list[int]] = {}
        self.pins: list[tuple[Any, list[int], Any]] = []
        self.had_pins = False
        self.steps = 0

    def new_engine(self) -> jaxkv.Engine:
        return new_engine(self.shape, self.draw, self.spill_bytes, pathlib.Path(self.folder.name) / "blocks")

    def go(self) -> None:
        with self.folder:
            self.act_until_the_end()

    def act_until_the_end(self) -> None:
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
            self.submit()
        if self.asked and draw.random() < 0.15:
            self.cancel()
        if draw.random() < 0.05 and not self.pins:
            self.let_go()
        if engine.prefix is not None and draw.random() < 0.2:
            self.pin()
        if self.pins and draw.random() < 0.2:
            self.unpin()
        if self.shape.moves and not self.pins and draw.random() < 0.1:
            draw.choice([self.move, self.move, self.update, self.engine.reset])()
        for _ in range(draw.choice([0, 1, 2, 5])):
            self.step()

    def submit(self) -> None:
        prompt, fields, others = draw_request(self.draw, self.shape)
        if self.shape.has_adapters and self.asked and self.draw.random() < 0.3:  # the same with another, say
            prompt = self.draw.choice(self.asked).prompt
            fields["max_new_tokens"] = min(fields["max_new_tokens"], LONGEST - len(prompt))
        request = self.engine.submit(list(prompt), **fields, **others)
        self.asked.append(Asked(list(request.samples), prompt, fields))

    def cancel(self) -> None:
        samples = self.draw.choice(self.asked).samples
        for sample in [self.draw.choice(samples)] if self.draw.random() < 0.5 else samples:
            sample.cancel()

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
        if self.shape.moves and self.draw.random() < 0.5:
            self.submit()
            self.cancel()
            self.draw.choice([self.update, lambda: None])()
        self.engine.restore()

    def move(self) -> None:
        """Goes on in another engine, of a cache of another size."""
        path = pathlib.Path(self.folder.name) / "engine"
        self.engine.save(path)
        if self.spill_bytes and self.engine.prefix is not None:
            self.engine.prefix.flush(self.engine.cache)
        self.engine.close()
        self.engine = self.new_engine()
        loaded = {request.number: request for request in self.engine.load(path, tokenizer=Letters())}
        for asked in self.asked:
            for i, sample in enumerate(asked.samples):
                if sample.number in loaded:
                    asked.samples[i] = loaded[sample.number]
                    self.told[asked.samples[i]] = self.told.pop(sample, [])

    def update(self) -> None:
        """Begins all requests anew, with the same weights."""
        before = {sample: sample.num_restarts for sample in self.told}
        apart = {"prefill": plain_model(self.shape)} if self.shape.is_apart else {}
        self.engine.update(model_of(self.shape), restart=True, **apart)
        for sample in [sample for sample, times in before.items() if sample.num_restarts > times]:
            del self.told[sample]

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
        for asked in self.asked:
            wanted = lone_samples(self.shape, asked.prompt, tuple(asked.fields.items()))
            for sample, alone in zip(asked.samples, wanted, strict=True):
                assert sample.done and self.told.get(sample, []) == sample.tokens
                if sample.ended in ("cancelled", "error"):
                    assert sample.ended == "cancelled" or self.had_pins
                    assert sample.tokens == alone.tokens[: len(sample.tokens)], (sample, alone.tokens)
                else:
                    assert sample.tokens == alone.tokens, (sample, sample.tokens, alone.tokens)
                    for name in ("ended", "stop_token", "text"):
                        assert getattr(sample, name) == getattr(alone, name), (name, sample, getattr(sample, name))
                assert_same_scores(sample.logprobs, alone.logprobs[: len(sample.tokens)])
            first, alone = asked.samples[0], wanted[0]
            if self.shape.is_scored and first.ended not in ("cancelled", "error"):
                assert_same_scores(first.prompt_top_logprobs, alone.prompt_top_logprobs)
        while self.pins:
            self.unpin()
        for core in self.engine._cores:
            jaxkv.check_invariants(core.cache)
            assert core.cache.is_empty and not core.open
            assert not (core.scheduler.waiting or core.scheduler.running)
            if core.cache_manager.prefix is not None:
                core.cache_manager.prefix.check_invariants(core.cache)
            elif self.shape.layout == "paged":
                assert not core.cache.blocks_in_use


def assert_same_scores(ours: Any, alone: Any) -> None:
    """Log-probabilities of the same tokens are the same, but for rounding."""
    assert (ours is None) == (alone is None) and [*map(set, ours or [])] == [*map(set, alone or [])]
    for own, other in zip(ours or [], alone or [], strict=True):
        np.testing.assert_allclose([own[token] for token in other], [*other.values()], rtol=1e-5)


def main(first: int, count: int) -> None:
    wrong = samples = 0
    for seed in range(first, first + count):
        try:
            run = Run(seed)
            run.go()
            samples += sum(len(asked.samples) for asked in run.asked)
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
