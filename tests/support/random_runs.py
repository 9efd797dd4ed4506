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
from checksum_model import LONGEST, VOCAB, Checksum, Latent, Placed, Several, Sum
from hybrid_model import SEEN, Hybrid
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_maps import forget_many_programs

import jaxkv
from jaxkv.text.tokenizer import TextStream

MOST_STEPS = 1500  # that a run takes: more is a standstill
DECISIVE = (  # what tokens follow from
    "windows", "block_size", "evict", "cache_dtype", "is_latent", "residual_length", "width", "has_adapters",
    "has_hook", "is_scored", "formats", "penalizes", "has_weights", "branches",
)  # fmt: skip
KNOWN = [[random.Random(i).randrange(VOCAB) for _ in range(30)] for i in range(3)]
FULL, MIXED, FIRST, CHUNKED = (None,), (None, 7), (None, (7, 2)), (("chunk", 6), None)


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
    formats: tuple[str | None, ...] = ()  # of each layer
    penalizes: bool = False
    has_weights: bool = False
    branches: int = 1
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
TRAINED = HOOKED | {"has_weights": True}
BY_NGRAMS = {"prefix_cache": True, "draft": "ngram", "block_size": 4, "step_tokens": 24}
BY_STEPS = {"prefix_cache": True, "steps_per_dispatch": 3, "block_size": 4, "step_tokens": 16}
K5V3 = {"cache_dtype": "k5v3", "width": 64}
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
    Shape(MIXED, **TRAINED, **K5V3, residual_length=4, prefix_cache=True, is_scored=True, block_size=4, step_tokens=16),
    Shape(MIXED, **ADAPTED, formats=("k5v3", "int8"), width=64, residual_length=5, **BY_NGRAMS),
    Shape((None, *MIXED), moves=True, formats=("int4", None, "float8_e4m3fn"), width=64, residual_length=3, **BY_STEPS),
    Shape(MIXED, **TRAINED, evict="some", steps_per_dispatch=3, is_scored=True, step_tokens=9),
    Shape(MIXED, **TRAINED, penalizes=True, evict="some", devices=2, is_scored=True, step_tokens=16),
    Shape(SEEN, **TRAINED, evict="some", is_text=True, steps_per_dispatch=2, step_tokens=9),
    Shape(MIXED, **ADAPTED, **K5V3, evict="some", is_scored=True, step_tokens=16),
    Shape(MIXED, **TRAINED, penalizes=True, is_apart=True, draft="ngram", is_text=True, step_tokens=24),
    Shape(SEEN, **TRAINED, is_apart=True, draft="ngram", block_size=4, step_tokens=24),
    Shape(MIXED, **HOOKED, penalizes=True, is_apart=True, draft="own", block_size=4, step_tokens=24),
    Shape(MIXED, **ADAPTED, is_apart=True, steps_per_dispatch=3, cache_dtype="int8", residual_length=4, step_tokens=16),
    Shape(MIXED, **HOOKED, penalizes=True, is_scored=True, is_text=True, **BY_NGRAMS | {"draft": "own"}),
    Shape(MIXED, **TRAINED, penalizes=True, is_scored=True, is_text=True, **BY_STEPS),
    Shape(MIXED, is_scored=True, is_text=True, branches=3, **BY_NGRAMS),
    Shape(**ADAPTED, has_weights=True, cache_dtype="float8_e4m3fn", width=8, **BY_STEPS),
    Shape(SEEN, **TRAINED, devices=2, is_scored=True, **BY_NGRAMS),
    Shape(SEEN, **TRAINED, penalizes=True, devices=2, is_text=True, **BY_STEPS),
    Shape(SEEN, moves=True, has_weights=True, cache_dtype="float8_e5m2", **BY_STEPS),
    Shape(FIRST, **TRAINED, penalizes=True, is_text=True, **BY_STEPS),
    Shape(FIRST, moves=True, has_weights=True, cache_dtype="int8", residual_length=4, **BY_NGRAMS),
    Shape((7,), **ADAPTED, has_weights=True, **K5V3, prefix_cache=True, is_text=True, step_tokens=12),
    Shape(MIXED, **ADAPTED, is_latent=True, cache_dtype="float8_e4m3fn", residual_length=3, **BY_STEPS),
    Shape(CHUNKED, **TRAINED, is_text=True, **BY_NGRAMS),
    Shape(CHUNKED, **ADAPTED, cache_dtype="int8", width=8, is_apart=True, steps_per_dispatch=2, step_tokens=9),
]


