"""Beam search and samples of a prompt: what a list of all continuations says, with blocks shared and given back."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, Checksum, weight
from nightly import NIGHTLY

import jaxkv
from jaxkv.testing import poison

VOCAB, STATES = 5, 61
LOGITS = np.random.default_rng(0).normal(size=(STATES, VOCAB)).astype(np.float32) * 2
EOS = 3


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiny(Checksum):
    """Logits that depend on all that a row holds."""

    windows: tuple[int | None, ...] = (None,)

    def __call__(self, tokens, *, cache):
        position = jaxkv.positions(cache, tokens.shape)
        k, v = (x.astype(jnp.float32)[..., None, None] for x in (tokens, position))
        cache = jaxkv.write(cache, k, v, layer=0)
        rows, places = jnp.arange(cache.config.max_seqs)[:, None], jnp.arange(LONGEST)[None]
        k, v = (x[..., 0, 0].astype(jnp.int32) for x in cache.read(0, rows, places))
        seen = places <= position[:, -1:]
        total = jnp.sum(jnp.where(seen, (k + 1) * weight(0, v), 0), axis=1, dtype=jnp.int32)
        return jnp.asarray(LOGITS)[total % STATES][:, None], cache


def log_probabilities(tokens):
    total = sum((token + 1) * int(weight(0, p)) for p, token in enumerate(tokens))
    logits = LOGITS[total % STATES].astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def naive(prompt, beams, count, eos):
    """Every continuation from scratch."""
    kept = [(0.0, [], False)]
    for _ in range(count):
        found = []
        for score, tokens, ended in kept:
            if ended:
                found.append((score, tokens, True))
                continue
            for token, gain in enumerate(log_probabilities(prompt + tokens)):
                found.append((score + gain, [*tokens, token], token == eos))
        kept = sorted(found, key=lambda one: -one[0])[:beams]
    return [(tokens, score) for score, tokens, _ in kept]


def search(beams, prompts, count, eos, **fields):
    rows = beams * len(prompts)
    sizes = dict(layers=Tiny().layer_configs, max_seqs=rows, max_seq_len=LONGEST, block_size=3, dtype="float32")
    cache = jaxkv.init(jaxkv.CacheConfig(**sizes | {"num_blocks": rows * 16} | fields))
    tokens = np.zeros((rows, max(map(len, prompts))), np.int32)
    lengths = np.zeros(rows, np.int32)
    for p, prompt in enumerate(prompts):
        lengths[p * beams], tokens[p * beams, : len(prompt)] = len(prompt), prompt

    @jax.jit
    def run(cache, tokens, lengths):
        cache = jaxkv.extend(cache, lengths)
        at = jnp.maximum(lengths - 1, 0)
        position, k = jaxkv.positions(cache, tokens.shape), tokens.astype(jnp.float32)[..., None, None]
        cache = poison(jaxkv.write(cache, k, position.astype(jnp.float32)[..., None, None], layer=0))
        known = jnp.where(jnp.arange(tokens.shape[1])[None] <= at[:, None], (tokens + 1) * weight(0, position), 0)
        logits = jnp.asarray(LOGITS)[known.sum(axis=1) % STATES]
        logits = jnp.where(lengths[:, None] > 0, logits, jnp.nan)  # of rows without a prompt nothing is read
        return jaxkv.beam_search(Tiny(), cache, logits, beams=beams, max_new_tokens=count, eos=eos)

    found, cache = run(cache, tokens, lengths)
    assert run._cache_size() == 1
    return found, cache


@pytest.mark.parametrize("beams, eos", [(4, EOS), *[(6, None)] * NIGHTLY])
def test_beams_are_those_of_a_search_from_scratch(beams, eos):
    prompts = [[1, 2, 4, 0, 1, 1, 2], [3], [0, 4, 4, 2]]
    found, cache = search(beams, prompts, 9, eos)
    jaxkv.check(cache)
    jaxkv.check_invariants(cache)
    keys, lengths = np.asarray(cache.combined(0))[:, 0, 0, :, 0].astype(int), cache.lengths.tolist()
    for p, prompt in enumerate(prompts):
        for b, (tokens, score) in enumerate(naive(prompt, beams, 9, eos)):
            got = found.tokens[p, b].tolist()
            assert got == tokens + [-1] * (9 - len(tokens))
            assert math.isclose(found.scores[p, b], score, abs_tol=1e-4)
            row = p * beams + b
            assert keys[row, : lengths[row]].tolist() == prompt + tokens
    if eos is not None:
        assert any(token == eos for token in np.ravel(found.tokens)), "none has ended"
    blocks = np.asarray(cache.tables[0].tables)
    assert all(len({int(blocks[b, c]) for b in range(beams)}) == 1 for c in range(2)), "the prompt is not shared"
    assert cache.blocks_in_use == len(np.unique(blocks[blocks != 0]))
    assert jaxkv.free(cache, list(range(beams * 3))).blocks_in_use == 0


def test_fewer_continuations_than_beams():
    found, cache = search(7, [[2, 2]], 1, None)
    expected = naive([2, 2], 7, 1, None)
    assert len(expected) == VOCAB and found.tokens[0, :, 0].tolist() == [t[0] for t, _ in expected] + [-1, -1]
    assert jnp.isneginf(found.scores[0, VOCAB:]).all() and cache.lengths[:VOCAB].tolist() == [3] * VOCAB


def test_too_few_blocks_are_marked():
    _, cache = search(4, [[1, 2, 3, 4]], 9, None, num_blocks=5)
    assert cache.failed.any()
    with pytest.raises(jaxkv.OutOfBlocks):
        jaxkv.check(cache)


def test_what_does_not_fit_is_refused():
    cache = jaxkv.init(jaxkv.CacheConfig(layers=Tiny().layer_configs, max_seqs=4, max_seq_len=8, num_blocks=4))
    with pytest.raises(ValueError, match="The cache must have 3 rows for each prompt, but it has 4"):
        jaxkv.beam_search(Tiny(), cache, jnp.zeros((4, 5)), beams=3, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"logits must be f32\[4, V\], .* not float32\[2, 5\]."):
        jaxkv.beam_search(Tiny(), cache, jnp.zeros((2, 5)), beams=2, max_new_tokens=2)
    for said, wrong in (
        ("model must be an object to call", {"model": None}),
        (r"cache must be a Cache, as jaxkv\.init makes one", {"cache": None}),
        ("logits must be an array of numbers, not None", {"logits": None}),
        (r"logits must be f32\[4, V\], .* not int32\[4, 5\]", {"logits": jnp.zeros((4, 5), jnp.int32)}),
        (rf"logits must be f32\[4, {VOCAB}\], as the model makes them, not of 3", {"logits": jnp.zeros((4, 3))}),
    ):
        given = {"model": Tiny(), "cache": cache, "logits": jnp.zeros((4, VOCAB))}
        with pytest.raises(ValueError, match=said):
            jaxkv.beam_search(**given | wrong, beams=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="beams must be"):
        jaxkv.beam_search(Tiny(), cache, jnp.zeros((4, 5)), beams=0, max_new_tokens=2)


SMALL = {"max_seqs": 6, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 60, "step_tokens": 16}


def test_samples_of_each_prompt_share_its_blocks():
    prompts, count, model = [[1, 2, 3, 4, 5, 6], [9, 8, 7]], 4, Checksum((None,))
    engine = jaxkv.Engine(model, **SMALL)
    outputs = {i: [] for i in range(6)}
    for number, token in engine.stream(prompts, count, 0.5, n=3):
        outputs[number].append(token)
    assert engine.tokens == sum(len(prompt) - 1 + 3 * count for prompt in prompts)  # each prompt is computed once
    assert engine.cache.is_empty
    requests = [engine.submit(prompt, count, 0.5, n=3, logprobs=1) for prompt in prompts]
    list(engine.run())
    assert [s.tokens for r in requests for s in r.samples] == list(outputs.values())  # of equal numbers
    request = engine.submit(prompts[0], count, 0.25, n=3, logprobs=1)
    list(engine.run())
    means = [np.mean([one[t] for t, one in zip(s.tokens, s.logprobs, strict=True)]) for s in request.samples]
    assert len(set(means)) > 1
    assert request.best is request.samples[int(np.argmax(means))]
    first, *others = outputs.values()
    several = jaxkv.generate(model, prompts, count, 0.5, n=3, **SMALL)
    assert several == [[first, *others[:2]], others[2:]]
    with pytest.raises(ValueError, match="submit the request with logprobs=0"):
        engine.submit([1], 1).best  # noqa: B018
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        engine.stream(prompts, n=0)
