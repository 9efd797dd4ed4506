"""What the host does for a step does not follow the lengths of prompts; and what begins alike is computed once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from checksum_model import LONGEST, Checksum, continuation

import jaxkv
from jaxkv._engine.programs.draft_model import DraftRow
from jaxkv._engine.requests.common_beginning import block_hashes, count_common_blocks
from jaxkv._engine.requests.scheduler import Sequence
from jaxkv._tiers.prefix_cache import prefix_cache as prefixes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Next:
    """Says token + 1, and attends to nothing: what is left is the engine's own work."""

    windows: tuple[int | None, ...] = (None,)
    dtype = "float32"

    @property
    def layer_configs(self):
        return tuple(jaxkv.LayerConfig(num_kv_heads=1, head_dim=2, window=window) for window in self.windows)

    def __call__(self, tokens, cache, logits_at):
        kv = jnp.broadcast_to(tokens.astype(jnp.float32)[..., None, None], (*tokens.shape, 1, 2))
        for layer in range(len(self.windows)):
            cache = jaxkv.write(cache, kv, kv, layer=layer)
        logits = jax.nn.one_hot((tokens + 1) % 97, 97)
        return (logits[:, 0] if tokens.ndim == 2 else logits[logits_at]), cache


class Watched(list):
    """A list that counts how many of its items are looked at."""

    looked_at = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Watched.looked_at += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):
        Watched.looked_at += len(self)
        return super().__iter__()

    def __eq__(self, other):
        Watched.looked_at += len(self)
        return super().__eq__(other)

    __hash__ = None


def watch(engine, monkeypatch):
    """Count what is looked at of all tokens from now on."""

    def read_tokens(tokens):
        Watched.looked_at += len(tokens)
        return read(tokens)

    read = prefixes.read_tokens
    monkeypatch.setattr(prefixes, "read_tokens", read_tokens)
    for sequence in engine._core.open.values():
        sequence.tokens = Watched(sequence.tokens)
    Watched.looked_at = 0


