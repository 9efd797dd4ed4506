"""Continuous batching: the same tokens however prompts are batched, cut, set back or resumed."""

import gc
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nightly import NIGHTLY

import jaxkv
import jaxkv._core.attention.shared_prefix
import jaxkv._engine.frontend.generate
import jaxkv._engine.programs.step
from jaxkv._engine.requests.sampling import KINDS, Sampling, SamplingParams, _kept, choose
from jaxkv.models.config import DecoderConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.rope import Rope

VOCAB = 64
WINDOWS = (None, 8) if NIGHTLY else (None,)  # by day engines with windows: test_engine.py, tests/models


@pytest.fixture(scope="module")
def model():
    config = DecoderConfig(
        vocab_size=VOCAB, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=4096,
        windows=WINDOWS, ropes=(Rope(),) * len(WINDOWS), attention_scale=0.25,
    )  # fmt: skip
    return Decoder(config, rngs=nnx.Rngs(0))


def make_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


PROMPTS = make_prompts((3, 40, 1, 17, 100, 5, 33))
SETTINGS = {  # with few step shapes, for each is a compile; test_engine.py has more, with a model that compiles faster
    "in chunks": {"step_tokens": 8},
    "set back and resumed": {"max_seqs": 4, "num_blocks": 7, "max_seq_len": 112, "step_tokens": 32},
    "one by one": {"max_seqs": 1, "step_tokens": 1},
    "all at once": {"step_tokens": 256},
    "block_size 5": {"block_size": 5},
    "contiguous": {"layout": "contiguous"},
}
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}
SMALL = {"max_seqs": 4, "max_seq_len": 64, "step_tokens": 32}  # one engine's programs for many tests


def run(model, choice, **settings):
    engine = jaxkv.Engine(model, **{"longest": 128, "step_tokens": 8} | settings)  # few step shapes to compile
    outputs = [[] for _ in PROMPTS]
    for index, token in engine.stream(PROMPTS, 12, **choice):
        outputs[index].append(token)
    jaxkv.check_invariants(engine.cache)
    assert engine.cache.is_empty
    return outputs, engine


@pytest.mark.skipif(not NIGHTLY, reason="each setting has its programs; by day the two ways of REUSE that share theirs")
@pytest.mark.parametrize(("choice", "names"), [({}, SETTINGS), (SAMPLED, ("in chunks", "one by one"))])
def test_the_same_tokens_in_every_setting_and_without_a_cache(model, choice, names):
    expected = None
    for name in names:
        outputs, engine = run(model, choice, **SETTINGS[name])
        expected = expected or outputs
        assert outputs == expected, name
        assert (engine.set_back > 0) == (name == "set back and resumed"), name
    assert len({tuple(output) for output in expected}) == len(PROMPTS), "the prompts make a difference"
    for i, (prompt, output) in enumerate(zip(PROMPTS, expected, strict=True)):
        assert engine.recompute(prompt, output, index=i, **choice) == output


@pytest.mark.skipif(not NIGHTLY, reason="tests/core/test_cascade.py has it by day, without an engine")
def test_what_prompts_begin_with_is_read_once(model, monkeypatch):
    shared, plan = [], jaxkv._engine.programs.step.plan_step

    def planned(*arguments, **options):
        step = plan(*arguments, **options)
        shared.append(step.shared is not None)
        return step

    monkeypatch.setattr(jaxkv._engine.programs.step, "plan_step", planned)
    monkeypatch.setattr(jaxkv._core.attention.shared_prefix, "WORTH_TOKENS", 512)
    prompts, outputs = [make_prompts((300,))[0] + [i] for i in range(9)], []
    for prefix_cache in (True, False):
        engine = jaxkv.Engine(model, max_seqs=9, max_seq_len=512, step_tokens=64, prefix_cache=prefix_cache)
        first = engine.submit(prompts[0], 2)
        list(engine.run())  # what it has computed is there for the others
        requests = [engine.submit(prompt, 8) for prompt in prompts]
        list(engine.run())
        outputs.append([first.tokens, *(request.tokens for request in requests)])
    assert outputs[0] == outputs[1] and shared and all(shared)


def test_generate_takes_a_limit_for_each_prompt(model):
    outputs = jaxkv.generate(model, PROMPTS[:3], max_new_tokens=[1, 7, 3], **SMALL)
    assert [len(output) for output in outputs] == [1, 7, 3]


