"""Log-probabilities of prompts and of chosen tokens: those of a dense pass, in whatever way they are computed."""

import jax
import numpy as np
import pytest
from compiled import compiled
from dense_logprobs import make_logprobs
from flax import nnx
from nightly import NIGHTLY

import jaxkv
from jaxkv.models import Decoder, DecoderConfig, Rope

WINDOWS = (None, 9)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
SIZES = dict(max_seqs=3, max_seq_len=64, block_size=4, step_tokens=12)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 11], [42]]
WAYS = {
    "plain": {}, "prefix cache": {"prefix_cache": True}, "guesses": {"draft": "ngram"},
    "several steps": {"steps_per_dispatch": 3}, "few blocks, swapped": {"num_blocks": 20, "swap": "always"},
    "a tree of guesses": {"draft": "ngram", "draft_branches": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        family="llama", num_kv_heads=1, head_dim=8, windows=WINDOWS, num_heads=2, embed_dim=16, mlp_dim=24,
        vocab_size=61, max_seq_len=64, ropes=(Rope(),) * len(WINDOWS), attention_scale=0.4,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def all_logprobs(model):
    """The log-probabilities of all tokens behind each token, of a forward pass without a cache."""
    return make_logprobs(model, 64)


@pytest.fixture(scope="module")
def dense(all_logprobs):
    """The log-probability of each token but the first."""
    return lambda tokens: all_logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.fixture(scope="module")
def check_likeliest(all_logprobs):
    """Asserts that a request has the likeliest tokens at each position of its prompt, and the prompt's own."""

    def check(request, count):
        found, wanted = request.prompt_top_logprobs, all_logprobs(request.prompt)
        assert len(found) == len(request.prompt) - 1
        for told, token, own, row in zip(found, request.prompt[1:], request.prompt_logprobs, wanted, strict=False):
            best = np.argsort(-row, kind="stable")[:count].tolist()
            assert set(told) == {*best, token} and told[token] == own
            np.testing.assert_allclose([told[t] for t in (*best, token)], row[[*best, token]], atol=1e-5)
            assert max(told.values()) >= own and (token != row.argmax() or max(told.values()) == own)

    return check


@pytest.mark.timeout(1500 if NIGHTLY else 300)
@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["prefix cache"])
def test_scores_are_those_of_a_dense_pass(model, dense, way):
    with jaxkv.Engine(model, **SIZES, **WAYS[way]) as engine:
        for _ in range(2):  # the second time a prefix cache has all of it
            options = dict(logprobs=0, prompt_logprobs=True)
            requests = [engine.submit(prompt, 9, n=1 + i % 2, **options) for i, prompt in enumerate(PROMPTS)]
            drawn = PROMPTS if NIGHTLY else []  # programs of their own
            requests += [engine.submit(prompt, 9, 1.0, top_k=20, **options) for prompt in drawn]
            others = [engine.submit(PROMPTS[0], 6), engine.submit(PROMPTS[2], 6, logprobs=3)]
            assert requests[0].prompt_logprobs.shape == (0,), "nothing is known yet"
            list(engine.run())
            for request in requests:
                for sample in request.samples:
                    wanted = dense([*sample.prompt, *sample.tokens])
                    at = len(sample.prompt) - 1
                    assert sample.token_logprobs.dtype == request.prompt_logprobs.dtype == np.float32
                    assert all(found.keys() == {t} for found, t in zip(sample.logprobs, sample.tokens, strict=True))
                    np.testing.assert_allclose(sample.token_logprobs, wanted[at:], atol=1e-5)
                    np.testing.assert_allclose(request.prompt_logprobs, wanted[:at], atol=1e-5)
            assert others[0].logprobs == [] and others[0].prompt_logprobs is None
            assert others[0].token_logprobs.shape == (0,) and all(len(found) >= 3 for found in others[1].logprobs)


def test_scoring_alone_gives_no_tokens(model, dense, tmp_path):
    with jaxkv.Engine(model, **SIZES, prefix_cache=True) as engine:
        requests = [engine.submit(prompt, 0, prompt_logprobs=True) for prompt in PROMPTS]
        assert not any(r.done for r in requests)
        pairs = list(engine.run())
        assert pairs.count((requests[0], None)) == 1 and len(pairs) == len(requests)
        for request in requests:
            assert request.tokens == [] and request.ended == "length"
            np.testing.assert_allclose(request.prompt_logprobs, dense(request.prompt), atol=1e-5)
        assert engine.submit(PROMPTS[0], 3).result() and engine.stats()["tokens_saved"] > 0, "what was scored is found"
        assert list(engine.submit(PROMPTS[0], 0, prompt_logprobs=True)) == []
        for bad, says in (
            (dict(max_new_tokens=0), "max_new_tokens must be at least 1, not 0"),
            (dict(max_new_tokens=-1, prompt_logprobs=True), "max_new_tokens must be at least 0"),
            (dict(prompt_logprobs=-1), "prompt_logprobs must be at least 0"),
            (dict(prompt_logprobs=62), "prompt_logprobs must be at most 61, not 62"),
            (dict(max_new_tokens=0, prompt_logprobs=None), "max_new_tokens must be at least 1, not 0"),
            (dict(logprobs=-1), "logprobs must be at least 0"),
        ):
            with pytest.raises(ValueError, match=says):
                engine.submit(PROMPTS[0], **bad)
        # Saved in the middle of a prompt.
        request = engine.submit([*PROMPTS[0], *PROMPTS[0]], 2, logprobs=0, n=2, prompt_logprobs=True)
        engine.step()
        engine.step()
        assert 0 < len(request.prompt_logprobs) < 35
        engine.save(tmp_path / "engine.safetensors")
        wanted = dense([*request.prompt, *request.result()])
        for sample in (request, *request.samples):
            np.testing.assert_allclose(sample.prompt_logprobs, wanted[:35], atol=1e-5)
    with jaxkv.Engine(model, **SIZES) as engine:
        again, other = engine.load(tmp_path / "engine.safetensors")
        again.result()
        np.testing.assert_allclose(again.prompt_logprobs, wanted[:35], atol=1e-5)
        np.testing.assert_allclose(again.token_logprobs, wanted[35:], atol=1e-5)
        other.result()
        np.testing.assert_allclose(other.prompt_logprobs, wanted[:35], atol=1e-5)
    with jaxkv.Engine(model, **SIZES) as engine:  # saved when all scores were known
        request = engine.submit(PROMPTS[0], 4, n=2, prompt_logprobs=True)
        while len(request.prompt_logprobs) < len(PROMPTS[0]) - 1:
            engine.step()
        engine.save(tmp_path / "later.safetensors")
    with jaxkv.Engine(model, **SIZES) as engine:
        for sample in engine.load(tmp_path / "later.safetensors"):
            np.testing.assert_allclose(sample.prompt_logprobs, dense(request.prompt), atol=1e-5)


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_sample_that_is_cancelled_leaves_its_scores_to_the_others(model, dense, tmp_path, is_saved):
    """What is known of the prompt stays, and the next sample computes the rest, though a prefix cache has it."""
    with jaxkv.Engine(model, **SIZES, prefix_cache=True) as engine:
        request = engine.submit([*PROMPTS[0], *PROMPTS[0]], 2, n=3, prompt_logprobs=True)
        engine.step()
        engine.step()
        assert 0 < len(request.prompt_logprobs) < 35
        request.samples[0].cancel()
        engine.save(tmp_path / "engine.safetensors")
        samples = engine.load(tmp_path / "engine.safetensors") if is_saved and not request.cancel() else request.samples
        list(engine.run())
        for sample in samples[-2:]:
            assert sample.ended == "length"
            np.testing.assert_allclose(sample.prompt_logprobs, dense(request.prompt), atol=1e-5)


def test_scores_begin_anew_with_other_weights(model, dense):
    with jaxkv.Engine(model, **SIZES) as engine:
        request = engine.submit([*PROMPTS[0], *PROMPTS[0]], 2, prompt_logprobs=True)
        engine.step()
        engine.step()
        engine.update(jax.tree.map(lambda x: x, model), restart=True)
        assert not len(request.prompt_logprobs)
        request.result()
        np.testing.assert_allclose(request.prompt_logprobs, dense(request.prompt), atol=1e-5)
        # So they do for samples that go on where the first one has ended.
        request = engine.submit(PROMPTS[0], 9, n=2, prompt_logprobs=True)
        while len(request.samples[1].tokens) < 2:
            engine.step()
        request.samples[0].cancel()
        engine.update(jax.tree.map(lambda x: x, model), restart=True)
        assert len(request.samples[1].prompt_logprobs) == 0
        list(engine.run())
        np.testing.assert_allclose(request.samples[1].prompt_logprobs, dense(request.prompt), atol=1e-5)


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["plain", "prefix cache"])
def test_the_likeliest_tokens_of_a_prompt(model, dense, check_likeliest, way):
    """Beside requests that want others, fewer or none; the model's greedy continuation is the likeliest by itself."""
    with jaxkv.Engine(model, **SIZES, **WAYS[way]) as engine:
        greedy = [*PROMPTS[1], *engine.submit(PROMPTS[1], 11).result()]
        for _ in range(2):  # the second time a prefix cache has all of it
            wanted = [(PROMPTS[0], 3, 2), (greedy, 1, 1), (PROMPTS[2], 0, 1), (PROMPTS[3], 4, 1), (PROMPTS[0], 61, 1)]
            requests = [engine.submit(prompt, 2, n=n, prompt_logprobs=count) for prompt, count, n in wanted]
            plain, other = engine.submit(PROMPTS[0], 4, prompt_logprobs=True), engine.submit(PROMPTS[2], 4, logprobs=2)
            assert requests[0].prompt_top_logprobs == []
            list(engine.run())
            for request, (_, count, _) in zip(requests, wanted, strict=True):
                for sample in request.samples:
                    check_likeliest(sample, count)
            check_likeliest(plain, 0)
            assert plain.prompt_logprobs == pytest.approx(dense(PROMPTS[0]), abs=1e-5)
            behind = zip(requests[1].prompt_top_logprobs, greedy[1:], strict=True)
            assert all(max(found, key=found.get) == token for found, token in [*behind][len(PROMPTS[1]) - 1 :])
            assert other.prompt_top_logprobs is None and all(len(found) >= 2 for found in other.logprobs)


