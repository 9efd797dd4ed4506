"""Rows that go to another process: a real one, with a cache of other blocks over two devices, which is killed."""

import concurrent.futures
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._tiers import remote

SIZES = {"max_seqs": 3, "max_seq_len": 64, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
OTHER = """
import sys
import jax, numpy as np
import jaxkv, test_remote

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
cache = test_remote.make(mesh, block_size=4, num_blocks=48)
print(jaxkv.distributed.transfer_address(), flush=True)
source = sys.stdin.readline().strip()
cache, rows = jaxkv.receive(cache, [2, 0], source)
print(rows, cache.lengths.tolist(), flush=True)
jaxkv.send(cache, [2, 0], to=source)
sys.stdin.readline()
"""


def make(mesh=None, **options):
    return jaxkv.init(jaxkv.CacheConfig.uniform(**SIZES | options), mesh=mesh)


def filled():
    kv = np.random.default_rng(0).standard_normal((2, 2, 3, 20, 2, 8)).astype(np.float32)
    return jaxkv.append(make(), *jnp.asarray(kv, jnp.bfloat16), [20, 0, 7])


def test_there_and_back():
    """Another process puts rows into blocks of another size on two devices, and sends them back, equal to the bit."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER], env=environment, **pipes) as other:
        try:
            go_there_and_back(other)
        finally:
            other.kill()


def go_there_and_back(other):
    cache, empty = filled(), make(block_size=32)
    address = other.stdout.readline().strip()
    print(jaxkv.distributed.transfer_address(), file=other.stdin, flush=True)
    assert jaxkv.send(cache, [0, 2], to=address) is None
    assert other.stdout.readline().strip() == "[2, 0] [7, 0, 20]"
    with pytest.raises(ValueError, match="but rows names 1"):
        jaxkv.receive(empty, [1], address)
    back, rows = jaxkv.receive(empty, None, address)  # nothing is lost by a bad call
    assert rows == [0, 1] and back.lengths.tolist() == [20, 7, 0]
    for layer in range(2):
        for row, origin in ((0, 0), (1, 2)):
            found, wanted = jaxkv.gather(back, row, layer=layer), jaxkv.gather(cache, origin, layer=layer)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has sent nothing for 0\.5 s"):
        jaxkv.receive(empty, None, address, timeout=0.5)
    assert time.monotonic() - began < 5
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    with pytest.raises(ConnectionError, match="is gone, or was before it had sent all"):
        jaxkv.receive(empty, None, address, timeout=10)


def test_bad_calls():
    cache = make()
    with pytest.raises(ValueError, match="at= is for a cache"):
        jaxkv.send(cache, 0, to="127.0.0.1:1", at=1)
    with pytest.raises(ValueError, match="two caches, or one and an address, not int"):
        jaxkv.send(cache, 0, to=1)
    with pytest.raises(ValueError, match="source must be the transfer_address"):
        jaxkv.receive(cache, None, 1)
    for bad in ("nonsense", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"):
        with pytest.raises(ValueError, match=r"to must be the transfer_address of another process, host:port, not"):
            jaxkv.send(filled(), 0, to=bad)
        with pytest.raises(ValueError, match=r"source must be the transfer_address of another process, host:port, not"):
            jaxkv.receive(cache, None, bad)


def test_a_process_that_has_gone_before_is_no_wait():
    """It is not waited for until the timeout, and nothing is kept for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    for call in (lambda: jaxkv.receive(make(), None, gone), lambda: jaxkv.send(filled(), 0, to=gone)):
        with pytest.raises(ConnectionError, match=f"The process at {gone} is gone"):
            call()
    assert time.monotonic() - began < 20


def test_a_slow_connection_is_no_process_that_has_gone(monkeypatch):
    """Rows go there and come from there: JAX waits for it."""

    def connect(*_, timeout):
        assert timeout == remote.SECONDS_TO_CONNECT
        raise TimeoutError("timed out")

    own = jaxkv.distributed.transfer_address()
    monkeypatch.setattr(socket, "create_connection", connect)
    jaxkv.send(filled(), [0], to=own)
    cache, rows = jaxkv.receive(make(), None, own)
    assert rows == [0] and cache.lengths.tolist() == [20, 0, 0]


NEVER = "import jaxkv; print(jaxkv.distributed.transfer_address(), flush=True); input()"


def test_rows_for_a_process_that_goes_before_it_receives_are_forgotten(monkeypatch):
    """Until then they are kept."""
    kept, read_rows = [], remote.read_rows

    def read(*arguments):
        saved, tensors = read_rows(*arguments)
        kept.extend(weakref.ref(tensor) for tensor in tensors.values() if tensor.size)
        return saved, tensors

    monkeypatch.setattr(remote, "read_rows", read)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", NEVER], env=environment, **pipes) as other:
        try:
            address = other.stdout.readline().strip()
            for _ in range(2):
                jaxkv.send(filled(), [0, 2], to=address)
            gc.collect()
            assert kept and all(tensor() is not None for tensor in kept)
        finally:
            other.kill()
    end = time.monotonic() + 30
    while any(tensor() is not None for tensor in kept) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(tensor() is None for tensor in kept)


def test_errors_of_what_was_sent_begin_with_its_address():
    own = jaxkv.distributed.transfer_address()
    jaxkv.send(filled(), 0, to=own)
    with pytest.raises(jaxkv.CacheFileError, match=f"^Row 0 of {own} has 20 tokens, but max_seq_len = 16"):
        jaxkv.receive(make(max_seq_len=16, num_blocks=4), None, own)
    with pytest.raises(jaxkv.CacheFileError, match=f"^{own} has "):
        jaxkv.receive(make(head_dim=16), None, own)
    assert jaxkv.receive(make(), None, own)[1] == [0]


def test_threads_that_send_and_receive_at_once_lose_no_rows():
    """Each row that is sent comes once, whoever receives it; what nobody can use stays."""
    own, cache, empty = jaxkv.distributed.transfer_address(), filled(), make()
    lengths = []

    def send(row):
        for _ in range(4):
            jaxkv.send(cache, [row], to=own)

    def receive(_):
        for _ in range(4):
            with contextlib.suppress(jaxkv.CacheFileError):
                jaxkv.receive(make(head_dim=16), None, own, timeout=20)
            lengths.append(jaxkv.receive(empty, [1], own, timeout=20)[0].lengths.tolist()[1])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda call, x: call(x), (send, send, receive, receive), (0, 2, None, None)))
    assert sorted(lengths) == [7] * 4 + [20] * 4


def test_a_window_that_begins_in_a_larger_block_is_received_if_asked_for():
    """The error names what `receive` takes."""
    own = jaxkv.distributed.transfer_address()
    sizes = {"dtype": "int8", "residual_length": 8}
    kv = jnp.ones((2, 3, 20, 2, 8), jnp.bfloat16)
    cache, larger = jaxkv.append(make(block_size=8, **sizes), kv, kv, [20, 0, 0]), make(block_size=16, **sizes)
    jaxkv.send(cache, 0, to=own)
    with pytest.raises(jaxkv.CacheFileError, match=r"its blocks of 16 begin at 0.* with partial_windows=True"):
        jaxkv.receive(larger, None, own)
    received, rows = jaxkv.receive(larger, None, own, partial_windows=True)
    assert rows == [0] and received.lengths.tolist() == [20, 0, 0]
    for layer in range(2):
        found, wanted = (jaxkv.gather(x, 0, layer=layer) for x in (received, cache))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    jaxkv.check_invariants(received)
