"""Two processes of two devices each with one cache over all four: real ones, on this machine, and some are killed."""

import json
import pathlib
import random
import re
import signal
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker
from checksum_model import Checksum, Placed, continuation
from hybrid_model import SEEN
from nightly import NIGHTLY
from started import ended, last_words, said, start

import jaxkv
import jaxkv.distributed
from jaxkv._files import safetensors

FILE = pathlib.Path(worker.__file__)


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
    processes = start(FILE, tmp_path, 0)
    texts = ended(processes)
    for text in texts:
        assert said(text, "tables") == [str(worker.tables(alone))], text
        assert said(text, "described") == ["{'step': 8}"]
        assert "those of process 1 are not those of process 0: give each the same" in said(text, "config")[0], text
        assert [x.split(" on ")[0] for x in said(text, "refused")] == ["send takes caches"]
        assert said(text, "swapped") == ["True"]
        assert said(text, "kept") == ["{'step': 8}"]  # no file has changed where a part could not be written
    assert said(texts[1], "save")[0].startswith("FileNotFoundError")
    assert "Process 1 could not save its part" in said(texts[0], "save")[0]
    assert last_words(texts[0]).startswith("jaxkv: process 0 ends, because process 1 is gone"), texts[0]
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL]
    assert_served_together(texts, tmp_path)
    # Into another number of processes, and from it.
    for name in ("two", "from one"):
        assert_rows(jaxkv.load(tmp_path / name), alone)
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["from one"] * 3 + ["one", "served"] + ["two"] * 3
    damaged(tmp_path / "two")


def assert_served_together(texts, folder):
    """Requests of process 0 have their tokens; the other process follows, and is told where to submit."""
    wanted = [continuation((None,), prompt, 12, None) for prompt in worker.PROMPTS]
    assert said(texts[0], "tokens") == [str(wanted)]
    assert said(texts[0], "cancelled") == ["cancelled"] and said(texts[0], "left") == ["True"]
    assert int(said(texts[0], "bytes")[0]) < 4096 and said(texts[0], "released") == ["True"]
    assert said(texts[0], "updated") == ["error"] and said(texts[1], "released here") == ["True"]  # it adds NaN
    wanted = [continuation(SEEN, prompt, 12, None) for prompt in (*worker.PROMPTS, [4] * 9 + [1])]
    assert said(texts[0], "states") == [str(wanted)] and said(texts[0], "went on") == ["True"]
    (refused,) = said(texts[1], "not here")
    assert "used from process 0, and this is process 1: call engine.follow() here" in refused
    assert said(texts[1], "followed") == ["Engine(closed)"]
    assert sum(jaxkv.describe(folder / "served" / "engine").lengths) > 10


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


@pytest.fixture
def clock(monkeypatch):
    """The time of watches, in which sleep passes, and with what they end their process."""
    now, exits = [0.0], []

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("jaxkv.distributed._exit", exits.append)
    monkeypatch.setattr("jaxkv.distributed.os._exit", exits.append)
    monkeypatch.setattr("jaxkv.distributed.time.monotonic", lambda: now[0])
    monkeypatch.setattr("jaxkv.distributed.time.sleep", sleep)
    monkeypatch.setattr("jaxkv.distributed.atexit.register", lambda _: None)
    monkeypatch.setattr("sys.excepthook", lambda *_: None)
    return now, exits


def test_the_watch_tells_who_is_gone_from_who_has_ended(clock):
    now, exits = clock
    store = Store(_1="7", _2="3", _3="1")
    watch = jaxkv.distributed._Watch(store, 0, 4, 5.0)
    for now[0], beat, exit_ in [(0, "7", 0), (3, "8", 0), (6, "8", 0), (6.6, "8", 1)]:
        store.said |= {"jaxkv/beats/1": beat, "jaxkv/beats/2": f"{now[0]}", "jaxkv/beats/3": f"{now[0]}"}
        watch._look(store.said)
        assert len(exits) == exit_
    why = "process 1 is gone: it has given no sign for 4 s"
    assert exits == [why] and store.said["jaxkv/beats/0"] == f"lost {why}"
    jaxkv.distributed._Watch(store, 2, 4, 5.0)._look(store.said)  # says the same, whatever it sees itself
    assert exits[1:] == [why]
    store = Store(_1="ended", _2="failed with ValueError: so", _3="1")
    watch = jaxkv.distributed._Watch(store, 0, 4, 5.0)
    watch._look(store.said)
    assert exits[2:] == ["process 2 failed with ValueError: so"] and 1 not in watch.heard
    never = jaxkv.distributed._Watch(Store(), 0, 2, 5.0)  # nobody has come since JAX knew all
    now[0] += 4
    never._look({})
    assert exits[3:] == ["process 1 is gone: it has given no sign for 4 s"]
    with pytest.raises(ValueError, match="patience must be at least 2"):
        jaxkv.distributed.initialize(patience=1.5)


