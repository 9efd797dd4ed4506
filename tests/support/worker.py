"""One of two processes with two devices each; what it finds out, it prints. Run by test_processes.py."""

import gc
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
from checksum_model import Checksum, Divided, Placed, continuation
from hybrid_model import Hybrid
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
import jaxkv.distributed
from jaxkv._core.state.multihost import put_replicated

PROMPTS = [[2, 3], [4] * 9, [5, 6, 7], [8] * 5]
ENGINE = {"max_seqs": 4, "max_seq_len": 48, "block_size": 8, "num_blocks": 18, "step_tokens": 16}
ROWS, LONGEST, SAVED_EVERY = 3, 24, 20
SIZES = {"max_seqs": ROWS, "max_seq_len": LONGEST, "num_blocks": 18, "block_size": 4, "dtype": "float32"}


def config(**fields):
    layer = jaxkv.LayerConfig(num_kv_heads=4, head_dim=4)
    few = jaxkv.LayerConfig(num_kv_heads=2, head_dim=4)  # on four devices whole on each
    return jaxkv.CacheConfig(layers=(layer, few), **SIZES | fields)


@jax.jit
def step(cache, leave, k, v, counts):
    """Some rows leave, and tokens come. All have room: failures are not saved."""
    return jaxkv.append(jaxkv.free(cache, leave | (cache.lengths > LONGEST - 4)), k, v, counts)


def arguments(number):
    """What step `number` is called with; the same in every process."""
    rng = np.random.default_rng(number)
    kv = [[rng.standard_normal((ROWS, 4, heads, 4)).astype(np.float32) for heads in (4, 2)] for _ in "kv"]
    return rng.random(ROWS) < 0.2, *kv, rng.integers(0, 4, ROWS, np.int32)


def after(cache, numbers):
    for number in numbers:
        cache = step(cache, *arguments(number))
    return cache


def tables(cache):
    return [np.asarray(x).tolist() for x in (cache.lengths, cache.tables[0].tables, cache.tables[0].refcounts)]


def say(name, value=""):
    print(f"{name}: {value}", flush=True)


def everything(mesh, folder, process):
    cache = jaxkv.init(config(), mesh=mesh)
    cache = after(cache, range(8))
    jaxkv.check_invariants(cache)
    say("tables", tables(cache))
    jaxkv.save(folder / "two", cache, model="m", metadata={"step": 8})
    say("described", jaxkv.describe(folder / "two").metadata)
    loaded = jaxkv.load(folder / "one", into=jaxkv.init(config(), mesh=mesh))
    jaxkv.save(folder / "from one", loaded)
    for name, call in {
        "config": lambda: jaxkv.init(config(num_blocks=18 + process), mesh=mesh),
        "save": lambda: jaxkv.save(folder / f"{'none/' * process}two", cache),
    }.items():
        try:
            call()
        except (ValueError, OSError) as error:
            say(name, f"{type(error).__name__} {error}")
    try:
        jaxkv.send(cache, 0, to=cache)
    except ValueError as error:
        say("refused", error)
    row = int(np.argmax(cache.lengths))
    empty, host = jaxkv.swap_out(cache, row)  # each process keeps its own shards
    say("swapped", int(empty.lengths[row]) == 0 < host.num_tokens and tables(jaxkv.swap_in(empty, row, host)) != [])
    say("kept", jaxkv.describe(folder / "two").metadata)
    serve_together(mesh, folder, process)
    serve_states(mesh, folder, process)
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    after(cache, range(9, 10**6))  # until the watch ends it


