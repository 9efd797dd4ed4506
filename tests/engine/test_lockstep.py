"""Two engines that share messages as two processes do, in one process: both compute the same, whatever happens."""

import contextlib
import dataclasses
import functools
import itertools
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checksum_model import VOCAB, Checksum, Divided, Placed, continuation
from host_worker import list_moves
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._core.state import multihost
from jaxkv._core.state.interrupts import hold_back_interrupts
from jaxkv._engine.hosts.channel import CHUNK, PIECE, Channel
from jaxkv._engine.hosts.replica import Replica

WINDOWS = (None,)
SIZES = {"max_seqs": 4, "max_seq_len": 48, "block_size": 8, "num_blocks": 12, "step_tokens": 16}
PROMPTS = [[2, 3], [4] * 9, [5, 6, 7], [4] * 9 + [1]]


class Store:
    """The store of a coordinator."""

    def __init__(self):
        self.values, self.changed, self.processes, self.tokens = {}, threading.Condition(), [0, 1], itertools.count()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, min(milliseconds, 50) / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: none")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(f"{key}/")}


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr("jaxkv._engine.frontend.engine.list_engine_processes", lambda model: found.processes)
    monkeypatch.setattr("jaxkv._engine.hosts.lockstep.check_agreement", lambda *_: None)
    monkeypatch.setattr("jaxkv._engine.hosts.channel.exchange", lambda *_: [f"t{next(found.tokens) // 2}"] * 2)
    monkeypatch.setattr("jaxkv._engine.hosts.channel.coordinator_store", lambda: found)
    return found


@pytest.fixture
def make_as_process(monkeypatch):
    """Makes something as another process would."""

    def make(number, call):
        with monkeypatch.context() as other:
            other.setattr(jax, "process_index", lambda: number)
            return call()

    return make


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
    sent = first._loop.channel
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shifted(Placed):
    """Says the token of a `Checksum` plus its parameter."""

    def __call__(self, tokens, *, cache, logits_at):
        logits, cache = self.model(tokens, cache=cache, logits_at=logits_at)
        return jnp.roll(logits, self.nothing.astype(jnp.int32), axis=-1), cache


def shift(by):
    return Shifted(jnp.array(by, jnp.float32), Checksum(WINDOWS))


@pytest.fixture
def follower():
    """Runs what the other process does in a thread; what that ends with is raised at the end."""
    threads, errors = [], []

    def start(call):
        def run():
            try:
                call()
            except Exception as error:
                errors.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not errors


def test_all_processes_go_on_with_other_weights(store, make_as_process, follower):
    """The first lends its memory to a trainer, the others leave `follow` for it; all give what they have trained."""
    first, other = (make_as_process(n, lambda: jaxkv.Engine(shift(0), **SIZES, prefix_cache=True)) for n in range(2))
    store.processes = []
    alone, ends = jaxkv.Engine(shift(0), **SIZES), []

    def train():
        while other.follow(until_release=True):
            ends.append("released")
            other.update(shift(len(ends)))

    follower(train)
    request = first.submit([4] * 9, 12)
    while len(request.tokens) < 3:
        first.step()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        first.update(shift(1))
    for by in (1, 2):
        first.release(parameters=by == 1)
        first.update(shift(by), restart=True)
        alone.update(shift(by))
        first.restore()
        assert request.result() == alone.submit([4] * 9, 12).result()
        request = first.submit([4] * 9, 12)
        first.step()
    first.close()
    while not other.is_closed:
        time.sleep(0.01)
    assert ends == ["released", "released"] and other.tokens == first.tokens


def test_an_update_that_fails_in_all_processes_ends_in_all(store, make_as_process, follower):
    """Else the others would give their older weights at the first one's next update."""
    first, other = (make_as_process(n, lambda: jaxkv.Engine(shift(0), **SIZES)) for n in range(2))

    def fail():
        raise KeyError("in an update")

    def train():
        assert other.follow(until_release=True)
        with pytest.raises(KeyError, match="in an update"):
            other._loop.update(fail)
        other.update(shift(1))
        assert other._loops[0].pipeline.leaves[0] == 1
        assert not other.follow()

    follower(train)
    first.release()
    with pytest.raises(KeyError, match="in an update"):
        first._loop.update(fail)
    first.update(shift(1))
    first.close()


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


def test_an_update_that_only_one_process_calls(pair):
    first, _, errors, thread = pair()
    first.update(Checksum(WINDOWS))
    thread.join(20)
    assert "Process 0 calls update, as all processes must: there call release before" in str(errors[0])


def test_an_update_that_only_the_others_call(store, make_as_process):
    first, other = (make_as_process(n, lambda: jaxkv.Engine(Checksum(WINDOWS), **SIZES)) for n in range(2))
    first.release()
    assert other.follow(until_release=True)
    with pytest.raises(ValueError, match="make another Engine for another model"):
        other.update(Checksum((None, 7)))
    first.restore()
    first.close()
    with pytest.raises(RuntimeError, match="update is a call of all processes, but process 0 has closed the engine"):
        other.update(Checksum(WINDOWS))
    assert not other.follow() and other.is_closed


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

    monkeypatch.setattr(engine._loop.cores, "advance", fail)


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