def plain_model(shape: Shape) -> Any:
    own = adapted if shape.has_adapters else lambda kind: kind
    if shape.windows == SEEN:
        return own(Hybrid)()
    if shape.is_latent:
        return own(Latent)(shape.windows)
    if shape.branches > 1:
        return Sum(shape.windows)
    if shape.draft or shape.is_scored or shape.width > 1 or shape.formats:
        return own(Several)(shape.windows, width=shape.width, formats=shape.formats)
    return own(Checksum)(shape.windows)


@functools.cache
def model_of(shape: Shape, weights: int = 0) -> Any:
    model, number = plain_model(shape), jnp.array(weights, jnp.int32)
    if shape.devices > 1:
        place = Mesh(np.array(jax.devices()[: shape.devices]), ("data",))
        number = jax.device_put(number, NamedSharding(place, PartitionSpec()))
    elif not (shape.has_disk or shape.has_weights):
        return model
    return (PlacedAdapted if shape.has_adapters else Placed)(number, model)


def prefer_some(cache: jaxkv.Cache, *, layer: int) -> jax.Array:
    """Scores tokens by what they are, not by where they stand."""
    return (cache.separate(layer)[0].max(axis=-1).astype(jnp.float32) * 37) % 64


def options_of(shape: Shape) -> dict[str, Any]:
    evict = shape.evict and jaxkv.Eviction(prefer_some if shape.evict == "some" else shape.evict, 0.6, every=5)
    sizes = {"max_seq_len": LONGEST, "block_size": shape.block_size, "evict": evict}
    others = {
        "cache_dtype": shape.cache_dtype, "residual_length": shape.residual_length,
        "logits_hook": jaxkv.hooks.penalize if shape.penalizes else move_by_all if shape.has_hook else None,
        "hook_args": jaxkv.hooks.penalties(repetition_penalty=1.3) if shape.penalizes else None,
    }  # fmt: skip
    return sizes | {name: x for name, x in others.items() if x is not None}


def draft_of(shape: Shape) -> Any:
    if shape.draft == "hybrid":
        return Hybrid(wrong=3)
    return dataclasses.replace(plain_model(shape), wrong=3) if shape.draft == "own" else shape.draft


def new_engine(
    shape: Shape, draw: random.Random, spill_bytes: int, disk: pathlib.Path, weights: int = 0
) -> jaxkv.Engine:
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
        options |= {"draft": draft_of(shape), "draft_tokens": 4, "draft_branches": shape.branches}
    if shape.is_apart:
        options |= {"prefill": model_of(shape, weights)}
    return jaxkv.Engine(model_of(shape, weights), **options)


@functools.cache
def lone_engine(shape: Shape) -> jaxkv.Engine:
    """Serves one request at a time, in a row of its own."""
    return jaxkv.Engine(model_of(shape), max_seqs=1, step_tokens=LONGEST, **options_of(shape))


@functools.lru_cache(maxsize=4096)
def lone_samples(
    shape: Shape, prompt: tuple[int, ...], fields: tuple[tuple[str, Any], ...], weights: int
) -> tuple[Any, ...]:
    """The samples of a request that an engine serves alone."""
    alone = Shape(**{name: getattr(shape, name) for name in DECISIVE})
    engine = lone_engine(alone)
    if alone.has_weights:
        engine.update(model_of(alone, weights))
    request = engine.submit(list(prompt), **read_fields(fields))
    list(engine.run())
    return request.samples


def read_fields(fields: Any) -> dict[str, Any]:
    """Returns what `submit` takes: penalties are drawn as what can be hashed."""
    fields = dict(fields)
    if drawn := dict(fields.pop("penalties", ())):
        biases = dict(drawn.pop("logit_bias", ()))
        fields["hook_args"] = jaxkv.hooks.penalties(logit_bias=biases, **drawn)
    return fields


