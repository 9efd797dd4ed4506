"""Models whose layers store entries of several tokens, through an engine: tokens are those of whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nightly import NIGHTLY
from support import fixtures

import jaxkv

SIZES = dict(max_seqs=4, max_seq_len=64, block_size=8)
COUNT = 16
WAYS = {
    "plain": {},
    "prefix cache, pieces of prompts": dict(prefix_cache=True, step_tokens=8),
    "few blocks": dict(prefix_cache=True, num_blocks=16, step_tokens=8),
    "swapped": dict(prefix_cache=True, num_blocks=12, step_tokens=8, swap="always", spill_bytes=1e6),
    "guesses": dict(draft="ngram", draft_tokens=3, prefix_cache=True, num_blocks=18),
    "a draft model": dict(draft="itself", draft_tokens=3),
    "several steps": dict(steps_per_dispatch=4, prefix_cache=True),
    "deterministic": dict(deterministic=True, step_tokens=8),
}


@functools.cache
def load():
    return jaxkv.models.load(fixtures.DATA / "deepseek_v4")


@functools.cache
def list_prompts():
    """Lengths around entries and blocks, and prompts that begin as others do."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 96, n).tolist() for n in (1, 3, 4, 7, 8, 9, 31)]
    return [*prompts, [*prompts[-1][:24], 5, 6], [*prompts[-1][:16], 7]]


@functools.cache
def continue_densely():
    run = jax.jit(lambda model, tokens: model(tokens)[0])
    rows = np.zeros((len(list_prompts()), 48), np.int32)
    ends = np.array([len(prompt) for prompt in list_prompts()])
    for row, prompt in zip(rows, list_prompts(), strict=True):
        row[: len(prompt)] = prompt
    for _ in range(COUNT):
        best = np.asarray(jnp.argmax(run(load(), rows), axis=-1))
        rows[np.arange(len(rows)), ends] = best[np.arange(len(rows)), ends - 1]
        ends += 1
    return [row[end - COUNT : end].tolist() for row, end in zip(rows, ends.tolist(), strict=True)]


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["guesses"])
def test_tokens_are_those_of_whole_sequences(way):
    options = SIZES | WAYS[way]
    engine = jaxkv.Engine(load(), **options | ({"draft": load()} if options.get("draft") == "itself" else {}))
    for _ in range(2):
        requests = [engine.submit(prompt, COUNT) for prompt in list_prompts()]
        for _ in engine.run():
            pass
        assert [request.tokens for request in requests] == continue_densely()
    jaxkv.check_invariants(engine.cache)
    assert engine.stats().get("hits", 1) and (way != "swapped" or engine.stats()["swapped_out"])


def test_draft_trees_are_refused():
    with pytest.raises(ValueError, match="draft_branches make a tree"):
        jaxkv.Engine(load(), **SIZES, draft="ngram", draft_branches=2)