def test_a_step_that_is_cut_off_is_the_last(pair, monkeypatch):
    first, *_ = pair()
    first.submit([1, 2], 3)

    def cut():
        raise SystemExit

    monkeypatch.setattr(first._loop.cores, "advance", cut)
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
    monkeypatch.setattr(multihost, "_is_in_parts", lambda x: isinstance(x, jax.Array))
    multihost._gather_on.cache_clear()
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, multihost.read_whole(tree), jax.device_get(tree))
    assert multihost._gather_on(NamedSharding(mesh, PartitionSpec()))._cache_size() == 1


def test_messages_are_read_in_order_and_forgotten(store, make_as_process):
    """Long ones in pieces; the store keeps few of them."""
    first, other = Channel([0, 1]), make_as_process(1, lambda: Channel([0, 1]))
    long = "x" * (2 * PIECE + 5)
    first.send({"call": long})
    assert other.receive() == {"call": long}
    for i in range(4 * CHUNK):
        first.send({"call": i})
        assert other.receive()["call"] == i
    assert len(store.values) < 3 * CHUNK
    with pytest.raises(TimeoutError, match="gave no sign for 1 s"):
        other.receive(timeout=1)
    first.close()
    first.close()
    for _ in range(2):
        assert other.receive(timeout=20) == {"call": "close"}
    other.close()
    assert other.is_closed and not other._thread.is_alive()
    for _ in range(2 * CHUNK):
        with pytest.raises(RuntimeError, match="This engine is closed"):
            first.send({"call": "late"})


def test_messages_are_received_while_nobody_asks(store, make_as_process):
    """They come before the end, of which is heard again and again."""
    first, other = Channel([0, 1]), make_as_process(1, lambda: Channel([0, 1]))
    for i in range(3):
        first.send({"call": i})
    until = time.monotonic() + 20
    while other._heard.qsize() < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert other._heard.qsize() == 3
    other.close()
    assert not other._thread.is_alive()
    assert [other.receive(timeout=20)["call"] for _ in range(5)] == [0, 1, 2, "close", "close"]
    first.close()


def test_a_process_that_leaves_waits_no_longer(store, make_as_process, follower):
    """Its thread ends with the wait that it is in, before Python does."""
    other, heard = make_as_process(1, lambda: Channel([0, 1])), []
    follower(lambda: heard.append(other.receive()))
    other.close()
    assert not other._thread.is_alive() and other.is_closed
    assert other.receive(timeout=20) == {"call": "close"}


def test_nothing_is_sent_behind_the_last_message(store, make_as_process, monkeypatch):
    """What another thread puts there meanwhile keeps neither `close` nor the others waiting."""
    first, other = Channel([0, 1]), make_as_process(1, lambda: Channel([0, 1]))
    go, put = threading.Event(), store.key_value_set

    def put_slowly(key, value):
        assert go.wait(20)
        put(key, value)

    monkeypatch.setattr(store, "key_value_set", put_slowly)
    first.send({"call": "early"})
    closing = threading.Thread(target=first.close, daemon=True)
    closing.start()
    while not first.is_closed or first._queue.qsize() < 2:
        time.sleep(0.001)
    first._queue.put('{"call":"late"}')  # as a `send` that has looked before
    go.set()
    closing.join(20)
    assert not closing.is_alive()
    assert [other.receive(timeout=20)["call"] for _ in range(3)] == ["early", "close", "close"]
    other.close()


def test_messages_go_together_while_the_store_is_slow(store, make_as_process, monkeypatch):
    """A put of it takes as long as a small step: what comes meanwhile waits for no put of its own."""
    first, other = Channel([0, 1]), make_as_process(1, lambda: Channel([0, 1]))
    begun, go, put, puts = threading.Event(), threading.Event(), store.key_value_set, []

    def put_slowly(key, value):
        begun.set()
        assert go.wait(20)
        puts.append(key)
        put(key, value)

    monkeypatch.setattr(store, "key_value_set", put_slowly)
    for i in range(9):
        first.send({"call": f"{i}\n"})
        assert begun.wait(20)
    go.set()
    assert [other.receive()["call"] for _ in range(9)] == [f"{i}\n" for i in range(9)]
    assert len(puts) == 2

    def fail(*_):
        raise TimeoutError("nobody reads")

    monkeypatch.setattr(store, "key_value_set", fail)
    with pytest.raises(TimeoutError, match="nobody reads"):
        for _ in range(2 * CHUNK):
            first.send({"call": "lost"})
    first.close()
    other.close()


def test_a_coordinator_that_is_gone(store, make_as_process, monkeypatch):
    other = make_as_process(1, lambda: Channel([0, 1]))

    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")

    monkeypatch.setattr(store, "blocking_key_value_get", fail)
    with pytest.raises(RuntimeError, match="Process 0, from which this engine is used, cannot be reached any more"):
        other.receive()


@pytest.fixture
def interruptible():
    """Python's own handler: a process in the background is started with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt), hold_back_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("first")
    with pytest.raises(KeyboardInterrupt), hold_back_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("second")
        signal.raise_signal(signal.SIGINT)  # who asks twice does not wait
        done.append("never")
    assert done == ["first", "second"]
