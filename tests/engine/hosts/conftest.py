"""Two processes in one: they share the store of a coordinator, and the second runs in a thread."""

import itertools
import threading

import jax
import pytest


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