def draw_penalties(draw: random.Random) -> tuple[tuple[str, Any], ...]:
    """Returns arguments of `penalties`, such as those that a request gives."""
    found: dict[str, Any] = {}
    for name in ("presence_penalty", "frequency_penalty"):
        if draw.random() < 0.4:
            found[name] = draw.choice([-0.6, 0.3, 0.8, 1.5])
    if draw.random() < 0.4:
        found["repetition_penalty"] = draw.choice([0.5, 1.2, 3.0])
    if draw.random() < 0.4:
        found["logit_bias"] = tuple((draw.randrange(VOCAB), draw.choice([-2.0, 0.6, 1.2])) for _ in range(5))
    if draw.random() < 0.5:
        found["min_tokens"] = draw.randint(0, 9)
        found["stop_tokens"] = tuple(draw.randrange(VOCAB) for _ in range(5))
    return tuple(found.items())


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
    if shape.penalizes and draw.random() < 0.7:
        fields |= {"penalties": draw_penalties(draw)}
        if (stops := dict(fields["penalties"]).get("stop_tokens")) and draw.random() < 0.6:
            fields |= {"eos": stops}
    elif shape.has_hook and not shape.penalizes and draw.random() < 0.6:
        fields |= {"hook_args": (draw.randrange(9), draw.choice([0, 0, 0.5]))}
    if shape.is_text and draw.random() < 0.5:
        stop = tuple("".join(draw.choice("abc") for _ in range(draw.randint(2, 5))) for _ in range(2))
        fields |= {"tokenizer": Letters(), "stop": draw.choice([(), stop, stop + fields.get("stop", ())])}
    if shape.is_scored:
        fields |= {"logprobs": draw.choice([None, 3])}
        fields |= {"prompt_logprobs": draw.choice([None, None, 2])}
        if fields["prompt_logprobs"] is not None and draw.random() < 0.1:
            fields |= {"max_new_tokens": 0}
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
        self.weights = 0
        self.ended_by: dict[jaxkv.Request, int] = {}  # of samples that had ended before an update: the weights
        self.engine = self.new_engine()
        self.asked: list[Asked] = []
        self.told: dict[jaxkv.Request, list[int]] = {}
        self.pins: list[tuple[Any, list[int], Any]] = []
        self.had_pins = False
        self.steps = 0

    def new_engine(self) -> jaxkv.Engine:
        disk = pathlib.Path(self.folder.name) / "blocks"
        return new_engine(self.shape, self.draw, self.spill_bytes, disk, self.weights)

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
            moves = [] if self.shape.evict else [self.move, self.move]  # no engine that evicts is saved
            draw.choice([*moves, self.update, self.engine.reset])()
        for _ in range(draw.choice([0, 1, 2, 5])):
            self.step()

    def submit(self) -> None:
        prompt, fields, others = draw_request(self.draw, self.shape)
        if self.shape.has_adapters and self.asked and self.draw.random() < 0.3:  # the same with another, say
            prompt = self.draw.choice(self.asked).prompt
            fields["max_new_tokens"] = min(fields["max_new_tokens"], LONGEST - len(prompt))
        request = self.engine.submit(list(prompt), **read_fields(fields), **others)
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
                    if (weights := self.ended_by.get(sample)) is not None:
                        self.ended_by[asked.samples[i]] = weights

    def update(self) -> None:
        """Begins all requests anew, with the same weights or others."""
        before = {sample: sample.num_restarts for sample in self.told}
        older, self.weights = self.weights, self.draw.choice([0, 1, 2]) if self.shape.has_weights else 0
        apart = {"prefill": model_of(self.shape, self.weights)} if self.shape.is_apart else {}
        self.engine.update(model_of(self.shape, self.weights), restart=True, **apart)
        for sample in [sample for asked in self.asked for sample in asked.samples if sample.done]:
            self.ended_by.setdefault(sample, older)
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

    def alone(self, asked: Asked, i: int) -> jaxkv.Request:
        """Returns what a sample gets of an engine that serves its request alone, with the weights of its time."""
        weights = self.ended_by.get(asked.samples[i], self.weights)
        return lone_samples(self.shape, asked.prompt, tuple(asked.fields.items()), weights)[i]

    def check(self) -> None:
        for asked in self.asked:
            for i, sample in enumerate(asked.samples):
                alone = self.alone(asked, i)
                assert sample.done and self.told.get(sample, []) == sample.tokens
                if sample.ended in ("cancelled", "error"):
                    assert sample.ended == "cancelled" or self.had_pins
                    # What might have begun a stop string is handed out at last.
                    assert sample.tokens == alone.output[: len(sample.tokens)], (sample, sample.tokens, alone.output)
                else:
                    assert sample.tokens == alone.tokens, (sample, sample.tokens, alone.tokens)
                    for name in ("ended", "stop_token", "text"):
                        assert getattr(sample, name) == getattr(alone, name), (name, sample, getattr(sample, name))
                assert_same_scores(sample.logprobs, alone.output_logprobs[: len(sample.tokens)])
            first = asked.samples[0]
            if self.shape.is_scored and first.ended not in ("cancelled", "error"):
                assert_same_scores(first.prompt_top_logprobs, self.alone(asked, 0).prompt_top_logprobs)
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
