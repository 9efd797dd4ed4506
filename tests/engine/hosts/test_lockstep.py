"""Two engines that share messages as two processes do, in one process: both compute the same, whatever happens."""

import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import VOCAB, Checksum, Divided, Placed, continuation
from host_worker import list_moves
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._core.state import multihost
from jaxkv._engine.hosts.replica import Replica

WINDOWS = (None,)
SIZES = {"max_seqs": 4, "max_seq_len": 48, "block_size": 8, "num_blocks": 12, "step_tokens": 16}
PROMPTS = [[2, 3], [4] * 9, [5, 6, 7], [4] * 9 + [1]]


@pytest.fixture
def pair(store, make_as_process):
    """Makes an engine of the first process and one that follows it; what that ends with is raised at the end."""
    started = []

    def make(**options):
        def engine():
            return jaxkv.Engine(Checksum(WINDOWS), **SIZES | options)

        first, other, errors = engine(), make_as_process(1, engine), []

        def follow():
            try:
                other.follow()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        started.append((first, thread))
        return first, other, errors, thread

    yield make
    for first, thread in started:
        first.close()
        thread.join(20)
        assert not thread.is_alive()


def tables(engine):
    """What the other engine has, once it has made the call that this is."""
    return [np.asarray(x).tolist() for t in engine.cache.tables for x in (t.lengths, t.tables, t.refcounts)]


def test_the_other_process_computes_the_same(pair):
    """With prefixes, samples, stops, a request that leaves, one whose callback fails: the schedule is one."""
    first, other, errors, thread = pair(prefix_cache=True, num_blocks=9)
    same = [first.submit(prompt, 12, n=2) for prompt in PROMPTS]

    def fail(request, token):
        raise KeyError("no")

    failed = first.submit([9, 8], 12, on_token=fail)
    wanted = continuation(WINDOWS, [8, 9], 12, None)
    stopped = first.submit([8, 9], 12, stop=[wanted[3:5]])
    left = first.submit([7] * 5, 20)
    for _ in range(4):
        first.step()
    left.cancel()
    assert left.ended == "cancelled"
    for _ in first.run():
        pass
    for request, prompt in zip(same, PROMPTS, strict=True):
        assert [sample.tokens for sample in request.samples] == [continuation(WINDOWS, prompt, 12, None)] * 2
    assert stopped.tokens == wanted[:3] and stopped.ended == "stop"
    assert failed.ended == "error" and "KeyError" in failed.error
    assert first.prefix.pin(PROMPTS[1]) == 8 == first.prefix.known(PROMPTS[1] + [0] * 8)
    first.prefix.unpin(PROMPTS[1])
    with pytest.raises(AttributeError, match="has no 'insert' for its users: it has pin, unpin and"):
        _ = first.prefix.insert
    sent = first._core.channel
    assert sent.num_bytes < 256 * sent.num_messages
    last = tables(first)
    counts = first.stats()
    first.close()
    for change in (first.prefix.pin, first.prefix.unpin):
        with pytest.raises(RuntimeError, match="This engine is closed"):
            change(PROMPTS[1])
    thread.join(20)
    assert not errors and other.is_closed
    assert [other.steps, other.tokens, other.set_back] == [counts["steps"], counts["tokens"], counts["preemptions"]]
    assert sum(last[0]) == 0


def test_who_is_not_first_is_told_to_follow(pair):
    first, other, *_ = pair()
    for call in (lambda: other.submit([1], 2), other.step, lambda: next(other.run()), lambda: other.cache, other.reset):
        with pytest.raises(RuntimeError, match=r"used from process 0, and this is process 1: call engine\.follow"):
            call()
    with pytest.raises(RuntimeError, match="this one submits requests"):
        first.follow()
    with pytest.raises(ValueError, match="serve_prefill is for an engine in one process"), first.serve_prefill():
        pass
    with other, pytest.raises(ValueError, match=r"disk= is for an Engine in one process"):  # a `with` does no harm
        jaxkv.Engine(Checksum(WINDOWS), **SIZES, prefix_cache=True, spill_bytes=10**6, disk="folder")


def test_a_request_that_begins_anew_has_the_scores_of_its_prompt():
    """As `update(restart=True)` has it: what is computed for the replica is the user's."""
    with jaxkv.Engine(Checksum(WINDOWS), **SIZES) as engine:
        request = engine.submit([5, 6, 7], 2, prompt_logprobs=True)
        replica = Replica(request.params, number=0, prompt=[5, 6, 7], limit=2, news={})
        replica.join(request, engine.cancel)
        for first in (-1, -2):
            assert request.prompt_logprobs.size == 0
            replica.scores.note(0, np.array([first, -3], np.float32))
            assert request.prompt_logprobs.tolist() == [first, -3]
            replica.restart()


def test_processes_must_agree_on_what_is_evicted(store, monkeypatch):
    said = []
    monkeypatch.setattr("jaxkv._engine.hosts.lockstep.check_agreement", lambda what, text, _: said.append(text))
    for keep in (0.5, 0.5, 0.25):
        jaxkv.Engine(Checksum(WINDOWS), **SIZES, evict=jaxkv.Eviction("knorm", keep, by="layer")).close()
    assert said[0] == said[1] != said[2]
    for kernel_size in (3, 3, 5):  # an option of the score
        score = functools.partial(jaxkv.scores.snapkv, window_size=8, kernel_size=kernel_size)
        said.append(repr(jaxkv.Eviction(score).plain_fields))
    assert said[3] == said[4] != said[5]
    jaxkv.Engine(Checksum(WINDOWS), **SIZES).close()
    jaxkv.Engine(Checksum(WINDOWS), **SIZES, logits_hook=lambda logits, rows: logits).close()
    assert said[6] != said[7]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Next(Checksum):
    """Says the token + 1, with a cache or without."""

    def __call__(self, tokens, *, cache, logits_at=None):
        logits = jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)
        if cache is not None:
            kv = jnp.zeros((*tokens.shape, 1, 1))
            cache = jaxkv.write(cache, kv, kv, layer=0)
            logits = logits[:, 0] if tokens.ndim == 2 else logits[logits_at]
        return logits, cache


