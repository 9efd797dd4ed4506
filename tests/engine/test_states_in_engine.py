"""An engine with a model of recurrent layers: each request gets the tokens of a lone row, whatever its state went
through."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, Placed, continuation, finish
from hybrid_model import SEEN, Hybrid
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from nightly import NIGHTLY

import jaxkv

TIGHT = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 18, "step_tokens": 13}
ENGINES = {
    "swapped, several steps a dispatch": {"swap": "always", "steps_per_dispatch": 3},
    "some guesses wrong": {"draft": Hybrid(wrong=3), "draft_tokens": 3, "swap": "always"},
}
if NIGHTLY:
    ENGINES |= {
        "computed again": {"swap": "never"},
        "n-grams": {"draft": "ngram", "draft_tokens": 3},
        "some guesses wrong, states by hand": {"draft": Hybrid(wrong=2), "draft_tokens": 3, "swap": "never"},
    }


skip_by_day = pytest.mark.skipif(not NIGHTLY, reason="a minute of compiling")


@functools.cache
def make_engine(name):
    return jaxkv.Engine(Hybrid(by_hand="by hand" in name), **TIGHT | ENGINES[name])


def drain(engine, requests):
    finish(engine, requests, SEEN)
    jaxkv.check_invariants(engine.cache)
    assert engine.cache.is_empty and not engine.cache.blocks_in_use
    assert not np.asarray(engine.cache.state_slots.slots).any()


def submit_some(engine, draw, count):
    for _ in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 2, 9, 25]))]
        most = draw.randint(1, 14)
        for sample in engine.submit(prompt, most, n=draw.choice([1, 1, 3])).samples:
            yield sample, prompt, most


@pytest.mark.parametrize("name", ENGINES)
def test_each_request_gets_the_tokens_of_a_lone_row(name):
    draw, engine = random.Random(name), make_engine(name)
    for _ in range(2):
        requests = list(submit_some(engine, draw, 7))
        for _ in range(draw.randint(2, 9)):
            engine.step()
        draw.choice(requests)[0].cancel()
        drain(engine, requests)
    stats = engine.stats()
    if "some" in name:
        assert 0.2 < stats["acceptance"] < 0.9
    else:
        assert stats["preemptions"]


@functools.cache
@pytest.mark.parametrize("prefix_cache", [False, True] if NIGHTLY else [False])
def test_a_row_that_is_computed_again_has_no_guesses_of_before(prefix_cache):
    """It lacks many tokens when it comes back; a step of guesses keeps no more of a row than one and its guesses."""
    draw = random.Random(0)
    engine = jaxkv.Engine(
        Hybrid(), draft=Hybrid(wrong=9), draft_tokens=4, swap="never", prefix_cache=prefix_cache,
        max_seqs=4, max_seq_len=LONGEST, block_size=4, num_blocks=14, step_tokens=24,
    )  # fmt: skip
    requests = []
    for _ in range(14):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(3, 16))]
        most = LONGEST - len(prompt) - 1
        requests.append((engine.submit(prompt, most, keep_prefix=False), prompt, most))
        engine.step()
    drain(engine, requests)
    assert engine.set_back > 20 and engine.stats()["acceptance"] > 0.5


def place(*devices, axis):
    mesh = Mesh(np.array([jax.devices()[n] for n in devices]), (axis,))
    return Placed(jax.device_put(jnp.zeros(()), NamedSharding(mesh, PartitionSpec())), Hybrid())


@skip_by_day
def test_rows_lie_on_several_devices():
    engine = jaxkv.Engine(place(0, 1, axis="data"), **TIGHT | {"max_seqs": 4, "num_blocks": 34})
    requests = list(submit_some(engine, random.Random(0), 6))
    finish(engine, requests, SEEN)
    for shard in engine.cache.shards:
        jaxkv.check_invariants(shard)


@skip_by_day
def test_prompts_are_computed_on_other_devices():
    engine = jaxkv.Engine(place(0, axis="model"), prefill=place(1, axis="model"), **TIGHT | {"swap": "always"})
    drain(engine, list(submit_some(engine, random.Random(1), 6)))
    assert engine._prefill.sent


def test_an_engine_is_saved_with_its_states(tmp_path):
    engine, path = make_engine("swapped, several steps a dispatch"), tmp_path / "engine.safetensors"
    requests = list(submit_some(engine, random.Random(2), 5))
    for _ in range(4):
        engine.step()
    assert any(s.cached for s in engine._core.scheduler.running)
    engine.save(path)
    other = jaxkv.Engine(Hybrid(), **TIGHT | {"max_seqs": 2, "block_size": 5, "num_blocks": 10})
    loaded = {request.number: request for request in other.load(path)}
    before = other.tokens
    drain(other, [])
    assert other.tokens - before < sum(len(p) + n for _, p, n in requests)  # saved rows are not computed again
    for request, prompt, most in requests:
        found = loaded[request.number].tokens if not request.done else request.tokens
        assert found == continuation(SEEN, prompt, most, None)
    drain(engine, requests)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Stepped(Hybrid):
    """A model that would take trees."""

    def __call__(self, tokens, *, cache, logits_at, step=None):
        return super().__call__(tokens, cache=cache, logits_at=logits_at)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Windowed(Hybrid):
    """A draft that would have to be rolled back in all of its layers."""

    @property
    def layer_configs(self):
        attention, states = super().layer_configs
        return dataclasses.replace(attention, window=7), states


REFUSED = {
    "takes one token after another": (Stepped(), {"draft": "ngram", "draft_branches": 2}),
    "draft has layers with a window and layers with a state": (Hybrid(), {"draft": Windowed()}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_states_cannot_do_is_refused(message):
    model, fields = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        jaxkv.Engine(model, **TIGHT | fields)


@skip_by_day
def test_prompts_are_scored_beside_guesses():
    """The second run of a step that guessed has other tokens than those that are scored."""
    engine = jaxkv.Engine(Hybrid(), **TIGHT, draft=Hybrid(wrong=3), draft_tokens=3)
    other = engine.submit([5, 6, 7], 12)
    for _ in range(3):
        engine.step()
    prompt = [draw % VOCAB for draw in range(3, 200, 11)]
    request = engine.submit(prompt, 3, prompt_logprobs=True)
    list(engine.run())
    assert other.tokens == continuation(SEEN, [5, 6, 7], 12, None)
    right = [continuation(SEEN, prompt[:i], 1, None)[0] == prompt[i] for i in range(1, len(prompt))]
    wanted = np.where(right, 1.0, 0.0) - np.log(np.e + VOCAB - 1)
    np.testing.assert_allclose(request.prompt_logprobs, wanted, atol=1e-5)
    assert request.tokens == continuation(SEEN, prompt, 3, None)


@skip_by_day
@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_given_back_and_taken_again(keep):
    engine = jaxkv.Engine(Hybrid(), **TIGHT, prefix_cache=True, spill_bytes=10**6)
    draw = random.Random(1)
    requests = list(submit_some(engine, draw, 5))
    for turn in range(3):
        for _ in range(3):
            engine.step()
        engine.release(keep=keep)
        engine.restore()
        if turn == 1:
            engine.update(Hybrid(), restart=True)
            for request, _, _ in requests:
                assert not request.tokens or request.done
    list(engine.run())
    for request, prompt, most in requests:
        assert request.tokens == continuation(SEEN, prompt, most, None)
    jaxkv.check_invariants(engine.cache)
    engine.prefix.check_invariants(engine.cache)