def test_host_work_is_flat_in_the_lengths_of_prompts(monkeypatch):
    """One decodes, and one that begins like it waits for blocks."""
    size, long = 512, 100_000
    engine = jaxkv.Engine(
        Next(), max_seqs=4, max_seq_len=2**18, block_size=size, num_blocks=360, prefix_cache=True, step_tokens=2**15
    )
    known = [i % 97 for i in range(long)]
    running, beside = engine.submit(known, 200), engine.submit([11] * (long // 5), 200)
    while not (running.tokens and beside.tokens):
        engine.step()
    waiting = engine.submit(known + [5] * (long // 5 * 4), 200)
    another = engine.submit([7] * long, 10)
    for _ in range(3):
        engine.step()
    scheduler = engine._core.scheduler
    assert len(scheduler.running) == 2 and len(scheduler.waiting) == 2, "they wait for blocks"
    with monkeypatch.context() as patch:
        watch(engine, patch)
        for _ in range(20):
            engine.step()
        assert Watched.looked_at < 20 * 100, "a few tokens a step, of 400,000"
    running.cancel()
    list(engine.run())
    assert waiting.tokens == [(6 + i) % 97 for i in range(200)]
    assert another.tokens == [(8 + i) % 97 for i in range(10)]
    assert engine.stats()["tokens_saved"] > 0, "of what the cancelled one had computed"


def test_chunks_of_a_long_prompt_are_offered_once(monkeypatch):
    """Each time costs work for all that is there."""
    engine = jaxkv.Engine(Next(), max_seqs=2, max_seq_len=2**12, block_size=16, prefix_cache=True, step_tokens=64)
    looked_at = []
    for length in (500, 1000, 2000, 4000):
        request = engine.submit([length % 97] * length, 1)
        engine.step()
        with monkeypatch.context() as patch:
            watch(engine, patch)
            list(engine.run())
            looked_at.append(Watched.looked_at)
        assert request.done
    for length, count in zip((500, 1000, 2000, 4000), looked_at, strict=True):
        assert count <= 6 * length


def test_chunks_of_a_windowed_prompt_are_looked_at_once(monkeypatch):
    """Each is offered as it is computed, before its blocks leave the window: what was offered is not walked again."""
    engine = jaxkv.Engine(
        Next((None, 40)), max_seqs=2, max_seq_len=2**13, block_size=8, prefix_cache=True, step_tokens=64
    )
    work = []
    for length in (1000, 8000):
        request, seen = engine.submit([length % 97] * length, 1), []
        engine.step()
        with monkeypatch.context() as patch:
            watch(engine, patch)
            index = engine.prefix._index
            for owner, name in ((index, "_child"), (index.ends, "holds"), (index.ends, "_sort")):
                patch.setattr(owner, name, functools.partial(note, getattr(owner, name), seen))
            list(engine.run())
            assert Watched.looked_at <= 8 * length
        assert request.done
        work.append(len(seen) / length)
        engine.prefix.check_invariants(engine.cache)
    assert work[1] <= 1.5 * work[0], "a token of a long prompt costs no more than one of a short one"
    again = engine.submit([8000 % 97] * 8000 + [1], 1)
    list(engine.run())
    assert again.done and engine.stats()["tokens_saved"] >= 8000 - 8


def note(function, seen, *arguments):
    seen.append(0)
    return function(*arguments)


def test_a_draft_compares_only_what_is_new():
    held, tokens = DraftRow(), Watched(range(10_000))
    for _ in range(5):
        held.follow(tokens)
        held.count, held.guesses = len(tokens), [1, 2, 3]
        tokens += [1, 2, 9]
        Watched.looked_at = 0
        held.follow(tokens)
        assert len(held) == len(tokens) - 1 and Watched.looked_at < 20
    held.count, held.guesses = len(tokens), [1, 2, 3]
    held.follow(tokens[:50] + [7] * 9)
    assert len(held) == 50
    held.follow([*held.tokens, 5])
    assert len(held) == 50, "the last is fed again, and what was never held too"


def test_common_blocks_are_those_of_equal_tokens():
    one = Sequence([1, 2, 3, 4, 5, 6, 7], 20)
    others = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 5, 6], [2, 2, 3, 4], [1], [1, 2, 3, 4]]
    assert [count_common_blocks(one, Sequence(o, 20), 2) for o in others] == [3, 1, 0, 0, 2]
    assert count_common_blocks(one, Sequence(one.tokens, 20, salt="a"), 2) == 0
    assert len(block_hashes(one, 2)) == 3
    one.tokens.append(8)
    assert count_common_blocks(one, Sequence(others[0], 20), 2) == 4


@pytest.fixture(scope="module")
def engine():
    return jaxkv.Engine(
        Checksum((None,)), max_seqs=8, max_seq_len=LONGEST, block_size=4, num_blocks=64, prefix_cache=True,
        step_tokens=256,
    )  # fmt: skip


def serve(engine, prompts, **options):
    """How many tokens are computed for prompts that are submitted at once."""
    before = engine.tokens
    requests = [engine.submit(prompt, 1, **options) for prompt in prompts]
    list(engine.run())
    for request in requests:
        assert request.tokens == continuation((None,), request.prompt, 1, None)
    return engine.tokens - before


def test_what_begins_alike_at_once_is_computed_once(engine):
    begin = list(range(1, 33))
    assert serve(engine, [[*begin, i, 5] for i in range(8)]) == 32 + 8 * 2
    begin = list(range(40, 72))
    assert serve(engine, [[*begin[: 8 * (i % 4 + 1)], i, 5] for i in range(8)]) == 32 + 8 * 2, "parts of it, too"
    assert serve(engine, [[*range(50, 80), i] for i in range(8)], salt="a") == 28 + 8 * 3


def test_who_shares_nothing_or_is_more_urgent_does_not_wait(engine):
    engine.reset()
    begin = list(range(33, 65))
    requests = [engine.submit([*begin, i], 2, priority=-i) for i in range(3)] + [engine.submit([9] * 33, 2)]
    engine.step()
    assert sorted(s.request.number - requests[0].number for s in engine._core.scheduler.running) == [2, 3]
    list(engine.run())
    requests = [engine.submit([*begin[::-1], i], 2, salt=f"{i}") for i in range(3)]
    engine.step()
    assert len(engine._core.scheduler.running) == 3
    list(engine.run())


def test_who_waits_for_a_prompt_that_is_cancelled_goes_on_alone(engine):
    engine.reset()
    begin = list(range(7, 40))
    requests = [engine.submit([*begin, i], 2) for i in range(3)]
    engine.step()
    requests[0].cancel()
    list(engine.run())
    for request in requests[1:]:
        assert request.tokens == continuation((None,), request.prompt, 2, None)


def test_what_a_running_one_has_generated_is_shared_too(engine):
    engine.reset()
    first = engine.submit(list(range(3, 20)), 20)
    while len(first.tokens) < 12:
        engine.step()
    before = engine.tokens
    second = engine.submit([*first.prompt, *first.tokens[:12], 1], 1)
    list(engine.run())
    assert second.tokens == continuation((None,), second.prompt, 1, None)
    assert engine.tokens - before <= 8 + 1 + 2 + 1, "what one has left, and two of the other's 30"