def test_what_was_chosen_is_computed_again_in_all_processes(store, make_as_process, follower):
    def engine():
        return jaxkv.Engine(Next(WINDOWS), **SIZES, logits_hook=lambda logits, rows: jnp.roll(logits, 2, axis=-1))

    first, other = (make_as_process(n, engine) for n in range(2))
    follower(other.follow)
    output = first.submit([5, 7], 3).result()
    assert first.recompute([5, 7], output) == output == [10, 13, 16]
    refused = pytest.raises(ValueError, match="recompute where requests have hook_args is for an engine in one process")
    with refused:
        first.recompute([5, 7], output, hook_args=1)
    assert first.recompute([5, 7], output) == output, "nothing has changed"
    first.submit([5, 7], 3, hook_args=1).cancel()
    with refused:
        first.recompute([5, 7], output)
    first.close()


def fails(engine, monkeypatch):
    """Has the steps of an engine fail, in one of the processes."""

    def fail():
        raise KeyError("in a step")

    monkeypatch.setattr(engine._core.core, "advance", fail)


def test_an_error_in_all_processes_ends_no_process(pair, monkeypatch):
    """A step that fails everywhere alike is raised where the engine is used, and both go on."""
    first, other, errors, thread = pair()
    fails(first, monkeypatch), fails(other, monkeypatch)
    first.submit([1, 2], 3)
    for _ in range(2):
        with pytest.raises(KeyError, match="in a step"):
            first.step()
    first.close()
    thread.join(20)
    assert not errors and other.is_closed


@pytest.mark.parametrize("who", [0, 1])
def test_processes_that_part_say_so(pair, monkeypatch, who):
    *both, errors, thread = pair()
    fails(both[who], monkeypatch)
    both[0].submit([1, 2], 3)
    for _ in range(2):
        with contextlib.suppress(KeyError):
            both[0].step()
    thread.join(20)
    ends = ["ended well", "ended well"]
    ends[who] = "raised KeyError"
    assert f"in process 0 a step {ends[0]}, and in process 1 it {ends[1]}" in str(errors[0])


def test_an_update_that_only_one_process_calls(pair):
    first, _, errors, thread = pair()
    first.update(Checksum(WINDOWS))
    thread.join(20)
    assert "Process 0 calls update, as all processes must: there call release before" in str(errors[0])


def test_a_step_that_is_cut_off_is_the_last(pair, monkeypatch):
    first, *_ = pair()
    first.submit([1, 2], 3)

    def cut():
        raise SystemExit

    monkeypatch.setattr(first._core.core, "advance", cut)
    with pytest.raises(SystemExit):
        first.step()
    with pytest.raises(RuntimeError, match="A step of this engine was cut off here"):
        first.step()


def test_a_checkpoint_goes_on_in_one_process_and_back(pair, store, tmp_path):
    first, *_ = pair()
    requests = [first.submit(prompt, 12, n=2) for prompt in PROMPTS]
    for _ in range(5):
        first.step()
    first.save(tmp_path / "engine")
    first.close()
    wanted = [continuation(WINDOWS, request.prompt, 12, None) for request in requests for _ in range(2)]
    store.processes = []
    alone = jaxkv.Engine(Checksum(WINDOWS), **SIZES)
    store.processes = [0, 1]
    loaded = alone.load(tmp_path / "engine")
    for _ in range(3):
        alone.step()
    alone.save(tmp_path / "alone")
    again, other, errors, thread = pair()
    loaded = again.load(tmp_path / "alone")
    for _ in again.run():
        pass
    assert sorted(request.tokens for request in loaded) == sorted(wanted)
    again.close()
    thread.join(20)
    assert not errors and other.tokens == again.tokens


def test_a_step_has_no_collective_that_it_has_not_in_one_process(monkeypatch):
    """Messages go beside the devices. Programs of several processes differ in that what hosts read is whole."""
    mesh = Mesh(np.array(jax.devices()[:2]), ["model"])
    place = NamedSharding(mesh, PartitionSpec())

    def compile_step():
        model = Placed(jax.device_put(jnp.zeros(()), place), Divided((None,)))
        return list_moves(jaxkv.Engine(model, **SIZES))

    alone = compile_step()
    monkeypatch.setattr("jaxkv._engine.runner.device_cache.find_shared_placement", lambda mesh: place)
    assert compile_step() == alone and alone


def test_what_is_saved_again_and_again_is_gathered_by_one_program(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:2]), ["model"])
    halves = NamedSharding(mesh, PartitionSpec("model"))
    tree = {"states": [jax.device_put(jnp.arange(4.0) + i, halves) for i in range(3)], "lengths": np.arange(3)}
    monkeypatch.setattr(multihost, "is_local", lambda tree: False)  # as with a mesh of two processes
    monkeypatch.setattr(multihost, "_is_divided", lambda x: isinstance(x, jax.Array))
    multihost._gather_on.cache_clear()
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, multihost.read_whole(tree), jax.device_get(tree))
    assert multihost._gather_on(NamedSharding(mesh, PartitionSpec()))._cache_size() == 1