def serve_together(mesh, folder, process):
    """One engine of both processes, whose devices have a head each."""
    engine = jaxkv.Engine(placed(Divided((None,)))(mesh), **ENGINE)
    if process:
        try:
            engine.submit([1], 2)
        except RuntimeError as error:
            say("not here", error)
        say("released here", engine.follow(until_release=True))
        engine.update(placed(Divided((None,)), np.nan)(mesh))  # and takes all steps before the first process does
        engine.follow()
        say("followed", engine)
        return
    requests = [engine.submit(prompt, 12) for prompt in PROMPTS]
    heard = []

    def leave(request, token):
        heard.append(token)
        request.cancel()

    left = engine.submit([9, 9], 12, on_token=leave)
    for _ in range(5):
        engine.step()
    (folder / "served").mkdir()
    engine.save(folder / "served" / "engine")
    requests[1].cancel()
    say("cancelled", requests[1].ended)
    requests[1] = engine.submit(PROMPTS[1], 12)
    channel, sent = engine._core.channel, engine._core.channel.num_bytes
    engine.step()
    say("bytes", channel.num_bytes - sent)
    for _ in engine.run():
        pass
    say("left", left.ended == "cancelled" and heard == [continuation((None,), [9, 9], 1, None)[0], None])
    say("tokens", [request.tokens for request in requests])
    again = engine.submit(PROMPTS[0], 12)
    for _ in range(4):
        engine.step()
    engine.release(keep=True)  # in all processes
    is_released = engine.is_released
    engine.restore()
    say("released", is_released and again.result() == requests[0].tokens)
    engine.release()
    engine.update(placed(Divided((None,)), np.nan)(mesh))
    engine.restore()
    again = engine.submit(PROMPTS[0], 12)
    list(engine.run())
    say("updated", again.ended)
    engine.close()


def serve_states(mesh, folder, process):
    """One engine of both processes, with a layer that keeps states; a prompt begins where another ended. What was saved
    goes on."""
    engine = jaxkv.Engine(placed(Hybrid())(mesh), **ENGINE | {"max_seqs": 2}, prefix_cache=True)
    if process:
        engine.follow()
        return
    for request in (requests := [engine.submit(prompt, 12) for prompt in (*PROMPTS, [4] * 9 + [1])]):
        request.result()
    say("states", [request.tokens for request in requests])
    first = engine.submit(PROMPTS[1], 12)
    for _ in range(5):
        engine.step()
    engine.save(folder / "served" / "states")
    list(engine.run())
    (again,) = engine.load(folder / "served" / "states")
    begun = len(again.tokens)
    list(engine.run())
    say("went on", 0 < begun < 12 and again.tokens == first.tokens)
    engine.close()


def served(folder, process):
    """An engine in each process, on a mesh of all devices, serves what is submitted there; one is killed at work."""
    model, devices = placed(Checksum((None,))), np.array(jax.devices())
    engine = jaxkv.Engine(model(Mesh(devices, ("data",))), **ENGINE)
    held = {d.id for x in jax.tree.leaves(engine.cache) for d in x.devices()}
    say("engine", [len(engine._cores), held == {d.id for d in jax.local_devices()}])
    requests = [engine.submit([process, *prompt], 12) for prompt in PROMPTS]
    for _ in range(5):
        engine.step()
    engine.save(folder / f"engine {process}")
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in engine.run():
        pass
    say("tokens", [request.tokens for request in requests])
    time.sleep(60)  # until the watch ends it


def placed(model, added=0):
    """What makes a model on a mesh, to whose keys and logits a parameter is added."""
    return lambda mesh: Placed(put_replicated(np.float32(added), NamedSharding(mesh, PartitionSpec())), model)


def many(mesh, folder, last):
    """Steps to the last, from what was saved; killed by whoever started it."""
    path, cache, first = folder / "many", jaxkv.init(config(), mesh=mesh), 0
    if path.exists():
        cache, first = jaxkv.load(path, into=cache), jaxkv.describe(path).metadata["step"]
    say("begins", first)
    for number in range(first, last):
        if number > first and number % SAVED_EVERY == 0:
            jaxkv.save(path, cache, metadata={"step": number})
        cache = after(cache, [number])
        time.sleep(0.2)  # so that all kills come before the end
        say("tables", tables(cache))
    jaxkv.save(path, cache, metadata={"step": last})
    say("ended")


if __name__ == "__main__":
    gc.set_threshold(20_000, 10, 10)  # what tracing makes is in no cycles
    process, port, folder, last = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
    jaxkv.distributed.initialize(f"127.0.0.1:{port}", 2, process, patience=6)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    if last < 0:
        served(folder, process)
    else:
        many(mesh, folder, last) if last else everything(mesh, folder, process)