LENGTHS = [1, 5, 17, 3, 33, 40, 100]  # and 12 more: 1, 2, 2, 1, 3, 4 and 7 blocks of 16


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 32 * 16),  # 20 blocks of 7 * 8
        ({"max_seqs": 3}, 16 * 16),  # 14 of 3 * 8, for the longest may meet
        ({"max_seqs": 2}, None),  # 11 of 2 * 8: no less, rounded up
        ({"max_seqs": 10**9}, 32 * 16),
        ({"max_seqs": np.int64(3), "step_tokens": 8, "seed": 1, "cache_dtype": "int8"}, 16 * 16),
        ({"n": 2}, 32 * 16),  # of 8 * 8: 7, 7, 4, 4, 3, 3, 2 and 2
        ({"n": 2**16, "max_seqs": 2}, None),
        ({"max_new_tokens": [1, 1, 1, 1, 1, 1, 900]}, 128 * 16),  # 74 of 7 * 64
        ({"max_new_tokens": 10**4, "max_seqs": 1}, None),  # ends where the model does
        ({"max_new_tokens": [1, 1, 1, 1, 1, 1, 10**4]}, 512 * 16),  # 256 of its, and 11
        *(({option: 64}, None) for option in jaxkv._engine.frontend.generate.ROOM),
    ],
)
def test_there_is_room_for_what_rows_can_take(model, monkeypatch, options, tokens):
    given = []

    class Noted(jaxkv.Engine):
        is_following = False

        def __init__(self, model, **options):
            given.append(options)

        def __enter__(self):
            return self

        def close(self):
            pass

        def stream(self, *args, **options):
            return []

    monkeypatch.setattr(jaxkv._engine.frontend.generate, "Engine", Noted)
    jaxkv.generate(model, [[1] * length for length in LENGTHS], **{"max_new_tokens": 12} | options)
    sizes = given[0].get("max_tokens") if "max_tokens" not in options else None
    assert sizes == tokens


