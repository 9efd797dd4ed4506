"""Hooks on logits by request: its own numbers, and where its output begins, however its steps are cut."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import LONGEST, VOCAB, Checksum, Several, continuation, weight
from compiled import compiled
from nightly import NIGHTLY

import jaxkv
import jaxkv.hooks

WINDOWS = (None, 7)[: 1 + NIGHTLY]  # by day one layer, which is half of what there is to compile
ROOM = {"max_seqs": 3, "max_seq_len": LONGEST, "block_size": 3, "num_blocks": 48, "step_tokens": 7}
STOP = 11


def hook(logits, rows):
    """All of them, over a distribution in which every token has a logit of its own."""
    logits = logits * 2 + jnp.arange(VOCAB, dtype=jnp.float32)[None] / VOCAB
    if (args := rows.hook_args) is None:
        return logits
    logits = jaxkv.hooks.repetition_penalty(logits, rows, args["repetition"])
    logits = jaxkv.hooks.presence_penalty(logits, rows, args["presence"])
    logits = jaxkv.hooks.frequency_penalty(logits, rows, args["frequency"])
    logits = jaxkv.hooks.logit_bias(logits, args["tokens"], args["biases"])
    return jaxkv.hooks.min_tokens(logits, rows, args["min_tokens"], [STOP, -1])


def expected(prompt, count, *, repetition, presence, frequency, tokens, biases, min_tokens):
    out = []
    while len(out) < count:
        row = [*prompt, *out]
        total = 0
        for layer, window in enumerate(WINDOWS):
            for p in range(max(0, len(row) - (window or LONGEST)), len(row)):
                total += (row[p] + 1) * int(weight(layer, p))
        logits = np.arange(VOCAB) / VOCAB
        logits[total % VOCAB] += 2
        times = np.bincount(out, minlength=VOCAB)
        logits = np.where(times > 0, logits / (repetition or 1), logits)
        logits = logits - presence * (times > 0) - frequency * times
        for token, bias in zip(tokens, biases, strict=True):
            logits[token] += bias if token >= 0 else 0
        if len(out) < min_tokens:
            logits[STOP] = -np.inf
        token = int(np.argmax(logits))
        if token == STOP:
            break
        out.append(token)
    return out


NOTHING = {"repetition": 0, "presence": 0, "frequency": 0, "tokens": [-1, -1], "biases": [0, 0], "min_tokens": 0}
ASKED = [
    NOTHING,
    NOTHING | {"presence": 2.5},
    NOTHING | {"frequency": 0.75},
    NOTHING | {"repetition": 4.0},
    NOTHING | {"tokens": [5, 60], "biases": [3.0, -1.5]},
    NOTHING | {"tokens": [STOP, -1], "biases": [9.0, 0.0], "min_tokens": 6},
    NOTHING | {"tokens": [np.int64(STOP), np.array(3)], "biases": [9.0, np.float64(9.5)], "min_tokens": np.int32(2)},
]
PROMPTS = [[7, 8, 9, 96, 95, 7, 1, 2, 3, 4, 5, 6], [96], [95, 96] * 5]
WAYS = {
    "plain": {},
    "several steps": {"steps_per_dispatch": 3},
    "set back": {"num_blocks": 15, "swap": "never"},
    "ngram": {"draft": "ngram", "draft_tokens": 3},
    "prefix cache": {"prefix_cache": True},
}


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["several steps", "ngram"])
def test_each_request_has_its_own_numbers(way):
    model = Several(WINDOWS) if way == "ngram" else Checksum(WINDOWS)
    engine = jaxkv.Engine(model, **ROOM | WAYS[way], logits_hook=hook)
    asked = [(PROMPTS[i % 3], 10, args) for i, args in enumerate(ASKED)]
    requests = [engine.submit(prompt, n, eos=STOP, hook_args=args) for prompt, n, args in asked]
    requests.append(engine.submit(PROMPTS[0], 10, eos=STOP))  # which gives none
    several = engine.submit(PROMPTS[0], 10, eos=STOP, n=2, hook_args=ASKED[1])
    list(engine.run())
    zeros = NOTHING | {"tokens": [0, 0]}
    for request, (prompt, n, args) in zip(requests, [*asked, (PROMPTS[0], 10, zeros)], strict=True):
        assert request.tokens == expected(prompt, n, **args), (way, args)
    assert all(s.tokens == expected(PROMPTS[0], 10, **ASKED[1]) for s in several.samples)
    assert len({tuple(r.tokens) for r in requests}) > 5 and requests[5].ended == "eos" and len(requests[5].tokens) == 6
    assert way != "set back" or engine.set_back
    assert way != "plain" or compiled(lambda: (engine.submit([1], 3, hook_args=ASKED[3]), list(engine.run()))) == 0


@pytest.mark.parametrize("way", WAYS if NIGHTLY else ["plain"])
def test_an_engine_has_numbers_for_who_gives_none(way):
    """They are the first of the engine: no program is compiled behind the first request that gives some."""
    model = Several(WINDOWS) if way == "ngram" else Checksum(WINDOWS)
    default = NOTHING | {"presence": 2.5, "frequency": 0.0, "repetition": 1.0, "tokens": [5, -1], "biases": [3.0, 0.0]}
    engine = jaxkv.Engine(model, **ROOM | WAYS[way], logits_hook=hook, hook_args=default)
    engine.warmup(kinds=("greedy",), progress=False)
    made = []

    def run():
        made.append([engine.submit(prompt, 9, eos=STOP) for prompt in PROMPTS])
        made.append([engine.submit(prompt, 9, eos=STOP, hook_args=default | {"repetition": 4.0}) for prompt in PROMPTS])
        list(engine.run())

    assert compiled(run) == 0 or way not in ("plain", "several steps")
    for requests, asked in zip(made, (default, default | {"repetition": 4.0}), strict=True):
        assert [r.tokens for r in requests] == [expected(prompt, 9, **asked) for prompt in PROMPTS]
        assert [r.tokens[0] for r in requests] == [5] * len(PROMPTS)  # which nothing but its bias makes the likeliest
    with pytest.raises(ValueError, match="hook_args must have the structure and shapes of this engine's first"):
        engine.submit([1], 1, hook_args={"presence": 1})
    assert jaxkv.generate(model, PROMPTS, 9, eos=STOP, logits_hook=hook, hook_args=default, **ROOM) == [
        request.tokens for request in made[0]
    ]


def test_wrong_numbers_of_an_engine_are_refused():
    with pytest.raises(ValueError, match="hook_args are for a logits_hook, and this Engine has none"):
        jaxkv.Engine(Checksum(WINDOWS), **ROOM, hook_args=NOTHING)
    with pytest.raises(ValueError, match="hook_args must be a pytree of numbers"):
        jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook, hook_args={"a": "b"})


def test_numbers_go_with_a_saved_engine(tmp_path):
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    asked = [(PROMPTS[i % 3], 10, args) for i, args in enumerate(ASKED)]
    for prompt, n, args in asked:
        engine.submit(prompt, n, eos=STOP, hook_args=args)
    for _ in range(4):
        engine.step()
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    requests = {request.number: request for request in other.load(tmp_path / "engine")}
    list(other.run())
    assert requests
    for number, request in requests.items():
        prompt, n, args = asked[number]
        assert request.tokens == expected(prompt, n, **args)


def test_numbers_of_a_saved_engine_are_for_a_hook(tmp_path):
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    for args in (None, *ASKED):
        engine.submit(PROMPTS[0], 10, eos=STOP, hook_args=args)
    engine.save(tmp_path / "engine")
    other = jaxkv.Engine(Checksum(WINDOWS), **ROOM)
    with pytest.raises(jaxkv.CacheFileError, match=r"Request 1 .* cannot go on here: its hook_args .*logits_hook="):
        other.load(tmp_path / "engine")
    assert other.is_idle and other.submit(PROMPTS[0], 4).result() == continuation(WINDOWS, PROMPTS[0], 4, None)


def sum_up(tokens):
    return sum((place + 3) * (token + 1) for place, token in enumerate(tokens)) % VOCAB


def choose_sum(logits, rows):
    place = jnp.arange(rows.tokens.shape[1])[None]
    total = jnp.where(place < rows.lengths[:, None], (place + 3) * (rows.tokens + 1), 0).sum(axis=1)
    return jax.nn.one_hot(total % VOCAB, VOCAB)


def test_penalize_does_nothing_before_a_request_asks():
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=jaxkv.hooks.penalize)
    assert engine.submit(PROMPTS[0], 6).result() == continuation(WINDOWS, PROMPTS[0], 6, None)
    forced = engine.submit(PROMPTS[0], 6, hook_args=jaxkv.hooks.penalties(logit_bias={5: 100}))
    assert forced.result() == [5] * 6


WRONG = {
    "presence_penalty": ("x", float("nan"), 1e39, True), "frequency_penalty": (None, -1e7),
    "repetition_penalty": (0, -1, float("inf")), "min_tokens": (-1, 1.5), "stop_tokens": (["x"], [-1], range(65)),
    "logit_bias": ([1], {"5": 1}, {-1: 1}, {5: "x"}, {5: float("-inf")}, dict.fromkeys(range(301), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_penalties_are_named(name):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=name):
            jaxkv.hooks.penalties(**{name: value})


def test_a_request_that_is_running_knows_nothing_of_warmup():
    engine = jaxkv.Engine(Checksum((None,)), max_seqs=1, max_seq_len=LONGEST, block_size=3, logits_hook=choose_sum)
    request = engine.submit([4, 5], 8)
    while len(request.tokens) < 3:
        engine.step()
    engine.warmup(kinds=("greedy",), progress=False)
    tokens = [4, 5]
    while len(tokens) < 10:
        tokens.append(sum_up(tokens))
    assert request.result() == tokens[2:]


def test_a_later_request_may_have_the_first_fractions():
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    asked = [NOTHING | {"presence": 3}, NOTHING | {"presence": 2.5}]
    first = engine.submit(PROMPTS[2], 12, eos=STOP, hook_args=asked[0])
    while len(first.tokens) < 3:
        engine.step()
    second = engine.submit(PROMPTS[1], 12, eos=STOP, hook_args=asked[1])
    list(engine.run())
    assert first.tokens == expected(PROMPTS[2], 12, **asked[0]) != expected(PROMPTS[2], 12, **NOTHING)
    assert second.tokens == expected(PROMPTS[1], 12, **asked[1])


@pytest.mark.parametrize("swap", ["always", "never"] if NIGHTLY else ["always"])
def test_a_hook_has_all_tokens_of_a_row_that_comes_back(swap):
    """A request is preempted, goes on in another row, is preempted once more, and comes back to its first row, in which
    nobody was meanwhile."""
    sizes = {"max_seq_len": LONGEST, "block_size": 3, "num_blocks": 16, "step_tokens": 40}
    engine = jaxkv.Engine(Checksum((None,)), max_seqs=3, **sizes, swap=swap, logits_hook=choose_sum)
    short, late, grown = (
        engine.submit(list(range(n)), most, priority=p) for n, most, p in ((9, 7, 0), (10, 30, 1), (16, 32, 0))
    )
    rows = [None]
    while len(rows) < 5 or rows[-1] is None:
        engine.step()
        (sequence,) = (s for request, s in engine._core.open.items() if request is late)
        rows += [sequence.row] if sequence.row != rows[-1] else []
        if len(rows) == 5 and rows[-1] is None and not grown.done:  # the row of its own is the one that is left
            grown.cancel()
            others = [engine.submit([i, i], 9) for i in (5, 6)]
    list(engine.run())
    assert rows[1] == rows[5] != rows[3]
    for request in (short, late, grown, *others):
        tokens = list(request.prompt)
        while len(tokens) < len(request.prompt) + len(request.tokens):
            tokens.append(sum_up(tokens))
        assert request.tokens == tokens[len(request.prompt) :]
    assert len(late.tokens) == 30


def test_recompute_is_given_the_same_numbers():
    model = jaxkv.models.small()
    penalise = functools.partial(jaxkv.hooks.presence_penalty)
    engine = jaxkv.Engine(
        model, max_seqs=2, max_seq_len=64, logits_hook=lambda logits, rows: penalise(logits, rows, rows.hook_args[0])
    )
    request = engine.submit(list(b"import "), 12, hook_args=(30.0,))
    list(engine.run())
    assert len(set(request.tokens)) == 12
    assert engine.recompute(request.prompt, request.tokens, hook_args=(30.0,)) == request.tokens
    assert engine.recompute(request.prompt, request.tokens, hook_args=(0.0,)) != request.tokens
    assert engine.recompute(iter(request.prompt), iter(request.tokens), hook_args=(30.0,)) == request.tokens
    with pytest.raises(ValueError, match="cannot be computed again: it has a token outside of the model's vocabulary"):
        engine.recompute(request.prompt, [10**6])


def test_numbers_that_do_not_fit_are_refused():
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook)
    with pytest.raises(ValueError, match="hook_args are for a logits_hook, and this Engine has none"):
        jaxkv.Engine(Checksum(WINDOWS), **ROOM).submit([1], 1, hook_args=3)
    for bad in ("a", [object()], 1j, {"a": 2**40}, {"a": b"x"}):
        with pytest.raises(ValueError, match="hook_args must be"):
            engine.submit([1], 1, hook_args=bad)
    for wrong in ({"adapter": -1}, {"stop": [[-1]]}, {"keep_prefix": 3}, {"on_token": 3}, {"eos": "x"}):
        with pytest.raises(ValueError):
            engine.submit([1], 1, hook_args={"other": 1}, **wrong)  # of which nothing is left
    engine.submit([1], 1, hook_args=NOTHING)  # which decides
    for bad in (3, {"presence": 1}, NOTHING | {"tokens": [1, 2, 3]}):
        with pytest.raises(ValueError, match="hook_args must have the structure and shapes of this engine's first"):
            engine.submit([1], 1, hook_args=bad)
    list(engine.run())


def test_what_is_refused_fixes_no_form(tmp_path):
    """A load of requests of which one does not fit, recompute, which accepts none, and a submit to a full engine."""
    other = {"other": 1}
    long = jaxkv.Engine(Checksum(WINDOWS), **ROOM | {"max_seq_len": 96}, logits_hook=lambda logits, _: logits)
    long.submit([1], 2, hook_args=other)
    long.submit([1] * 90, 2)
    long.save(tmp_path / "engine")
    engine = jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook, max_waiting=1)
    with pytest.raises(jaxkv.CacheFileError, match=r"Request 1 of .* cannot go on here"):
        engine.load(tmp_path / "engine")
    with pytest.raises(ValueError, match="The model fails without a cache"):
        engine.recompute([1], [2], hook_args=other)
    for token in range(4):
        engine.submit([token], 2)
    with pytest.raises(jaxkv.EngineFull):
        engine.submit([5], 2, hook_args=other)
    list(engine.run())
    assert engine.submit([5], 2, hook_args=NOTHING).result() == expected([5], 2, **NOTHING)


def test_prompts_are_no_output():
    @dataclasses.dataclass
    class Told:
        tokens: jax.Array
        lengths: jax.Array
        prompt_lengths: jax.Array

    rows = Told(jnp.array([[3, 3, 1, 3, 9], [2, 9, 9, 9, 9]]), jnp.array([4, 1]), jnp.array([2, 1]))
    count = jaxkv.hooks.count_output(rows, 5)
    assert count.tolist() == [[0, 1, 0, 1, 0], [0] * 5]
    logits = jnp.ones((2, 5))
    with jax.disable_jit():
        assert jaxkv.hooks.frequency_penalty(logits, rows, jnp.array([1.0, 2.0])).tolist() == [[1, 0, 1, 0, 1], [1] * 5]
    short = jaxkv.hooks.min_tokens(logits, rows, jnp.array([3, 0]), jnp.array([[0, -1], [1, 7]]))
    assert jnp.isneginf(short).tolist() == [[True, False, False, False, False], [False] * 5]


@pytest.mark.parametrize("how", ["step", "run", "result"])
def test_a_hook_that_raises_ends_the_requests_of_its_step_alone(how):
    """Their rows are free, the error is told, and the others go on. A hook that returns no logits is such a one."""
    broken = [KeyError("of the hook"), jnp.zeros(3)]

    def hook(logits, rows):
        if not broken:
            return logits
        if isinstance(broken[0], KeyError):
            raise broken.pop(0)
        return broken.pop(0)

    with jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=hook) as engine:
        requests = [engine.submit([1 + i, 5], 4) for i in range(9)]
        calls = {"step": engine.step, "run": lambda: list(engine.run()), "result": requests[0].result}
        for count, error in enumerate((r"KeyError.*of the hook", r"logits_hook must return logits \[3, 97\]"), 1):
            with pytest.raises((KeyError, ValueError), match=error.removeprefix("KeyError.*")):
                calls[how]()
            failed = [request for request in requests if request.done]
            assert failed == requests[: 3 * count] and {request.ended for request in failed} == {"error"}
            assert re.search(error, failed[-1].error) and engine.stats()["free_rows"] == 3
            calls["result"] = requests[3].result
        assert requests[8].result() == continuation(WINDOWS, [9, 5], 4, None)
        engine.wait()
        assert [request.tokens for request in requests[6:]] == [
            continuation(WINDOWS, [i, 5], 4, None) for i in (7, 8, 9)
        ]
        jaxkv.check_invariants(engine.cache)


def make_raising_hook():
    """Returns a hook that raises once, and changes nothing."""
    left = [KeyError("of the hook")]

    def hook(logits, rows):
        if left:
            raise left.pop()
        return logits

    return hook


@pytest.mark.parametrize("is_served", [False, True])
def test_who_waits_for_another_request_hears_nothing_of_a_hooks_error(is_served):
    with jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=make_raising_hook()) as engine:
        requests = [engine.submit([1 + i, 5], 4) for i in range(4)]
        with engine.serve() if is_served else contextlib.nullcontext():
            assert requests[3].result() == continuation(WINDOWS, [4, 5], 4, None)
        for request in requests[:3]:
            with pytest.raises(KeyError, match="of the hook"):
                request.result()


def test_a_hook_that_raises_in_a_stream_ends_other_requests_of_its_step_too():
    with jaxkv.Engine(Checksum(WINDOWS), **ROOM, logits_hook=make_raising_hook()) as engine:
        other = engine.submit([3], 4)
        with pytest.raises(KeyError, match="of the hook"):
            list(engine.stream([[1, 2], [2, 3]], 4))
        with pytest.raises(KeyError, match="of the hook"):
            other.result()
        assert list(engine.run()) == [(other, None)] and engine.stats()["free_rows"] == 3
        assert engine.submit([3], 4).result() == continuation(WINDOWS, [3], 4, None)
