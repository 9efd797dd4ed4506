"""Speculation changes no token: whoever guesses, greedy and sampled, while rows come, go and share blocks."""

import dataclasses
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, WINDOW, Several, Sum, assert_streams, continuation
from hybrid_model import Hybrid
from nightly import NIGHTLY

import jaxkv
from jaxkv._engine.programs.draft_model import ModelDrafter
from jaxkv._engine.requests.drafters import DraftTokens, NGrams

WINDOWS = (None, WINDOW)
TIGHT = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 18, "draft_tokens": 3}


ENGINES = {"some wrong, prefix cache": (Several(WINDOWS, wrong=3), {"prefix_cache": True, "spill_bytes": 1000})}
if NIGHTLY:
    ENGINES["all guesses right, swapped"] = (Several(WINDOWS), {"swap": "always"})
    contiguous = {"layout": "contiguous", "num_blocks": None, "block_size": None}
    ENGINES["some wrong, contiguous"] = (Several(WINDOWS, wrong=2), contiguous)


@pytest.mark.parametrize("name", ENGINES)
def test_every_sequence_gets_what_it_would_alone(name):
    draft, fields = ENGINES[name]
    draw = random.Random(name)
    fields = {key: x for key, x in (TIGHT | fields).items() if x is not None}
    engine = jaxkv.Engine(Several(WINDOWS), draft=draft, **fields)
    known = [[draw.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for _ in range(8):
        prompts = []
        for _ in range(draw.randint(1, 7)):
            begin = draw.choice(known)[: draw.randint(0, 30)]
            prompts.append(begin + [draw.randrange(VOCAB) for _ in range(draw.randint(not begin, 8))])
        counts = [draw.randint(1, 14) for _ in prompts]
        eos = draw.choice([None, draw.randrange(VOCAB)])
        expected = [continuation(WINDOWS, *one, eos) for one in zip(prompts, counts, strict=True)]
        leave_after = draw.choice([None, None, draw.randint(1, 20)])
        assert_streams(engine, prompts, counts, expected, leave_after, eos=eos)
    acceptance = engine.stats()["acceptance"]
    assert acceptance == 1 if not draft.wrong else 0.1 < acceptance < 0.9


def test_the_cache_of_a_draft_with_windows_has_rows_that_kernels_read():
    """Its rows are one block each, as long as those of the engine and the guesses behind them: 51 tokens."""
    drafter = ModelDrafter(Several(WINDOWS), max_seqs=3, max_seq_len=LONGEST, step_tokens=16, count=3)
    assert drafter.config.contiguous and drafter.config.block_size == 64


def test_an_interrupt_anywhere_in_a_guess_loses_nothing(monkeypatch):
    engine = jaxkv.Engine(Several(WINDOWS), draft=Several(WINDOWS, wrong=3), **TIGHT)
    prompts = [[5, 6, 7], [8] * 9]
    requests = [engine.submit(prompt, 16) for prompt in prompts]
    drafter, calls = engine._core.drafter, []

    def cut_off(method):
        def call(*arguments):
            calls.append(method)
            if len(calls) % 4 == 3:
                raise KeyboardInterrupt
            out = method(*arguments)
            if len(calls) % 4 == 1 and len(calls) > 4:
                raise KeyboardInterrupt
            return out

        return call

    for name in ("guess", "_call"):
        monkeypatch.setattr(drafter, name, cut_off(getattr(drafter, name)))
    interrupts = 0
    while not all(request.done for request in requests):
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        assert interrupts < 100
    assert interrupts > 3
    assert [r.tokens for r in requests] == [continuation(WINDOWS, p, 16, None) for p in prompts]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Biased:
    """The same few tokens, with the same probabilities, whatever came before."""

    logits: tuple[float, ...]
    dtype: str = "float32"
    layer_configs = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=1),)

    def __call__(self, tokens, *, cache, logits_at):
        k = tokens.astype(jnp.float32)[..., None, None]
        cache = jaxkv.write(cache, k, k, layer=0)
        return jnp.broadcast_to(jnp.array(self.logits), (*logits_at.shape, len(self.logits))), cache