def test_where_rows_take_little_there_is_little_room_and_nobody_waits_for_more(model, monkeypatch):
    made, peaks = [], []

    class Kept(jaxkv.Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

        def close(self):
            peaks.append(self.blocks_peak)
            super().close()

    monkeypatch.setattr(jaxkv._engine.frontend.generate, "Engine", Kept)
    prompts = make_prompts((100, 30, 30, 30, 30, 30, 30, 30))
    wanted = jaxkv.generate(model, prompts, 40, step_tokens=32, num_blocks=8 * 16)
    assert jaxkv.generate(model, prompts, 40, step_tokens=32) == wanted
    assert jaxkv.generate(model, prompts, 40, step_tokens=32, max_seqs=4) == wanted
    assert [(e.config.num_blocks, e.set_back) for e in made] == [(8 * 16, 0), (64, 0), (32, 0)]
    assert [peak > e.config.num_blocks // 2 for peak, e in zip(peaks, made, strict=True)] == [False, True, True]


def test_a_progress_bar_counts_tokens(model, capsys):
    pytest.importorskip("tqdm", reason="the extra 'hf' is not installed")
    jaxkv.generate(model, PROMPTS[:2], max_new_tokens=6, progress=True, **SMALL)
    assert "12/12" in capsys.readouterr().err


def test_a_stop_token_ends_a_sequence_and_is_not_part_of_it(model):
    (free,) = jaxkv.generate(model, PROMPTS[:1], max_new_tokens=12, **SMALL)
    stop = free[5]
    first = free.index(stop)
    for eos in (stop, [stop, 999]):
        assert jaxkv.generate(model, PROMPTS[:1], max_new_tokens=12, eos=eos, **SMALL) == [free[:first]]


def test_a_sequence_ends_at_max_seq_len(model):
    outputs = jaxkv.generate(model, PROMPTS[:2], max_new_tokens=1000, **SMALL)
    assert [len(output) for output in outputs] == [64 - 3, 64 - 40]


def test_leaving_a_stream_early_frees_its_rows(model):
    engine = jaxkv.Engine(model, **SMALL)
    stream = engine.stream(PROMPTS[:4], 12)
    for _ in range(10):
        next(stream)
    assert not engine.cache.is_empty
    stream.close()
    assert engine.cache.is_empty and engine.cache.blocks_in_use == 0
    assert len(list(engine.stream(PROMPTS[:1], 12))) == 12


def test_thousands_of_steps_compile_once_per_shape_and_keep_no_memory(model):
    engine = jaxkv.Engine(model, **SMALL)
    prompts = make_prompts([1 + i % 60 for i in range(160)], seed=1)
    program = engine._runner._program
    before = program._cache_size()

    def held_after(steps):
        while engine.steps < steps:
            for _ in engine.stream(prompts, 50):
                if engine.steps >= steps:
                    break
        gc.collect()
        return len(jax.live_arrays()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    arrays, memory = held_after(1500 if NIGHTLY else 700)  # by then it has compiled every shape
    later_arrays, later_memory = held_after(6000 if NIGHTLY else 1700)
    assert program._cache_size() - before <= 6
    assert later_arrays <= arrays
    assert later_memory - memory < 5_000, f"{later_memory - memory} KiB more than before"


def next_tokens(kind, logits, choices):
    columns = np.stack([choice.column(number) for number, choice in enumerate(choices)], axis=1)
    positions = jnp.arange(len(choices), dtype=jnp.int32)
    return choose(kind, logits, Sampling.unpack(jnp.asarray(columns)), positions).tolist()


def test_rows_get_the_same_token_whatever_the_others_ask_for():
    """What a step leaves out because none of its rows needs it changes no row."""
    logits = jax.random.normal(jax.random.key(1), (300, VOCAB)) * 3
    choices = {
        "greedy": SamplingParams(0.0, 3, 0.5),
        "sampled": SamplingParams(1.3),
        "filtered": SamplingParams(0.7, 9, 0.9),
    }
    mixed = [choices[KINDS[i % 3]] for i in range(300)]
    expected = next_tokens("filtered", logits, mixed)
    for i, kind in enumerate(KINDS):
        enough = [choice if choice.kind in KINDS[: i + 1] else SamplingParams() for choice in mixed]
        for j, (token, choice) in enumerate(zip(next_tokens(kind, logits, enough), mixed, strict=True)):
            assert token == expected[j] or choice.kind not in KINDS[: i + 1]
    greedy, sampled = (next_tokens("filtered", logits, [choices[kind]] * 300) for kind in KINDS[:2])
    assert greedy == jnp.argmax(logits, axis=-1).tolist() != sampled


def test_sampling_keeps_to_top_k_and_top_p():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]] * 400))

    def drawn(*choice):
        choice = SamplingParams(*choice)
        return np.bincount(next_tokens(choice.kind, logits, [choice] * 400), minlength=4) / 400

    np.testing.assert_allclose(drawn(1.0), [0.1, 0.4, 0.3, 0.2], atol=0.07)
    np.testing.assert_allclose(drawn(1.0, 2), [0, 4 / 7, 3 / 7, 0], atol=0.07)
    np.testing.assert_allclose(drawn(1.0, 0, 0.69), [0, 4 / 7, 3 / 7, 0], atol=0.07)
    np.testing.assert_allclose(drawn(1.0, 0, 0.71), [0, 4 / 9, 3 / 9, 2 / 9], atol=0.07)
    np.testing.assert_allclose(drawn(1.0, 0, 1e-60), [0, 1, 0, 0])
    np.testing.assert_allclose(drawn(1.0, 3, 0.5), [0, 4 / 7, 3 / 7, 0], atol=0.07)  # 4/9 of the three is below a half
    np.testing.assert_allclose(drawn(1.0, 3, 0.44), [0, 1, 0, 0])
    np.testing.assert_allclose(drawn(1.0, 0, 1.0, 0.7), [0, 4 / 7, 3 / 7, 0], atol=0.07)
    np.testing.assert_allclose(drawn(1.0, 0, 1.0, 0.3), [0, 4 / 9, 3 / 9, 2 / 9], atol=0.07)
    np.testing.assert_allclose(drawn(2.0, 0, 1.0, 0.8), drawn(2.0, 2), atol=0.1)  # of the heated distribution
    np.testing.assert_allclose(drawn(0.01), [0, 1, 0, 0])
    np.testing.assert_allclose(drawn(1e-45), [0, 1, 0, 0])


