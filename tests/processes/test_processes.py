"""Two processes of two devices each with one cache over all four: real ones, on this machine, and some are killed."""

import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
import worker
from checksum_model import Checksum, Placed, continuation
from nightly import NIGHTLY

import jaxkv
import jaxkv.distributed
from jaxkv._files import safetensors

FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
FILE = pathlib.Path(worker.__file__)


def start(folder, last=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxkv.__file__).parents[1])}
    environment["XLA_FLAGS"] = f"{FLAGS} --xla_llvm_disable_expensive_passes=true"
    return [Process(i, [port, folder, str(last)], environment) for i in range(2)]


class Process(subprocess.Popen):
    """One of them, and what it has printed so far."""

    def __init__(self, number, arguments, environment):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it is read to the end)
        command = [sys.executable, FILE, str(number), *arguments]
        super().__init__(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    @property
    def text(self):
        return os.pread(self.log.fileno(), 2**28, 0).decode()


def ended(processes, seconds=300):
    """What each has printed. None is left behind."""
    texts = []
    try:
        for process in processes:
            process.wait(timeout=seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            texts.append(process.text)
            process.log.close()
    return texts


def said(text, name):
    return re.findall(rf"^{name}: (.*)$", text, re.MULTILINE)


def assert_rows(cache, other):
    """Equal lengths and tokens."""
    assert cache.lengths.tolist() == other.lengths.tolist()
    for row in range(worker.ROWS):
        for layer in range(2):
            for x, y in zip(jaxkv.gather(cache, row, layer=layer), jaxkv.gather(other, row, layer=layer), strict=True):
                np.testing.assert_array_equal(x, y)


def test_one_cache_over_two_processes(tmp_path):
    """Steps, files, a config that is another, a part that cannot be written, and a process that is killed."""
    alone = worker.after(jaxkv.init(worker.config()), range(8))
    jaxkv.save(tmp_path / "one", alone)
    processes = start(tmp_path)
    texts = ended(processes)
    for text in texts:
        assert said(text, "tables") == [str(worker.tables(alone))], text
        assert said(text, "described") == ["{'step': 8}"]
        assert "those of process 1 are not those of process 0: give each the same" in said(text, "config")[0], text
        assert [x.split(" on ")[0] for x in said(text, "refused")] == [
            f"{f} takes caches" for f in ("swap_out", "send")
        ]
        assert said(text, "kept") == ["{'step': 8}"]  # no file has changed where a part could not be written
    assert said(texts[1], "save")[0].startswith("FileNotFoundError")
    assert "Process 1 could not save its part" in said(texts[0], "save")[0]
    assert re.search(r"jaxkv: process 0 ends, because process 1 is gone", texts[0]), texts[0]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL]
    # Into another number of processes, and from it.
    for name in ("two", "from one"):
        assert_rows(jaxkv.load(tmp_path / name), alone)
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == ["from one"] * 3 + ["one"] + ["two"] * 3
    damaged(tmp_path / "two")


def damaged(path):
    """A manifest and its parts are checked."""
    part = next(p for p in path.parent.iterdir() if p.name.endswith(".1") and p.name.startswith("two."))
    whole = part.read_bytes()
    part.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(jaxkv.DamagedFile, match="is damaged: tensor"):
        jaxkv.load(path)
    part.unlink()
    with pytest.raises(jaxkv.DamagedFile, match=r"A part of .* is not beside it"):
        jaxkv.load(path)
    part.write_bytes(whole)
    manifest = path.read_bytes()
    path.write_bytes(manifest.replace(b'"shards"', b'"shardz"'))
    with pytest.raises(jaxkv.DamagedFile, match="its header is not what its checksum says"):
        jaxkv.load(path)
    path.write_bytes(manifest)
    _, fields, _ = safetensors.read_all(path)
    parts = json.loads(fields["parts"])
    for wrong in (
        {"shards": "x"},
        {"shards": str(10**12)},
        {"parts": "{}"},
        {"parts": json.dumps({f"../{path.parent.name}/{name}": own for name, own in parts.items()})},
        {"parts": json.dumps({name: [0] for name in parts})},
        {"parts": json.dumps({name: ["a", 0] for name in parts})},
        {"cache": json.dumps({"config": {}})},
    ):
        header = safetensors.header({"checksums": (np.dtype(np.uint32), (1,))}, fields | wrong)
        safetensors.write(path, {"checksums": np.array([zlib.crc32(header)], np.uint32)}, fields | wrong)
        with pytest.raises(jaxkv.CacheFileError, match=r"cannot be read by this version|do not make a whole"):
            jaxkv.load(path)
    path.write_bytes(manifest)
    jaxkv.load(path)


class Store:
    """What the processes have said."""

    def __init__(self, **said):
        self.said = {f"jaxkv/beats/{name[1:]}": text for name, text in said.items()}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.said[key] = value

    def key_value_dir_get(self, key):
        return list(self.said.items())


def test_the_watch_tells_who_is_gone_from_who_has_ended(monkeypatch):
    now, exits = [0.0], []
    monkeypatch.setattr("jaxkv.distributed._exit", exits.append)
    monkeypatch.setattr("jaxkv.distributed.time.monotonic", lambda: now[0])
    monkeypatch.setattr("jaxkv.distributed.atexit.register", lambda _: None)
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    store = Store(_1="7", _2="3")
    watch = jaxkv.distributed._Watch(store, 0, 4, 5.0)  # process 3 has not begun
    for now[0], one, exit_ in [(0, "7", 0), (4, "8", 0), (8, "8", 0), (9.5, "8", 1)]:
        store.said |= {"jaxkv/beats/1": one, "jaxkv/beats/2": f"{now[0]}"}
        watch._look(store.said)
        assert len(exits) == exit_
    assert exits == ["process 1 is gone: it has given no sign for 6 s"]
    store.said["jaxkv/beats/1"] = "ended"
    now[0] += 100
    store.said["jaxkv/beats/2"] = "failed with ValueError: so"
    watch._look(store.said)
    assert exits[1:] == ["process 2 failed with ValueError: so"] and 1 not in watch.heard
    watch.failed(KeyError, KeyError("x"), None)
    watch.end()  # what was said first stays
    assert store.said["jaxkv/beats/0"] == "failed with KeyError: 'x'"
    with pytest.raises(ValueError, match="patience must be at least 2"):
        jaxkv.distributed.initialize(patience=1.5)


@pytest.mark.skipif(not NIGHTLY, reason="each device has its programs to compile")
def test_an_engine_in_each_process(tmp_path):
    """Of one mesh; one is killed, and another process goes on with what it has saved."""
    texts = ended(start(tmp_path, -1))
    wanted = [[continuation((None,), [i, *prompt], 12, None) for prompt in worker.PROMPTS] for i in range(2)]
    for text in texts:
        assert said(text, "engine") == ["[2, True]"], text
        assert "has no part of the mesh axis 'data' to itself" in said(text, "refused")[0]
    assert said(texts[0], "tokens") == [str(wanted[0])] and not said(texts[1], "tokens")
    assert re.search(r"jaxkv: process 0 ends, because process 1 is gone", texts[0]), texts[0]
    engine = jaxkv.Engine(Placed(jnp.zeros(()), Checksum((None,))), **worker.ENGINE)
    requests = engine.load(tmp_path / "engine 1")
    assert sum(jaxkv.describe(tmp_path / "engine 1").lengths) > 10
    for _ in engine.run():
        pass
    assert [request.tokens for request in requests] == wanted[1]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not NIGHTLY, reason="processes are started again and again")
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """1,000 steps; one of the two is killed, twenty times, and the others end with a sentence in good time."""
    draw, last, kills = random.Random(0), 1000, 0
    while True:
        processes = start(tmp_path, last)
        if kills < 20:
            while not said(processes[0].text, "begins"):
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 10))
            victim = draw.randrange(2)
            processes[victim].send_signal(signal.SIGKILL)
            began, kills = time.monotonic(), kills + 1
            texts = ended(processes)
            assert time.monotonic() - began < 30
            survivor = 1 - victim
            assert processes[survivor].returncode
            assert f"jaxkv: process {survivor} ends, because process {victim}" in texts[survivor], texts[survivor]
        else:
            texts = ended(processes, 600)
        lines = [said(text, "tables") for text in texts]
        for one, other in zip(*lines, strict=False):
            assert one == other
        if all(said(text, "ended") for text in texts):
            break
    alone = worker.after(jaxkv.init(worker.config()), range(last))
    assert_rows(jaxkv.load(tmp_path / "many"), alone)
