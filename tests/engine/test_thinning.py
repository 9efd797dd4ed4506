"""An engine whose rows give tokens up: each gets what it would get alone, and what it gives up is room for others."""

import dataclasses
import functools
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cutting import cut_anywhere
from nightly import NIGHTLY
from thinned_model import DIM, HEADS, LONGEST, VOCAB, Alone, Tiny

import jaxkv
from jaxkv import Eviction, scores
from jaxkv._core.attention.query_capture import Queries, capture_queries, capture_rotation, record_queries
from jaxkv._engine.programs.eviction import _queries, score_tokens, thin_rows
from jaxkv._engine.requests.block_accounting import Holdings, ThinnedHoldings
from jaxkv._engine.requests.eviction_policy import ALIKE
from jaxkv._engine.requests.scheduler import Scheduler, Sequence

skip_by_day = pytest.mark.skipif(not NIGHTLY, reason="a program of its own")
snapkv = functools.partial(scores.snapkv, window_size=4, kernel_size=3)
CASES = {"heads compete": Eviction(snapkv, 0.4, "ada", every=6)}  # its rows are computed again when they are set back
if NIGHTLY:
    CASES |= {
        "swapped": Eviction(snapkv, 0.6),
        "swapped, whole tokens": Eviction(functools.partial(scores.streaming_llm, n_sink=1), 5),
        "keys": Eviction("keydiff", 0.3, every=1),
        "pyramid": Eviction(snapkv, 0.5, "pyramid", every=4),
        "tova": Eviction("tova", 0.5, every=2),
        "all queries": Eviction("observed_attention", 0.3, every=5),
        "mean of heads": Eviction("knorm", 1, by="layer", every=2),
        "all kept": Eviction("knorm", 1.0, every=1),
    }
WINDOWS = (None, 5) if NIGHTLY else (None,)
TIGHT = dict(max_seqs=4, max_seq_len=LONGEST, block_size=3, num_blocks=10, step_tokens=7)


MORE = {name: dict(num_blocks=14) for name in ("all kept", "pyramid", "tova", "all queries", "mean of heads")}


@pytest.mark.parametrize("name", CASES)
def test_every_row_gets_what_it_would_alone(name):
    """Chunks of prompts beside decoding rows, rows that are set back and computed again, steps that several decode at
    once, samples, stops and cancels change no token."""
    draw, eviction = random.Random(name), CASES[name]
    engine = jaxkv.Engine(
        Tiny(WINDOWS), evict=eviction, steps_per_dispatch=1 + NIGHTLY, swap="always", **TIGHT | MORE.get(name, {})
    )
    alone = Alone(eviction, Tiny(WINDOWS))
    for turn in range(3):
        prompts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (draw.randint(1, 20), 20, 1, 8, 17, 23)]
        counts = [draw.randint(4, 12) for _ in prompts]
        eos = draw.choice([None, draw.randrange(VOCAB)])
        wanted = [alone.continuation(*one, eos) for one in zip(prompts, counts, strict=True)]
        requests = [engine.submit(p, n, eos=eos, n=1 + (turn == 1)) for p, n in zip(prompts, counts, strict=True)]
        for step, _ in enumerate(engine.run()):
            if step == 9 and turn == 2:
                requests[-1].cancel()
        for request, tokens in zip(requests[: len(requests) - (turn == 2)], wanted, strict=False):
            assert [sample.tokens for sample in request.samples] == [tokens] * len(request.samples)
        jaxkv.check_invariants(engine.cache)
        assert engine.cache.is_empty and engine.cache.blocks_in_use == 0
    with pytest.raises(ValueError, match=r"recompute has no cache, and .* has kept in one: ask an Engine without"):
        engine.recompute(prompts[0], wanted[0])
    stats = engine.stats()
    assert (stats["set_back"] > 0) or NIGHTLY
    assert (stats["swapped_out"] > 0) == name.startswith("swapped") or NIGHTLY