def test_what_is_sampled_has_the_models_distribution():
    """By a chi-squared test, with a draft that has another; and it is, token for token, what comes without guesses."""
    model, draft = Biased((0.0, 1.0, 2.0, 0.5)), Biased((1.0, 1.0, 1.0, 1.0))
    sizes = {"max_seqs": 8, "max_seq_len": 128, "num_blocks": 64, "seed": 3}
    engine = jaxkv.Engine(model, draft=draft, draft_tokens=2, **sizes)
    requests = [engine.submit([0], 120, temperature=1.5) for _ in range(8)]
    for _ in engine.run():
        pass
    drawn = np.bincount(np.concatenate([request.tokens for request in requests]), minlength=4)
    expected = np.asarray(jax.nn.softmax(jnp.array(model.logits) / 1.5)) * drawn.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom: 1 in 1000
    assert engine.stats()["acceptance"] > 0.4
    assert engine.steps < 120
    plain = jaxkv.Engine(model, **sizes)
    first = plain.submit([0], 120, temperature=1.5)
    for _ in plain.run():
        pass
    assert first.tokens == requests[0].tokens


def test_a_run_of_tokens_is_followed_by_what_followed_it_before():
    ngrams, text = NGrams(), list(b"one two, one three, one t")
    for end in range(5, len(text)):
        ngrams.guess(text[:end], 3)  # the index grows with the text
    assert ngrams.guess(text, 5) == NGrams().guess(text, 5) == DraftTokens.chain(list(b"hree,"))  # the last of equals
    assert bytes(NGrams().guess(list(b"to b, to b, to b, to c, to"), 3).tokens) == b" b,"  # what came more often
    assert bytes(NGrams().guess(list(b"a1 b2 c2 a"), 1).tokens) == b"1"  # the longest run decides
    changed = list(b"to b, " * 9 + b"to c, " * 5 + b"to")
    assert bytes(NGrams().guess(changed, 2).tokens) == b" c"  # of late
    assert NGrams().guess([1, 2, 3], 4) == DraftTokens([], []) == NGrams().guess([1], 4)
    assert NGrams().guess([7, 7, 7], 4) == DraftTokens.chain([7] * 4)


def test_a_tree_of_guesses_has_what_is_likeliest_to_come():
    text = list(b"one two, one three, one t")
    assert NGrams(3).guess(text, 9) == DraftTokens(list(b"hwroe,e ,"), [-1, -1, 0, 1, 2, 3, 4, 5, 6])
    assert NGrams(3).guess(text, 2) == DraftTokens(list(b"hw"), [-1, -1])
    likely = list(b"ab," * 6 + b"ac," + b"ab,a")
    assert NGrams(2).guess(likely, 4) == DraftTokens(list(b"b,ab"), [-1, 0, 1, 2])  # deep where it is sure


@pytest.mark.parametrize("swap", ["auto", *["always"] * NIGHTLY])
def test_a_tree_of_guesses_changes_no_token(swap):
    """Rows that come and go, a prefix cache, a window, and more in need of blocks than there are."""
    engine = jaxkv.Engine(
        Sum(WINDOWS), draft="ngram", draft_branches=4, **TIGHT | {"draft_tokens": 8}, prefix_cache=True, step_tokens=27,
        swap=swap,
    )  # fmt: skip
    draw = random.Random(0)
    prompts = [[draw.randrange(3) for _ in range(draw.choice([1, 4, 17]))] for _ in range(8)]
    requests = [engine.submit(prompt, 20 + i, logprobs=1) for i, prompt in enumerate(prompts)]
    for _ in engine.run():
        pass
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        tokens = list(prompt)
        for _ in range(20 + i):
            tokens.append((sum(tokens) + sum(tokens[-WINDOW:])) % 3)
        assert request.tokens == tokens[len(prompt) :]
        assert [max(chances, key=chances.get) for chances in request.logprobs] == request.tokens
    chosen = sum(len(request.tokens) for request in requests)
    assert engine.tokens > sum(map(len, prompts)) + chosen and 0.05 < engine.stats()["acceptance"] < 0.9
    assert engine.steps < 0.8 * chosen


@pytest.mark.skipif(not NIGHTLY, reason="two engines of a real model to compile")
@pytest.mark.parametrize("temperature, dtype", [(0.0, None), (0.7, None), (0.0, "int8")])
def test_a_tree_of_guesses_changes_no_token_of_a_real_model(temperature, dtype):
    model, outputs, steps = jaxkv.models.small(), {}, {}
    text = (pathlib.Path(jaxkv.__file__).parent / "_core" / "state" / "errors.py").read_bytes()[:180]
    for branches in (1, 8):
        sizes = {"max_seqs": 2, "max_seq_len": 320, "step_tokens": 66, "draft": "ngram", "draft_tokens": 32}
        engine = jaxkv.Engine(model, draft_branches=branches, cache_dtype=dtype, **sizes)
        requests = [engine.submit(list(text[i:]), 120, temperature=temperature) for i in (0, 90)]
        for _ in engine.run():
            pass
        outputs[branches], steps[branches] = [request.tokens for request in requests], engine.steps
    assert outputs[1] == outputs[8] and steps[8] < steps[1]


