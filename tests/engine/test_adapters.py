"""Requests of several adapters in one batch: each gets what its own makes of its tokens, and shares with its own."""

import jax
import jax.numpy as jnp
import pytest
from adapted_model import adapted
from checksum_model import LONGEST, VOCAB, Checksum, Several, is_seen, weight
from hybrid_model import Hybrid
from nightly import NIGHTLY

import jaxkv

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 60, "step_tokens": 7}
PROMPT = list(range(3, 17))


Adapted = adapted(Checksum)


def continuation(prompt, count, adapter, windows=WINDOWS):
    tokens = list(prompt)
    for end in range(len(prompt), len(prompt) + count):
        total = sum(
            (tokens[p] + 7 * adapter + 1) * int(weight(layer, p))
            for layer, window in enumerate(windows)
            for p in range(end)
            if is_seen(p, end, window)
        )
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]


WAYS = {
    "plain": {},
    "several steps": {"steps_per_dispatch": 3},
    "prefix cache": {"prefix_cache": True},
    "swapped": {"num_blocks": 19, "swap": "always"},
    "prefill apart": {"prefill": Adapted(WINDOWS)},
}


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["prefix cache", "prefill apart"])
def test_each_request_has_its_own_adapter(way):
    engine = jaxkv.Engine(Adapted(WINDOWS), **ROOM | WAYS[way])
    requests = [engine.submit(PROMPT, 12, adapter=adapter, n=n) for adapter, n in ((0, 1), (1, 2), (2, 1), (1, 1))]
    list(engine.run())
    for request in requests:
        for sample in request.samples:
            assert sample.tokens == continuation(PROMPT, 12, request.params.adapter), way
    assert len({tuple(request.tokens) for request in requests}) == 3
    assert way != "swapped" or engine.stats()["swapped_out"]


def test_requests_of_one_adapter_share_blocks():
    engine = jaxkv.Engine(Adapted(WINDOWS), **ROOM, prefix_cache=True)
    for adapter in (0, 1, 0, 1, 1):
        request = engine.submit(PROMPT, 5, adapter=adapter)
        list(engine.run())
        assert request.tokens == continuation(PROMPT, 5, adapter)
    assert engine.stats()["hits"] == 3
    assert [bool(engine.prefix.known(PROMPT, adapter=x)) for x in (None, "1", "2")] == [True, True, False]


@pytest.mark.parametrize("model", [adapted(Several)(WINDOWS), adapted(Hybrid)()], ids=["windows", "states"])
def test_a_draft_has_the_adapter_of_its_row(model):
    """The draft is the model itself, so that all it drafts is accepted, also where a row's last request had others."""
    engine = jaxkv.Engine(model, **ROOM | {"max_seqs": 1, "step_tokens": 24}, draft=model)
    for adapter in (1, 2, 0, 2):
        request = engine.submit(PROMPT, 12, adapter=adapter)
        list(engine.run())
        assert request.tokens == continuation(PROMPT, 12, adapter, model.windows)
    assert engine.stats()["acceptance"] == 1


def test_an_adapter_goes_with_a_saved_engine(tmp_path):
    engine = jaxkv.Engine(Adapted(WINDOWS), **ROOM)
    engine.submit(PROMPT, 9, adapter=2)
    engine.submit(PROMPT, 9, adapter=1, n=2)
    for _ in range(4):
        engine.step()
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(Adapted(WINDOWS), **ROOM)
    requests = other.load(tmp_path / "engine")
    list(other.run())
    assert [request.params.adapter for request in requests] == [2, 1, 1]
    assert all(request.tokens == continuation(PROMPT, 9, request.params.adapter) for request in requests)


def test_requests_of_one_prompt_that_wait_in_a_file_are_no_samples_of_one(tmp_path):
    """A row of layers that keep less is forked while its prompt is computed; of another adapter it says nothing."""
    windows = (7,)
    engine = jaxkv.Engine(Adapted(windows), **ROOM)
    for adapter, salt in ((2, None), (1, None), (1, "a"), (1, None)):
        engine.submit(PROMPT, 5, adapter=adapter, salt=salt)
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(Adapted(windows), **ROOM | {"max_seqs": 4})
    requests = other.load(tmp_path / "engine")
    list(other.run())
    assert [request.tokens for request in requests] == [continuation(PROMPT, 5, x, windows) for x in (2, 1, 1, 1)]
    assert other.tokens == 3 * (len(PROMPT) - 1) + 4 * 5, "of one adapter and one tenant it is computed once"


def test_a_hook_is_told_of_adapters():
    def hook(logits, rows):
        return jax.nn.one_hot((rows.adapters + rows.lengths) % VOCAB, VOCAB)

    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    requests = [engine.submit(PROMPT, 3, adapter=adapter) for adapter in (0, 5)]
    list(engine.run())
    assert [request.tokens for request in requests] == [[14, 15, 16], [19, 20, 21]]


def test_beams_have_the_adapter_of_their_prompt():
    """The only beam is the greedy continuation; rows behind a prompt's have whatever adapter."""
    model, sizes = adapted(Several)(WINDOWS), {"max_seqs": 4, "max_seq_len": LONGEST, "block_size": 3}
    adapters, counts = jnp.array([2, 0, 1, 7]), jnp.array([len(PROMPT), 0] * 2)

    @jax.jit
    def search(cache):
        cache, tokens = jaxkv.extend(cache, counts), jnp.tile(jnp.array(PROMPT), (4, 1))
        logits, cache = model(tokens, cache=cache, logits_at=jnp.maximum(counts - 1, 0), adapters=adapters)
        return jaxkv.beam_search(model, cache, logits, beams=2, max_new_tokens=6, adapters=adapters)

    found, cache = search(jaxkv.init(jaxkv.CacheConfig.from_model(model, **sizes, num_blocks=60)))
    jaxkv.check(cache)
    assert found.tokens[:, 0].tolist() == [continuation(PROMPT, 6, adapter) for adapter in (2, 1)]
    logits = jnp.zeros((4, VOCAB))
    with pytest.raises(ValueError, match=r"adapters must have one integer for each of the 4 rows, .* \(3,\)"):
        jaxkv.beam_search(model, cache, logits, beams=2, max_new_tokens=6, adapters=adapters[:3])
    with pytest.raises(ValueError, match="adapters= are for a model whose call has an argument adapters, and Several"):
        jaxkv.beam_search(Several(WINDOWS), cache, logits, beams=2, max_new_tokens=6, adapters=adapters)


def test_adapters_that_mean_nothing_are_refused():
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM)
    with pytest.raises(ValueError, match="adapter= is for a model whose call has an argument adapters"):
        engine.submit(PROMPT, 3, adapter=1)
    assert engine.submit(PROMPT, 1, adapter=0) and not engine.is_idle
    engine = jaxkv.Engine(Adapted(WINDOWS), **ROOM)
    for adapter in (-1, "lora", 1.5, None, 2**31):
        with pytest.raises(ValueError, match="adapter must be"):
            engine.submit(PROMPT, 3, adapter=adapter)
    assert engine.is_idle