@skip_by_day
@pytest.mark.parametrize(("name", "event"), [("heads compete", "line"), ("swapped", "line"), ("swapped", "opcode")])
def test_an_exception_anywhere_loses_nothing(name, event):
    eviction = CASES[name]
    engine, alone = jaxkv.Engine(Tiny(WINDOWS), evict=eviction, swap="always", **TIGHT), Alone(eviction, Tiny(WINDOWS))
    asked = [([5, 7, 11] * 5, 9), ([3], 6), ([9, 8] * 7, 12), ([5, 7, 11, 4], 8), ([2, 1] * 5, 14)]
    wanted = [alone.continuation(*one) for one in asked]

    def work(requests):
        for one in asked:
            requests.append(engine.submit(*one))
            engine.step()
        requests[3].cancel()
        list(engine.run())

    def check(requests):
        list(engine.run())
        for request, tokens in zip(requests, wanted, strict=False):
            assert request.done and request.tokens == (tokens[: len(request.tokens)] if request.stopped else tokens)
            assert not request.stopped or request is requests[3]
        engine.step()
        jaxkv.check_invariants(engine.cache)
        assert engine.cache.is_empty and engine.cache.blocks_in_use == 0
        cache_manager = engine._cache_manager
        assert sorted(cache_manager._free_rows) == list(range(TIGHT["max_seqs"])) and not cache_manager.has_rows_to_free

    cut_anywhere(work, check, event, 400)
    assert engine.stats()["set_back"] > 0


def test_what_is_counted_is_what_is_held():
    """The host's count of blocks is the device's, or, where heads compete, no lower; when a step is sent, too."""
    for name, eviction in CASES.items():
        engine = jaxkv.Engine(Tiny(WINDOWS), evict=eviction, **TIGHT | MORE.get(name, {}))
        holdings, rows = engine._cache_manager.holdings, range(TIGHT["max_seqs"])

        def call(*step, engine=engine, call=engine._core.runner._call):
            assert not engine._cache_manager.has_rows_to_free
            return call(*step)

        engine._core.runner._call = call
        # The last one ends beside another, and nobody waits.
        for asked in ((1, 15), (14, 15), (22, 15)), ((14, 15), (1, 3)):
            for length, count in asked:
                engine.submit(list(range(length)), count)
            while engine._core.is_busy:
                engine.step()
                running = {s.row: s for s in engine._core.scheduler.running}
                counted = [0] * len(holdings.groups)
                for row in rows:
                    sequence = running.get(row, Sequence([], 0))
                    counted = np.add(counted, holdings.count_row_blocks(sequence.prompt, sequence.cached))
                if engine._cache_manager.has_rows_to_free:
                    continue
                used = [t.num_blocks - int(t.num_free) for t in engine.cache.tables]
                used = np.array([used[g] for g in holdings.groups])
                assert (counted >= used).all() if eviction.budget == "ada" else (counted == used).all(), name


def test_a_row_comes_back_into_the_blocks_of_one_that_has_ended():
    """They count as free at once, so they must be, though another sequence has that row by then."""
    sizes = dict(max_seqs=2, max_seq_len=30, block_size=3, num_blocks=10)
    cache_manager = jaxkv.Engine(Tiny((None,)), evict=Eviction("streaming_llm"), swap="always", **sizes)._cache_manager
    first, back, new = (Sequence([0] * 29, 30, prompt=29) for _ in range(3))

    def compute(sequence, count):
        cache_manager.cache = jaxkv.extend(cache_manager.cache, [count * (row == sequence.row) for row in range(2)])
        sequence.cached += count

    for sequence in (first, back):
        cache_manager.admit([], sequence)
        compute(sequence, 6)
    cache_manager.set_back(back)
    cache_manager.settle()
    compute(first, 21)
    cache_manager.retire(first)
    cache_manager.admit([], new)
    cache_manager.admit([new], back)
    assert (new.row, back.row, back.cached) == (0, 1, 6)
    assert cache_manager.cache.lengths.tolist() == [0, 6] and not cache_manager.cache.failed.any()