def test_filters_are_applied_one_after_the_other():
    """As transformers' warpers do it: each has what the one before left. With ties, and thousands of tokens."""

    def kept(logits, top_k, top_p, min_p):
        logits = np.asarray(logits, np.float64)
        order = np.argsort(-logits, kind="stable")
        order = order[: top_k or None]
        share = np.exp(logits[order] - logits[order[0]])
        before = np.cumsum(share / share.sum()) - share / share.sum()
        order = [t for t, b in zip(order, before, strict=True) if t == order[0] or b < top_p - 1e-9 or top_p == 1]
        return {int(t) for t in order if np.exp(logits[t] - logits[order[0]]) >= min_p}

    def found(logits, *filters):
        return set(np.flatnonzero(jax.jit(_kept)(jnp.asarray(logits, jnp.float32), *filters)).tolist())

    assert len(found(np.zeros(100), 10, np.float32(0.5), np.float32(0))) == 5
    for k in (0, 1, 7, 10, 100):
        for tenths in range(1, 10):
            count = len(found(np.zeros(100), k, np.float32(tenths / 10), np.float32(0)))
            assert count == -(-(k or 100) * tenths // 10), (k, tenths)
    draw = np.random.default_rng(0)
    for _ in range(30):
        logits = draw.normal(size=997).astype(np.float32) * draw.uniform(0.5, 4)
        filters = int(draw.choice([0, 1, 5, 50, 2000])), np.float32(draw.choice([1, 0.9, 0.55, 0.1]))
        filters += (np.float32(draw.choice([0, 0.01, 0.3, 1])),)
        assert found(logits, *filters) == kept(logits, *filters), filters


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"min_p": -0.1}, "min_p must be at least 0, not -0.1"),
        ({"min_p": 1.5}, "min_p must be at most 1, not 1.5"),
        ({"temperature": -1}, "temperature must be at least 0, not -1"),
        ({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.5}, "top_p must be at most 1, not 1.5"),
        ({"top_k": -1}, "top_k must be at least 0, not -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": 10**400}, "temperature must be a finite number, not 1000"),
        ({"top_k": 10**12}, "top_k must be at most 2147483647, not 1000000000000"),
        ({"seed": 10**30}, "seed must be at most 4294967295, not 1000"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, not 2.5"),
        ({"max_new_tokens": [2.5, 1]}, "max_new_tokens must be an integer, not 2.5"),
        ({"max_new_tokens": "64"}, "max_new_tokens must be an integer, not '64'"),
        ({"eos": "abc"}, "eos must be a token id, several, or None, not 'abc'"),
        ({"eos": [1, 2.5]}, "eos must be an integer, not 2.5"),
        ({"eos": True}, "eos must be an integer, not True"),
        ({"step_tokens": 0}, "step_tokens must be at least 1, not 0"),
        ({"steps_per_dispatch": 0}, "steps_per_dispatch must be at least 1, not 0"),
        ({"spill_bytes": -5, "prefix_cache": True}, "spill_bytes must be at least 0, not -5"),
        ({"host_bandwidth": 0}, "host_bandwidth must be at least 1, not 0"),
        ({"memory_bytes": "1GB"}, "memory_bytes must be a number, not '1GB'"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be a finite number, not nan"),
        ({"max_seqs": 10**13}, "max_seqs must be at most 2147483647, not 10000000000000"),
        ({"prompts": [5, 6, 7]}, r"^prompts must be a list of prompts, .* not one of 3 tokens: write \[prompt\]\.$"),
        ({"prompts": [[1.5]]}, r"Prompt 0 cannot be continued: it must be a list of token ids, integers, not \[1.5\]"),
        ({"prompts": ["text", [1]]}, "Prompt 0 cannot be continued: it must be a list of token ids, not 'text': "),
        ({"prompts": [[10**30]]}, "Prompt 0 cannot be continued: it must be a list of token ids, integers, not"),
        ({"prompts": [[[1], [2, 3]]]}, "Prompt 0 cannot be continued: it must be a list of token ids, integers, not"),
        ({"prompts": [[1], [-1]]}, "Prompt 1 cannot be continued: it has a token outside of the model's vocabulary"),
        ({"max_new_tokens": [3]}, "one number or one for each of the 2 prompts, not 1"),
        ({"prompts": [[1], []]}, "Prompt 1 cannot be continued: it is empty"),
        (
            {"prompts": [[1] * 64], "max_seq_len": 64},
            "Prompt 0 cannot be continued: it has 64 tokens, and max_seq_len = 64",
        ),
        (
            {"prompts": [[1], [2, VOCAB]]},
            "Prompt 1 cannot be continued: it has a token outside of the model's vocabulary, 0 to 63",
        ),
        (
            {"prompts": [[1] * 50], "num_blocks": 3},
            "Prompt 0 cannot be continued: its 54 tokens take 4 blocks, .* has 3",
        ),
    ],
)
def test_bad_input_is_one_sentence(model, arguments, sentence):
    arguments = {"prompts": PROMPTS[:2], "max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=sentence):
        jaxkv.generate(model, arguments.pop("prompts"), **arguments)


def test_all_bad_prompts_are_named_at_once_before_anything_is_computed(model):
    engine = jaxkv.Engine(model, **SMALL)
    with pytest.raises(ValueError, match=r"Prompt 0 .* empty(.|\n)*Prompt 2 .* 70 tokens"):
        engine.stream([[], [1], [1] * 70])
    assert engine.steps == 0
    assert len(list(engine.stream([[1]], 3))) == 3


SHARED = make_prompts((60,), seed=7)[0]
CHATS = [SHARED[:n] + more for n, more in zip((60, 50, 60, 37, 60, 8), make_prompts((5, 9, 1, 20, 30, 2)), strict=True)]
# Few enough blocks that sequences are set back.
TIGHT = {"max_seqs": 4, "max_seq_len": 128, "step_tokens": 16, "block_size": 4, "num_blocks": 28}
REUSE = {
    "computed again": {"swap": "never"},
    "swapped": {"swap": "always"},
    "prefix cache": {"prefix_cache": True},
    "prefix cache, spilled": {"prefix_cache": True, "spill_bytes": 10**6},
}


@pytest.mark.parametrize(
    ("choice", "ways"),
    [
        ({}, REUSE if NIGHTLY else ("computed again", "swapped")),
        *[({"temperature": 0.9, "seed": 3}, ("swapped",))] * NIGHTLY,
    ],
)
def test_reuse_swapping_and_recomputing_change_no_token(model, choice, ways):
    for way in ways:
        engine = jaxkv.Engine(model, **TIGHT, **REUSE[way])
        for _ in range(2):  # in the second round everything has been there before
            outputs = [[] for _ in 2 * CHATS]  # two samples of each, for whom alone there is always room
            for index, token in engine.stream(CHATS, 12, n=2, **choice):
                outputs[index].append(token)
            jaxkv.check_invariants(engine.cache)
            assert not engine.cache.lengths.any()
            if engine.prefix:
                engine.prefix.check_invariants(engine.cache)
            else:
                assert engine.cache.blocks_in_use == 0
            for i, output in enumerate(outputs):
                assert engine.recompute(CHATS[i // 2], output, index=i, **choice) == output, way
        stats = engine.stats()
        assert stats["set_back"] > 0 and (stats["swapped_out"] > 0) == (way == "swapped"), way
        if engine.prefix:
            prompts_and_outputs = 2 * sum(len(prompt) + 2 * 11 for prompt in CHATS)
            assert stats["tokens_saved"] > 0 and stats["tokens"] < 0.75 * prompts_and_outputs, way
        if "spill_bytes" in REUSE[way]:
            assert stats["blocks_spilled"] > 0 and stats["blocks_restored"] > 0


@pytest.mark.skipif(not NIGHTLY, reason="by day tests of PrefixCache and of its files")
def test_tenants_with_equal_prompts_share_nothing(model):
    engine = jaxkv.Engine(model, **TIGHT, prefix_cache=True)
    outputs = [[token for _, token in engine.stream([SHARED[:24]], 8, salt=salt)] for salt in ("a", "b", "a")]
    assert outputs[0] == outputs[1] == outputs[2]
    stats = engine.stats()
    assert stats["hits"] == 1 and stats["tokens_saved"] == 20
    assert stats["blocks"][0] == 2 * 7  # of 31 tokens, twice


def test_pins_that_leave_no_room_are_named(model):
    engine = jaxkv.Engine(model, **TIGHT, prefix_cache=True)
    list(engine.stream([SHARED[:36]], 4))
    engine.prefix.pin(SHARED[:32])
    with pytest.raises(jaxkv.OutOfBlocks, match=r"There is no room for prompt 0 with 100 tokens: .* Unpin"):
        list(engine.stream([[1] * 100], 4))
    engine.prefix.unpin(SHARED[:32])
    assert len(list(engine.stream([[1] * 100], 4))) == 4


def test_the_cheaper_of_swapping_and_recomputing_is_chosen(model):
    def swapped(host_bandwidth):
        engine = jaxkv.Engine(model, **TIGHT, host_bandwidth=host_bandwidth)
        list(engine.stream(CHATS, 12, n=2))
        assert engine.set_back > 0
        return engine.stats()["swapped_out"]

    assert swapped(1e15) > 0 and swapped(1.0) == 0
    with pytest.raises(ValueError, match="swap must be 'auto', 'always' or 'never', not 'often'"):
        jaxkv.Engine(model, swap="often")
