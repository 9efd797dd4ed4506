"""The messages of a first process to the others: in order, in pieces, few in the store, and an end that all hear of."""

import threading
import time

import jax
import pytest

from jaxkv._engine.hosts.channel import CHUNK, PIECE, Channel


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
    begun, go, put = threading.Event(), threading.Event(), store.key_value_set

    def put_slowly(key, value):
        begun.set()
        assert go.wait(20)
        put(key, value)

    monkeypatch.setattr(store, "key_value_set", put_slowly)
    first.send({"call": "early"})
    assert begun.wait(20)  # else it may go together with what `close` sends
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