class Counted:
    """Rows of a cache whose blocks are only counted."""

    def __init__(self, holdings, config):
        self.holdings, self.config, self.living = holdings, config, []

    @property
    def available(self):
        held = [self.holdings.count_row_blocks(s.prompt, s.cached) for s in self.living]
        return [self.config.num_blocks - sum(blocks for (blocks,) in held)]

    may_have_more = False

    def must_follow(self, leader, sequence):
        return False

    def settle(self):
        pass

    def taken_by(self, sequence, count):
        return self.holdings.taken(sequence.prompt, sequence.cached, count)

    def until(self, sequence):
        return self.holdings.next_point(sequence.prompt, sequence.cached) - sequence.cached

    def has_room(self, running, sequence, source=None):
        (available,) = self.available
        growth = sum(self.holdings.growth(s.prompt, s.cached, s.length)[0] for s in [*running, sequence])
        return growth <= available

    def is_coming(self, running, sequence):
        return False

    def admit(self, running, sequence):
        sequence.row = 1
        self.living.append(sequence)

    def retire(self, sequence):
        self.living.remove(sequence)
        sequence.row, sequence.cached = None, 0

    set_back = retire


def test_more_rows_in_the_same_bytes():
    """At 25 % kept, at least 2.5 times as many rows at a time."""
    evict, most = Eviction("streaming_llm", 0.25, every=16), {}
    sizes = dict(max_seqs=60, max_seq_len=160, block_size=4, num_blocks=240)
    for keep in (1.0, 0.25):
        layers = Tiny((None,)).layer_configs
        config = jaxkv.CacheConfig(layers=layers if keep == 1.0 else evict.layer_configs(layers), **sizes)
        rows = Counted(Holdings(config) if keep == 1.0 else ThinnedHoldings(config, evict, (1,)), config)
        scheduler = Scheduler(rows, step_tokens=512)
        for _ in range(60):
            scheduler.waiting.add(Sequence([0] * 128, 160, prompt=128))
        most[keep] = 0
        while scheduler.waiting or scheduler.running:
            step = scheduler.plan()
            scheduler.stretch(step, 6)
            assert all(count <= rows.until(s) for s, count in step.counts.items())
            due = scheduler.commit(step)
            most[keep] = max(most[keep], len(scheduler.running))
            for sequence in due:
                sequence.tokens += [0] * sequence.unread
                sequence.unread = 0
                if len(sequence.tokens) == sequence.limit:
                    scheduler.finish(sequence)
    assert most[0.25] >= 2.5 * most[1.0] > 0, most


@skip_by_day
def test_thinning_copies_no_pool_and_reads_keys_of_one_row_at_a_time():
    eviction = CASES["heads compete"]
    layers = eviction.layer_configs(Tiny((None,)).layer_configs)
    config = jaxkv.CacheConfig(layers=layers, max_seqs=8, max_seq_len=64, num_blocks=4000, block_size=4)
    cache = jax.eval_shape(lambda: jaxkv.init(config))
    queries = (jax.ShapeDtypeStruct((8, 4, HEADS, DIM), jnp.float32),)
    run = jax.jit(functools.partial(thin_rows, eviction, (Queries(None, None, None),)), donate_argnums=0)
    jaxkv.testing.assert_no_copy(run, cache, jax.ShapeDtypeStruct((8,), bool), queries)


def test_scores_that_are_no_numbers_are_worth_least():
    cache = jaxkv.init(jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=4, max_seqs=1, max_seq_len=8))
    found = score_tokens(Eviction(lambda cache, layer: jnp.full((1, 8), np.nan).at[0, 2].set(1.0)), cache, 0, {})
    assert found.tolist() == [[-np.inf, -np.inf, 1.0] + [-np.inf] * 5]