@pytest.mark.parametrize("dtype", [None, *["int8", "int4"] * NIGHTLY])
def test_text_that_repeats_itself_takes_fewer_steps(dtype):
    model = jaxkv.models.small() if NIGHTLY else Biased((0.0, 1.0, 2.0, 0.5))  # by day one that compiles quickly
    text = b"def add(self, name, value):\n    self.names.append(name)\n    self.values.append(value)\n\n" * 2
    sizes = {"max_seqs": 2, "max_seq_len": 320, "step_tokens": 64, "cache_dtype": dtype}
    prompts, outputs, steps = [list(text), list(b"import os\nimport ")], {}, {}
    if not NIGHTLY:
        prompts = [[byte % 4 for byte in prompt] for prompt in prompts]
    for draft in (None, "ngram"):
        engine = jaxkv.Engine(model, draft=draft, **sizes)
        requests = [engine.submit(prompt, 60, logprobs=2) for prompt in prompts]
        for _ in engine.run():
            pass
        outputs[draft] = [request.tokens for request in requests]
        steps[draft] = engine.steps
        assert all(len(request.logprobs) == len(request.tokens) for request in requests)
        assert all(token in chances for r in requests for token, chances in zip(r.tokens, r.logprobs, strict=True))
    assert outputs["ngram"] == outputs[None]
    assert steps["ngram"] < 0.75 * steps[None]


WRONG = {
    "no model": ({"draft": 3}, 'draft must be a model, "ngram" or None, not 3'),
    "another word": ({"draft": "bigram"}, "draft must be a model, \"ngram\" or None, not 'bigram'"),
    "draft_tokens": ({"draft": "ngram", "draft_tokens": 0}, "draft_tokens must be at least 1, not 0"),
    "branches of a model": ({"draft": Several(WINDOWS), "draft_branches": 2}, 'draft_branches=2 is for draft="ngram"'),
    "branches without a step": (
        {"draft": "ngram", "draft_branches": 2},
        "of which step= tells a model, and this one takes no step: leave",
    ),
    "no branches": ({"draft": "ngram", "draft_branches": 0}, "draft_branches must be at least 1, not 0"),
    "branches and a hook": (
        {"draft": "ngram", "draft_branches": 2, "logits_hook": max},
        "A logits_hook gets one sequence per row",
    ),
    "steps_per_dispatch": ({"draft": "ngram", "steps_per_dispatch": 2}, "steps_per_dispatch must be 1 with it, not 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_sentence(name):
    fields, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        jaxkv.Engine(Several(WINDOWS), **TIGHT | fields)


def test_a_draft_for_states_in_a_scan_is_refused():
    model = Hybrid()
    object.__setattr__(model, "scan", True)
    with pytest.raises(ValueError, match="this model scans over its layers: make it, or load it, with scan=False"):
        jaxkv.Engine(model, draft="ngram", **TIGHT)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wide:
    """Gives logits to so many tokens, and no config that says so; with none it fails."""

    size: int
    layer_configs, dtype = (jaxkv.LayerConfig(num_kv_heads=1, head_dim=1),), "float32"

    def __call__(self, tokens, *, cache, logits_at):
        if not self.size:
            raise RuntimeError("no such table")
        k = jnp.zeros((*tokens.shape, 1, 1))
        return jnp.zeros((len(logits_at), self.size)), jaxkv.write(cache, k, k, layer=0)


def test_a_draft_with_another_vocabulary_is_refused():
    fields = dict(max_seqs=1, max_seq_len=64, num_blocks=4)
    with pytest.raises(ValueError, match="draft has a vocabulary of 7 tokens, but the model one of 5"):
        jaxkv.Engine(Wide(5), draft=Wide(7), **fields)
    jaxkv.Engine(Wide(5), draft=Wide(5), **fields)
    with pytest.raises(ValueError, match=r"draft cannot guess tokens: The model fails .*no such table"):
        jaxkv.Engine(Wide(5), draft=Wide(0), **fields)