def test_the_likeliest_tokens_are_saved(model, check_likeliest, tmp_path):
    """In the middle of a prompt, and behind it; they begin anew with other weights."""
    prompt, path = [*PROMPTS[0], *PROMPTS[0]], tmp_path / "engine.safetensors"
    with jaxkv.Engine(model, **SIZES) as engine:
        request = engine.submit(prompt, 6, n=2, prompt_logprobs=2)
        seen = set()
        while not request.done:
            engine.step()
            if 0 < len(request.prompt_logprobs) not in seen:
                seen.add(len(request.prompt_logprobs))
                engine.save(path)
                with jaxkv.Engine(model, **SIZES) as other:
                    again = other.load(path)
                    assert len(again[0].prompt_top_logprobs) == len(request.prompt_logprobs)
                    list(other.run())
                    check_likeliest(again[0], 2)
                    if len(request.prompt_logprobs) == 35:
                        check_likeliest(again[1], 2)
        assert len(seen) > 2
        check_likeliest(request, 2)
        request = engine.submit(prompt, 2, prompt_logprobs=2)
        engine.step()
        engine.step()
        engine.update(jax.tree.map(lambda x: x, model), restart=True)
        assert request.prompt_top_logprobs == []
        request.result()
        check_likeliest(request, 2)


def test_who_asks_alike_has_the_same_programs(model):
    """Of several numbers of likeliest tokens up to a power of 2 none is a program of its own."""
    with jaxkv.Engine(model, **SIZES) as engine:
        engine.submit(PROMPTS[0], 2, prompt_logprobs=4).result()
        assert not compiled(lambda: [engine.submit(PROMPTS[0], 2, prompt_logprobs=n).result() for n in (3, 4)])
        assert compiled(lambda: engine.submit(PROMPTS[0], 2, prompt_logprobs=5).result())