def test_where_the_coordinator_is_gone_whoever_was_silent_first_is_named(clock):
    """Process 0 may have ended for another one, which a process that is starved of its processor has not read."""
    now, _ = clock
    store = Store(_0="1", _1="1", _2="1")
    watch = jaxkv.distributed._Watch(store, 1, 3, 5.0)
    watch._look(store.said)
    assert watch.explain_unreachable().startswith("process 0, which coordinates")
    for beat, why in (2, "process 0, which coordinates"), (3, "process 2 is gone: it had given no sign for 2 s when"):
        now[0] += 1
        store.said["jaxkv/beats/0"] = str(beat)
        watch._look(store.said)
        assert watch.explain_unreachable().startswith(why)


def test_an_error_of_the_device_is_a_failure_once_all_others_gave_a_sign(clock, monkeypatch):
    """Until then it may be another process that is gone, of which a transport hears first."""
    now, exits = clock
    store = Store(_1="1", _2="1")
    watch = jaxkv.distributed._Watch(store, 0, 3, 5.0)
    watch._look(store.said)
    alive = [1, 2]

    def sleep(seconds):
        now[0] += seconds
        store.said |= {f"jaxkv/beats/{p}": f"{now[0]}" for p in alive}
        if seconds < jaxkv.distributed.BEAT:  # not the last ones of this process
            watch._look(store.said)

    monkeypatch.setattr("jaxkv.distributed.time.sleep", sleep)
    error = RuntimeError("a step")
    error.__cause__ = jax.errors.JaxRuntimeError("Connection reset by peer")
    watch.failed(RuntimeError, error, None)
    assert store.said["jaxkv/beats/0"] == "failed with RuntimeError: a step" and not exits
    assert now[0] < 1
    watch.end()  # what was said first stays, and it waits for nobody
    assert store.said["jaxkv/beats/0"] == "failed with RuntimeError: a step" and exits == [1]
    alive.remove(1)
    store.said["jaxkv/beats/1"] = "given before it went, and read after the error"
    watch.is_over = False
    watch.failed(RuntimeError, error, None)
    assert exits[1] == "process 1 is gone: it has given no sign for 4 s"
    assert store.said["jaxkv/beats/0"].startswith("lost process 1")


def test_the_sentence_has_a_line_of_its_own(monkeypatch):
    """Also where another thread was in the middle of a traceback when the process had to end."""
    written, codes = [], []
    monkeypatch.setattr(jaxkv.distributed.os, "write", lambda file, text: written.append((file, text.decode())))
    monkeypatch.setattr(jaxkv.distributed.os, "_exit", codes.append)
    jaxkv.distributed._exit("process 1 is gone")
    ((file, text),) = written
    last = last_words(f"  File engine.py, line 3\n      ^^^^{text}")
    assert last.startswith("jaxkv: process 0 ends, because process 1")
    assert (file, codes) == (2, [1])


@pytest.mark.skipif(not NIGHTLY, reason="each device has its programs to compile")
def test_an_engine_in_each_process(tmp_path):
    """Of one mesh; one is killed, and another process goes on with what it has saved."""
    texts = ended(start(FILE, tmp_path, -1))
    wanted = [[continuation((None,), [i, *prompt], 12, None) for prompt in worker.PROMPTS] for i in range(2)]
    for text in texts:
        assert said(text, "engine") == ["[2, True]"], text
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
        processes = start(FILE, tmp_path, last)
        if kills < 20:
            while not said(processes[0].text, "begins"):
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 10))
            victim = draw.randrange(2)
            processes[victim].send_signal(signal.SIGKILL)
            began, kills = time.monotonic(), kills + 1
            texts = ended(processes)
            assert time.monotonic() - began < 6 + 2  # patience, and what a busy machine takes to end a process
            survivor = 1 - victim
            assert processes[survivor].returncode
            assert last_words(texts[survivor]).startswith(
                f"jaxkv: process {survivor} ends, because process {victim}"
            ), texts[survivor]
        else:
            texts = ended(processes, 600)
        lines = [said(text, "tables") for text in texts]
        for one, other in zip(*lines, strict=False):
            assert one == other
        if all(said(text, "ended") for text in texts):
            break
    alone = worker.after(jaxkv.init(worker.config()), range(last))
    assert_rows(jaxkv.load(tmp_path / "many"), alone)