BAD = [
    (dict(score="h2o"), "Eviction.score must be a function, hashable as functions are, or one of expected_attention"),
    (dict(score="h2o"), "not 'h2o': H2O's score is observed_attention."),
    (dict(score=["knorm"]), "hashable as functions are"),
    (
        dict(score=lambda x: 1),
        r"called as score\(cache, layer=i\), .* and <lambda> cannot be: got an unexpected keyword",
    ),
    (dict(score=lambda cache, layer, more: 1), "and <lambda> cannot be: missing a required argument: 'more'"),
    (dict(score=functools.partial(scores.snapkv, window_size=0)), "window_size of snapkv must be at least 1, not 0"),
    (dict(score="tova", by="head"), "Eviction.by='head' cannot be with tova, which is a mean over heads: by='layer'"),
    (dict(keep=0), "Eviction.keep, a number of tokens or a share below 1.0, must be at least 1, not 0"),
    (dict(keep=0.0), "Eviction.keep, a share, must be above 0, not 0.0"),
    (dict(keep=1.5), "Eviction.keep, a share, must be from 0|Eviction.keep, a share, must be at most 1"),
    (dict(keep=float("nan")), "Eviction.keep, a share, must be a finite number, not nan"),
    (dict(keep="0.5"), "Eviction.keep, a number of tokens or a share below 1.0, must be an integer"),
    (dict(keep=True), "must be an integer"),
    (dict(keep=10**30), "must be at most"),
    (dict(budget="fair"), "Eviction.budget must be 'uniform', 'pyramid' or 'ada', not 'fair'"),
    (dict(every=0), "Eviction.every must be at least 1, not 0"),
    (dict(queries=-1), "Eviction.queries must be at least 1, not -1"),
    (dict(by="token"), "Eviction.by must be 'layer', 'head' or None, not 'token'"),
    (dict(budget="ada", by="layer"), "has heads compete, which cannot be with by='layer'"),
    (dict(score="tova", budget="ada"), "which cannot be with tova, which says the same of all heads"),
]


@pytest.mark.parametrize(("fields", "why"), BAD)
def test_bad_evictions_are_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        Eviction(**{"score": "knorm"} | fields)


def test_a_share_is_no_number_of_tokens():
    """To Python 1.0 and 1 are equal, and programs are shared by what is equal."""
    share, number = Eviction("knorm", 1.0), Eviction("knorm", 1)
    assert share != number and share == Eviction("knorm", np.float32(1)) and number == Eviction("knorm", np.int64(1))
    assert "is_share" not in repr(share) and dataclasses.replace(share, keep=1) == number


def test_what_does_not_go_together_is_refused():
    evict = Eviction("knorm")
    for options, why in (
        (dict(evict="knorm"), r"evict must be a jaxkv.Eviction, such as Eviction\('snapkv', keep=0.25\), not 'knorm'"),
        (
            dict(evict=evict, prefix_cache=True),
            "prefix_cache= does not go with evict=, for a row with evicted tokens is",
        ),
        (dict(evict=evict, draft="ngram"), "draft= does not go with evict=, for draft tokens cannot be rolled back"),
        (dict(evict=evict, stacked=True), "evict frees blocks of a table of its own"),
        (
            dict(evict=evict, layout="contiguous", num_blocks=None, block_size=None),
            "evict frees blocks of a table of its own",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            jaxkv.Engine(Tiny(), **TIGHT | options)
    with pytest.raises(ValueError, match="evict= is for full-attention layers, and this model has none"):
        jaxkv.Engine(Tiny((3, 5)), evict=evict, **TIGHT)
    cache = jaxkv.init(jaxkv.CacheConfig.uniform(num_layers=1, num_kv_heads=2, head_dim=4, max_seqs=1, max_seq_len=8))
    with pytest.raises(
        ValueError, match=r"must return floats \[1, 2, 8\] or \[1, 8\], a score for each token that layer 0"
    ):
        score_tokens(Eviction(lambda cache, layer: cache.lengths), cache, 0, {})


def test_defaults_follow_the_score():
    assert {Eviction(s).layer_configs(Tiny().layer_configs)[0].evict for s in ALIKE} == {"layer"}
    assert [one.evict for one in Eviction("knorm").layer_configs(Tiny().layer_configs)] == ["head", None]
    sizes = {s: Eviction(s).num_queries(100) for s in ("knorm", "tova", "snapkv", "observed_attention")}
    assert sizes == {"knorm": 0, "tova": 1, "snapkv": 64, "observed_attention": 100}
    assert Eviction(snapkv).num_queries(100) == 4 and Eviction(snapkv, queries=9).num_queries(100) == 9


@skip_by_day
def test_queries_are_turned_back_for_scores_that_rotate_them_ahead():
    """A ring of rotated queries, YaRN's factor in them, gives those of the last tokens as they were, in their order."""
    rope, size, length = jaxkv.models.Rope(scaling="yarn", factor=4.0), 4, 6
    raw = np.random.default_rng(0).normal(size=(length, 2, 8)).astype(np.float32)
    noted = {}

    @jax.jit
    def turned_back(raw):
        with capture_queries() as found, capture_rotation(rope):
            q, _ = rope(raw, raw, jnp.arange(length))
            record_queries(0, q, 0.5)
        noted.update({0: found[0]._replace(q=None)})
        held = types.SimpleNamespace(lengths=jnp.array([length, length]), thinned=jnp.array([0, 1]))
        one = types.SimpleNamespace(lengths=jnp.array([length]), layer=lambda i: types.SimpleNamespace(tables=held))
        ring = jnp.zeros((size, 2, 8)).at[jnp.arange(2, length) % size].set(q[2:])
        options = _queries(Eviction("expected_attention"), one, 0, ring, found[0])
        assert options["rotate"] == found[0].rotate
        assert _queries(Eviction("snapkv"), one, 0, ring, found[0])["scale"] == 0.5
        return q, options["q"][0], options["num_tokens"]

    q, back, count = turned_back(raw)
    assert abs(float(np.linalg.norm(q) / np.linalg.norm(raw)) - rope.magnitude) < 1e-3 and rope.magnitude > 1.1
    np.testing.assert_allclose(back, raw[2:], atol=1e-5)
    assert count.tolist() == [size] and noted[0].rotate.both == rope


@skip_by_day
def test_a_model_of_flax_says_how_its_queries_are_rotated():
    model = jaxkv.models.small()
    engine = jaxkv.Engine(model, max_seqs=1, max_seq_len=64, evict=Eviction("expected_attention", 0.5, queries=8))
    assert [one.rotate.both for one in engine._runner._remembered.asked] == [
        block.attention.position_fn for block in model.layers
    ]
    with pytest.raises(
        ValueError, match="expected_attention rotates queries ahead, but how is only known of models of"
    ):
        jaxkv.Engine(Tiny(), evict=Eviction("expected_attention"), **TIGHT)


def test_rows_are_thinned_after_their_prompt_and_every_so_many_tokens():
    """Also those that are computed again, whose prompt is no longer all that is to be computed."""
    once, often = Eviction("knorm"), Eviction("knorm", every=5)
    lengths = (0, 9, 10, 14, 15, 21)
    assert [often.point_before(10, n) for n in lengths] == [0, 0, 10, 10, 15, 20]
    assert [often.point_after(10, n) for n in lengths] == [10, 10, 15, 15, 20, 25]
    assert [once.point_before(10, n) for n in lengths] == [0, 0, 10, 10, 10, 10]
    assert [once.point_after(10, n) for n in lengths] == [10, 10] + [float("inf")] * 4


def test_an_engine_says_how_many_blocks_its_heads_have():
    sizes = dict(max_seqs=1, max_seq_len=16, block_size=4, num_blocks=8)
    engine = jaxkv.Engine(jaxkv.models.small(), **sizes, evict=Eviction(snapkv, 0.5))
    blocks = max(engine.config.group_blocks)
    assert blocks > 8 and f"{blocks} of {blocks} blocks free" in repr(engine)
